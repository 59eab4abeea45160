"""Normalization that a network's code calls as a function: it is no layer, so that no conversion sees it."""

from __future__ import annotations

import dis
import types
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from retrofit.surgery.families import classify
from retrofit.utils.text import ROOT, shortlist

_NAMES = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "local_response_norm")
_FUNCTIONS = {getattr(home, name): name for home in (functional, torch) for name in _NAMES if hasattr(home, name)}
_LIBRARIES = ("torch.", "retrofit.")


def functional_norms(model: nn.Module) -> list[str]:
    """Return a sentence for each class of modules whose code calls a normalization of torch, with their names."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if classify(name, module) is None:
            for function in _called(type(module)):  # type: ignore[arg-type]
                places[function, type(module).__name__].append(name or ROOT)
    return [
        f"{function} is called as a function in {cls} ({shortlist(names)}): it is no layer, and stays as it is"
        for (function, cls), names in places.items()
    ]


@cache
def _called(cls: type) -> tuple[str, ...]:
    """Return the names of the normalizations that a class's own methods call, but for those of weights."""
    functions = (
        value
        for one in cls.__mro__
        if one is not object and not one.__module__.startswith(_LIBRARIES)
        for value in vars(one).values()
        if isinstance(value, types.FunctionType)
    )
    return tuple(dict.fromkeys(name for one in functions for name in _calls(one.__code__, one.__globals__)))


def _calls(code: types.CodeType, names: dict[str, Any]) -> Iterator[str]:
    """Yield the normalizations that a function calls by a global name, as `F.layer_norm` and `layer_norm` are."""
    value: Any = None
    steps = list(dis.get_instructions(code))
    for number, step in enumerate(steps):
        if step.opname == "LOAD_GLOBAL":
            value = names.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and value is not None:
            value = getattr(value, step.argval, None)
        elif step.opname != "CACHE":
            value = None
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType) and value in _FUNCTIONS:
            attributes = [later.argval for later in steps[number + 1 : number + 4] if later.opname == "LOAD_ATTR"]
            if "weight" not in attributes:  # weight standardization
                yield _FUNCTIONS[value]
            value = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _calls(constant, names)
