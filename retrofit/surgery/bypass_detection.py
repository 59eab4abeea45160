"""Runs that show whether a network bypasses converted layers, by computing with their tensors
without calling them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.layers import FrozenBatchNorm
from retrofit.utils.forward_pass import device_of, random_states_kept, undisturbed
from retrofit.utils.output_tensors import largest_gap, tensors_in
from retrofit.utils.text import shortlist


def refuse_bypassed(model: nn.Module, call: Call, sources: Mapping[str, str]) -> None:
    """Refuse a converted network that evaluates by the tensors of a layer in place of calling it.

    `F.batch_norm(x, bn.running_mean, bn.running_var, ...)` in evaluation is BatchNorm, whatever the
    layer has become: such a network trains as one function and is evaluated as another. A frozen
    layer is what these tensors say.

    Args:
        model: The converted network.
        call: What it is run on.
        sources: The class of the source of each layer that is not called, by name.

    Raises:
        RetrofitError: If other values in the tensors of these layers change the outputs.
    """
    layers = {name: model.get_submodule(name) for name in sources}
    suspects = [name for name, layer in layers.items() if not isinstance(layer, FrozenBatchNorm)]
    with undisturbed(model):
        try:
            outputs = _outputs(model, call)
        # The network's code misses a tensor that its layer had before.
        except AttributeError:
            bypassed = suspects
        else:
            bypassed = []
            if _reads(model, call, map(layers.__getitem__, suspects), outputs):
                bypassed = [
                    name for name in suspects if _reads(model, call, [layers[name]], outputs)
                ]
    if bypassed:
        first = bypassed[0]
        label = type(layers[first]).__name__
        raise RetrofitError(
            f"in evaluation the network computes with the tensors of {shortlist(bypassed)} and "
            f"does not call it: this code takes {label} for a {sources[first]}, which it is at "
            "strength 0 at most; call the layer, or keep it with `skip`"
        )


def _outputs(model: nn.Module, call: Call) -> list[Tensor]:
    """Return the outputs of a run that starts from the same random states as the last."""
    with random_states_kept(device_of(model)):
        return [tensor.clone() for tensor in tensors_in(call.on(model))]


def _reads(model: nn.Module, call: Call, layers: Iterable[Any], outputs: Sequence[Tensor]) -> bool:
    """Whether NaN in the tensors of some layers, for the time of a run, changes the outputs."""
    before = [(layer, layer._parameters, layer._buffers) for layer in layers]
    for layer, parameters, buffers in before:
        vars(layer).update(_parameters=_nan_in(parameters), _buffers=_nan_in(buffers))
    try:
        others = _outputs(model, call)
    # The network's own code may raise anything on NaN.
    except Exception:
        return True
    finally:
        for layer, parameters, buffers in before:
            vars(layer).update(_parameters=parameters, _buffers=buffers)
    return len(others) != len(outputs) or any(map(largest_gap, outputs, others))


def _nan_in(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: _nan_like(value) for name, value in tensors.items()}


def _nan_like(value: Tensor | None) -> Tensor | None:
    if value is None or not value.is_floating_point():
        return value
    other = torch.full_like(value, math.nan)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(other, requires_grad=value.requires_grad)
    return other
