"""Every normality-normalized layer beside torch's own, with an input that both take; and a layer of
every kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrofit import layers, set_strength
from retrofit.layers.kernels.eager import compute_dtype
from retrofit.layers.kernels.kernel_options import Strength
from retrofit.layers.normality_norm import Normalization, Statistics, normalize

EPS = 1e-5
"""Of every layer here."""
MARKS: dict[str, Any] = {"eager": (), "cpp": pytest.mark.compiler, "triton": pytest.mark.gpu}


def on(
    *kernels: str, ids: list[str] | None = None
) -> pytest.MarkDecorator:  # run a test on each of these kernels
    cases = [pytest.param(name, marks=MARKS[name]) for name in kernels]
    return pytest.mark.parametrize("kernels", cases, ids=ids, indirect=True)


@dataclass(frozen=True)
class Case:
    """A layer and its source: `ours(**k)` and `torchs(**k)` take the same arguments; `dim` is the
    normalized set's.
    """

    ours: Callable[..., nn.Module]
    torchs: Callable[..., nn.Module]
    shape: tuple[int, ...]
    dim: tuple[int, ...]
    affine: str = "affine"
    running: bool = False
    groups: int = 0

    def input(self, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
        """A skewed, shifted input, so that lambda is far from 1 and the mean from 0."""
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(self.shape, dtype=torch.float64, generator=generator)
        return (0.7 * x.exp() + 2).to(dtype=dtype, **kwargs)


def _layer_norm_2d(channels: int, elementwise_affine: bool = True) -> nn.Module:
    return LayerNorm2d(channels, eps=EPS, affine=elementwise_affine)


def _case(
    ours: str, torchs: Callable[..., nn.Module], args: tuple[Any, ...], *rest: Any, **others: Any
) -> Case:
    return Case(partial(getattr(layers, ours), *args), partial(torchs, *args), *rest, **others)


ELEMENTWISE = {"affine": "elementwise_affine"}
RUNNING = {"running": True}
MAPS = (4, 6, 5, 3)
VOLUMES = (2, 6, 3, 4, 2)
CASES = {
    "batch1d": _case("BatchNormalNorm1d", nn.BatchNorm1d, (6,), (16, 6), (0,), **RUNNING),
    "batch1d seq": _case("BatchNormalNorm1d", nn.BatchNorm1d, (6,), (4, 6, 9), (0, 2), **RUNNING),
    "batch2d": _case("BatchNormalNorm2d", nn.BatchNorm2d, (6,), MAPS, (0, 2, 3), **RUNNING),
    "batch3d": _case("BatchNormalNorm3d", nn.BatchNorm3d, (6,), VOLUMES, (0, 2, 3, 4), **RUNNING),
    "sync": _case("SyncBatchNormalNorm", nn.BatchNorm2d, (6,), MAPS, (0, 2, 3), **RUNNING),
    "layer": _case("LayerNormalNorm", nn.LayerNorm, (24,), (3, 5, 24), (2,), **ELEMENTWISE),
    "layer two dims": _case(
        "LayerNormalNorm", nn.LayerNorm, ((4, 6),), (3, 4, 6), (1, 2), **ELEMENTWISE
    ),
    "layer channels first": _case(
        "LayerNormalNorm2d", _layer_norm_2d, (24,), (3, 24, 4, 2), (1,), **ELEMENTWISE
    ),
    "group": _case("GroupNormalNorm", nn.GroupNorm, (2, 6), MAPS, (2, 3, 4), groups=2),
    "group one": _case("GroupNormalNorm", nn.GroupNorm, (1, 6), (4, 6, 7), (2, 3), groups=1),
    "group flat": _case("GroupNormalNorm", nn.GroupNorm, (2, 32), (4, 32), (2,), groups=2),
    "instance1d": _case("InstanceNormalNorm1d", nn.InstanceNorm1d, (6,), (4, 6, 9), (2,)),
    "instance2d": _case("InstanceNormalNorm2d", nn.InstanceNorm2d, (6,), MAPS, (2, 3)),
    "instance3d": _case("InstanceNormalNorm3d", nn.InstanceNorm3d, (6,), VOLUMES, (2, 3, 4)),
}
TRACKED = (
    partial(make, 6, track_running_stats=True)
    for make in (layers.InstanceNormalNorm2d, nn.InstanceNorm2d)
)
CASES["instance tracked"] = Case(*TRACKED, MAPS, (2, 3), **RUNNING)


WHITENED = _case("DecorrelatedBatchNormalNorm2d", nn.BatchNorm2d, (6,), MAPS, (0, 2, 3), **RUNNING)


def _migrated(groups: int, channels: int, **where: Any) -> nn.Module:
    layer = layers.MigratedGroupNorm(groups, channels, **where)
    for buffer, low, high in (
        (layer.running_mean, -1, 1),
        (layer.running_var, 0.5, 2),
        (layer.gain, 0.5, 2),
    ):
        nn.init.uniform_(buffer, low, high)
    return layer


def _proxied(activation: Callable[..., nn.Module], **where: Any) -> nn.Module:
    norm, own = _migrated(2, 6, **where), where if activation is nn.PReLU else {}
    return nn.Sequential(
        norm, layers.ProxyNorm(activation(**own), 6, norm=norm, restore=True, **where)
    )


_KINDS = (
    "batch1d",
    "batch2d",
    "layer",
    "layer channels first",
    "group",
    "instance2d",
    "instance tracked",
)
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    **{
        key: (partial(CASES[key].ours, noise=0.0, **{CASES[key].affine: True}), CASES[key].shape)
        for key in _KINDS
    },
    "batch cumulative": (partial(layers.BatchNormalNorm2d, 6, momentum=None, noise=0.0), MAPS),
    "migrated": (partial(_migrated, 2, 6), MAPS),
    "migrated flat": (partial(_migrated, 1, 6), (4, 6)),
    "proxy": (partial(_proxied, nn.SiLU), MAPS),
    "proxy prelu": (partial(_proxied, nn.PReLU), MAPS),
    "proxy in place": (partial(_proxied, partial(nn.ReLU, inplace=True)), MAPS),
    "standardized weights": (partial(layers.WeightStandardizedConv2d, 6, 4, 3), MAPS),
    "decorrelated": (partial(layers.DecorrelatedBatchNorm2d, 6, group_size=3), MAPS),
    "decorrelated normal": (
        partial(layers.DecorrelatedBatchNormalNorm2d, 6, group_size=3, noise=0.0),
        MAPS,
    ),
}
"""What makes a layer, by keywords `dtype` and `device`, and the shape of an input."""
OF_BATCHES = [
    name for name in LAYERS if name.startswith(("batch", "decorrelated", "instance tracked"))
]


def build(name: str, strength: float = 0.6, training: bool = False) -> tuple[nn.Module, Tensor]:
    """A layer of `LAYERS` away from its first values, and an input."""
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape).exp()
    if name in OF_BATCHES:
        layer.train()(x)  # running statistics, lambda among them
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    set_strength(layer, strength)
    return layer.train(training), x


def randomise(module: nn.Module) -> nn.Module:
    """Give the affine parameters and the running statistics values that are not their first
    ones.
    """
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name.endswith(("weight", "bias", "running_mean")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5 + 1)
            elif name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module


def statistics(module: nn.Module) -> dict[str, Tensor]:  # the running statistics as they are now
    return {name: buffer.clone() for name, buffer in module.named_buffers() if "running" in name}


def as_sets(case: Case, x: Tensor) -> Tensor:
    """View `x` so that `case.dim` spans the normalized set (groups of channels get a dimension of
    their own).
    """
    return x.unflatten(1, (case.groups, -1)) if case.groups else x


def affine_of(
    case: Case, layer: nn.Module
) -> tuple[Tensor, Tensor]:  # gamma and beta, broadcastable to the sets
    parameters = (layer.weight.detach(), layer.bias.detach())
    if isinstance(layer, nn.LayerNorm) and not type(layer).__name__.endswith("2d"):
        return parameters
    weight, bias = (as_sets(case, p.view(1, -1, *(1,) * (len(case.shape) - 2))) for p in parameters)
    return weight, bias


def assert_same_gradient(
    out: Tensor, x: Tensor, expected: Tensor, y: Tensor, rtol: float, atol: float
) -> None:
    """Send one gradient back through two results of inputs `x` and `y`, and compare what arrives
    there.
    """
    g = torch.randn_like(out)
    out.backward(g)
    expected.backward(g)
    torch.testing.assert_close(x.grad, y.grad, rtol=rtol, atol=atol)


def _dimensions(dim: tuple[int, ...], x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    return x, dim


def normality_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    dim: tuple[int, ...],
    eps: float,
    strength: float = 1.0,
    noise: float = 0.0,
) -> tuple[Tensor, Statistics]:
    """Normalize `x`, of any shape, over its dimensions `dim`; gamma and beta broadcast to it."""
    sets = partial(_dimensions, dim)
    spec = Normalization(sets=sets, per_channel=False, eps=eps, xi=noise)
    t = torch.as_tensor(strength, dtype=compute_dtype(x), device=x.device)
    out, stats = normalize(x, weight, bias, Strength(t), spec)
    assert stats is not None
    return out, spec.statistics(x, weight, bias, stats)


def gradients_when_recomputed(layer: Any, x: Tensor) -> list[Tensor]:
    """gamma's gradient from a run, and from one that is recomputed with another random state, as
    activation checkpointing without the state does: both of the noise of the second run.
    """
    grad = torch.randn_like(x)
    gradients = []
    for run in (layer, partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)):
        torch.manual_seed(0)
        out = run(x)
        torch.manual_seed(1)
        if run is layer:
            out = run(x)
        gradients.append(torch.autograd.grad(out, layer.weight, grad)[0])
    return gradients
