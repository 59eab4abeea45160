"""`retrofit.convert`: plan, look at one run of the network, convert, and compare with the source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.compare import Reference
from retrofit.conversion_options import takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.layers.strength import StrengthMixin, check_strength, strength_layers
from retrofit.record import set_record
from retrofit.surgery.bypassed import refuse_bypassed
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.execute import execute, unchanged_on_failure
from retrofit.surgery.families import KNOWN, NormLayer, find_norms, functional_norms
from retrofit.surgery.plan_and_report import LayerRow, Plan, Report
from retrofit.surgery.planning import Patterns, PlanRequest, network_in, plan_and_sites
from retrofit.surgery.same_formula import agrees, proved_formula
from retrofit.utils.running import images_of
from retrofit.utils.text import plural, shortlist

_HALF = {torch.float16, torch.bfloat16}
_Shapes = Mapping[str, Sequence[torch.Size]]


class CheckError(RetrofitError):
    """The converted network is not the function of its source; `report` is that of the conversion,
    taken back.
    """

    def __init__(self, problem: str, report: Report) -> None:
        super().__init__(
            f"{problem}; the model is left as it was: keep the layers concerned with `skip`, or pass `check=False` "
            "where it is known to amplify rounding errors"
        )
        self.problem = problem
        self.report = report


@takes_options
def convert(
    model: nn.Module,
    to: str,
    *,
    only: Patterns = None,
    skip: Patterns = None,
    source: Patterns = None,
    check: bool = True,
    input_size: Sequence[int] | None = None,
    inputs: Inputs | None = None,
    strength: float | None = None,
    **options: Any,
) -> tuple[nn.Module, Report]:
    """Convert the network, and check that in evaluation it computes the same (except for evonorm-s0
    and frn-tlu).

    The network is run before the conversion, to find layers that normalize a single value or are
    never called, and after it, to compare outputs and layers. Modes, buffers and random state are
    left unchanged. If the network cannot be run, a note in the report that begins with `not
    checked:` says why.

    Args:
        model: Any network; converted in place.
        to: The name of a target.
        only: Regular expressions; convert only layers whose name matches (see `plan`).
        skip: Regular expressions; keep layers whose name matches (see `plan`).
        source: Families of layers to convert (see `plan`).
        check: Whether to compare the converted network with the original.
        input_size: Shape of the random samples that the network is run on, (C, H, W); by default,
            the size that the network was built for, or (3, 224, 224).
        inputs: Inputs instead of random samples: a tensor, a tuple of arguments, or a mapping of
            keyword arguments.
        strength: Strength of the layers converted now, from 0 (the source) to 1 (the target); None
            for 0.
        **options: Options of the target. With `calibrate`, the report counts unchanged predictions
          on those images.

    Returns:
        The network to use, and the report.

    Raises:
        UsageError: As for `plan`, or for a strength out of range.
        RetrofitError: As for `plan`, or if the check fails, the network evaluates with the tensors
            of a layer that it does not call, or does not accept the given `inputs` or `input_size`.
            The model is then unchanged.
    """
    converter = converter_for(to)
    _check_strength(strength, to, converter)
    network = network_in(model)
    images = _calibration_images(options)
    request = PlanRequest(to, only, skip, source, {**options, "calibrate": images})
    norms = list(find_norms(network))
    earlier = strength_layers(network)
    plan, sites = plan_and_sites(network, norms, request)
    notes = [*functional_norms(network, norms), *_said_of_earlier(earlier)]
    with unchanged_on_failure(network, norms):
        names = [norm.name for norm in norms]
        run = reference_of(network, inputs, input_size, layers=names, whole=check)
        shapes = None if run.reference is None else run.reference.shapes
        if shapes is not None:
            fitted = _fitted(norms, plan, shapes)
            if fitted != norms:
                norms = fitted
                plan, sites = plan_and_sites(network, norms, request)
        if converter.changes_sets:
            _refuse_constants(plan.converted, norms, shapes)
        predictions = None
        if images is not None:
            predictions = Reference(network, [Call((batch,)) for batch in images])

        converted, report = execute(plan, network, norms, sites)
        uncalled = _uncalled(plan, shapes)
        if uncalled and run.reference is not None:
            refuse_bypassed(converted, run.reference.calls[0], uncalled)
            notes.append(_said_of_uncalled(uncalled))
        report = replace(report, notes=(*report.notes, *notes))
        if check:
            report = _checked(report, converted, run, converter.identity)
        new = [layer for layer in strength_layers(converted) if layer not in earlier]
        if predictions is not None:
            _set_all(new, 1.0)
            report = replace(report, agreement=_agreement(predictions, converted))
        _set_all(new, strength or 0.0)
        if strength is not None and report.strength is not None:
            report = replace(report, strength=strength)
        if strength and check and run.reference is not None:
            change = run.reference.compare(converted, layers=False)
            report = replace(report, change=change)
    if input_size is not None:
        set_record(converted, input_size=tuple(input_size))
    return (model if converted is network else converted), report


def _check_strength(strength: float | None, to: str, converter: Converter) -> None:
    if strength is None:
        return
    if not converter.has_strength:
        raise UsageError(f"`strength` means nothing to {to}, whose layers have none; leave it out")
    check_strength(strength)


def _calibration_images(options: Mapping[str, Any]) -> list[Tensor] | None:
    calibrate = options.get("calibrate")
    return None if calibrate is None else list(images_of(calibrate))


@dataclass(frozen=True)
class SourceRun:
    """What a network answered before it was changed, or why it could not be run."""

    reference: Reference | None
    problem: str = ""


def reference_of(
    model: nn.Module,
    inputs: Inputs | None,
    input_size: Sequence[int] | None,
    *,
    layers: Sequence[str] = (),
    whole: bool = True,
) -> SourceRun:
    """Run a network, for the shapes that its layers get and to compare it later.

    Args:
        model: The network, which is left as it was.
        inputs: Example inputs; None for random samples.
        input_size: Shape of one sample; None for the network's own.
        layers: Names of layers whose outputs are kept too.
        whole: Whether to run every example call; one is enough for the shapes.

    Raises:
        RetrofitError: If the network refuses inputs or a size that the caller gave.
    """
    try:
        calls = example_calls(model, inputs, input_size)
        if not whole:
            calls = calls[:1]
        return SourceRun(Reference(model, calls, layers=layers))
    except RetrofitError as error:
        chosen = inputs is not None or input_size is not None
        if chosen and _runs_in_full_precision(model):
            raise
        return SourceRun(None, str(error))


def _runs_in_full_precision(model: nn.Module) -> bool:
    """Whether a network holds values and none of them in half precision, which may run on other
    devices alone.
    """
    tensors = (*model.parameters(), *model.buffers())
    dtypes = {tensor.dtype for tensor in tensors if not tensor.is_meta}
    return bool(dtypes) and dtypes.isdisjoint(_HALF)


def _fitted(norms: Sequence[NormLayer], plan: Plan, shapes: _Shapes) -> list[NormLayer]:
    """Prove the layers of foreign classes that are to be converted on the shapes that the network
    gives them.

    A class that takes inputs of any number of dimensions may be another known class there.
    """
    converted = {row.name for row in plan.converted}
    return [
        _fitted_layer(norm, list(dict.fromkeys(shapes[norm.name])))
        if norm.name in converted and norm.formula is not None
        else norm
        for norm in norms
    ]


def _fitted_layer(norm: NormLayer, shapes: Sequence[torch.Size]) -> NormLayer:
    assert norm.formula is not None
    if not shapes or agrees(norm.module, norm.formula, shapes):
        return norm
    formula = proved_formula(norm.module, KNOWN, shapes)
    if isinstance(formula, str):
        raise RetrofitError(
            f"{norm.name} is {norm.known_class} on random inputs, but not on those of the shape "
            "that the network gives it; keep it with `skip`"
        )
    return replace(norm, kind=formula.kind, family=KNOWN[formula.kind], formula=formula)


def _said_of_earlier(layers: Sequence[StrengthMixin]) -> list[str]:
    values = {layer.stored_strength for layer in layers if not layer._code.is_meta}
    if not values:
        return []
    count = sum(not layer._code.is_meta for layer in layers)
    span = " to ".join(f"{value:g}" for value in sorted({min(values), max(values)}))
    keep = "keeps its" if count == 1 else "keep their"
    return [
        f"{plural(count, 'layer')} converted before {keep} strength, {span}; `strength` sets the new "
        "ones alone"
    ]


def _uncalled(plan: Plan, shapes: _Shapes | None) -> dict[str, str]:
    """Return the class of each layer that is converted and was not called, by name."""
    if shapes is None:
        return {}
    return {row.name: row.source for row in plan.converted if not shapes[row.name]}


def _said_of_uncalled(uncalled: Mapping[str, str]) -> str:
    return (
        f"not called when the network was run: {plural(len(uncalled), 'converted layer')} "
        f"({shortlist(sorted(uncalled))}); only training calls such layers, or code that reads their "
        "tensors, for which nothing changes"
    )


def _set_all(layers: Sequence[StrengthMixin], strength: float) -> None:
    for layer in layers:
        layer.set_strength(strength)


def _agreement(predictions: Reference, converted: nn.Module) -> dict[str, int] | None:
    """Count the images whose predicted class is the source's; None for a network that gives no
    scores.
    """
    share = predictions.compare(converted).top1_agreement
    if share is None:
        return None
    images = sum(predictions.batches)
    return {"images": images, "same": round(share * images)}


def _checked(report: Report, model: nn.Module, run: SourceRun, identity: bool) -> Report:
    """Compare the converted network with its source; add the result, or why there is none."""
    reason = run.problem
    if any(tensor.dtype in _HALF for tensor in (*model.parameters(), *model.buffers())):
        reason = (
            "in half precision rounding hides what the check looks for; convert in float32 to be "
            "sure"
        )
    elif run.reference is not None:
        result = run.reference.compare(model, layers=identity)
        report = replace(
            report, check=result, identity=identity, classifies=run.reference.classifies
        )
        problem = result.problem() if identity else ""
        if problem:
            raise CheckError(problem, report)
        if not math.isfinite(result.max_abs_diff):
            raise CheckError(
                "the converted network's outputs are not finite, or of another shape", report
            )
        reason = result.not_checked
    if not reason:
        return report
    return replace(report, check=None, notes=(*report.notes, f"not checked: {reason}"))


def _refuse_constants(
    rows: Sequence[LayerRow], norms: Sequence[NormLayer], shapes: _Shapes | None
) -> None:
    """Refuse to normalize sets of a single value each, of which a normalization makes a constant.

    Shapes are what a run of the network gave the layers; None if it was not run.
    """
    layers = {norm.name: norm for norm in norms}
    constant = [
        row.name
        for row in rows
        if _makes_constants(row, layers[row.name], (shapes or {}).get(row.name, ()))
    ]
    if not constant:
        return
    unless = ""
    if shapes is None:
        unless = ", or show by example `inputs` that its maps have more positions"
    raise RetrofitError(
        f"every group of {shortlist(constant)} would hold a single value, of which a normalization "
        "makes a constant; the model is left as it was: take fewer groups with `groups`, keep them "
        f"with `skip`{unless}"
    )


def _makes_constants(row: LayerRow, norm: NormLayer, shapes: Sequence[torch.Size]) -> bool:
    """Whether a layer would normalize a single value at a time, on inputs of any of the shapes.

    A BatchNorm1d that was not called counts as if its input had one position a channel.
    """
    mean = getattr(norm.layer, "running_mean", None)
    if mean is None:
        # a GroupNorm, which stays
        return False
    channels = len(mean)
    groups = row.options.get("num_groups", row.options.get("groups", channels))
    positions = [math.prod(shape[2:]) for shape in shapes]
    if not positions and norm.known_class == "BatchNorm1d":
        positions = [1]
    return any(channels * count == groups for count in positions)
