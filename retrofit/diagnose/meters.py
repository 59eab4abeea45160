"""What is measured of a layer's features: how close to normal they are, where their power lies,
what becomes of them.

`qq`, `henze_zirkler` and `dependence` are given a few values of a batch (`sample`). The meters
gather moments image by image; their size is that of the channels (Labatie et al. 2021).

`PowerMeter` splits a layer's power over scales and channels (section 3). Where a channel's power
lies mostly in its mean over the data set (`P1` near 1), the activation that follows sees hardly
more than a constant and acts almost linearly: the channel has collapsed.

`LinearityMeter` measures how close to linear an activation acts (after appendix A.2.1): the squared
correlation of its input and output, 1 where the channel never reaches the bend. The paper's own
measure fits a line too (eqs. 8 and 9), but its powers are moments about zero, in which a constant
counts as explained; here variation counts.

A `Probe` says what a normalization layer makes of an input before the transform, after it, and
after its affine, by the layer's parameters alone: no hook runs, and no running statistic moves.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from retrofit.layers import MigratedGroupNorm, NormalityMixin, ProxyNorm
from retrofit.surgery.norm_layers import find_norms

FloatArray = NDArray[np.float64]

# Points kept of a Q-Q plot.
_CURVE = 64


@dataclass(frozen=True)
class QQ:
    """One Q-Q plot: a channel of one batch against the normal distribution."""

    # Coefficient of determination of the line of best fit
    r2: float
    # Normal quantiles, thinned out for drawing.
    theoretical: FloatArray
    # The sample's ordered values there, standardized.
    ordered: FloatArray


def qq(sample: FloatArray) -> QQ | None:
    """Compare a sample with the normal distribution; None for a constant one, which has no line."""
    # scikit-learn brings it.
    from scipy.stats import probplot

    spread = sample.std()
    rounding = 1e-12 * max(1.0, np.abs(sample).max())
    if not np.isfinite(spread) or spread <= rounding:
        return None
    standardized = (sample - sample.mean()) / spread
    theoretical, ordered = probplot(standardized, fit=False)
    correlation = np.corrcoef(theoretical, ordered)[0, 1]
    evenly_spread = np.linspace(0, len(ordered) - 1, _CURVE)
    positions = np.unique(evenly_spread.round().astype(int))
    return QQ(float(correlation**2), theoretical[positions], ordered[positions])


def henze_zirkler(pair: FloatArray) -> float:
    """Return the Henze-Zirkler statistic of (n, 2) values: the larger, the further from jointly
    normal.

    It is n times a weighted squared distance between the characteristic function of the
    standardized values and that of the normal distribution (Henze and Zirkler 1990, theorem 3.1, in
    two dimensions), and 4 n where one column is a multiple of the other.
    """
    n = len(pair)
    covariance = np.cov(pair, rowvar=False, bias=True)
    if np.linalg.matrix_rank(covariance) < 2:
        return 4.0 * n
    centred = pair - pair.mean(0)
    # Inner products of the values, standardized.
    products = centred @ np.linalg.solve(covariance, centred.T)
    # The square of the paper's smoothing parameter.
    beta2 = (1.25 * n) ** (1 / 3) / 2
    lengths = products.diagonal()
    gaps = lengths[:, None] + lengths - 2 * products
    empirical = np.exp(-beta2 / 2 * gaps.clip(0)).mean()
    shrinkage = beta2 / (2 * (1 + beta2))
    mixed = np.exp(-shrinkage * lengths).mean() / (1 + beta2)
    normal = 1 / (1 + 2 * beta2)
    return float(n * (empirical - 2 * mixed + normal))


def dependence(pair: FloatArray) -> float:
    """Return the adjusted mutual information of (n, 2) values, each cut into ten equally filled
    bins; 0 if independent.
    """
    from sklearn.metrics import adjusted_mutual_info_score

    shares = np.arange(1, 10) / 10
    first, second = (np.searchsorted(np.quantile(v, shares), v) for v in pair.T)
    return float(adjusted_mutual_info_score(first, second))


def sample(y: Tensor, values: int, generator: torch.Generator) -> FloatArray:
    """Draw at most `values` values of each channel, at the same images and positions.

    Features `y` are (N, C, positions), the result is (values, C).
    """
    flat = y.movedim(1, 2).flatten(0, 1)
    positions = torch.randperm(len(flat), generator=generator, device="cpu")[:values]
    chosen: FloatArray = flat[positions.to(y.device)].double().cpu().numpy()
    return chosen


@dataclass(frozen=True)
class Power:
    """Shares of a layer's power, each averaged over channels; p1 to p4 sum to 1 (eq. 5 over its
    left side).
    """

    # Power of the mean over the data set.
    p1: float
    # Variance between images of their means.
    p2: float
    # Power of the mean over images of their standard deviations.
    p3: float
    # Variance between images of their standard deviations.
    p4: float
    # (sum of channel powers)^2 / (C * sum of their squares): 1 if all are equal, 1/C if one has all
    balance: float


class _Meter:
    """Sums over images of a few numbers a channel."""

    def __init__(self) -> None:
        self._images = 0
        self._sums: Any = 0

    def _add(self, moments: list[Tensor]) -> None:
        # Of (N, C) each.
        self._sums = self._sums + torch.stack(moments).sum(1)
        self._images += len(moments[0])


class PowerMeter(_Meter):
    """Measures `Power`."""

    def update(self, y: Tensor) -> None:
        """Add what the layer passes on, of shape (N, C, positions)."""
        mean = y.mean(2, keepdim=True)
        # Many times as fast as torch.std.
        std = torch.linalg.vector_norm(y - mean, dim=2).double() / y.shape[2] ** 0.5
        mean = mean.squeeze(2).double()
        self._add([mean, mean.square(), std, std.square()])

    def result(self) -> Power:
        """Return the shares over all images."""
        # (C,) each.
        mean, square, std, variance = self._sums / self._images
        power_of_mean = mean.square()
        power_of_std = std.square()
        # (4, C)
        powers = torch.stack(
            [power_of_mean, square - power_of_mean, power_of_std, variance - power_of_std]
        ).clamp_min(0)
        by_channel = powers.sum(0)
        shares = powers.sum(1) / _not_0(by_channel.sum())
        mean_of_squares = by_channel.square().mean()
        balance = by_channel.mean().square() / _not_0(mean_of_squares)
        p1, p2, p3, p4 = shares.cpu().tolist()
        return Power(p1, p2, p3, p4, float(balance))


class LinearityMeter(_Meter):
    """Measures the squared correlation of an activation's input and output."""

    def update(self, x: Tensor, z: Tensor) -> None:
        """Add the activation's input and output, each of shape (N, C, positions)."""
        x_mean, x_rest = _mean_and_rest(x)
        z_mean, z_rest = _mean_and_rest(z)
        xx = _covariance(x_rest, x_rest) + x_mean * x_mean
        zz = _covariance(z_rest, z_rest) + z_mean * z_mean
        xz = _covariance(x_rest, z_rest) + x_mean * z_mean
        self._add([x_mean, z_mean, xx, zz, xz])

    def result(self) -> float:
        """Return the mean over channels; one whose output does not vary counts as linear."""
        # (C,) each.
        x, z, xx, zz, xz = self._sums / self._images
        x_var = (xx - x * x).clamp_min(0)
        z_var = (zz - z * z).clamp_min(0)
        share = (xz - x * z).square() / _not_0(x_var * z_var)
        is_constant = z_var <= 1e-12 * zz
        return float(share.masked_fill(is_constant, 1.0).clamp_max(1).mean())


def _not_0(divisor: Tensor) -> Tensor:
    return divisor.clamp_min(torch.finfo(divisor.dtype).tiny)


def _mean_and_rest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over positions, (N, C) in float64, and what is left, of x's shape."""
    mean = x.mean(2, keepdim=True)
    return mean.squeeze(2).double(), x - mean


def _covariance(x: Tensor, z: Tensor) -> Tensor:
    """Return the mean product over positions, (N, C) in float64."""
    return torch.linalg.vecdot(x, z).double() / x.shape[2]


class Probe:
    """One normalization layer; its tensors are read when they are needed, so that it stays valid
    while they change.
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self.layer = layer
        self.kind = type(layer).__name__
        # Whether it applies the power transform.
        self.transforms = isinstance(layer, NormalityMixin)
        self._bare = _bare(layer)
        self._without_transform = _bare(layer)
        if self.transforms:
            self._without_transform.alpha = 0.0

    def normalized(self, x: Tensor, transformed: bool = True) -> Tensor:
        """Return what the affine gets, the transform included unless not `transformed`, as (N, C,
        positions).
        """
        bare = self._without_transform
        if transformed:
            bare = self._bare
        return self.by_channel(functional_call(bare, self._neutral(), (x,)))

    def output(self, x: Tensor) -> Tensor:
        """Return what follows the affine, in `x`'s shape."""
        out: Tensor = self._bare(x)
        return out

    def channel_axis(self, y: Tensor) -> int:
        """Return which dimension of an output holds the channels."""
        if y.ndim > 2 and isinstance(self.layer, nn.LayerNorm) and "2d" not in self.kind:
            return y.ndim - len(self.layer.normalized_shape)
        return 1

    def by_channel(self, y: Tensor) -> Tensor:
        """View an output as (N, C, positions), float32."""
        y = y.movedim(self.channel_axis(y), 1)
        return y.reshape(*y.shape[:2], -1).float()

    def _neutral(self) -> dict[str, Tensor]:
        """The affine parameters that leave the normalized values as they are."""
        neutral = {}
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            parameter = getattr(self.layer, name, None)
            if isinstance(parameter, Tensor):
                neutral[name] = torch.full_like(parameter, value)
        if "weight" in neutral and isinstance(self.layer, MigratedGroupNorm):
            neutral["weight"] = self.layer.gain.to(neutral["weight"])
        return neutral


def _bare(layer: nn.Module) -> Any:
    """Return a layer with the same tensors, in evaluation mode, without its fused activation and
    dropout and without hooks.
    """
    bare: Any = copy.copy(layer)
    modules = dict(layer._modules)
    for fused in {"drop", "act"} & modules.keys():
        modules[fused] = nn.Identity()
    bare._modules = modules
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        setattr(bare, hooks, OrderedDict())
    bare.training = False
    return bare


def probes(model: nn.Module) -> tuple[list[Probe], list[str]]:
    """Return a probe for every normalization layer that standardizes, and the names of those that
    do not, or do more.

    Each module has one probe; both lists are in the model's order.
    """
    by_layer: dict[nn.Module, Probe] = {}
    others = []
    for norm in find_norms(model):
        if norm.family is None and norm.status != "kept":
            others.append(norm.name)
        elif not isinstance(norm.module, ProxyNorm):
            by_layer.setdefault(norm.module, Probe(norm.name, norm.module))
    return list(by_layer.values()), others
