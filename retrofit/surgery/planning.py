"""Decide what becomes of every normalization layer, and say why: the registry of converters, and
their plan.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule

from retrofit.conversion_options import FAMILIES, OPTIONS, ConversionOptions, takes_options
from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.rewrite import rewrite_problem
from retrofit.graph.sites import Site, Sites, find_sites
from retrofit.layers.decorrelated_batch_norm import largest_divisor
from retrofit.record import unwrapped
from retrofit.surgery.families import NormLayer, classify, find_norms, functional_norms
from retrofit.surgery.plan_and_report import EditRow, LayerRow, Plan
from retrofit.utils.text import one_line, plural, shown

Patterns = str | Iterable[str] | None

Decisions = tuple[Sequence[LayerRow], Sequence[EditRow], Sites | None]
_USUAL = {
    "bn": "bnn",
    "ln": "lnn",
    "gn": "gnn",
    "in": "inn",
    "frozen-bn": "frozen",
}  # what to try for a family


class Converter(ABC):
    """Takes normalization layers of some families to their counterparts; it holds no state of a
    conversion.
    """

    # the families it converts when the caller names none
    sources: frozenset[str]
    # the converted network is its source's function in evaluation, at strength 0 if it has one
    identity: bool = True
    has_strength: bool = True
    changes_sets: bool = (
        # its layers normalize each sample by itself, and their sources do not
        False
    )
    takes_activations: bool = (
        # it also converts the activations behind the layers, and is pointless without
        False
    )

    def plan(
        self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions
    ) -> Decisions:
        """Decide the fate of the layers that the caller's rules let through: a row for each, those
        of the activations and convolutions around them, and where these are. Changes nothing; may
        raise errors.
        """
        return [self.decide(layer, options) for layer in layers], (), None

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        """Decide the fate of one layer, if the rest of the network does not matter."""
        raise NotImplementedError

    @abstractmethod
    def build(self, module: nn.Module, row: LayerRow, device: torch.device) -> nn.Module:
        """Return the counterpart of `module`, holding its tensors (moved, not copied), as `row`
        says.
        """

    def finish(
        self, model: nn.Module, plan: Plan, sites: Mapping[tuple[str, int], Site]
    ) -> Sequence[str]:
        """Edit what lies around the converted layers, at sites by norm and place as in `EditRow`;
        return notes.
        """
        return ()

    def sites_of(self, model: nn.Module) -> Sites:
        """Find the places that call normalization layers of the sources, and the activations behind
        them.
        """
        return find_sites(
            model, lambda module: getattr(classify("", module), "family", None) in self.sources
        )

    def plan_activations(
        self,
        model: nn.Module,
        sites: Sites,
        converted: Collection[str],
        target: str,
        settle: Callable[[Site], Any],
    ) -> list[EditRow]:
        """Decide every activation: behind `converted` layers it becomes part of `target`, with
        options of `settle`.
        """
        rows = []
        for site in sites.sites:
            if (act := site.activation) is not None:
                reason = (
                    activation_problem(model, site)
                    if site.norm in converted
                    else "its norm is not converted"
                )
                row = EditRow(
                    act.name, act.type, "", "left", reason, norm=site.norm, place=site.place
                )
                rows.append(
                    row
                    if reason
                    else replace(row, status="converted", options=settle(site), target=target)
                )
        rows += [EditRow(act.name, act.type, "", "left", act.reason) for act in sites.unmatched]
        counted = {
            act.reason for act in sites.unmatched
        }  # of a part that no trace shows: its activations
        rows += [
            EditRow(
                f"after {name}",
                "unknown",
                "",
                "left",
                f"what follows its norm is unknown: {why}",
                norm=name,
            )
            for name, why in sites.uncovered.items()
            if name in converted and why not in counted
        ]
        return rows


_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
_OPTIONS = {
    "alpha",
    "group_size",
    "noise",
    "noise_kind",
    "strength",
}  # of our layers, which the plan settles

# the converter of every target
TARGETS: dict[str, Converter] = {}


def converter_for(to: str) -> Converter:
    """Return the converter of target `to`; a UsageError says that there is none."""
    if to not in TARGETS:
        raise UsageError(f"unknown target {to!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[to]


def adopt(new: nn.Module, old: Any) -> Any:
    """Move parameters, buffers, children, hooks, training flag and all other attributes of `old`
    into `new`.

    The parameters are the same objects, so that an optimizer that holds them keeps working. What
    `new` has and `old` lacks stays as built, and so do the options of `new`; where `new` has a
    parameter and `old` a buffer, as frozen layers do, it becomes a parameter.
    """
    for store in ("_parameters", "_buffers", "_modules"):
        getattr(new, store).update(getattr(old, store))
    # a frozen layer's constants
    for name in new._parameters.keys() & new._buffers.keys():
        value = new._buffers.pop(name)
        new._parameters[name] = None if value is None else nn.Parameter(value)
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    for key, value in vars(old).items():
        if (
            key not in _OWN
            and key not in new._buffers
            and not (key in _OPTIONS and hasattr(new, key))
        ):
            object.__setattr__(new, key, value)
    return new


def activation_problem(model: nn.Module, site: Site) -> str:
    """Why the activation of a site stays as it is; empty if it can be replaced, or there is none."""
    return (
        "inside a squeeze-excite"
        if site.in_squeeze_excite
        else rewrite_problem(model, site.activation)
    )


def group_count(
    name: str, channels: int, options: ConversionOptions, default: int
) -> tuple[int, str]:
    """Return how many groups a layer gets: by `group_channels`, or at most `groups`, or `default`;
    and a remark.
    """
    if (each := options.group_channels) is not None:
        if channels % each:
            raise UsageError(
                f"`group_channels={each}` does not divide the {channels} channels of {name or 'the layer'}; "
                "name a divisor, or leave the layer out with `skip`"
            )
        return channels // each, ""
    most = options.groups if isinstance(options.groups, int) else default
    groups = largest_divisor(channels, most)
    return (
        groups,
        "" if groups == most else f"{groups} groups: {most} do not divide {channels} channels",
    )


@takes_options
def plan(
    model: nn.Module,
    to: str,
    *,
    only: Patterns = None,
    skip: Patterns = None,
    source: Patterns = None,
    **options: Any,
) -> Plan:
    """Decide what a conversion would do to every normalization layer of `model`; change nothing.

    Args:
        model: Any network.
        to: The target, a key of `TARGETS`.
        only: One or more regular expressions; convert only layers whose name matches one
            (`re.search`).
        skip: One or more regular expressions; keep layers whose name matches one.
        source: Families of layers to convert ("bn", "ln", "gn", "in", "frozen-bn"); by default, the
            target's.
        **options: Options of the target, such as `groups`, `noise` or `calibrate`.

    Returns:
        The plan, which `apply` executes.

    Raises:
        UsageError: If `model` is not a network, the target or a family is unknown, an option is out
            of range, or a pattern does not compile.
        RetrofitError: If a pattern matches no layer, or nothing would be converted.
    """
    return plan_and_sites(network_in(model), to, only, skip, source, options)[0]


def plan_and_sites(
    model: nn.Module,
    to: str,
    only: Patterns,
    skip: Patterns,
    source: Patterns,
    options: dict[str, Any],
) -> tuple[Plan, Sites | None]:
    """Return what `plan` does, and where the activations are that the plan is about."""
    converter = converter_for(to)
    if unknown := options.keys() - OPTIONS.keys():
        raise TypeError(
            f"plan() and convert() have no argument {', '.join(sorted(unknown))}; see help(retrofit.plan)"
        )
    settled = ConversionOptions(**options)
    settled.check(to)
    families = frozenset(_listed(source)) or converter.sources
    for family in families - FAMILIES.keys():
        raise UsageError(f"`source={family!r}` is no family; choose from {', '.join(FAMILIES)}")
    norms = list(find_norms(model))
    included, excluded = _patterns("only", only, norms), _patterns("skip", skip, norms)

    rows: dict[str, LayerRow] = {}
    for norm in norms:
        if reason := _rule_against(norm, to, families, included, excluded):
            rows[norm.name] = norm.row("kept", reason)
        elif norm.status != "known":
            rows[norm.name] = norm.row(norm.status, norm.reason)
    decided, edits, sites = converter.plan(
        model, [norm for norm in norms if norm.name not in rows], settled
    )
    rows |= {row.name: row for row in decided}
    layers = tuple(rows[norm.name] for norm in norms)
    patterns = {
        "only": [pattern.pattern for pattern in included],
        "skip": [pattern.pattern for pattern in excluded],
    }
    record = {**patterns, "source": sorted(families), **settled.record()}
    result = Plan(to, layers, record, tuple(edits))
    if not result.converted:
        raise RetrofitError(_nothing_to_convert(model, families, norms, result))
    if (
        converter.takes_activations
        and not result.proxied
        and (converter.identity or result.activations)
    ):
        plainer = to.removesuffix("-pn") if converter.identity else "gn"
        why = result.activations or "none follows a norm"
        raise RetrofitError(
            f"{to} would convert no activation: {why}; use `to={plainer!r}`, which leaves them alone"
        )
    return result, sites


def network_in(model: nn.Module) -> nn.Module:
    """Return the network inside wrappers of torch.compile and DataParallel, which call it as it is.

    A UsageError says that it is no network, a RetrofitError that it is or holds what keeps its
    parameters or its code elsewhere.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a torch.nn.Module is converted, not {shown(model)}; build the network first, as timm.create_model does"
        )
    keepers = ("DistributedDataParallel", "FullyShardedDataParallel", "DTensor")
    for part in (*model.modules(), *model.parameters()):
        if type(part).__name__.startswith(keepers) or isinstance(part, ScriptModule):
            raise RetrofitError(
                f"{type(part).__name__} holds parameters or code that no conversion reaches; convert the network "
                "first, then wrap, shard or script it"
            )
    return unwrapped(model)


def _listed(patterns: Patterns) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _patterns(name: str, patterns: Patterns, norms: Sequence[NormLayer]) -> list[re.Pattern[str]]:
    """Compile the patterns of an argument, each of which has to match a layer."""
    compiled = []
    for pattern in _listed(patterns):
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            said = f"`{name}={pattern!r}` is not a regular expression ({one_line(error)}); escape or mend it"
            raise UsageError(said) from None
        if not any(compiled[-1].search(norm.name) for norm in norms):
            raise RetrofitError(
                f"`{name}={pattern!r}` matches none of the {plural(len(norms), 'layer')}; "
                "`named_modules()` and `retrofit inspect` list their names"
            )
    return compiled


def _rule_against(
    norm: NormLayer,
    to: str,
    families: frozenset[str],
    only: Sequence[re.Pattern[str]],
    skip: Sequence[re.Pattern[str]],
) -> str:
    """Why the caller's rules leave a layer as it is; empty if they let it through."""
    if norm.family is not None and norm.family not in families:
        hint = ""
        if norm.family in TARGETS[to].sources:
            hint = f" here (name {norm.family!r} in `source` too)"
        elif norm.family == "frozen-bn":
            hint = " (frozen, gn, ln, gn-pn and ln-pn take it; timm.layers.unfreeze_batch_norm_2d makes it BatchNorm)"
        return f"{norm.family_name} is not a source of {to}{hint}"
    if only and not any(pattern.search(norm.name) for pattern in only):
        return "not matched by `only`"
    return next(
        (f"matched by `skip={pattern.pattern!r}`" for pattern in skip if pattern.search(norm.name)),
        "",
    )


def _nothing_to_convert(
    model: nn.Module, families: frozenset[str], norms: Sequence[NormLayer], result: Plan
) -> str:
    sources = f"{result.to} converts {' or '.join(FAMILIES[family] for family in sorted(families))} layers"
    if not norms:
        called = "".join(f"; {note}" for note in functional_norms(model))
        return f"{sources}, and this model has no normalization layer at all{called}; choose another model"
    held = ", ".join(
        f"{n} {label}" for label, n in Counter(norm.label for norm in norms).most_common()
    )
    others = [_USUAL[str(norm.family)] for norm in norms if norm.status == "known"]
    others = [target for target in others if target != result.to]
    if others and not any(norm.family in families for norm in norms):
        return f"{sources}, of which this model has none (it holds {held}); try `to={others[0]!r}`"
    reasons = "; ".join(dict.fromkeys(row.reason for row in result.layers if row.reason))
    return f"nothing to convert to {result.to} (the model holds {held}): {reasons}; `retrofit inspect MODEL` lists them"
