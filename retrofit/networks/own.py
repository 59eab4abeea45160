"""Networks of one's own: `py:package.module:callable`, imported because the user typed it, and for no other reason.

An artifact of such a network holds that name for people to read. Nothing is imported by it: what builds the network is
said anew each time, as MODEL or `network`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.record import PREFIX, ModelSource
from retrofit.utils.text import printable, with_class

typed: dict[str, Callable[..., Any]] = {}


def resolve(name: str) -> None:
    """Import the callable that a user typed, "package.module:callable"; `build` may then call it.

    Modules in the working folder are found. A UsageError says that the name is not of that form or that the module has
    no such callable, a RetrofitError that the module cannot be imported.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise UsageError(f"{PREFIX}{printable(name, 100)} names no callable; write py:package.module:callable")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # anything may come out of the user's own module
        raise RetrofitError(
            f"cannot import {module_name} ({with_class(error)}); run this in its folder, or set PYTHONPATH"
        ) from error
    for part in path.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            close = difflib.get_close_matches(part, names, n=3) or names[:5] or ["nothing"]
            raise UsageError(f"{module_name} has no {path}; it has {', '.join(close)}")
        target = getattr(target, part)
    if not callable(target):
        raise UsageError(f"{path} of {module_name} is a {type(target).__name__}; name a function or class that builds")
    typed[name] = target


def build(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Call a builder; a RetrofitError says that nobody typed its name in this process, or what is wrong with it."""
    if name not in typed:
        raise RetrofitError(f"{PREFIX}{printable(name, 100)} is a network of one's own, which nobody named here")
    if missing := [key for key in kwargs if not takes(name, key)]:
        raise UsageError(f"{name} takes no {missing[0]}; give it that argument, or leave out `{missing[0]}`")
    try:
        model = typed[name](**kwargs)
    except Exception as error:  # anything may come out of the user's own code
        raise RetrofitError(f"{name} builds no network ({with_class(error)}); mend it") from error
    if not isinstance(model, nn.Module):
        raise RetrofitError(f"{name} returns a {type(model).__name__}; let it return a torch.nn.Module")
    return model


def takes(name: str, argument: str) -> bool:
    """Whether a builder that was typed has an argument of this name."""
    try:
        parameters = inspect.signature(typed[name]).parameters.values()
    except (ValueError, TypeError):  # a builtin
        return False
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)


def source_of(model: nn.Module) -> ModelSource:
    """Return the source of a network that no name was typed for: its class."""
    return ModelSource("own", f"{type(model).__module__}:{type(model).__qualname__}")
