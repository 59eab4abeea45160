"""What the kernels take beside tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from retrofit.layers.kernels.layout import Layout


class Strength(NamedTuple):
    """t: the first element of a tensor, times a unit. Kernels on a GPU read it there."""

    source: Tensor
    unit: float = 1.0

    def value(self, dtype: torch.dtype) -> Tensor:
        """Return t as a 0-dim tensor."""
        first = self.source.detach().reshape(-1)[0].to(dtype)
        return first if self.unit == 1 else first * self.unit


class Running(NamedTuple):
    """Buffers that follow the batch's statistics, (C,) each; None where there is none. `tracked`
    counts batches.
    """

    mean: Tensor | None
    var: Tensor | None
    lmbda: Tensor | None
    tracked: Tensor | None
    momentum: float


class KernelOptions(NamedTuple):
    """What the kernels take beside tensors, which are given as views by their sets."""

    layout: Layout
    # a buffer where kernels read it themselves (`READS_STRENGTH`), else t itself, 0-dim
    strength: Strength
    # added to the variance
    eps: float
    # lambda's step is multiplied by strength times alpha
    alpha: float = 1.0
    # strength times it is the factor of the noise
    xi: float = 0.0
    # of the noise, on the device of the tensors; None for no noise
    seed: Tensor | None = None
    # moved by kernels that read the strength themselves
    running: Running | None = None

    @property
    def step_factor(self) -> Tensor:
        """The factor of lambda's step, t * alpha, where the strength is t itself."""
        return self.strength.source * self.alpha

    @property
    def noise_factor(self) -> Tensor:
        """The factor of the noise, t * xi, where the strength is t itself."""
        return self.strength.source * self.xi
