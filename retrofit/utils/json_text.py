"""JSON as programs read it: strict, whatever was measured."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(values: dict[str, Any]) -> str:
    """Return a JSON object on one line; NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
