"""JSON that every reader takes."""

from __future__ import annotations

import json
import math

from retrofit.utils.json_text import json_text


def test_numbers_that_json_does_not_have_become_null() -> None:
    text = json_text({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": (-math.inf, None, "NaN")}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": [None, None, "NaN"]}}
    assert "\n" not in text
