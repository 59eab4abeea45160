"""BatchNorm whose statistics no longer move: constants per channel, and gamma and beta, which are
trained.
"""

from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.layers import kernels
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.converted_layer import ConvertedLayer, ThenActivate, reset_affine
from retrofit.layers.inference_forms import ChannelAffine, channel_view
from retrofit.layers.kernels.eager import compute_dtype

Constants = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def of_one_type(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Constants:
    """Return statistics, gamma and beta, (C,) each, as `F.batch_norm` of `x` takes them.

    It takes them in one type. FSDP2 with a policy of mixed precision casts parameters and leaves
    buffers as they are; all are then computed in float32 (float64 for float64 input).
    """
    if weight is None or weight.dtype == mean.dtype:
        return mean, var, weight, bias
    exact = compute_dtype(x)
    beta = None if bias is None else bias.to(exact)
    return mean.to(exact), var.to(exact), weight.to(exact), beta


class ConstantStatistics(ConvertedLayer):
    """BatchNorm's running statistics, which are constants here, under BatchNorm's names."""

    # The layer does not know of how many dimensions its BatchNorm was.
    source_name: ClassVar[str] = "BatchNorm2d"
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    eps: Any

    def _hold_statistics(self, channels: int, device: Any, dtype: Any) -> None:
        self.register_buffer("running_mean", torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(channels, device=device, dtype=dtype))
        self.register_buffer(
            "num_batches_tracked", torch.zeros((), device=device, dtype=torch.long)
        )

    reset_parameters = reset_affine

    def source_layer(self) -> nn.Module:
        return super().source_layer().eval()

    def _build_source(self, cls: Any) -> nn.Module:
        new: nn.Module = cls(self.running_mean.numel(), float(self.eps), device="meta")
        return new

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        return None, trained_affine(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the checkpoint of a FrozenBatchNorm2d, which counts no batches."""
        state_dict.setdefault(prefix + "num_batches_tracked", self.num_batches_tracked)
        super()._load_from_state_dict(state_dict, prefix, *args)


class FrozenBatchNorm(ConstantStatistics):
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias per channel, in training and
    evaluation alike.

    Parameters and buffers have BatchNorm's names, so a checkpoint of either layer loads into the
    other. Unlike in torchvision's FrozenBatchNorm2d, `weight` and `bias` are trained. No sample
    influences another. The class is not a subclass of torch's `_BatchNorm`, because functions that
    synchronize or re-estimate BatchNorm would unfreeze it.

    Args:
        num_features: Number of channels C.
        eps: Added to the running variance.
        affine: Whether to learn `weight` and `bias`.
        device: Device of parameters and buffers.
        dtype: Type of parameters and running statistics.
        bias: Whether to learn `bias` (only with `affine`).

    Shape:
        Input (N, C, *); the output has the same shape, type and memory format.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.affine = affine
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if affine:
            ones = torch.ones(num_features, device=device, dtype=dtype)
            self.weight = nn.Parameter(ones)
            if bias:
                self.bias = nn.Parameter(torch.zeros_like(ones))
        self._hold_statistics(num_features, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        constants = self.running_mean, self.running_var, self.weight, self.bias
        triton = kernels.triton_for(x)
        plan = None if triton is None else triton.channel_plan(x)
        if triton is None or plan is None:
            return functional.batch_norm(x, *of_one_type(x, *constants), eps=self.eps)
        out: Tensor = triton.ChannelMapOnGPU.apply(x, *constants, self.eps, plan)
        return out

    def channel_map(self) -> ChannelMap:
        return ChannelMap.of(self.running_mean, self.running_var, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, bias={self.bias is not None}"


class FrozenBatchNormAct(ThenActivate, FrozenBatchNorm):
    """Frozen batch normalization, then `drop` and `act`: a counterpart of timm's BatchNormAct2d."""


class PlainAffine(ConvertedLayer):
    """An affine map per channel in a plain network, which no library has a layer for."""

    def source_layer(self) -> nn.Module:
        return self


class ConstantAffine(PlainAffine):
    """x * scale + shift per channel, (C,): what is left of migrated statistics where no layer
    beside it takes them in.

    `channel_dim` is 1 for (N, C, *), -1 for (N, *, C); the output has the input's type. It has
    buffers and no parameters: what computes gradients per sample refuses a layer that has both.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("shift", shift.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        scale = channel_view(self.scale, x, self.channel_dim)
        shift = channel_view(self.shift, x, self.channel_dim)
        return (x * scale + shift).to(x.dtype)

    def _form(self) -> list[nn.Module]:
        return [ChannelAffine(self.scale, self.shift, self.channel_dim)]


class TrainedAffine(PlainAffine, nn.Conv1d):
    """x * gamma + beta per channel of (N, C, *): a convolution of size 1, whose gradients per
    sample libraries know.
    """

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        gamma = torch.ones_like(bias) if weight is None else weight  # type: ignore[arg-type]
        super().__init__(len(gamma), len(gamma), 1, groups=len(gamma), bias=False, device="meta")
        self.weight = nn.Parameter(
            gamma.detach().view(-1, 1, 1), weight is not None and weight.requires_grad
        )
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(2) if input.ndim > 2 else input.unsqueeze(-1)
        return super().forward(rows).reshape(input.shape)

    def _form(self) -> list[nn.Module]:
        scale = self.weight.flatten()
        shift = torch.zeros_like(scale) if self.bias is None else self.bias
        return [ChannelAffine(scale, shift)]


def trained_affine(layer: Any) -> nn.Module:
    """Return the constants of a layer that is an affine map, then gamma and beta, dropout and
    activation.
    """
    constant = layer.channel_map()
    dtype = layer.running_mean.dtype
    affine = ConstantAffine(constant.scale.to(dtype), constant.shift.to(dtype))
    parts: OrderedDict[str, nn.Module] = OrderedDict(affine=affine)
    if layer.weight is not None or layer.bias is not None:
        parts["norm"] = TrainedAffine(layer.weight, layer.bias)
    return named_sequence(parts, layer)


def named_sequence(parts: OrderedDict[str, nn.Module], layer: ConvertedLayer) -> nn.Module:
    """Return named modules, then the dropout and the activation of a layer, one after the other."""
    fused = layer.fused_modules()
    children = {name: child for name, child in layer.named_children() if child in fused}
    named = OrderedDict(parts, **children)
    if len(named) == 1 and parts:
        return next(iter(named.values()))
    return nn.Sequential(named) if named else nn.Identity()
