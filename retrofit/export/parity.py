"""Is a network, folded or exported, the function that the given one is? Both answer the same inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError
from retrofit.surgery.identity_check import largest_gap, scale_of
from retrofit.utils.evaluating import evaluating
from retrofit.utils.placement import device_of, placement_of

BATCHES = (1, 3)
ADVICE = "please report it, or raise `tolerance` if you can accept that"


@dataclass(frozen=True)
class Parity:
    """How far one network is from another.

    Attributes:
        batches: Sizes of the batches compared.
        max_abs_diff: Largest absolute difference of an output; inf where NaN or infinity is on one side only. Of
            several outputs, this and `scale` are those of the one that differs most for its scale.
        scale: Largest absolute value of that output.
        top1_agreement: Share of the samples with the same highest output; None for outputs that are no scores.
        tolerance: Largest share of `scale` that passes.
    """

    batches: tuple[int, ...]
    max_abs_diff: float
    scale: float
    top1_agreement: float | None
    tolerance: float

    @property
    def share(self) -> float:
        """The difference as a share of the scale."""
        return 0.0 if self.max_abs_diff == 0 else self.max_abs_diff / self.scale if self.scale else float("inf")

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; outputs without a finite value but 0 prove nothing."""
        return self.scale > 0 and self.share <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "batches": list(self.batches),
            "max_abs_diff": self.max_abs_diff,
            "scale": self.scale,
            "top1_agreement": self.top1_agreement,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }


class ParityError(RetrofitError):
    """One network is not the function that the other is.

    Args:
        parity: By how much.
        what: What was compared with what, "A differs from B".
        advice: What to do.
    """

    def __init__(self, parity: Parity, what: str, advice: str = ADVICE) -> None:
        self.parity = parity
        if not parity.scale:
            super().__init__(
                "the network's outputs are all zero or not finite, which proves nothing; check its weights"
            )
            return
        super().__init__(
            f"{what} by {parity.share:.2g} of the output's scale, more than {parity.tolerance:g}; {advice}"
        )


@dataclass(frozen=True)
class Check:
    """What a network has to answer: batches, the answers for each, and how far off they may be for their scale.

    `advice` says what to do about one that is further off.
    """

    inputs: Sequence[Tensor]
    expected: Sequence[Sequence[Tensor]]
    tolerance: float
    advice: str = ADVICE


def sample_inputs(size: Sequence[int]) -> list[Tensor]:
    """Return seeded random batches of 1 and 3 samples."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, *size, generator=generator, dtype=torch.float32, device="cpu") for n in BATCHES]


def reference(model: nn.Module, inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors that a network gives for each input, in evaluation; the network is left as it was.

    One in half precision answers in float32: its own rounding is no part of its function.
    """
    _, dtype = placement_of(model)
    if dtype in (torch.float16, torch.bfloat16):
        model, dtype = copy.deepcopy(model).float(), torch.float32
    with evaluating(model):
        return [answer(model, batch.to(dtype)) for batch in inputs]


def answer(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """Return the tensors that a network gives for a batch, on the CPU; what it draws at random is seeded."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        leaves = tree_leaves(model(batch.to(device_of(model))))
    return [leaf.float().cpu() for leaf in leaves if isinstance(leaf, Tensor)]


def compare(run: Callable[[Tensor], Sequence[Tensor]], check: Check) -> Parity:
    """Compare a network's answers with those expected.

    Args:
        run: The network.
        check: The batches and the answers.

    Returns:
        The comparison over all outputs of all batches.
    """
    worst: dict[int, tuple[float, float]] = {}  # by output: largest difference, scale
    same, scored = 0, 0
    for batch, ours in zip(check.inputs, check.expected, strict=True):
        theirs = run(batch)
        if [t.shape for t in theirs] != [t.shape for t in ours]:
            worst[-1] = float("inf"), 1.0
            continue
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            difference, scale = worst.get(number, (0.0, 0.0))
            worst[number] = max(difference, largest_gap(a, b)), max(scale, scale_of(a))
        if ours and ours[0].ndim == 2:
            same += int((ours[0].argmax(1) == theirs[0].argmax(1)).sum())
            scored += len(batch)
    agreement = same / scored if scored else None
    sizes = tuple(len(batch) for batch in check.inputs)
    found = [Parity(sizes, *pair, agreement, check.tolerance) for pair in worst.values()]
    return max(
        found, key=lambda one: (one.share, one.scale), default=Parity(sizes, 0.0, 0.0, agreement, check.tolerance)
    )
