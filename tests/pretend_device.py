"""A device that is not there: tensors that lie on "cuda" by name, in the CPU's memory, and refuse
to meet others.

What a GPU would refuse, this does: an operation on tensors of both devices (numbers, tensors
without dimensions, may be mixed as on a GPU), and reading a pretended tensor's memory. It proves
that code follows the device of its network; it says nothing of numbers or speed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("xla", 0)


class Pretended(Tensor):  # a tensor on the device, around one on the CPU
    inner: Tensor
    device = DEVICE  # type: ignore[assignment]
    is_meta = False  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        new: Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device="meta",
            requires_grad=False,
        )
        new.inner = inner
        return new

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented  # `_Operations` is asked first


class _Operations(TorchDispatchMode):
    """Computes with what pretended tensors hold, and makes new ones where that is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [isinstance(tensor, Pretended) for tensor in tensors]
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if (
            any(there)
            and not copies
            and any(t.ndim and not p for t, p in zip(tensors, there, strict=True))
        ):
            raise RuntimeError(
                f"{func} met tensors of two devices: {', '.join(str(t.device) for t in tensors)}"
            )
        to_there = any(there) if func.overloadpacket is not torch.ops.aten.copy_ else there[0]
        if (device := kwargs.get("device")) is not None:
            to_there, kwargs["device"] = torch.device(device).type != "cpu", torch.device("cpu")
        plain = tree_map(
            lambda value: value.inner if isinstance(value, Pretended) else value, (args, kwargs)
        )
        out = func(*plain[0], **plain[1])
        for tensor in tensors if func._schema.is_mutable else ():
            if (tensor.inner if isinstance(tensor, Pretended) else tensor) is out:
                return tensor
        return tree_map(
            lambda value: Pretended(value) if isinstance(value, Tensor) and to_there else value, out
        )


class _Literals(
    TorchFunctionMode
):  # the same for `torch.tensor`, which tells dispatch modes nothing
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            return Pretended(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def pretended(model: nn.Module) -> Iterator[nn.Module]:
    """Move a network's parameters and buffers there for a while; what is made meanwhile can be made
    there.
    """

    def moved(tensor: Tensor) -> Tensor:
        new = Pretended(tensor.detach().clone())
        return nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new

    # Torch asks a device's module for its random state.
    states = SimpleNamespace(get_rng_state=lambda device: None, set_rng_state=lambda *_: None)
    with patch.object(torch, DEVICE.type, states, create=True), _Operations(), _Literals():
        for module in model.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    store[name] = None if tensor is None else moved(tensor)  # type: ignore[assignment]
        yield model
