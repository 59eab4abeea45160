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

# What stands for a name or a slot that holds nothing.
ABSENT = object()


def tensor_restorer(tensor: Tensor, written: bool) -> Callable[[], None]:
    """Remember a tensor: its class, its gradient, where its values lie, and, if they may be
    written to, the values, on the CPU.
    """
    cls = type(tensor)
    put_class_back = class_restorer(tensor)
    trained = tensor.requires_grad
    gradient = tensor.grad if tensor.is_leaf else None
    memory = tensor.data
    # What another library makes of a tensor, a shard or a quantized one, is its own to keep.
    ordinary = cls in (Tensor, nn.Parameter) and memory.layout == torch.strided
    copied = written and ordinary and not memory.is_meta
    values = memory.to("cpu", copy=True) if copied else None

    def restore() -> None:
        put_class_back()
        if not _same_memory(tensor, memory):
            tensor.data = memory
        if tensor.requires_grad != trained:
            tensor.requires_grad_(trained)
        if tensor.is_leaf and tensor.grad is not gradient:
            tensor.grad = gradient
        if values is not None and not torch.equal(memory.to("cpu"), values):
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


def class_restorer(value: Any) -> Callable[[], None]:
    """Remember the class of an object."""
    cls = type(value)

    def restore() -> None:
        if type(value) is not cls:
            value.__class__ = cls

    return restore


def content_restorer(container: Any) -> Callable[[], None]:
    """Remember what a container holds, in its order."""
    cls = container_class(container)
    size = len(container)
    items = [*READERS[cls]([container])]

    def restore() -> None:
        unchanged = len(container) == size
        if unchanged and all(map(operator.is_, READERS[cls]([container]), items)):
            return
        if isinstance(container, list | bytearray):
            # A bytearray that a view shows cannot be emptied.
            cls.__setitem__(container, slice(None), items)
            return
        cls.clear(container)
        if isinstance(container, dict):
            cls.update(container, zip(items[:size], items[size:], strict=True))
        elif isinstance(container, set):
            cls.update(container, items)
        else:
            cls.extend(container, items)

    return restore


def container_class(container: Any) -> Any:
    """Return the class of `READERS` that a container is of."""
    return next(cls for cls in READERS if isinstance(container, cls))


class RestoreGroup:
    """Holders of one class that hold values: all are compared at once, and put back only if one of
    them differs.

    Args:
        read: Returns the values that they hold, in a fixed order.
    """

    def __init__(self, read: Callable[[list[Any]], Iterable[Any]]) -> None:
        self._read = read
        self._holders: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        self._held: list[Any] = []
        self._sizes: list[int] = []

    def add(self, holder: Any, undo: Callable[[], Any]) -> None:
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
        if same_sizes and all(map(operator.is_, self._read(self._holders), self._held)):
            return
        for undo in self._undo:
            undo()


def _read_dicts(cls: Any) -> Callable[[list[Any]], Iterable[Any]]:
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


READERS: dict[Any, Callable[[list[Any]], Iterable[Any]]] = {
    OrderedDict: _read_dicts(OrderedDict),
    dict: _read_dicts(dict),
    **dict.fromkeys((list, set, deque, bytearray), chain.from_iterable),
}
"""The functions that read what containers hold, by class; a subclass of dict comes before dict."""


def generator_restorer(generator: torch.Generator) -> Callable[[], Any]:
    """Remember the state of torch's generator."""
    return functools.partial(generator.set_state, generator.get_state())


def random_restorer(generator: random.Random) -> Callable[[], Any]:
    """Remember the state of Python's generator."""
    return functools.partial(generator.setstate, generator.getstate())


def legacy_generator_restorer(generator: np.random.RandomState) -> Callable[[], Any]:
    """Remember the state of NumPy's generator of old."""
    return functools.partial(generator.set_state, generator.get_state())


def numpy_generator_restorer(generator: np.random.Generator) -> Callable[[], Any]:
    """Remember the state of NumPy's generator."""
    bits = generator.bit_generator
    return functools.partial(setattr, bits, "state", copy.deepcopy(bits.state))


def array_restorer(array: Any) -> Callable[[], Any]:
    """Remember the values of an array."""
    return functools.partial(np.copyto, array, array.copy())


def numbers_restorer(numbers: Any) -> Callable[[], Any]:
    """Remember the numbers of an array of Python's, which may have grown."""
    return functools.partial(numbers.__setitem__, slice(None), numbers[:])


def attributes_of(cls: type) -> dict[str, Any]:
    """Return the attributes of a class but for those of special names, `__name__`."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") and name.endswith("__"))
    }


def attributes_restorer(cls: type) -> Callable[[], None]:
    """Remember the attributes of a class."""
    attributes = attributes_of(cls)

    def restore() -> None:
        for name in attributes_of(cls).keys() | attributes.keys():
            value = attributes.get(name, ABSENT)
            if value is ABSENT:
                type.__delattr__(cls, name)
            elif vars(cls).get(name, ABSENT) is not value:
                type.__setattr__(cls, name, value)

    return restore


def global_restorer(namespace: dict[str, Any], name: str) -> Callable[[], None]:
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


def slot_restorer(value: Any, slot: Any) -> Callable[[], None]:
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
