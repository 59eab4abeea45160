"""What a network computes with beside its tensors: the class and the plain attributes of every module.

A stride, an eps, a slope, a dropout's p have no tensor that a file could hold. `describe` writes them down as JSON
values; `restore` gives them to a network that was built again; `first_difference` says in what two networks differ that
cannot be given: other classes, methods, functions, hooks.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from retrofit.utils.text import printable

Description = dict[str, dict[str, Any]]
"""By the module's name: {"type": its class, "attributes": {name: JSON value}}."""

_TORCHS = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_forward_hooks_with_kwargs", "_is_hf_initialized"}
# What libraries and we write on modules for the record alone, or as a copy of what a tensor holds.
_RECORDS = frozenset(
    {
        *("pretrained_cfg", "default_cfg", "_model_args", "attention_bias_cache"),
        *("_held_settings", "_written_settings", "_checked"),
    }
)
# What a layer works out at its first call: no difference between a network that ran and one that did not.
_WORKED_OUT = {"torchvision.MultiScaleRoIAlign": frozenset({"scales", "map_levels"})}
# What a GraphModule makes of its graph, which for torchvision's feature extractors is that of the present mode.
_MADE_OF_GRAPH = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_tracer_cls"})
_LIBRARIES = frozenset({"torch", "timm", "torchvision", "retrofit"})
_DEEPEST = 4
_LONGEST = 1000
_PLAIN = (bool, int, float, str, type(None))


def describe(model: nn.Module) -> Description:
    """Write down every module of a network, under its first name."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        name: {"type": _name(type(module)), "attributes": _attributes(module, names)}
        for name, module in model.named_modules()
    }


def restore(model: nn.Module, description: Mapping[str, Any]) -> bool:
    """Give a network the plain attributes (numbers, words, lists of them) that another of its structure had.

    What the network lacks is passed over; `first_difference` finds what is left.

    Returns:
        Whether one of them may make the network cost more: a whole number, a number above 1, or a list.
    """
    present = describe(model)
    costs_more = False
    for name, module in model.named_modules():
        wanted = description.get(name, {}).get("attributes", {})
        for key, value in wanted.items():
            if key in _TORCHS or key.startswith(("__", "_retrofit_")):
                continue
            current = vars(module).get(key, getattr(type(module), key, ...))
            if _is_plain(value) and _is_plain(current) and not _equal(present[name]["attributes"].get(key), value):
                setattr(module, key, _like(current, value))
                small = isinstance(value, float) and abs(value) <= 1
                costs_more |= not (small or isinstance(value, (bool, str, type(None))))
    return costs_more


def changes(description: Description, usual: Description) -> Description:
    """Return the attributes of a description that differ from the usual ones: what was set on a network later."""
    found: Description = {}
    for name, entry in description.items():
        known = usual.get(name, {"attributes": {}})["attributes"]
        differing = {key: value for key, value in entry["attributes"].items() if not _equal(known.get(key), value)}
        found[name] = {"type": entry["type"], "attributes": differing}
    return found


def first_difference(one: Description, other: Description, words: tuple[str, str]) -> str | None:
    """Name the first thing in which two networks differ; None if there is none.

    An attribute that only one of them has makes no difference: it comes and goes with a library's versions. A method
    or hooks of an instance's own always do.

    Args:
        one: Description of a network.
        other: Description of the other.
        words: What the two are called: ("here", "in the library").
    """
    for name in dict.fromkeys((*one, *other)):
        label = printable(name, 64) or "the network"
        kinds = [_kind(description.get(name)) for description in (one, other)]
        if kinds[0] != kinds[1]:
            return f"{label} is {kinds[0]} {words[0]}, {kinds[1]} {words[1]}"
        a, b = one[name]["attributes"], other[name]["attributes"]
        for key in dict.fromkeys((*a, *b)):
            if (not _equal(a[key], b[key])) if key in a and key in b else key.endswith(_OWN):
                said = [printable(values.get(key, "not set"), 80) for values in (a, b)]
                return f"{printable(key, 64)} of {label} is {said[0]} {words[0]}, {said[1]} {words[1]}"
    return None


def is_all(description: Description) -> bool:
    """Whether a description says all of its network but the tensors of the state dict: no object, no other tensor."""

    def opaque(value: Any) -> bool:
        if isinstance(value, dict):
            return "object" in value or "tensor" in value or any(map(opaque, value.values()))
        return isinstance(value, list) and any(map(opaque, value))

    return not any(opaque(value) for entry in description.values() for value in entry["attributes"].values())


def pack(description: Description) -> dict[str, Any]:
    """Return a description in fewer words: alike modules are described once. `unpack` takes it back."""
    kinds: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    for name, entry in description.items():
        if entry not in kinds:
            kinds.append(entry)
        places[name] = kinds.index(entry)
    return {"kinds": kinds, "modules": places}


def unpack(values: Mapping[str, Any]) -> Description:
    """Take back what `pack` returned, which may come from anyone.

    Raises:
        KeyError, TypeError, IndexError, ValueError: If it did not come from `pack`.
    """
    kinds = [{"type": str(kind["type"]), "attributes": dict(kind["attributes"])} for kind in values["kinds"]]
    return {str(name): kinds[number] for name, number in values["modules"].items()}


_OWN = " (its own)"  # ends the name of a method that stands on an instance, and of its hooks


def _attributes(module: nn.Module, names: Mapping[int, str]) -> dict[str, Any]:
    cls = type(module)
    passed_over = _TORCHS | _RECORDS | _WORKED_OUT.get(_name(cls), frozenset())
    found: dict[str, Any] = {}
    if isinstance(module, fx.GraphModule):
        passed_over |= _MADE_OF_GRAPH
        if not hasattr(module, "eval_graph"):
            found["graph"] = _canonical(module.graph, names, _DEEPEST)
    for key, value in vars(module).items():
        if key in passed_over or key.startswith("_retrofit_") or _is_wrapper(module, key, value):
            continue
        method = callable(value) and callable(getattr(cls, key, None))
        if method and _from_here(value):
            continue
        found[key + _OWN if method else key] = _canonical(value, names, _DEEPEST)
    if recipe := getattr(cls, "_retrofit_recipe", None):
        found["rewritten"] = [[call.method, child] for call, child in recipe.edits]
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        if hooks := vars(module)[kind]:
            found[kind.strip("_").replace("_", " ") + _OWN] = len(hooks)
    return found


def _is_wrapper(module: nn.Module, key: str, value: object) -> bool:
    """Whether an attribute is accelerate's doing: it wraps a network's `forward` for mixed precision, and keeps it."""
    original = vars(module).get("_original_forward")
    return (
        key in ("forward", "_original_forward")
        and isinstance(original, MethodType)
        and original.__func__ is getattr(type(module), "forward", None)
    )


def _from_here(value: object) -> bool:
    """Whether a function is one that our conversions put on an instance."""
    while isinstance(value, functools.partial):
        value = value.func
    return hasattr(value, "__qualname__") and _name(value).startswith("retrofit.")


def _canonical(value: Any, names: Mapping[int, str], depth: int) -> Any:
    """Return a value as JSON has it; what JSON does not have as a dict that tells one from another."""
    go: Callable[[Any], Any] = lambda item: _canonical(item, names, depth - 1)  # noqa: E731
    if depth < 0 or (isinstance(value, Collection) and not isinstance(value, str) and len(value) > _LONGEST):
        return {"object": _name(type(value))}
    if isinstance(value, enum.Enum):
        return {"enum": f"{_name(type(value))}.{value.name}"}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": list(value.shape)}
    if isinstance(value, fx.Graph):
        return {"code": hashlib.sha256(value.python_code("self").src.encode()).hexdigest()}
    if isinstance(value, nn.Module):
        return {"module": names[id(value)]} if id(value) in names else {"module of": describe(value)}
    if isinstance(value, Mapping):
        return {"mapping": {str(key): go(item) for key, item in value.items()}}
    if isinstance(value, Sequence):
        return [go(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(str, value))}
    if isinstance(value, (torch.device, torch.Generator)):
        return {"object": type(value).__name__}
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"torch": str(value)}
    if isinstance(value, functools.partial):
        return {"partial": go(value.func), "args": go(value.args), "keywords": go(value.keywords)}
    if inspect.isclass(value):
        return {"class": _name(value)}
    if callable(value) and hasattr(value, "__qualname__"):
        return {"function": _name(value), **_inside(value, go)}
    name = _name(type(value))
    held = name.partition(".")[0] in _LIBRARIES and hasattr(value, "__dict__")
    return {"object": name, **({"holds": go(vars(value))} if held else {})}


def _inside(function: Any, go: Callable[[Any], Any]) -> dict[str, Any]:
    """What a function brings along beside its name: default arguments, and the variables around it."""
    held = {
        "defaults": getattr(function, "__defaults__", None),
        "keywords": getattr(function, "__kwdefaults__", None),
        "closure": [_content(cell) for cell in getattr(function, "__closure__", None) or ()],
    }
    return {key: go(value) for key, value in held.items() if value}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _name(thing: Any) -> str:
    """Name a class or function: a library's by the library, others by themselves, whatever file they stand in."""
    package = str(getattr(thing, "__module__", None)).partition(".")[0]
    own = str(thing.__qualname__).rpartition("<locals>.")[2]
    return f"{package}.{own}" if package in _LIBRARIES else own


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN) and not isinstance(value, enum.Enum)


def _like(current: Any, value: Any) -> Any:
    """Return a value read from JSON in the kind of sequence that it had."""
    if not isinstance(value, list):
        return value
    if isinstance(current, (list, tuple)) and len(current) == len(value):
        items = [_like(a, b) for a, b in zip(current, value, strict=True)]
    else:
        items = [_like(None, item) for item in value]
    if isinstance(current, list):
        return items
    return type(current)(items) if isinstance(current, torch.Size) else tuple(items)


def _equal(a: Any, b: Any) -> bool:
    """Whether two JSON values are the same; NaN is itself, 1 is 1.0 but not true."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(isinstance(a, bool) == isinstance(b, bool) and a == b)


def _kind(entry: Mapping[str, Any] | None) -> str:
    return "absent" if entry is None else f"a {printable(entry['type'], 64)}"
