"""What torch.func, forward-mode differentiation and jit.trace ask of layers with derivatives of
their own.

They follow each torch operation, so nothing may go past them: no kernel, no custom autograd
function, no branch on a value, no constant kept from an earlier call. Layers have a plain path of
torch operations for them, which has derivatives of any order.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_REFUSAL = (
    b"retrofit's layers have no second derivative through create_graph=True; "
    b"take it by torch.func (grad, jacrev, hessian of functional_call), which has it"
)


# torch.compile of torch 2.11 sends gradients past a custom autograd function (pytorch issue
# 180642), and versions before it break the graph there: they follow the plain operations, as
# torch.func does. So does torch.export, which writes a function's forward into the program without
# a derivative.
_COMPILES_CUSTOM_FUNCTIONS = torch.__version__ >= "2.12"


def transformed() -> bool:
    """Whether torch.func, forward-mode differentiation, jit.trace, torch.export or an old
    torch.compile follows the operations that run now.
    """
    if torch.compiler.is_compiling():
        by_functions = _COMPILES_CUSTOM_FUNCTIONS and not exporting()
        return not by_functions or torch._C._are_functorch_transforms_active()
    return followed()


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """Whether torch.export follows the operations that run now. torch.compile of old versions
    answers True for itself where it follows the call below.
    """
    return torch.compiler.is_exporting()


def followed() -> bool:
    """Whether a compiler or a transform follows the operations that run now."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return bool(torch._C._is_tracing()) or forward_ad._current_level >= 0


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Refuse the second derivative of a custom backward. torch's own `once_differentiable` does so
    only where an incoming gradient requires grad: a gradient penalty added to a loss passes there,
    as a constant, without a word.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled() or followed():
            return backward(ctx, *grads)
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        return _refusing_derivatives(gradients)

    return wrapper


def _refusing_derivatives(gradients: tuple[Tensor | None, ...]) -> Any:
    """Return the gradients, which raise an error where their own gradient is taken."""
    refuse: Any = torch._C._functions.DelayedError(_REFUSAL, len(gradients))
    return refuse(*(None if grad is None else grad.detach().requires_grad_() for grad in gradients))


def needed(ctx: Any, first: int, gradients: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients of inputs number `first` on, None for those that are absent or take
    none.
    """
    return [
        gradient if wanted else None
        for gradient, wanted in zip(gradients, ctx.needs_input_grad[first:], strict=False)
    ]
