"""Augmented assignments under trace: `x += y` works in place, which fx's own proxies forget.

fx records `x = x + y`, which other names of x do not see. Its code for `operator.iadd` in turn assigns to the name of
x, which is wrong for numbers. Hence functions of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def iadd(x: Any, y: Any) -> Any:
    """Return `x` after `x += y`."""
    x += y
    return x


def isub(x: Any, y: Any) -> Any:
    """Return `x` after `x -= y`."""
    x -= y
    return x


def imul(x: Any, y: Any) -> Any:
    """Return `x` after `x *= y`."""
    x *= y
    return x


def itruediv(x: Any, y: Any) -> Any:
    """Return `x` after `x /= y`."""
    x /= y
    return x


class InplaceProxy(fx.Proxy):
    """A proxy that records augmented assignments as calls of the functions above."""

    def _record(self, function: Callable[[Any, Any], Any], other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: object) -> fx.Proxy:
        return self._record(iadd, other)

    def __isub__(self, other: object) -> fx.Proxy:
        return self._record(isub, other)

    def __imul__(self, other: object) -> fx.Proxy:
        return self._record(imul, other)

    def __itruediv__(self, other: object) -> fx.Proxy:
        return self._record(itruediv, other)
