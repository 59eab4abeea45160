"""`retrofit.fold`, which needs no package of ONNX."""

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from retrofit.errors import RetrofitError
from retrofit.export.checked_fold import checked_fold
from retrofit.export.request import Fold, Request, warn_of_runtime
from retrofit.inputs import Inputs
from retrofit.layers.strength import strength_layers

_STRENGTHS = "folded_at"
# Of what torch gives a hook on a state: module, state, prefix, metadata.
_METADATA = 3


def fold(
    model: nn.Module,
    fold: Fold = "exact",
    *,
    inputs: Inputs | None = None,
    input_size: Sequence[int] | None = None,
    batch: int | None = None,
    degree: int | None = None,
    tolerance: float | None = None,
    calibrate: Iterable[Any] | None = None,
    freeze_lambda: bool = False,
    dynamic_size: bool = False,
    runtime: str | None = None,
) -> nn.Module:
    """Return a network for inference, with folded normalization layers: the computation that
    `export_onnx` writes.

    The network is captured with example inputs. The result accepts the same arguments, with any
    number of samples; other arguments or sizes raise a RetrofitError. Its outputs are compared with the
    network's on these inputs and on the images of `calibrate` (an approximation: on images not used
    to fit it, if any). If torch.export cannot capture the network, nothing is folded: a warning
    says so, and each layer of the returned copy uses plain torch operations.

    The network is not changed. The arguments are those of `export_onnx`; `tolerance` is the largest
    allowed difference.

    Returns:
        The folded network, in evaluation mode and float32, ready for torch.compile or AOTInductor.

    Raises:
        UsageError: If an argument is out of range.
        RetrofitError: If the network does not accept such inputs, no degree meets the tolerance, or
            the outputs of the folded network differ.
    """
    warn_of_runtime(runtime)
    request = Request(
        model=model,
        fold=fold,
        inputs=inputs,
        input_size=input_size,
        batch=batch,
        degree=degree,
        tolerance=tolerance,
        calibrate=calibrate,
        freeze_lambda=freeze_lambda,
        dynamic_size=dynamic_size,
    )
    folded = checked_fold(request)
    if folded.program.not_captured:
        warnings.warn(f"nothing is fused: {folded.program.not_captured}", stacklevel=2)
    if folded.comparison.not_checked:
        warnings.warn(str(folded.comparison), stacklevel=2)
    module: nn.Module = folded.program.module
    strengths = [layer.stored_strength for layer in strength_layers(request.network)]
    module._register_state_dict_hook(partial(_write_strengths, strengths))
    module.register_load_state_dict_pre_hook(partial(_refuse_other_strengths, strengths))
    return module


def _write_strengths(strengths: list[float], *given: Any) -> None:
    """Write the strengths that a network was folded at beside its state, where torch keeps versions.

    They are numbers in its code, not tensors of its state.
    """
    given[_METADATA][_STRENGTHS] = strengths


def _refuse_other_strengths(strengths: list[float], *given: Any) -> None:
    """Refuse the state of a network that was folded at other strengths.

    Raises:
        RetrofitError: If it was.
    """
    if given[_METADATA].get(_STRENGTHS, strengths) != strengths:
        raise RetrofitError(
            "the state is of a network that was folded at another strength, which its tensors do "
            "not hold; set_strength to that one, and fold again"
        )
