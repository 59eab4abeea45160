"""Targets evonorm-s0 and frn-tlu: timm's fused layers in the place of BatchNorm and the activation
behind it.

EvoNorm-S0 (Liu et al. 2020) and FRN with a thresholded linear unit (Singh and Krishnan 2020) are
what proxy normalization is compared with (Labatie et al. 2021, tables 4 and 8). They are functions
of another kind: no strength leads to them from BatchNorm, and a converted network does not start as
its source. What a layer's statistics and affine can say is carried over (`_migrate`); of a network
that was not trained that makes timm's own first values.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import UsageError
from retrofit.graph.rewrite import replace_activation
from retrofit.graph.sites import Site, Sites
from retrofit.layers.converted_layer import check_groups, hold_settings
from retrofit.surgery.families import NormLayer
from retrofit.surgery.plan_and_report import LayerRow, Plan
from retrofit.surgery.planning import (
    TARGETS,
    Converter,
    Decisions,
    activation_problem,
    adopt,
    group_count,
)

# EvoNorm's own
_GROUPS = 32
_MAPS = ("BatchNorm2d", "SyncBatchNorm", "BatchNormAct2d", "SyncBatchNormAct")
# of a normal variable, uniform in probability
_SAMPLES = 256


class BaselineConverter(Converter):
    """BatchNorm with the activation directly behind it to one layer of timm's; BatchNorm alone to
    its plain form.
    """

    sources = frozenset({"bn"})
    identity = False
    has_strength = False
    changes_sets = True
    takes_activations = True

    def __init__(self, layer: str, grouped: bool) -> None:
        # class name in `timm.layers`
        self.layer = layer
        # whether it has groups of channels
        self.grouped = grouped

    def plan(
        self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions
    ) -> Decisions:
        if options.groups == "auto":
            raise UsageError(
                f"`groups='auto'` means nothing to {self.layer}; give a number or leave it out"
            )
        sites = self.sites_of(model)
        rows = []
        for layer in layers:
            own = [site for site in sites.sites if model.get_submodule(site.norm) is layer.module]
            if reason := self._hindrance(model, layer, own, sites):
                rows.append(layer.row("unsupported", reason))
                continue
            settled: dict[str, Any] = {
                "apply_act": any(site.activation is not None for site in own)
            }
            if self.grouped:
                settled["groups"], reason = group_count(
                    layer.name, layer.layer.num_features, options, _GROUPS
                )
            rows.append(layer.row("converted", reason, self.layer, **settled))
        converted = {row.name for row in rows if row.status == "converted"}
        return rows, self.plan_activations(model, sites, converted, self.layer, lambda _: {}), sites

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        import timm.layers

        like = module.running_mean if module.weight is None else module.weight
        new: Any = getattr(timm.layers, str(row.target))(module.num_features, **row.options).to(
            like
        )
        eps, own = new.eps, dict(new._parameters)
        adopt(new, module).eps = eps
        for name, parameter in own.items():
            if module._parameters.get(name) is None:
                new._parameters[name] = parameter.requires_grad_(
                    module.weight is None or module.weight.requires_grad
                )
        if device.type != "meta":
            _migrate(new, module)
        new._buffers.clear()
        new._modules.clear()
        if self.grouped:
            hold_settings(new, {"groups": partial(check_groups, module.num_features)}, device)
        return new

    def finish(
        self, model: nn.Module, plan: Plan, sites: Mapping[tuple[str, int], Site]
    ) -> Sequence[str]:
        for site in (sites[place] for place in sorted(plan.proxied)):
            if site.activation is not None and site.activation.kind != "fused":
                replace_activation(
                    model, site, nn.Identity(), "act"
                )  # a fused one went with its layer
        return (
            f"{self.layer} has no strength, and the network is not its source's function any more: gamma, beta and the "
            "running statistics are carried over as far as they go, training has to do the rest",
        )

    def _hindrance(self, model: nn.Module, layer: NormLayer, own: list[Site], sites: Sites) -> str:
        """Why a layer, called at its own sites, cannot be converted; empty if it can."""
        module = layer.layer
        if layer.family != "bn":
            return f"{self.layer} takes BatchNorm's place, not {layer.family_name}'s"
        if layer.known_class not in _MAPS:
            return f"{self.layer} normalizes maps, (N, C, H, W), alone"
        if module.running_mean is None:
            return "it tracks no running statistics, so there is nothing to migrate"
        if not isinstance(getattr(module, "drop", nn.Identity()), nn.Identity):
            return "it holds a dropout between normalization and activation"
        if not own:
            return f"what follows it is unknown: {sites.uncovered.get(layer.name, 'no trace shows its call')}"
        followed = [site.activation is not None for site in own]
        if any(followed) and not all(followed):
            return "called at several places, and an activation follows at some of them only"
        if not any(followed) and not isinstance(getattr(module, "act", nn.Identity()), nn.Identity):
            return own[0].reason
        return next(filter(None, (activation_problem(model, site) for site in own)), "")


@torch.no_grad()
def _migrate(new: Any, source: Any) -> None:
    """Give `new` the parameters with which it comes closest to `source`, (C,) each.

    With h = (x - mu) / sigma by the running statistics, the source is phi(gamma * h + beta).

    - FRN: gamma * h + beta on inputs whose mean square in each map is the running one, var + mu^2;
    tau = 0, ReLU's.
    - EvoNorm-S0 without activation is an affine map: gamma * h + beta, exactly.
    - EvoNorm-S0: x * sigmoid(v * x) / std has no shift before the gate. v = gamma / sigma and
    weight = v * std make it
      swish(gamma * (h + mu / sigma)), where std is the groups' by the running statistics, and the
      bias gives back the mean that swish(gamma * h + beta) has for normal h.
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
        quantiles = (
            torch.arange(_SAMPLES, dtype=torch.float64, device=mean.device) + 0.5
        ) / _SAMPLES
        normal = torch.special.ndtri(quantiles).unsqueeze(1)
        lost = silu(gamma * normal + beta).mean(0) - silu(slope * (mean + sigma * normal)).mean(0)
        values = {"v": slope, "weight": slope * std, "bias": lost}
    for name, value in values.items():
        if getattr(new, name) is not None:
            getattr(new, name).copy_(value)


TARGETS["evonorm-s0"] = BaselineConverter("EvoNorm2dS0", grouped=True)
TARGETS["frn-tlu"] = BaselineConverter("FilterResponseNormTlu2d", grouped=False)
