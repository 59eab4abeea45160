"""Plain networks: the layers of a converted network that the libraries have themselves, as theirs, to train on.

What trains and deploys networks knows torch's and timm's classes. At strength 1 the batch-independent targets are
those, but for constants, which go into the convolution before or into a `ConstantAffine`; at strength 0 every target is
its source's layer, or a constant affine.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from retrofit.errors import RetrofitError
from retrofit.graph.feeders import sole_feeders
from retrofit.graph.kinds import is_altered
from retrofit.graph.rewrite import replace_module
from retrofit.inputs import Inputs
from retrofit.layers import FrozenBatchNorm, MigratedGroupNorm, ProxyNorm
from retrofit.layers.constant_maps import LinearMap
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.frozen_batch_norm import ConstantAffine, PlainAffine, named_sequence
from retrofit.record import set_record
from retrofit.surgery import guards
from retrofit.surgery.conversion import reference_of
from retrofit.utils.running import copied
from retrofit.utils.text import plural, shortlist


@torch.no_grad()
def plain(model: nn.Module, input_size: Sequence[int] | None = None, *, inputs: Inputs | None = None) -> nn.Module:
    """Return a copy of a converted network that holds layers of torch and timm alone, with the same function.

    It can be trained. What is constant in it stays so: the statistics of the BatchNorm that was, and what ProxyNorm and
    weight standardization were computed to be. They go into the convolution before where it is proved that it feeds
    that layer and nothing else; elsewhere into a `ConstantAffine`, with gamma and beta of a frozen layer behind it in a
    `TrainedAffine`: the two classes of ours that are left.

    The two are compared. Where that cannot be, a warning that begins `not checked:` says why.

    Args:
        model: A network at strength 1 (targets gn, ln, gn-pn, ln-pn), of target frozen, or at strength 0 (any other).
        input_size: Shape of one sample, (C, H, W), on which the two are compared; the model's own if None.
        inputs: Example inputs to compare them on: a tensor, positional arguments, or keyword arguments.

    Raises:
        RetrofitError: If a layer is neither, with the name and the reason of each, or other code reads the tensors of
            one that changes, or the copy is another function.
    """
    if problems := {name: reason for name, layer in model.named_modules() if (reason := _problem(layer))}:
        name, problem = next(iter(problems.items()))
        more = f" (and {plural(len(problems) - 1, 'more layer')})" if len(problems) > 1 else ""
        raise RetrofitError(f"no layer of torch or timm computes what {name or 'the model'} does{more}: {problem}")
    reference, reason = reference_of(model, inputs, input_size)
    net = copied(model)
    set_record(net, plans=())
    feeders, read = sole_feeders(net, _holds_constants)
    if read:
        names = [name for name, layer in net.named_modules() if layer in read]
        raise RetrofitError(
            f"other code of the network reads the tensors of {shortlist(names)}, which no plain layer holds as they "
            "are; keep those layers with `skip` in the conversion"
        )
    # of gamma and beta as they are, before any of them moves into a convolution
    proxies = {layer: layer.plain_layer()[1] for layer in net.modules() if isinstance(layer, ProxyNorm)}
    for name, layer in reversed(list(net.named_modules())):  # what a layer holds before the layer
        new = proxies.get(layer) if isinstance(layer, ProxyNorm) else _plain(layer, feeders.get(layer))
        if new is not None:
            net = replace_module(net, name, new.train(layer.training))
    guards.allow_fusing(net)
    if reference is not None:
        result = reference.compare(net, layers=False)
        if problem := result.problem("the plain network is not the function of its source"):
            raise RetrofitError(f"{problem}; please report it")
        reason = result.not_checked
    if reason:
        warnings.warn(f"not checked: {reason}", stacklevel=2)
    return net


def plain_layer(layer: nn.Module) -> nn.Module | None:
    """Return a converted layer's plain form, around its parameters; None for others, RetrofitError if it has none."""
    if not isinstance(layer, ConvertedLayer) or isinstance(layer, PlainAffine):
        return None
    owner: Any = layer
    with torch.no_grad():
        constants, new = owner.plain_layer()
        if constants is None:
            return new
        scale, shift = (value.to(owner.running_mean.dtype) for value in constants)
        parts = new.named_children() if type(new) is nn.Sequential else [("norm", new)]
        return nn.Sequential(OrderedDict(affine=ConstantAffine(scale, shift), **dict(parts)))


def _problem(layer: nn.Module) -> str:
    """Why a layer has no plain form; empty if it has, or is no layer of ours."""
    if not isinstance(layer, ConvertedLayer):
        return ""
    try:
        layer.plain_layer()
    except RetrofitError as error:
        return str(error).partition(": ")[2]
    return "it has hooks, or a forward of its own; remove them first" if is_altered(layer) else ""


def _holds_constants(layer: nn.Module) -> bool:
    """Whether statistics of a layer are constants, so that its plain form is not around the same tensors."""
    frozen = getattr(layer, "frozen", False) and getattr(layer, "running_mean", None) is not None
    return isinstance(layer, MigratedGroupNorm | FrozenBatchNorm) or bool(frozen)


def _plain(layer: nn.Module, feeder: nn.Module | None) -> nn.Module | None:
    """The plain form of a layer, of which constants go into the convolution that feeds it."""
    if feeder is None or not isinstance(layer, ConvertedLayer):
        return plain_layer(layer)
    affine, new = layer.affine_map(), named_sequence(OrderedDict(), layer)
    if affine is None:  # group normalization behind the constants
        affine, new = layer.plain_layer()
    assert affine is not None
    _fold_after(feeder, *affine)
    return new


def _fold_after(feeder: Any, scale: Tensor, shift: Tensor) -> None:
    """Make a convolution or linear layer put out scale * y + shift instead of y, per output channel."""
    bias, transposed = feeder.bias, isinstance(feeder, _ConvTransposeNd)
    moved = LinearMap.of(feeder.weight, bias, getattr(feeder, "groups", 1), transposed).then(scale, shift)
    feeder.weight.copy_(moved.torch_weight())
    if bias is not None:
        feeder.bias.copy_(moved.bias)
    elif moved.bias is not None:
        feeder.bias = nn.Parameter(moved.bias.to(feeder.weight.dtype), requires_grad=feeder.weight.requires_grad)
