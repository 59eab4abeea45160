"""Capture a network, fold it, and compare the two."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from retrofit.compare import NO_NUMBERS, Reference, is_detector
from retrofit.comparison import Comparison, ComparisonError
from retrofit.errors import RetrofitError
from retrofit.export.approximation.choose import choose
from retrofit.export.capture import NO_DETECTORS, Program, capture
from retrofit.export.graph_nodes import layer_of
from retrofit.export.graph_passes import fold_program
from retrofit.export.power_operator import Replacement
from retrofit.export.report import FoldedLayer
from retrofit.export.request import Request
from retrofit.inputs import Call
from retrofit.layers.normality_mixin import lambda_values
from retrofit.utils.forward_pass import evaluating

ACCEPT = "or raise `tolerance` if you can accept that"
REPORT_IT = f"please report it, {ACCEPT}"


class FoldedNetwork(NamedTuple):
    """A folded network, what became of its layers, and how it compares with the given one."""

    program: Program
    layers: tuple[FoldedLayer, ...]
    reference: Reference
    comparison: Comparison


def checked_fold(request: Request, *, must_capture: bool = False) -> FoldedNetwork:
    """Fold the requested network; where it cannot be captured, its program's `not_captured` says why.

    Args:
        request: The network, and how it is to be folded.
        must_capture: Whether to raise where it cannot be captured, before anything is compared.

    Raises:
        RetrofitError: If the network answers with no numbers, does not take other numbers of
            samples once captured, cannot be approximated, or differs from its folded form.
    """
    network = request.network
    # Detectors are compared part by part, which takes many runs
    detects = is_detector(network, request.calls[0])
    if detects and must_capture:
        raise RetrofitError(f"{NO_DETECTORS}; use `torch.onnx.export` with `dynamo=False`")
    reference = Reference(network, request.judged, tolerance=request.allowed)
    _refuse_missing_numbers(network, reference)
    program = capture(
        network,
        request.calls[0],
        batch=request.batch,
        dynamic_size=request.dynamic_size,
        lambdas=_mean_lambdas(network, request.fitted) if request.freeze_lambda else {},
        is_detector=detects,
    )
    fits: Mapping[Node, Replacement] = {}
    if program.not_captured:
        if must_capture:
            raise RetrofitError(program.not_captured)
        if request.fold == "poly":
            raise RetrofitError(f"{program.not_captured}; `fold='exact'` may do")
    else:
        _refuse_fixed_batch(program, reference)
        if request.fold == "poly":
            fits = choose(
                program.module, request.degree, request.allowed, request.fitted, request.unseen
            )
        fold_program(program, fits)
    comparison = reference.compare(program.module)
    if comparison.differs:
        raise ComparisonError(comparison, *_claim_and_advice(request, program))
    return FoldedNetwork(program, _folded_layers(program, fits), reference, comparison)


def _refuse_missing_numbers(network: nn.Module, reference: Reference) -> None:
    if reference.not_checked == NO_NUMBERS:
        raise RetrofitError(NO_NUMBERS)
    if not reference.holds_nan:
        return
    for name, value in network.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.isnan().any():
            raise RetrofitError(f"{name} holds NaN; export other weights")


def _refuse_fixed_batch(program: Program, reference: Reference) -> None:
    """Raise RetrofitError if the captured network does not take other numbers of samples."""
    for call in reference.calls[:3]:
        try:
            with torch.no_grad():
                call.on(program.module)
        # A guard of torch.export or the network's own code may raise anything.
        except Exception as error:
            raise RetrofitError(
                f"captured with {program.call.batch} samples, the network does not take {call.batch}; fix "
                f"their number, as `batch={reference.calls[0].batch}`"
            ) from error


def _folded_layers(program: Program, fits: Mapping[Node, Replacement]) -> tuple[FoldedLayer, ...]:
    errors = {
        layer_of(node): (fit.degree, fit.max_error, fit.rms_error) for node, fit in fits.items()
    }
    forms = program.layers.items()
    return tuple(FoldedLayer(name, form, *errors.get(name, ())) for name, form in forms)


def _claim_and_advice(request: Request, program: Program) -> tuple[str, str]:
    """Return in words what differs, and what to do about it."""
    if request.approximates:
        advice = f"leave out `freeze_lambda`, raise or leave out `degree`, {ACCEPT}"
        return "the approximation differs from the given network", advice
    different = "the folded network differs from the given one"
    if not program.not_captured and _quantizes(program):
        advice = "it quantizes its values, and a rounding error may move one by a step"
        return different, f"{advice}: fold it before `prepare_qat`, {ACCEPT}"
    return different, REPORT_IT


def _quantizes(program: Program) -> bool:
    """Return whether a captured network rounds to steps, as in quantization-aware training."""
    return any("fake_quant" in str(node.target) for node in program.module.graph.nodes)


def _mean_lambdas(network: nn.Module, calls: Sequence[Call]) -> dict[str, float]:
    """Return each layer's mean lambda over images, strength included."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    with evaluating(network):
        for call in calls:
            for name, lmbda in lambda_values(network, call.args[0]).items():
                values[name].append(lmbda.double())
    means = {}
    for name, seen in values.items():
        layer: Any = network.get_submodule(name)
        estimate = float(torch.cat(seen).mean())
        means[name] = 1 + float(layer.effective_alpha) * (estimate - 1)
    return means
