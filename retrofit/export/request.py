"""What a user requests to be folded: the network, the inputs that it is run on, and what may be approximated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.compare import TOLERANCE
from retrofit.errors import UsageError
from retrofit.export.approximation.fit import MAX_SIZE
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.record import unwrapped
from retrofit.utils.onnx_runtimes import RUNTIMES, Runtime
from retrofit.utils.running import copied, images_of, placement_of

Fold = Literal["exact", "poly"]
Precision = Literal["float32", "float16", "int8"]

APPROXIMATE_TOLERANCE = 0.05


class Examples:
    """A network, in float32, and what it is run on: example calls, the user's or random, and images. `sample` is the
    shape of one sample, empty for a network of several inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs | None,
        input_size: Sequence[int] | None,
        batch: int | None,
        dynamic_size: bool,
        calibrate: Iterable[Any] | None,
    ) -> None:
        """Check what a user gives to run a network on, and complete it by random inputs."""
        if batch is not None and batch < 1:
            raise UsageError(f"`batch={batch}` is no number of samples; give 1 or more")
        self.network, self.are_given = unwrapped(model), inputs is not None
        self.batch, self.dynamic_size = batch, dynamic_size
        self.device, dtype = placement_of(self.network)
        if dtype != torch.float32:  # its own rounding is no part of its function
            self.network = copied(self.network).float()
        calls = [call.to(self.device, torch.float32) for call in example_calls(self.network, inputs, input_size)]
        if batch is not None:
            if inputs is not None and calls[0].batch != batch:
                raise UsageError(f"`inputs` are {calls[0].batch} samples, `batch` says {batch}; make them the same")
            calls = [calls[-1].resized(batch)]
        elif inputs is not None:  # what is captured must do for other numbers too, where the network does
            calls += [calls[0].resized(rows) for rows in (1, 3) if rows != calls[0].batch]
        self.calls, leaves = calls, tree_leaves((calls[0].args, dict(calls[0].kwargs)))
        self.sample = tuple(leaves[0].shape[1:]) if len(leaves) == 1 and isinstance(leaves[0], Tensor) else ()
        self.images = [] if calibrate is None else [image for few in images_of(calibrate) for image in few]
        if batch is not None and 0 < len(self.images) < 2 * batch:
            raise UsageError(f"`batch={batch}` takes {2 * batch} `calibrate` images or more; got {len(self.images)}")
        fixed = self.sample[:1] if dynamic_size else self.sample
        for image in self.images:
            if image.ndim != len(self.sample) or image.shape[: len(fixed)] != fixed:
                shape = ", ".join(str(size) for size in ("N", *self.sample))
                raise UsageError(f"`calibrate` takes batches of images, ({shape}); got images of {tuple(image.shape)}")
            if image.shape != self.images[0].shape:
                both = f"{tuple(self.images[0].shape)} and {tuple(image.shape)}"
                raise UsageError(f"`calibrate` takes images of one size; got images of {both}")

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
        stacks = [torch.stack(list(images[a:b])) for a, b in pairwise([0, *accumulate(sizes)]) if a < len(images)]
        return [Call((stack.to(self.device, torch.float32),)) for stack in stacks if self.batch in (None, len(stack))]


@dataclass(frozen=True)
class FoldOptions:
    """How a network is to be folded, by one who gives so many images; `export_onnx` says what each option means."""

    fold: Fold
    runtime: Runtime | None
    degree: int | None
    tolerance: float | None
    freeze_lambda: bool
    images: int
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        """Check what a user requests."""
        fold, degree, tolerance = self.fold, self.degree, self.tolerance
        if fold not in get_args(Fold):
            raise UsageError(f"there is no fold {fold!r}; use exact or poly")
        if self.precision not in get_args(Precision):
            raise UsageError(f"there is no precision {self.precision!r}; use {', '.join(get_args(Precision))}")
        if self.precision == "int8" and self.images < 2:
            raise UsageError(
                "INT8 takes its ranges from images and is judged on others; give `calibrate` images, 2 or more"
            )
        if self.runtime is not None and self.runtime not in RUNTIMES:
            raise UsageError(f"nothing is known of a runtime {self.runtime!r}; use {' or '.join(RUNTIMES)}")
        for name in ("degree", "runtime"):
            if getattr(self, name) is not None and fold != "poly":
                raise UsageError(f"`{name}` matters to approximations only; use `fold='poly'` with it")
        if degree is not None and not 2 <= degree <= MAX_SIZE:
            raise UsageError(f"`degree={degree}` is not supported; use 2 to {MAX_SIZE}, or leave it out")
        if tolerance is not None and not tolerance > 0:
            raise UsageError(f"`tolerance` must be more than 0, not {tolerance}; {TOLERANCE:g} is usual")
        if self.freeze_lambda and not self.images:
            raise UsageError("`freeze_lambda` takes the mean of lambda over images; give `calibrate` images too")
        if self.approximates and self.images == 1:
            raise UsageError("one image cannot be fitted on and checked on; give `calibrate` more")

    @property
    def approximates(self) -> bool:
        """Whether the folded network is another function."""
        return self.fold == "poly" or self.freeze_lambda

    @property
    def allowed(self) -> float:
        """Largest difference of the folded network; that of a file in less than 32 bits is another matter."""
        usual, narrow = APPROXIMATE_TOLERANCE if self.approximates else TOLERANCE, self.precision != "float32"
        if self.tolerance is None or (narrow and not self.approximates):
            return usual
        return max(self.tolerance, usual) if narrow else self.tolerance  # no further off than the file may be

    @property
    def made_for(self) -> Runtime:
        """The runtime whose approximations are taken: in INT8 what lies between lines would get a range of its own."""
        return "onnxruntime" if self.runtime is None or self.precision == "int8" else self.runtime
