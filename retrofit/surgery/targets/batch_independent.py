"""Targets gn, ln, gn-pn and ln-pn: BatchNorm to group normalization, and its activation to a
proxy-normalized one.

The running statistics are migrated and the strength starts at 0, where the network is the source in
evaluation. With ProxyNorm, every activation that directly follows a converted layer is replaced at
that call alone. A GroupNorm that the network has already stays as it is, and its activation becomes
a proxy-normalized one.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.norm_sites import Site, Sites
from retrofit.graph.rewrite import replace_activation, replace_module
from retrofit.layers import ProxyNorm
from retrofit.layers.group_migration import group_gain, migrated_group_norm, settled_eps
from retrofit.registry import layer_named
from retrofit.surgery.converter import (
    Converter,
    Decisions,
    activation_problem,
    adopt,
    group_count,
)
from retrofit.surgery.norm_layers import NormLayer
from retrofit.surgery.plan_and_report import EditRow, LayerRow, Plan
from retrofit.surgery.targets.standardized_convolutions import (
    note_on_convolutions,
    plan_convolutions,
    standardized,
)
from retrofit.utils.forward_pass import evaluating, hooked, images_of, placement_of
from retrofit.utils.text import plural

# Largest relative change of a layer's output that `most_groups` accepts
_GROUP_TOLERANCE = 0.08
_MOST_GROUPS = 32
_MBCONV = ("InvertedResidual", "DepthwiseSeparableConv", "EdgeResidual")


class BatchIndependentConverter(Converter):
    """BatchNorm to `MigratedGroupNorm`, optionally with ProxyNorm and weight standardization."""

    sources = ("bn", "frozen-bn", "gn")
    changes_sets = True

    def __init__(self, groups: int, proxy: bool) -> None:
        # The most groups that a layer gets, unless the caller says otherwise.
        self.groups = groups
        self.takes_activations = proxy

    def plan(
        self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions
    ) -> Decisions:
        """Decide the fate of each layer, and of what lies around it.

        Raises:
            UsageError: If options mean nothing here, or `groups="auto"` lacks images.
        """
        self._check(layers, options)
        measured: dict[str, tuple[int, str]] = {}
        if options.groups == "auto":
            if options.calibrate is None:
                raise UsageError("`groups='auto'` measures on images; pass some with `calibrate`")
            measured = most_groups(model, filter(_migratable, layers), options.calibrate)
        sites = Sites([], [], {})
        if self.takes_activations:
            sites = self.sites_of(model)
        rows = []
        for layer in layers:
            if layer.family == "gn":
                rows.append(self._proxied_group_norm(model, layer, sites))
            else:
                rows.append(self._migrated(layer, options, measured, sites))
        converted = {row.name for row in rows if row.status == "converted"}
        edits: list[EditRow] = []
        if self.takes_activations:
            settle = partial(_proxy_options, options)
            edits = self.plan_activations(model, sites, converted, "", settle)
        if options.ws:
            edits += plan_convolutions(model, converted, _restores(options))
        return rows, edits, sites

    def _check(self, layers: Sequence[NormLayer], options: ConversionOptions) -> None:
        """Refuse options that mean nothing to this target, or to these layers."""
        if options.pn_restore is not None and not (self.takes_activations or options.ws):
            raise UsageError("`pn_restore` means nothing without ProxyNorm or `ws`; leave it out")
        only_groups = {layer.family for layer in layers} == {"gn"}
        if only_groups and (options.groups or options.group_channels):
            raise UsageError(
                "`groups` and `group_channels` mean nothing to GroupNorm that is there, whose "
                "groups stay; leave them out"
            )

    def converts_in_place(self, layer: NormLayer) -> bool:
        return layer.family == "gn"

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        cls: Any = layer_named(str(row.target))
        mean = module.running_mean
        groups = row.options["num_groups"]
        layer = cls(
            groups,
            mean.numel(),
            module.eps,
            group_eps=row.options["eps"],
            strength=0.0,
            device=device,
            dtype=mean.dtype,
        )
        new = adopt(layer, module)
        gain = group_gain(module.weight, groups)
        if gain is not None:
            new.gain = gain.to(mean.dtype)
        if row.options.get("bias") is False:
            new.register_parameter("bias", None)
        return new

    def finish(
        self, model: nn.Module, plan: Plan, sites: Mapping[tuple[str, int], Site]
    ) -> Sequence[str]:
        added = 0
        for row in plan.edits:
            if row.status != "converted":
                continue
            if row.kind == "convolution":
                new = standardized(model.get_submodule(row.name), **row.options)
                replace_module(model, row.name, new)
            else:
                added += _proxy(model, sites[row.norm, row.place], row)
        convolutions = [row for row in plan.edits if row.kind == "convolution"]
        notes: list[str] = []
        if convolutions:
            notes.append(note_on_convolutions(convolutions))
        if added:
            notes.append(
                f"ProxyNorm adds {added:,} parameters (proxy_bias, proxy_scale; the paper decays "
                "them): an optimizer built before the conversion does not hold them, so build it "
                "again, of retrofit.finetune.parameter_groups"
            )
        return notes

    def _proxied_group_norm(self, model: nn.Module, layer: NormLayer, sites: Sites) -> LayerRow:
        """Decide a GroupNorm: it stays, and counts as converted where its activation is."""
        groups = getattr(layer.layer, "num_groups", 0)
        if self.groups == 1 and groups != 1:
            return layer.row(
                "unsupported", f"its {groups} groups stay as they are; use `to='gn-pn'`"
            )
        calls = [
            site for site in sites.sites if site.norm == layer.name and site.activation is not None
        ]
        if all(activation_problem(model, site) for site in calls):
            return layer.row(
                "kept", "GroupNorm already, with no activation behind it to proxy-normalize"
            )
        reason = (
            f"GroupNorm already: its {plural(groups, 'group')} stay, its activation is "
            "proxy-normalized"
        )
        return layer.row("converted", reason, layer.label)

    def _migrated(
        self,
        layer: NormLayer,
        options: ConversionOptions,
        measured: Mapping[str, tuple[int, str]],
        sites: Sites,
    ) -> LayerRow:
        """Decide a layer of any other family."""
        if not _migratable(layer):
            return layer.row(
                "unsupported", "it tracks no running statistics, so there is nothing to migrate"
            )
        module = layer.layer
        decision = measured.get(layer.name)
        if decision is None:
            channels = module.running_mean.numel()
            decision = group_count(layer.name, channels, options, self.groups)
        groups, reason = decision
        eps = settled_eps(module.weight, module.running_var, module.eps, groups)
        settled: dict[str, Any] = {"num_groups": groups, "eps": eps}
        drops_shift = self._drops_shift(layer, options, sites)
        if drops_shift:
            settled["bias"] = False
        target = "MigratedGroupNorm"
        if hasattr(module, "act"):
            target = "MigratedGroupNormAct"
        return layer.row("converted", reason, target, **settled)

    def _drops_shift(self, layer: NormLayer, options: ConversionOptions, sites: Sites) -> bool:
        """Whether the layer is the last of an EfficientNet block that is to be trained from scratch
        with ProxyNorm.

        The paper keeps only the scale of that layer (appendix A.1). Dropping the shift changes
        nothing while it is zero.
        """
        bias = getattr(layer.layer, "bias", None)
        if (
            options.pn_params is False
            or options.pn_restore is not False
            or not isinstance(bias, Tensor)
        ):
            return False
        # Without ProxyNorm no sites were looked for, and no layer is the last of its block.
        is_last = any(
            site.activation is None and site.owner_type in _MBCONV
            for site in sites.sites
            if site.norm == layer.name
        )
        return is_last and not bias.is_meta and not bias.any()


def _restores(options: ConversionOptions) -> bool:
    return options.pn_restore is not False


def _proxy_options(options: ConversionOptions, site: Site) -> dict[str, bool]:
    """The options of the ProxyNorm at a site; the last before the pooling has no scale."""
    return {
        "params": options.pn_params is not False,
        "restore": _restores(options),
        "scale": not site.last_before_pool,
    }


def _proxy(model: nn.Module, site: Site, row: EditRow) -> int:
    """Put a ProxyNorm in the place of a site's activation; return how many parameters it adds."""
    activation = site.activation
    assert activation is not None
    norm: Any = model.get_submodule(row.norm)
    like = next(chain(norm.parameters(), norm.buffers()), None)
    if like is None:
        device, dtype = placement_of(model)
    else:
        device = like.device
        dtype = like.dtype
    proxied = ProxyNorm(
        activation.module,
        norm.num_channels,
        norm=norm,
        strength=0.0,
        device=device,
        dtype=dtype,
        **row.options,
    )
    replace_activation(model, site, proxied.train(norm.training), "proxy")
    return sum(parameter.numel() for parameter in proxied.parameters(recurse=False))


def _migratable(layer: NormLayer) -> bool:
    return getattr(layer.layer, "running_mean", None) is not None


def most_groups(
    model: nn.Module, norms: Iterable[NormLayer], batches: Iterable[Any]
) -> dict[str, tuple[int, str]]:
    """Pick, for each BatchNorm, the most groups whose normalization keeps its output within
    `_GROUP_TOLERANCE`.

    The change is the root mean square, over images, positions and channels, of the difference
    between the layer in evaluation and the migrated one at strength 1, relative to that of the
    output less beta.

    Returns:
        By name, the number of groups (1 if none keeps within the tolerance) and the change, in
        words.

    Raises:
        RetrofitError: If a layer is never called.
    """
    norms = list(norms)
    if not norms:
        return {}
    changes: dict[str, dict[int, Tensor]] = {norm.name: {} for norm in norms}
    watched = hooked(
        norm.module.register_forward_pre_hook(partial(_measure, norm.layer, changes[norm.name]))
        for norm in norms
    )
    with evaluating(model), watched:
        for batch in images_of(batches):
            model(batch)
    picked = {}
    for name, by_groups in changes.items():
        if not by_groups:
            raise RetrofitError(
                f"on the images of `calibrate` the model never calls {name}, so its groups cannot "
                "be picked; give more images, or `groups` a number"
            )
        relative = {
            n: float((change / power.clamp_min(1e-30)).sqrt())
            for n, (change, power) in by_groups.items()
        }
        groups = max((n for n, error in relative.items() if error <= _GROUP_TOLERANCE), default=1)
        picked[name] = (
            groups,
            f"with {plural(groups, 'group')} its output changes by {relative[groups]:.0%}",
        )
    return picked


def _measure(norm: Any, changes: dict[int, Tensor], _: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Add to `changes[groups]`, (2,), the squared change and the power of the output, for every
    number of groups.
    """
    (x,) = args
    statistics = norm.running_mean, norm.running_var
    kept = functional.batch_norm(x, *statistics, norm.weight, eps=norm.eps)
    power = kept.double().square().sum()
    divisors = [n for n in range(1, _MOST_GROUPS + 1) if x.shape[1] % n == 0]
    for groups in divisors:
        eps = settled_eps(norm.weight, norm.running_var, norm.eps, groups)
        gain = group_gain(norm.weight, groups)
        new = migrated_group_norm(
            x, groups, *statistics, norm.weight, eps=eps, source_eps=norm.eps, gain=gain
        )
        change = (new - kept).double().square().sum()
        changes[groups] = changes.get(groups, 0) + torch.stack([change, power])


LN = BatchIndependentConverter(groups=1, proxy=False)
GN = BatchIndependentConverter(groups=8, proxy=False)
LN_PN = BatchIndependentConverter(groups=1, proxy=True)
GN_PN = BatchIndependentConverter(groups=8, proxy=True)
