"""BatchNorm and its activation to EvoNorm-S0 and to FRN with a thresholded linear unit."""

from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d, EvoNorm2dS0, FilterResponseNormTlu2d
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit.errors import RetrofitError, UsageError
from tests.graph.blocks import TwoConsumers
from tests.surgery.networks import Shared, trained

RIVALS = {"evonorm-s0": EvoNorm2dS0, "frn-tlu": FilterResponseNormTlu2d}
BOTH = pytest.mark.parametrize("to", RIVALS)


@BOTH
def test_norm_and_activation_become_one(to: str) -> None:
    model, report = retrofit.convert(trained(Shared(), low=-1), to)
    norms = [(type(norm), norm.apply_act) for norm in (model.bn1, model.bn2, model.bn4, model.bn3)]
    assert norms == [*[(RIVALS[to], True)] * 3, (RIVALS[to], False)]
    fates = dict.fromkeys(("relu#0", "relu6#0", "relu#1"), f"part of {RIVALS[to].__name__}")
    assert {row.name: row.fate for row in report.plan.edits} == {**fates, "relu#2": "(left)"}
    x = torch.randn(2, 3, 6, 6)
    y = model.bn1(model.conv(x))
    torch.testing.assert_close(
        model(x), F.relu(model.bn3(y) + model.bn4(model.bn2(y * 2 - 1) * 2 - 1))
    )
    assert report.strength is None
    assert any("not its source's function" in note for note in report.notes)


@BOTH
def test_a_network_built_in_inference_mode(to: str) -> None:
    state = {}
    for built_in in (torch.inference_mode(), torch.enable_grad()):
        torch.manual_seed(0)
        with built_in:
            model = Shared()
        state[built_in] = retrofit.convert(model, to)[0].state_dict()
    torch.testing.assert_close(*state.values())


@BOTH
def test_a_network_that_was_not_trained_gets_timms_own_values(to: str) -> None:
    model, _ = retrofit.convert(Shared(), to)
    for layer in (model.bn1, model.bn3):
        fresh = RIVALS[to](8, apply_act=layer.apply_act)
        for name, value in fresh.named_parameters():
            torch.testing.assert_close(layer.get_parameter(name), value, rtol=1e-4, atol=1e-4)
        assert [name for name, _ in layer.named_buffers()] == (
            ["setting_groups"] if to == "evonorm-s0" else []
        )


def with_moments(norm: Any, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Scale and shift values until their moments over some dimensions are a norm's running ones."""
    mean, var = (s.double().view(1, -1, 1, 1) for s in (norm.running_mean, norm.running_var))
    return (x - x.mean(dims, True)) / x.std(dims, correction=0, keepdim=True) * var.sqrt() + mean


def test_frn_is_the_source_on_maps_whose_mean_square_is_the_running_one() -> None:
    source = trained(nn.Sequential(nn.Identity(), nn.BatchNorm2d(8), nn.ReLU()), low=-1)
    x = with_moments(source[1], torch.randn(3, 8, 64, 64, dtype=torch.float64), (2, 3))
    expected = source.double()(x)
    model, _ = retrofit.convert(source, "frn-tlu")
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_evonorm_without_activation_is_the_source_exactly() -> None:
    source, x = (
        trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), low=-1),
        torch.randn(2, 3, 9, 9),
    )
    expected = source(x)
    torch.testing.assert_close(
        retrofit.convert(source, "evonorm-s0")[0](x), expected, rtol=1e-5, atol=1e-5
    )


def test_evonorm_keeps_swish_where_nothing_is_shifted_and_its_mean_elsewhere() -> None:
    source = trained(nn.Sequential(nn.Identity(), nn.BatchNorm2d(8), nn.SiLU()), low=-1)
    source[1].bias.data[:4] = (
        source[1].weight * source[1].running_mean / source[1].running_var.sqrt()
    )[:4]
    x = with_moments(source[1], torch.randn(4, 8, 64, 64, dtype=torch.float64), (0, 2, 3))
    expected = source.double()(x)
    model, _ = retrofit.convert(source, "evonorm-s0", groups=1)
    found = model(x)
    # the deviation of a sample's groups from the running one is all that is left
    torch.testing.assert_close(found[:, :4], expected[:, :4], rtol=0.03, atol=0.01)
    torch.testing.assert_close(
        found.mean((0, 2, 3)), expected.mean((0, 2, 3)), rtol=0.03, atol=0.01
    )
    assert not torch.allclose(found[:, 4:], expected[:, 4:], rtol=0.03, atol=0.01)


@BOTH
def test_tensors_are_moved_and_the_rest_carried(to: str) -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act_layer=nn.ReLU)))
    source = model[1].requires_grad_(False)
    weight, bias = source.weight, source.bias
    model, report = retrofit.convert(model.double(), to, check=False)
    new = model[1]
    assert new.weight is weight
    assert new.bias is bias
    assert new.apply_act
    assert not new.training
    assert all(not p.requires_grad and p.dtype == torch.float64 for p in new.parameters())
    assert set(new.state_dict()) == {
        "weight",
        "bias",
        *(("v", "setting_groups") if to == "evonorm-s0" else ("tau",)),
    }
    assert report.params_after == report.params_before + 8


@BOTH
def test_affine_less_and_meta(to: str) -> None:
    with torch.device("meta"):
        meta = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.ReLU())
    meta, _ = retrofit.convert(meta, to)
    assert isinstance(meta[1].weight, nn.Parameter)
    assert all(p.is_meta for p in meta.parameters())


@BOTH
@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()), "no running statistics"),
        ((nn.Flatten(2), nn.BatchNorm1d(8), nn.ReLU()), "maps, (N, C, H, W), alone"),
        ((BatchNormAct2d(8, act_layer=nn.ReLU, drop_layer=nn.Dropout2d),), "a dropout between"),
        ((BatchNormAct2d(8, act_layer=nn.Softmax),), "not known to be elementwise"),
    ],
)
def test_what_is_left_alone_and_why(to: str, layers: tuple[nn.Module, ...], reason: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *layers)
    rows = retrofit.plan(model, to).layers
    assert [row.status for row in rows] == ["converted", "unsupported"]
    assert reason in rows[1].reason


def test_groups_are_evonorms_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24))
    (row,) = retrofit.plan(model, "evonorm-s0").layers
    assert row.options == {"apply_act": False, "groups": 24}
    assert row.reason == "24 groups: 32 do not divide 24 channels"
    assert retrofit.plan(model, "evonorm-s0", group_channels=8).layers[0].options["groups"] == 3
    with pytest.raises(UsageError, match="`groups='auto'` means nothing"):
        retrofit.plan(model, "evonorm-s0", groups="auto")


@BOTH
def test_taking_in_nothing_is_refused(to: str) -> None:
    with pytest.raises(RetrofitError, match=r"would convert no activation|nothing to convert"):
        retrofit.plan(TwoConsumers(), to)


class Twice(nn.Sequential):  # calls its norm at two places
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x)) + self[0](x)


class Loop(nn.Sequential):  # over the data, which no trace follows
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Loop, self).forward(sample[None]) for sample in x])


@BOTH
def test_what_follows_has_to_be_known(to: str) -> None:
    for model, reason in (
        (
            Twice(nn.BatchNorm2d(8), nn.ReLU()),
            "at several places, and an activation follows at some of them",
        ),
        (Loop(nn.BatchNorm2d(8), nn.ReLU()), "what follows it is unknown: "),
    ):
        with pytest.raises(RetrofitError, match=reason):
            retrofit.plan(model, to)
