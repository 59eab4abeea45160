"""What a layer is for inference: few elementwise operations on precomputed constants, which every
runtime has.

With s = sign(h), l = log(1 + |h|) and kappa = lambda - 1, the Yeo-Johnson transform reads, without
a branch,

    psi = s * (exp(p * l) - 1) / p,    p = 1 + s * kappa

where p takes one of two values a channel. ONNX runtimes do Sign, Where and Pow element by element;
h / |h| is the sign as well. (So is a clipped multiple of h, but behind an INT8 convolution OpenVINO
moves the steps of 8 bits past the multiplication and the limits, and rounds the sign to 0.)

The forms are right in float16 too: no value of a set is squared before it is divided by the set's
largest.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.normalized_sets import Sets
from retrofit.layers.power_transform import MIN_CURVATURE, step_bounds

# The eps of a batch normalization by constants: it completes the variance to 1 exactly, and torch
# refuses 0.
NORM_EPS = 2.0**-10
# (exp(p * l) - 1) / p loses a digit in float32 where |p| is smaller.
SMALL_POWER = 0.05
# The smallest normal number of float16.
_SMALLEST_HALF = 2.0**-14
# Not 0 in float16; in float32 less than the distance of 1 to the next number.
_TINY = 1.5 * 2.0**-24
# Factor on d in sums of squares, which overflow float16 for |h| above 80 without it.
_EIGHTH = 0.125


def channel_view(values: Tensor, x: Tensor, channel_dim: int = 1) -> Tensor:
    """Return (C,) or (N, C) values in a shape that broadcasts over `x`, (N, C, *), whose channels
    are dimension 1; (C,) values as they are if `channel_dim` is another, the last.
    """
    if channel_dim != 1:
        return values
    return values.view(*values.shape, *(1,) * (x.ndim - 2))


def in_sequence(parts: Sequence[nn.Module]) -> nn.Module:
    """Return a module, in evaluation, that applies some modules one after the other."""
    if not parts:
        return nn.Identity().eval()
    if len(parts) == 1:
        return parts[0].eval()
    return nn.Sequential(*parts).eval()


def constant_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a library's module, in evaluation and float32, without gradients."""
    return copy.deepcopy(module).float().eval().requires_grad_(False)


class FunctionModule(nn.Module):
    """A functional activation as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class ChannelAffine(nn.Module):
    """x * scale + shift per channel, see `channel_view`; what does nothing is left out."""

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, scale: Tensor | None, shift: Tensor | None, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.register_buffer("scale", _unless_all(1, scale))
        self.register_buffer("shift", _unless_all(0, shift))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            x = x * channel_view(self.scale, x, self.channel_dim)
        if self.shift is not None:
            x = x + channel_view(self.shift, x, self.channel_dim)
        return x


def _unless_all(neutral: float, values: Tensor | None) -> Tensor | None:
    """Return values in float32; None if all are `neutral`, so that their operation does nothing."""
    if values is None or bool((values == neutral).all()):
        return None
    return values.detach().float()


class ConstantNorm(nn.Module):
    """(x - centre) * scale + shift per channel of (N, C, *), as one batch normalization in
    evaluation.
    """

    centre: Tensor
    variance: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, centre: Tensor, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        # bfloat16 would round it to 1.
        variance = torch.full_like(centre, 1 - NORM_EPS, dtype=torch.float32)
        self.register_buffer("centre", centre.float())
        self.register_buffer("variance", variance)
        self.register_buffer("scale", scale.float())
        self.register_buffer("shift", shift.float())

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.centre, self.variance, self.scale, self.shift, eps=NORM_EPS
        )


class GroupConvolution(nn.Module):
    """matrix @ x + shift for each group of neighbouring channels of (N, C, *): a convolution of
    size 1.
    """

    weight: Tensor
    shift: Tensor

    def __init__(self, matrix: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.groups = len(matrix)
        self.register_buffer("weight", matrix.flatten(0, 1).float())
        self.register_buffer("shift", shift.float())

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return self.forward(x.unsqueeze(-1)).squeeze(-1)
        convolution = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[x.ndim]
        weight = self.weight.view(*self.weight.shape, *(1,) * (x.ndim - 2))
        return convolution(x, weight, self.shift, groups=self.groups)


class TwoBranch(nn.Module):
    """gamma * psi(h; lambda) + beta, exactly, for any h and lambda; the constants are (C,) in
    float64.
    """

    gamma: Tensor
    beta: Tensor | None

    def __init__(self, lmbda: Tensor, gamma: Tensor, beta: Tensor) -> None:
        """Precompute p = p0 + s * p1 and gamma * s / p = r0 + s * r1, which has no value where p is
        0.
        """
        super().__init__()
        self.constants = lmbda, gamma, beta
        # p where h is positive, and where it is negative
        up = lmbda
        down = 2 - lmbda
        self.exact = bool((torch.minimum(up.abs(), down.abs()) < SMALL_POWER).any())
        self._hold_either("p", up, down)
        if not self.exact:
            self._hold_either("r", gamma / up, -gamma / down)
        self.register_buffer("gamma", gamma.float() if self.exact else None)
        self.register_buffer("beta", _unless_all(0, beta))

    def _hold_either(self, name: str, plus: Tensor, minus: Tensor) -> None:
        """Hold what takes one value for positive h and another for negative, as mean and half
        difference.
        """
        self.register_buffer(f"{name}0", ((plus + minus) / 2).float())
        self.register_buffer(f"{name}1", ((plus - minus) / 2).float())

    def forward(self, h: Tensor) -> Tensor:
        sign, log = _sign_and_log(h, h.abs())
        u = log * self._either("p", sign)
        if self.exact:
            y = relative_growth(u) * log * sign * channel_view(self.gamma, h)
        else:
            y = (torch.exp(u) - 1.0) * self._either("r", sign)
        if self.beta is not None:
            y = y + channel_view(self.beta, h)
        return y

    def _either(self, name: str, sign: Tensor) -> Tensor:
        mean = channel_view(getattr(self, f"{name}0"), sign)
        half_difference = channel_view(getattr(self, f"{name}1"), sign)
        return sign * half_difference + mean


def relative_growth(u: Tensor) -> Tensor:
    """Return expm1(u) / u, 1 at 0, of exp and log alone: exp's error near 1 is in its logarithm too
    (W. Kahan).
    """
    grown = torch.exp(u)
    return (grown - 1.0 + _TINY) / (torch.log(grown) + _TINY)


def _sign_and_log(h: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    return h / torch.clamp(a, min=_TINY), torch.log(a + 1.0)


def channel_form(constant: ChannelMap) -> list[nn.Module]:
    """Return the operations of a constant map per channel of (N, C, *)."""
    if constant.is_affine:
        scale, shift = constant.affine()
        return [ConstantNorm(constant.centre, scale, shift + scale * constant.centre)]
    standardize = ConstantNorm(constant.centre, constant.scale, torch.zeros_like(constant.scale))
    return [standardize, TwoBranch(constant.lmbda, constant.gamma, constant.beta)]


class EstimatedTransform(nn.Module):
    """A layer that estimates lambda from its input, in evaluation and at a fixed strength, in plain
    operations.
    """

    def __init__(
        self,
        sets: Sets,
        eps: float,
        effective_alpha: float,
        affine: tuple[Tensor | None, Tensor | None],
        per_channel: bool,
    ) -> None:
        """Take gamma and beta as `affine`: (C,) for (N, C, *) if `per_channel`, else of a shape that
        broadcasts to the input.
        """
        super().__init__()
        self.sets = sets
        self.eps = eps
        self.effective_alpha = effective_alpha
        self.affine = ChannelAffine(*affine, channel_dim=1 if per_channel else -1)
        self.fixed: TwoBranch | None = None

    def freeze(self, lmbda: float, device: torch.device) -> None:
        """Put a constant, strength included, in the place of the estimate."""
        constants = torch.tensor([[lmbda], [1.0], [0.0]], dtype=torch.float64, device=device)
        self.fixed = TwoBranch(*constants)

    def forward(self, x: Tensor) -> Tensor:
        values, dims = self.sets(x)
        # groups of channels: each in one dimension
        is_grouped = values.ndim > x.ndim
        if is_grouped:
            values = values.flatten(2)
            dims = (2,)
        if self.fixed is None:
            y = self._estimated(values, dims)
        else:
            values = self._standardized(values, dims)
            y = self.fixed(values)
        maps = y.reshape(x.shape)
        out: Tensor = self.affine(maps)
        return out

    def _estimated(self, values: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the transform by the estimate: `power_transform.first_step` in operations that
        every runtime has.
        """
        h, v, _, low, high = standardize(values, dims, self.eps)
        mean = partial(torch.mean, dim=dims, keepdim=True)
        a = h.abs()
        sign, log = _sign_and_log(h, a)
        signed = sign * log
        # A captured form keeps its numbers in float16, where float32's smallest would be 0
        v = v.clamp_min(_TINY)
        least, most = step_bounds(low.clamp_max(-_TINY), high.clamp_min(_TINY))
        # An eighth of a, (1 + a) * l and d
        eighth = a * _EIGHTH
        grown = (eighth + _EIGHTH) * log
        d = grown - eighth
        # A 64th of a * e + d^2
        e = grown * log - 2.0 * d
        m45 = mean(eighth * e + d * d)
        m3 = mean(d)
        ratio = mean(h * d) / v
        bend = (m45 - m3 * m3) / v - 2.0 * ratio * ratio
        curvature = bend.clamp_min(MIN_CURVATURE * _EIGHTH**2)
        step = (mean(signed) * _EIGHTH**2 - ratio * _EIGHTH) / curvature
        kappa = self.effective_alpha * torch.minimum(torch.maximum(step, least), most)
        p = sign * kappa + 1.0
        return relative_growth(p * log) * signed

    def _standardized(self, values: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return standardized values alone: of sets that are the last dimensions by torch's own
        operation.
        """
        sizes = values.shape[dims[0] :]
        are_last = dims == tuple(range(dims[0], values.ndim))
        if are_last and all(isinstance(size, int) for size in sizes):
            return functional.layer_norm(values, sizes, eps=self.eps)
        return standardize(values, dims, self.eps)[0]


def standardize(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, ...]:
    """Return (x - mean) / sqrt(var + eps) of each set, its variance, the mean over sqrt(var + eps),
    and its smallest and largest value.
    """
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    low = centred.amin(dims, True)
    high = centred.amax(dims, True)
    root = math.sqrt(eps)
    inverse = 1.0 / torch.maximum(high, -low).clamp_min(max(root, _SMALLEST_HALF))
    small = centred * inverse
    rest = inverse * root
    power = (small * small).mean(dims, keepdim=True)
    rstd = torch.rsqrt(power + rest * rest)
    scale = inverse * rstd
    return small * rstd, power * rstd * rstd, mean * scale, low * scale, high * scale


class MigratedForm(nn.Module):
    """Group normalization of x', standardized already, at a strength t > 0: see
    `migrated_group_norm`.
    """

    # gamma over the gain, (C,)
    weight: Tensor
    bias: Tensor

    def __init__(
        self, groups: int, eps: float, strength: float, weight: Tensor, bias: Tensor
    ) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.strength = strength
        self.register_buffer("weight", weight.float())
        self.register_buffer("bias", bias.float())

    def forward(self, x: Tensor) -> Tensor:
        t = self.strength
        if t == 1:
            return functional.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        grouped = x.unflatten(1, (self.groups, -1)).flatten(2)
        # (1 - t) + t * (v + eps) is t times v + eps + (1 - t) / t
        h, _, mean, _, _ = standardize(grouped, (2,), self.eps + (1 - t) / t)
        y = (h + mean * (1 - t)) / math.sqrt(t)
        gamma = channel_view(self.weight, x)
        beta = channel_view(self.bias, x)
        return y.reshape(x.shape) * gamma + beta


class ChannelsFirstLayerNorm(nn.LayerNorm):
    """LayerNorm over C of (N, C, *), by way of the channels-last form that runtimes know."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Batched(nn.Module):
    """A form of input of `ndim` dimensions, (N, C, *), for a single sample, (C, *), too."""

    def __init__(self, form: nn.Module, ndim: int) -> None:
        super().__init__()
        self.form = form
        self.ndim = ndim

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == self.ndim:
            return self.form(x)
        return self.form(x.unsqueeze(0)).squeeze(0)
