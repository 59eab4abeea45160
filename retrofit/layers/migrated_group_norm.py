"""GroupNorm and LayerNorm that start as the BatchNorm they replace, by its running statistics."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.layers.base import StrengthMixin, shown
from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.constant_affine import named_sequence, trained_affine
from retrofit.layers.converted_layer import no_plain_layer, reset_affine
from retrofit.layers.forms import ConstantNorm, MigratedForm
from retrofit.layers.group_affine import GroupAffine, group_affine, moments
from retrofit.layers.kernels import channelwise
from retrofit.layers.norm_act import _ThenActivate
from retrofit.layers.normality_norm import compute_dtype
from retrofit.layers.sets import group_sets
from retrofit.layers.settings import check_groups, hold_settings
from retrofit.layers.transforms import transformed


def migrated_group_norm(
    x: Tensor,
    num_groups: int,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    strength: Tensor | float = 1.0,
    eps: Tensor | float = 1e-5,
    source_eps: Tensor | float | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    """Standardise by constant running statistics, then group-normalize as far as t = `strength` says.

        x' = (x - running_mean) / sqrt(running_var + source_eps) * gain       per channel
        y  = (x' - t * m) / sqrt((1 - t) + t * (v + eps)) * weight / gain + bias

    where m and v are the mean and variance of x' per sample and group. At t = 0 this is `F.batch_norm` in evaluation,
    whatever the gain, at t = 1 `F.group_norm` of x' with the weight divided by the gain; one group normalizes each
    whole sample, as LayerNorm over (C, *). The gain is how much a channel counts in its group's moments.

    All of it is one scale and one shift per sample and channel, which follow from the moments of x per sample and
    channel; of the activations only x is kept for the backward. Statistics are float32 at least. Running statistics,
    gain and t are constants to autograd; there is no second derivative.

    Args:
        x: (N, C, *), floating point, 2 dimensions or more.
        num_groups: Groups G; divides C.
        running_mean: (C,).
        running_var: (C,).
        weight: gamma (C,) or None for ones.
        bias: beta (C,) or None for zeros.
        strength: t in [0, 1]; a 0-dim tensor changes without recompilation.
        eps: Added to the group variance, in proportion; a number or a 0-dim tensor.
        source_eps: Added to the running variance; `eps` if None.
        gain: (C,) positive, or None for ones.

    Returns:
        (N, C, *) in the type and memory format of `x`.

    Raises:
        ValueError: If `x` has fewer than 2 dimensions or not C channels, or G does not divide C.
    """
    channels = running_mean.numel()
    if x.ndim < 2 or x.shape[1] != channels:
        raise ValueError(f"expected (N, {channels}, *), got {tuple(x.shape)}")
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups must divide the {channels} channels, got {num_groups}")
    source_eps = eps if source_eps is None else source_eps
    maps = x if x.ndim > 2 else x.unsqueeze(-1)
    given = weight, bias, running_mean.detach(), running_var.detach(), None if gain is None else gain.detach()
    layout = channelwise.layout_of(maps, *given, per_sample=True)
    if layout is not None:
        if float(strength) == 0 and all(g is None or g.dtype == x.dtype for g in given):
            # To the last bit: there are networks that amplify a rounding error ten thousand times.
            return functional.batch_norm(x, given[2], given[3], weight, bias, eps=float(source_eps))
        numbers = num_groups, float(strength), float(eps), float(source_eps)
        out: Tensor = channelwise.MigratedNorm.apply(maps, *given, *numbers, layout)
        return out.view_as(x) if x.ndim == 2 else out
    dtype = compute_dtype(x)
    gamma = torch.ones_like(running_mean, dtype=dtype) if weight is None else weight.to(dtype)
    beta = torch.zeros_like(running_mean, dtype=dtype) if bias is None else bias.to(dtype)
    t = torch.as_tensor(strength, dtype=dtype, device=x.device)
    rstd = torch.rsqrt(running_var.to(dtype) + source_eps)
    gain = torch.ones_like(rstd) if gain is None else gain.to(dtype)
    constants = running_mean.detach().to(dtype), rstd.detach(), gain.detach()
    # (a * x' - m) / a = x' - m / a: the gain enters through the moments alone.
    if transformed():
        tables = *moments(maps.to(dtype)), *constants
        out, _, _ = group_affine(maps, *tables, gamma, beta, t.detach(), num_groups, eps)
    else:
        tables = *moments(maps.detach().to(dtype)), *constants
        out = GroupAffine.apply(maps, *tables, gamma, beta, t, num_groups, eps)
    return out.view_as(x) if x.ndim == 2 else out


@torch.no_grad()
def group_gain(weight: Tensor | None, num_groups: int) -> Tensor | None:
    """The gain with which a trained channel counts in its group's variance in proportion to |gamma|.

    A trained network has switched off some of its channels by their gamma. What passes through those says nothing about
    the scale of what the next layer sees, yet would count in full. Every channel counts for a hundredth of the mean at
    least, so that training may bring it back.

    Args:
        weight: gamma (C,), or None.
        num_groups: Groups G; divides C.

    Returns:
        sqrt(|gamma| / mean |gamma|) with the mean over the group, (C,) in the type of `weight`; None without one.
    """
    if weight is None:
        return None
    power = weight.double().abs().view(num_groups, -1)
    power = power.clamp_min(0.01 * power.mean(1, keepdim=True))
    power = torch.where(power > 0, power, 1.0)  # a group that is off as a whole
    return (power / power.mean(1, keepdim=True)).sqrt().flatten().to(weight.dtype)


@torch.no_grad()
def settled_eps(weight: Tensor | None, running_var: Tensor, eps: float, num_groups: int) -> float:
    """BatchNorm's eps as it counts in standardised units, so that a group's variance and eps add up to one on average.

    Standardising leaves a channel var / (var + eps) of variance, little where the channel is nearly dead. GroupNorm
    with BatchNorm's own eps would scale what is left up again, and the network with it.

    Args:
        weight: gamma, (C,), or None.
        running_var: (C,).
        eps: BatchNorm's.
        num_groups: Groups G; divides C.
    """
    if running_var.is_meta:
        return eps
    short = eps / (running_var.double() + eps)
    gain = group_gain(weight, num_groups)
    return float((short if gain is None else gain.square() * short).mean())


class MigratedGroupNorm(StrengthMixin, nn.GroupNorm):
    """GroupNorm of an input that was standardised by a BatchNorm's running statistics: see `migrated_group_norm`.

    It has the parameters and buffers of BatchNorm under BatchNorm's names, so that a checkpoint of one loads into the
    other; the buffers are constants, as are `gain`, (C,), which starts at ones (see `group_gain`), and `eps` and
    `group_eps`, 0-dim tensors. A conversion settles gain and group_eps by the source's statistics, and so does loading
    the source's checkpoint. `eps` is the BatchNorm's own, as code that reads the layer's tensors expects. No sample
    sees another, in training or evaluation, which are the same function.

    Args:
        num_groups: Groups G; 1 normalizes each whole sample.
        num_channels: Channels C, a multiple of G.
        eps: Added to the running variance: the BatchNorm's own eps, for its function at t = 0.
        affine: Learn `weight` and `bias`.
        device: Device of parameters and buffers.
        dtype: Type of parameters and running statistics.
        bias: With `affine`, learn `bias`.
        group_eps: Added to the group variance at t = 1. `eps` if None.
        strength: Initial t, in [0, 1]: 0 is BatchNorm in evaluation, 1 is GroupNorm.

    Shape:
        (N, C, *) to the same, in the input's type and memory format.

    Raises:
        ValueError: If G does not divide C or an argument is out of range.
    """

    source_name: ClassVar[str] = "BatchNorm2d"
    running_mean: Tensor
    running_var: Tensor
    gain: Tensor
    num_batches_tracked: Tensor
    eps: Tensor  # type: ignore[assignment]
    group_eps: Tensor

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        group_eps: float | None = None,
        strength: float = 1.0,
    ) -> None:
        if num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {num_groups}")
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        del self.eps
        self.set_eps(eps, eps if group_eps is None else group_eps, device, dtype)
        self.register_buffer("running_mean", torch.zeros(num_channels, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(num_channels, device=device, dtype=dtype))
        self.register_buffer("gain", torch.ones(num_channels, device=device, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.zeros((), device=device, dtype=torch.long))
        self._register_strength(strength, device)
        hold_settings(self, {"num_groups": partial(check_groups, num_channels)}, device)

    def set_eps(self, eps: float, group_eps: float, device: Any = None, dtype: Any = None) -> None:
        """Make the 0-dim buffers `eps` and `group_eps`, in float32 at least."""
        exact = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name, value in (("eps", eps), ("group_eps", group_eps)):
            self.register_buffer(name, torch.tensor(value, dtype=exact, device=device))

    def _apply(self, fn: Any, recurse: bool = True) -> MigratedGroupNorm:
        """Move as any module does, but let no half type round an eps to nothing."""
        before = {name: self._buffers[name] for name in ("eps", "group_eps")}
        super()._apply(fn, recurse)
        for name, value in before.items():
            now = self._buffers[name]
            if now is not None and value is not None and now.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = value.to(now.device)
        return self

    reset_parameters = reset_affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (N, C, *)."""
        return migrated_group_norm(
            x,
            self.num_groups,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            strength=self.strength,
            eps=self.group_eps,
            source_eps=self.eps,
            gain=self.gain,
        )

    def input_affine(self) -> tuple[Tensor, Tensor]:
        """Return (scale, shift), each (C,) in float64, of x' = x * scale + shift, the input's standardisation and gain.

        What follows it is group normalization with `weight / gain` and `bias`.
        """
        scale = torch.rsqrt(self.running_var.double() + self.eps) * self.gain.double()
        return scale, -self.running_mean.double() * scale

    def source_layer(self) -> nn.Module:
        """Return torch's or timm's BatchNorm, in evaluation, which has the same statistics."""
        return super().source_layer().eval()

    def _build_source(self, cls: Any) -> nn.Module:
        new: nn.Module = cls(self.num_channels, float(self.eps), device="meta")
        return new

    def channel_map(self) -> ChannelMap | None:
        """Return the map at strength 0."""
        if float(self.strength) != 0:
            return None
        return ChannelMap.of(self.running_mean, self.running_var, self.eps, self.weight, self.bias)

    def normalized_sets(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return a view of `x` and the dimensions that span a set there; the layer standardises `x` before."""
        return group_sets(self.num_groups, x)

    def _form(self) -> list[nn.Module]:
        if float(self.strength) == 0:
            return super()._form()
        scale, shift = self.input_affine()
        weight, bias = self._group_affine()
        form = MigratedForm(self.num_groups, float(self.group_eps), float(self.strength), weight, bias)
        return [ConstantNorm(self.running_mean, scale, torch.zeros_like(shift)), form]

    def _group_affine(self) -> tuple[Tensor, Tensor]:
        """Return gamma and beta of the group normalization behind `input_affine`, (C,) each in float64."""
        gain = self.gain.double()
        weight = 1 / gain if self.weight is None else self.weight.detach().double() / gain
        return weight, torch.zeros_like(gain) if self.bias is None else self.bias.detach().double()

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return the constants, and group normalization behind them at strength 1, gamma and beta at 0.

        Raises:
            RetrofitError: At a strength between.
        """
        t = float(self.strength)
        if t == 0:
            return None, trained_affine(self)
        if t != 1:
            raise no_plain_layer(f"at strength {t:g} it lies between BatchNorm and GroupNorm; set_strength(model, 1)")
        weight = self.weight
        like, trained = (self.gain, False) if weight is None else (weight, weight.requires_grad)
        gamma = nn.Parameter(self._group_affine()[0].to(like.dtype), requires_grad=trained)
        return self.input_affine(), self._group_norm(gamma)

    def _group_norm(self, gamma: nn.Parameter) -> nn.Module:
        """Return torch's or timm's group normalization with the given gamma, dropout and activation behind it."""
        new: Any = nn.GroupNorm(self.num_groups, self.num_channels, float(self.group_eps), device="meta")
        new.weight = gamma
        new.register_parameter("bias", self.bias)
        return named_sequence(OrderedDict(norm=new), self)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        tensors = [shown(name, getattr(self, name)) for name in ("eps", "group_eps", "strength")]
        parts = [f"{self.num_groups}, {self.num_channels}", *filter(None, tensors)]
        return ", ".join([*parts, f"affine={self.affine}, bias={self.bias is not None}"])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the source's checkpoint: with no `gain` in it, gain and group_eps are settled by what it holds."""
        weight, var = (state_dict.get(prefix + name, getattr(self, name)) for name in ("weight", "running_var"))
        defaults = {name: getattr(self, name).detach().clone() for name in ("gain", "eps", "group_eps")}
        fits = all(t is None or (t.shape == self.gain.shape and not t.is_meta) for t in (weight, var, self.gain))
        if prefix + "gain" not in state_dict and fits:
            gain = group_gain(weight, self.num_groups)
            defaults["gain"] = torch.ones_like(self.gain) if gain is None else gain
            defaults["group_eps"].fill_(settled_eps(weight, var, float(self.eps), self.num_groups))
        for name, value in defaults.items():
            state_dict.setdefault(prefix + name, value)
        super()._load_from_state_dict(state_dict, prefix, *args)


class MigratedGroupNormAct(_ThenActivate, MigratedGroupNorm):
    """Migrated group normalization, then `drop` and `act`: the counterpart of timm's BatchNormAct2d."""

    fused_source_name: ClassVar[str] = "BatchNormAct2d"

    def _group_norm(self, gamma: nn.Parameter) -> nn.Module:
        if any(True for _ in self.act.buffers()):  # constants, which are better not inside a layer that is trained
            return super()._group_norm(gamma)
        from timm.layers import GroupNormAct

        new = GroupNormAct(self.num_channels, self.num_groups, float(self.group_eps), device="meta")
        new.weight, new.drop, new.act = gamma, self.drop, self.act
        new.register_parameter("bias", self.bias)
        return new
