"""Run a network's own code, and leave everything that the code can reach as it was."""

import functools
import random
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import (
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retrofit.utils import restorers
from retrofit.utils.restorers import READERS, Binding, Undo

_ATOMS = (
    *(str, bytes, int, float, complex, type(None), ModuleType),
    *(torch.dtype, torch.device, np.generic),
)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CACHE = type(functools.lru_cache(lambda: None))
# Packages whose objects hold nothing of one network's calls, or whose threads go on meanwhile.
_FOREIGN = sys.stdlib_module_names | {
    *("torch", "torchvision", "timm", "numpy", "sympy", "mpmath", "retrofit"),
    *("accelerate", "lightning", "lightning_fabric", "pytorch_lightning"),
}
# Modules of the standard library whose objects are containers.
_CONTAINERS = ("argparse", "collections", "queue", "types", "weakref", "_weakrefset")


_Visitor = Callable[[Any], Iterable[Any]]
"""Remembers a value, and returns the values that it holds."""

_Put = Callable[[Any], Any]
"""Puts a value in the place of another."""


@contextmanager
def left_as_it_was(model: nn.Module, unwritten: Iterable[Tensor] = ()) -> "Iterator[Snapshot]":
    """Put back, afterwards, all that a network's code may have changed meanwhile.

    That is what can be reached from the network: modes, attributes of modules and other objects,
    their classes, lists, dicts, sets, deques, what these hold, the numbers in tensors and NumPy's arrays,
    and the globals, closures and defaults that methods use. Each is the same object afterwards and has the same
    content; what did not change is not written to. Functions and classes are looked into where they
    are of a package that defines a module of the network. A `functools.cache` gives way to an empty
    one meanwhile. Random generators that the network holds continue where they were; those of
    Python, NumPy and torch are the caller's. What Python cannot rewind, an iterator or a file, goes
    on from where it is.

    Args:
        model: The network, on any device.
        unwritten: Tensors whose values nothing writes to meanwhile; they are not copied.

    Yields:
        The snapshot that is put back in the end.
    """
    snapshot = Snapshot(model, unwritten)
    snapshot.empty_caches()
    try:
        yield snapshot
    finally:
        snapshot.restore()


class Snapshot:
    """All that can be reached from a network, for `restore`, which may be called more than once.

    Args:
        model: The network, on any device.
        unwritten: Tensors whose values nothing writes to meanwhile; they are not copied.
    """

    def __init__(self, model: nn.Module, unwritten: Iterable[Tensor] = ()) -> None:
        # Parents first.
        self._modes = [(module, module.training) for module in model.modules()]
        self._unwritten = {id(tensor) for tensor in unwritten}
        self._undo: list[Undo] = []
        self._packages = _packages_of(model) - _FOREIGN
        # Cached functions, and what puts another in the place of each.
        self._caches: list[tuple[Any, _Put]] = []
        # Names of globals that are remembered, by the `id` of their namespace.
        self._globals: dict[int, set[str]] = defaultdict(set)
        # All values that were looked at, by `id`. An `id` stays unique while its value is held.
        self._reached: dict[int, Any] = {}
        # By a value's class, the method that remembers it and returns the values that it holds.
        self._visitors: dict[type, _Visitor] = {}
        pending: list[Any] = [model]
        while pending:
            value = pending.pop()
            key = id(value)
            if key in self._reached:
                continue
            self._reached[key] = value
            cls = type(value)
            if cls not in self._visitors:
                self._visitors[cls] = self._visitor_for(cls)
            visit = self._visitors[cls]
            pending += visit(value)

    def empty_caches(self) -> None:
        """Put an empty cache in place of each cached function, the same one in all its places."""
        empty: dict[int, Any] = {}
        for cached, put in self._caches:
            if id(cached) not in empty:
                renewed = functools.lru_cache(**cached.cache_parameters())
                empty[id(cached)] = renewed(cached.__wrapped__)
            put(empty[id(cached)])

    def restore(self) -> None:
        """Put everything back; what did not change is not written to, but for caches.

        Modes come first, by each module's `train`: torchvision's feature extractors change their
        graph in it.
        """
        try:
            for module, training in self._modes:
                if module.training != training:
                    module.train(training)
        finally:
            for cached, put in self._caches:
                put(cached)
            with torch.no_grad():
                for undo in self._undo:
                    undo()

    def _visitor_for(self, cls: type) -> _Visitor:
        visitors: list[tuple[Any, _Visitor]] = [
            (_ATOMS, lambda _: ()),
            (Tensor, self._remember_tensor),
            (_GENERATORS, self._remember_state(restorers.generator_restorer)),
            (np.ndarray, self._remember_state(restorers.array_restorer)),
            (weakref.ref, lambda reference: (reference(),)),
            (tuple | frozenset, lambda value: value),
            (dict | list | set | deque, self._remember_container),
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
        return next(visitor for classes, visitor in visitors if issubclass(cls, classes))

    def _remember_state(self, restorer: Callable[[Any], Undo]) -> _Visitor:
        """Remember what holds nothing else: `restorer` returns what puts a value's state back."""

        def remember(value: Any) -> Iterable[Any]:
            self._undo.append(restorer(value))
            return ()

        return remember

    def _remember_tensor(self, tensor: Tensor) -> Iterable[Any]:
        self._undo.append(
            restorers.tensor_restorer(tensor, written=id(tensor) not in self._unwritten)
        )
        if type(tensor) in (Tensor, nn.Parameter):
            return [vars(tensor)]
        return ()

    def _remember_container(self, value: Any) -> Iterable[Any]:
        self._undo.append(restorers.content_restorer(value))
        cls = restorers.container_class(value)
        if issubclass(cls, dict):
            for key, held in cls.items(value):
                if isinstance(held, _CACHE):
                    self._note_cache(held, functools.partial(value.__setitem__, key))
        return [*READERS[cls](value), *self._remember_attributes(value)]

    def _remember_attributes(self, value: Any) -> Iterable[Any]:
        """Remember an object's class and attributes, unless another library keeps them to
        itself.
        """
        cls: Any = type(value)
        if _is_opaque(cls):
            return ()
        restore_class = restorers.class_restorer(value)
        self._undo.append(restore_class)
        attributes = getattr(value, "__dict__", None)
        bindings = [restorers.slot_binding(value, slot) for slot in _slots_of(cls)]
        return [cls, attributes, *map(self._remember_binding, bindings)]

    def _remember_class(self, cls: type) -> Iterable[Any]:
        if _home(cls) not in self._packages:
            return ()
        attributes = restorers.attributes_of(cls)
        for name in attributes:
            self._note_caches_in(cls, name)
        self._undo.append(restorers.attributes_restorer(cls))
        # Of the attributes with special names only methods count: annotations and a dataclass's
        # fields lead into the whole package, and no call changes them.
        methods = (value for value in vars(cls).values() if isinstance(value, FunctionType))
        return [*attributes.values(), *methods, *cls.__bases__]

    def _note_caches_in(self, cls: type, name: str) -> None:
        """Note a class's cached function, also in a static or class method, or a property."""
        attribute = vars(cls)[name]
        put = functools.partial(type.__setattr__, cls, name)
        self._note_cache(attribute, put)
        if isinstance(attribute, staticmethod | classmethod | property):
            function = getattr(attribute, "__func__", getattr(attribute, "fget", None))
            wrap = getattr(attribute, "getter", type(attribute))
            self._note_cache(function, lambda other: put(wrap(other)))

    def _remember_function(self, function: FunctionType) -> Iterable[Any]:
        """Remember what a function keeps between its calls, and the globals that it names."""
        if _home(function) not in self._packages:
            return ()
        variables = function.__globals__
        names = _names_in(function.__code__)
        held = [function.__defaults__, function.__kwdefaults__, vars(function)]
        for name in names & variables.keys():
            module = variables[name]
            if isinstance(module, ModuleType) and _home(module) in self._packages:
                held += self._remember_globals(vars(module), names)
        # Some names are of attributes, some of globals that the code is about to make.
        held += self._remember_globals(variables, names)
        cells = [
            restorers.slot_binding(cell, CellType.cell_contents)
            for cell in function.__closure__ or ()
        ]
        return [*held, *map(self._remember_binding, cells)]

    def _remember_globals(self, namespace: dict[str, Any], names: set[str]) -> list[Any]:
        remembered = self._globals[id(namespace)]
        new_names = names - remembered
        remembered |= new_names
        bindings = [restorers.global_binding(namespace, name) for name in new_names]
        return [*map(self._remember_binding, bindings)]

    def _remember_binding(self, binding: Binding) -> Any:
        """Remember and return what stands in no dict of an object."""
        value = binding.look()
        self._note_cache(value, binding.put)
        self._undo.append(binding.restorer())
        return value

    def _note_cache(self, value: Any, put: _Put) -> None:
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


def _packages_of(model: nn.Module) -> set[str]:
    """The packages whose classes a network's modules are of, or derived from."""
    classes = {type(module) for module in model.modules()}
    return {_home(base) for cls in classes for base in cls.__mro__}


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
