"""What a user requests to be folded and exported."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from retrofit.comparison import TOLERANCE
from retrofit.errors import UsageError
from retrofit.export.approximation.polynomial_fit import MAX_DEGREE
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.layers.strength import refuse_partial_state
from retrofit.record import refuse_sharded, unwrapped
from retrofit.utils.forward_pass import copied, device_of, images_of, placement_of

Fold = Literal["exact", "poly"]
Precision = Literal["float32", "float16", "int8"]

_PRECISIONS = ", ".join(get_args(Precision))
APPROXIMATE_TOLERANCE = 0.05
# Bytes of one batch of inputs: what a network computes of it is many times as large
_LARGEST_BATCH = 2**30


@dataclass
class Request:
    """A network, what it is run on, and how it is to be folded; `export_onnx` says what each option
    means.

    Raises:
        UsageError: If an option is out of range, or does not fit another one or the images.
        RetrofitError: If the network does not take the example inputs, cannot be copied, is sharded,
            or holds a part of a state.
    """

    model: nn.Module
    fold: Fold
    inputs: Inputs | None
    input_size: Sequence[int] | None
    batch: int | None
    degree: int | None
    tolerance: float | None
    calibrate: Iterable[Any] | None
    freeze_lambda: bool
    dynamic_size: bool
    precision: Precision = "float32"
    # In float32
    network: nn.Module = field(init=False)
    # Examples, the user's or random
    calls: list[Call] = field(init=False)
    images: list[Tensor] = field(init=False, default_factory=list)
    # The shape of one sample; empty for a network of several inputs
    sample: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Read the images, refuse what does not fit together, and run the network on examples."""
        if self.calibrate is not None:
            self.images = [image for batch in images_of(self.calibrate) for image in batch]
        for problem in self._problems():
            raise UsageError(problem)
        self.network = self._network_in_float32()
        device = device_of(self.network)
        self.calls = [call.to(device, torch.float32) for call in self._example_calls()]
        self.sample = self.calls[0].sample_shape
        self._check_size_of_images()

    def _network_in_float32(self) -> nn.Module:
        """Return the network, or a copy: the rounding of half precision is no part of the function."""
        refuse_sharded(self.model)
        network = unwrapped(self.model)
        refuse_partial_state(network)
        _, dtype = placement_of(network)
        if dtype == torch.float32:
            return network
        return copied(network).float()

    def _problems(self) -> Iterator[str]:
        """Yield what does not fit together; the first is what the user is told."""
        folds = get_args(Fold)
        if self.fold not in folds:
            yield f"there is no fold {self.fold!r}; use exact or poly"
        precisions = get_args(Precision)
        if self.precision not in precisions:
            yield f"there is no precision {self.precision!r}; use {_PRECISIONS}"
        has_idle_degree = self.fold != "poly" and self.degree is not None
        if has_idle_degree:
            yield "`degree` is that of approximations; add `fold='poly'`"
        yield from self._problems_of_numbers()
        yield from self._problems_of_images()

    def _problems_of_numbers(self) -> Iterator[str]:
        if self.degree is not None and not 2 <= self.degree <= MAX_DEGREE:
            yield f"`degree={self.degree}` is not supported; use 2 to {MAX_DEGREE} or none"
        if self.batch is not None and self.batch < 1:
            yield f"`batch={self.batch}` is no number of samples; give 1 or more"
        tolerance = self.tolerance
        if tolerance is not None and not 0 < tolerance < float("inf"):
            yield f"`tolerance` must be more than 0, not {tolerance}; {TOLERANCE:g} is usual"

    def _problems_of_images(self) -> Iterator[str]:
        count = len(self.images)
        if self.calibrate is not None and not count:
            yield (
                "`calibrate` holds no images; give some, or make it again if it is an iterator that "
                "was read before"
            )
        needs_images = self.freeze_lambda or self.precision == "int8"
        halves_images = self.approximates or needs_images or self.batch is not None
        samples = self.batch or 1
        least = 2 * samples
        are_too_few = count < least and (count or needs_images)
        if halves_images and are_too_few:
            yield (
                f"give {least} or more `calibrate` images, not {count}: one half of them fits "
                f"(`freeze_lambda`, INT8, polynomials), the other judges, in batches of `batch`"
            )

    def _example_calls(self) -> list[Call]:
        """Return the user's inputs or random ones, in several numbers unless `batch` fixes it."""
        calls = example_calls(self.network, self.inputs, self.input_size)
        first = calls[0]
        if self.batch is not None:
            self._check_batch(first, self.batch)
            return [calls[-1].resized(self.batch)]
        if self.inputs is not None:
            # The file must do for other numbers too, where the network does
            calls += [first.resized(rows) for rows in (1, 3) if rows != first.batch]
        return calls

    def _check_batch(self, call: Call, batch: int) -> None:
        if self.inputs is not None and call.batch != batch:
            raise UsageError(
                f"`inputs` are {call.batch} samples, `batch` says {batch}; make them the same"
            )
        call_size = sum(tensor.nbytes for tensor in call.tensors)
        size = call_size * batch // max(1, call.batch)
        if size > _LARGEST_BATCH:
            gibibytes = size / 2**30
            raise UsageError(
                f"`batch={batch}` samples take {gibibytes:.3g} GiB before anything is computed "
                "of them; give fewer"
            )

    def _check_size_of_images(self) -> None:
        shapes = sorted({tuple(image.shape) for image in self.images})
        expected = self.sample
        # One size behind the channels, whichever
        if self.dynamic_size and shapes and len(shapes[0]) == len(expected):
            expected = (*expected[:1], *shapes[0][1:])
        if set(shapes) - {expected}:
            sample = ", ".join(map(str, expected))
            got = " and ".join(map(str, shapes))
            raise UsageError(
                f"`calibrate` takes batches of images of one size, (N, {sample}); got images of "
                f"{got}"
            )

    @property
    def approximates(self) -> bool:
        """Whether the folded network is another function."""
        return self.fold == "poly" or self.freeze_lambda

    @property
    def allowed(self) -> float:
        """Largest difference of the folded network; a file in less than 32 bits has its own."""
        usual = TOLERANCE
        if self.approximates:
            usual = APPROXIMATE_TOLERANCE
        if self.tolerance is None:
            return usual
        if self.precision == "float32":
            return self.tolerance
        # A file's tolerance can only loosen that of an approximation
        if self.approximates:
            return max(self.tolerance, usual)
        return usual

    @property
    def fitted(self) -> list[Call]:
        """Calls with the images that are fitted on: every second one."""
        return self._batches(self.images[::2])

    @property
    def unseen(self) -> list[Call]:
        """Calls with the images that are not fitted on; the example calls where there are none."""
        if len(self.images) > 1:
            return self._batches(self.images[1::2])
        return self.calls

    @property
    def judged(self) -> list[Call]:
        """What the folded network is judged on."""
        if self.approximates:
            return self.unseen
        return self.calls + self._batches(self.images)

    @property
    def judged_on(self) -> str:
        """What the file is judged on, in words."""
        calls = "given inputs"
        if self.inputs is None:
            calls = "random inputs"
        if self.precision != "float32" or self.approximates:
            return "images" if len(self.images) > 1 else calls
        if self.images:
            return f"{calls} and images"
        return calls

    def _batches(self, images: Sequence[Tensor]) -> list[Call]:
        """Return calls with images: a batch of one, one of three, and the others in larger ones;
        with a fixed batch, whole batches of that size alone.
        """
        if not images:
            return []
        samples = torch.stack(list(images)).to(device_of(self.network), torch.float32)
        if self.batch is None:
            batches = [samples[:1], samples[1:4], *samples[4:].split(32)]
            return [Call((batch,)) for batch in batches if len(batch)]
        batches = samples.split(self.batch)
        return [Call((batch,)) for batch in batches if len(batch) == self.batch]


def warn_of_runtime(runtime: str | None) -> None:
    """Say that `runtime`, which chose what approximates, has no effect any more."""
    if runtime is not None:
        warnings.warn(
            "`runtime` has no effect and will go: approximations are polynomials in every "
            "runtime; leave it out",
            DeprecationWarning,
            stacklevel=3,
        )
