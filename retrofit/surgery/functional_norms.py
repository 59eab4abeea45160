"""Which normalizations a network's code calls as functions, such as `F.layer_norm`: found in the
bytecode of its methods.
"""

import types
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from retrofit.graph.source_code import instructions, methods_of
from retrofit.utils.text import ROOT, shortlist

_NAMES = (
    "batch_norm",
    "instance_norm",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "local_response_norm",
)
_FUNCTIONS = {
    getattr(home, name): name
    for home in (functional, torch)
    for name in _NAMES
    if hasattr(home, name)
}


def functional_norms(model: nn.Module, layers: Collection[nn.Module]) -> list[str]:
    """Return a sentence for each normalization that the network's code calls as a function: no
    conversion sees it.

    `layers` are the modules whose code is left out.
    """
    names_by_call: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if module in layers:
            continue
        cls: Any = type(module)
        for function in _called_norms(cls):
            names_by_call[function, cls.__name__].append(name or ROOT)
    return [
        f"{function} is called as a function in {label} ({shortlist(names)}): it is no layer, "
        "and stays as it is"
        for (function, label), names in names_by_call.items()
    ]


@cache
def _called_norms(cls: Any) -> list[str]:
    """Return the names of torch's normalization functions that a class's methods call by a global
    name, such as `F.layer_norm` or `layer_norm`, unless they normalize weights.
    """
    called = []
    for method in methods_of(cls):
        value: Any = None
        steps = list(instructions(method.__code__))
        for number, step in enumerate(steps):
            if step.opname == "LOAD_GLOBAL":
                value = method.__globals__.get(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                value = getattr(value, step.argval, None)
            else:
                value = None
            if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
                continue
            # Weight standardization normalizes `self.weight`, which it loads next.
            following = [(later.opname, later.argval) for later in steps[number + 1 : number + 4]]
            if value in _FUNCTIONS and ("LOAD_ATTR", "weight") not in following:
                called.append(_FUNCTIONS[value])
    return list(dict.fromkeys(called))
