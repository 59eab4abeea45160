"""`retrofit.convert`: plan, run the network, convert, and compare with the source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from retrofit.compare import Reference
from retrofit.conversion_options import takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Inputs, call_with
from retrofit.layers.strength import StrengthMixin, check_strength, strength_layers
from retrofit.record import network_in, set_record
from retrofit.surgery.bypass_detection import refuse_bypassed
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.execute import execute, unchanged_on_failure
from retrofit.surgery.functional_norms import functional_norms
from retrofit.surgery.norm_layers import NormLayer, find_norms, proved_on_shapes
from retrofit.surgery.plan_and_report import Report
from retrofit.surgery.planning import Patterns, PlanRequest, plan_and_sites, refuse_constants
from retrofit.surgery.source_run import HALF, run_source
from retrofit.utils.forward_pass import images_of
from retrofit.utils.text import plural, shortlist


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
    images = _calibration_images(options)
    request = PlanRequest(to, only, skip, source, {**options, "calibrate": images})
    conversion = _Conversion(model, converter, request)
    conversion.run_source(inputs, input_size, images, whole=check)
    conversion.execute(check, strength)
    size = _size_of_samples(inputs, input_size)
    if size:
        set_record(conversion.converted, input_size=size)
    # The caller's object may wrap the network.
    if conversion.converted is conversion.network:
        return model, conversion.report
    return conversion.converted, conversion.report


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


@dataclass
class _Conversion:
    """One conversion of a network: the plan, the source's run, and what becomes of it.

    Attributes:
        model: The network that the caller passed.
        converter: That of the target.
        request: What the caller asks for.
        network: The network, without wrappers.
        converted: The network to use after `execute`; the same one unless it is itself a layer.
        report: What was done, after `execute`.
    """

    model: nn.Module
    converter: Converter
    request: PlanRequest
    network: nn.Module = field(init=False)
    converted: nn.Module = field(init=False)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.network = network_in(self.model)
        self._norms = list(find_norms(self.network))
        self._functions = functional_norms(self.network, self._norms)
        self._make_plan()

    def _make_plan(self) -> None:
        self._plan, self._sites = plan_and_sites(
            self.network, self._norms, self._functions, self.request
        )

    def run_source(
        self,
        inputs: Inputs | None,
        input_size: Sequence[int] | None,
        images: list[Tensor] | None,
        whole: bool,
    ) -> None:
        """Run the network; plan again where the shapes show what some layers are."""
        names = [norm.name for norm in self._norms]
        self._run = run_source(
            self.network, inputs, input_size, layers=names, images=images, whole=whole
        )
        shapes = None
        reference = self._run.reference
        if reference is not None:
            shapes = reference.shapes
            proved = proved_on_shapes(self._norms, shapes)
            if proved != self._norms:
                self._norms = proved
                self._make_plan()
        if self.converter.changes_sets:
            refuse_constants(self._plan, self._norms, shapes)

    def execute(self, check: bool, strength: float | None) -> None:
        """Convert and compare; whatever is raised leaves the network as it was."""
        norms = self._norms
        with unchanged_on_failure(self.network, norms):
            self.converted, self.report = execute(
                self._plan, self.converter, self.network, norms, self._sites
            )
            self._add_notes(*self._functions, *_notes_on_earlier(norms))
            self._note_uncalled()
            if check:
                self._check()
            self._count_agreement()
            self._set_strength(strength)

    def _add_notes(self, *notes: str) -> None:
        self.report = replace(self.report, notes=(*self.report.notes, *notes))

    def _note_uncalled(self) -> None:
        """Note the converted layers that the source did not call; refuse code that evaluates with
        their tensors.
        """
        reference = self._run.reference
        if reference is None:
            return
        shapes = reference.shapes
        uncalled = {row.name: row.source for row in self._plan.converted if not shapes[row.name]}
        if not uncalled:
            return
        refuse_bypassed(self.converted, reference.calls[0], uncalled)
        self._add_notes(
            f"not called when the network was run: {plural(len(uncalled), 'converted layer')} "
            f"({shortlist(sorted(uncalled))}); only training calls such layers, or code that reads "
            "their tensors, for which nothing changes"
        )

    def _check(self) -> None:
        """Compare the network at strength 0 with its source; add the result, or why there is
        none.
        """
        reason = self._run.problem
        if self._is_half():
            reason = (
                "in half precision rounding hides what the check looks for; convert in float32 to "
                "be sure"
            )
        elif self._run.reference is not None:
            reason = self._compare(self._run.reference)
        if reason:
            self.report = replace(self.report, check=None)
            self._add_notes(f"not checked: {reason}")

    def _is_half(self) -> bool:
        tensors = (*self.converted.parameters(), *self.converted.buffers())
        return any(tensor.dtype in HALF for tensor in tensors)

    def _compare(self, reference: Reference) -> str:
        """Add the comparison to the report; return why it compared nothing, if it did not."""
        identity = self.converter.identity
        result = reference.compare(self.converted, layers=identity)
        self.report = replace(
            self.report, check=result, identity=identity, classifies=reference.classifies
        )
        problem = ""
        if identity:
            problem = result.problem()
        if not problem and not math.isfinite(result.max_abs_diff):
            problem = "the converted network's outputs are not finite, or of another shape"
        if problem:
            raise CheckError(problem, self.report)
        return result.not_checked

    def _new_layers(self) -> list[StrengthMixin]:
        earlier = _converted_before(self._norms)
        return [layer for layer in strength_layers(self.converted) if layer not in earlier]

    def _count_agreement(self) -> None:
        """Add to the report for how many images the prediction stays the same at strength 1."""
        predictions = self._run.predictions
        if predictions is None:
            return
        for layer in self._new_layers():
            layer.set_strength(1.0)
        share = predictions.compare(self.converted).top1_agreement
        if share is None:
            return
        images = sum(predictions.batches)
        same = round(share * images)
        self.report = replace(self.report, agreement={"images": images, "same": same})

    def _set_strength(self, strength: float | None) -> None:
        """Set the strength of the new layers; add to the report how it changes the outputs."""
        for layer in self._new_layers():
            layer.set_strength(strength or 0.0)
        if strength is None or self.report.strength is None:
            return
        self.report = replace(self.report, strength=strength)
        if not strength or self.report.check is None or self._run.reference is None:
            return
        change = self._run.reference.compare(self.converted, layers=False)
        self.report = replace(self.report, change=change)


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


def _notes_on_earlier(norms: Sequence[NormLayer]) -> list[str]:
    layers = _converted_before(norms)
    values = [layer.stored_strength for layer in layers if not layer._code.is_meta]
    if not values:
        return []
    ends = sorted({min(values), max(values)})
    span = " to ".join(f"{value:g}" for value in ends)
    keep = "keep their"
    if len(values) == 1:
        keep = "keeps its"
    return [
        f"{plural(len(values), 'layer')} converted before {keep} strength, {span}; `strength` sets "
        "the new ones alone"
    ]
