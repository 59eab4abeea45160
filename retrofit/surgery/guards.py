"""Code that computes what a normalization layer computes without calling it: once a layer is converted, it must not."""

from __future__ import annotations

import functools
from typing import NoReturn

from torch import nn

from retrofit.errors import RetrofitError
from retrofit.utils.text import plural

_FUSING_METHODS = ("fuse", "reparameterize", "switch_to_deploy", "fuse_model")


def guard(model: nn.Module, converted: set[nn.Module]) -> tuple[str, ...]:
    """Keep other code from computing the sources of converted layers; return notes for the report."""
    holders = [module for module in model.modules() if any(child in converted for child in module.modules())]
    return (*_refuse_fusing(holders), *_call_the_norms(holders))


def _refuse_fusing(holders: list[nn.Module]) -> tuple[str, ...]:
    blocks = 0
    for module in holders:
        methods = [name for name in _FUSING_METHODS if callable(getattr(type(module), name, None))]
        blocks += bool(methods)
        for name in methods:
            vars(module)[name] = functools.partial(_refuse, type(module).__name__, name)
    if not blocks:
        return ()
    return (
        f"{plural(blocks, 'block')} can re-parameterise (fuse BatchNorm into convolutions); they now refuse to: "
        "the converted layers are no longer affine",
    )


def _call_the_norms(holders: list[nn.Module]) -> tuple[str, ...]:
    """Turn off the fast path of torch's transformer, which in evaluation takes gamma and beta and calls no layer.

    There is no switch for it: a layer takes that path for the activations of this number alone, and an encoder that
    packs its tokens by their mask counts on its layers to take it.
    """
    packing = 0
    for module in holders:
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            packing += module.use_nested_tensor
            module.use_nested_tensor = False
    if not packing:
        return ()
    return (
        f"{plural(packing, 'transformer encoder')} no longer packs tokens by their mask, with which torch calls no "
        "norm: in evaluation what it puts out for masked tokens is no longer 0",
    )


def _refuse(block: str, method: str, *_: object, **__: object) -> NoReturn:
    raise RetrofitError(
        f"{block}.{method}() would fuse a converted layer as if it were its source; re-parameterise before converting"
    )
