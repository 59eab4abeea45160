"""`retrofit.convert`: plan, run the network, convert, and compare with the source."""

import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from retrofit.comparison import Comparison
from retrofit.conversion_options import takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Inputs, call_with
from retrofit.layers.strength import (
    StrengthMixin,
    check_strength,
    set_strength_of,
    strength_layers,
)
from retrofit.record import set_record
from retrofit.surgery.bypass_guards import note_on_uncalled
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.execute import execute, unchanged_on_failure
from retrofit.surgery.norm_layers import NormLayer, proved_on_shapes, source_of
from retrofit.surgery.plan_and_report import Report
from retrofit.surgery.planning import (
    Patterns,
    PlanRequest,
    plan_and_sites,
    refuse_constants,
)
from retrofit.surgery.source_run import SourceRun, run_source
from retrofit.utils.forward_pass import images_of
from retrofit.utils.text import plural


class CheckError(RetrofitError):
    """The converted network is not the function of its source; `report` is that of the conversion,
    taken back.
    """

    def __init__(self, problem: str, report: Report) -> None:
        super().__init__(
            f"{problem}; the model is left as it was: keep the layers concerned with `skip`, or "
            "pass `check=False` where it is known to amplify rounding errors"
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
    images = _batches_of(options.get("calibrate"))
    request = PlanRequest(to, only, skip, source, {**options, "calibrate": images})
    original = source_of(model)
    network = original.network
    plan, sites = plan_and_sites(original, request)
    names = [norm.name for norm in original.norms]
    run = run_source(network, inputs, input_size, layers=names, images=images, whole=check)
    # The shapes of their inputs show what some layers are.
    norms = proved_on_shapes(original.norms, run.shapes)
    if norms != original.norms:
        original = replace(original, norms=norms)
        plan, sites = plan_and_sites(original, request)
    if converter.changes_sets:
        refuse_constants(plan, norms, run.shapes)
    with unchanged_on_failure(network, norms):
        converted, report = execute(plan, converter, network, norms, sites)
        uncalled = note_on_uncalled(converted, plan.converted, run)
        _record_sample_size(converted, inputs, input_size)
        earlier = _converted_before(norms)
        notes = (*report.notes, *original.functions, _note_on_earlier(len(earlier)), uncalled)
        report = replace(report, notes=tuple(filter(None, notes)))
        if check:
            result = run.check(converted, layers=converter.identity)
            report = replace(report, identity=converter.identity, classifies=run.classifies)
            report = _checked(report, result)
        report = _at_strength(strength, converted, earlier, report, run)
    # The caller's object may wrap the network.
    if converted is network:
        return model, report
    return converted, report


def _record_sample_size(
    network: nn.Module, inputs: Inputs | None, input_size: Sequence[int] | None
) -> None:
    size = _size_of_samples(inputs, input_size)
    if size:
        set_record(network, input_size=size)


def _size_of_samples(inputs: Inputs | None, input_size: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shape of one sample: `input_size`, or that of the inputs if they are one tensor of
    real numbers; empty if neither tells.
    """
    if inputs is None:
        return tuple(input_size or ())
    call = call_with(inputs)
    if all(tensor.is_floating_point() for tensor in call.tensors):
        return call.sample_shape
    return ()


def _batches_of(images: Any) -> list[Tensor] | None:
    """Read the images of `calibrate` once, whatever gives them."""
    if images is None:
        return None
    return list(images_of(images))


def _check_strength(strength: float | None, to: str, converter: Converter) -> None:
    if strength is None:
        return
    if not converter.has_strength:
        raise UsageError(f"`strength` means nothing to {to}, whose layers have none; leave it out")
    check_strength(strength)


def _converted_before(norms: Sequence[NormLayer]) -> set[nn.Module]:
    return {norm.module for norm in norms if isinstance(norm.module, StrengthMixin)}


def _note_on_earlier(count: int) -> str:
    if not count:
        return ""
    return (
        f"{plural(count, 'layer')} converted before: their strength stays, `strength` sets the new "
        "ones alone"
    )


def _at_strength(
    strength: float | None,
    network: nn.Module,
    earlier: Set[nn.Module],
    report: Report,
    run: SourceRun,
) -> Report:
    """Set the strength of the layers that were not there `earlier`.

    Returns:
        The report with what the target changes (at strength 1, on images), and with what `strength`
        does.
    """
    new_layers = [layer for layer in strength_layers(network) if layer not in earlier]
    if run.predictions is not None:
        set_strength_of(new_layers, 1.0)
        report = replace(report, agreement=run.agreement(network))
    set_strength_of(new_layers, strength or 0.0)
    if strength is not None and report.strength is not None:
        report = replace(report, strength=strength)
        if strength and report.check is not None:
            report = replace(report, change=run.compare(network, layers=False))
    return report


def _checked(report: Report, result: Comparison) -> Report:
    """Return the report with the comparison of the network at strength 0 with its source, or with a
    note why there is none.
    """
    if result.not_checked:
        return replace(report, notes=(*report.notes, f"not checked: {result.not_checked}"))
    report = replace(report, check=result)
    problem = ""
    if report.identity:
        problem = result.problem()
    if not problem and not math.isfinite(result.max_abs_diff):
        problem = "the converted network's outputs are not finite, or of another shape"
    if problem:
        raise CheckError(problem, report)
    return report
