"""What targets share that put one layer of timm's in the place of BatchNorm and the activation
behind it.

Such layers are what proxy normalization is compared with (Labatie et al. 2021, tables 4 and 8).
They are functions of another kind: no strength leads to them from BatchNorm, and a converted
network does not start as its source. What a layer's statistics and affine can say is carried over;
of a network that was not trained that makes timm's own first values.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import UsageError
from retrofit.graph.norm_sites import Site, Sites
from retrofit.graph.rewrite import replace_activation
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.converted_layer import check_groups, hold_settings, library_class
from retrofit.surgery.converter import Converter, Decisions, activation_problem, adopt
from retrofit.surgery.norm_layers import NormLayer
from retrofit.surgery.plan_and_report import LayerRow, Plan

_MAPS = ("BatchNorm2d", "SyncBatchNorm", "BatchNormAct2d", "SyncBatchNormAct")


class FusedConverter(Converter):
    """BatchNorm and the activation directly behind it to one layer of timm's; BatchNorm alone to
    the same layer without its activation.
    """

    sources = ("bn",)
    identity = False
    has_strength = False
    changes_sets = True
    takes_activations = True

    # Name of the class in `timm.layers`.
    layer: str

    @abstractmethod
    def migrated(
        self, new: Any, source: ChannelMap, mean: Tensor, mean_square: Tensor
    ) -> dict[str, Tensor]:
        """Return the parameters with which `new` comes closest to its source, (C,) each in float64.

        Args:
            new: The layer of timm's.
            source: BatchNorm in evaluation.
            mean: Its running mean.
            mean_square: The mean square of its input, by the running statistics.
        """

    def layer_options(
        self, layer: NormLayer, options: ConversionOptions
    ) -> tuple[dict[str, Any], str]:
        """Return arguments of the layer's constructor, and a remark."""
        return {}, ""

    def plan(
        self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions
    ) -> Decisions:
        """Decide the fate of each layer together with its activation.

        Raises:
            UsageError: If `groups="auto"` is asked for.
        """
        if options.groups == "auto":
            raise UsageError(
                f"`groups='auto'` means nothing to {self.layer}; give a number or leave it out"
            )
        sites = self.sites_of(model)
        rows = []
        for layer in layers:
            calls = [site for site in sites.sites if model.get_submodule(site.norm) is layer.module]
            problem = self._problem_of_layer(layer) or _problem_of_calls(model, layer, calls, sites)
            if problem:
                rows.append(layer.row("unsupported", problem))
                continue
            activated = any(site.activation is not None for site in calls)
            settled, remark = self.layer_options(layer, options)
            row = layer.row("converted", remark, self.layer, apply_act=activated, **settled)
            rows.append(row)
        converted = {row.name for row in rows if row.status == "converted"}
        edits = self.plan_activations(model, sites, converted, self.layer, lambda _: {})
        return rows, edits, sites

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        like = module.weight
        if like is None:
            like = module.running_mean
        channels = module.num_features
        new: Any = library_class(self.layer)(channels, **row.options).to(like)
        eps = new.eps
        parameters = dict(new._parameters)
        adopt(new, module).eps = eps
        for name, parameter in parameters.items():
            if module._parameters.get(name) is None:
                trained = module.weight is None or module.weight.requires_grad
                new._parameters[name] = parameter.requires_grad_(trained)
        if device.type != "meta":
            mean = module.running_mean.double()
            mean_square = module.running_var.double() + mean.square()
            source = ChannelMap.of(
                module.running_mean, module.running_var, module.eps, module.weight, module.bias
            )
            # In this mode alone, the parameters of a network that was built in it may change.
            with torch.inference_mode():
                for name, value in self.migrated(new, source, mean, mean_square).items():
                    if getattr(new, name) is not None:
                        getattr(new, name).copy_(value)
        new._buffers.clear()
        new._modules.clear()
        if "groups" in row.options:
            hold_settings(new, {"groups": partial(check_groups, channels)}, device)
        return new

    def finish(
        self, model: nn.Module, plan: Plan, sites: Mapping[tuple[str, int], Site]
    ) -> Sequence[str]:
        for call in sorted(plan.proxied):
            site = sites[call]
            # A fused activation went with its layer.
            if site.activation is not None and site.activation.kind != "fused":
                replace_activation(model, site, nn.Identity(), "act")
        return (
            f"{self.layer} has no strength, and the network is not its source's function any more: "
            "gamma, beta and the running statistics are carried over as far as they go, training "
            "has to do the rest",
        )

    def _problem_of_layer(self, layer: NormLayer) -> str:
        """Why a layer cannot be converted, wherever it is called; empty if it can."""
        if layer.known_class not in _MAPS:
            return f"{self.layer} normalizes maps, (N, C, H, W), alone"
        if layer.layer.running_mean is None:
            return "it tracks no running statistics, so there is nothing to migrate"
        if not _is_identity(layer.layer, "drop"):
            return "it holds a dropout between normalization and activation"
        return ""


def _problem_of_calls(
    model: nn.Module, layer: NormLayer, calls: Sequence[Site], sites: Sites
) -> str:
    """Why a layer cannot be converted, given the sites that call it; empty if it can."""
    if not calls:
        why = sites.uncovered.get(layer.name, "no trace shows its call")
        return f"what follows it is unknown: {why}"
    followed = [site.activation is not None for site in calls]
    if any(followed) and not all(followed):
        return "called at several places, and an activation follows at some of them only"
    if not any(followed) and not _is_identity(layer.layer, "act"):
        return calls[0].reason
    problems = [activation_problem(model, site) for site in calls]
    return next(filter(None, problems), "")


def _is_identity(layer: Any, child: str) -> bool:
    return isinstance(getattr(layer, child, nn.Identity()), nn.Identity)
