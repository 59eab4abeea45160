"""Targets evonorm-s0 and frn-tlu: timm's fused layers in the place of BatchNorm and the activation behind it.

EvoNorm-S0 (Liu et al. 2020) and FRN with a thresholded linear unit (Singh and Krishnan 2020) are what proxy
normalization is compared with (Labatie et al. 2021, tables 4 and 8). They are functions of another kind: no strength
leads to them from BatchNorm, and a converted network does not start as its source. What a layer's statistics and affine
can say is carried over (`_migrate`); of a network that was not trained that makes timm's own first values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.records import Found as Sites
from retrofit.graph.records import Site
from retrofit.graph.rewrite import check_call, replace_call, replace_module
from retrofit.graph.sites import find_sites
from retrofit.layers.whitening import largest_divisor
from retrofit.surgery.census import FAMILIES, Found, classify
from retrofit.surgery.converters import DECORRELATED, NORMALITY, Converter, Decision, Options, adopt, register
from retrofit.surgery.records import EditRow, LayerRow, Plan

_GROUPS = 32  # EvoNorm's own
_MAPS = ("BatchNorm2d", "SyncBatchNorm", "BatchNormAct2d", "SyncBatchNormAct")
_SAMPLES = 256  # of a normal variable, uniform in probability


class RivalConverter(Converter):
    """BatchNorm and the activation that directly follows it to one layer of timm's; BatchNorm alone to its plain form.

    Args:
        layer: Class name in `timm.layers`.
        grouped: Whether the layer has groups of channels.
    """

    sources = frozenset({"bn"})
    identity = False

    def __init__(self, layer: str, grouped: bool) -> None:
        self.layer = layer
        self.grouped = grouped
        self.sites: dict[nn.Module, list[Site]] = {}
        self.found = Sites([], [], {})
        self.blocked: dict[str, str] = {}

    def prepare(self, model: nn.Module, found: list[Found], options: Options) -> None:
        """Check the options and find out what follows each layer."""
        options.refuse(self.layer, *NORMALITY, *DECORRELATED, "pn_params", "pn_restore", "ws")
        if not self.grouped:
            options.refuse(f"{self.layer} has no groups", "groups")
        elif options.groups == "auto":
            raise UsageError(
                f"--groups auto means nothing to this target ({self.layer}); give a number or leave it out"
            )
        elif options.groups is not None and options.groups < 1:
            raise UsageError(f"groups must be at least 1, not {options.groups}; EvoNorm's own are {_GROUPS}")
        self._trace(model)
        for site in self.found.sites:
            if site.activation is not None and site.activation.call is not None:
                try:
                    check_call(model, site.activation.call)
                except RetrofitError as error:
                    self.blocked[site.norm] = str(error)

    def decide(self, found: Found, options: Options) -> Decision:
        """Convert every BatchNorm over maps whose activations can be taken in."""
        if found.family != "bn":
            return Decision(
                "unsupported", reason=f"{self.layer} takes BatchNorm's place, not {FAMILIES[str(found.family)]}'s"
            )
        module: Any = found.module
        sites = self.sites.get(module, [])
        acts = [site.activation for site in sites if site.activation is not None]
        reason = self._hindrance(found, sites)
        if reason:
            return Decision("unsupported", reason=reason)
        settled: dict[str, Any] = {"apply_act": bool(acts)}
        if self.grouped:
            wanted = _GROUPS if options.groups is None else int(options.groups)
            groups = settled["groups"] = largest_divisor(module.num_features, wanted)
            if groups != wanted:
                reason = f"{groups} groups: {wanted} do not divide {module.num_features} channels"
        return Decision("converted", self.layer, reason, settled)

    def edits(self, model: nn.Module, rows: list[LayerRow], options: Options) -> tuple[EditRow, ...]:
        """Take in the activations behind converted layers."""
        converted = {row.name for row in rows if row.status == "converted"}
        made = []
        for site in self.found.sites:
            act = site.activation
            if act is not None and site.norm in converted:
                made.append(
                    EditRow(act.name, act.type, "activation", "converted", "", site.norm, site.place, {}, self.layer)
                )
            elif act is not None:
                reason = "its norm is not converted"
                made.append(EditRow(act.name, act.type, "activation", "left", reason, site.norm, site.place))
        made += [EditRow(left.name, left.type, "activation", "left", left.reason) for left in self.found.left]
        return tuple(made)

    def begin(self, model: nn.Module, plan: Plan) -> None:
        """Find again, before the layers change, the activations that the plan is about."""
        self._trace(model)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        """Build timm's layer around the source's affine parameters, with the values that come closest."""
        import timm.layers

        new: Any = getattr(timm.layers, str(row.target))(module.num_features, **row.options, device="meta")
        fresh = {name: value for name, value in new.named_parameters() if value is not None}
        adopt(new, module)
        like = module.running_mean if module.weight is None else module.weight
        for name in fresh:
            if getattr(new, name) is None or getattr(new, name).is_meta:
                value = nn.Parameter(torch.empty_like(like, device=device))
                new.register_parameter(name, value.requires_grad_(bool(getattr(module.weight, "requires_grad", True))))
        if device.type != "meta":
            _migrate(new, module)
        new._buffers.clear()
        new._modules.clear()
        return new

    def finish(self, model: nn.Module, plan: Plan) -> tuple[str, ...]:
        """Take out the activations that are part of the layers now."""
        sites = {(site.norm, site.place): site for site in self.found.sites}
        for row in plan.edits:
            if row.status == "converted":
                _take_out(model, sites[row.norm, row.place])
        return (
            f"{self.layer} has no strength, and the network is not its source's function any more: gamma, beta and the "
            "running statistics are carried over as far as they go, training has to do the rest",
        )

    def _trace(self, model: nn.Module) -> None:
        self.found = find_sites(model, lambda module: getattr(classify("", module), "family", None) == "bn")
        self.sites = {}
        for site in self.found.sites:
            self.sites.setdefault(model.get_submodule(site.norm), []).append(site)

    def _hindrance(self, found: Found, sites: list[Site]) -> str:
        """Why a layer cannot be converted; empty if it can."""
        module: Any = found.module
        if found.label not in _MAPS:
            return f"{self.layer} normalizes maps, (N, C, H, W), alone"
        if getattr(module, "running_mean", None) is None:
            return "it tracks no running statistics, so there is nothing to migrate"
        if not isinstance(getattr(module, "drop", nn.Identity()), nn.Identity):
            return "it holds a dropout between normalization and activation"
        if not sites:
            return f"what follows it is unknown: {self.found.uncovered.get(found.name, 'no trace shows its call')}"
        if any(site.in_squeeze_excite for site in sites):
            return "inside a squeeze-excite, where a map is a single position"
        followed = [site.activation is not None for site in sites]
        if any(followed) and not all(followed):
            return "called at several places, and an activation follows at some of them only"
        if not any(followed) and not isinstance(getattr(module, "act", nn.Identity()), nn.Identity):
            return sites[0].reason
        return next((self.blocked[site.norm] for site in sites if site.norm in self.blocked), "")


def _take_out(model: nn.Module, site: Site) -> None:
    """Replace the activation of a site by the identity, at this site alone."""
    act = site.activation
    assert act is not None
    if act.kind == "fused":
        return  # it went with its layer
    if act.call is None:
        replace_module(model, act.name, nn.Identity())
        return
    name = site.norm.removeprefix(f"{act.owner}.").replace(".", "_")
    replace_call(model, act.call, nn.Identity(), f"{name}_act" + (f"_{site.place}" if site.places > 1 else ""))


@torch.no_grad()
def _migrate(new: Any, source: Any) -> None:
    """Give `new` the parameters with which it comes closest to `source`, (C,) each.

    With h = (x - mu) / sigma by the running statistics, the source is phi(gamma * h + beta).

    - FRN: gamma * h + beta on inputs whose mean square in each map is the running one, var + mu^2; tau = 0, ReLU's.
    - EvoNorm-S0 without activation is an affine map: gamma * h + beta, exactly.
    - EvoNorm-S0: x * sigmoid(v * x) / std has no shift before the gate. v = gamma / sigma and weight = v * std make it
      swish(gamma * (h + mu / sigma)), where std is the groups' by the running statistics, and the bias gives back the
      mean that swish(gamma * h + beta) has for normal h.
    """
    mean, var = source.running_mean.double(), source.running_var.double()
    sigma = (var + source.eps).sqrt()
    gamma = torch.ones_like(mean) if source.weight is None else source.weight.double()
    beta = torch.zeros_like(mean) if source.bias is None else source.bias.double()
    slope = gamma / sigma
    values = {"weight": slope, "bias": beta - slope * mean}
    if hasattr(new, "tau"):
        values["weight"] = slope * (var + mean.square() + new.eps).sqrt()
        values["tau"] = torch.zeros_like(mean)
    elif new.v is not None:
        first, second = (m.view(new.groups, -1).mean(1) for m in (mean, var + mean.square()))
        std = (second - first.square() + new.eps).sqrt().repeat_interleave(len(mean) // new.groups)
        quantiles = (torch.arange(_SAMPLES, dtype=torch.float64, device=mean.device) + 0.5) / _SAMPLES
        normal = torch.special.ndtri(quantiles).unsqueeze(1)
        lost = silu(gamma * normal + beta).mean(0) - silu(slope * (mean + sigma * normal)).mean(0)
        values = {"v": slope, "weight": slope * std, "bias": lost}
    for name, value in values.items():
        parameter: Tensor | None = getattr(new, name)
        if parameter is not None:
            parameter.copy_(value)


register("evonorm-s0", "BatchNorm and its activation to EvoNorm-S0", RivalConverter, layer="EvoNorm2dS0", grouped=True)
register(
    "frn-tlu",
    "BatchNorm and its activation to FRN + TLU",
    RivalConverter,
    layer="FilterResponseNormTlu2d",
    grouped=False,
)
