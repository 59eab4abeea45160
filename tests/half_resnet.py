"""Half of timm's test_resnet, for tests in which the number of layers counts: exports, reports and training runs."""

from __future__ import annotations

from typing import Any

HALF: dict[str, Any] = {"layers": [1, 1, 0, 0], "channels": [32, 48, 48, 48]}
FLAGS = [word for name, value in HALF.items() for word in ("--model-kwargs", f"{name}={value}")]
