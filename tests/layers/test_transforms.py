"""torch.func, forward mode, jit.trace and second derivatives, over every layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from retrofit import layers
from tests.layers.cases import CASES

# torch's own rules of forward mode are scripts, and it calls scripts and traces deprecated
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")

SHAPE = (3, 8, 4, 5)


def _migrated(groups: int) -> nn.Module:
    layer = layers.MigratedGroupNorm(groups, 8)
    for buffer, low, high in ((layer.running_mean, -1, 1), (layer.running_var, 0.5, 2), (layer.gain, 0.5, 2)):
        nn.init.uniform_(buffer, low, high)
    return layer


def _proxied() -> nn.Module:
    norm = _migrated(2)
    return nn.Sequential(norm, layers.ProxyNorm(nn.SiLU(), 8, norm=norm, restore=True))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{
        name: (lambda case=case: case.ours(**{case.affine: True, "noise": 0.0}), case.shape)
        for name, case in CASES.items()
    },
    "migrated": (lambda: _migrated(1), SHAPE),
    "migrated groups": (lambda: _migrated(4), SHAPE),
    "migrated flat": (lambda: _migrated(2), (3, 8)),
    "proxy": (_proxied, SHAPE),
    "standardised weights": (lambda: layers.WeightStandardizedConv2d(8, 4, 3), SHAPE),
    "decorrelated": (lambda: layers.DecorrelatedBatchNorm2d(8, group_size=4), SHAPE),
    "decorrelated normal": (lambda: layers.DecorrelatedBatchNormalNorm2d(8, group_size=4, noise=0.0), SHAPE),
}
BATCH = [name for name in LAYERS if name.startswith(("batch", "sync", "decorrelated", "instance tracked"))]


def build(name: str, strength: float = 0.6, training: bool = False) -> tuple[nn.Module, Tensor]:
    """A layer of that name away from its first values, and an input."""
    make, shape = LAYERS[name]
    layer = make()
    x = torch.randn(shape).exp()
    if name in BATCH:
        layer.train()(x)  # running statistics, lambda among them
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for module in layer.modules():
            if isinstance(module, layers.StrengthMixin):
                module.set_strength(strength)
    return layer.train(training), x


def power(layer: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """A loss of a layer's parameters and input."""
    return lambda parameters, x: functional_call(layer, parameters, (x,)).square().sum()


def parameters_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in layer.named_parameters()}


def by_backward(layer: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    return {name: value.grad for name, value in layer.named_parameters()}, x.grad


@pytest.mark.parametrize("strength", [0.0, 0.6])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_backward(name: str, strength: float) -> None:
    layer, x = build(name, strength)
    found = grad(power(layer), argnums=(0, 1))(parameters_of(layer), x)
    torch.testing.assert_close(found, by_backward(layer, x), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "batch1d"])
def test_per_sample_gradients_are_a_loops(name: str) -> None:
    layer, x = build(name)
    found = vmap(grad(power(layer)), (None, 0))(parameters_of(layer), x.unsqueeze(1))
    for i, sample in enumerate(x):
        wanted, _ = by_backward(layer, sample.unsqueeze(0))
        torch.testing.assert_close({key: value[i] for key, value in found.items()}, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BATCH)
def test_running_statistics_are_refused_as_torchs_are(name: str) -> None:
    layer, x = build(name, training=True)
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        grad(power(layer))(parameters_of(layer), x)


@pytest.mark.parametrize("name", LAYERS)
def test_forward_mode_and_jacobians(name: str) -> None:
    layer, x = build(name)
    tangent = torch.randn_like(x)
    out, moved = jvp(layer, (x,), (tangent,))
    torch.testing.assert_close(out, layer(x), rtol=1e-4, atol=1e-5)
    jacobian = jacrev(layer)(x)
    torch.testing.assert_close(moved, torch.tensordot(jacobian, tangent, dims=x.ndim), rtol=1e-3, atol=1e-4)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(dual, moved)


@pytest.mark.parametrize("name", ["layer", "group", "migrated", "decorrelated"])
def test_torch_func_has_second_derivatives(name: str) -> None:
    layer, x = build(name)
    layer, x = layer.double(), x.double()
    small = x[:1]

    def along(step: Tensor) -> Tensor:
        return layer(small * (1 + step)).pow(3).sum()

    step, h = torch.zeros((), dtype=torch.float64), 1e-4
    numeric = (along(step + h) - 2 * along(step) + along(step - h)) / h**2
    torch.testing.assert_close(hessian(along)(step), numeric.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["layer", "group", "instance2d", "migrated", "decorrelated"])
def test_a_gradient_penalty_is_refused_rather_than_dropped(name: str) -> None:
    layer, x = build(name, training=True)
    x.requires_grad_()
    out = layer(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (out + gradient.square().sum()).backward()


@pytest.mark.parametrize("name", LAYERS)
def test_ensembles_of_layers(name: str) -> None:
    members = [build(name)[0] for _ in range(2)]
    members[0].apply(lambda m: m.set_strength(0.0) if isinstance(m, layers.StrengthMixin) else None)
    _, x = build(name)
    state = stack_module_state(members)
    blank = copy.deepcopy(members[0])
    if name == "proxy":  # which holds its norm by a reference: the copy's
        blank[1].follow(blank[0])
    found = vmap(lambda *tensors: functional_call(blank, tensors, (x,)))(*state)
    torch.testing.assert_close(found, torch.stack([member(x) for member in members]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_traces_hold_the_strength(name: str, tmp_path: Any) -> None:
    layer, x = build(name, 0.0)
    if name.startswith("batch"):
        layer.running_lambda.fill_(1.0)  # where the layer's answer is torch's
    with torch.no_grad():
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        traced.save(tmp_path / "traced.pt")
        traced = torch.jit.load(tmp_path / "traced.pt")
    other = LAYERS[name][0]()
    other.load_state_dict(layer.state_dict())
    if name.startswith("batch"):
        other.running_lambda.fill_(0.3)
    other.eval().apply(lambda m: m.set_strength(1.0) if isinstance(m, layers.StrengthMixin) else None)
    traced.load_state_dict(other.state_dict())
    torch.testing.assert_close(traced(x), other(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "other", "setting"),
    [
        (layers.GroupNormalNorm(2, 8, alpha=0.5), layers.GroupNormalNorm(2, 8), "alpha"),
        (layers.MigratedGroupNorm(4, 8), layers.MigratedGroupNorm(2, 8), "num_groups"),
        (layers.ProxyNorm(nn.SiLU(), 8), layers.ProxyNorm(nn.SiLU(), 8, scale=False), "scale"),
    ],
    ids=["alpha", "groups", "scale"],
)
def test_the_state_of_a_trace_holds_the_settings(layer: nn.Module, other: nn.Module, setting: str) -> None:
    """A trace keeps the buffers, and none of the methods that fill them in when a layer is saved."""
    with torch.no_grad():
        traced = torch.jit.trace(layer.eval(), (torch.randn(SHAPE),), check_trace=False)
    other.load_state_dict(traced.state_dict())
    assert getattr(other, setting) == getattr(layer, setting)
