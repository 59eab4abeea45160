"""Are two networks the same function? Both are run on the same inputs, and every tensor in their
outputs is compared.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retrofit.comparison import TOLERANCE, Comparison
from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.utils.forward_pass import hooked, standard_normal, undisturbed
from retrofit.utils.output_tensors import largest_gap, scale_of, spread_of, tensors_in
from retrofit.utils.text import with_class

# Elements kept of each layer's output: all of it would be gigabytes for a large network.
_SAMPLES = 4096
NO_NUMBERS = (
    "the network answers with NaN or infinity alone; mend its weights, or give it other `inputs`"
)
# Of two comparisons, which differs more. Each output has the tolerance of its own type.
_BY_SHARE = attrgetter("differs", "share", "scale")
# Share of the layers' largest value by which float32 may miss a zero.
_ROUNDING = 8 * torch.finfo(torch.float32).eps
# As torchvision names them
_PARTS_OF_DETECTORS = (
    *("backbone", "head", "rpn.head"),
    *("roi_heads.box_head", "roi_heads.box_predictor"),
    *("roi_heads.mask_head", "roi_heads.mask_predictor"),
    *("roi_heads.keypoint_head", "roi_heads.keypoint_predictor"),
)

_Outputs = list[list[Tensor]]
_Layers = dict[str, list[tuple[torch.Size, Tensor]]]


class Answer(NamedTuple):
    """What a network answers to one call.

    Attributes:
        call: The call.
        outputs: The tensors of the output.
        layers: By layer, the shape and some elements of each of its outputs.
        parts: If the output is detections, the answers of the network's parts.
    """

    call: Call
    outputs: list[Tensor]
    layers: _Layers
    parts: "list[Answer]"


def answers_of(
    model: Any, calls: Iterable[Call], layers: Iterable[str] = ()
) -> list[Answer | Exception]:
    """Make some calls of a network, which is left as it was, or of a function; watch the named
    layers. Where a call is refused, return what was raised.
    """
    kept: _Layers = {}
    parts: list[Call] = []

    def keep(
        layer: nn.Module, name: str, called: nn.Module, _args: tuple[Any, ...], output: Any
    ) -> None:
        # A converted layer holds its source's table of hooks: a hook on either is called for both.
        if called is layer and isinstance(output, Tensor):
            kept[name].append((output.shape, _kept(_some_elements(output))))

    def answer_to(call: Call) -> Answer:
        nonlocal kept
        kept = {name: [] for name in watched}
        parts.clear()
        output = call.on(model)
        answer = Answer(call, [_kept(tensor) for tensor in tensors_in(output)], kept, [])
        if not call.stage and _holds_boxes(output):
            answer.parts.extend(map(answer_to, list(parts)))
        return answer

    left_alone: AbstractContextManager[Any] = torch.no_grad()
    watched = {}
    hooks: Iterable[RemovableHandle] = ()
    if isinstance(model, nn.Module):
        left_alone = undisturbed(model)
        watched = {name: model.get_submodule(name) for name in layers}
        hooks = chain(
            _hooks_on_parts(model, parts),
            (
                layer.register_forward_hook(partial(keep, layer, name))
                for name, layer in watched.items()
            ),
        )
    answers: list[Answer | Exception] = []
    with left_alone, hooked(hooks):
        for call in calls:
            # Anything may come out of a network's own code.
            try:
                answers.append(answer_to(call))
            except Exception as error:
                answers.append(error)
    return answers


def _hooks_on_parts(model: nn.Module, parts: list[Call]) -> Iterator[RemovableHandle]:
    """Register hooks that add to `parts` the calls of a detector's backbone and heads, each with
    what it gets when the whole is called.

    Boxes come out of sorting and suppression, where a rounding error may swap two candidates, so
    two detectors are compared by these parts. A detector that does not name them as torchvision
    does has none.
    """

    def record(
        stage: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        part = Call(args, kwargs, stage)
        parts.append(part.mapped(_filled))

    for name, module in model.named_modules():
        if name in _PARTS_OF_DETECTORS:
            yield module.register_forward_pre_hook(partial(record, name), with_kwargs=True)


def _filled(value: Tensor) -> Tensor:
    """Copy a tensor; one without rows (a mask head's, when no box was found) becomes two seeded
    random rows.
    """
    if value.numel():
        return value.detach().clone()
    generator = torch.Generator().manual_seed(0)
    rows = standard_normal((2, *value.shape[1:]), generator)
    return rows.to(value)


def _some_elements(output: Tensor) -> Tensor:
    """Return the elements of a layer's output that are compared, in one dimension; none of what
    lives within torch.vmap alone.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(output):
        return torch.empty(0)
    flat = output.flatten()
    if len(flat) <= _SAMPLES:
        return flat
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(
        len(flat),
        (_SAMPLES,),
        generator=generator,
        device="cpu",
    )
    return flat[positions.to(flat.device)]


class Reference:
    """The outputs of a network, to compare others with.

    The network is evaluated; its modes, its buffers and the random state are left as they were.
    Calls that it refuses are left out. If its outputs are boxes, its backbone and heads are
    compared instead, each on the inputs that it gets here.

    The outputs of `layers` are compared too, by some of their elements: a freshly initialised
    network often multiplies a whole branch by zero, and its own output then says nothing about that
    branch.

    Args:
        model: The network.
        calls: What it is run on.
        tolerance: The largest share of an output's scale that passes; more for an output of a
            precision that rounds more.
        layers: Names of layers.

    Attributes:
        calls: Those that the network took.
        parts: Those that are compared: the same, or those of a detector's parts.
        batches: Sizes of the batches of the calls.
        not_checked: Why there is nothing to compare with; empty if there is.
        holds_nan: Whether an output holds NaN.
        tolerance: The largest share that passes in float32.

    Raises:
        RetrofitError: If the network takes none of the calls.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[Call],
        *,
        tolerance: float = TOLERANCE,
        layers: Iterable[str] = (),
    ) -> None:
        taken = _taken(answers_of(model, calls, layers))
        judged = [part for answer in taken for part in answer.parts or [answer]]
        self.calls = [answer.call for answer in taken]
        self.parts = [answer.call for answer in judged]
        self._outputs = [answer.outputs for answer in judged]
        self._layers = _by_layer(judged)
        self.batches = tuple(call.batch for call in self.calls)
        tensors = [tensor for answer in judged for tensor in answer.outputs]
        self.not_checked = _nothing_to_compare(tensors)
        self.holds_nan = any(tensor.isnan().any() for tensor in tensors if not tensor.is_meta)
        self.tolerance = tolerance

    @property
    def shapes(self) -> dict[str, list[torch.Size]]:
        """By name of each of the `layers`, the shape of its output at each of its calls."""
        return {name: [shape for shape, _ in kept] for name, kept in self._layers.items()}

    @property
    def classifies(self) -> bool:
        """Whether the network answers with scores of classes, (N, classes), and nothing else."""
        return all(
            _is_scores(part, answer) for part, answer in zip(self.parts, self._outputs, strict=True)
        )

    def compare(self, other: Any, *, layers: bool = True) -> Comparison:
        """Compare another network, or any function of the same arguments, with this one; a module
        is left as it was.

        Args:
            other: The network or function.
            layers: Whether the layers count beside the outputs.

        Returns:
            The comparison of the output that differs most. If the outputs agree, that of the first
            layer that differs. If none does, and every output is zero up to rounding (a mean of
            normalized values, say), that of the layer that differs most.

        Raises:
            RetrofitError: If `other` does not take what this network took.
        """
        if self.not_checked:
            return Comparison(
                tolerance=self.tolerance, batches=self.batches, not_checked=self.not_checked
            )
        watched = {}
        if layers:
            watched = self._layers
        answers = self._answers_of(other, watched)
        outputs = [answer.outputs for answer in answers]
        # Without layers there is nothing else to judge by than the outputs, however small.
        largest = max(
            (scale_of(value) for values in watched.values() for _, value in values), default=0.0
        )
        result = self._compare_outputs(outputs, zero=_ROUNDING * largest)
        if not result.differs:
            result = self._worse_layer(result, _by_layer(answers))
        if not result.differs and not result.scale:
            result = replace(
                result, not_checked="every output is zero, which proves nothing; check the weights"
            )
        agreement = self._top1_agreement(outputs)
        alike = not watched and self._answers_alike
        return replace(result, batches=self.batches, top1_agreement=agreement, alike=alike)

    @cached_property
    def _answers_alike(self) -> bool:
        """Tell whether different samples get the same outputs within the tolerance."""
        inputs = [part.tensors for part in self.parts]
        return _vary(self.parts, inputs) and not _vary(self.parts, self._outputs, self.tolerance)

    def _answers_of(self, other: Any, watched: Iterable[str]) -> list[Answer]:
        """Make the same calls of another network."""
        answers = []
        for answer in answers_of(other, self.parts, watched):
            if isinstance(answer, RetrofitError):
                raise answer
            if isinstance(answer, Exception):
                raise RetrofitError(
                    f"the network does not take what it took before ({with_class(answer)})"
                ) from answer
            answers.append(answer)
        return answers

    def _worse_layer(self, result: Comparison, layers: _Layers) -> Comparison:
        """Return the comparison of the first of the `layers` that differs. If none does, return
        `result`, that of the outputs, or that of the layer that differs most if the outputs are
        zero.
        """
        rows = [self._compare_layer(name, kept) for name, kept in layers.items()]
        differing = next((row for row in rows if row.differs), None)
        if differing is not None:
            return differing
        if result.scale == 0:
            return max(rows, key=_BY_SHARE, default=result)
        return result

    def _top1_agreement(self, outputs: _Outputs) -> float | None:
        """Return the share of the samples with the same highest score; None if none has scores."""
        same: list[Tensor] = []
        for part, ours, theirs in zip(self.parts, self._outputs, outputs, strict=True):
            shapes = [tensor.shape for tensor in theirs]
            if _is_scores(part, ours) and shapes == [ours[0].shape]:
                same.append(ours[0].argmax(1) == theirs[0].argmax(1))
        if same:
            return float(torch.cat(same).double().mean())
        return None

    def _compare_outputs(self, outputs: _Outputs, zero: float) -> Comparison:
        pairs: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        for part, ours, theirs in zip(self.parts, self._outputs, outputs, strict=True):
            if len(ours) != len(theirs):
                return Comparison(math.inf, 0.0, self.tolerance)
            for number, pair in enumerate(zip(ours, theirs, strict=True)):
                pairs.setdefault((part.stage, number), []).append(pair)
        return max((self._result(group, zero=zero) for group in pairs.values()), key=_BY_SHARE)

    def _compare_layer(self, name: str, kept: list[tuple[torch.Size, Tensor]]) -> Comparison:
        """Compare one layer's outputs. The other network may call it more often, but not less."""
        ours = self._layers[name]
        if len(kept) < len(ours):
            return Comparison(math.inf, 0.0, self.tolerance, where=name)
        results = (self._result([(a, b)], name) for (_, a), (_, b) in zip(ours, kept, strict=False))
        return max(results, key=_BY_SHARE, default=Comparison(tolerance=self.tolerance, where=name))

    def _result(
        self, pairs: list[tuple[Tensor, Tensor]], where: str = "", zero: float = 0.0
    ) -> Comparison:
        """Compare some tensors by one scale; values up to `zero` count as none."""
        gap = max(largest_gap(a, b) for a, b in pairs)
        scale = max(scale_of(a) for a, _ in pairs)
        if max(gap, scale) <= zero:
            gap = scale = 0.0
        compared = sum(int(a.isfinite().sum()) for a, _ in pairs)
        roundings = [_rounding_of(a) for a, _ in pairs]
        tolerance = max(self.tolerance, *roundings)
        return Comparison(gap, scale, tolerance, where=where, compared=compared)


def _taken(answers: Sequence[Answer | Exception]) -> list[Answer]:
    """Return the answers to calls that the network took; raise if it took none."""
    taken = [answer for answer in answers if isinstance(answer, Answer)]
    if not taken:
        refusals = [answer for answer in answers if isinstance(answer, Exception)]
        raise RetrofitError(
            f"the network did not take the example inputs ({with_class(refusals[0])}); give it "
            "others with `inputs`"
        ) from refusals[0]
    return taken


def _by_layer(answers: Sequence[Answer]) -> _Layers:
    """Return what the watched layers gave in all calls."""
    watched = answers[0].layers
    return {name: [seen for answer in answers for seen in answer.layers[name]] for name in watched}


def _kept(value: Tensor) -> Tensor:
    """Copy a tensor to the CPU, since it may be overwritten; on the meta device there is nothing to
    copy.
    """
    if value.is_meta:
        return value.detach()
    return value.detach().cpu().clone()


def _rounding_of(output: Tensor) -> float:
    """Return the share of a value that rounding of its type explains."""
    if output.is_floating_point():
        return 4 * torch.finfo(output.dtype).eps
    return 0.0


def _vary(parts: Sequence[Call], tensors: Sequence[list[Tensor]], share: float = 0.0) -> bool:
    """Tell whether samples differ in one of the tensors of each call, by more than a share of its
    scale.
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for part, values in zip(parts, tensors, strict=True):
        for number, value in enumerate(values):
            has_samples = value.ndim and len(value) == part.batch
            samples = value if has_samples else value[None]
            groups[part.stage, number, samples.shape[1:]].append(samples)
    varying = map(torch.cat, groups.values())
    return any(spread_of(samples) > share * scale_of(samples) for samples in varying)


def _is_scores(part: Call, answer: list[Tensor]) -> bool:
    return (
        not part.stage
        and len(answer) == 1
        and answer[0].ndim == 2
        and answer[0].is_floating_point()
    )


def _nothing_to_compare(outputs: list[Tensor]) -> str:
    if any(output.is_meta for output in outputs):
        return "the network lies on the meta device; move it with `to_empty` and load its weights"
    if not any(output.numel() for output in outputs):
        return (
            "the network's answer holds no tensor; give it inputs that it answers with "
            "tensors, as `inputs`"
        )
    if not any(output.isfinite().any() for output in outputs):
        return NO_NUMBERS
    return ""


def is_detector(model: nn.Module, call: Call) -> bool:
    """Tell whether a network answers a call with detections, and names parts that it can be
    compared by. One that names none is not run. The network is left as it was.
    """
    names = {name for name, _ in model.named_modules()}
    if names.isdisjoint(_PARTS_OF_DETECTORS):
        return False
    try:
        with undisturbed(model):
            return _holds_boxes(call.on(model))
    # Anything may come out of a network's own code.
    except Exception:
        return False


def _holds_boxes(answer: Any) -> bool:
    """Tell whether a network answers with detections: a mapping with `boxes`, or a list of such."""
    detections = [answer]
    if isinstance(answer, list | tuple):
        detections = list(answer)
    return bool(detections) and all(
        isinstance(row, Mapping) and isinstance(row.get("boxes"), Tensor) for row in detections
    )
