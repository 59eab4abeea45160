"""Folding: a copy of a network in which every normalization is as few operations as its mathematics allows.

Affine maps go into the convolution or linear layer before them, or after them where zero padding does not forbid it,
and only where that layer serves nothing else; a transform whose lambda is 1 is then gone without a trace. This is done
before any exporter sees the network: the exporters' own folding of batch normalization trusts names and has no idea of
sharing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.export.approximation.choose import Approximation, Transform, choose, mean_lambdas
from retrofit.export.approximation.fit import Fit
from retrofit.export.folding.linear import fold_after, fold_before, in_channels, out_channels, takes_shift
from retrofit.export.folding.whitening import fold_whitening
from retrofit.export.forms import fused_layers as channel_map
from retrofit.export.forms.operations import (
    ChannelAffine,
    Clamp,
    FunctionModule,
    OneBranch,
    TwoBranch,
    constant_norm,
    estimated,
    in_sequence,
)
from retrofit.graph.find_sites import find_sites
from retrofit.graph.kinds import is_altered
from retrofit.graph.rewrite import replace_activation, replace_module
from retrofit.graph.site import Site
from retrofit.graph.source import RewriteError
from retrofit.layers import MigratedGroupNorm, ProxyNorm
from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.forms import SMALL_POWER
from retrofit.utils.copying import copied
from retrofit.utils.hooks import hooked
from retrofit.utils.placement import placement_of
from retrofit.utils.text import with_class


@dataclass(frozen=True)
class FoldedLayer:
    """What became of one layer.

    Attributes:
        name: Its name in the given network.
        form: "folded" (nothing is left), "affine", "one branch", "two branches", "polynomial", "lines",
            "normalization" (of its source's kind), "group", "group convolution" (of size 1, a whitening), "estimated"
            or "frozen"; "kept" where it stays as it is, since it has hooks or other code reads its parameters.
        degree: Of the polynomial, or the number of lines.
        max_error: Largest error of the approximation on the values fitted, as a share of the standard deviation of the
            layer's output.
        rms_error: Root mean square of the same.
    """

    name: str
    form: str
    degree: int | None = None
    max_error: float | None = None
    rms_error: float | None = None

    @property
    def kind(self) -> str:
        """Its form, with the degree of a polynomial or the number of lines."""
        if self.form == "lines":
            return f"{self.degree} lines"
        return self.form if self.degree is None else f"{self.form} of degree {self.degree}"


@dataclass
class Folded:
    """A folded network and what became of its layers."""

    model: nn.Module
    layers: list[FoldedLayer] = field(default_factory=list)


def fold_network(model: nn.Module, size: tuple[int, ...], approximation: Approximation | None = None) -> Folded:
    """Fold a copy of `model`.

    Args:
        model: Any network, converted or not; it is not changed.
        size: Shape of one sample, (C, H, W).
        approximation: What may be approximated; None for nothing.

    Returns:
        The copy, in evaluation mode and float32, without gradients.

    Raises:
        RetrofitError: If the network does not take such an input, or no approximation meets the tolerance.
    """
    net = copied(model).float().eval().requires_grad_(False)
    fixed = _fixed(net)
    channel_map.plain_convolutions(net, fixed)
    names = {module: name for name, module in net.named_modules()}
    net, whitened = fold_whitening(
        channel_map.split_fused(net, fixed),
        names,
        fixed,
        lambda net, wanted: _shapes(net, wanted, size),
    )
    folded = _Folding(net, size, names, fixed, approximation).run()
    folded.layers[:0] = [FoldedLayer(name, form) for name, form in whitened.items()]
    return folded


def _fixed(net: nn.Module) -> set[nn.Module]:
    """Return the modules that have to stay: what they are called with, give, or hold matters to other code."""
    read = find_sites(net, channel_map.is_wanted).read
    return {module for name, module in net.named_modules() if name in read or is_altered(module)}


class _Folding:
    """One run over a copy that may be changed."""

    def __init__(
        self,
        net: nn.Module,
        size: tuple[int, ...],
        names: dict[nn.Module, str],
        fixed: Collection[nn.Module],
        approximation: Approximation | None,
    ) -> None:
        self.net = net
        self.fixed = fixed
        self.names = names  # as the user knows them
        self.wanted = {module: name for name, module in net.named_modules() if channel_map.is_wanted(module)}
        self.shapes = _shapes(net, list(self.wanted), size)
        found = find_sites(net, channel_map.is_wanted)
        self.sites = {net.get_submodule(site.norm): site for site in found.sites if site.places == 1}
        # of the given parameters, before any of them moves
        self.proxies = {m: m.constants(torch.float64) for m in self.wanted if isinstance(m, ProxyNorm)}
        self.fits: dict[nn.Module, Fit] = {}
        self.frozen: dict[nn.Module, float] = {}
        if approximation is not None:
            self._approximate(approximation)
        self.report: list[FoldedLayer] = []

    def _approximate(self, wanted: Approximation) -> None:
        if wanted.freeze_lambda:
            self.frozen = mean_lambdas(self.net, wanted.fit)
        if wanted.runtime is not None:
            transforms = {}
            for layer in self.wanted:
                if layer in self.fixed:
                    continue
                found = channel_map.channel_map(layer) if layer in self.shapes else None
                if found is not None and not found.is_affine:
                    high = _upper_limit(self.sites.get(layer))
                    name = None if high is None else self._own_activation(layer)
                    act = None if name is None else self.net.get_submodule(name)
                    transforms[layer] = Transform(found.upright(), self.shapes[layer], high, act)
            if transforms:
                self.fits = choose(self.net, transforms, wanted)

    def run(self) -> Folded:
        for layer, name in self.wanted.items():
            if layer in self.shapes:  # what the network never calls can stay
                form, parts = self._fold(layer)
                if parts is not None:
                    self.net = replace_module(self.net, name, in_sequence(parts))
                if not isinstance(layer, ProxyNorm):
                    fit = self.fits.get(layer)
                    errors = (fit.size, fit.max_error, fit.rms_error) if fit else ()
                    self.report.append(FoldedLayer(self.names[layer], form, *errors))
        return Folded(self.net, self.report)

    def _fold(self, layer: Any) -> tuple[str, list[nn.Module] | None]:
        if layer in self.fixed:
            return "kept", None
        if isinstance(layer, ProxyNorm):
            return "affine", self._proxy(layer)
        found = channel_map.channel_map(layer)
        if found is not None:
            return self._affine(layer, found) if found.is_affine else self._transform(layer, found)
        if isinstance(layer, MigratedGroupNorm):
            return "group", [*self._before(layer, *layer.input_affine()), layer._form()[1]]
        if not channel_map.estimates(layer):
            return "normalization", None
        if layer.effective_alpha == 0:
            return "normalization", [layer.inference_form()]
        return "frozen" if layer in self.frozen else "estimated", self._estimated(layer)

    def _affine(self, layer: nn.Module, found: ChannelMap) -> tuple[str, list[nn.Module] | None]:
        feeder = self._feeder(layer)
        if feeder is not None:
            fold_after(feeder, *found.affine())
            return "folded", []
        plain = type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        return "affine", None if plain else [constant_norm(*found.affine(), len(self.shapes[layer]))]

    def _transform(self, layer: nn.Module, found: ChannelMap) -> tuple[str, list[nn.Module] | None]:
        found = found.upright()
        fit = self.fits.get(layer)
        if fit is not None:
            return self._approximated(layer, found, fit)
        branch = self._one_branch(layer, found)
        if branch is not None:
            return "one branch", branch
        before = self._before(layer, found.scale, found.shift)
        return "two branches", [*before, TwoBranch(found.lmbda, found.gamma, found.beta)]

    def _approximated(self, layer: nn.Module, found: ChannelMap, fit: Fit) -> tuple[str, list[nn.Module] | None]:
        scale, shift = found.scale * fit.scale, found.shift * fit.scale + fit.shift
        if fit.size == 1:
            ones = torch.ones_like(scale)
            return self._affine(layer, ChannelMap(scale, shift, ones, ones, torch.zeros_like(shift)))
        if fit.has_activation:
            self._drop_activation(layer)  # a ReLU that stays does no harm
        return fit.form, [*self._before(layer, scale, shift), *fit.parts(len(self.shapes[layer]))]

    def _one_branch(self, layer: nn.Module, found: ChannelMap) -> list[nn.Module] | None:
        """Fold a transform whose negative branch the activation behind it makes dead, activation included."""
        site = self.sites.get(layer)
        high = _upper_limit(site)
        if site is None or high is None or not bool((found.beta <= 0).all()):
            return None
        lmbda = found.lmbda
        exact = bool((lmbda.abs() < SMALL_POWER).any())
        ratio = torch.where(found.gamma > 0, -found.beta / found.gamma, torch.inf)
        live = lmbda * ratio > -1
        # log(1 + h0), for (1 + h0)^lambda = 1 + lambda * ratio
        log = torch.where(lmbda == 0, ratio, torch.log1p(torch.where(live, lmbda * ratio, 0.0)) / lmbda)
        zero = log.exp()
        live &= zero.isfinite()
        scale = torch.where(live, found.gamma - lmbda * found.beta, 0.0)
        scale = scale if exact else scale / lmbda
        if not self._drop_activation(layer):
            return None
        to_u = torch.where(live, 1 / zero, 0.0)
        parts = self._before(layer, found.scale * to_u, torch.where(live, (found.shift + 1) * to_u, 1.0))
        consumer = self._consumer(layer, site.activation_consumer) if high == float("inf") else None
        if consumer is not None:
            fold_before(consumer, scale)
            scale = torch.ones_like(scale)
        parts += [Clamp(1.0), OneBranch(lmbda, scale, exact)]
        return parts if high == float("inf") else [*parts, Clamp(None, high)]

    def _estimated(self, layer: Any) -> list[nn.Module]:
        kind = channel_map.kind_of(layer)
        gamma, beta = layer.weight, layer.bias
        site = self.sites.get(layer)
        consumer = self._consumer(layer, site.norm_consumer) if site and gamma is not None and gamma.ndim == 1 else None
        fits = isinstance(consumer, nn.Linear) == (kind == "layer")
        if consumer is None or not fits or (beta is not None and not takes_shift(consumer)):
            return estimated(layer, frozen=self.frozen.get(layer))
        fold_before(consumer, gamma.double(), None if beta is None else beta.double())
        return estimated(layer, affine=False, frozen=self.frozen.get(layer))

    def _proxy(self, layer: ProxyNorm) -> list[nn.Module]:
        scale, shift = self.proxies[layer]
        activation = layer.activation
        parts: list[nn.Module] = [activation if isinstance(activation, nn.Module) else FunctionModule(activation)]
        last = layer.channel_dim == -1
        site = self.sites.get(layer)
        consumer = self._consumer(layer, site.norm_consumer, last) if site else None
        if consumer is not None:
            if takes_shift(consumer):
                fold_before(consumer, scale, shift)
                return parts
            if bool((scale > 0).all()):
                fold_before(consumer, scale)
                scale, shift = torch.ones_like(scale), shift / scale
        affine = ChannelAffine(scale, shift, last)
        return parts if affine.scale is None and affine.shift is None else [*parts, affine]

    def _before(self, layer: nn.Module, scale: Tensor, shift: Tensor) -> list[nn.Module]:
        """Apply an affine map to a layer's input: in the layer before it, or else by an operation of its own."""
        feeder = self._feeder(layer)
        if feeder is not None:
            fold_after(feeder, scale, shift)
            return []
        return [constant_norm(scale, shift, len(self.shapes[layer]))]

    def _feeder(self, layer: Any) -> nn.Module | None:
        site = self.sites.get(layer)
        if site is None or site.feeder is None:
            return None
        feeder = self.net.get_submodule(site.feeder)
        channels = getattr(layer, "num_features", getattr(layer, "num_channels", None))
        if channels is None and getattr(layer, "running_mean", None) is not None:  # torchvision's FrozenBatchNorm2d
            channels = layer.running_mean.numel()
        if isinstance(feeder, nn.Linear) and len(self.shapes[layer]) != 2:
            return None
        return feeder if out_channels(feeder) == channels else None

    def _consumer(self, layer: Any, name: str | None, last: bool = False) -> nn.Module | None:
        """Return what takes a layer's output (or its activation's), if an affine map per channel folds into it."""
        if name is None:
            return None
        consumer = self.net.get_submodule(name)
        weight = getattr(layer, "weight", None)
        channels = getattr(layer, "num_features", None) or len(weight if weight is not None else ())
        last = (
            last
            or (channel_map.estimates(layer) and channel_map.kind_of(layer) == "layer")
            or len(self.shapes[layer]) == 2
        )
        if isinstance(consumer, nn.Linear) != last and len(self.shapes[layer]) != 2:
            return None
        return consumer if in_channels(consumer) == channels else None

    def _drop_activation(self, layer: nn.Module) -> bool:
        """Take away the activation that a form includes."""
        name = self._own_activation(layer)
        if name is not None:
            replace_module(self.net, name, nn.Identity())
        return name is not None

    def _own_activation(self, layer: nn.Module) -> str | None:
        """Return the name of the activation behind a layer, as a module that is called there only; None if it is not.

        For one call of several, or a functional call, there is such a module then.
        """
        site = self.sites[layer]
        act = site.activation
        assert act is not None
        if act.call is not None:
            try:
                name = replace_activation(self.net, site, copy.deepcopy(act.module), "activation")
            except RewriteError:
                return None
            act = replace(act, call=None, name=name)
            self.sites[layer] = replace(site, activation=act)
        return act.name


def _upper_limit(site: Site | None) -> float | None:
    """Return the limit above of an activation that is 0 below 0 and else the identity up to it; None for others."""
    act = site.activation.module if site is not None and site.activation is not None else None
    if type(act) is nn.ReLU:
        return float("inf")
    if isinstance(act, nn.Hardtanh) and type(act) in (nn.ReLU6, nn.Hardtanh) and act.min_val == 0:
        return float(act.max_val)
    return None


def _shapes(net: nn.Module, wanted: list[nn.Module], size: tuple[int, ...]) -> dict[nn.Module, tuple[int, ...]]:
    """Run the network once and return the shape of the input of each layer, for two samples."""
    found: dict[nn.Module, tuple[int, ...]] = {}

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found[module] = tuple(args[0].shape)

    device, dtype = placement_of(net)
    try:
        with hooked(module.register_forward_pre_hook(look) for module in wanted), torch.no_grad():
            net(torch.zeros(2, *size, device=device, dtype=dtype))
    except Exception as error:
        raise RetrofitError(
            f"the model did not take an input of size {'x'.join(map(str, size))} ({with_class(error)}); "
            "give it another input size"
        ) from error
    return found
