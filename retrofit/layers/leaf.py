"""Layers that fx records as one call, whoever traces: timm's and torchvision's feature extractors, torch.fx itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import fx, nn
from torch.nn.modules.module import _forward_unimplemented

from retrofit.errors import RetrofitError


class LeafMixin(nn.Module):
    """A layer whose forward, met by a trace, becomes a node that calls the layer.

    A trace would otherwise enter it and fail at the first look at a shape; and what is no longer a layer can neither be
    set to a strength nor converted or exported.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the class's forward, its own or a library's, record itself."""
        super().__init_subclass__(**kwargs)
        forward: Callable[..., Any] = cls.forward
        if forward is not _forward_unimplemented and not hasattr(forward, "_records_itself"):
            cls.forward = _recording(forward)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which does not know the language that the layers are written in."""
        raise RetrofitError(
            f"torch.jit.script cannot compile {type(self).__name__}; use torch.jit.trace, torch.compile or torch.export"
        )


def _recording(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Any) -> Any:
        tracer: Any = x.tracer if isinstance(x, fx.Proxy) else None
        if tracer is not None and (name := tracer.path_of_module(self)):
            return tracer.create_proxy("call_module", name, (x,), {})
        return forward(self, x)

    vars(wrapper)["_records_itself"] = True
    return wrapper
