"""`retrofit.convert`: plan, run the network, convert, and compare with the source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from retrofit.compare import HALF, Comparison, Reference, SourceRun, run_source
from retrofit.conversion_options import takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Inputs
from retrofit.layers.strength import StrengthMixin, check_strength, strength_layers
from retrofit.record import network_in, set_record
from retrofit.surgery.bypassed import refuse_bypassed
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.execute import execute, unchanged_on_failure
from retrofit.surgery.families import NormLayer, find_norms, fitted, functional_norms
from retrofit.surgery.plan_and_report import Report
from retrofit.surgery.planning import Patterns, PlanRequest, plan_and_sites, refuse_constants
from retrofit.utils.running import images_of
from retrofit.utils.text import plural, shortlist


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
    images = _calibration_images(options)
    request = PlanRequest(to, only, skip, source, {**options, "calibrate": images})
    network = network_in(model)
    norms = list(find_norms(network))
    functions = functional_norms(network, norms)
    plan, sites = plan_and_sites(network, norms, functions, request)

    names = [norm.name for norm in norms]
    run = run_source(network, inputs, input_size, layers=names, images=images, whole=check)
    shapes = None
    if run.reference is not None:
        shapes = run.reference.shapes
        in_place = fitted(norms, shapes)
        if in_place != norms:
            norms = in_place
            plan, sites = plan_and_sites(network, norms, functions, request)
    if converter.changes_sets:
        refuse_constants(plan, norms, shapes)

    with unchanged_on_failure(network, norms):
        converted, report = execute(plan, converter, network, norms, sites)
        notes = (*report.notes, *functions, *_said_of_earlier(norms))
        if run.reference is not None:
            notes += _uncalled(report, converted, run.reference)
        report = replace(report, notes=notes)
        if check:
            report = _checked(report, converted, run, converter.identity)
        report = _with_agreement(report, converted, norms, run)
        report = _at_strength(report, converted, norms, run, strength)
    if input_size is not None:
        set_record(converted, input_size=tuple(input_size))
    if converted is network:
        return model, report
    return converted, report


def _check_strength(strength: float | None, to: str, converter: Converter) -> None:
    if strength is None:
        return
    if not converter.has_strength:
        raise UsageError(f"`strength` means nothing to {to}, whose layers have none; leave it out")
    check_strength(strength)


def _calibration_images(options: Mapping[str, Any]) -> list[Tensor] | None:
    calibrate = options.get("calibrate")
    if calibrate is None:
        return None
    return list(images_of(calibrate))


def _converted_before(norms: Sequence[NormLayer]) -> list[StrengthMixin]:
    layers = [norm.module for norm in norms if isinstance(norm.module, StrengthMixin)]
    return list(dict.fromkeys(layers))


def _converted_now(model: nn.Module, norms: Sequence[NormLayer]) -> list[StrengthMixin]:
    earlier = _converted_before(norms)
    return [layer for layer in strength_layers(model) if layer not in earlier]


def _said_of_earlier(norms: Sequence[NormLayer]) -> list[str]:
    layers = _converted_before(norms)
    values = [layer.stored_strength for layer in layers if not layer._code.is_meta]
    if not values:
        return []
    span = " to ".join(f"{value:g}" for value in sorted({min(values), max(values)}))
    keep = "keeps its" if len(values) == 1 else "keep their"
    return [
        f"{plural(len(values), 'layer')} converted before {keep} strength, {span}; `strength` sets "
        "the new ones alone"
    ]


def _uncalled(report: Report, model: nn.Module, reference: Reference) -> tuple[str, ...]:
    """Return a note on the converted layers that the source did not call; refuse code that
    evaluates with their tensors.
    """
    shapes = reference.shapes
    uncalled = {row.name: row.source for row in report.plan.converted if not shapes[row.name]}
    if not uncalled:
        return ()
    refuse_bypassed(model, reference.calls[0], uncalled)
    return (
        f"not called when the network was run: {plural(len(uncalled), 'converted layer')} "
        f"({shortlist(sorted(uncalled))}); only training calls such layers, or code that reads their "
        "tensors, for which nothing changes",
    )


def _checked(report: Report, model: nn.Module, run: SourceRun, identity: bool) -> Report:
    """Compare the converted network at strength 0 with its source; add the result, or why there is
    none.
    """
    reason = run.problem
    if any(tensor.dtype in HALF for tensor in (*model.parameters(), *model.buffers())):
        reason = (
            "in half precision rounding hides what the check looks for; convert in float32 to be "
            "sure"
        )
    elif run.reference is not None:
        result = run.reference.compare(model, layers=identity)
        report = replace(
            report, check=result, identity=identity, classifies=run.reference.classifies
        )
        problem = _problem_of(result, identity)
        if problem:
            raise CheckError(problem, report)
        reason = result.not_checked
    if not reason:
        return report
    return replace(report, check=None, notes=(*report.notes, f"not checked: {reason}"))


def _problem_of(result: Comparison, identity: bool) -> str:
    problem = ""
    if identity:
        problem = result.problem()
    if not problem and not math.isfinite(result.max_abs_diff):
        return "the converted network's outputs are not finite, or of another shape"
    return problem


def _with_agreement(
    report: Report, model: nn.Module, norms: Sequence[NormLayer], run: SourceRun
) -> Report:
    """Add on how many of the images the prediction stays the same at strength 1."""
    if run.predictions is None:
        return report
    _set_all(_converted_now(model, norms), 1.0)
    share = run.predictions.compare(model).top1_agreement
    if share is None:
        return report
    images = sum(run.predictions.batches)
    return replace(report, agreement={"images": images, "same": round(share * images)})


def _at_strength(
    report: Report,
    model: nn.Module,
    norms: Sequence[NormLayer],
    run: SourceRun,
    strength: float | None,
) -> Report:
    """Set the strength of the new layers; add what changes with it on the example inputs."""
    _set_all(_converted_now(model, norms), strength or 0.0)
    if strength is None or report.strength is None:
        return report
    report = replace(report, strength=strength)
    if not strength or report.check is None or run.reference is None:
        return report
    return replace(report, change=run.reference.compare(model, layers=False))


def _set_all(layers: Sequence[StrengthMixin], strength: float) -> None:
    for layer in layers:
        layer.set_strength(strength)
