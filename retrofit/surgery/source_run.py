"""A run of the source, the network that is about to be changed: the changed one is compared with
its outputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retrofit.compare import Reference
from retrofit.comparison import Comparison
from retrofit.errors import RetrofitError
from retrofit.inputs import Call, Inputs, example_calls

# A comparison in them shows rounding alone.
_HALF = {torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class SourceRun:
    """The outputs of a network before it is changed.

    Attributes:
        reference: What to compare with, and the shapes of the watched layers; None if the network
            could not be run.
        problem: Why it could not be run; empty if it could.
        predictions: Its outputs on images; None without images.
        in_half: Whether it holds tensors in half precision.
    """

    reference: Reference | None
    problem: str = ""
    predictions: Reference | None = None
    in_half: bool = False

    @property
    def shapes(self) -> Mapping[str, Sequence[torch.Size]]:
        """The shapes of what each watched layer was given, by name; empty if it was not run."""
        if self.reference is None:
            return {}
        return self.reference.shapes

    @property
    def classifies(self) -> bool | None:
        """Whether it answers with scores of classes alone; None if it was not run."""
        if self.reference is None:
            return None
        return self.reference.classifies

    def compare(self, changed: nn.Module, *, layers: bool = True) -> Comparison:
        """Compare the changed network with its source; see `Reference.compare`."""
        if self.reference is None:
            return Comparison(not_checked=self.problem)
        return self.reference.compare(changed, layers=layers)

    def check(self, changed: nn.Module, *, layers: bool) -> Comparison:
        """Compare as `compare` does, unless rounding hides a difference."""
        if self.in_half:
            reason = (
                "in half precision rounding hides what the check looks for; convert in float32 to "
                "be sure"
            )
            return Comparison(not_checked=reason)
        return self.compare(changed, layers=layers)

    def agreement(self, changed: nn.Module) -> dict[str, int] | None:
        """Return on how many of the images the class with the highest score stays the same; None if
        nothing tells.
        """
        if self.predictions is None:
            return None
        share = self.predictions.compare(changed).top1_agreement
        if share is None:
            return None
        images = sum(self.predictions.batches)
        return {"images": images, "same": round(share * images)}


def run_source(
    model: nn.Module,
    inputs: Inputs | None,
    input_size: Sequence[int] | None,
    *,
    layers: Iterable[str] = (),
    images: Iterable[Tensor] | None = None,
    whole: bool = True,
) -> SourceRun:
    """Run a network, for the shapes that its layers get and to compare it later.

    Args:
        model: The network, which is left as it was.
        inputs: Example inputs; None for random samples.
        input_size: Shape of one sample; None for the network's own.
        layers: Names of layers whose outputs are kept too.
        images: Batches (N, C, H, W) to compare predictions on.
        whole: Whether to run every example call; one is enough for the shapes.

    Raises:
        RetrofitError: If the network refuses inputs or a size that the caller gave.
    """
    tensors = [*model.parameters(), *model.buffers()]
    in_half = any(tensor.dtype in _HALF for tensor in tensors)
    # In half precision it may need another device; on the meta device it runs nowhere.
    runs_anywhere = not in_half and not all(tensor.is_meta for tensor in tensors)
    says_what_it_takes = inputs is not None or input_size is not None
    reference = None
    problem = ""
    try:
        calls = example_calls(model, inputs, input_size)
        if not whole:
            calls = calls[:1]
        reference = Reference(model, calls, layers=layers)
    except RetrofitError as error:
        if says_what_it_takes and runs_anywhere:
            raise
        problem = str(error)
    predictions = None
    if images is not None:
        predictions = Reference(model, [Call((batch,)) for batch in images])
    return SourceRun(reference, problem, predictions, in_half)
