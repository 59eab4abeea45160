"""Every normality-normalized layer beside torch's own, with an input that both take; and a layer of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit import layers, set_strength

EPS = 1e-5
"""Of every layer here."""


@dataclass(frozen=True)
class Case:
    """A layer and its source: `ours(**k)` and `torchs(**k)` take the same arguments; `dim` is the normalized set's."""

    ours: Callable[..., nn.Module]
    torchs: Callable[..., nn.Module]
    shape: tuple[int, ...]
    dim: tuple[int, ...]
    affine: str = "affine"
    running: bool = False
    groups: int = 1

    def input(self, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
        """A skewed, shifted input, so that lambda is far from 1 and the mean from 0."""
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(self.shape, dtype=torch.float64, generator=generator)
        return (0.7 * x.exp() + 2).to(dtype=dtype, **kwargs)


def _layer_norm_2d(channels: int, **kwargs: Any) -> nn.Module:
    from timm.layers import LayerNorm2d

    kwargs["affine"] = kwargs.pop("elementwise_affine", True)
    return LayerNorm2d(channels, eps=kwargs.pop("eps", 1e-5), **kwargs)


def _bind(cls: Callable[..., nn.Module], *args: Any, **defaults: Any) -> Callable[..., nn.Module]:
    return lambda **kwargs: cls(*args, **{**defaults, **kwargs})


ELEMENTWISE = {"affine": "elementwise_affine"}
RUNNING = {"running": True}
MAPS = (4, 6, 5, 3)
TRACKED = {"track_running_stats": True}
CASES = {
    "batch1d": Case(_bind(layers.BatchNormalNorm1d, 6), _bind(nn.BatchNorm1d, 6), (16, 6), (0,), **RUNNING),
    "batch1d seq": Case(_bind(layers.BatchNormalNorm1d, 6), _bind(nn.BatchNorm1d, 6), (4, 6, 9), (0, 2), **RUNNING),
    "batch2d": Case(_bind(layers.BatchNormalNorm2d, 6), _bind(nn.BatchNorm2d, 6), MAPS, (0, 2, 3), **RUNNING),
    "batch3d": Case(
        _bind(layers.BatchNormalNorm3d, 6), _bind(nn.BatchNorm3d, 6), (2, 6, 3, 4, 2), (0, 2, 3, 4), **RUNNING
    ),
    "sync": Case(_bind(layers.SyncBatchNormalNorm, 6), _bind(nn.BatchNorm2d, 6), MAPS, (0, 2, 3), **RUNNING),
    "layer": Case(_bind(layers.LayerNormalNorm, 24), _bind(nn.LayerNorm, 24), (3, 5, 24), (2,), **ELEMENTWISE),
    "layer two dims": Case(
        _bind(layers.LayerNormalNorm, (4, 6)), _bind(nn.LayerNorm, (4, 6)), (3, 4, 6), (1, 2), **ELEMENTWISE
    ),
    "layer channels first": Case(
        _bind(layers.LayerNormalNorm2d, 24), _bind(_layer_norm_2d, 24), (3, 24, 4, 2), (1,), **ELEMENTWISE
    ),
    "group": Case(_bind(layers.GroupNormalNorm, 2, 6), _bind(nn.GroupNorm, 2, 6), MAPS, (2, 3, 4), groups=2),
    "group one": Case(_bind(layers.GroupNormalNorm, 1, 6), _bind(nn.GroupNorm, 1, 6), (4, 6, 7), (2, 3), groups=1),
    "group flat": Case(_bind(layers.GroupNormalNorm, 2, 32), _bind(nn.GroupNorm, 2, 32), (4, 32), (2,), groups=2),
    "instance1d": Case(_bind(layers.InstanceNormalNorm1d, 6), _bind(nn.InstanceNorm1d, 6), (4, 6, 9), (2,)),
    "instance2d": Case(_bind(layers.InstanceNormalNorm2d, 6), _bind(nn.InstanceNorm2d, 6), MAPS, (2, 3)),
    "instance3d": Case(_bind(layers.InstanceNormalNorm3d, 6), _bind(nn.InstanceNorm3d, 6), (2, 6, 3, 4, 2), (2, 3, 4)),
    "instance tracked": Case(
        _bind(layers.InstanceNormalNorm2d, 6, **TRACKED),
        _bind(nn.InstanceNorm2d, 6, **TRACKED),
        MAPS,
        (2, 3),
        **RUNNING,
    ),
}


def _migrated(groups: int, channels: int, **where: Any) -> nn.Module:
    layer = layers.MigratedGroupNorm(groups, channels, **where)
    for buffer, low, high in ((layer.running_mean, -1, 1), (layer.running_var, 0.5, 2), (layer.gain, 0.5, 2)):
        nn.init.uniform_(buffer, low, high)
    return layer


def _proxied(channels: int, **where: Any) -> nn.Module:
    norm = _migrated(2, channels, **where)
    return nn.Sequential(norm, layers.ProxyNorm(nn.SiLU(), channels, norm=norm, restore=True, **where))


_KINDS = ("batch1d", "batch2d", "layer", "layer channels first", "group", "instance2d", "instance tracked")
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    **{
        name: (partial(CASES[name].ours, noise=0.0, **{CASES[name].affine: True}), CASES[name].shape) for name in _KINDS
    },
    "batch cumulative": (partial(layers.BatchNormalNorm2d, 6, momentum=None, noise=0.0), MAPS),
    "migrated": (partial(_migrated, 2, 6), MAPS),
    "migrated flat": (partial(_migrated, 1, 6), (4, 6)),
    "proxy": (partial(_proxied, 6), MAPS),
    "standardized weights": (partial(layers.WeightStandardizedConv2d, 6, 4, 3), MAPS),
    "decorrelated": (partial(layers.DecorrelatedBatchNorm2d, 6, group_size=3), MAPS),
    "decorrelated normal": (partial(layers.DecorrelatedBatchNormalNorm2d, 6, group_size=3, noise=0.0), MAPS),
}
"""What makes a layer, by keywords `dtype` and `device`, and the shape of an input."""
OF_BATCHES = [name for name in LAYERS if name.startswith(("batch", "decorrelated", "instance tracked"))]


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
    """Give the affine parameters and the running statistics values that are not their first ones."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name.endswith(("weight", "bias", "running_mean")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5 + 1)
            elif name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module


def as_sets(case: Case, x: Tensor) -> Tensor:
    """View `x` so that `case.dim` spans the normalized set (groups of channels get a dimension of their own)."""
    return x.unflatten(1, (case.groups, -1)) if case.ours().__class__.__name__.startswith("Group") else x


def affine_of(case: Case, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """gamma and beta, broadcastable to the sets."""
    parameters = (layer.weight.detach(), layer.bias.detach())
    if isinstance(layer, nn.LayerNorm) and not type(layer).__name__.endswith("2d"):
        return parameters
    weight, bias = (as_sets(case, p.view(1, -1, *(1,) * (len(case.shape) - 2))) for p in parameters)
    return weight, bias


def assert_same_gradient(out: Tensor, x: Tensor, expected: Tensor, y: Tensor, rtol: float, atol: float) -> None:
    """Send one gradient back through two results of inputs `x` and `y`, and compare what arrives there."""
    g = torch.randn_like(out)
    out.backward(g)
    expected.backward(g)
    torch.testing.assert_close(x.grad, y.grad, rtol=rtol, atol=atol)
