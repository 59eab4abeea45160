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

from retrofit import layers
from retrofit.errors import RetrofitError
from retrofit.export.folding.linear import fold_after, out_channels
from retrofit.export.forms.operations import FunctionModule
from retrofit.graph.find_sites import find_sites
from retrofit.graph.kinds import is_altered
from retrofit.graph.rewrite import replace_module
from retrofit.layers import FrozenBatchNorm, MigratedGroupNorm, NormalityMixin, ProxyNorm, StrengthMixin
from retrofit.layers.constant_affine import ConstantAffine
from retrofit.layers.decorrelated_batch_norm import DecorrelatedNorm
from retrofit.layers.leaf import LeafMixin
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.record import set_record
from retrofit.surgery.execute import reference_of
from retrofit.utils.copying import copied

_Migrated = MigratedGroupNorm | FrozenBatchNorm
_KNOWN = (MigratedGroupNorm, NormalityMixin, DecorrelatedNorm, ProxyNorm, WeightStandardization)


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
    constants = {layer: layer.constants(torch.float64) for layer in net.modules() if isinstance(layer, ProxyNorm)}
    for name, layer in reversed(list(net.named_modules())):  # what a layer holds before the layer
        new = _plain(layer, feeders, constants)
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
    reason = _hindrance(layer)
    if reason:
        raise RetrofitError(f"no layer of torch or timm computes what this one does: {reason}")
    with torch.no_grad():
        constants = {layer: layer.constants(torch.float64)} if isinstance(layer, ProxyNorm) else {}
        return _plain(layer, {}, constants)


def _hindrance(layer: nn.Module) -> str:
    """Why a layer has no plain form; empty if it has, or is no layer of ours."""
    if isinstance(layer, MigratedGroupNorm) and float(layer.strength) not in (0.0, 1.0):
        return f"at strength {float(layer.strength):g} it lies between BatchNorm and GroupNorm; set_strength(model, 1)"
    if isinstance(layer, DecorrelatedNorm) and float(layer.strength) > 0:
        return "it whitens; set_strength(model, 0) leaves BatchNorm, export_onnx takes it as it is"
    if isinstance(layer, NormalityMixin) and float(layer.strength) > 0 and (layer.alpha > 0 or layer.noise > 0):
        return "it has a power transform; set_strength(model, 0) leaves its source, export_onnx takes it as it is"
    if isinstance(layer, StrengthMixin) and not isinstance(layer, _KNOWN):
        return f"nobody has said what a {type(layer).__name__} is in plain layers; export_onnx takes it as it is"
    return ""


def _altered(layer: nn.Module) -> str:
    if isinstance(layer, StrengthMixin | FrozenBatchNorm) and is_altered(layer):
        return "it has hooks, or a forward of its own; remove them first"
    return ""


def _plain(layer: Any, feeders: dict[nn.Module, nn.Module], constants: dict[Any, Any]) -> nn.Module | None:
    if isinstance(layer, ProxyNorm):
        scale, shift = constants[layer]
        act = layer.activation if isinstance(layer.activation, nn.Module) else FunctionModule(layer.activation)
        like = layer.restore_shift if layer.restore_shift is not None else layer.strength
        affine = ConstantAffine(scale.to(like.dtype), shift.to(like.dtype), layer.channel_dim)
        return nn.Sequential(OrderedDict(act=act, affine=affine))
    if isinstance(layer, WeightStandardization):
        return layer.plain_convolution()
    if isinstance(layer, MigratedGroupNorm) and float(layer.strength) == 1.0:
        return _group_norm(layer, feeders.get(layer))
    frozen = getattr(layer, "frozen", False) and getattr(layer, "running_mean", None) is not None
    if isinstance(layer, _Migrated) or frozen:
        return _affine(layer, feeders.get(layer))
    if isinstance(layer, NormalityMixin | DecorrelatedNorm):
        return _source(layer)
    return None


def _group_norm(layer: MigratedGroupNorm, feeder: nn.Module | None) -> nn.Module:
    """GroupNorm behind the constants of a migrated layer at strength 1."""
    new: Any
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if isinstance(layer, layers.MigratedGroupNormAct) and any(True for _ in layer.act.buffers()):
        parts.update(drop=layer.drop, act=layer.act)  # constants, which are better not inside a layer that is trained
    if isinstance(layer, layers.MigratedGroupNormAct) and not parts:
        from timm.layers import GroupNormAct

        new = GroupNormAct(layer.num_channels, layer.num_groups, float(layer.eps), device="meta")
        new.drop, new.act = layer.drop, layer.act
    else:
        new = nn.GroupNorm(layer.num_groups, layer.num_channels, float(layer.eps), device="meta")
    gain, weight = layer.gain.double(), layer.weight
    given = torch.ones_like(layer.gain) if weight is None else weight
    trained = weight is not None and weight.requires_grad
    new.weight = nn.Parameter((given.double() / gain).to(given.dtype), requires_grad=trained)
    new.register_parameter("bias", layer.bias)
    return _behind(layer.input_affine(), feeder, layer.gain, OrderedDict(norm=new, **parts))


def _affine(layer: Any, feeder: nn.Module | None) -> nn.Module:
    """The constants of a frozen layer, or a migrated one at strength 0, and gamma and beta as a pointwise convolution.

    With a convolution before it all of it goes in there.
    """
    if isinstance(layer, MigratedGroupNorm):
        scale, shift = layer.input_affine()
        scale, shift = scale / layer.gain.double(), shift / layer.gain.double()
    else:
        scale = torch.rsqrt(layer.running_var.double() + layer.eps)
        shift = -layer.running_mean.double() * scale
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    weight, bias = layer.weight, layer.bias
    if feeder is not None:
        if weight is not None:
            scale, shift = scale * weight.double(), shift * weight.double()
        shift = shift if bias is None else shift + bias.double()
    elif weight is not None:
        conv = Pointwise(len(weight), bias is not None)
        conv.weight = nn.Parameter(weight.detach().clone().view(-1, 1, 1), weight.requires_grad)
        conv.bias = bias
        parts["norm"] = conv
    parts.update({name: layer._modules[name] for name in ("drop", "act") if layer._modules.get(name) is not None})
    return _behind((scale, shift), feeder, layer.running_mean, parts)


class Pointwise(LeafMixin, nn.Conv1d):
    """weight * x + bias per channel of (N, C, *), as a convolution: per-sample gradients know those."""

    def __init__(self, channels: int, bias: bool) -> None:
        super().__init__(channels, channels, 1, groups=channels, bias=bias, device="meta")

    def forward(self, input: Tensor) -> Tensor:
        """Apply the map to `input`."""
        return super().forward(input.flatten(2) if input.ndim > 2 else input.unsqueeze(-1)).view(input.shape)


def _behind(
    constants: tuple[Tensor, Tensor], feeder: nn.Module | None, like: Tensor, parts: OrderedDict[str, nn.Module]
) -> nn.Module:
    """Put layers behind a constant affine, which goes into the convolution before where there is one."""
    parts = OrderedDict((name, part) for name, part in parts.items() if type(part) is not nn.Identity)
    if feeder is not None:
        fold_after(feeder, *constants)
    else:
        scale, shift = constants
        affine = ConstantAffine(scale.to(like.dtype), shift.to(like.dtype))
        parts = OrderedDict(affine=affine, **parts)
    if len(parts) < 2:
        return next(iter(parts.values()), nn.Identity())
    return nn.Sequential(parts)


def _source(layer: Any) -> nn.Module:
    """The source's layer of one at strength 0, around its tensors."""
    import timm.layers

    own = type(layer).__mro__
    name = next(cls.__name__ for cls in own if cls.__module__.startswith("retrofit.layers") and cls.__name__[0] != "_")
    name = name.replace("Decorrelated", "").replace("NormalNorm", "Norm")
    cls: Any = getattr(nn, name, None) or getattr(timm.layers, name)
    if isinstance(layer, nn.LayerNorm):
        shape = layer.normalized_shape if cls is nn.LayerNorm else layer.normalized_shape[0]
        new = cls(shape, layer.eps, device="meta")
    elif isinstance(layer, nn.GroupNorm):
        new = nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, device="meta")
        if cls is not nn.GroupNorm:
            new = cls(layer.num_channels, layer.num_groups, layer.eps, device="meta")
    else:
        settings = {"affine": layer.affine, "track_running_stats": layer.track_running_stats}
        new = cls(layer.num_features, layer.eps, layer.momentum, **settings, device="meta")
    for key in ("weight", "bias"):
        new.register_parameter(key, getattr(layer, key))
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        if hasattr(layer, key):
            new._buffers[key] = getattr(layer, key)
    for key in ("drop", "act"):
        if key in layer._modules:
            setattr(new, key, layer._modules[key])
    if hasattr(layer, "process_group"):
        new.process_group = layer.process_group
    return new


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
