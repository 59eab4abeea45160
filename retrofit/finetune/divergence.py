"""What is not finite in a network that diverged: its state, and the layer that diverged first."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrofit.layers.norm_classes import NORMS
from retrofit.utils.forward_pass import hooked

Fault = Literal["loss", "gradient", "state"]


def not_finite(model: nn.Module) -> str | None:
    """Name the first tensor of a network's state that holds NaN or infinity; None if none does."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            return name
    return None


def divergence_of(model: nn.Module, images: Tensor, fault: Fault) -> tuple[str, str]:
    """Say which layer diverged first, shown by a batch of images (N, C, H, W), and what to do.

    It is the first in the order of the computation whose statistics or outputs are not finite.
    Normalization layers come before all others: their statistics show a divergence before the loss
    does.
    """
    advice = "lower `lr` or `noise`, or lengthen `strength_ramp`"
    diverged = _diverged_modules(model, images)
    if diverged:
        first = min(diverged, key=_rank)
        names = {module: name for name, module in model.named_modules()}
        name = names[first] or "the network"
        kind = type(first).__name__
        return f"{name} ({kind}) went first", advice
    if fault != "gradient":
        return "no layer's output is affected", advice
    cause = "the loss and all layers are finite, so the cause is not `lr`"
    return cause, "start again with `amp=False`, or on another `device`"


def _diverged_modules(model: nn.Module, images: Tensor) -> list[nn.Module]:
    """Return the modules whose buffers or outputs are not finite, in the order of their calls."""
    diverged: list[nn.Module] = []

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = list(module.buffers(recurse=False))
        if isinstance(output, Tensor):
            tensors.append(output)
        if not all(tensor.isfinite().all() for tensor in tensors):
            diverged.append(module)

    hooks = (module.register_forward_hook(look) for module in model.modules())
    with hooked(hooks), torch.no_grad():
        model(images)
    return diverged


def _rank(module: nn.Module) -> int:
    """Return 0 for a normalization layer, 1 for another layer, 2 for what holds layers."""
    if isinstance(module, NORMS):
        return 0
    return 1 + any(True for _ in module.children())
