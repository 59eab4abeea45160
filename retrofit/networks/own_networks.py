"""Networks of one's own: `py:package.module:callable`, which is imported only if the user types it.

An artifact of such a network holds the name for people to read. Nothing imports it from there: the
user names the callable again each time.
"""

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.record import PREFIX, ModelSource
from retrofit.utils.text import printable, with_class

# The callables that the user named in this process, by name. Nothing else is ever called.
named_builders: dict[str, Callable[..., Any]] = {}


def imported(name: str) -> Callable[..., Any]:
    """Import the callable that a user named, "package.module:callable", also from the working
    folder.

    Raises:
        UsageError: If it cannot be imported, or called.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = pkgutil.resolve_name(name)
    # Anything may come out of the user's own module.
    except Exception as error:
        raise UsageError(
            f"cannot import {PREFIX}{printable(name, 100)} ({with_class(error)}); write "
            "py:package.module:callable, and run this in its folder or set PYTHONPATH"
        ) from error
    if not callable(target):
        raise UsageError(
            f"{name} is a {type(target).__name__}; name a function or class that builds"
        )
    return target


def class_source(model: nn.Module) -> ModelSource:
    """Return the source of a network that the user did not name: its class."""
    return ModelSource("own", f"{type(model).__module__}:{type(model).__qualname__}")


def build(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Call what builds a network.

    Raises:
        RetrofitError: If the user did not name it here, or it builds no network.
    """
    if name not in named_builders:
        raise RetrofitError(
            f"{PREFIX}{printable(name, 100)} is a network of one's own, which nobody named here"
        )
    try:
        model = named_builders[name](**kwargs)
    # Anything may come out of the user's own code.
    except Exception as error:
        raise RetrofitError(f"{name} builds no network ({with_class(error)}); mend it") from error
    if not isinstance(model, nn.Module):
        raise RetrofitError(
            f"{name} returns a {type(model).__name__}; let it return a torch.nn.Module"
        )
    return model


def takes(name: str, argument: str) -> bool:
    """Whether a named builder has an argument of this name."""
    parameters = signature(named_builders[name]).parameters
    return argument in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
