"""What a value was, remembered, and put back where it has changed.

Each `..._restorer` remembers one value and returns the function that puts it back; what did not
change is not written to.
"""

import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Undo = Callable[[], Any]
"""Puts back what was remembered."""

Reader = Callable[[Any], Iterable[Any]]
"""Returns the values that a container holds, in a fixed order."""

# What stands for a name or a slot that holds nothing.
ABSENT = object()


def tensor_restorer(tensor: Tensor, written: bool) -> Undo:
    """Remember a tensor: its class, its gradient, where its values lie, and, if they may be
    written to, the values.
    """
    put_class_back = class_restorer(tensor)
    trained = tensor.requires_grad
    gradient = None
    if tensor.is_leaf:
        gradient = tensor.grad
    memory = tensor.data
    # What another library makes of a tensor, a shard or a quantized one, is its own to keep.
    is_ordinary = type(tensor) in (Tensor, nn.Parameter) and memory.layout == torch.strided
    put_values_back = _values_restorer(memory, written and is_ordinary)

    def restore() -> None:
        put_class_back()
        if _layout_of(tensor) != _layout_of(memory):
            tensor.data = memory
        if tensor.requires_grad != trained:
            tensor.requires_grad_(trained)
        if tensor.is_leaf and tensor.grad is not gradient:
            tensor.grad = gradient
        put_values_back()

    return restore


def _values_restorer(memory: Tensor, written: bool) -> Undo:
    """Remember the values in a tensor's memory, on the CPU, if they may be written to."""
    if not written or memory.is_meta:
        return lambda: None
    values = memory.to("cpu", copy=True)

    def restore() -> None:
        if not torch.equal(memory.to("cpu"), values):
            with torch.inference_mode(memory.is_inference()):
                memory.copy_(values)

    return restore


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's type and device, and where its values lie if it is an ordinary one."""
    placement = tensor.dtype, tensor.device, tensor.layout
    if tensor.layout != torch.strided or not hasattr(tensor, "shape"):
        return placement
    address = 0 if tensor.is_meta else tensor.data_ptr()
    return *placement, tensor.shape, tensor.stride(), address


@dataclass(frozen=True)
class Binding:
    """What holds a value: the name of a global, a slot of an object, a cell of a closure.

    Attributes:
        look: Returns what stands there now, `ABSENT` if nothing does.
        put: Puts a value there.
        clear: Takes away what stands there.
    """

    look: Callable[[], Any]
    put: Callable[[Any], Any]
    clear: Callable[[], Any]

    def restorer(self) -> Undo:
        """Remember what stands there."""
        before = self.look()

        def restore() -> None:
            if self.look() is before:
                return
            if before is ABSENT:
                self.clear()
            else:
                self.put(before)

        return restore


def global_binding(namespace: dict[str, Any], name: str) -> Binding:
    """Return the binding of a global, which need not be there."""
    return Binding(
        functools.partial(namespace.get, name, ABSENT),
        functools.partial(namespace.__setitem__, name),
        functools.partial(namespace.pop, name),
    )


def slot_binding(value: Any, slot: Any) -> Binding:
    """Return the binding of a slot of an object, or of a cell of a closure."""
    return Binding(
        functools.partial(_slot_content, slot, value),
        functools.partial(slot.__set__, value),
        functools.partial(slot.__delete__, value),
    )


def _slot_content(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    # An empty slot says it by the former, an empty closure by the latter.
    except (AttributeError, ValueError):
        return ABSENT


def class_restorer(value: Any) -> Undo:
    """Remember the class of an object."""
    cls = type(value)

    def restore() -> None:
        if type(value) is not cls:
            value.__class__ = cls

    return restore


def content_restorer(container: Any) -> Undo:
    """Remember what a container holds, in its order."""
    cls = container_class(container)
    read = READERS[cls]
    size = len(container)
    items = [*read(container)]

    def restore() -> None:
        if len(container) == size:
            # Whether the values are the same objects, one by one.
            are_same = map(operator.is_, read(container), items)
            if all(are_same):
                return
        cls.clear(container)
        if isinstance(container, dict):
            keys = items[:size]
            values = items[size:]
            entries = zip(keys, values, strict=True)
            cls.update(container, entries)
        elif isinstance(container, set):
            cls.update(container, items)
        else:
            cls.extend(container, items)

    return restore


def container_class(container: Any) -> Any:
    """Return the class of `READERS` that a container is of."""
    return next(cls for cls in type(container).__mro__ if cls in READERS)


def _read_dict(cls: Any) -> Reader:
    """Return the function that reads the keys, then the values, of a dict of a class."""
    return lambda value: chain(cls.keys(value), cls.values(value))


READERS: dict[Any, Reader] = {
    OrderedDict: _read_dict(OrderedDict),
    dict: _read_dict(dict),
    **dict.fromkeys((list, set, deque), iter),
}
"""The functions that read what a container holds, by class; a subclass of dict comes before dict.
A subclass of these may load or compute what it gives.
"""


def generator_restorer(generator: Any) -> Undo:
    """Remember the state of a random generator of torch, Python or NumPy."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())


def array_restorer(array: Any) -> Undo:
    """Remember the values of an array, unless it is read-only: a view of a constant, say."""
    if not array.flags.writeable:
        return lambda: None
    return functools.partial(np.copyto, array, array.copy())


def attributes_of(cls: type) -> dict[str, Any]:
    """Return the attributes of a class but for those of special names, `__name__`."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") and name.endswith("__"))
    }


def attributes_restorer(cls: type) -> Undo:
    """Remember the attributes of a class."""
    attributes = attributes_of(cls)

    def restore() -> None:
        present = attributes_of(cls)
        new_names = present.keys() - attributes.keys()
        for name in new_names:
            type.__delattr__(cls, name)
        for name, value in attributes.items():
            current = vars(cls).get(name, ABSENT)
            if current is not value:
                type.__setattr__(cls, name, value)

    return restore
