"""A run that shows whether a network bypasses converted layers, by computing with their tensors
without calling them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.layers import FrozenBatchNorm
from retrofit.utils.forward_pass import undisturbed
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
        RetrofitError: If the network does not run without the tensors of these layers.
    """
    layers = {name: model.get_submodule(name) for name in sources}
    bypassed = [name for name, layer in layers.items() if not isinstance(layer, FrozenBatchNorm)]
    with undisturbed(model):
        for name in bypassed:
            layer = layers[name]
            attributes = vars(layer)
            attributes.update(_parameters={}, _buffers={}, forward=_same)
        try:
            call.on(model)
        except (AttributeError, KeyError):
            first = bypassed[0]
            label = type(layers[first]).__name__
            raise RetrofitError(
                f"in evaluation the network computes with the tensors of {shortlist(bypassed)} and "
                f"does not call it: this code takes {label} for a {sources[first]}, which it is at "
                "strength 0 at most; call the layer, or keep it with `skip`"
            ) from None


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x
