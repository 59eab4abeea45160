"""What takes the place of a normalization layer for inference: few elementwise operations on precomputed constants.

With s = sign(h), l = log(1 + |h|) and kappa = lambda - 1, the Yeo-Johnson transform reads, without a branch,

    psi = (exp(p * l) - 1) * r,    p = 1 + s * kappa,    r = s / p

where p and r take one of two values a channel. ONNX runtimes do Sign, Where and Pow element by element; a clipped
multiple of h is the sign as well, wherever that matters, at the cost of a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers.lambda_estimate import MIN_CURVATURE, TINY, newton_lmbda, step_bounds

_EPS = 2.0**-10  # of a batch normalization by constants, whose variance it completes to 1 exactly; torch refuses 0
STEEP = 1e12  # |h| below its inverse is as good as zero
SMALLEST_POWER = 5e-4  # (exp(p * l) - 1) / p loses its digits below


def channel_view(values: Tensor, x: Tensor) -> Tensor:
    """Return (C,) values in a shape that broadcasts over `x`, (N, C, *)."""
    return values.view(-1, *(1,) * (x.ndim - 2))


class ChannelAffine(nn.Module):
    """x * scale + shift per channel of (N, C, *), or of (*, C) with `last`; what does nothing is left out."""

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, scale: Tensor, shift: Tensor, last: bool = False) -> None:
        """Keep the constants in float32."""
        super().__init__()
        self.last = last
        self.register_buffer("scale", None if bool((scale == 1).all()) else scale.float())
        self.register_buffer("shift", None if bool((shift == 0).all()) else shift.float())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map."""
        if self.scale is not None:
            x = x * self._view(self.scale, x)
        return x if self.shift is None else x + self._view(self.shift, x)

    def _view(self, values: Tensor, x: Tensor) -> Tensor:
        return values if self.last else channel_view(values, x)


def powers(lmbda: Tensor) -> tuple[Tensor, Tensor]:
    """Return p for h > 0 and for h < 0, kept away from zero by the little that float32 needs."""
    up, down = (torch.where(p.abs() < SMALLEST_POWER, SMALLEST_POWER, p) for p in (lmbda, 2 - lmbda))
    return up, down


class TwoBranch(nn.Module):
    """gamma * psi(h; lambda) + beta, exactly, for any h.

    Args:
        lmbda: (C,) in float64, as are the others.
        gamma: Factor of the transformed value.
        beta: Added in the end.
    """

    beta: Tensor | None

    def __init__(self, lmbda: Tensor, gamma: Tensor, beta: Tensor) -> None:
        """Precompute p = p0 + s * p1 and gamma * s / p = r0 + s * r1."""
        super().__init__()
        up, down = powers(lmbda)
        for name, plus, minus in (("p", up, down), ("r", gamma / up, -gamma / down)):
            self.register_buffer(f"{name}0", ((plus + minus) / 2).float())
            self.register_buffer(f"{name}1", ((plus - minus) / 2).float())
        self.register_buffer("beta", None if bool((beta == 0).all()) else beta.float())

    def forward(self, h: Tensor) -> Tensor:
        """Transform standardised values (N, C, *)."""
        p0, p1, r0, r1 = (channel_view(getattr(self, name), h) for name in ("p0", "p1", "r0", "r1"))
        sign = torch.clamp(h * STEEP, -1.0, 1.0)
        log = torch.log(h.abs() + 1.0)
        grown = torch.exp(log * (sign * p1 + p0)) - 1.0
        y = grown * (sign * r1 + r0)
        return y if self.beta is None else y + channel_view(self.beta, h)


class OneBranch(nn.Module):
    """max(0, gamma * psi(h; lambda) + beta) where only h > 0 can be positive.

    It takes u = (1 + h) / (1 + h0), at least 1, where h0 >= 0 is the zero of the function, and gives
    scale * (u^lambda - 1): what comes before it can do the rest.
    """

    lmbda: Tensor
    scale: Tensor | None

    def __init__(self, lmbda: Tensor, scale: Tensor) -> None:
        """Keep (C,) constants; `scale` of ones is left out."""
        super().__init__()
        self.register_buffer("lmbda", lmbda.float())
        self.register_buffer("scale", None if bool((scale == 1).all()) else scale.float())

    def forward(self, u: Tensor) -> Tensor:
        """Transform (N, C, *)."""
        y = torch.exp(torch.log(u) * channel_view(self.lmbda, u)) - 1.0
        return y if self.scale is None else y * channel_view(self.scale, u)


class Clamp(nn.Module):
    """Limits by constants of the whole layer, which runtimes fuse into the convolution before it."""

    def __init__(self, low: float | None, high: float | None = None) -> None:
        """Keep the limits."""
        super().__init__()
        self.low, self.high = low, high

    def forward(self, x: Tensor) -> Tensor:
        """Clamp."""
        return torch.clamp(x, self.low, self.high)


class EstimatedTransform(nn.Module):
    """A layer that estimates lambda from its input, in evaluation and at a fixed strength, in plain operations.

    Args:
        layer: LayerNormalNorm, LayerNormalNorm2d, GroupNormalNorm, or InstanceNormalNorm or BatchNormalNorm without
            running statistics.
        kind: Its `channel_map.kind_of`.
        affine: Whether to apply gamma and beta here.
        frozen: lambda (strength included) to use for every sample instead of an estimate.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: Any, kind: str, affine: bool = True, frozen: float | None = None) -> None:
        """Take over the layer's constants."""
        super().__init__()
        self.kind = kind
        self.eps = float(layer.eps)
        self.effective_alpha = float(layer.effective_alpha)
        self.steps = int(layer.steps)
        self.groups = int(getattr(layer, "num_groups", 1))
        self.trailing = len(getattr(layer, "normalized_shape", ()))
        self.frozen = frozen
        for name in ("weight", "bias"):
            value = getattr(layer, name) if affine else None
            self.register_buffer(name, None if value is None else value.detach().float())

    def sets(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return `x` so that each normalized set is what some dimensions span, and those dimensions."""
        if self.kind == "group":
            return x.unflatten(1, (self.groups, -1)).flatten(2), (2,)
        return x, {
            "layer": tuple(range(x.ndim - self.trailing, x.ndim)),
            "channel": (1,),
            "instance": tuple(range(2, x.ndim)),
            "batch": (0, *range(2, x.ndim)),
        }[self.kind]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`."""
        values, dims = self.sets(x)
        centred = values - values.mean(dims, keepdim=True)
        var = (centred * centred).mean(dims, keepdim=True)
        rstd = torch.rsqrt(var + self.eps)
        h = centred * rstd
        sign = torch.clamp(h * STEEP, -1.0, 1.0)
        a = h.abs()
        log = torch.log(a + 1.0)
        if self.frozen is None:
            kappa = self.effective_alpha * self._estimate(h, a, log, sign, var * rstd * rstd, dims)
            p = sign * kappa + 1.0
            p = torch.where(p.abs() < SMALLEST_POWER, SMALLEST_POWER, p)
            y = (torch.exp(log * p) - 1.0) * (sign / p)
        else:
            up, down = (float(p) for p in powers(torch.tensor(self.frozen, dtype=torch.float64, device="cpu")))
            r0, r1 = (1 / up - 1 / down) / 2, (1 / up + 1 / down) / 2
            y = (torch.exp(log * (sign * ((up - down) / 2) + (up + down) / 2)) - 1.0) * (sign * r1 + r0)
        y = y.reshape(x.shape)
        for value, apply in ((self.weight, torch.mul), (self.bias, torch.add)):
            if value is not None:
                y = apply(y, value if self.kind == "layer" else channel_view(value, y))
        return y

    def _estimate(self, h: Tensor, a: Tensor, log: Tensor, sign: Tensor, v: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return lambda - 1 of each set: `lambda_estimate.first_step` in operations that every runtime has."""
        if self.steps > 1:
            return newton_lmbda(h, dims, self.steps) - 1.0

        def mean(values: Tensor) -> Tensor:
            return values.mean(dims, keepdim=True)

        low, high = step_bounds(h.amin(dims, True), h.amax(dims, True))
        grown = (a + 1.0) * log
        d = grown - a
        v = v.clamp_min(TINY)
        m3 = mean(d)
        ratio = mean(h * d) / v
        m45 = mean(a * (grown * log - 2.0 * d) + d * d)
        curvature = ((m45 - m3 * m3) / v - 2.0 * ratio * ratio).clamp_min(MIN_CURVATURE)
        step = (mean(sign * log) - ratio) / curvature
        return torch.minimum(torch.maximum(step, low), high)


class MigratedForm(nn.Module):
    """Group normalization of x', standardised already, at a strength t > 0: see `migrated_group_norm`."""

    weight: Tensor
    bias: Tensor

    def __init__(self, layer: Any) -> None:
        """Take over the layer's constants."""
        super().__init__()
        self.groups, self.eps, self.t = int(layer.num_groups), float(layer.eps), float(layer.strength)
        gain = layer.gain.double()
        weight, bias = (None if value is None else value.detach().double() for value in (layer.weight, layer.bias))
        self.register_buffer("weight", ((1.0 if weight is None else weight) / gain).float())
        self.register_buffer("bias", (torch.zeros_like(gain) if bias is None else bias).float())

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x', (N, C, *)."""
        if self.t == 1:
            return nn.functional.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        grouped = x.unflatten(1, (self.groups, -1)).flatten(2)
        mean = grouped.mean(2, keepdim=True)
        centred = grouped - mean
        rstd = torch.rsqrt((centred * centred).mean(2, keepdim=True) * self.t + (1 - self.t + self.t * self.eps))
        y = ((grouped - mean * self.t) * rstd).reshape(x.shape)
        return y * channel_view(self.weight, x) + channel_view(self.bias, x)


class Polynomial(nn.Module):
    """p * (c1 + p * (c2 + ...)) per channel of (N, C, *), for a degree of 2 or more.

    Each multiplication by constants with the addition that follows is a batch normalization, in evaluation: one
    operation, which ONNX Runtime keeps in the layout of its convolutions.
    """

    def __init__(self, coefficients: Tensor, ndim: int) -> None:
        """Keep (degree, C) coefficients of p, p^2, ... for input of `ndim` dimensions."""
        super().__init__()
        *lower, last = coefficients.unbind(0)
        ones = torch.ones_like(last)
        scales = [last, *(ones for _ in lower[1:])]
        self.steps = nn.ModuleList(
            constant_norm(scale, shift, ndim) for scale, shift in zip(scales, reversed(lower), strict=True)
        )

    def forward(self, p: Tensor) -> Tensor:
        """Evaluate."""
        y = p
        for step in self.steps:
            y = step(y) * p
        return y


def constant_norm(scale: Tensor, shift: Tensor, ndim: int) -> nn.Module:
    """Return torch's BatchNorm, in evaluation, that computes x * scale + shift of (N, C, *) in one operation."""
    cls = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(ndim, nn.BatchNorm1d)
    norm = cls(len(scale), eps=_EPS, device=scale.device)
    norm.requires_grad_(False)
    assert norm.running_var is not None
    norm.running_var.fill_(1 - _EPS)
    norm.weight.copy_(scale)
    norm.bias.copy_(shift)
    return norm.eval()


def in_sequence(parts: Sequence[nn.Module]) -> nn.Module:
    """Return a module, in evaluation, that applies some modules one after the other."""
    return (parts[0] if len(parts) == 1 else nn.Sequential(*parts) if parts else nn.Identity()).eval()


class FunctionModule(nn.Module):
    """A functional activation as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x`, of any shape."""
        return self.function(x)
