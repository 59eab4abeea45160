"""A conversion happens whole or not at all: what a network was, in case something fails on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from retrofit.surgery.families import find_norms
from retrofit.utils.evaluating import kept_values, put_back

__all__ = ["kept_values", "put_back", "unchanged_on_failure"]


@contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Put `model` back as it was if what happens inside fails or is interrupted.

    Classes, attributes, children and hooks of every module are kept, and the values of the normalization layers' own
    parameters, the only ones that a conversion writes to.
    """
    modules = [(module, type(module), dict(vars(module)), _tables(module)) for module in model.modules()]
    norms = {found.module for found in find_norms(model)}
    values = kept_values(tensor for norm in norms for tensor in norm.parameters(recurse=False))
    try:
        yield
    except BaseException:
        for module, cls, attributes, tables in modules:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for table, entries in tables:
                table.clear()
                table.update(entries)
            if isinstance(module, fx.GraphModule):
                module.recompile()  # its graph is an attribute, the code made of it is not
        put_back(values)
        raise


def _tables(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dictionaries of a module (parameters, buffers, children, hooks), each with a copy of what it holds."""
    return [(value, dict(value)) for value in vars(module).values() if isinstance(value, dict)]
