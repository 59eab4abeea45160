"""The formulas through torch.compile: where a GPU has no Triton kernels of ours, several times as fast as `eager`.

Each function is compiled for any sizes, once for each number of dimensions, dtype and set of options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from retrofit.layers.kernels import eager

_VARIANTS = 256
"""Compiled forms that torch may keep of one function; beyond its usual 8 it would run the function eagerly."""


def _through_inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    @cache
    def compiled() -> Callable[..., Any]:  # torch's compiler takes seconds to import
        return torch.compile(function, dynamic=True)

    def run(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_VARIANTS):
            return compiled()(*args)

    return run


forward = _through_inductor(eager.forward)
backward = _through_inductor(eager.backward)
apply = _through_inductor(eager.apply)
