"""Where a network that diverged went wrong first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers import StrengthMixin

_NORMS = (StrengthMixin, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def is_finite(model: nn.Module) -> bool:
    """Whether every parameter and buffer is finite."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def first_to_diverge(model: nn.Module, images: Tensor) -> str:
    """Name the first layer, in the order of the computation, whose statistics or outputs are not finite.

    The step is repeated without gradients and with the same mode. Normalization layers are asked first, because
    their statistics are where a divergence shows before the loss does; then all other layers.

    Args:
        model: A network whose loss or parameters are not finite.
        images: The batch that showed it, (N, C, H, W).

    Returns:
        The layer's name, or a sentence if all layers are finite.
    """
    names = {module: name for name, module in model.named_modules()}
    diverged: list[nn.Module] = []

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        buffers = [buffer for buffer in module.buffers(recurse=False) if buffer.is_floating_point()]
        outputs = [output] if isinstance(output, Tensor) and output.is_floating_point() else []
        if not all(bool(tensor.isfinite().all()) for tensor in (*buffers, *outputs)):
            diverged.append(module)

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    norms: list[nn.Module] = [module for module in diverged if isinstance(module, _NORMS)]
    for module in norms or [module for module in diverged if not list(module.children())] or diverged:
        return f"{names[module] or 'the network'} ({type(module).__name__})"
    return "no layer, only the loss"
