"""What a user requests to be folded: the network, the inputs that it is run on, and what may be approximated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.compare import TOLERANCE
from retrofit.errors import UsageError
from retrofit.export.approximation.fit import MAX_SIZE
from retrofit.export.capture import placed, with_rows
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.record import unwrapped
from retrofit.utils.batches import images_of
from retrofit.utils.evaluating import copied
from retrofit.utils.onnx_runtimes import RUNTIMES, Runtime
from retrofit.utils.placement import placement_of

Fold = Literal["exact", "poly"]
Precision = Literal["float32", "float16", "int8"]

APPROXIMATE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Examples:
    """A network, in float32, and what it is run on: example calls, the user's or random, and images."""

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
    ) -> Examples:
        """Check what a user gives to run a network on, and complete it by random inputs."""
        if batch is not None and batch < 1:
            raise UsageError(f"`batch={batch}` is no number of samples; give 1 or more")
        network = unwrapped(model)
        device, dtype = placement_of(network)
        if dtype != torch.float32:  # its own rounding is no part of its function
            network = copied(network).float()
        calls = [placed(call, device, torch.float32) for call in example_calls(network, inputs, input_size)]
        if batch is not None:
            if inputs is not None and calls[0].batch != batch:
                raise UsageError(f"`inputs` are {calls[0].batch} samples, `batch` says {batch}; make them the same")
            calls = [with_rows(calls[-1], batch)]
        elif inputs is not None:  # what is captured must do for other numbers too, where the network does
            calls += [with_rows(calls[0], rows) for rows in (1, 3) if rows != calls[0].batch]
        images = [] if calibrate is None else [image for few in images_of(calibrate) for image in few]
        examples = cls(network, calls, images, inputs is not None, batch, dynamic_size)
        if batch is not None and 0 < len(images) < 2 * batch:
            raise UsageError(f"`batch={batch}` takes {2 * batch} `calibrate` images or more; got {len(images)}")
        sample = examples.sample
        fixed = len(sample[:1] if dynamic_size else sample)
        for image in images:
            if image.ndim != len(sample) or image.shape[:fixed] != sample[:fixed]:
                shape = ", ".join(str(size) for size in ("N", *sample))
                raise UsageError(f"`calibrate` takes batches of images, ({shape}); got images of {tuple(image.shape)}")
            if image.shape != images[0].shape:
                both = f"{tuple(images[0].shape)} and {tuple(image.shape)}"
                raise UsageError(f"`calibrate` takes images of one size; got images of {both}")
        return examples

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one sample; empty for a network of several inputs."""
        leaves = tree_leaves((self.calls[0].args, dict(self.calls[0].kwargs)))
        return tuple(leaves[0].shape[1:]) if len(leaves) == 1 and isinstance(leaves[0], Tensor) else ()

    @property
    def fitted(self) -> list[Call]:
        """Calls with the images that are fitted on: every second one."""
        return self.batches(self.images[::2])

    @property
    def judged(self) -> list[Call]:
        """Calls with the images that are judged on: the others; the example calls where there are none."""
        return self.batches(self.images[1::2]) if len(self.images) > 1 else self.calls

    def batches(self, images: Sequence[Tensor]) -> list[Call]:
        """Return calls with all of some images: one alone, three, and the others in larger batches."""
        sizes = [1, 3, *[32] * (len(images) // 32 + 1)] if self.batch is None else [self.batch] * len(images)
        device, dtype = placement_of(self.network)
        stacks = [torch.stack(list(images[a:b])) for a, b in pairwise([0, *accumulate(sizes)]) if a < len(images)]
        return [Call((stack.to(device, dtype),)) for stack in stacks if self.batch in (None, len(stack))]


@dataclass(frozen=True)
class FoldOptions:
    """How a network is to be folded; the arguments of `export_onnx` say what each option means."""

    runtime: Runtime | None  # None leaves power transforms exact
    degree: int | None
    freeze_lambda: bool
    tolerance: float

    @classmethod
    def of(
        cls,
        fold: str,
        runtime: Runtime | None,
        degree: int | None,
        tolerance: float | None,
        freeze_lambda: bool,
        images: int,
        precision: Precision = "float32",
    ) -> FoldOptions:
        """Check what a user requests, who gives so many images."""
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
        if freeze_lambda and not images:
            raise UsageError("`freeze_lambda` takes the mean of lambda over images; give `calibrate` images too")
        narrow = precision != "float32"  # `tolerance` then judges the file
        if fold == "exact" and not freeze_lambda:
            return cls(None, None, False, (None if narrow else tolerance) or TOLERANCE)
        if images == 1:
            raise UsageError("one image cannot be fitted on and checked on; give `calibrate` more")
        allowed = tolerance or APPROXIMATE_TOLERANCE
        if narrow:  # what is approximated must not be further off than the file
            allowed = max(allowed, APPROXIMATE_TOLERANCE)
        # In INT8 what lies between lines would be quantized, in its own range and not in the sum's.
        family: Runtime = "onnxruntime" if runtime is None or precision == "int8" else runtime
        return cls(family if fold == "poly" else None, degree, freeze_lambda, allowed)

    @property
    def approximates(self) -> bool:
        """Whether the folded network is another function."""
        return self.runtime is not None or self.freeze_lambda
