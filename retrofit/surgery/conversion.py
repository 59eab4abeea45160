"""`retrofit.convert`: plan, apply, look at one run of the network, and compare it with its source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from retrofit.compare import Reference
from retrofit.conversion_options import takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.layers.strength import check_strength, strength_layers
from retrofit.record import set_record
from retrofit.surgery.bypassed import refuse_bypassed
from retrofit.surgery.execute import apply, unchanged_on_failure
from retrofit.surgery.families import NormLayer, find_norms, functional_norms
from retrofit.surgery.plan_and_report import LayerRow, Report
from retrofit.surgery.planning import Patterns, converter_for, network_in, plan_and_sites
from retrofit.surgery.same_formula import agrees
from retrofit.utils.running import images_of
from retrofit.utils.text import plural, shortlist

_HALF = {torch.float16, torch.bfloat16}


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
        to: The target, a key of `TARGETS`.
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
    if strength is not None and not converter.has_strength:
        raise UsageError(f"`strength` means nothing to {to}, whose layers have none; leave it out")
    check_strength(strength or 0.0)
    network = network_in(model)
    images = None if options.get("calibrate") is None else list(images_of(options["calibrate"]))
    decisions, sites = plan_and_sites(
        network, to, only, skip, source, {**options, "calibrate": images}
    )
    norms = {norm.name: norm for norm in find_norms(network)}
    earlier = strength_layers(network)
    notes = functional_norms(network)
    if values := [layer.stored_strength for layer in earlier if not layer._code.is_meta]:
        span = " to ".join(f"{value:g}" for value in sorted({min(values), max(values)}))
        before = f"{plural(len(values), 'layer')} converted before {'keeps its' if len(values) == 1 else 'keep their'}"
        notes.append(f"{before} strength, {span}; `strength` sets the new ones alone")
    with unchanged_on_failure(network):
        reference, reason = reference_of(network, inputs, input_size, whole=check)
        shapes = None if reference is None else reference.shapes
        if converter.changes_sets:
            _refuse_constants(decisions.converted, norms, shapes)
        if shapes is not None:
            for norm in (norms[row.name] for row in decisions.converted):
                given = list(dict.fromkeys(shapes[norm.name]))
                if norm.formula is not None and not agrees(norm.module, norm.formula, given):
                    raise RetrofitError(
                        f"{norm.name} is {norm.known_class} on random inputs, but not on those of the shape that the "
                        "network gives it; keep it with `skip`"
                    )
            if uncalled := sorted(row.name for row in decisions.converted if not shapes[row.name]):
                notes.append(
                    f"not called when the network was run: {plural(len(uncalled), 'converted layer')} "
                    f"({shortlist(uncalled)}); only training calls such layers, or code that reads their tensors, for "
                    "which nothing changes"
                )
        predictions = (
            None if images is None else Reference(network, [Call((batch,)) for batch in images])
        )
        converted, report = apply(decisions, network, sites)
        if reference is not None:
            labels = {row.name: row.source for row in decisions.converted}
            uncalled_layers = {name: labels[name] for name in labels if not reference.shapes[name]}
            if uncalled_layers:
                refuse_bypassed(converted, reference.calls[0], uncalled_layers)
        if check:
            report = _checked(report, converted, reference, reason, converter.identity)
        new = [layer for layer in strength_layers(converted) if layer not in earlier]
        if predictions is not None:
            for layer in new:
                layer.set_strength(1.0)
            share, count = predictions.compare(converted).top1_agreement, sum(predictions.batches)
            if share is not None:
                report = replace(report, agreement={"images": count, "same": round(share * count)})
        for layer in new:
            layer.set_strength(strength or 0.0)
        if strength is not None and report.strength is not None:
            report = replace(report, strength=strength)
        if strength and check and reference is not None:
            report = replace(report, change=reference.compare(converted, layers=False))
    if input_size is not None:
        set_record(converted, input_size=tuple(input_size))
    return model if converted is network else converted, replace(
        report, notes=(*report.notes, *notes)
    )


def reference_of(
    model: nn.Module, inputs: Inputs | None, input_size: Sequence[int] | None, whole: bool = True
) -> tuple[Reference | None, str]:
    """Run a network, for the shapes that its layers get and to compare it later; or say why that
    cannot be.

    Without `whole` it is run once, for the shapes alone. To refuse given inputs or a given size is
    an error.
    """
    try:
        calls = example_calls(model, inputs, input_size)[: None if whole else 1]
        return Reference(model, calls, layers=[norm.name for norm in find_norms(model)]), ""
    except RetrofitError as error:
        dtypes = {
            tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta
        }
        given = inputs is not None or input_size is not None
        # else it may run elsewhere
        if given and dtypes and dtypes.isdisjoint(_HALF):
            raise
        return None, str(error)


def _checked(
    report: Report, model: nn.Module, reference: Reference | None, reason: str, identity: bool
) -> Report:
    """Compare the converted network with its source; add the result, or why there is none."""
    if any(tensor.dtype in _HALF for tensor in (*model.parameters(), *model.buffers())):
        reason = "in half precision rounding hides what the check looks for; convert in float32 to be sure"
    elif reference is not None:
        result = reference.compare(model, layers=identity)
        report = replace(report, check=result, identity=identity, classifies=reference.classifies)
        if identity and (problem := result.problem()):
            raise CheckError(problem, report)
        if not math.isfinite(result.max_abs_diff):
            raise CheckError(
                "the converted network's outputs are not finite, or of another shape", report
            )
        reason = result.not_checked
    return (
        replace(report, check=None, notes=(*report.notes, f"not checked: {reason}"))
        if reason
        else report
    )


def _refuse_constants(
    rows: Sequence[LayerRow], norms: Mapping[str, NormLayer], shapes: Mapping[str, Any] | None
) -> None:
    """Refuse to normalize sets of a single value each, of which a normalization makes a constant.

    Shapes are what a run of the network gave the layers; None if it was not run. A BatchNorm1d that
    was not called counts as if its input had one position a channel.
    """
    constant = []
    for row in rows:
        norm = norms[row.name]
        # a GroupNorm, which stays
        if (mean := getattr(norm.layer, "running_mean", None)) is None:
            continue
        groups = row.options.get("num_groups", row.options.get("groups", len(mean)))
        unknown = [(1, len(mean))] if norm.known_class == "BatchNorm1d" else []
        if any(
            len(mean) * math.prod(shape[2:]) == groups
            for shape in (shapes or {}).get(row.name) or unknown
        ):
            constant.append(row.name)
    if constant:
        unless = (
            ", or show by example `inputs` that its maps have more positions"
            if shapes is None
            else ""
        )
        raise RetrofitError(
            f"every group of {shortlist(constant)} would hold a single value, of which a normalization makes a "
            f"constant; the model is left as it was: take fewer groups with `groups`, keep them with `skip`{unless}"
        )
