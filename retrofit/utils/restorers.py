"""What a value was, remembered, and put back where it has changed.

Each `..._restorer` remembers one value and returns the function that puts it back; what did not
change is not written to. `RestoreGroup` compares thousands of values at once.
"""

import copy
import functools
import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Undo = Callable[[], Any]
"""Puts back what was remembered."""

Reader = Callable[[list[Any]], Iterable[Any]]
"""Returns the values that objects of one class hold, in a fixed order."""

# What stands for a name or a slot that holds nothing.
ABSENT = object()


def tensor_restorer(tensor: Tensor, written: bool) -> Undo:
    """Remember a tensor: its class, its gradient, where its values lie, and, if they may be
    written to, the values, on the CPU.
    """
    cls = type(tensor)
    put_class_back = class_restorer(tensor)
    trained = tensor.requires_grad
    gradient = None
    if tensor.is_leaf:
        gradient = tensor.grad
    memory = tensor.data
    # What another library makes of a tensor, a shard or a quantized one, is its own to keep.
    ordinary = cls in (Tensor, nn.Parameter) and memory.layout == torch.strided
    values = None
    if written and ordinary and not memory.is_meta:
        values = memory.to("cpu", copy=True)

    def restore() -> None:
        put_class_back()
        if not _same_memory(tensor, memory):
            tensor.data = memory
        if tensor.requires_grad != trained:
            tensor.requires_grad_(trained)
        if tensor.is_leaf and tensor.grad is not gradient:
            tensor.grad = gradient
        if values is None:
            return
        values_now = memory.to("cpu")
        if not torch.equal(values_now, values):
            with torch.inference_mode(memory.is_inference()):
                memory.copy_(values)

    return restore


def _same_memory(tensor: Tensor, memory: Tensor) -> bool:
    return _layout_of(tensor) == _layout_of(memory)


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's type and device, and where its values lie if it is an ordinary one."""
    placement = tensor.dtype, tensor.device, tensor.layout
    if tensor.layout != torch.strided or not hasattr(tensor, "shape"):
        return placement
    address = 0 if tensor.is_meta else tensor.data_ptr()
    return *placement, tensor.shape, tensor.stride(), address


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
    items = [*read([container])]

    def restore() -> None:
        if len(container) == size and _are_same(read([container]), items):
            return
        if isinstance(container, list | bytearray):
            # A bytearray that a view shows cannot be emptied.
            cls.__setitem__(container, slice(None), items)
            return
        cls.clear(container)
        if isinstance(container, dict):
            keys = items[:size]
            values = items[size:]
            cls.update(container, zip(keys, values, strict=True))
        elif isinstance(container, set):
            cls.update(container, items)
        else:
            cls.extend(container, items)

    return restore


def _are_same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether the values are the same objects, one by one."""
    return all(map(operator.is_, values, others))


def container_class(container: Any) -> Any:
    """Return the class of `READERS` that a container is of."""
    return next(cls for cls in READERS if isinstance(container, cls))


class RestoreGroup:
    """Holders of one class that hold values: all are compared at once, and put back only if one of
    them differs.

    Args:
        read: Returns the values that they hold.
    """

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._holders: list[Any] = []
        self._undo: list[Undo] = []
        self._held: list[Any] = []
        self._sizes: list[int] = []

    def add(self, holder: Any, undo: Undo) -> None:
        """Add a holder, and what puts back what it holds."""
        self._holders.append(holder)
        self._undo.append(undo)

    def remember(self) -> None:
        """Remember what all of them hold."""
        self._held = [*self._read(self._holders)]
        self._sizes = [*map(len, self._holders)]

    def restore(self) -> None:
        """Put back what they held."""
        same_sizes = [*map(len, self._holders)] == self._sizes
        if same_sizes and _are_same(self._read(self._holders), self._held):
            return
        for undo in self._undo:
            undo()


def _read_dicts(cls: Any) -> Reader:
    """Return the function that reads the keys, then the values, of dicts of a class."""

    def read(dicts: list[Any]) -> Iterable[Any]:
        keys = chain.from_iterable(map(cls.keys, dicts))
        return chain(keys, chain.from_iterable(map(cls.values, dicts)))

    return read


def read_classes(attributes: list[Any]) -> Iterable[Any]:
    """Return the attributes of classes, whose `vars` are the holders."""
    return chain.from_iterable(map(MappingProxyType.values, attributes))


def read_globals(holders: list[Any]) -> Iterable[Any]:
    """Return the values of globals; a holder is a namespace and a name."""
    return (namespace.get(name, ABSENT) for namespace, name in holders)


READERS: dict[Any, Reader] = {
    OrderedDict: _read_dicts(OrderedDict),
    dict: _read_dicts(dict),
    **dict.fromkeys((list, set, deque, bytearray), chain.from_iterable),
}
"""The functions that read what containers hold, by class; a subclass of dict comes before dict."""


def generator_restorer(generator: Any) -> Undo:
    """Remember the state of torch's generator, or of NumPy's generator of old."""
    return functools.partial(generator.set_state, generator.get_state())


def random_restorer(generator: random.Random) -> Undo:
    """Remember the state of Python's generator."""
    return functools.partial(generator.setstate, generator.getstate())


def numpy_generator_restorer(generator: np.random.Generator) -> Undo:
    """Remember the state of NumPy's generator."""
    bits = generator.bit_generator
    return functools.partial(setattr, bits, "state", copy.deepcopy(bits.state))


def array_restorer(array: Any) -> Undo:
    """Remember the values of an array."""
    return functools.partial(np.copyto, array, array.copy())


def numbers_restorer(numbers: Any) -> Undo:
    """Remember the numbers of an array of Python's, which may have grown."""
    return functools.partial(numbers.__setitem__, slice(None), numbers[:])


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
        attributes_now = attributes_of(cls)
        new_names = attributes_now.keys() - attributes.keys()
        for name in new_names:
            type.__delattr__(cls, name)
        for name, value in attributes.items():
            if attributes_now.get(name, ABSENT) is not value:
                type.__setattr__(cls, name, value)

    return restore


def global_restorer(namespace: dict[str, Any], name: str) -> Undo:
    """Remember a global, or that there is none of that name."""
    value = namespace.get(name, ABSENT)

    def restore() -> None:
        if namespace.get(name, ABSENT) is value:
            return
        if value is ABSENT:
            del namespace[name]
        else:
            namespace[name] = value

    return restore


def slot_content(slot: Any, value: Any) -> Any:
    """Return what a slot of an object, or a cell of a closure, holds."""
    try:
        return slot.__get__(value)
    # An empty slot says it by the former, an empty closure by the latter.
    except (AttributeError, ValueError):
        return ABSENT


def slot_restorer(value: Any, slot: Any) -> Undo:
    """Remember what a slot of an object, or a cell of a closure, holds."""
    content = slot_content(slot, value)

    def restore() -> None:
        if slot_content(slot, value) is content:
            return
        if content is ABSENT:
            slot.__delete__(value)
        else:
            slot.__set__(value, content)

    return restore
