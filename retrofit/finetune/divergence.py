"""Where a network that diverged went wrong first."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers import FrozenBatchNorm, StrengthMixin
from retrofit.utils.hooks import hooked

_NORMS = (StrengthMixin, FrozenBatchNorm, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def not_finite(model: nn.Module) -> str | None:
    """Name the first parameter or buffer that is not finite; None if all are."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return name
    return None


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of the whole gradient, a scalar."""
    return nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])


def gradient_at_fault(model: nn.Module) -> str:
    """Name the parameter whose gradient keeps the whole gradient's norm from being finite.

    Gradients are computed from the loss backwards, and one that is not finite makes those before it so. It is the last
    in the order of the layers then; where each by itself is finite, the largest.
    """
    norms = {name: float(one.grad.norm()) for name, one in model.named_parameters() if one.grad is not None}
    broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
    return broken[-1] if broken else max(norms, key=norms.__getitem__)


def first_to_diverge(model: nn.Module, images: Tensor) -> str | None:
    """Name the first layer, in the order of the computation, whose statistics or outputs are not finite.

    The step is repeated without gradients and with the same mode. Normalization layers are asked first, because
    their statistics are where a divergence shows before the loss does; then all other layers.

    Args:
        model: A network that diverged.
        images: The batch that showed it, (N, C, H, W).

    Returns:
        The layer's name; None if all layers are finite.
    """
    names = {module: name for name, module in model.named_modules()}
    diverged: list[nn.Module] = []

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        buffers = [buffer for buffer in module.buffers(recurse=False) if buffer.is_floating_point()]
        outputs = [output] if isinstance(output, Tensor) and output.is_floating_point() else []
        if not all(bool(tensor.isfinite().all()) for tensor in (*buffers, *outputs)):
            diverged.append(module)

    with hooked(module.register_forward_hook(look) for module in names), torch.no_grad():
        model(images)
    norms: list[nn.Module] = [module for module in diverged if isinstance(module, _NORMS)]
    for module in norms or [module for module in diverged if not list(module.children())] or diverged:
        return f"{names[module] or 'the network'} ({type(module).__name__})"
    return None
