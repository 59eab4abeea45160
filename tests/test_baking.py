"""Baking: least squares against numpy's own, the whole network against itself, and what stays as it
is.
"""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.baking import bake
from retrofit.errors import RetrofitError, UsageError
from retrofit.layers import BatchNormalNorm2d, LayerNormalNorm, MigratedGroupNorm, StrengthMixin
from tests.export.networks import converted, images, norm


@pytest.mark.parametrize("to", ["ln-pn", "ln", "dbnn", "lnn"])
def test_baked_layers_stand_at_strength_0_and_the_report_says_what_changed(to: str) -> None:
    model = converted(to)
    before = copy.deepcopy(model)
    found, report = bake(model, images(), tolerance=10.0)
    assert found is model
    baked = {layer.name for layer in report.layers if layer.baked}
    assert baked
    for name, layer in model.named_modules():
        if isinstance(layer, StrengthMixin):
            assert float(layer.strength) == (
                0 if name in baked else float(before.get_submodule(name).strength)
            ), name
    judged = torch.cat(images())[1::2]
    wanted, got = before(judged).detach(), model(judged).detach()
    change = (got - wanted).square().mean() / (wanted - wanted.mean(0)).square().mean()
    assert report.chosen.error == pytest.approx(float(change.sqrt()), rel=1e-3)
    assert report.chosen.top1_agreement == pytest.approx(
        float((got.argmax(1) == wanted.argmax(1)).float().mean())
    )
    assert report.images == (8, 8)


def test_each_layer_makes_up_for_the_ones_before_it() -> None:
    """Constants are the least squares: the second layer's, from what the first gives baked to what
    it gave before.
    """
    first, second = (MigratedGroupNorm(2, 4, strength=1.0).requires_grad_(False) for _ in range(2))
    model = nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(4 * 36, 3)).eval()
    data = torch.cat(images(16, 6))[:, [0, 1, 2, 0]] * torch.tensor([1.0, 2.0, 0.5, 1.5]).view(
        4, 1, 1
    )
    before, wanted = first(data[::2]), model[:3](data[::2])
    _, report = bake(model, [data], tolerance=10.0)
    after = first(data[::2])
    drifted = after.relu()
    got = second(drifted)
    left = []
    for channel in range(4):
        for maps in ((data[::2], before, after), (drifted, wanted, got)):
            x, y, z = (values[:, channel].double().flatten().numpy() for values in maps)
            line = np.polyval(np.polyfit(x, y, 1), x)
            np.testing.assert_allclose(z, line, rtol=0, atol=1e-5)
        left.append(((y - line) ** 2).mean())
    spread = wanted - wanted.mean((0, 2, 3), keepdim=True)
    assert report.layers[1].error == pytest.approx(
        (np.mean(left) / float(spread.square().mean())) ** 0.5, rel=1e-4
    )


def test_within_the_tolerance_as_many_layers_as_were_found() -> None:
    model = converted("ln")
    everything = bake(copy.deepcopy(model), images(), tolerance=10.0)[1].chosen
    _, report = bake(model, images(), tolerance=0.5 * everything.error)
    assert 0 < report.chosen.layers < everything.layers
    assert report.chosen.error <= report.tolerance
    assert report.chosen.layers == max(
        one.layers for one in report.stages if one.error <= report.tolerance
    )
    assert {layer.reason for layer in report.layers if not layer.baked} == {"costs too much"}
    errors = {
        layer.baked: [one.error for one in report.layers if one.baked == layer.baked]
        for layer in report.layers
    }
    assert (
        max(errors[True]) <= report.chosen.threshold < min(errors[False])
    )  # the errors of this choice
    assert [one.threshold for one in report.stages] == sorted(
        one.threshold for one in report.stages
    )


def test_refused_and_left_as_it_was() -> None:
    model = converted("ln")
    before = copy.deepcopy(model.state_dict())
    for given, options, message in (
        (
            images(),
            {"tolerance": 1e-6},
            r"changes the output by .* more than 1e-06; raise `tolerance`",
        ),
        (images(), {"tolerance": 0}, "`tolerance` must be more than 0"),
        (images(), {"tolerance": math.inf}, "`tolerance` must be more than 0, not inf"),
        (None, {}, "`images` or `inputs`; give one of them"),
        ([images()[0][:3]], {}, "3 images cannot be fitted and judged on"),
        ([torch.zeros(8, 3, 32, 32)], {}, "the network answers all images alike"),
        (
            [torch.zeros(8, 5, 32, 32)],
            {},
            "does not answer such images with tensors of one row an image",
        ),
    ):
        with pytest.raises(UsageError if "must" in message else RetrofitError, match=message):
            bake(model, given, **options)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(RetrofitError, match="holds no converted layer"):
        bake(nn.Linear(2, 2), images())
    with pytest.raises(RetrofitError, match=r"bake `model.float\(\)`"):
        bake(copy.deepcopy(model).half(), images())
    retrofit.set_strength(model, 0.0)
    with pytest.raises(RetrofitError, match=r"no layer can be baked: .* is at strength 0 already"):
        bake(model, images())


def test_norms_whose_weight_and_bias_are_not_theirs_alone_stay() -> None:
    first, second = norm(8), nn.BatchNorm2d(8)
    second.weight, second.bias = first.weight, first.bias
    for norms, reason in (
        ((first, second), "shares its parameters with another layer"),
        ((first, first), "is called 2 times"),
        ((BatchNormalNorm2d(8, affine=False), second), "has no weight and bias of its own"),
    ):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norms[0], nn.Conv2d(8, 8, 3), norms[1])
        with pytest.raises(RetrofitError, match=reason):
            bake(model, images(), tolerance=10)


class Reading(nn.Sequential):  # reads a tensor of its norm besides
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1000 * self.get_parameter("1.bias").abs().sum()


def test_code_that_reads_what_is_baked_counts() -> None:
    model = Reading(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU()).eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RetrofitError, match=r"changes the output by .*more than 10;"):
        bake(model, images(), tolerance=10.0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class TokensFirst(nn.Sequential):  # a transformer's layer on (tokens, images, channels)
    def forward(self, x: Tensor) -> Tensor:
        patches, norm, head = self
        return head(norm(patches(x).flatten(2).permute(2, 0, 1)).relu().mean(0))


def test_layers_that_hold_no_images_in_their_first_dimension_are_not_fitted() -> None:
    model = TokensFirst(nn.Conv2d(3, 8, 8, 8), LayerNormalNorm(8), nn.Linear(8, 5)).eval()
    with pytest.raises(RetrofitError, match="1 does not hold the images in its first dimension"):
        bake(model, images(), tolerance=10)
