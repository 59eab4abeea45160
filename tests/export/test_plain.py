"""Plain networks: the same function, of layers that the libraries have, to train on."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

import retrofit
from retrofit import layers
from retrofit.errors import RetrofitError

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
ALLOWED = {"ConstantAffine", "Pointwise"}  # no parameters; a convolution


def network(name: str) -> nn.Module:
    """A network whose statistics and affines are not the first ones."""
    torch.manual_seed(0)
    if name.startswith("tv:"):
        model = getattr(torchvision.models, name[3:])(num_classes=5)
    else:
        model = timm.create_model(name, num_classes=5)
    for module in model.modules():
        if hasattr(module, "running_mean"):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return model


def ours(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if type(module).__module__.startswith("retrofit")}


def close(one: nn.Module, other: nn.Module, x: torch.Tensor = X) -> None:
    with torch.no_grad():
        a, b = one.eval()(x), other.eval()(x)
    assert (a - b).abs().max() <= 1e-5 * a.abs().max()


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "tv:resnet18"])
@pytest.mark.parametrize(
    ("to", "strength"),
    [*((to, t) for to in ("gn", "ln", "gn-pn", "ln-pn") for t in (0.0, 1.0)), ("frozen", None)],
)
def test_batch_independent_targets(name: str, to: str, strength: float | None) -> None:
    model, _ = retrofit.convert(network(name), to)
    if strength is not None:
        retrofit.set_strength(model, strength)
    before = copy.deepcopy(model.state_dict())
    plain = retrofit.plain(model)
    close(model, plain)
    assert ours(plain) <= ALLOWED
    assert not [key for key in plain.state_dict() if "running" in key or "strength" in key or "setting" in key]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    optimizer = torch.optim.SGD(plain.parameters(), 1e-3)
    first = plain.train()(X).square().mean()
    first.backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())
    optimizer.step()
    assert plain(X).square().mean() < first


@pytest.mark.parametrize("to", ["bnn", "dbn", "dbnn"])
def test_at_strength_0_a_target_is_its_source(to: str) -> None:
    model, _ = retrofit.convert(network("test_resnet"), to)
    plain = retrofit.plain(model)
    close(model, plain)
    assert not ours(plain)
    source = network("test_resnet")
    source.load_state_dict(plain.state_dict())
    close(source, plain)


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        (nn.BatchNorm1d(6), "bnn", (4, 6)),
        (nn.BatchNorm3d(6), "bnn", (4, 6, 2, 3, 2)),
        (nn.SyncBatchNorm(6), "bnn", (4, 6, 5, 5)),
        (nn.LayerNorm(6), "lnn", (4, 6)),
        (timm.layers.LayerNorm2d(6), "lnn", (4, 6, 5, 5)),
        (timm.layers.LayerNormAct2d(6), "lnn", (4, 6, 5, 5)),
        (nn.GroupNorm(2, 6), "gnn", (4, 6, 5)),
        (timm.layers.GroupNormAct(6, 2), "gnn", (4, 6, 5, 5)),
        (timm.layers.BatchNormAct2d(6), "dbn", (4, 6, 5, 5)),
        (nn.InstanceNorm2d(6, affine=True), "inn", (4, 6, 5, 5)),
        (nn.InstanceNorm1d(6, track_running_stats=True), "inn", (4, 6, 5)),
        *((nn.BatchNorm1d(6), to, shape) for to in ("gn", "frozen") for shape in ((4, 6), (4, 6, 5))),
        *((nn.BatchNorm3d(6, affine=False), to, (4, 6, 2, 3, 2)) for to in ("gn", "frozen")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_layers_alone(source: nn.Module, target: str, shape: tuple[int, ...]) -> None:
    x = 0.5 + 2 * torch.randn(shape)
    model = nn.Sequential(nn.Identity(), copy.deepcopy(source)).train()
    model(x + 1)
    retrofit.convert(model, target)
    plain = retrofit.plain(model)
    close(model, plain, x)
    assert ours(plain) <= ALLOWED
    if target in ("bnn", "lnn", "gnn", "inn", "dbn"):
        assert type(plain[1]) is type(source)


def test_standardised_weights_become_plain() -> None:
    model, _ = retrofit.convert(network("tv:resnet18"), "gn", ws=True)
    retrofit.set_strength(model, 1)
    plain = retrofit.plain(model)
    close(model, plain)
    assert ours(plain) <= ALLOWED


def test_a_network_that_was_written_with_group_norm_takes_the_state_dict() -> None:
    model, _ = retrofit.convert(network("tv:resnet18"), "gn", groups=8)
    retrofit.set_strength(model, 1)
    plain = retrofit.plain(model)
    written = torchvision.models.resnet18(num_classes=5, norm_layer=lambda channels: nn.GroupNorm(8, channels))
    missing, unexpected = written.load_state_dict(plain.state_dict(), strict=False)
    assert not missing
    assert all(key.endswith(".bias") for key in unexpected)  # of convolutions: the constants that went into them


@pytest.mark.parametrize(
    ("to", "strength", "message"),
    [
        ("bnn", 0.5, r"conv1.1 does \(and 14 more layers\): it has a power transform"),
        ("ln", 0.5, "at strength 0.5 it lies between BatchNorm and GroupNorm"),
        ("dbn", 1.0, "it whitens"),
    ],
)
def test_what_has_no_plain_form_is_refused(to: str, strength: float, message: str) -> None:
    model, _ = retrofit.convert(network("test_resnet"), to)
    retrofit.set_strength(model, strength)
    with pytest.raises(retrofit.RetrofitError, match=message):
        retrofit.plain(model)


def test_a_network_that_holds_nothing_of_ours_is_copied() -> None:
    model = network("test_resnet")
    close(model, retrofit.plain(model))
    root, _ = retrofit.convert(nn.BatchNorm2d(6), "ln")
    assert isinstance(root, layers.MigratedGroupNorm)
    close(root, retrofit.plain(root), torch.randn(2, 6, 4, 4))


class Skip(nn.Module):
    """Calls an encoder's children itself, in code that cannot be traced: what its convolution gives is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 2:
            x = x[..., 1:]
        kept = self.encoder[0](x)
        return self.head((kept + self.encoder[1:](kept)).mean((2, 3)))


@pytest.mark.parametrize(("to", "strength"), [("ln", 0.0), ("ln", 1.0), ("frozen", None)])
def test_a_copy_that_is_another_function_is_refused(to: str, strength: float | None) -> None:
    torch.manual_seed(0)
    model = Skip()
    nn.init.uniform_(model.encoder[1].running_mean, -1, 1)
    model, _ = retrofit.convert(model, to, input_size=(3, 16, 16))
    if strength is not None:
        retrofit.set_strength(model, strength)
    for size in (None, (3, 16, 16)):
        with pytest.raises(RetrofitError, match="not the function"):
            retrofit.plain(model, size)


def test_layers_with_hooks_are_refused() -> None:
    model, _ = retrofit.convert(network("test_resnet"), "ln")
    retrofit.set_strength(model, 1.0)
    model.conv1[1].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(RetrofitError, match="it has hooks"):
        retrofit.plain(model)


@pytest.mark.parametrize("to", ["bnn", "dbn"])
def test_frozen_statistics_stay_frozen(to: str) -> None:
    model, _ = retrofit.convert(network("test_resnet"), to)
    retrofit.freeze_norms(model)
    plain = retrofit.plain(model)
    close(model, plain)
    torch.testing.assert_close(plain.train()(X), model.train()(X), rtol=1e-4, atol=1e-5)


def test_an_input_that_the_network_does_not_take_is_an_error() -> None:
    model, _ = retrofit.convert(network("test_resnet"), "frozen")
    with pytest.raises(RetrofitError, match="did not take a random input of size 4x64x64"):
        retrofit.plain(model, (4, 64, 64))
