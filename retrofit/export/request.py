"""What a user requests to be folded and exported, and the report of what became of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from retrofit.compare import TOLERANCE, Comparison
from retrofit.errors import UsageError
from retrofit.export.approximation.fit import MAX_SIZE
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.layers.strength import refuse_partial_state
from retrofit.record import unwrapped
from retrofit.utils.files import ensure_writable
from retrofit.utils.onnx_runtimes import RUNTIMES, Runtime
from retrofit.utils.running import copied, device_of, images_of, placement_of

Fold = Literal["exact", "poly"]
Precision = Literal["float32", "float16", "int8"]

SCHEMA = 1
_PRECISIONS, _RUNTIMES = ", ".join(get_args(Precision)), " or ".join(RUNTIMES)
APPROXIMATE_TOLERANCE = 0.05


@dataclass
class Request:
    """A network, what it is run on, and how it is to be folded; `export_onnx` says what each option
    means.
    """

    model: nn.Module
    fold: Fold
    inputs: Inputs | None
    input_size: Sequence[int] | None
    batch: int | None
    runtime: Runtime | None
    degree: int | None
    tolerance: float | None
    calibrate: Iterable[Any] | None
    freeze_lambda: bool
    dynamic_size: bool
    precision: Precision = "float32"
    # in float32
    network: nn.Module = field(init=False)
    # examples, the user's or random
    calls: list[Call] = field(init=False)
    images: list[Tensor] = field(init=False)
    # the shape of one sample; empty for a network of several inputs
    sample: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check what a user requests, and complete it by random inputs."""
        self.network = unwrapped(self.model)
        self.images = [
            image
            for few in images_of(() if self.calibrate is None else self.calibrate)
            for image in few
        ]
        self._check_options()
        refuse_partial_state(self.network)
        device, dtype = placement_of(self.network)
        # its own rounding is no part of its function
        if dtype != torch.float32:
            self.network = copied(self.network).float()
        calls = example_calls(self.network, self.inputs, self.input_size)
        calls, batch = [call.to(device, torch.float32) for call in calls], self.batch
        if batch is not None:
            if self.inputs is not None and calls[0].batch != batch:
                raise UsageError(
                    f"`inputs` are {calls[0].batch} samples, `batch` says {batch}; make them the same"
                )
            calls = [calls[-1].resized(batch)]
        elif (
            self.inputs is not None
        ):  # what is captured must do for other numbers too, where the network does
            calls += [calls[0].resized(rows) for rows in (1, 3) if rows != calls[0].batch]
        self.calls, leaves = calls, tree_leaves((calls[0].args, dict(calls[0].kwargs)))
        if len(leaves) == 1 and isinstance(leaves[0], Tensor):
            self.sample = tuple(leaves[0].shape[1:])
        fixed = self.sample[:1] if self.dynamic_size else self.sample
        shapes = {tuple(image.shape) for image in self.images}
        if len(shapes) > 1 or any(
            len(one) != len(self.sample) or one[: len(fixed)] != fixed for one in shapes
        ):
            wanted = ", ".join(str(size) for size in ("N", *self.sample))
            got = " and ".join(map(str, sorted(shapes)))
            raise UsageError(
                f"`calibrate` takes batches of images of one size, ({wanted}); got images of {got}"
            )

    def _check_options(self) -> None:
        images, size, approximation = (
            len(self.images),
            self.degree,
            (self.degree, self.runtime) != (None, None),
        )
        twice, wanted = 0 if self.batch is None else 2 * self.batch, self.tolerance
        checks = [
            (self.fold in get_args(Fold), f"there is no fold {self.fold!r}; use exact or poly"),
            (
                self.precision in get_args(Precision),
                f"there is no precision {self.precision!r}; use {_PRECISIONS}",
            ),
            (
                self.runtime in (None, *RUNTIMES),
                f"nothing is known of a runtime {self.runtime!r}; use {_RUNTIMES}",
            ),
            (
                self.fold == "poly" or not approximation,
                "`degree` and `runtime` approximate; add `fold='poly'`",
            ),
            (
                size is None or 2 <= size <= MAX_SIZE,
                f"`degree={size}` is not supported; use 2 to {MAX_SIZE} or none",
            ),
            (
                wanted is None or wanted > 0,
                f"`tolerance` must be more than 0, not {wanted}; {TOLERANCE:g} is usual",
            ),
            (
                self.batch is None or twice > 0,
                f"`batch={self.batch}` is no number of samples; give 1 or more",
            ),
            (
                images or not self.freeze_lambda,
                "`freeze_lambda` takes means over images; give `calibrate` images too",
            ),
            (
                images > 1 or self.precision != "int8",
                "INT8 is fitted and judged on `calibrate` images; give 2 or more",
            ),
            (
                images != 1 or not self.approximates,
                "one image is too few to fit and check on; give `calibrate` more",
            ),
            (
                not 0 < images < twice,
                f"`batch={self.batch}` takes {twice} `calibrate` images or more; got {images}",
            ),
        ]
        if problem := next((problem for is_right, problem in checks if not is_right), None):
            raise UsageError(problem)

    @property
    def approximates(self) -> bool:
        """Whether the folded network is another function."""
        return self.fold == "poly" or self.freeze_lambda

    @property
    def allowed(self) -> float:
        """Largest difference of the folded network; that of a file in less than 32 bits is another
        matter.
        """
        usual, narrow = (
            APPROXIMATE_TOLERANCE if self.approximates else TOLERANCE,
            self.precision != "float32",
        )
        if self.tolerance is None or (narrow and not self.approximates):
            return usual
        return (
            max(self.tolerance, usual) if narrow else self.tolerance
        )  # no further off than the file may be

    @property
    def fitted(self) -> list[Call]:
        """Calls with the images that are fitted on: every second one."""
        return self._batches(self.images[::2])

    @property
    def unseen(self) -> list[Call]:
        """Calls with the images that are not fitted on; the example calls where there are none."""
        return self._batches(self.images[1::2]) if len(self.images) > 1 else self.calls

    @property
    def judged(self) -> list[Call]:
        """What the folded network is judged on."""
        return self.unseen if self.approximates else self.calls + self._batches(self.images)

    @property
    def judged_on(self) -> str:
        """What the file is judged on, in words."""
        calls = "random inputs" if self.inputs is None else "given inputs"
        if self.precision == "float32" and not self.approximates:
            return f"{calls} and images" if self.images else calls
        return "images" if len(self.images) > 1 else calls

    def _batches(self, images: Sequence[Tensor]) -> list[Call]:
        """Return calls with all of some images: one alone, three, and the others in larger batches."""
        sizes = (
            [1, 3, *[32] * (len(images) // 32 + 1)]
            if self.batch is None
            else [self.batch] * len(images)
        )
        stacks = [
            torch.stack(list(images[a:b]))
            for a, b in pairwise([0, *accumulate(sizes)])
            if a < len(images)
        ]
        calls = [Call((stack,)) for stack in stacks if self.batch in (None, len(stack))]
        return [call.to(device_of(self.network), torch.float32) for call in calls]


@dataclass(frozen=True)
class FoldedLayer:
    """What became of one layer; errors are shares of the standard deviation of its output.

    Its form is "folded" (nothing is left), "affine", "one branch", "two branches", "polynomial",
    "lines", "normalization" (of its source's kind), "group", "group convolution" (of size 1, a
    whitening), "estimated" or "frozen"; "kept" where its forward is somebody's own.
    """

    # in the given network
    name: str
    form: str
    # of the polynomial, or the number of lines
    degree: int | None = None
    # of the approximation, on the values fitted
    max_error: float | None = None
    rms_error: float | None = None

    @property
    def kind(self) -> str:
        """Its form, with the degree of a polynomial or the number of lines."""
        degree = "" if self.degree is None else f" of degree {self.degree}"
        return f"{self.degree} lines" if self.form == "lines" else f"{self.form}{degree}"


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it was checked."""

    # the network's name, if known
    model: str | None
    # what it was converted to last; None if it was not
    target: str | None
    # of its converted layers; None where there are none, or they differ
    strength: float | None
    # where they are from, if known
    weights: Mapping[str, Any] | None
    # "exact" or "poly"
    fold: str
    precision: Precision
    opset: int
    # the file
    output: str
    # its size, external data included
    bytes: int
    # ONNX Runtime against the given network in PyTorch, in its own precision
    parity: Comparison
    judged_on: (
        # samples of `parity`: "random inputs", "given inputs", "images" or "... and images"
        str
    )
    # number of nodes of each operator
    nodes: dict[str, int]
    preprocess: (
        Mapping[str, Any] | None
    )  # how to make the network's input of an image, as the file's metadata say
    labels: (
        int | None
    )  # how many names of outputs the file's metadata hold; None if they are unknown
    # what became of each normalization layer
    layers: tuple[FoldedLayer, ...]

    @property
    def judged(self) -> str:
        """How many samples of what the file was compared on."""
        return f"{sum(self.parity.batches)} {self.judged_on}"

    @property
    def guessed(self) -> bool:
        """Whether something is approximated, and no image was there to judge it on."""
        return self.judged_on == "random inputs" and any(
            layer.max_error is not None for layer in self.layers
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        layers = [asdict(layer) for layer in self.layers]
        return {"schema": SCHEMA, **vars(self), "parity": self.parity.to_dict(), "layers": layers}


def check_report(path: str | Path, output: str | Path, force: bool = False) -> None:
    """Raise, before any long work, if a report of the file `output` may not be written at `path`."""
    if Path(path).suffix != ".json":
        raise UsageError(
            f"a report is a .json file, not {path}; give `report` a name that ends in .json"
        )
    if ensure_writable(path, force) == ensure_writable(output, force):
        raise UsageError(f"{path} is the exported file itself; give `report` another name")
