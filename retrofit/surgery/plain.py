"""Plain networks: converted networks whose layers are the libraries' own again, to train on."""

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from retrofit.errors import RetrofitError
from retrofit.graph import recognition
from retrofit.graph.rewrite import replace_module
from retrofit.inputs import Inputs
from retrofit.layers import FrozenBatchNorm, MigratedGroupNorm, ProxyNorm
from retrofit.layers.constant_maps import LinearMap
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.frozen_batch_norm import ConstantAffine, PlainAffine, named_sequence
from retrofit.record import forget_plans, refuse_sharded
from retrofit.surgery.bypass_guards import allow_fusing
from retrofit.surgery.sole_feeders import sole_feeders
from retrofit.surgery.source_run import run_source
from retrofit.utils.forward_pass import copied
from retrofit.utils.text import ROOT, shortlist


@torch.no_grad()
def plain(
    model: nn.Module, input_size: Sequence[int] | None = None, *, inputs: Inputs | None = None
) -> nn.Module:
    """Return a copy of a converted network that uses only torch and timm layers and computes the
    same function.

    The copy can be trained. The former BatchNorm's statistics and ProxyNorm's current normalization
    are constants in it; standardized weights become ordinary ones. Statistics are merged into the
    convolution before the layer if it provably feeds only that layer. Other constants go into a
    `ConstantAffine`, followed for a frozen layer by a `TrainedAffine` with gamma and beta. These
    are the only two retrofit classes in the copy.

    The copy is compared with the network. If that is impossible, a warning that begins with `not
    checked:` says why.

    Args:
        model: A network at strength 1 (gn, ln, gn-pn, ln-pn), with target frozen, or at strength 0
            (any target).
        input_size: Shape of one sample for the comparison, (C, H, W); by default, the network's
            own.
        inputs: Example inputs for the comparison: a tensor, a tuple of arguments, or a dict of
            keyword arguments.

    Raises:
        RetrofitError: If no such layer computes what one of the network does (the message names
            one and the reason), if other code reads the tensors of a layer that changes, or if the
            copy computes something different, or the network is sharded.
    """
    refuse_sharded(model)
    source = run_source(model, inputs, input_size)
    net = copied(model)
    forget_plans(net)
    feeders, read = sole_feeders(net, _holds_constants)
    if read:
        names = [name for name, layer in net.named_modules() if layer in read]
        raise RetrofitError(
            f"other code of the network reads the tensors of {shortlist(names)}, which no plain "
            "layer holds as they are; convert with these in `skip`"
        )
    net = _with_plain_layers(net, feeders)
    allow_fusing(net)
    result = source.compare(net, layers=False)
    if problem := result.problem("the plain network is not the function of its source"):
        raise RetrofitError(f"{problem}; please report it")
    if result.not_checked:
        warnings.warn(f"not checked: {result.not_checked}", stacklevel=2)
    return net


def _with_plain_layers(net: nn.Module, feeders: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put a plain layer in the place of every converted one; return the network to use."""
    layers = [
        (name, layer) for name, layer in net.named_modules() if isinstance(layer, ConvertedLayer)
    ]
    # ProxyNorms first: they depend on gamma and beta, which are about to move into convolutions.
    # What a layer holds comes before the layer.
    inner_first = reversed(layers)
    order = sorted(inner_first, key=lambda named: not isinstance(named[1], ProxyNorm))
    for name, layer in order:
        label = name or ROOT
        if recognition.is_altered(layer):
            raise RetrofitError(f"{label} has hooks, or a forward of its own; remove them first")
        try:
            if layer in feeders:
                feeder = feeders[layer]
                new: nn.Module | None = _fold_into_feeder(layer, feeder)
            else:
                new = plain_counterpart(layer)
        except RetrofitError as error:
            raise RetrofitError(f"{label}: {error}") from None
        if new is not None:
            new.train(layer.training)
            net = replace_module(net, name, new)
    return net


def plain_counterpart(layer: nn.Module) -> nn.Module | None:
    """Return the plain layer that computes what a converted one does, around its parameters.

    None for layers that are not converted; a RetrofitError if there is no such layer.
    """
    if not isinstance(layer, ConvertedLayer):
        return None
    # Plain networks hold such layers as they are.
    if isinstance(layer, PlainAffine):
        return None
    owner: Any = layer
    with torch.no_grad():
        constants, new = owner.plain_layer()
        if constants is None:
            return new
        dtype = owner.running_mean.dtype
        scale, shift = (value.to(dtype) for value in constants)
        affine = ConstantAffine(scale, shift)
        children = {"norm": new}
        if type(new) is nn.Sequential:
            children = dict(new.named_children())
        return nn.Sequential(OrderedDict(affine=affine, **children))


def _holds_constants(layer: nn.Module) -> bool:
    """Whether a layer's statistics are constants, which its plain layer holds in other tensors."""
    frozen = getattr(layer, "frozen", False) and getattr(layer, "running_mean", None) is not None
    return isinstance(layer, MigratedGroupNorm | FrozenBatchNorm) or bool(frozen)


def _fold_into_feeder(layer: ConvertedLayer, feeder: Any) -> nn.Module:
    """Move a layer's constants into the convolution that feeds it alone; return the plain layer of
    what is left.
    """
    affine = layer.affine_map()
    if affine is None:
        # Only a part of the layer is an affine map: group normalization comes behind it, and stays.
        affine, new = layer.plain_layer()
        assert affine is not None
    else:
        new = named_sequence(OrderedDict(), layer)
    transposed = isinstance(feeder, _ConvTransposeNd)
    weight = feeder.weight
    source = LinearMap.of(weight, feeder.bias, feeder.groups, transposed)
    moved = source.then(*affine)
    moved_weight = moved.torch_weight()
    weight.copy_(moved_weight)
    moved_bias = moved.bias
    if moved_bias is not None:
        like = weight if feeder.bias is None else feeder.bias
        bias = moved_bias.to(like.dtype)
        feeder.bias = nn.Parameter(bias, requires_grad=like.requires_grad)
    return new
