"""What a converter is: the part of a target that decides about layers and builds their
counterparts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import UsageError
from retrofit.graph.norm_sites import Site, Sites, find_sites
from retrofit.graph.rewrite import rewrite_problem
from retrofit.registry import target_named
from retrofit.surgery.norm_layers import NormLayer, classify
from retrofit.surgery.plan_and_report import EditRow, LayerRow, Plan
from retrofit.utils.divisors import largest_divisor

Decisions = tuple[Sequence[LayerRow], Sequence[EditRow], Sites | None]

_MODULE_STATE = {
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_compiled_call_impl",
}
# Options of our own layers: the plan settles them, `adopt` leaves them alone.
_OPTIONS = {"alpha", "group_size", "noise", "noise_kind", "strength"}


class Converter(ABC):
    """Converts normalization layers of some families to their counterparts; it keeps nothing of a
    conversion.

    Attributes:
        sources: The families whose layers `sites_of` looks for.
        identity: Whether the converted network is its source's function in evaluation, at strength
            0 if it has one.
        has_strength: Whether its layers have a strength.
        changes_sets: Whether its layers normalize each sample by itself, and their sources do not.
        takes_activations: Whether it also converts the activations behind the layers, and is
            pointless without.
    """

    sources: Collection[str] = ()
    identity: bool = True
    has_strength: bool = True
    changes_sets: bool = False
    takes_activations: bool = False

    def plan(
        self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions
    ) -> Decisions:
        """Decide the fate of the layers that the caller's rules let through; change nothing.

        Returns:
            A row for each layer, the rows of the activations and convolutions around them, and the
            sites of these.
        """
        return [self.decide(layer, options) for layer in layers], (), None

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        """Decide the fate of one layer, if the rest of the network does not matter.

        Raises:
            NotImplementedError: If a converter defines neither this nor `plan`.
        """
        raise NotImplementedError

    def converts_in_place(self, layer: NormLayer) -> bool:
        """Whether nothing is built for a layer with status "converted": `finish` changes what
        follows it.
        """
        return False

    @abstractmethod
    def build(self, module: nn.Module, row: LayerRow, device: torch.device) -> nn.Module:
        """Return the counterpart of `module`, holding its tensors (moved, not copied), as `row`
        says.
        """

    def finish(
        self, model: nn.Module, plan: Plan, sites: Mapping[tuple[str, int], Site]
    ) -> Sequence[str]:
        """Edit what lies around the converted layers, at sites by `norm` and `place` of an
        `EditRow`; return notes.
        """
        return ()

    def sites_of(self, model: nn.Module) -> Sites:
        """Find the places that call normalization layers of the sources, and the activations behind
        them.
        """

        def is_source(module: nn.Module) -> bool:
            norm = classify("", module)
            return norm is not None and norm.family in self.sources

        return find_sites(model, is_source)

    def plan_activations(
        self,
        model: nn.Module,
        sites: Sites,
        converted: Collection[str],
        target: str,
        settle: Callable[[Site], Any],
    ) -> list[EditRow]:
        """Decide every activation: behind a converted layer it becomes part of the target layer.

        Args:
            model: The network.
            sites: Its sites.
            converted: Names of the converted layers.
            target: The class of the target layer.
            settle: Returns the options for a site.
        """
        rows = []
        for site in sites.sites:
            if site.activation is None:
                continue
            problem = "its norm is not converted"
            if site.norm in converted:
                problem = activation_problem(model, site)
            row = EditRow(
                site.activation.name,
                site.activation.type,
                "",
                "left",
                problem,
                norm=site.norm,
                place=site.call_index,
            )
            if not problem:
                row = replace(row, target=target, status="converted", options=settle(site))
            rows.append(row)
        rows += [EditRow(name, cls, "", "left", reason) for name, cls, reason in sites.unmatched]
        # Why a part cannot be traced is said once: at its activations, if it has any.
        known_reasons = {activation.reason for activation in sites.unmatched}
        for norm, why in sites.uncovered.items():
            if norm in converted and why not in known_reasons:
                reason = f"what follows its norm is unknown: {why}"
                rows.append(EditRow(f"after {norm}", "unknown", "", "left", reason, norm=norm))
        return rows


def converter_for(to: str) -> Converter:
    """Return the converter of target `to`.

    Raises:
        UsageError: If no such target is registered.
    """
    target = target_named(to)
    converter: Converter = target.load_converter()
    return converter


def adopt(new: nn.Module, old: Any) -> Any:
    """Move parameters, buffers, children, hooks, training flag and all other attributes of `old`
    into `new`.

    The parameters are the same objects, so that an optimizer that holds them keeps working.
    Attributes that `old` lacks stay as built, and so do the options of `new`. A buffer of `old`, as
    frozen layers have, becomes a parameter where `new` has one.
    """
    for store in ("_parameters", "_buffers", "_modules"):
        getattr(new, store).update(getattr(old, store))
    # Constants of a frozen source are buffers; a layer that trains them has parameters.
    for name in new._parameters.keys() & new._buffers.keys():
        value = new._buffers.pop(name)
        if value is not None:
            value = nn.Parameter(value)
        new._parameters[name] = value
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    for name, value in vars(old).items():
        settled = name in _OPTIONS and hasattr(new, name)
        if name not in _MODULE_STATE and name not in new._buffers and not settled:
            object.__setattr__(new, name, value)
    return new


def activation_problem(model: nn.Module, site: Site) -> str:
    """Why the activation of a site stays as it is; empty if it can be replaced, or is absent."""
    if site.in_squeeze_excite:
        return "inside a squeeze-excite"
    return rewrite_problem(model, site.activation)


def group_count(
    name: str, channels: int, options: ConversionOptions, default: int
) -> tuple[int, str]:
    """Return how many groups a layer gets, and a remark.

    `group_channels` decides if it is set; else the largest divisor of the channels that is at most
    `groups`, or `default`.

    Raises:
        UsageError: If `group_channels` does not divide the layer's channels.
    """
    channels_each = options.group_channels
    if channels_each is not None:
        if channels % channels_each:
            raise UsageError(
                f"`group_channels={channels_each}` does not divide the {channels} channels of "
                f"{name or 'the layer'}; name a divisor, or leave the layer out with `skip`"
            )
        return channels // channels_each, ""
    most = options.groups if isinstance(options.groups, int) else default
    groups = largest_divisor(channels, most)
    if groups == most:
        return groups, ""
    return groups, f"{groups} groups: {most} do not divide {channels} channels"
