"""Tables of numbers: one for each set, a row for each field."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Entries(NamedTuple):
    """Numbers in a table: which of a row, whether they are there, and how many a row has."""

    sets: Any
    valid: Any
    total: Any


@triton.jit
def load_numbers(P, index, mask, default):
    """Load numbers in whatever type, `default` where there are none."""
    if P is None:
        return index.to(tl.float32) * 0 + default
    else:
        return tl.load(P + index, mask=mask, other=default).to(tl.float32)


@triton.jit
def load_entries(P, entries, default):
    """Load a number of each set, as `load_numbers` does."""
    return load_numbers(P, entries.sets, entries.valid, default)


@triton.jit
def store_rows(Table, FIELD, entries, values):
    """Store numbers of each set, in rows of a table from `FIELD` on."""
    for k in tl.static_range(len(values)):
        tl.store(Table + (FIELD + k) * entries.total + entries.sets, values[k], mask=entries.valid)


@triton.jit
def load_row(Table, FIELD, entries):
    """Load a number of each set."""
    return tl.load(Table + FIELD * entries.total + entries.sets, mask=entries.valid, other=0.0)


@triton.jit
def load_rows(Table, FIELD, COUNT, entries):
    """Load numbers of each set, from `COUNT` rows of a table."""
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (load_row(Table, FIELD + k, entries),)
    return rows
