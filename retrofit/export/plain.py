"""Plain networks: the layers of a converted network that the libraries have themselves, as theirs, to train on.

What trains and deploys networks knows torch's and timm's classes. At strength 1 the batch-independent targets are
those, but for constants, which go into the convolution before or into a `ConstantAffine`; at strength 0 every target is
its source's layer, or a constant affine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.export.folding.linear import fold_after, out_channels
from retrofit.graph.find_sites import find_sites
from retrofit.graph.kinds import is_altered
from retrofit.graph.rewrite import replace_module
from retrofit.layers import FrozenBatchNorm, MigratedGroupNorm, ProxyNorm, StrengthMixin
from retrofit.layers.base import ConvertedLayer
from retrofit.layers.constant_affine import ConstantAffine, named_sequence
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.record import set_record
from retrofit.surgery.conversion import reference_of
from retrofit.utils.copying import copied

_Migrated = MigratedGroupNorm | FrozenBatchNorm


@torch.no_grad()
def plain(model: nn.Module, input_size: Sequence[int] | None = None) -> nn.Module:
    """Return a copy of a converted network that holds layers of torch and timm alone, with the same function.

    It can be trained. What is constant in it stays so: the statistics of the BatchNorm that was, and what ProxyNorm and
    weight standardization were computed to be.

    Args:
        model: A network at strength 1 (targets gn, ln, gn-pn, ln-pn), of target frozen, or at strength 0 (any other).
        input_size: Shape of one sample, (C, H, W), on which the two are compared; the model's own if None, and then a
            network that does not take that is not compared, nor is one in half precision.

    Raises:
        RetrofitError: If a layer is neither, with the name and the reason of each, or the copy is another function.
    """
    found = ((name, _hindrance(layer) or _altered(layer)) for name, layer in model.named_modules())
    hindered = [(name, reason) for name, reason in found if reason]
    if hindered:
        name, reason = hindered[0]
        more = f" (and {len(hindered) - 1} more layers)" if len(hindered) > 1 else ""
        raise RetrofitError(f"no layer of torch or timm computes what {name or 'the model'} does{more}: {reason}")
    check, _ = reference_of(model, None, input_size)
    net = copied(model)
    set_record(net, plans=())
    feeders = _feeders(net)
    # of gamma and beta as they are, before any of them moves into a convolution
    proxies: dict[nn.Module, nn.Module] = {
        layer: layer.plain_layer()[1] for layer in net.modules() if isinstance(layer, ProxyNorm)
    }
    for name, layer in reversed(list(net.named_modules())):  # what a layer holds before the layer
        new = _plain(layer, feeders, proxies)
        if new is None:
            continue
        net = replace_module(net, name, new.train(layer.training))
    if check is not None and (problem := check.compare(net, layers=False).problem()):
        raise RetrofitError(f"{problem}; please report it")
    return net


def plain_layer(layer: nn.Module) -> nn.Module | None:
    """Return the plain form of one converted layer, which takes its parameters; None if it is no layer of ours.

    Raises:
        RetrofitError: If it has none.
    """
    if not isinstance(layer, ConvertedLayer):
        return None
    with torch.no_grad():
        return _behind(*layer.plain_layer(), layer)


def _hindrance(layer: nn.Module) -> str:
    """Why a layer has no plain form; empty if it has, or is no layer of ours."""
    if isinstance(layer, ConvertedLayer):
        try:
            with torch.no_grad():
                layer.plain_layer()
        except RetrofitError as error:
            return str(error).partition(": ")[2]
    return ""


def _altered(layer: nn.Module) -> str:
    if isinstance(layer, StrengthMixin | FrozenBatchNorm) and is_altered(layer):
        return "it has hooks, or a forward of its own; remove them first"
    return ""


def _plain(layer: Any, feeders: dict[nn.Module, nn.Module], proxies: dict[nn.Module, nn.Module]) -> nn.Module | None:
    if layer in proxies:
        return proxies[layer]
    feeder = feeders.get(layer)
    if feeder is None or not isinstance(layer, ConvertedLayer):
        return plain_layer(layer)
    affine = layer.affine_map()
    if affine is None:
        affine, new = layer.plain_layer()
    else:
        new = named_sequence(OrderedDict(), layer)
    assert affine is not None
    fold_after(feeder, *affine)
    return new


def _behind(constants: tuple[Tensor, Tensor] | None, new: nn.Module, layer: Any) -> nn.Module:
    """Put a layer behind a constant affine."""
    if constants is None:
        return new
    like = layer.running_mean
    affine = ConstantAffine(constants[0].to(like.dtype), constants[1].to(like.dtype))
    if type(new) is nn.Identity:
        return affine
    parts = new.named_children() if type(new) is nn.Sequential else [("norm", new)]
    return nn.Sequential(OrderedDict(affine=affine, **dict(parts)))


def _feeders(net: nn.Module) -> dict[nn.Module, nn.Module]:
    """By layer that has constants, the convolution that feeds it and nothing else."""
    try:
        found = find_sites(net, lambda module: isinstance(module, _Migrated))
    except RetrofitError:  # a network that no trace can follow keeps its constants in layers of their own
        return {}
    feeders: dict[nn.Module, nn.Module] = {}
    for site in found.sites:
        norm: Any = net.get_submodule(site.norm)
        feeder = None if site.feeder is None or site.places > 1 else net.get_submodule(site.feeder)
        linear = isinstance(feeder, nn.modules.conv._ConvNd) and not isinstance(feeder, WeightStandardization)
        if feeder is not None and linear and out_channels(feeder) == norm.running_mean.numel():
            feeders[norm] = feeder
    return feeders
