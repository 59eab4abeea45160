"""The noise of the normality layers: its kinds, checks of what users say of it, and adding it by
torch's operations.

Kernels, and the formulas that a compiler traces, add noise of the kind "scaled" themselves, by the
numbers of `kernels/normal_numbers.py`. `perturb` is for the other kinds, for target dbnn, and for
what torch.func follows: it draws from torch's generator.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from retrofit.errors import UsageError

NoiseKind = Literal["scaled", "unscaled", "gaussian-dropout"]


def perturb(y: Tensor, factor: Tensor | float, kind: NoiseKind, dim: tuple[int, ...]) -> Tensor:
    """Add noise to transformed values, whose sets span `dim`, with z ~ N(0, 1) for each (the paper's
    sections 4.2 and 5.6).

    "scaled" gives y + factor * s * z, with s the mean absolute deviation of the set, which takes no
    gradient; "unscaled" the same with s = sqrt(2 / pi), a standard normal set's; "gaussian-dropout"
    y * (1 + factor * z), through which y's gradient flows (there the paper writes xi as sqrt((1 -
    p) / p), p the rate of retention).
    """
    noise = factor * torch.randn_like(y)
    if kind == "gaussian-dropout":
        return y * (1 + noise)
    if kind == "unscaled":
        return y + noise * math.sqrt(2 / math.pi)
    return y + noise * (y - y.mean(dim, True)).abs().mean(dim, True).detach()


def check_noise(noise: float) -> float:
    """Return `noise` if it is finite and not negative.

    Raises:
        UsageError: If it is not.
    """
    if not 0.0 <= noise < float("inf"):
        raise UsageError(f"noise must be a finite number >= 0, not {noise}; 0 turns it off")
    return float(noise)


def check_noise_kind(kind: NoiseKind) -> NoiseKind:
    """Return `kind` if there is noise of that kind.

    Raises:
        UsageError: If there is none.
    """
    if kind not in get_args(NoiseKind):
        raise UsageError(
            f"noise_kind must be one of {', '.join(get_args(NoiseKind))}, not {kind!r}"
        )
    return kind
