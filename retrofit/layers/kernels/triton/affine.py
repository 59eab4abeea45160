"""Gamma and beta of sets, or of elements within them, and the sums that are their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from retrofit.layers.kernels.triton.sums import reduce_sets
from retrofit.layers.kernels.triton.tables import load_numbers
from retrofit.layers.kernels.triton.tiles import zero_sums


@triton.jit
def affine_of_sets(P, place, default, TILE):
    """Load gammas that are a number of each set; `default` where they are not."""
    if P is None or TILE.along != "sets":
        return default
    elif TILE.way == "columns":
        return load_numbers(P, place.lane, place.held, 0.0)
    else:
        return load_numbers(P, place.parameter + place.sets * 0, place.valid, 0.0)


@triton.jit
def affine_of_elements(P, of_sets, tile, TILE):
    """Load the gammas of a tile where they are not those `of_sets`."""
    if P is None or TILE.along == "sets":
        return of_sets
    else:
        return load_numbers(P, tile.parameter, tile.mask, 0.0)


@triton.jit
def store_affine_sums(AffineSums, partials, place, sums, TILE):
    """Store two sums over a program's elements for each gamma: by lane, or by set. Programs store
    `partials` of each.
    """
    part = tl.program_id(1) * (partials // place.splits)
    for k in tl.static_range(2):
        P = AffineSums + k * partials + part
        if TILE.way == "columns" or TILE.along == "lanes":
            of_lanes = tl.sum(sums[k], 0, keep_dims=True)
            tl.store(P + place.block * place.lanes + place.lane, of_lanes, mask=place.held)
        else:
            tl.store(P + place.sets, reduce_sets(sums[k], tl.sum, TILE), mask=place.valid)


@triton.jit
def store_affine_sums_of_runs(AffineSums, partials, place, first_run, sums, TILE):
    """Store two sums over a program's lanes for gammas that change along the runs; return zeros."""
    run = first_run + tl.arange(0, TILE.rows)
    P = AffineSums + tl.program_id(0) * place.runs + run
    for k in tl.static_range(2):
        tl.store(P + k * partials, tl.sum(sums[k], 1), mask=run < place.stop)
    return zero_sums(2, TILE)
