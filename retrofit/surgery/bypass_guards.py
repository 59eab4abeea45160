"""What keeps a network's code from bypassing a converted layer: from computing its source without
calling it.

Each function is one situation. The guards change the network so that such code calls the layer or
stops with a reason; `note_on_uncalled` runs the network and refuses one that bypasses a layer. Each
returns a note for the report, empty where the network has no such code.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from retrofit.compare import Answer, answers_of
from retrofit.errors import RetrofitError
from retrofit.inputs import Call
from retrofit.layers import FrozenBatchNorm, StrengthMixin
from retrofit.surgery.plan_and_report import LayerRow
from retrofit.surgery.source_run import SourceRun
from retrofit.utils.output_tensors import largest_gap
from retrofit.utils.text import plural, shortlist

_FUSING_METHODS = ("fuse", "reparameterize", "switch_to_deploy", "fuse_model")


def refuse_calls_of_sources(sources: Mapping[str, nn.Module]) -> None:
    """Refuse calls of the replaced layers, by name.

    A network may keep its norms in a list beside their attributes, and call them from there. The
    conversion would silently have no effect.
    """
    for name, source in sources.items():
        message = (
            f"the network calls the source of {name or 'the layer'}, which is converted, by a "
            "reference of its own (from a list, or elsewhere besides its name); keep that layer "
            "with `skip`"
        )
        vars(source)["forward"] = partial(_refuse, message)


def refuse_fusing(model: nn.Module, converted: AbstractSet[nn.Module]) -> str:
    """Refuse the methods by which a block merges its BatchNorm into a convolution.

    A user of ultralytics or of RepVGG calls `model.fuse()` before deploying. That method reads
    gamma, beta and the running statistics, and drops the layer. Only a frozen layer is still the
    affine map that these four describe.
    """
    blocks = 0
    for module in model.modules():
        methods = [name for name in _FUSING_METHODS if callable(getattr(type(module), name, None))]
        layers = _inside(module, converted)
        if not methods or all(isinstance(layer, FrozenBatchNorm) for layer in layers):
            continue
        blocks += 1
        refuse = partial(
            _refuse,
            f"{type(module).__name__} would fuse a converted layer as if it were its source; "
            "re-parameterise before converting",
        )
        vars(module).update(dict.fromkeys(methods, refuse))
    if not blocks:
        return ""
    return (
        f"{plural(blocks, 'block')} can re-parameterise (fuse BatchNorm into convolutions); they "
        "now refuse to: the converted layers are no longer affine"
    )


def allow_fusing(model: nn.Module) -> None:
    """Let blocks fuse again that hold no layer with a strength any more."""
    for module in model.modules():
        if any(isinstance(layer, StrengthMixin) for layer in module.modules()):
            continue
        for name in _FUSING_METHODS:
            if getattr(vars(module).get(name), "func", None) is _refuse:
                del vars(module)[name]


def keep_transformer_off_its_fast_path(model: nn.Module, converted: AbstractSet[nn.Module]) -> None:
    """Have torch's transformer layers call their norms in evaluation.

    Under `torch.no_grad`, `nn.TransformerEncoderLayer` passes gamma and beta to a fused kernel and
    calls no norm. The fast path has no switch; a layer takes it only if this number says that its
    activation is ReLU or GELU.
    """
    for module in _holders(model, nn.TransformerEncoderLayer, converted):
        module.activation_relu_or_gelu = 0


def stop_packing_of_masked_tokens(model: nn.Module, converted: AbstractSet[nn.Module]) -> str:
    """Have torch's transformer encoders pass on all tokens.

    Called with a padding mask in evaluation, `nn.TransformerEncoder` packs the tokens into a nested
    tensor, and relies on its layers to take their fast path, where no norm is called.
    """
    packing = 0
    for module in _holders(model, nn.TransformerEncoder, converted):
        packing += module.use_nested_tensor
        module.use_nested_tensor = False
    if not packing:
        return ""
    return (
        f"{plural(packing, 'transformer encoder')} no longer packs tokens by their mask, with "
        "which torch calls no norm: in evaluation what it puts out for masked tokens is no "
        "longer 0"
    )


def _holders(
    model: nn.Module, cls: type[nn.Module], converted: AbstractSet[nn.Module]
) -> Iterator[Any]:
    """Yield the modules of a class that hold a converted layer."""
    for module in model.modules():
        if isinstance(module, cls) and _inside(module, converted):
            yield module


def _inside(module: nn.Module, converted: AbstractSet[nn.Module]) -> list[nn.Module]:
    return [layer for layer in module.modules() if layer in converted]


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    """Take a method's place: a partial of a function of this module can be copied and pickled with
    the network.
    """
    raise RetrofitError(message)


def note_on_uncalled(model: nn.Module, converted: Iterable[LayerRow], run: SourceRun) -> str:
    """Return a note on the converted layers that the source did not call; refuse a network that
    evaluates by their tensors in place of calling them.

    `F.batch_norm(x, bn.running_mean, bn.running_var, ...)` in evaluation is BatchNorm, whatever the
    layer has become: such a network trains as one function and is evaluated as another. A frozen
    layer is what these tensors say.

    Args:
        model: The converted network.
        converted: The rows of its converted layers.
        run: The run of its source.

    Raises:
        RetrofitError: If other values in the tensors of these layers change the outputs.
    """
    if run.reference is None:
        return ""
    shapes = run.shapes
    sources = {row.name: row.source for row in converted if not shapes[row.name]}
    if not sources:
        return ""
    layers = {name: model.get_submodule(name) for name in sources}
    suspects = {
        name: layer for name, layer in layers.items() if not isinstance(layer, FrozenBatchNorm)
    }
    bypassed = _bypassed(model, run.reference.calls[0], suspects)
    if bypassed:
        first = bypassed[0]
        label = type(layers[first]).__name__
        raise RetrofitError(
            f"in evaluation the network computes with the tensors of {shortlist(bypassed)} and "
            f"does not call it: this code takes {label} for a {sources[first]}, which it is at "
            "strength 0 at most; call the layer, or keep it with `skip`"
        )
    return (
        f"not called when the network was run: {plural(len(sources), 'converted layer')} "
        f"({shortlist(sorted(sources))}); training or other inputs may call such layers, which is "
        "not compared here, or code may read their tensors, for which nothing changes"
    )


def _bypassed(model: nn.Module, call: Call, suspects: Mapping[str, Any]) -> list[str]:
    """Return the names of the layers with whose tensors the network evaluates."""
    answer = _answer_with_nan(model, call, [])
    # The network's code misses a tensor that its layer had before.
    if isinstance(answer, AttributeError):
        return list(suspects)
    if isinstance(answer, Exception):
        raise answer
    if not _differs(_answer_with_nan(model, call, suspects.values()), answer):
        return []
    return [
        name
        for name, layer in suspects.items()
        if _differs(_answer_with_nan(model, call, [layer]), answer)
    ]


def _answer_with_nan(model: nn.Module, call: Call, layers: Iterable[Any]) -> Answer | Exception:
    """Run a network with NaN in the tensors of some layers; return its answer, or what it raises."""
    before = [(layer, layer._parameters, layer._buffers) for layer in layers]
    for layer, parameters, buffers in before:
        vars(layer).update(_parameters=_nan_in(parameters), _buffers=_nan_in(buffers))
    try:
        (answer,) = answers_of(model, [call])
    finally:
        for layer, parameters, buffers in before:
            vars(layer).update(_parameters=parameters, _buffers=buffers)
    return answer


def _differs(other: Answer | Exception, answer: Answer) -> bool:
    # The network's own code may raise anything on NaN.
    if isinstance(other, Exception) or len(other.outputs) != len(answer.outputs):
        return True
    return any(map(largest_gap, other.outputs, answer.outputs))


def _nan_in(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: _nan_like(value) for name, value in tensors.items()}


def _nan_like(value: Tensor | None) -> Tensor | None:
    if value is None or not value.is_floating_point():
        return value
    other = torch.full_like(value, math.nan)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(other, requires_grad=value.requires_grad)
    return other
