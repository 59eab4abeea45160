"""Targets gn, ln, gn-pn and ln-pn: BatchNorm to group normalization, and its activation to a proxy-normalized one.

The running statistics are migrated and the strength starts at 0, where the network is the source in evaluation. With
ProxyNorm, every activation that directly follows a converted layer is replaced at that call alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.records import Found as Sites
from retrofit.graph.records import Site
from retrofit.graph.rewrite import check_call, replace_call, replace_module
from retrofit.graph.sites import find_sites
from retrofit.layers import MigratedGroupNorm, MigratedGroupNormAct, ProxyNorm
from retrofit.layers import weight_standard as ws
from retrofit.layers.migrated import group_gain
from retrofit.layers.whitening import largest_divisor
from retrofit.surgery.census import FAMILIES, Found, classify
from retrofit.surgery.converters import DECORRELATED, NORMALITY, Converter, Decision, Options, adopt, register
from retrofit.surgery.groups import most_groups
from retrofit.surgery.records import EditRow, LayerRow, Plan

_FUSED = ("BatchNormAct2d", "SyncBatchNormAct")
_MBCONV = ("InvertedResidual", "DepthwiseSeparableConv", "EdgeResidual")
_STANDARDIZED: dict[type[nn.Module], type[ws.WeightStandardization]] = {
    nn.Conv1d: ws.WeightStandardizedConv1d,
    nn.Conv2d: ws.WeightStandardizedConv2d,
    nn.Conv3d: ws.WeightStandardizedConv3d,
}


class BatchIndependentConverter(Converter):
    """BatchNorm to `MigratedGroupNorm`, optionally with ProxyNorm and weight standardization.

    Args:
        groups: The most groups a layer gets unless the caller says otherwise.
        proxy: Whether activations become proxy-normalized.
    """

    sources = frozenset({"bn"})

    def __init__(self, groups: int, proxy: bool) -> None:
        self.groups = groups
        self.proxy = proxy
        self.auto: dict[str, tuple[int, float]] = {}
        self.sites = Sites([], [], {})

    def prepare(self, model: nn.Module, found: list[Found], options: Options) -> None:
        """Check the options, trace the model where its graph matters, and measure where groups are to be picked."""
        options.refuse("group normalization", *NORMALITY, *DECORRELATED)
        if not self.proxy:
            options.refuse("no ProxyNorm", "pn_params", *(() if options.ws else ("pn_restore",)))
        if self.groups == 1:
            options.refuse("LayerNorm is one group", "groups")
        if isinstance(options.groups, int) and options.groups < 1:
            raise UsageError(f"groups must be at least 1, not {options.groups}; the paper uses 8")
        if options.groups == "auto":
            if options.calibrate is None:
                raise UsageError("groups auto measures on images; pass some with --calibrate")
            norms = {layer.name: layer.module for layer in found if layer.family == "bn" and _migratable(layer.module)}
            self.auto = most_groups(model, norms, options.calibrate)
        if self.proxy or options.ws:
            self._trace(model)

    def decide(self, found: Found, options: Options) -> Decision:
        """Convert every BatchNorm that has running statistics."""
        if found.family != "bn":
            family = FAMILIES[str(found.family)]
            return Decision("unsupported", reason=f"{family} is batch-independent already: it has nothing to migrate")
        module: Any = found.module
        if not _migratable(module):
            return Decision("unsupported", reason="it tracks no running statistics, so there is nothing to migrate")
        channels = module.num_features
        if options.groups == "auto":
            groups, error = self.auto[found.name]
            reason = f"{groups} groups change its output by {error:.0%}"
        else:
            wanted = self.groups if options.groups is None else options.groups
            groups = largest_divisor(channels, wanted)
            reason = "" if groups == wanted else f"{groups} groups: {wanted} do not divide {channels} channels"
        settled: dict[str, Any] = {"num_groups": groups, "eps": _group_eps(module, groups)}
        if self._drops_shift(found, options):
            settled["bias"] = False
        target = MigratedGroupNormAct if found.label in _FUSED else MigratedGroupNorm
        return Decision("converted", target.__name__, reason, settled)

    def edits(self, model: nn.Module, rows: list[LayerRow], options: Options) -> tuple[EditRow, ...]:
        """Decide every activation, and with weight standardization every convolution before a converted layer."""
        converted = {row.name for row in rows if row.status == "converted"}
        made: list[EditRow] = []
        if self.proxy:
            settled = {"params": options.pn_params is not False, "restore": options.pn_restore is not False}
            made += [_activation(model, site, converted, settled) for site in self.sites.sites if site.activation]
            made += [EditRow(left.name, left.type, "activation", "left", left.reason) for left in self.sites.left]
        if options.ws:
            restore = {"restore": options.pn_restore is not False}
            made += [_convolution(model, site, restore) for site in self.sites.sites if site.norm in converted]
        return tuple(made)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        """Build the migrated layer around the source's tensors."""
        cls = MigratedGroupNormAct if row.target == MigratedGroupNormAct.__name__ else MigratedGroupNorm
        affine = module.weight is not None
        groups, eps = row.options["num_groups"], row.options["eps"]
        new = cls(groups, module.num_features, eps, affine, "meta", source_eps=module.eps, strength=0.0)
        adopt(new, module)
        gain = group_gain(module.weight, groups)
        new.register_buffer("gain", torch.ones_like(new.running_mean) if gain is None else gain)
        if row.options.get("bias") is False:
            new.register_parameter("bias", None)
        new.register_buffer("strength", torch.zeros((), dtype=torch.float32, device=device))
        return new

    def begin(self, model: nn.Module, plan: Plan) -> None:
        """Find again, before the layers change, the places that the plan is about."""
        if any(row.status == "converted" for row in plan.edits):
            self._trace(model)

    def finish(self, model: nn.Module, plan: Plan) -> tuple[str, ...]:
        """Replace the planned activations and convolutions."""
        sites = {(site.norm, site.place): site for site in self.sites.sites}
        added = 0
        for row in plan.edits:
            if row.status != "converted":
                continue
            if row.kind == "convolution":
                replace_module(model, row.name, _standardized(model.get_submodule(row.name), row.options["restore"]))
            else:
                proxied = _replace_activation(model, sites[row.norm, row.place], row)
                added += sum(parameter.numel() for parameter in proxied.parameters(recurse=False))
        if not added:
            return ()
        return (
            f"ProxyNorm adds {added:,} parameters (proxy_bias, proxy_scale; the paper decays them): an optimizer built "
            "before the conversion does not hold them, so build it again",
        )

    def _trace(self, model: nn.Module) -> None:
        self.sites = find_sites(model, lambda module: getattr(classify("", module), "family", None) == "bn")

    def _drops_shift(self, found: Found, options: Options) -> bool:
        """Whether the layer is the last of an EfficientNet block that is to be trained from scratch with ProxyNorm.

        The paper keeps only the scale of that affine (appendix A.1); it can, at no change, while the shift is zero.
        """
        if not self.proxy or options.pn_params is False or options.pn_restore is not False:
            return False
        bias = getattr(found.module, "bias", None)
        if not isinstance(bias, torch.Tensor) or bias.is_meta or bool(bias.any()):
            return False
        return any(
            site.norm == found.name and site.activation is None and site.owner_type in _MBCONV
            for site in self.sites.sites
        )


def _migratable(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def _group_eps(module: Any, groups: int) -> float:
    """BatchNorm's eps as it counts in standardised units, so that a group's variance and eps add up to one on average.

    Standardising leaves a channel var / (var + eps) of variance, little where the channel is nearly dead. GroupNorm
    with BatchNorm's own eps would scale what is left up again, and the network with it.
    """
    if module.running_var.is_meta:
        return float(module.eps)
    short = module.eps / (module.running_var.double() + module.eps)
    gain = group_gain(module.weight, groups)
    return float((short if gain is None else gain.square() * short).mean())


def _activation(model: nn.Module, site: Site, converted: set[str], settled: dict[str, Any]) -> EditRow:
    """Decide the activation that follows a site's norm."""
    act = site.activation
    assert act is not None
    reason = ""
    if site.norm not in converted:
        reason = "its norm is not converted"
    elif site.in_squeeze_excite:
        reason = "inside a squeeze-excite"
    elif act.call is not None:
        try:
            check_call(model, act.call)
        except RetrofitError as error:
            reason = str(error)
    if reason:
        return EditRow(act.name, act.type, "activation", "left", reason, site.norm, site.place)
    options = {**settled, "scale": not site.last_before_pool}
    return EditRow(act.name, act.type, "activation", "converted", "", site.norm, site.place, options)


def _convolution(model: nn.Module, site: Site, settled: dict[str, Any]) -> EditRow:
    """Decide the convolution that feeds a site's norm."""
    if site.feeder is None:
        return EditRow("", "", "convolution", "left", site.feeder_reason, site.norm, site.place)
    conv: Any = model.get_submodule(site.feeder)
    reason = ""
    if type(conv) not in _STANDARDIZED:
        reason = "not one of torch's own convolutions"
    elif conv.weight[0].numel() < 2:
        reason = "each output channel has a single weight"
    elif site.in_squeeze_excite:
        reason = "inside a squeeze-excite"
    return EditRow(
        site.feeder,
        type(conv).__name__,
        "convolution",
        "left" if reason else "converted",
        reason,
        site.norm,
        site.place,
        {} if reason else settled,
    )


def _replace_activation(model: nn.Module, site: Site, row: EditRow) -> ProxyNorm:
    """Put a ProxyNorm in place of the activation that follows a converted norm, at this site alone."""
    act = site.activation
    assert act is not None
    norm: Any = model.get_submodule(site.norm)
    proxied = ProxyNorm(
        act.module,
        norm.num_channels,
        norm=norm,
        **row.options,
        strength=0.0,
        device=norm.running_mean.device,
        dtype=norm.running_mean.dtype,
    )
    proxied.train(norm.training)
    if act.kind == "fused":
        norm.act = proxied
    elif act.call is None:
        replace_module(model, act.name, proxied)
    else:
        name = site.norm.removeprefix(f"{act.owner}.").replace(".", "_")
        replace_call(model, act.call, proxied, f"{name}_proxy" + (f"_{site.place}" if site.places > 1 else ""))
    return proxied


def _standardized(conv: Any, restore: bool) -> nn.Module:
    """Return the weight-standardised twin of a convolution, around its tensors."""
    new = _STANDARDIZED[type(conv)](
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.bias is not None,
        conv.padding_mode,
        strength=0.0,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    adopt(new, conv)
    if restore:
        new.seed_restore()
    return new


register("gn", "BatchNorm to GroupNorm, running statistics migrated", BatchIndependentConverter, groups=8, proxy=False)
register("ln", "BatchNorm to LayerNorm (one group), the same", BatchIndependentConverter, groups=1, proxy=False)
register("gn-pn", "gn, and activations to ProxyNorm activations", BatchIndependentConverter, groups=8, proxy=True)
register("ln-pn", "ln, and activations to ProxyNorm activations", BatchIndependentConverter, groups=1, proxy=True)
