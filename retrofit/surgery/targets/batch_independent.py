"""Targets gn, ln, gn-pn and ln-pn: BatchNorm to group normalization, and its activation to a proxy-normalized one.

The running statistics are migrated and the strength starts at 0, where the network is the source in evaluation. With
ProxyNorm, every activation that directly follows a converted layer is replaced at that call alone. A GroupNorm that the
network has already stays as it is, and its activation becomes a proxy-normalized one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import UsageError
from retrofit.graph.rewrite import replace_activation, replace_module
from retrofit.graph.sites import Site, Sites
from retrofit.layers import MigratedGroupNorm, MigratedGroupNormAct, ProxyNorm
from retrofit.layers.migrated_group_norm import group_gain, settled_eps
from retrofit.surgery.activations import activation_problem, plan_activations, sites_of
from retrofit.surgery.converter import TARGETS, Converter, Decisions, adopt
from retrofit.surgery.convolutions import describe, plan_convolutions, standardized
from retrofit.surgery.families import NormLayer
from retrofit.surgery.group_count import group_count, most_groups
from retrofit.surgery.plan_and_report import EditRow, LayerRow, Plan
from retrofit.utils.running import device_of
from retrofit.utils.text import plural

_MBCONV = ("InvertedResidual", "DepthwiseSeparableConv", "EdgeResidual")


class BatchIndependentConverter(Converter):
    """BatchNorm to `MigratedGroupNorm`, optionally with ProxyNorm and weight standardization."""

    changes_sets = True

    def __init__(self, groups: int, proxy: bool) -> None:
        self.groups = groups  # the most that a layer gets unless the caller says otherwise
        self.takes_activations = proxy
        self.sources = frozenset({"bn", "frozen-bn", "gn"} if proxy else {"bn", "frozen-bn"})

    def plan(self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions) -> Decisions:
        """Convert every BatchNorm that has running statistics; trace and measure where the options ask for it."""
        if options.pn_restore is not None and not (self.takes_activations or options.ws):
            raise UsageError("`pn_restore` means nothing without ProxyNorm or `ws`; leave it out")
        given = [name for name in ("groups", "group_channels") if getattr(options, name) is not None]
        if given and layers and all(layer.family == "gn" for layer in layers):
            raise UsageError(f"`{given[0]}` means nothing to GroupNorm that is there, whose groups stay; leave it out")
        measured: dict[str, tuple[int, float]] = {}
        if options.groups == "auto":
            if options.calibrate is None:
                raise UsageError("`groups='auto'` measures on images; pass some with `calibrate`")
            measured = most_groups(model, [layer for layer in layers if _migratable(layer)], options.calibrate)
        sites = sites_of(model, self.sources) if self.takes_activations else Sites([], [], {})
        rows = []
        for layer in layers:
            if layer.family == "gn" and self.takes_activations:
                rows.append(self._proxied_group_norm(model, layer, sites))
            else:
                rows.append(self._migrated(layer, options, measured.get(layer.name), sites))
        converted = {row.name for row in rows if row.status == "converted"}
        restore = options.pn_restore is not False
        edits: list[EditRow] = []
        if self.takes_activations:
            given_to_all = {"params": options.pn_params is not False, "restore": restore}
            edits = plan_activations(
                model, sites, converted, settle=lambda site: {**given_to_all, "scale": not site.last_before_pool}
            )
        if options.ws:
            edits += plan_convolutions(model, converted, restore)
        return Decisions(rows, edits, sites)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        """Build the migrated layer around the source's tensors."""
        cls = MigratedGroupNormAct if row.target == MigratedGroupNormAct.__name__ else MigratedGroupNorm
        groups, mean = row.options["num_groups"], module.running_mean
        own = {"group_eps": row.options["eps"], "strength": 0.0, "device": device, "dtype": mean.dtype}
        new = adopt(cls(groups, mean.numel(), module.eps, **own), module)
        if (gain := group_gain(module.weight, groups)) is not None:
            new.gain = gain.to(mean.dtype)
        if row.options.get("bias") is False:
            new.register_parameter("bias", None)
        return new

    def finish(self, model: nn.Module, plan: Plan, sites: Mapping[tuple[str, int], Site]) -> Sequence[str]:
        """Replace the planned activations and convolutions."""
        added = 0
        for row in plan.edits:
            if row.status != "converted":
                continue
            if row.kind == "convolution":
                replace_module(model, row.name, standardized(model.get_submodule(row.name), **row.options))
            else:
                proxied = _replace_activation(model, sites[row.norm, row.place], row)
                added += sum(parameter.numel() for parameter in proxied.parameters(recurse=False))
        notes = describe(plan.edits)
        if added:
            notes.append(
                f"ProxyNorm adds {added:,} parameters (proxy_bias, proxy_scale; the paper decays them): an optimizer "
                "built before the conversion does not hold them, so build it again, of "
                "retrofit.finetune.parameter_groups"
            )
        return notes

    def _proxied_group_norm(self, model: nn.Module, layer: NormLayer, sites: Sites) -> LayerRow:
        """Decide a GroupNorm: it stays, and counts as converted where the activation behind it is."""
        groups = getattr(layer.layer, "num_groups", 0)
        if self.groups == 1 and groups != 1:
            return layer.row("unsupported", f"its {groups} groups stay as they are; use `to='gn-pn'`")
        own = [site for site in sites.sites if site.norm == layer.name and site.activation is not None]
        if all(activation_problem(model, site) for site in own):
            return layer.row("kept", "GroupNorm already, with no activation behind it to proxy-normalize")
        reason = f"GroupNorm already: its {plural(groups, 'group')} stay, its activation is proxy-normalized"
        return layer.row("converted", reason, layer.label)

    def _migrated(
        self, layer: NormLayer, options: ConversionOptions, measured: tuple[int, float] | None, sites: Sites
    ) -> LayerRow:
        """Decide a layer of any other family."""
        if layer.family not in ("bn", "frozen-bn"):
            reason = f"{layer.family_name} is batch-independent already: it has nothing to migrate"
            return layer.row("unsupported", reason)
        if not _migratable(layer):
            return layer.row("unsupported", "it tracks no running statistics, so there is nothing to migrate")
        module = layer.layer
        if measured is not None:
            groups, change = measured
            reason = f"with {plural(groups, 'group')} its output changes by {change:.0%}"
        else:
            groups, reason = group_count(layer.name, module.running_mean.numel(), options, self.groups)
        settled: dict[str, Any] = {"num_groups": groups}
        settled["eps"] = settled_eps(module.weight, module.running_var, module.eps, groups)
        if self._drops_shift(layer, options, sites):
            settled["bias"] = False
        cls = MigratedGroupNormAct if hasattr(module, "act") else MigratedGroupNorm
        return layer.row("converted", reason, cls.__name__, **settled)

    def _drops_shift(self, layer: NormLayer, options: ConversionOptions, sites: Sites) -> bool:
        """Whether the layer is the last of an EfficientNet block that is to be trained from scratch with ProxyNorm.

        The paper keeps only the scale of that affine (appendix A.1); it can, at no change, while the shift is zero.
        """
        if not self.takes_activations or options.pn_params is False or options.pn_restore is not False:
            return False
        bias = getattr(layer.layer, "bias", None)
        if not isinstance(bias, torch.Tensor) or bias.is_meta or bool(bias.any()):
            return False
        own = [site for site in sites.sites if site.norm == layer.name]
        return any(site.activation is None and site.owner_type in _MBCONV for site in own)


def _migratable(layer: NormLayer) -> bool:
    return layer.family in ("bn", "frozen-bn") and getattr(layer.layer, "running_mean", None) is not None


def _replace_activation(model: nn.Module, site: Site, row: EditRow) -> ProxyNorm:
    """Put a ProxyNorm in place of the activation that follows a converted norm, at this site alone."""
    act = site.activation
    assert act is not None
    norm: Any = model.get_submodule(site.norm)
    like = next((tensor for tensor in (*norm.parameters(), *norm.buffers())), None)
    placed = {"device": device_of(model)} if like is None else {"device": like.device, "dtype": like.dtype}
    proxied = ProxyNorm(act.module, norm.num_channels, norm=norm, **row.options, strength=0.0, **placed)
    proxied.train(norm.training)
    replace_activation(model, site, proxied, "proxy")
    return proxied


TARGETS["gn"] = BatchIndependentConverter(groups=8, proxy=False)
TARGETS["ln"] = BatchIndependentConverter(groups=1, proxy=False)
TARGETS["gn-pn"] = BatchIndependentConverter(groups=8, proxy=True)
TARGETS["ln-pn"] = BatchIndependentConverter(groups=1, proxy=True)
