"""The identity check: is a converted network still the function that its source was?

The source answers seeded random inputs before the conversion (which works in place), the converted network answers the
same inputs afterwards, and the largest difference is set against the scale of what the source gave. The outputs of the
normalization layers are compared too, by sample: a freshly initialised network often multiplies a whole branch by zero
(the last gamma of a residual block, a classifier's weight), and its output alone would prove nothing about that branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from retrofit.errors import RetrofitError
from retrofit.record import record_of
from retrofit.surgery.families import find_norms
from retrofit.surgery.restore import kept_values, put_back
from retrofit.utils.evaluating import evaluating
from retrofit.utils.hooks import hooked
from retrofit.utils.placement import device_of, placement_of
from retrofit.utils.text import plural, shortlist, with_class

TOLERANCE = 1e-4
BATCHES = (1, 2)
_SAMPLES = 4096  # elements kept of each layer's output: all of it would be gigabytes for a large network
_ROUNDING = 8 * torch.finfo(torch.float32).eps  # of the layers' largest value: what float32 leaves of zero
_FRAMES = 16  # of a video clip; torchvision's S3D and MViT take no fewer


@dataclass(frozen=True)
class CheckResult:
    """The largest difference found, and whether it is small enough.

    Attributes:
        max_abs_diff: Largest absolute difference; inf where shapes differ or only one side is NaN.
        scale: Largest absolute finite value that the source gave there.
        tolerance: Largest share of `scale` that still passes.
        where: The layer that the figures belong to; empty for the network's output.
        lost: Layers whose sources the converted network calls on, by references of its own.
    """

    max_abs_diff: float
    scale: float
    tolerance: float
    where: str = ""
    lost: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance, and all layers took their sources' places."""
        return not self.lost and self.max_abs_diff <= self.tolerance * self.scale

    @property
    def share(self) -> float:
        """The difference as a share of the scale (0 for 0 of 0)."""
        return 0.0 if self.max_abs_diff == 0 else self.max_abs_diff / self.scale if self.scale else math.inf

    def problem(self, identity: bool) -> str:
        """Say in a sentence what is wrong; nothing if all is well. Without `identity`, outputs need only be finite."""
        if self.lost:
            return (
                f"the network calls the sources of {plural(len(self.lost), 'layer')} ({shortlist(self.lost)}), which "
                "it holds in a list or elsewhere besides their names"
            )
        if not identity:
            finite = math.isfinite(self.max_abs_diff)
            return "" if finite else "the converted network's outputs are not finite, or of another shape"
        at = f" (in {self.where})" if self.where else ""
        return "" if self.passed else f"the converted network is not the function of its source{at}: {self}"

    def __str__(self) -> str:
        """The figures."""
        return f"largest difference {self.max_abs_diff:.3g} at a scale of {self.scale:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON keys `max_abs_diff`, `scale`, `tolerance` and `passed`."""
        figures = {"max_abs_diff": self.max_abs_diff, "scale": self.scale, "tolerance": self.tolerance}
        return {**figures, "passed": self.passed}


@dataclass(frozen=True)
class _Call:
    """One call to make: the whole network (`stage` empty), or a part of a detector with the inputs it had once."""

    stage: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class IdentityCheck:
    """Remembers what a network answers, to compare what it answers after a conversion.

    Both runs are in eval mode; every module's training flag is put back. torchvision's video, optical-flow and
    detection models get the kind of input they take. A detector's boxes come out of sorting and suppression, where a
    rounding error may swap two candidates: its backbone and heads are compared instead, each fed what it was fed in
    the source's own run.

    Args:
        model: The network before the conversion.
        input_size: Shape of one sample without the batch, (C, H, W) for images; the network's own if None.

    Raises:
        RetrofitError: If the network does not take such an input, or gives no tensor or not one finite number.
    """

    def __init__(self, model: nn.Module, input_size: Sequence[int] | None = None) -> None:
        """Run the source."""
        size = tuple(input_size or own_input_size(model))
        self._layers = [found.name for found in find_norms(model)]
        try:
            with _undisturbed(model):
                self._calls = [call for batch in BATCHES for call in _calls(model, size, batch)]
                self._outputs, self._samples = self._run(model)
        except Exception as error:
            raise RetrofitError(
                f"the model did not take a random input of size {'x'.join(map(str, size))} "
                f"({with_class(error)}); give it another input size"
            ) from error
        if not self._outputs:
            raise RetrofitError("the model gives no tensor to compare; convert a network that returns tensors")
        if not any(output.numel() == 0 or output.isfinite().any() for output in self._outputs):
            raise RetrofitError("the model answers a random input with NaN or infinity alone; mend its weights first")
        dtype = self._outputs[0].dtype
        self.tolerance = max(TOLERANCE, 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)

    @property
    def uncalled(self) -> set[str]:
        """The normalization layers that the source does not call."""
        return {name for name, found in self._samples.items() if not found}

    def has_one_position(self, name: str, channels: int) -> bool:
        """Whether a layer of the source, called with one image, puts out a single value a channel."""
        found = self._samples[name]
        return bool(found) and found[0].numel() == channels

    @property
    def classifies(self) -> bool:
        """Whether the network gives scores of classes, (N, classes), and nothing else."""
        return len(self._outputs) == len(self._calls) and all(scores.ndim == 2 for scores in self._outputs)

    def compare(self, model: nn.Module, *, layers: bool = True) -> CheckResult:
        """Compare the converted network with the source.

        Args:
            model: The network after the conversion.
            layers: Whether the outputs of the normalization layers count too.

        Returns:
            The network's output where that differs most; if the outputs pass, the first layer that does not; if every
            output is zero but for rounding (the mean of what is normalized over it), the layer that differs most.
        """
        with _undisturbed(model):
            outputs, samples = self._run(model)
        found = self._figures(outputs, samples, layers)
        return replace(
            found, lost=tuple(name for name in self._layers if len(samples[name]) < len(self._samples[name]))
        )

    def _figures(self, outputs: list[Tensor], samples: dict[str, list[Tensor]], layers: bool) -> CheckResult:
        largest = max((scale_of(value) for values in self._samples.values() for value in values), default=0.0)
        rounding = _ROUNDING * largest if layers else 0.0  # without layers there is nothing else to judge by
        found = self._worst(zip(self._outputs, outputs, strict=True), "", rounding)
        if not layers or not found.passed:
            return found
        rows = [self._worst(zip(self._samples[name], samples[name], strict=False), name) for name in self._layers]
        failed = next((row for row in rows if not row.passed), None)
        if failed is None and found.scale == 0 and rows:
            return max(rows, key=lambda row: row.share)
        return failed or found

    def _worst(self, pairs: Any, where: str, zero: float = 0.0) -> CheckResult:
        """Return the pair that differs most for its scale; values up to `zero` count as none."""
        figures = [(largest_gap(a, b), scale_of(a)) for a, b in pairs]
        found = [CheckResult(*((0.0, 0.0) if max(two) <= zero else two), self.tolerance, where) for two in figures]
        return max(
            found, key=lambda result: (result.share, result.scale), default=CheckResult(0, 0, self.tolerance, where)
        )

    def _run(self, model: nn.Module) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Make every call; return the outputs and, by layer name, a sample of each output of that layer."""
        samples: dict[str, list[Tensor]] = {name: [] for name in self._layers}
        outputs: list[Tensor] = []
        layers = ((model.get_submodule(name), samples[name]) for name in self._layers)
        with hooked(layer.register_forward_hook(partial(_sample, layer, found)) for layer, found in layers):
            for call in self._calls:
                torch.manual_seed(0)
                answer = model.get_submodule(call.stage)(*call.args, **call.kwargs)
                outputs += [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
        return outputs, samples


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate a network, and leave its modes, its buffers and the random state as they were."""
    device = device_of(model)
    kind, places = ("cuda", []) if device.type in ("cpu", "meta") else (device.type, [device])
    buffers = kept_values(model.buffers())
    with evaluating(model), torch.random.fork_rng(places, device_type=kind):
        try:
            yield
        finally:
            put_back(buffers)


def is_detector(model: nn.Module) -> bool:
    """Whether `model` is one of torchvision's detection models, whose output is boxes."""
    return type(model).__module__.startswith("torchvision.models.detection")


def own_input_size(model: nn.Module) -> tuple[int, ...]:
    """Return the (C, H, W) that a model says it was made for; 3 x 224 x 224 where it does not say."""
    known = record_of(model).preprocess
    if known is not None:
        return tuple(known.input_size)
    config = getattr(model, "pretrained_cfg", None) or {}
    if config.get("input_size"):
        return tuple(config["input_size"])
    side = getattr(model, "image_size", 224)  # torchvision's vision transformers
    return (3, side, side)


def _calls(model: nn.Module, size: tuple[int, ...], batch: int) -> list[_Call]:
    """Return the calls to make with a batch of random samples; (C, H, W) `size` for a torchvision model."""
    place = placement_of(model)
    generator = torch.Generator().manual_seed(batch)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(*place)

    if is_detector(model):
        return _detector_calls(model, [random(*size) for _ in range(batch)], random)
    return [_Call("", tuple(random(*shape) for shape in input_shapes(model, size, batch)), {})]


def input_shapes(model: nn.Module, size: tuple[int, ...], batch: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a network takes with a batch of samples of `size`, (C, H, W).

    torchvision's networks for optical flow take two images, those for video clips.
    """
    family = type(model).__module__
    if family.startswith("torchvision.models.optical_flow"):
        channels, *sides = size
        return [(batch, channels, *(max(128, side - side % 8) for side in sides))] * 2
    if family.startswith("torchvision.models.video"):
        return [(batch, size[0], _FRAMES, *size[1:])]
    return [(batch, *size)]


def _detector_calls(model: nn.Module, images: list[Tensor], random: Callable[..., Tensor]) -> list[_Call]:
    """Run a torchvision detector once and return the calls that its backbone and its heads received."""
    heads = getattr(model, "roi_heads", nn.Module()).named_children()
    stages = ["backbone", "head", "rpn.head"] + [
        f"roi_heads.{name}" for name, child in heads if any(True for _ in child.parameters())
    ]
    modules = dict(model.named_modules())
    calls: list[_Call] = []

    def filled(value: Any) -> Any:
        """Copy a tensor; one without rows (a mask head's, when no box was found) becomes two random rows."""
        if not isinstance(value, Tensor):
            return value
        return value.clone() if value.numel() else random(2, *value.shape[1:])

    def record(stage: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(stage, tree_map(filled, args), tree_map(filled, kwargs)))

    present = [stage for stage in stages if stage in modules]
    with hooked(modules[one].register_forward_pre_hook(partial(record, one), with_kwargs=True) for one in present):
        model(images)
    return calls


def _sample(layer: nn.Module, samples: list[Tensor], called: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
    """Append a copy of some elements of a layer's output to `samples`, always the same ones; as a forward hook.

    A converted layer has its source's hooks, in one table with it.
    """
    if called is not layer or not isinstance(output, Tensor):
        return
    flat = output.detach().flatten()
    chosen = torch.arange(flat.numel(), device="cpu")
    if flat.numel() > _SAMPLES:
        chosen = torch.randint(flat.numel(), (_SAMPLES,), generator=torch.Generator().manual_seed(0), device="cpu")
    samples.append(flat[chosen.to(flat.device)])


def largest_gap(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference: inf where shapes differ, or NaN or infinity is on one side only."""
    if one.shape != other.shape:
        return math.inf
    a, b = one.double(), other.double()
    gap = (a - b)[(a != b) & ~(a.isnan() & b.isnan())].abs()
    return float(gap.nan_to_num(math.inf, math.inf).max()) if gap.numel() else 0.0


def scale_of(source: Tensor) -> float:
    """Return the largest absolute value that is finite; 0 if none is."""
    finite = source[source.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
