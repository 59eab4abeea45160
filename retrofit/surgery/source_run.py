"""A run of the source, the network that is about to be changed: the changed one is compared with
its outputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retrofit.compare import Reference
from retrofit.errors import RetrofitError
from retrofit.inputs import Call, Inputs, example_calls

# A comparison in them shows rounding alone.
HALF = {torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class SourceRun:
    """The outputs of a network before it is changed.

    Attributes:
        reference: What to compare with, and the shapes of the watched layers; None if the network
            could not be run.
        problem: Why it could not be run; empty if it could.
        predictions: Its outputs on images; None without images.
    """

    reference: Reference | None
    problem: str = ""
    predictions: Reference | None = None

    @property
    def shapes(self) -> Mapping[str, Sequence[torch.Size]]:
        """The shapes of what each watched layer was given, by name; empty if it was not run."""
        if self.reference is None:
            return {}
        return self.reference.shapes


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
    predictions = None
    if images is not None:
        predictions = Reference(model, [Call((batch,)) for batch in images])
    try:
        calls = example_calls(model, inputs, input_size)
        if not whole:
            calls = calls[:1]
        reference = Reference(model, calls, layers=layers)
    except RetrofitError as error:
        says_what_it_takes = inputs is not None or input_size is not None
        if says_what_it_takes and _runs_anywhere(model):
            raise
        return SourceRun(None, str(error), predictions)
    return SourceRun(reference, predictions=predictions)


def _runs_anywhere(model: nn.Module) -> bool:
    """Whether a network's tensors let it run on any device: in half precision it may need another
    one, on the meta device it runs nowhere.
    """
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = {tensor.dtype for tensor in tensors if not tensor.is_meta}
    return bool(dtypes) and dtypes.isdisjoint(HALF)
