"""What a conversion must not overlook, whether or not the two networks are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.jit import ScriptModule

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers import FrozenBatchNorm, StrengthMixin
from retrofit.record import unwrapped
from retrofit.surgery.families import NormLayer
from retrofit.surgery.plan_and_report import LayerRow
from retrofit.surgery.same_formula import agrees
from retrofit.utils.text import plural, shortlist, shown

Shapes = Mapping[str, Sequence[tuple[int, ...]]]

_FUSING_METHODS = ("fuse", "reparameterize", "switch_to_deploy", "fuse_model")


def network_in(model: nn.Module) -> nn.Module:
    """Return the network inside wrappers of torch.compile and DataParallel, which call it as it is.

    A UsageError says that it is no network, a RetrofitError that it is or holds what keeps its parameters or its code
    elsewhere.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a torch.nn.Module is converted, not {shown(model)}; build the network first, as timm.create_model does"
        )
    for module in model.modules():
        name = type(module).__name__
        if name.startswith(("DistributedDataParallel", "FullyShardedDataParallel")):
            raise RetrofitError(
                f"{name} holds on to the parameters that it was built with; convert the network first, then wrap it"
            )
        if isinstance(module, ScriptModule):
            raise RetrofitError("a TorchScript module cannot be changed; convert the network before it is scripted")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise RetrofitError("the network's parameters are sharded; convert it first, then shard it")
    return unwrapped(model)


def _refuse(message: str, *_: Any, **__: Any) -> NoReturn:
    """Take a method's place: a partial of a function of this module can be copied and pickled with the network."""
    raise RetrofitError(message)


def refuse_calls(sources: Mapping[nn.Module, str]) -> None:
    """Let converted layers' sources, given with their names, refuse to be called by other references to them."""
    for source, name in sources.items():
        vars(source)["forward"] = partial(
            _refuse,
            f"the network calls the source of {name or 'the layer'}, which is converted, by a reference of its own "
            "(from a list, or elsewhere besides its name); keep that layer with `skip`",
        )


def refuse_fusing(model: nn.Module, converted: set[nn.Module]) -> list[str]:
    """Let blocks refuse to fuse converted layers that are no affine maps; return a note for the report."""
    blocks = 0
    for module in _holders(model, {layer for layer in converted if not isinstance(layer, FrozenBatchNorm)}):
        methods = [name for name in _FUSING_METHODS if callable(getattr(type(module), name, None))]
        blocks += bool(methods)
        for name in methods:
            vars(module)[name] = partial(
                _refuse,
                f"{type(module).__name__}.{name}() would fuse a converted layer as if it were its source; "
                "re-parameterise before converting",
            )
    if not blocks:
        return []
    return [
        f"{plural(blocks, 'block')} can re-parameterise (fuse BatchNorm into convolutions); they now refuse to: "
        "the converted layers are no longer affine"
    ]


def allow_fusing(model: nn.Module) -> None:
    """Take back what `refuse_fusing` did to blocks that hold no layer with a strength any more."""
    for module in model.modules():
        if not any(isinstance(layer, StrengthMixin) for layer in module.modules()):
            for name in _FUSING_METHODS:
                if getattr(vars(module).get(name), "func", None) is _refuse:
                    del vars(module)[name]


def call_the_norms(model: nn.Module, converted: set[nn.Module]) -> list[str]:
    """Turn off the fast path of torch's transformer, which in evaluation takes gamma and beta and calls no layer.

    There is no switch for it: a layer takes that path for the activations of this number alone, and an encoder that
    packs its tokens by their mask counts on its layers to take it.
    """
    packing = 0
    for module in _holders(model, converted):
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            packing += module.use_nested_tensor
            module.use_nested_tensor = False
    if not packing:
        return []
    return [
        f"{plural(packing, 'transformer encoder')} no longer packs tokens by their mask, with which torch calls no "
        "norm: in evaluation what it puts out for masked tokens is no longer 0"
    ]


def _holders(model: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    return (module for module in model.modules() if not layers.isdisjoint(module.modules()))


def refuse_constants(rows: Sequence[LayerRow], norms: Mapping[str, NormLayer], shapes: Shapes | None) -> None:
    """Refuse to normalize sets of a single value each, of which a normalization makes a constant.

    Shapes are what a run of the network gave the layers; None if it was not run. A BatchNorm1d that was not called
    counts as if its input had one position a channel.
    """
    constant = []
    for row in rows:
        mean = getattr(norms[row.name].layer, "running_mean", None)
        if mean is None:  # a GroupNorm, which stays
            continue
        channels = mean.numel()
        groups = row.options.get("num_groups", row.options.get("groups", channels))
        unknown = [(1, channels)] if norms[row.name].known_class == "BatchNorm1d" else []
        if any(channels * math.prod(shape[2:]) == groups for shape in (shapes or {}).get(row.name) or unknown):
            constant.append(row.name)
    if constant:
        unless = ", or show by example `inputs` that its maps have more positions" if shapes is None else ""
        raise RetrofitError(
            f"every group of {shortlist(constant)} would hold a single value, of which a normalization makes a "
            f"constant; the model is left as it was: take fewer groups with `groups`, keep them with `skip`{unless}"
        )


def refuse_other_formulas(rows: Sequence[LayerRow], norms: Mapping[str, NormLayer], shapes: Shapes) -> None:
    """Refuse layers that are proved to compute what a known class does, but not on the shapes that a run gave them."""
    for row in rows:
        norm = norms[row.name]
        if norm.formula is not None and not agrees(norm.module, norm.formula, list(dict.fromkeys(shapes[row.name]))):
            raise RetrofitError(
                f"{row.name} is {norm.known_class} on random inputs, but not on those of the shape that the network "
                "gives it; keep it with `skip`"
            )
