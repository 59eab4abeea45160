"""Changes of a network that keep its code from bypassing a converted layer, by computing its source
without calling it.

Each function is one situation. It changes the network so that such code calls the layer or stops
with a reason, and returns a note for the report, empty where the network has no such code.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NoReturn

from torch import nn

from retrofit.errors import RetrofitError
from retrofit.layers import FrozenBatchNorm, StrengthMixin
from retrofit.utils.text import plural

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
