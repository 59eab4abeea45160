"""The C++ maps behind ProxyNorm and MigratedGroupNorm against the same layers in float64 torch
operations.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.layers import MigratedGroupNorm, ProxyNorm
from retrofit.layers.group_migration import migrated_group_norm
from retrofit.layers.kernels import VARIABLE, channelwise, cpp
from tests.layers.cases import on
from tests.layers.test_proxy_norm import ACTIVATIONS

pytestmark = on("cpp", ids=["compiled"])

TORCHS = ("elu", "gelu_tanh", "mish", "prelu", "function")
"""Activations that stay with torch."""
SHAPES = {
    "maps": (3, 21, 9, 7),
    "maps of one": (3, 21, 1, 1),
    "large": (2, 5, 65, 33),
    "flat": (9, 21),
}
SHAPES["alone"] = (1, 3, 4, 4)


def proxy(
    activation: Callable[[Tensor], Tensor],
    channels: int,
    norm: nn.Module | None = None,
    **options: Any,
) -> Any:
    norm = norm or nn.GroupNorm(1, channels)
    act = ProxyNorm(
        activation, channels, norm=norm, **{"restore": True, "strength": 0.8, **options}
    )
    act.norm_of_its_own = norm  # so that its parameters are compared too
    return act


def migrated(channels: int, groups: int = 1) -> nn.Module:
    layer = MigratedGroupNorm(groups, channels, strength=0.7, eps=1e-3, group_eps=1e-5)
    layer.running_mean.normal_(1.0)
    layer.running_var.uniform_(0.5, 2.0)
    layer.gain.uniform_(0.5, 2.0)
    return layer


def arranged(shape: tuple[int, ...], order: str, dtype: torch.dtype) -> Tensor:
    """Numbers around the kinks of the activations, as they may lie in memory."""
    x = (2.5 * torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.7).to(dtype)
    if order == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if order == "unaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape)
    if order == "strided":
        return torch.stack([x, x], -1)[..., 0]
    return x


def run(layer: nn.Module, x: Tensor, kernels: str = "cpp") -> dict[str, Tensor]:
    """Output and gradients, in the layer's own type."""
    layer, leaf = copy.deepcopy(layer), x.detach().requires_grad_()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, kernels)
        out = layer(leaf * 1)  # in place activations may not write to a leaf
        out.backward(
            torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
        )
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": leaf.grad, **gradients}


def assert_agree(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.4)
    got, wanted = run(layer, x), run(copy.deepcopy(layer).double(), x.double(), "eager")
    assert got.keys() == wanted.keys()
    assert got["out"].dtype == got["x"].dtype == x.dtype
    tolerance = 1e-2 if x.dtype == torch.bfloat16 else 2e-5
    for name, value in wanted.items():
        scale = value.abs().max().clamp_min(1e-3)
        assert (got[name] - value).abs().max() <= tolerance * scale, name


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:  # what was called of the library
    calls: list[str] = []
    call = channelwise.call
    monkeypatch.setattr(
        channelwise, "call", lambda name, *args: calls.append(name) or call(name, *args)
    )
    return calls


ORDERS = ("contiguous", "channels last", "unaligned", "strided")
LIES = [
    (shape, order, torch.float32)
    for shape in SHAPES
    for order in ORDERS[: 4 if shape == "maps" else 2]
]
LIES += [("maps", order, torch.bfloat16) for order in ORDERS]


@pytest.mark.parametrize(("name", "order", "dtype"), LIES)
@pytest.mark.parametrize("layer", ["proxy", "migrated"])
def test_agrees_however_it_lies(
    layer: str, name: str, order: str, dtype: torch.dtype, used: list[str]
) -> None:
    shape = SHAPES[name]
    x = arranged(shape, order, dtype)
    module = (
        proxy(nn.SiLU(), shape[1])
        if layer == "proxy"
        else migrated(shape[1], 3 if shape[1] % 3 == 0 else 1)
    )
    assert_agree(module, x)
    assert used
    if order == "channels last" and len(shape) > 2:
        assert module(x).movedim(1, -1).is_contiguous()


@pytest.mark.parametrize(
    ("name", "channel_dim"), [*((name, 1) for name in ACTIVATIONS), ("silu", -1)]
)
def test_activations(name: str, channel_dim: int, used: list[str]) -> None:
    x = arranged((4, 11, 10, 11), "contiguous", torch.float32)
    x[0, 0, 0, :8] = torch.tensor(
        [-3.0, -0.5, 0.0, 2.0, 3.0, 6.0, 40.0, -40.0]
    )  # kinks, and where exp ends
    assert_agree(proxy(ACTIVATIONS[name](), 11, channel_dim=channel_dim), x)
    assert ("channels_backward" in used) == bool(used) == (name not in TORCHS)


def test_a_hook_on_the_activation_sees_it() -> None:
    layer, seen = proxy(nn.ReLU(), 6), []
    x = torch.randn(2, 6, 5, 5)
    plain = layer(x)
    layer.activation.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    torch.testing.assert_close(layer(x), plain)
    assert x.shape in seen


def test_a_group_far_from_the_running_mean_keeps_its_variance() -> None:
    layer, x = (
        migrated(6, 6),
        1e-2 * torch.randn(2, 6, 16, 16) + torch.linspace(-300, 300, 6).view(-1, 1, 1),
    )
    exact = run(copy.deepcopy(layer).double(), x.double(), "eager")
    compiled, eager = run(layer, x), run(layer, x, "eager")
    for name, value in exact.items():  # the values themselves have 8 bits of their deviations left
        error, allowed = ((found[name] - value).abs().max() for found in (compiled, eager))
        assert error <= 2 * allowed + 1e-5 * value.abs().max(), name


@pytest.mark.parametrize(("samples", "order"), [(1, "contiguous"), (3, "channels last")])
@pytest.mark.parametrize(
    "layer", [proxy(nn.GELU(), 6), migrated(6, 1), migrated(6, 2)], ids=["proxy", "one", "two"]
)
def test_threads(
    layer: nn.Module, order: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, found = arranged((samples, 6, 33, 31), order, torch.float32), []
    monkeypatch.setattr(cpp, "_SINGLE_THREADED", 0)
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        found.append(run(layer, x))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-4)
        assert torch.equal(found[1][name], found[2][name])


@pytest.mark.parametrize("layer", [proxy(nn.ReLU(), 6), migrated(6, 2)], ids=["proxy", "migrated"])
def test_nothing(layer: nn.Module) -> None:
    for shape in ((0, 6, 4, 4), (2, 6, 0, 4)):
        out = layer(torch.empty(shape).requires_grad_())
        assert out.shape == shape
        out.sum().backward()


@pytest.mark.parametrize(  # each pair of two options' values once at least
    ("weight", "bias", "restore", "scale", "params"),
    [
        [yes == "1" for yes in row]
        for row in ("11111", "10001", "01010", "00100", "11000", "00011", "10110", "01101")
    ],
)
def test_parts_of_a_proxy(
    weight: bool, bias: bool, restore: bool, scale: bool, params: bool, used: list[str]
) -> None:
    norm = nn.LayerNorm(37, elementwise_affine=weight, bias=bias)
    if bias and not weight:
        norm.bias = nn.Parameter(torch.zeros(37))
    options = {"restore": restore, "scale": scale, "params": params, "samples": 300, "eps": 0.1}
    assert_agree(
        proxy(nn.SiLU(), 37, norm, **options), arranged((2, 37, 5, 7), "contiguous", torch.float32)
    )
    assert used


@pytest.mark.parametrize(
    ("affine", "bias", "strength"), [(True, True, 0.0), (True, False, 0.3), (False, False, 1.0)]
)
def test_what_a_migrated_norm_may_have(
    affine: bool, bias: bool, strength: float, used: list[str]
) -> None:
    layer = MigratedGroupNorm(3, 21, affine=affine, bias=bias, strength=strength)
    layer.running_mean.normal_()
    assert_agree(layer, arranged((2, 21, 5, 7), "channels last", torch.float32))
    assert bool(used) == (strength > 0)  # at 0 it is torch's own batch_norm


def test_at_strength_zero_it_is_batch_norm_to_the_last_bit() -> None:
    layer, affine, x = migrated(21), torch.rand(2, 21), torch.randn(SHAPES["maps"])
    layer.set_strength(0.0)
    layer.weight.data, layer.bias.data = affine
    x[0, 0, 0, 0] = 3e38
    expected = functional.batch_norm(x, layer.running_mean, layer.running_var, *affine, eps=1e-3)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layer", [proxy(nn.ReLU(), 6), migrated(6, 2)], ids=["proxy", "migrated"])
def test_parameters_of_another_type(layer: nn.Module, dtype: torch.dtype) -> None:
    layer = copy.deepcopy(layer).to(dtype)
    x = arranged((4, 6, 5, 7), "contiguous", torch.float32)
    got, wanted = run(layer, x), run(layer, x, "eager")
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype == (torch.float32 if name in ("out", "x") else dtype)
        torch.testing.assert_close(
            got[name], value, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3
        )


def test_parameters_of_another_size_or_device_are_refused() -> None:
    x = torch.randn(2, 6, 4, 4)
    for layer in (proxy(nn.ReLU(), 6), migrated(6, 2)):
        changed = layer.norm if isinstance(layer, ProxyNorm) else layer
        for weight in (torch.ones(5), torch.ones(6, device="meta")):
            changed.weight = nn.Parameter(weight)
            with pytest.raises(RuntimeError):
                layer(x)
    with pytest.raises(ValueError, match="num_groups must divide the 6 channels, got 4"):
        migrated_group_norm(x, 4, torch.zeros(6), torch.ones(6))
