"""What is to be folded, on what it is run, and how it is folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.compare import TOLERANCE
from retrofit.errors import UsageError
from retrofit.export.approximation.choose import Approximation
from retrofit.export.approximation.fit import MAX_SIZE
from retrofit.export.capture import with_rows
from retrofit.export.onnx.precision import Precision
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.record import unwrapped
from retrofit.utils.batches import images_of
from retrofit.utils.evaluating import copied
from retrofit.utils.onnx_runtimes import RUNTIMES, Runtime
from retrofit.utils.placement import placement_of

APPROXIMATE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Job:
    """What is folded, and on what it is run.

    Attributes:
        network: The network, in float32 at least.
        calls: Example calls.
        images: Images to fit and judge on.
        are_given: Whether the calls are the user's.
        batch: The number of samples, if fixed.
        dynamic_size: Whether height and width may vary.
    """

    network: nn.Module
    calls: list[Call]
    images: list[Tensor]
    are_given: bool
    batch: int | None
    dynamic_size: bool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs | None,
        input_size: Sequence[int] | None,
        batch: int | None,
        dynamic_size: bool,
        calibrate: Iterable[Any] | None,
    ) -> Job:
        """Check what a network is to be run on."""
        if batch is not None and batch < 1:
            raise UsageError(f"`batch={batch}` is no number of samples; give 1 or more")
        network = unwrapped(model)
        if placement_of(network)[1] in (torch.float16, torch.bfloat16):  # its own rounding is no part of its function
            network = copied(network).float()
        calls = example_calls(network, inputs, input_size)
        if batch is not None:
            if inputs is not None and calls[0].batch != batch:
                raise UsageError(f"`inputs` are {calls[0].batch} samples, `batch` says {batch}; make them the same")
            calls = [with_rows(calls[-1], batch)]
        elif inputs is not None:  # what is captured must do for other numbers too, where the network does
            calls += [with_rows(calls[0], rows) for rows in (1, 3) if rows != calls[0].batch]
        job = cls(network, calls, [], inputs is not None, batch, dynamic_size)
        job.images.extend([] if calibrate is None else (image for few in images_of(calibrate) for image in few))
        for image in job.images:
            if image.ndim != len(job.sample) or image.shape[0] != job.sample[0]:
                shape = ", ".join(str(size) for size in ("N", *job.sample))
                raise UsageError(f"`calibrate` takes batches of images, ({shape}); got images of {tuple(image.shape)}")
        return job

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one sample; empty for a network of several inputs."""
        tensors = [leaf for leaf in tree_leaves((self.calls[0].args, dict(self.calls[0].kwargs)))]
        return tuple(tensors[0].shape[1:]) if len(tensors) == 1 and isinstance(tensors[0], Tensor) else ()

    def batches(self, images: Sequence[Tensor]) -> list[Call]:
        """Return calls with all of some images: one alone, three, and the others in larger batches."""
        sizes = [1, 3, *[32] * (len(images) // 32 + 1)] if self.batch is None else [self.batch] * len(images)
        ends = [0, *accumulate(sizes)]
        device, dtype = placement_of(self.network)
        stacks = [torch.stack(list(images[a:b])) for a, b in pairwise(ends) if a < len(images)]
        return [Call((stack.to(device, dtype),)) for stack in stacks if self.batch in (None, len(stack))]

    def judged_on(self, mixed: bool) -> str:
        """Say what a file was compared on: the calls, and images if `mixed`; else images that no fit has seen."""
        calls = "given inputs" if self.are_given else "random inputs"
        if mixed:
            return f"{calls} and images" if self.images else calls
        return "images" if len(self.images) > 1 else calls


@dataclass(frozen=True)
class Wanted:
    """How a network is to be folded.

    Attributes:
        approximation: Of power transforms; None leaves them exact.
        freeze_lambda: Whether layers take the mean of the lambdas that they estimate.
        fit: Images to fit on.
        check: Calls to judge on.
        tolerance: Largest difference that passes.
    """

    approximation: Approximation | None
    freeze_lambda: bool
    fit: list[Call]
    check: list[Call]
    tolerance: float

    @property
    def approximates(self) -> bool:
        """Whether the folded network is another function."""
        return self.approximation is not None or self.freeze_lambda


def wanted_fold(
    job: Job,
    fold: str,
    runtime: Runtime | None,
    degree: int | None,
    tolerance: float | None,
    freeze_lambda: bool,
    precision: Precision,
) -> Wanted:
    """Check what a user asks for."""
    if fold not in ("exact", "poly"):
        raise UsageError(f"there is no fold {fold!r}; use exact or poly")
    if runtime is not None and runtime not in RUNTIMES:
        raise UsageError(f"nothing is known of a runtime {runtime!r}; use {' or '.join(RUNTIMES)}")
    for name, value in (("degree", degree), ("runtime", runtime)):
        if value is not None and fold != "poly":
            raise UsageError(f"`{name}` matters to approximations only; use `fold='poly'` with it")
    if degree is not None and not 2 <= degree <= MAX_SIZE:
        raise UsageError(f"`degree={degree}` is not supported; use 2 to {MAX_SIZE}, or leave it out")
    if tolerance is not None and not tolerance > 0:
        raise UsageError(f"`tolerance` must be more than 0, not {tolerance}; {TOLERANCE:g} is usual")
    if freeze_lambda and not job.images:
        raise UsageError("`freeze_lambda` takes the mean of lambda over images; give `calibrate` images too")
    if fold == "exact" and not freeze_lambda:
        narrow = precision != "float32"  # the tolerance judges the file
        return Wanted(None, False, [], job.calls + job.batches(job.images), (not narrow and tolerance) or TOLERANCE)
    if len(job.images) == 1:
        raise UsageError("one image cannot be fitted on and checked on; give `calibrate` more")
    allowed = tolerance or APPROXIMATE_TOLERANCE
    if precision != "float32":  # what is approximated must not be further off than the file
        allowed = max(allowed, APPROXIMATE_TOLERANCE)
    fit = job.batches(job.images[::2])
    check = job.batches(job.images[1::2]) if job.images else job.calls
    approximation = None
    if fold == "poly":
        # In INT8 what lies between lines would be quantized, in its own range and not in the sum's.
        family = "onnxruntime" if runtime is None or precision == "int8" else runtime
        approximation = Approximation(family, degree, allowed, fit, check)
    return Wanted(approximation, freeze_lambda, fit, check, allowed)
