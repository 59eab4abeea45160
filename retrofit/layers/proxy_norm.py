"""Proxy-normalized activations (Labatie et al., NeurIPS 2021, eq. 7), without batch statistics."""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.layers import kernels
from retrofit.layers.converted_layer import hold_settings
from retrofit.layers.frozen_batch_norm import ConstantAffine
from retrofit.layers.inference_forms import (
    ChannelAffine,
    FunctionModule,
    channel_view,
    constant_copy,
)
from retrofit.layers.kernels import channelwise
from retrofit.layers.kernels.eager import compute_dtype
from retrofit.layers.strength import StrengthMixin, shown


class ProxyNorm(StrengthMixin):
    """An elementwise activation, normalized by the moments that it would have on a Gaussian proxy
    of its input.

    Let y be the output of a normalization layer before its affine part, and gamma and beta that
    affine part. Per channel, the activation step phi(gamma * y + beta) becomes:

        z = (phi(gamma * y + beta) - E_p) / sqrt(Var_p + eps)
        E_p, Var_p = mean and variance of phi(gamma * Y + beta)
        Y ~ N(proxy_bias, (1 + proxy_scale)^2)

    E_p and Var_p are computed on `samples` values of Y, uniform in probability, in at least
    float32. They depend only on parameters, so training and evaluation compute the same function
    and no sample influences another. Gradients reach gamma, beta, `proxy_bias` and `proxy_scale`
    through E_p and Var_p. Nothing is kept between calls.

    gamma and beta belong to the preceding layer, `norm`, and stay registered there. ProxyNorm holds
    a plain reference to that layer, which `nn.Module` does not register, and reads `norm.weight`
    and `norm.bias` on every call. An unmodified model can keep calling `act(x)`, and copying or
    pickling the model keeps the pair together. If you replace the norm, call `follow` with the new
    one. `nn.DataParallel`, which copies modules one by one, is not supported;
    DistributedDataParallel is.

    Two options, not in the paper, are for networks trained without ProxyNorm; the default is the
    paper's layer:

    - `strength` t blends z with the plain activation, phi + t * (z - phi): the activation itself at
      t = 0, z at t = 1.
    - `restore` gives back what was removed: z * restore_scale + restore_shift, with
      sqrt(Var_p + eps) and E_p as they were when `seed_restore` was last called. The step is the
      plain activation until gamma or beta changes. From then on, each channel keeps the mean and
      scale that the next layer was trained for.

    Args:
        activation: Elementwise module or function. Parameters per channel (PReLU) are evaluated per
            channel.
        num_features: Number of channels C.
        norm: Layer whose `weight` and `bias` (each of C elements, or None) are gamma and beta; None
            if the activation follows a normalization without an affine part. See `follow`.
        eps: Added to Var_p. The paper found values below 0.03 harmful.
        params: Whether to learn `proxy_bias` and `proxy_scale`, both zero at first. The paper
            applies weight decay.
        scale: Whether to divide by sqrt(Var_p + eps). False only subtracts E_p, as before the final
            pooling.
        restore: Whether to give back what was removed (see above), seeded at construction.
        samples: Number of proxy samples, 256 in the paper.
        channel_dim: Dimension of the channels: 1 for (N, C, *), -1 for (N, *, C).
        strength: Initial t, in [0, 1].
        device: Device of parameters and buffers.
        dtype: Type of parameters; buffers have at least float32.

    Shape:
        Input (N, C, *) or (N, *, C) with at least 2 dimensions; the output has that shape and the
        activation's type.

    Raises:
        ValueError: If an argument is out of range, `norm` does not have C channels, or the
            activation is not elementwise.
    """

    proxy_bias: nn.Parameter | None
    proxy_scale: nn.Parameter | None
    restore_scale: Tensor | None
    restore_shift: Tensor | None

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor],
        num_features: int,
        *,
        norm: nn.Module | None = None,
        eps: float = 0.03,
        params: bool = True,
        scale: bool = True,
        restore: bool = False,
        samples: int = 256,
        channel_dim: int = 1,
        strength: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        _check_settings(num_features, samples, eps, channel_dim)
        self.activation = activation
        self.num_features = num_features
        self.channel_dim = channel_dim
        self.eps = eps
        self.scale = scale
        self.samples = samples
        # in a tuple, out of nn.Module's sight
        self._norm: tuple[nn.Module, ...] = ()
        for name in ("proxy_bias", "proxy_scale"):
            self.register_parameter(name, None)
            if params:
                zeros = torch.zeros(num_features, device=device, dtype=dtype)
                setattr(self, name, nn.Parameter(zeros))
        exact = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        for name, present in (("restore_scale", restore and scale), ("restore_shift", restore)):
            room = torch.empty(num_features, device=device, dtype=exact) if present else None
            self.register_buffer(name, room)
        self._register_options(device, strength=strength)
        hold_settings(self, {"scale": bool}, device)
        if isinstance(activation, nn.Module) and activation.state_dict():
            self.register_state_dict_post_hook(_unwrap_names)
        self.follow(norm)
        if restore:
            self.seed_restore()

    @property
    def norm(self) -> nn.Module | None:
        """The layer whose `weight` and `bias` are gamma and beta."""
        return self._norm[0] if self._norm else None

    def follow(self, norm: nn.Module | None) -> None:
        """Read gamma and beta from `norm.weight` and `norm.bias` from now on; either may be None or
        absent.

        Raises:
            ValueError: If one of them does not hold one value per channel.
        """
        for name in ("weight", "bias"):
            value = getattr(norm, name, None)
            if value is not None and tuple(value.shape) != (self.num_features,):
                raise ValueError(
                    f"norm.{name} is {tuple(value.shape)}, ProxyNorm needs ({self.num_features},)"
                )
        self._norm = () if norm is None else (norm,)

    @torch.no_grad()
    def seed_restore(self) -> None:
        """Store sqrt(Var_p + eps) and E_p of the current gamma and beta, which `restore` gives back
        from now on.

        Raises:
            ValueError: If the layer was built without `restore`.
        """
        if self.restore_shift is None:
            raise ValueError("this ProxyNorm has no restoring affine; build it with restore=True")
        mean, std = self.moments(self.restore_shift.dtype)
        self.restore_shift.copy_(mean)
        if self.restore_scale is not None:
            self.restore_scale.copy_(std)

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Return gamma and beta as they are now; refuse a gamma that is sharded apart from this
        module.
        """
        gamma, beta = (getattr(self.norm, name, None) for name in ("weight", "bias"))
        # to import its class takes longer than to import this package
        if type(gamma).__name__ == "DTensor":
            raise RetrofitError(
                "ProxyNorm reads gamma and beta of the norm before it, which are sharded apart from it; "
                "call fully_shard on the block that holds both, not on the norm"
            )
        return gamma, beta

    def moments(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return E_p and sqrt(Var_p + eps), each (C,), computed in `dtype` from the current gamma
        and beta.

        Raises:
            ValueError: If the activation is not elementwise.
        """
        proxy = self._samples_of_proxy(dtype)
        shape = proxy.shape
        kind = proxy.device.type
        # Under autocast some activations, PReLU among them, would drop to half.
        with torch.autocast("cpu" if kind == "meta" else kind, enabled=False):
            phi = self._activated(proxy)
        if phi.shape != shape:
            raise ValueError(
                f"the activation is not elementwise: it maps {tuple(shape)} to {tuple(phi.shape)}"
            )
        mean = phi.mean(0, keepdim=True)
        var = (phi - mean).square().mean(0)
        return mean.flatten(), (var.flatten() + self.eps).sqrt()

    def _samples_of_proxy(self, dtype: torch.dtype) -> Tensor:
        """Return gamma * Y + beta for each sample and channel, (samples, C, 1, 1) for channels
        first, else (samples, C).
        """
        gamma, beta = self._affine()
        device = self._code.device
        scale = torch.ones(self.num_features, device=device, dtype=dtype)
        shift = torch.zeros((), device=device, dtype=dtype)
        if self.proxy_scale is not None and self.proxy_bias is not None:
            scale = 1 + self.proxy_scale.to(dtype)
            shift = self.proxy_bias.to(dtype)
        if gamma is not None:
            scale = scale * gamma.to(dtype)
            shift = shift * gamma.to(dtype)
        if beta is not None:
            shift = shift + beta.to(dtype)
        steps = torch.arange(self.samples, device=device, dtype=dtype)
        quantiles = (2**0.5) * torch.erfinv((2 * steps + 1) / self.samples - 1)
        # Two dimensions behind: parameters of the activation broadcast as they do on (N, C, H, W),
        # whether they are (C,) of PReLU's own kind or (C, 1, 1).
        behind = (1, 1) if self.channel_dim == 1 else ()
        y = quantiles.view(-1, 1, *behind)
        return torch.addcmul(shift.view(-1, *behind), y, scale.view(-1, *behind))

    def _activated(self, proxy: Tensor) -> Tensor:
        """Apply the activation with its own parameters in the type of `proxy`, which some do not
        mix with another.
        """
        if not isinstance(self.activation, nn.Module):
            return self.activation(proxy)
        own = itertools.chain(self.activation.named_parameters(), self.activation.named_buffers())
        others = {n: v for n, v in own if v.is_floating_point() and v.dtype != proxy.dtype}
        if not others:
            return self.activation(proxy)
        cast = {name: value.to(proxy.dtype) for name, value in others.items()}
        return torch.func.functional_call(self.activation, cast, (proxy,))

    def constants(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return (scale, shift), each (C,): at its current strength, the layer computes phi * scale
        + shift.
        """
        mean, std = self.moments(dtype)
        scale = torch.ones_like(mean)
        if self.scale:
            restored = scale if self.restore_scale is None else self.restore_scale.to(dtype)
            scale = restored / std
        shift = -scale * mean
        if self.restore_shift is not None:
            shift = self.restore_shift.to(dtype) + shift
        t = self._t.to(dtype)
        return torch.lerp(torch.ones_like(scale), scale, t), t * shift

    def source_layer(self) -> nn.Module:
        if isinstance(self.activation, nn.Module):
            return self.activation
        return FunctionModule(self.activation)

    def _form(self) -> list[nn.Module]:
        scale, shift = self.constants(torch.float64)
        affine = ChannelAffine(scale, shift, self.channel_dim)
        return [constant_copy(self.source_layer()), affine]

    @torch.no_grad()
    def plain_layer(self) -> tuple[None, nn.Module]:
        """Return the activation, followed by its current normalization as constants that are not
        trained.
        """
        scale, shift = self.constants(torch.float64)
        like = self.strength if self.restore_shift is None else self.restore_shift
        affine = ConstantAffine(scale.to(like.dtype), shift.to(like.dtype), self.channel_dim)
        return None, nn.Sequential(OrderedDict(act=self.source_layer(), affine=affine))

    def forward(self, x: Tensor) -> Tensor:
        """Return phi(x), proxy-normalized; `x` is the output of the norm, with gamma and beta
        applied.

        Raises:
            ValueError: If `x` has another number of channels.
        """
        if x.ndim < 2 or x.shape[self.channel_dim] != self.num_features:
            where = f"dimension {self.channel_dim} of {tuple(x.shape)}"
            raise ValueError(f"ProxyNorm expects {self.num_features} channels in {where}")
        out = self._by_kernels(x)
        return self._by_formulas(x) if out is None else out

    def _by_formulas(self, x: Tensor) -> Tensor:
        scale, shift = self.constants(compute_dtype(x))
        scale = channel_view(scale, x, self.channel_dim)
        shift = channel_view(shift, x, self.channel_dim)
        phi = self.activation(x)
        return torch.addcmul(shift, phi, scale).to(phi.dtype)

    def _by_kernels(self, x: Tensor) -> Tensor | None:
        """Return the result by kernels, None where none take `x` and the activation."""
        kind = channelwise.known(self.activation)
        if kind is None:
            return None
        triton = kernels.triton_for(x)
        return self._on_cpu(x, kind) if triton is None else self._on_gpu(x, kind, triton)

    def _parameters_of_proxy(self) -> tuple[Tensor | None, ...]:
        """Return what the constants have derivatives by."""
        return *self._affine(), self.proxy_scale, self.proxy_bias

    def _on_cpu(self, x: Tensor, kind: channelwise.Activation) -> Tensor | None:
        """Return the result by kernels for a CPU, None where they do not take `x`."""
        tensors = *self._parameters_of_proxy(), self.restore_scale, self.restore_shift
        layout = channelwise.layout_of(x, *tensors, channel_dim=self.channel_dim)
        if layout is None:
            return None
        constants = kind, self.eps, float(self.strength), self.scale, self.samples
        out: Tensor = channelwise.ProxyActivation.apply(x, layout, constants, *tensors)
        return out

    def _on_gpu(self, x: Tensor, kind: channelwise.Activation, triton: Any) -> Tensor | None:
        """Return the result by kernels for a GPU, None where they do not take `x`."""
        plan = triton.channel_plan(x, self.channel_dim)
        if plan is None:
            return None
        norm = self.norm
        source = None
        if self.training and norm is not None and not channelwise.is_watched(norm):
            source = triton.input_of(x, *self._affine())
        if source is None or self.channel_dim != 1:
            return self.proxied(x, None, plan, None, kind, triton)
        before_norm, migration = source
        return self.proxied(before_norm, x.detach(), plan, migration, kind, triton)

    def proxied(
        self, x: Tensor, y: Tensor | None, plan: Any, migration: Any, kind: Any, triton: Any
    ) -> Tensor:
        """Return the result by kernels for a GPU; see `ProxyActivationOnGPU`. With a migration, `x`
        is the norm's input, to which the gradient goes, and `y` its output, if it is there.
        """
        settings = self.eps, self.scale, self.samples, self.restore_scale, self.restore_shift
        proxy = triton.Proxy(kind, self._strength, *settings, self.channel_dim)
        parameters = self._parameters_of_proxy()
        out: Tensor = triton.ProxyActivationOnGPU.apply(x, y, plan, migration, proxy, *parameters)
        return out

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the wrapped activation's entries under the names they had before it was wrapped."""
        if isinstance(self.activation, nn.Module):
            for name in self.activation.state_dict():
                if prefix + name in state_dict:
                    state_dict[f"{prefix}activation.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse tensors for the activation under its old names, as functional_call with a state
        dict sets them.
        """
        activation = vars(self).get("_modules", {}).get("activation")
        if isinstance(value, Tensor) and isinstance(getattr(activation, name, None), Tensor):
            raise AttributeError(
                f"ProxyNorm holds no {name}; name it activation.{name}, as named_parameters() does"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        text = (
            f"{self.num_features}, eps={self.eps}, params={self.proxy_bias is not None}, "
            f"scale={self.scale}, restore={self.restore_shift is not None}, "
            f"channel_dim={self.channel_dim}, {shown('strength', self.strength)}"
        )
        if isinstance(self.activation, nn.Module):
            return text
        return f"{getattr(self.activation, '__name__', repr(self.activation))}, {text}"


def _check_settings(num_features: int, samples: int, eps: float, channel_dim: int) -> None:
    if num_features < 1 or samples < 1 or eps < 0 or channel_dim not in (1, -1):
        raise ValueError(
            "need num_features and samples of at least 1, eps of at least 0, channel_dim 1 or -1; "
            f"got {num_features}, {samples}, {eps}, {channel_dim}"
        )


def _unwrap_names(module: ProxyNorm, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    inner = f"{prefix}activation."
    for key in [key for key in state_dict if key.startswith(inner)]:
        state_dict[prefix + key.removeprefix(inner)] = state_dict.pop(key)
