"""Words for one line, whatever comes in."""

import json
import math

import pytest

from retrofit.utils.text import json_text, one_line, plural, printable, shortlist, with_class


def test_printable_is_what_is_seen() -> None:
    texts = {
        "layer1.0.weight": "layer1.0.weight",
        "größe": "größe",
        "a\nb\r\tc": r"a\nb\r\tc",
        7: "7",
    }
    texts |= {"\x1b[31mred\x07": r"\x1b[31mred\x07", "a\u202eb\ud800": r"a\u202eb\ud800"}
    for text, shown in texts.items():
        assert printable(text) == printable(text, 64) == shown


@pytest.mark.parametrize("length", [64, 65, 128, 129, 10_000_000])
@pytest.mark.parametrize("char", ["x", "\n", "\U000e0001"])
def test_printable_keeps_both_ends(length: int, char: str) -> None:
    said = printable("a" + char * (length - 2) + "z", 64)
    assert (len(said) <= 64, said[0], said[-1]) == (True, "a", "z")
    assert ("..." in said) == (length > 64 or char != "x")


def test_one_line_of_an_exception() -> None:
    assert one_line(ValueError("  a\n\n  b\tc ")) == "a b c"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(ValueError("\x1b[2J")) == r"\x1b[2J"
    assert len(one_line(ValueError("x" * 10**7))) == 240
    assert with_class(ValueError("a\nb")) == "ValueError: a b"
    assert with_class(ValueError()) == "ValueError"


def test_lists_and_counts() -> None:
    assert shortlist(["a", "b", "c"]) == "a, b, c"
    assert shortlist(["a", "b", "c", 4, 5]) == "a, b, c and 2 more"
    assert len(shortlist(["n" * 1000] * 9)) < 3 * 64 + 20
    assert (plural(1, "layer"), plural(0, "layer"), plural(1234, "layer")) == (
        "1 layer",
        "0 layers",
        "1,234 layers",
    )
    assert (plural(1, "class"), plural(2, "class")) == ("1 class", "2 classes")


def test_numbers_that_json_does_not_have_become_null() -> None:
    text = json_text({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": (-math.inf, None, "NaN")}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": [None, None, "NaN"]}}
    assert "\n" not in text
