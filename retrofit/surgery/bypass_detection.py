"""A run that shows which converted layers a network bypasses, by computing with their tensors
without calling them.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.layers import FrozenBatchNorm
from retrofit.utils.forward_pass import hooked, undisturbed

_TENSORS = ("weight", "bias", "running_mean", "running_var")


def refuse_bypassed(model: nn.Module, call: Call, sources: Mapping[str, str]) -> None:
    """Refuse a converted network that evaluates by the tensors of a layer in place of calling it.

    `F.batch_norm(x, bn.running_mean, bn.running_var, ...)` in evaluation is BatchNorm, whatever the
    layer has become: such a network trains as one function and is evaluated as another. A frozen
    layer is what these tensors say.

    Args:
        model: The converted network.
        call: What it is run on.
        sources: The class of the source of each layer in question, by name.

    Raises:
        RetrofitError: If an operation takes a tensor of such a layer, and of no other module, and
            nothing calls the layer.
    """
    layers = {}
    for name in sources:
        layer = model.get_submodule(name)
        if not isinstance(layer, FrozenBatchNorm):
            layers[name] = layer
    called: set[str] = set()
    hooks = (
        layer.register_forward_pre_hook(partial(_note_call, called, name))
        for name, layer in layers.items()
    )
    watch = _Watch(model, layers)
    try:
        with undisturbed(model), hooked(hooks), watch:
            call.on(model)
    # The network's code misses a tensor that its layer had before.
    except AttributeError:
        watch.read.update(layers)
    for name in sorted(watch.read - called):
        label = type(layers[name]).__name__
        raise RetrofitError(
            f"in evaluation the network computes with the tensors of {name} and does not call it: "
            f"this code takes {label} for a {sources[name]}, which it is at strength 0 at most; "
            "call the layer, or keep it with `skip`"
        )


def _note_call(called: set[str], name: str, *_: Any) -> None:
    called.add(name)


class _Watch(TorchDispatchMode):
    """Notes the layers whose tensors operations take, by the memory that these lie in."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.read: set[str] = set()
        holders = Counter(_memory(t) for m in model.modules() for t in _tensors(m).values())
        self._owners = {
            _memory(tensor): name
            for name, layer in layers.items()
            for key, tensor in _tensors(layer).items()
            if key in _TENSORS and holders[_memory(tensor)] == 1
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _memory(value) in self._owners:
                self.read.add(self._owners[_memory(value)])
        return func(*args, **kwargs)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
