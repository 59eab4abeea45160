"""The layers of GroupNorm and LayerNorm that start as the BatchNorm they replace, by its running
statistics; their function is in `group_migration`.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers import kernels
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.converted_layer import (
    ThenActivate,
    check_groups,
    hold_settings,
    no_plain_layer,
)
from retrofit.layers.frozen_batch_norm import ConstantStatistics, named_sequence
from retrofit.layers.group_migration import (
    check_shape,
    group_gain,
    migrated_group_norm,
    settled_eps,
)
from retrofit.layers.inference_forms import ConstantNorm, MigratedForm
from retrofit.layers.kernels import channelwise
from retrofit.layers.proxy_norm import ProxyNorm
from retrofit.layers.strength import StrengthMixin, shown


class MigratedGroupNorm(StrengthMixin, ConstantStatistics, nn.GroupNorm):
    """GroupNorm of an input that was standardized with a BatchNorm's running statistics; see
    `migrated_group_norm`.

    Parameters and buffers have BatchNorm's names, so a checkpoint of either layer loads into the
    other. The buffers are constants. So are `gain`, (C,), which starts at ones (see `group_gain`),
    and `eps` and `group_eps`, 0-dim tensors. A conversion computes gain and group_eps from the
    source's statistics; so does loading the source's checkpoint. `eps` is the BatchNorm's own, as
    expected by code that reads the layer's tensors. No sample influences another; training and
    evaluation compute the same function.

    Args:
        num_groups: Number of groups G; 1 normalizes each whole sample.
        num_channels: Number of channels C, a multiple of G.
        eps: Added to the running variance: the BatchNorm's own eps, for its function at t = 0.
        affine: Whether to learn `weight` and `bias`.
        device: Device of parameters and buffers.
        dtype: Type of parameters and running statistics.
        bias: Whether to learn `bias` (only with `affine`).
        group_eps: Added to the group variance at t = 1; `eps` if None.
        strength: Initial t, in [0, 1]: 0 is BatchNorm in evaluation, 1 is GroupNorm.

    Shape:
        Input (N, C, *); the output has the same shape, type and memory format.

    Raises:
        ValueError: If G does not divide C or an argument is out of range.
    """

    gain: Tensor
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
        exact = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name, value in (("eps", eps), ("group_eps", eps if group_eps is None else group_eps)):
            self.register_buffer(name, torch.tensor(value, dtype=exact, device=device))
        self._hold_statistics(num_channels, device, dtype)
        self.register_buffer("gain", torch.ones(num_channels, device=device, dtype=dtype))
        self._register_options(device, strength=strength)
        hold_settings(self, {"num_groups": partial(check_groups, num_channels)}, device)

    def _apply(self, fn: Any, recurse: bool = True) -> "MigratedGroupNorm":
        """Move as any module does, but let no half type round an eps to nothing."""
        exact = {"eps": self.eps, "group_eps": self.group_eps}
        super()._apply(fn, recurse)
        for name, value in exact.items():
            if self.get_buffer(name).itemsize < torch.float32.itemsize:
                self._buffers[name] = value.to(self.gain.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        affine = self.running_mean, self.running_var, self.weight, self.bias
        return migrated_group_norm(
            x,
            self.num_groups,
            *affine,
            strength=self._strength,
            eps=self.group_eps,
            source_eps=self.eps,
            gain=self.gain,
        )

    def input_affine(self) -> tuple[Tensor, Tensor]:
        """Return (scale, shift), each (C,) in float64, of x' = x * scale + shift: standardization
        and gain.
        """
        statistics = self.running_mean, self.running_var, self.eps
        return ChannelMap.of(*statistics, self.gain, None).affine()

    def channel_map(self) -> ChannelMap | None:
        if float(self.strength) != 0:
            return None
        return ChannelMap.of(self.running_mean, self.running_var, self.eps, self.weight, self.bias)

    def bakeable(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two where `weight` has gamma's sign, else gamma and beta (if gamma is 0, only
        beta counts).
        """
        gamma, beta = self.weight.view_as(weight), self.bias.view_as(bias)
        able = weight * gamma > 1e-3 * gamma.square()
        return torch.where(able, weight, gamma), torch.where(able, bias, beta)

    def bake(self, weight: Tensor, bias: Tensor) -> None:
        """Store the two in the running statistics; gamma and beta stay, for a ProxyNorm behind the
        layer reads them.
        """
        self.set_strength(0.0)
        gamma, beta, weight, bias = (
            values.double().flatten() for values in (self.weight, self.bias, weight, bias)
        )
        off = gamma == 0
        rstd = torch.rsqrt(self.running_var.double() + self.eps)
        rstd = rstd * torch.where(off, 1.0, weight / gamma)
        shift = torch.where(off, 0.0, (bias - beta) / (gamma * rstd))
        self.running_mean.copy_(self.running_mean.double() - shift)
        self.running_var.copy_(rstd.square().reciprocal())
        self.eps.zero_()

    def _form(self) -> list[nn.Module]:
        if float(self.strength) == 0:
            return super()._form()
        scale, shift = self.input_affine()
        weight = self._group_weight()
        bias = torch.zeros_like(weight) if self.bias is None else self.bias.detach()
        eps = float(self.group_eps)
        form = MigratedForm(self.num_groups, eps, float(self.strength), weight, bias)
        return [ConstantNorm(self.running_mean, scale, torch.zeros_like(shift)), form]

    def _group_weight(self) -> Tensor:
        return (1.0 if self.weight is None else self.weight.detach().double()) / self.gain.double()

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return the constants, and the layer behind them: group normalization at strength 1, gamma
        and beta at 0.

        Raises:
            RetrofitError: If the strength lies between 0 and 1.
        """
        t = float(self.strength)
        if t == 0:
            return super().plain_layer()
        if t != 1:
            raise no_plain_layer(
                f"at strength {t:g} it lies between BatchNorm and GroupNorm; set_strength(model, 1)"
            )
        new = self._group_norm()
        like = self.weight
        if like is None:
            like = self.gain
        gamma = self._group_weight().to(like.dtype)
        new.weight = nn.Parameter(gamma, requires_grad=like.requires_grad)
        new.register_parameter("bias", self.bias)
        if type(new) is nn.GroupNorm:
            new = named_sequence(OrderedDict(norm=new), self)
        return self.input_affine(), new

    def _has_values(self, *tensors: Tensor | None) -> bool:
        """Whether tensors hold a number for each channel, as far as there are any. torch says which
        has another shape.
        """
        present = [tensor for tensor in tensors if tensor is not None]
        return all(each.shape == self.gain.shape and not each.is_meta for each in present)

    def _group_norm(self) -> Any:
        eps = float(self.group_eps)
        return nn.GroupNorm(self.num_groups, self.num_channels, eps, device="meta")

    def extra_repr(self) -> str:
        sizes = f"{self.num_groups}, {self.num_channels}"
        tensors = [shown(name, getattr(self, name)) for name in ("eps", "group_eps", "strength")]
        own = f"affine={self.affine}, bias={self.bias is not None}"
        return ", ".join(filter(None, (sizes, *tensors, own)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the source's checkpoint: with running statistics and no `gain` in it, gain and
        group_eps are settled by what it holds.
        """
        own = {name: getattr(self, name).detach().clone() for name in ("gain", "eps", "group_eps")}
        weight = state_dict.get(prefix + "weight", self.weight)
        var = state_dict.get(prefix + "running_var")
        lacks_gain = prefix + "gain" not in state_dict
        if var is not None and lacks_gain and self._has_values(weight, var, self.gain):
            settled = group_gain(weight, self.num_groups)
            own["gain"] = torch.ones_like(own["gain"]) if settled is None else settled
            own["group_eps"].fill_(settled_eps(weight, var, float(self.eps), self.num_groups))
        for name, value in own.items():
            state_dict.setdefault(prefix + name, value)
        super()._load_from_state_dict(state_dict, prefix, *args)


class MigratedGroupNormAct(ThenActivate, MigratedGroupNorm):
    """Migrated group normalization, then `drop` and `act`: the counterpart of timm's
    BatchNormAct2d.
    """

    def _at_once(self, x: Tensor) -> Tensor | None:
        """Return the result, normalized and activated at once, where `act` is this layer's
        ProxyNorm, nothing looks at what lies between, and kernels for a GPU take `x`.
        """
        act = self.act
        if type(act) is not ProxyNorm or act.norm is not self or x.ndim < 3:
            return None
        between = self.drop, act
        if type(self.drop) is not nn.Identity or any(map(channelwise.is_watched, between)):
            return None
        triton = kernels.triton_for(x)
        kind = channelwise.known(act.activation)
        if triton is None or kind is None:
            return None
        check_shape(x, self.num_groups, self.num_channels)
        numbers = self.num_groups, self._strength, self.group_eps, self.eps
        tensors = self.weight, self.bias, self.running_mean, self.running_var, self.gain
        migration = triton.migrate(x, numbers, tensors)
        if migration is None:
            return None
        return act.proxied(x, None, migration.plan, migration, kind, triton)

    def _group_norm(self) -> Any:
        has_constants = any(True for _ in self.act.buffers())
        if has_constants:
            # Which are better not inside a layer that is trained
            return super()._group_norm()
        from timm.layers import GroupNormAct

        new = GroupNormAct(self.num_channels, self.num_groups, float(self.group_eps), device="meta")
        new.drop, new.act = self.drop, self.act
        return new
