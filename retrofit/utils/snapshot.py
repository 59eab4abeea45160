"""Run a network's own code, and leave everything that the code can reach as it was."""

import copy
import dis
import functools
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import (
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ATOMS = (
    *(str, bytes, int, float, complex, type(None), ModuleType),
    *(torch.dtype, torch.device, np.generic),
)
_CACHE = type(functools.lru_cache(lambda: None))
_ABSENT = object()
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
# Packages whose objects hold nothing of one network's calls, or whose threads go on meanwhile.
_FOREIGN = sys.stdlib_module_names | {
    *("torch", "torchvision", "timm", "numpy", "sympy", "mpmath", "retrofit"),
    *("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"),
}
# Modules of the standard library whose objects are containers.
_CONTAINERS = ("argparse", "collections", "types", "weakref")


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put back, afterwards, all that a network's code may have changed meanwhile.

    That is what can be reached from the network: attributes of modules and other objects, their
    classes, lists, dicts, sets, deques, arrays and tensors, whatever these hold, and the globals,
    closures and defaults that methods use. Each is the same object afterwards and has the same
    content; what did not change is not written to. Functions and classes are looked into where they
    are of a package that defines a module of the network. A `functools.cache` gives way to an empty
    one meanwhile. Random generators that the network holds continue where they were; those of
    Python, NumPy and torch are the caller's.

    Args:
        model: The network, on any device.
    """
    snapshot = Snapshot(model)
    snapshot.empty_caches()
    try:
        yield
    finally:
        snapshot.restore()


class Snapshot:
    """All that can be reached from a network, for `restore`, which may be called more than once.

    Args:
        model: The network, on any device.
        traced: Whether its code is only traced, which writes to no parameter or buffer; their
            values are not copied then.
    """

    def __init__(self, model: nn.Module, traced: bool = False) -> None:
        tensors = chain(model.parameters(), model.buffers()) if traced else ()
        self._unwritten = {id(tensor) for tensor in tensors}
        # What was looked at, by its `id`, which is unique while this holds it.
        self._reached: dict[int, Any] = {}
        self._undo: list[Callable[[], Any]] = []
        # Of these there are thousands: all of a kind are compared at once.
        self._contents = {kind: _Places(read) for kind, read in _READERS.items()}
        self._attributes = _Places(_read_classes)
        self._variables = _Places(_read_globals)
        self._groups = [*self._contents.values(), self._attributes, self._variables]
        homes = {_home(base) for module in model.modules() for base in type(module).__mro__}
        self._packages = homes - _FOREIGN
        # Cached functions, and what puts another in the place of each.
        self._caches: list[tuple[Any, Callable[[Any], Any]]] = []
        # Names of globals that are remembered, by the `id` of their namespace.
        self._globals: dict[int, set[str]] = {}
        # What remembers a value and returns what that holds, by the value's type.
        self._ways: dict[type, Callable[[Any], Iterable[Any]]] = {}
        pending: list[Any] = [model]
        while pending:
            value = pending.pop()
            if id(value) in self._reached:
                continue
            self._reached[id(value)] = value
            cls = type(value)
            if cls not in self._ways:
                self._ways[cls] = self._way_for(cls)
            pending += self._ways[cls](value)
        for group in self._groups:
            group.remember()

    def empty_caches(self) -> None:
        """Put an empty cache in place of each cached function, the same one in all its places."""
        empty: dict[int, Any] = {}
        for cached, put in self._caches:
            if id(cached) not in empty:
                renewed = functools.lru_cache(**cached.cache_parameters())
                empty[id(cached)] = renewed(cached.__wrapped__)
            put(empty[id(cached)])

    def restore(self) -> None:
        """Put everything back; what did not change is not written to, but for caches."""
        for cached, put in self._caches:
            put(cached)
        with torch.no_grad():
            for undo in self._undo:
                undo()
            for group in self._groups:
                group.restore()

    def _way_for(self, cls: type) -> Callable[[Any], Iterable[Any]]:
        ways: list[tuple[Any, Callable[[Any], Iterable[Any]]]] = [
            (_ATOMS, lambda _: ()),
            (Tensor, self._remember_tensor),
            (torch.Generator, self._remember_state(_generator_restorer)),
            (random.Random, self._remember_state(_random_restorer)),
            (np.random.Generator, self._remember_state(_numpy_generator_restorer)),
            (np.ndarray, self._remember_state(_array_restorer)),
            (bytearray, self._remember_state(_content_restorer)),
            (tuple | frozenset, lambda value: value),
            (dict, self._remember_dict),
            (list | set | deque, self._remember_container),
            (functools.partial, lambda value: (value.func, value.args, value.keywords)),
            (MethodType, lambda value: (value.__self__, value.__func__)),
            (_CACHE, lambda value: (value.__wrapped__,)),
            (staticmethod | classmethod, lambda value: (value.__func__,)),
            (property, lambda value: (value.fget, value.fset)),
            (functools.cached_property, lambda value: (value.func,)),
            (FunctionType, self._remember_function),
            (type, self._remember_class),
            (object, self._remember_attributes),
        ]
        return next(way for kinds, way in ways if issubclass(cls, kinds))

    def _remember_state(
        self, restorer: Callable[[Any], Callable[[], Any]]
    ) -> Callable[[Any], Iterable[Any]]:
        """Remember what holds nothing else: `restorer` returns what puts a value's state back."""

        def remember(value: Any) -> Iterable[Any]:
            self._undo.append(restorer(value))
            return ()

        return remember

    def _remember_tensor(self, tensor: Tensor) -> Iterable[Any]:
        self._undo.append(_tensor_restorer(tensor, written=id(tensor) not in self._unwritten))
        return ()

    def _remember_content(self, container: Any) -> None:
        kind = _kind_of(container)
        self._contents[kind].add(container, _content_restorer(container))

    def _remember_container(self, value: Any) -> Iterable[Any]:
        self._remember_content(value)
        return [*value, *self._remember_attributes(value)]

    def _remember_dict(self, value: dict[Any, Any]) -> Iterable[Any]:
        self._remember_content(value)
        # A subclass may load or compute what it gives.
        kind = _kind_of(value)
        for key, held in kind.items(value):
            if isinstance(held, _CACHE):
                self._note_cache(held, functools.partial(value.__setitem__, key))
        return [*kind.keys(value), *kind.values(value), *self._remember_attributes(value)]

    def _remember_attributes(self, value: Any) -> Iterable[Any]:
        """Remember an object's class and attributes, unless another library keeps them to
        itself.
        """
        cls: Any = type(value)
        if _is_opaque(cls):
            return ()
        if isinstance(value, nn.Module):
            self._undo.append(functools.partial(_restore_class, value, cls))
        held: list[Any] = [cls, getattr(value, "__dict__", None)]
        for slot in _slots_of(cls):
            held += self._remember_slot(value, slot)
        return held

    def _remember_class(self, cls: type) -> Iterable[Any]:
        if _home(cls) not in self._packages:
            return ()
        names = [name for name in vars(cls) if not _is_special(name)]
        for name in names:
            held = vars(cls)[name]
            put = functools.partial(type.__setattr__, cls, name)
            self._note_cache(held, put)
            if isinstance(held, staticmethod | classmethod):
                wrapped = held.__func__
                self._note_cache(wrapped, functools.partial(_put_wrapped, put, type(held)))
            elif isinstance(held, property):
                self._note_cache(held.fget, functools.partial(_put_wrapped, put, held.getter))
        attributes = {name: vars(cls)[name] for name in names}
        undo = functools.partial(_restore_class_attributes, cls, attributes)
        self._attributes.add(vars(cls), undo)
        # Of what has a special name only methods: annotations and the fields of a dataclass lead
        # into the whole package, and no call changes them.
        methods = (value for value in vars(cls).values() if isinstance(value, FunctionType))
        return [*attributes.values(), *methods, *cls.__bases__]

    def _remember_function(self, function: FunctionType) -> Iterable[Any]:
        """Remember what a function keeps between its calls, and the globals that it names."""
        if _home(function) not in self._packages:
            return ()
        held: list[Any] = [function.__defaults__, function.__kwdefaults__, vars(function)]
        held.append(getattr(function, "__wrapped__", None))
        names = _names_in(function.__code__)
        variables = function.__globals__
        for name in names & variables.keys():
            module = variables[name]
            if isinstance(module, ModuleType) and _home(module) in self._packages:
                held += self._remember_globals(vars(module), names)
        # Of the names that are no globals yet, most are attributes'.
        held += self._remember_globals(
            variables, names if _makes_globals(function.__code__) else names & variables.keys()
        )
        for cell in function.__closure__ or ():
            held += self._remember_slot(cell, CellType.cell_contents)
        return held

    def _remember_globals(self, namespace: dict[str, Any], names: Iterable[str]) -> list[Any]:
        remembered = self._globals.setdefault(id(namespace), set())
        values = {name: namespace.get(name, _ABSENT) for name in names if name not in remembered}
        remembered.update(values)
        for name, value in values.items():
            self._note_cache(value, functools.partial(namespace.__setitem__, name))
            undo = functools.partial(_restore_global, namespace, name, value)
            self._variables.add((namespace, name), undo)
        return [value for value in values.values() if value is not _ABSENT]

    def _remember_slot(self, value: Any, slot: Any) -> list[Any]:
        """Remember what stands in no dict: an attribute in a slot, or the content of a closure."""
        content = _content(slot, value)
        self._note_cache(content, functools.partial(slot.__set__, value))
        self._undo.append(functools.partial(_restore_slot, value, slot, content))
        return [] if content is _ABSENT else [content]

    def _note_cache(self, value: Any, put: Callable[[Any], Any]) -> None:
        if isinstance(value, _CACHE) and _home(value) in self._packages:
            self._caches.append((value, put))


@functools.lru_cache(maxsize=4096)
def _is_opaque(cls: type) -> bool:
    """Whether objects of a class keep their attributes to themselves, or have none."""
    if issubclass(cls, nn.Module):
        return False
    # torch's modules hold many of these, which have no attributes of their own.
    if cls is OrderedDict:
        return True
    return _home(cls) in _FOREIGN and cls.__module__ not in _CONTAINERS


@functools.lru_cache(maxsize=4096)
def _slots_of(cls: type) -> tuple[MemberDescriptorType, ...]:
    values = [value for base in cls.__mro__ for value in vars(base).values()]
    return tuple(value for value in values if isinstance(value, MemberDescriptorType))


def _put_wrapped(put: Callable[[Any], Any], wrap: Callable[[Any], Any], function: Any) -> None:
    put(wrap(function))


def _home(value: Any) -> str:
    """The package that a function, class or module is of."""
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(home).partition(".")[0]


def _names_in(code: Any) -> set[str]:
    """The names of globals and attributes in a function and in the functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= _names_in(constant)
    return names


def _makes_globals(code: Any) -> bool:
    """Whether a function, or one inside it, assigns to a global."""
    inside = (constant for constant in code.co_consts if hasattr(constant, "co_code"))
    # Each second byte is an instruction.
    return _STORE_GLOBAL in code.co_code[::2] or any(map(_makes_globals, inside))


def _tensor_restorer(tensor: Tensor, written: bool) -> Callable[[], None]:
    """Remember a tensor: its class, where its values lie, and, if they may be written to, the
    values, on the CPU.
    """
    cls = type(tensor)
    trained = tensor.requires_grad
    memory = tensor.data
    # What another library makes of a tensor, a shard or a quantized one, is its own to keep.
    ordinary = cls in (Tensor, nn.Parameter) and memory.layout == torch.strided
    copied = written and ordinary and not memory.is_meta
    values = memory.to("cpu", copy=True) if copied else None

    def restore() -> None:
        _restore_class(tensor, cls)
        if not _same_memory(tensor, memory):
            tensor.data = memory
        if tensor.requires_grad != trained:
            tensor.requires_grad_(trained)
        if values is not None and not torch.equal(memory.to("cpu"), values):
            with torch.inference_mode(memory.is_inference()):
                memory.copy_(values)

    return restore


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.device, one.layout) != (other.dtype, other.device, other.layout):
        return False
    if one.layout != torch.strided or not hasattr(one, "shape"):
        return True
    alike = one.shape == other.shape and one.stride() == other.stride()
    return alike and (one.is_meta or one.data_ptr() == other.data_ptr())


def _restore_class(value: Any, cls: type) -> None:
    if type(value) is not cls:
        value.__class__ = cls


def _content_restorer(container: Any) -> Callable[[], None]:
    """Remember what a container holds, and in which order."""
    kind = _kind_of(container)
    size = len(container)
    items = [*_READERS[kind]([container])]

    def restore() -> None:
        unchanged = len(container) == size
        if unchanged and all(map(operator.is_, _READERS[kind]([container]), items)):
            return
        kind.clear(container)
        if isinstance(container, dict):
            kind.update(container, zip(items[:size], items[size:], strict=True))
        elif isinstance(container, set):
            kind.update(container, items)
        else:
            kind.extend(container, items)

    return restore


def _kind_of(container: Any) -> Any:
    return next(kind for kind in _READERS if isinstance(container, kind))


class _Places:
    """Places of one kind that hold values: all are compared at once, and each is put back only if
    one of them differs.

    Args:
        read: Gives what places hold, in a fixed order.
    """

    def __init__(self, read: Callable[[list[Any]], Iterable[Any]]) -> None:
        self._read = read
        self._places: list[Any] = []
        self._undo: list[Callable[[], Any]] = []
        self._held: list[Any] = []
        self._sizes: list[int] = []

    def add(self, place: Any, undo: Callable[[], Any]) -> None:
        """Add a place, and what puts back what it holds."""
        self._places.append(place)
        self._undo.append(undo)

    def remember(self) -> None:
        """Remember what all places hold."""
        self._held = [*self._read(self._places)]
        self._sizes = [*map(len, self._places)]

    def restore(self) -> None:
        """Put back what the places held."""
        same_sizes = [*map(len, self._places)] == self._sizes
        if same_sizes and all(map(operator.is_, self._read(self._places), self._held)):
            return
        for undo in self._undo:
            undo()


def _read_dicts(kind: Any) -> Callable[[list[Any]], Iterable[Any]]:
    """Return what gives the keys, then the values, of dicts of a kind."""

    def read(dicts: list[Any]) -> Iterable[Any]:
        keys = chain.from_iterable(map(kind.keys, dicts))
        return chain(keys, chain.from_iterable(map(kind.values, dicts)))

    return read


def _read_classes(attributes: list[Any]) -> Iterable[Any]:
    return chain.from_iterable(map(MappingProxyType.values, attributes))


def _read_globals(places: list[Any]) -> Iterable[Any]:
    return (namespace.get(name, _ABSENT) for namespace, name in places)


_READERS: dict[Any, Callable[[list[Any]], Iterable[Any]]] = {
    OrderedDict: _read_dicts(OrderedDict),
    dict: _read_dicts(dict),
    **dict.fromkeys((list, set, deque, bytearray), chain.from_iterable),
}
"""What gives what containers hold, by their kind; of a dict the subclass comes first."""


def _generator_restorer(generator: torch.Generator) -> Callable[[], Any]:
    return functools.partial(generator.set_state, generator.get_state())


def _random_restorer(generator: random.Random) -> Callable[[], Any]:
    return functools.partial(generator.setstate, generator.getstate())


def _numpy_generator_restorer(generator: np.random.Generator) -> Callable[[], Any]:
    source = generator.bit_generator
    return functools.partial(setattr, source, "state", copy.deepcopy(source.state))


def _array_restorer(array: Any) -> Callable[[], Any]:
    return functools.partial(np.copyto, array, array.copy())


def _restore_class_attributes(cls: type, attributes: dict[str, Any]) -> None:
    for name in [name for name in vars(cls) if name not in attributes and not _is_special(name)]:
        type.__delattr__(cls, name)
    for name, value in attributes.items():
        if vars(cls).get(name, _ABSENT) is not value:
            type.__setattr__(cls, name, value)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _restore_global(namespace: dict[str, Any], name: str, value: Any) -> None:
    if namespace.get(name, _ABSENT) is value:
        return
    if value is _ABSENT:
        del namespace[name]
    else:
        namespace[name] = value


def _content(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    # An empty slot says it by the former, an empty closure by the latter.
    except (AttributeError, ValueError):
        return _ABSENT


def _restore_slot(value: Any, slot: Any, content: Any) -> None:
    if _content(slot, value) is content:
        return
    if content is _ABSENT:
        slot.__delete__(value)
    else:
        slot.__set__(value, content)
