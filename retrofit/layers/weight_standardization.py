"""Convolutions with standardized weights (Qiao et al. 2019), able to start as the convolution they
replace.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers.inference_forms import constant_copy
from retrofit.layers.kernels.eager import compute_dtype
from retrofit.layers.strength import StrengthMixin


class WeightStandardization(StrengthMixin, nn.modules.conv._ConvNd):
    """Mixin for torch's convolutions: each output channel's weights are standardized over their
    fan-in.

    With mean and var over one output channel's weights, timm's StdConv uses w^ = (w - mean) /
    sqrt(var + eps). Here:

        weight used = w + t * ((w^ * restore_scale + restore_shift) * scale - w)

    At t = `strength` = 1, with scale 1 and shift 0 as constructed, that is StdConv; a
    `restore_scale` of gain * gamma / sqrt(fan-in) makes it ScaledStdConv, whose learned gain is
    redundant before a normalization layer. `seed_restore` stores the standard deviation and mean of
    the current weights instead. The layer is then the plain convolution at any t until training
    changes them, and keeps each channel's mean and scale from there on.

    The parameter keeps its name, `weight`, in the state dict. It is standardized in at least
    float32. Fan-in 1 (1x1 depthwise) leaves nothing to standardize and is refused.

    Args:
        *args: The convolution's own arguments.
        eps: Added to the variance: timm's 1e-6; the ProxyNorm paper uses 0.
        strength: Initial t, in [0, 1].
        scale: Learn a scale for each output channel, (C,), from 1: the one that the ProxyNorm paper
            puts after the last convolution of a residual block (appendix A.1), whose output no norm
            rescales.
        **kwargs: The convolution's own keyword arguments.

    Raises:
        ValueError: If an argument is out of range or the fan-in is 1.
    """

    restore_scale: Tensor
    restore_shift: Tensor
    scale: nn.Parameter | None

    def __init__(
        self,
        *args: Any,
        eps: float = 1e-6,
        strength: float = 1.0,
        scale: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if eps < 0:
            raise ValueError(f"eps must be at least 0, got {eps}")
        if self.weight[0].numel() < 2:
            raise ValueError(
                "each output channel has a single weight: there is nothing to standardize"
            )
        self.eps = eps
        ones = torch.ones(len(self.weight), device=self.weight.device, dtype=self.weight.dtype)
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        self.register_buffer("restore_scale", torch.ones_like(ones, dtype=exact))
        self.register_buffer("restore_shift", torch.zeros_like(ones, dtype=exact))
        self.register_parameter("scale", nn.Parameter(ones) if scale else None)
        self._register_options(self.weight.device, strength=strength)

    @torch.no_grad()
    def seed_scale(self) -> None:
        """Start the learned scale at the standard deviation of the current weights, per output
        channel.
        """
        if self.scale is not None:
            self.scale.copy_(self._moments(self.weight.to(self.restore_scale.dtype))[1].flatten())

    @torch.no_grad()
    def seed_restore(self) -> None:
        """Store the mean and standard deviation of the current weights, per output channel."""
        mean, std = self._moments(self.weight.to(self.restore_scale.dtype))
        self.restore_scale.copy_(std.flatten())
        self.restore_shift.copy_(mean.flatten())

    def standardized_weight(self) -> Tensor:
        """Return the weight that the convolution uses, in the shape and type of `weight`."""
        dtype = compute_dtype(self.weight)
        weight = self.weight.to(dtype)
        shape = (-1, *(1,) * (weight.ndim - 1))
        mean, std = self._moments(weight)
        scale = self.restore_scale.to(dtype).view(shape) / std
        shift = self.restore_shift.to(dtype).view(shape)
        standard = torch.addcmul(shift, weight - mean, scale)
        if self.scale is not None:
            learned = self.scale.to(dtype).view(shape)
            standard = standard * learned
        used = torch.lerp(weight, standard, self._t.to(dtype))
        return used.to(self.weight.dtype)

    def source_layer(self) -> nn.Module:
        convolutions = nn.Conv1d, nn.Conv2d, nn.Conv3d
        new: Any = copy.copy(self)
        new.__class__ = next(cls for cls in convolutions if isinstance(self, cls))
        new._parameters = {name: self._parameters[name] for name in ("weight", "bias")}
        new._buffers = {}
        return new

    @torch.no_grad()
    def plain_layer(self) -> tuple[None, nn.Module]:
        """Return torch's convolution with the weights that this one uses now, no longer
        standardized in training.
        """
        new: Any = self.source_layer()
        new.weight = nn.Parameter(self.standardized_weight(), self.weight.requires_grad)
        return None, new

    def _form(self) -> list[nn.Module]:
        return [constant_copy(self.plain_layer()[1])]

    def _moments(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        dims = tuple(range(1, weight.ndim))
        mean = weight.mean(dims, keepdim=True)
        var = (weight - mean).square().mean(dims, keepdim=True)
        return mean, (var + self.eps).sqrt()

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = super()._conv_forward(input, self.standardized_weight(), bias)
        return out


class WeightStandardizedConv1d(WeightStandardization, nn.Conv1d):
    """`nn.Conv1d` with standardized weights: see `WeightStandardization`."""


class WeightStandardizedConv2d(WeightStandardization, nn.Conv2d):
    """`nn.Conv2d` with standardized weights: see `WeightStandardization`."""


class WeightStandardizedConv3d(WeightStandardization, nn.Conv3d):
    """`nn.Conv3d` with standardized weights: see `WeightStandardization`."""
