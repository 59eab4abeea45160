"""Targets gn, ln, gn-pn and ln-pn: BatchNorm to group normalization, and its activation to a proxy-normalized one.

The running statistics are migrated and the strength starts at 0, where the network is the source in evaluation. With
ProxyNorm, every activation that directly follows a converted layer is replaced at that call alone. A GroupNorm that the
network has already stays as it is, and its activation becomes a proxy-normalized one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import UsageError
from retrofit.graph.rewrite import replace_activation, replace_module, rewrite_problem
from retrofit.graph.sites import Site, Sites
from retrofit.layers import MigratedGroupNorm, MigratedGroupNormAct, ProxyNorm
from retrofit.layers.migrated_group_norm import group_gain, settled_eps
from retrofit.surgery.converter import (
    Converter,
    Decision,
    Decisions,
    adopt,
    count_batches,
    left_activations,
    materialize_at_zero,
    planned_sites,
    register,
    sites_of,
)
from retrofit.surgery.convolutions import STANDARDIZED, describe, plan_convolutions
from retrofit.surgery.families import FAMILIES, NormLayer
from retrofit.surgery.group_count import group_count, most_groups
from retrofit.surgery.plan_and_report import EditRow, LayerRow, Plan
from retrofit.utils.placement import device_of
from retrofit.utils.text import plural

_BATCH = frozenset({"bn", "frozen-bn"})
_FUSED = ("BatchNormAct2d", "SyncBatchNormAct", "FrozenBatchNormAct2d", "FrozenBatchNormAct")
_MBCONV = ("InvertedResidual", "DepthwiseSeparableConv", "EdgeResidual")


class BatchIndependentConverter(Converter):
    """BatchNorm to `MigratedGroupNorm`, optionally with ProxyNorm and weight standardization.

    Args:
        groups: The most groups a layer gets unless the caller says otherwise.
        proxy: Whether activations become proxy-normalized.
    """

    changes_sets = True

    def __init__(self, groups: int, proxy: bool) -> None:
        self.groups = groups
        self.proxy = self.takes_activations = proxy
        self.sources = _BATCH | {"gn"} if proxy else _BATCH

    def plan(self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions) -> Decisions:
        """Convert every BatchNorm that has running statistics; trace and measure where the options ask for it."""
        if options.pn_restore is not None and not (self.proxy or options.ws):
            raise UsageError("`pn_restore` means nothing without ProxyNorm or `ws`; leave it out")
        own = [name for name in ("groups", "group_channels") if getattr(options, name) is not None]
        if own and layers and all(layer.family == "gn" for layer in layers):
            raise UsageError(f"`{own[0]}` means nothing to GroupNorm that is there, whose groups stay; leave it out")
        picked: dict[str, tuple[int, float]] = {}
        if options.groups == "auto":
            if options.calibrate is None:
                raise UsageError("`groups='auto'` measures on images; pass some with `calibrate`")
            taken = [layer for layer in layers if layer.family in _BATCH and _migratable(layer.layer)]
            picked = most_groups(model, taken, options.calibrate) if taken else {}
        sites = sites_of(model, self.sources) if self.proxy else Sites([], [], {})
        followed = {site.norm for site in sites.sites if site.activation and not _activation_problem(model, site)}
        decided = {
            layer.name: self._keep_groups(layer, layer.name in followed)
            if layer.family == "gn" and self.proxy
            else self._decide(layer, options, picked.get(layer.name), sites)
            for layer in layers
        }
        converted = {name for name, decision in decided.items() if decision.status == "converted"}
        return Decisions(decided, self._edits(model, converted, options, sites), sites)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        """Build the migrated layer around the source's tensors; a GroupNorm is its own counterpart."""
        if row.target == row.source:
            return module
        cls = MigratedGroupNormAct if row.target == MigratedGroupNormAct.__name__ else MigratedGroupNorm
        affine = module.weight is not None
        groups, eps = row.options["num_groups"], row.options["eps"]
        new = cls(groups, module.running_mean.numel(), eps, affine, "meta", strength=0.0)
        adopt(new, module)
        new.set_eps(module.eps, eps, device, new.running_mean.dtype)
        count_batches(new, device)
        gain = group_gain(module.weight, groups)
        new.register_buffer("gain", torch.ones_like(new.running_mean) if gain is None else gain)
        if row.options.get("bias") is False:
            new.register_parameter("bias", None)
        materialize_at_zero(new, device)
        return new

    def survey(self, model: nn.Module, plan: Plan) -> dict[tuple[str, int], Site]:
        """Look up, before the layers change, the places that the plan is about."""
        if not any(row.status == "converted" for row in plan.edits):
            return {}
        return planned_sites(model, plan, self.sources)

    def finish(self, model: nn.Module, plan: Plan, surveyed: dict[tuple[str, int], Site]) -> tuple[str, ...]:
        """Replace the planned activations and convolutions."""
        added = 0
        for row in plan.edits:
            if row.status != "converted":
                continue
            if row.kind == "convolution":
                replace_module(model, row.name, _standardized(model.get_submodule(row.name), **row.options))
            else:
                proxied = _replace_activation(model, surveyed[row.norm, row.place], row)
                added += sum(parameter.numel() for parameter in proxied.parameters(recurse=False))
        notes = describe(plan.edits)
        if not added:
            return notes
        return (
            *notes,
            f"ProxyNorm adds {added:,} parameters (proxy_bias, proxy_scale; the paper decays them): an optimizer built "
            "before the conversion does not hold them, so build it again, of retrofit.finetune.parameter_groups",
        )

    def _keep_groups(self, found: NormLayer, followed: bool) -> Decision:
        """Decide a GroupNorm: it stays, and counts as converted where the activation behind it is."""
        groups = getattr(found.layer, "num_groups", 0)
        if self.groups == 1 and groups != 1:
            return Decision("unsupported", reason=f"its {groups} groups stay as they are; use `to='gn-pn'`")
        if not followed:
            return Decision("kept", reason="GroupNorm already, with no activation behind it to proxy-normalize")
        reason = f"GroupNorm already: its {plural(groups, 'group')} stay, its activation is proxy-normalized"
        return Decision("converted", found.label, reason)

    def _decide(
        self, found: NormLayer, options: ConversionOptions, picked: tuple[int, float] | None, sites: Sites
    ) -> Decision:
        if found.family not in _BATCH:
            family = FAMILIES[str(found.family)]
            return Decision("unsupported", reason=f"{family} is batch-independent already: it has nothing to migrate")
        module: Any = found.layer
        if not _migratable(module):
            return Decision("unsupported", reason="it tracks no running statistics, so there is nothing to migrate")
        channels = module.running_mean.numel()
        if picked is not None:
            groups, error = picked
            reason = f"with {plural(groups, 'group')} its output changes by {error:.0%}"
        else:
            groups, reason = group_count(found.name, channels, options, self.groups)
        eps = settled_eps(module.weight, module.running_var, module.eps, groups)
        settled: dict[str, Any] = {"num_groups": groups, "eps": eps}
        if self._drops_shift(found, options, sites):
            settled["bias"] = False
        target = MigratedGroupNormAct if found.known_class in _FUSED else MigratedGroupNorm
        return Decision("converted", target.__name__, reason, settled)

    def _edits(
        self, model: nn.Module, converted: set[str], options: ConversionOptions, sites: Sites
    ) -> tuple[EditRow, ...]:
        """Decide every activation, and with weight standardization every convolution."""
        made: list[EditRow] = []
        if self.proxy:
            settled = {"params": options.pn_params is not False, "restore": options.pn_restore is not False}
            made += [_activation(model, site, converted, settled) for site in sites.sites if site.activation]
            made += left_activations(sites, converted)
        if options.ws:
            made += plan_convolutions(model, converted, options.pn_restore is not False)
        return tuple(made)

    def _drops_shift(self, found: NormLayer, options: ConversionOptions, sites: Sites) -> bool:
        """Whether the layer is the last of an EfficientNet block that is to be trained from scratch with ProxyNorm.

        The paper keeps only the scale of that affine (appendix A.1); it can, at no change, while the shift is zero.
        """
        if not self.proxy or options.pn_params is False or options.pn_restore is not False:
            return False
        bias = getattr(found.layer, "bias", None)
        if not isinstance(bias, torch.Tensor) or bias.is_meta or bool(bias.any()):
            return False
        return any(
            site.norm == found.name and site.activation is None and site.owner_type in _MBCONV for site in sites.sites
        )


def _migratable(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def _activation(model: nn.Module, site: Site, converted: set[str], settled: dict[str, Any]) -> EditRow:
    """Decide the activation that follows a site's norm."""
    act = site.activation
    assert act is not None
    reason = _activation_problem(model, site) if site.norm in converted else "its norm is not converted"
    row = EditRow(act.name, act.type, "activation", "left", reason, site.norm, site.place)
    return row if reason else replace(row, status="converted", options={**settled, "scale": not site.last_before_pool})


def _activation_problem(model: nn.Module, site: Site) -> str:
    """Why the activation of a site stays as it is; empty if it can be replaced."""
    assert site.activation is not None
    return "inside a squeeze-excite" if site.in_squeeze_excite else rewrite_problem(model, site.activation)


def _replace_activation(model: nn.Module, site: Site, row: EditRow) -> ProxyNorm:
    """Put a ProxyNorm in place of the activation that follows a converted norm, at this site alone."""
    act = site.activation
    assert act is not None
    norm: Any = model.get_submodule(site.norm)
    like = next((tensor for tensor in (*norm.parameters(), *norm.buffers())), None)
    proxied = ProxyNorm(
        act.module,
        norm.num_channels,
        norm=norm,
        **row.options,
        strength=0.0,
        device=device_of(model) if like is None else like.device,
        dtype=None if like is None else like.dtype,
    )
    proxied.train(norm.training)
    if act.kind == "fused":
        norm.act = proxied
    else:
        replace_activation(model, site, proxied, "proxy")
    return proxied


def _standardized(conv: Any, restore: bool, scale: bool = False) -> nn.Module:
    """Return the weight-standardised twin of a convolution, around its tensors.

    Without `restore`, a learned scale starts where the block keeps the size that the initialization gave it.
    """
    new = STANDARDIZED[type(conv)](
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
        scale=scale,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    adopt(new, conv)
    if restore:
        new.seed_restore()
    else:
        new.seed_scale()
    return new


register("gn", "BatchNorm to GroupNorm, running statistics migrated", BatchIndependentConverter, groups=8, proxy=False)
register("ln", "BatchNorm to LayerNorm (one group), the same", BatchIndependentConverter, groups=1, proxy=False)
register("gn-pn", "gn, and activations to ProxyNorm activations", BatchIndependentConverter, groups=8, proxy=True)
register("ln-pn", "ln, and activations to ProxyNorm activations", BatchIndependentConverter, groups=1, proxy=True)
