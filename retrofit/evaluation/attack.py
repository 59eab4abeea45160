"""Attacks on images, within eps of each pixel: FGSM (Goodfellow et al. 2015) and PGD (Madry et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.errors import UsageError

if TYPE_CHECKING:
    from retrofit.record import Preprocess

Kind = Literal["fgsm", "pgd"]


@dataclass(frozen=True)
class Attack:
    """A change of an image that raises the loss of its label.

    FGSM takes one step of eps along the sign of the gradient; PGD ten of eps / 4, from the image itself. Both are lower
    bounds of what an attacker can do: they say which of two networks gives way sooner, not that one is safe.

    Attributes:
        kind: "fgsm" or "pgd".
        eps: Largest change of a pixel, in units of the image from 0 to 1, before normalization.
        mean: The preprocessing's, one a channel.
        std: Likewise.
    """

    kind: Kind
    eps: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return 1 if self.kind == "fgsm" else 10

    def __call__(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return the changed images.

        Args:
            model: Gives class scores (N, classes), in evaluation mode.
            pixels: Normalized images (N, C, H, W).
            labels: Their classes (N,).
        """
        mean, std = (torch.tensor(one, device=pixels.device).view(-1, 1, 1) for one in (self.mean, self.std))
        reach = self.eps / std
        low = torch.maximum(pixels - reach, -mean / std)
        high = torch.minimum(pixels + reach, (1 - mean) / std)
        found = pixels
        for _ in range(self.steps):
            with torch.enable_grad():
                found = found.detach().requires_grad_()
                loss = functional.cross_entropy(model(found).float(), labels, reduction="sum")
                (gradient,) = torch.autograd.grad(loss, found)
            found = found + gradient.sign() * (reach if self.steps == 1 else reach / 4)
            found = torch.minimum(torch.maximum(found, low), high).detach()
        return found

    def __str__(self) -> str:
        """Its kind and size."""
        return f"{self.kind} within {255 * self.eps:g}/255"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON keys `kind`, `eps` and `steps`."""
        return {"kind": self.kind, "eps": self.eps, "steps": self.steps}


def attack_on(preprocess: Preprocess, kind: Kind | None, eps: float | None = None) -> Attack | None:
    """Return an attack on images that are prepared in some way; None for none.

    Args:
        preprocess: What normalizes the images.
        kind: "fgsm", "pgd", or None.
        eps: Largest change of a pixel of an image from 0 to 1; 4/255 if None.

    Raises:
        UsageError: If there is a size and no kind, or the size is out of range.
    """
    if kind is None:
        if eps is not None:
            raise UsageError("`eps` is the size of an attack; name one with `attack`")
        return None
    if eps is not None and not 0 < eps <= 1:
        raise UsageError(f"`eps` must lie above 0 and be at most 1, not {eps}")
    return Attack(kind, 4 / 255 if eps is None else eps, tuple(preprocess.mean), tuple(preprocess.std))
