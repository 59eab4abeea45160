"""Attacks on a classifier's images within eps of each pixel: FGSM (Goodfellow et al. 2015) and PGD
(Madry et al. 2018).
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.errors import UsageError
from retrofit.record import Preprocess

Kind = Literal["fgsm", "pgd"]
_STEPS: dict[Kind, int] = {"fgsm": 1, "pgd": 10}
_USUAL_EPS = 4 / 255


@dataclass(frozen=True)
class Attack:
    """A change of an image that raises the loss of its label.

    FGSM takes one step of eps along the sign of the gradient; PGD ten of eps / 4, from the image
    itself. Both are lower bounds of what an attacker can do: they say which of two networks gives
    way sooner, not that one is safe.
    """

    kind: Kind
    # Largest change of a pixel, in units of the image from 0 to 1, before normalization.
    eps: float
    # Mean and standard deviation of the preprocessing, one a channel.
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return normalized images (N, C, H, W) of classes (N,), changed to mislead a model in
        evaluation mode.
        """
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        reach = self.eps / std
        black = -mean / std
        white = (1 - mean) / std
        low = torch.maximum(pixels - reach, black)
        high = torch.minimum(pixels + reach, white)
        stride = reach
        if self.kind != "fgsm":
            stride = reach / 4
        for _ in range(_STEPS[self.kind]):
            moved = pixels + _ascent(model, pixels, labels) * stride
            pixels = torch.minimum(torch.maximum(moved, low), high).detach()
        return pixels

    def resisted(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> int:
        """Return how many normalized images (N, C, H, W) keep their classes (N,) when changed."""
        if not len(pixels):
            return 0
        scores = model(self(model, pixels, labels))
        finite = scores.isfinite().all(1)
        return int((scores.argmax(1).eq(labels) & finite).sum())

    def __str__(self) -> str:
        """Its kind and size."""
        return f"{self.kind} within {255 * self.eps:g}/255"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON keys `kind`, `eps` and `steps`."""
        return {"kind": self.kind, "eps": self.eps, "steps": _STEPS[self.kind]}


def _ascent(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """Return in which direction, 1 or -1, each pixel raises the loss of its image."""
    with torch.enable_grad():
        pixels = pixels.detach().requires_grad_()
        scores = model(pixels).float()
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, pixels)
    return gradient.sign()


def attack_on(preprocess: Preprocess, kind: Kind | None, eps: float | None = None) -> Attack | None:
    """Return an attack on images that `preprocess` normalizes, by default of 4/255; None for none.

    Raises:
        UsageError: If `eps` is out of range, or given without `kind`.
    """
    if kind is None:
        if eps is not None:
            raise UsageError("`eps` is the size of an attack; name one with `attack`")
        return None
    if eps is None:
        eps = _USUAL_EPS
    if not 0 < eps <= 1:
        raise UsageError(f"`eps` must lie above 0 and be at most 1, not {eps:g}; 4/255 is usual")
    return Attack(kind, eps, tuple(preprocess.mean), tuple(preprocess.std))
