"""How close to normal a layer's features are: Q-Q plots, joint normality, and dependence between channels.

The mutual information is scikit-learn's; what else is here chooses values, and has two short formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float64]

_CURVE = 64  # points kept of a Q-Q plot


@dataclass(frozen=True)
class QQ:
    """One Q-Q plot: a channel of one batch against the normal distribution."""

    r2: float  # coefficient of determination of the line of best fit
    theoretical: FloatArray  # normal quantiles, thinned out for drawing
    ordered: FloatArray  # the sample's ordered values there, standardised


def qq(sample: FloatArray) -> QQ | None:
    """Compare a sample with the normal distribution; None for a constant one, which has no line."""
    spread = sample.std()
    if not np.isfinite(spread) or spread <= 1e-12 * max(1.0, np.abs(sample).max()):
        return None
    theoretical, ordered = _normal_quantiles(len(sample)), np.sort((sample - sample.mean()) / spread)
    r = np.corrcoef(theoretical, ordered)[0, 1]
    places = np.unique(np.linspace(0, len(ordered) - 1, _CURVE).round().astype(int))
    return QQ(float(r) ** 2, theoretical[places], ordered[places])


@cache
def _normal_quantiles(values: int) -> FloatArray:
    """Return what that many ordered values are plotted against: the normal quantiles of Filliben's medians of ranks."""
    ranks = (torch.arange(1, values + 1, dtype=torch.float64, device="cpu") - 0.3175) / (values + 0.365)
    ranks[-1] = 0.5 ** (1 / values)
    ranks[0] = 1 - ranks[-1]
    quantiles: FloatArray = torch.special.ndtri(ranks).numpy()
    return quantiles


def henze_zirkler(pair: FloatArray) -> float:
    """Return the Henze-Zirkler statistic of (n, 2) values: the larger, the further from jointly normal.

    It is n times a weighted squared distance between the characteristic function of the standardised values and that
    of the normal distribution (Henze and Zirkler 1990, theorem 3.1, in d = 2 dimensions), and 4 n where one column is
    a multiple of the other.
    """
    n, d = pair.shape
    covariance = np.cov(pair, rowvar=False, bias=True)
    if np.linalg.matrix_rank(covariance) < d:
        return 4.0 * n
    y = np.linalg.solve(np.linalg.cholesky(covariance), (pair - pair.mean(0)).T).T  # mean 0, covariance 1
    lengths = (y * y).sum(1)
    gaps = np.maximum(lengths[:, None] + lengths - 2 * y @ y.T, 0.0)
    beta2 = (n * (2 * d + 1) / 4) ** (2 / (d + 4)) / 2
    empirical = np.exp(-beta2 / 2 * gaps).mean()
    mixed = (1 + beta2) ** (-d / 2) * np.exp(-beta2 / (2 * (1 + beta2)) * lengths).mean()
    return float(n * (empirical - 2 * mixed + (1 + 2 * beta2) ** (-d / 2)))


def dependence(pair: FloatArray, bins: int = 10) -> float:
    """Return the adjusted mutual information of (n, 2) values, each cut into equally filled bins; 0 if independent."""
    from sklearn.metrics import adjusted_mutual_info_score

    cut = [np.searchsorted(np.quantile(v, np.linspace(0, 1, bins + 1)[1:-1]), v) for v in pair.T]
    return float(adjusted_mutual_info_score(*cut))


def sample(y: Tensor, channels: Tensor, values: int, generator: torch.Generator) -> FloatArray:
    """Draw at most `values` values of each of some channels, at the same images and positions.

    Features `y` are (N, C, positions), the result is (values, channels).
    """
    total = y.shape[0] * y.shape[2]
    places = torch.randperm(total, generator=generator, device="cpu")[:values].to(y.device)
    flat = y[:, channels.to(y.device)].movedim(1, 2).reshape(total, len(channels))
    chosen: FloatArray = flat[places].double().cpu().numpy()
    return chosen
