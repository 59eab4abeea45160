"""The figures of a comparison of two networks, and the error for one that fails."""

import math
from dataclasses import dataclass
from typing import Any

from retrofit.errors import RetrofitError

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """The largest difference between the outputs of two networks.

    Attributes:
        max_abs_diff: Largest absolute difference; inf where shapes differ, or only one side is NaN
            or infinite. Of several tensors, this and `scale` are those of the one that differs most
            relative to its scale.
        scale: Largest finite absolute value that the reference gave there.
        tolerance: Largest share of `scale` that passes.
        top1_agreement: Share of the samples with the same highest score; None where the outputs are
            no scores.
        where: The layer that the figures belong to; empty for the network's output.
        batches: Sizes of the batches that both were run on.
        compared: How many finite elements were compared.
        not_checked: Why nothing was compared, and what would let it be; empty if it was.
        alike: Whether different samples get the same outputs within the tolerance, so that a network
            that ignores its input would pass too.
    """

    max_abs_diff: float = 0.0
    scale: float = 0.0
    tolerance: float = TOLERANCE
    top1_agreement: float | None = None
    where: str = ""
    batches: tuple[int, ...] = ()
    compared: int = 0
    not_checked: str = ""
    alike: bool = False

    @property
    def differs(self) -> bool:
        """Whether a difference beyond the tolerance was seen."""
        return not self.not_checked and not self.max_abs_diff <= self.tolerance * self.scale

    @property
    def passed(self) -> bool:
        """Whether something was compared, and is the same within the tolerance."""
        return self.compared > 0 and not self.not_checked and not self.differs

    @property
    def share(self) -> float:
        """The difference as a share of the scale (0 for 0 of 0)."""
        if self.max_abs_diff == 0:
            return 0.0
        if self.scale:
            return self.max_abs_diff / self.scale
        return math.inf

    def problem(
        self, claim: str = "the converted network is not the function of its source"
    ) -> str:
        """Return a sentence on the difference; empty where there is none, or nothing was
        compared.
        """
        if not self.differs:
            return ""
        location = ""
        if self.where:
            location = f" (in {self.where})"
        return f"{claim}{location}: {self}"

    def __str__(self) -> str:
        """The figures."""
        if self.not_checked:
            return f"not checked: {self.not_checked}"
        figures = f"largest difference {self.max_abs_diff:.3g} at a scale of {self.scale:.3g}"
        if self.alike and not self.differs:
            return f"{figures} (proves little: different samples get the same outputs, too)"
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        names = ("max_abs_diff", "scale", "top1_agreement", "tolerance", "passed")
        return {"batches": list(self.batches), **{name: getattr(self, name) for name in names}}


class ComparisonError(RetrofitError):
    """A network is not the function that another is: "A differs from B by ...; advice"."""

    def __init__(self, comparison: Comparison, claim: str, advice: str) -> None:
        self.comparison = comparison
        message = (
            f"{claim} by {comparison.share:.2g} of the output's scale, more than "
            f"{comparison.tolerance:g}; {advice}"
        )
        super().__init__(str(comparison) if comparison.not_checked else message)
