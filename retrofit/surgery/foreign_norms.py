"""Prove that a foreign normalization layer computes what a known one does, so that it can be
converted as that.

Libraries derive classes from torch's normalization layers, or write them anew, and change no
arithmetic: LayerNorm over the channels of maps, a frozen BatchNorm, GroupNorm with an activation.
The layer and its candidate hold the same attributes and tensors under two classes, and are run on
the same seeded inputs in float64, with random parameters and with the layer's own: in evaluation
and in training, contiguous and not. Outputs, gradients and running statistics have to agree.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.graph.source_code import methods_of
from retrofit.utils.output_tensors import largest_gap, scale_of
from retrofit.utils.snapshot import left_as_it_was

_EPSILONS = (1e-5, 1e-6, 1e-3, 1e-12)
_PROCESSES = re.compile(r"^dist(ributed)?$|world_size|process_group|all_(reduce|gather)|sync")
_METHODS_OF_MODULE = ("train", "eval", "__call__", "parameters", "named_parameters")
_LAYER_NORM_2D = "torchvision.models.convnext.LayerNorm2d"
_LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
_FROZEN = "torchvision.ops.misc.FrozenBatchNorm2d"
# timm's class that fuses a known class with an activation.
_WITH_ACTIVATION = {
    "torch.nn.modules.batchnorm.BatchNorm2d": "timm.layers.norm_act.BatchNormAct2d",
    "torch.nn.modules.normalization.GroupNorm": "timm.layers.norm_act.GroupNormAct",
    _LAYER_NORM: "timm.layers.norm_act.LayerNormAct",
    _LAYER_NORM_2D: "timm.layers.norm_act.LayerNormAct2d",
}
# torch's private bases, and the classes that fix the number of an input's dimensions.
_CLASSES_BY_BASE: dict[type, tuple[str, ...]] = {
    nn.modules.batchnorm._BatchNorm: ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    nn.modules.instancenorm._InstanceNorm: ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
}
# Tensors, children and hooks, which are described by themselves or are not called.
_OF_EVERY_MODULE = vars(nn.Module()).keys()


@dataclass(frozen=True)
class Formula:
    """A known class, and what its layer has beside the attributes of the foreign one.

    Attributes:
        class_path: Full name of the class.
        attributes: What the foreign layer lacks, or has under another name.
        activates: Whether the foreign layer's only child is the activation behind the norm.
    """

    class_path: str
    attributes: dict[str, Any] = field(default_factory=dict)
    activates: bool = False

    def layer(self, module: nn.Module) -> nn.Module:
        """Return a layer of the known class around tensors, hooks and attributes of `module`."""
        path, _, name = self.class_path.rpartition(".")
        cls = getattr(import_module(path), name)
        new: nn.Module = cls.__new__(cls)
        vars(new).update(vars(module), **self.attributes)
        for store in ("_parameters", "_buffers", "_modules"):
            vars(new)[store] = dict(vars(module)[store])
        for name in {"weight", "bias"} - new._buffers.keys():
            new._parameters.setdefault(name, None)
        if self.activates:
            (activation,) = module.children()
            new._modules = {"act": activation, "drop": nn.Identity()}
        return new


_ANOTHER_FUNCTION = "another function on random inputs, of which it may take none"

# By class, settings and shapes of the inputs: the formula that agrees with random parameters, or why
# none does.
_PROVED: dict[tuple[type, str, str], Formula | str] = {}


def full_name(cls: type) -> str:
    """Return a class's module and name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def proved_formula(
    module: nn.Module, known: Iterable[str], shapes: Sequence[Sequence[int]] = ()
) -> Formula | str:
    """Return the known class whose function a layer computes, or why none is proved.

    Args:
        module: The layer, which is not changed.
        known: Full names of the known classes.
        shapes: Shapes of the inputs, (N, C, *), to compare on; without any, all that fit the known
            class.
    """
    key = type(module), _settings(module), str(shapes)
    if key not in _PROVED:
        _PROVED[key] = _first_agreeing(module, known, shapes)
    formula = _PROVED[key]
    if shapes or isinstance(formula, str) or _is_meta(module):
        return formula
    # A layer may do something else where its parameters are large, or zero.
    if _proves(module, formula, own=True):
        return formula
    return _ANOTHER_FUNCTION


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _settings(module: nn.Module) -> str:
    """Describe everything that a layer's function depends on except its class and its tensors'
    values.
    """
    tensors = *module.named_parameters(), *module.named_buffers()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors]
    attributes = [
        (name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE
    ]
    return f"{shapes} {attributes} {list(module.children())}"


def _first_agreeing(
    module: nn.Module, known: Iterable[str], shapes: Sequence[Sequence[int]]
) -> Formula | str:
    reason = _unprovable(module)
    if reason:
        return reason
    for formula in _candidates(module, set(known)):
        if _proves(module, formula, shapes):
            return formula
    return _ANOTHER_FUNCTION


def _proves(
    module: nn.Module, formula: Formula, shapes: Sequence[Sequence[int]] = (), own: bool = False
) -> bool:
    """Whether a comparison, with random or its own parameters, shows that a layer has a formula."""
    # Anything may come out of a layer's own code.
    with suppress(Exception), left_as_it_was(module):
        return _agrees(module, formula.layer(module), shapes, own)
    return False


def _unprovable(module: nn.Module) -> str:
    """Say why no comparison of outputs would prove what a layer is; empty if one does."""
    names = {name for method in methods_of(type(module)) for name in method.__code__.co_names}
    if any(map(_PROCESSES.search, names)):
        return "it may exchange values with other processes, which no comparison shows"
    for name in _METHODS_OF_MODULE:
        if getattr(type(module), name) is not getattr(nn.Module, name):
            # A `train` of its own, for example, may keep the module in evaluation.
            return f"it has a `{name}` of its own, which no comparison shows"
    return ""


def _candidates(module: nn.Module, known: set[str]) -> list[Formula]:
    """Return the formulas that a layer may have, by the class it is derived from or by what it
    holds.
    """
    plain = [Formula(parent) for parent in _parents(type(module), known)] or _by_tensors(module)
    if isinstance(module, nn.LayerNorm):
        plain.append(Formula(_LAYER_NORM_2D))
    children = list(module.children())
    if len(children) != 1 or children[0].state_dict():
        return plain
    fused = [
        Formula(
            _WITH_ACTIVATION[formula.class_path],
            {**formula.attributes, "_fast_norm": False},
            activates=True,
        )
        for formula in plain
        if formula.class_path in _WITH_ACTIVATION
    ]
    return plain + fused


def _parents(cls: type, known: set[str]) -> list[str]:
    """Return the known class that a class is derived from, or those of its private base."""
    for ancestor in cls.__mro__:
        if full_name(ancestor) in known:
            return [full_name(ancestor)]
        if ancestor in _CLASSES_BY_BASE:
            return [f"{ancestor.__module__}.{name}" for name in _CLASSES_BY_BASE[ancestor]]
    return []


def _by_tensors(module: Any) -> list[Formula]:
    """Return the formulas that a layer derived from no known class may have."""
    epsilons = _epsilons(module)
    frozen_names = {"weight", "bias", "running_mean", "running_var"}
    if frozen_names <= module._buffers.keys():
        return [Formula(_FROZEN, {"eps": eps}) for eps in epsilons]
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or module._buffers:
        return []
    shape = tuple(weight.shape)
    settings = {"normalized_shape": shape, "elementwise_affine": True}
    paths = (_LAYER_NORM, _LAYER_NORM_2D)
    return [Formula(path, {**settings, "eps": eps}) for eps in epsilons for path in paths]


def _epsilons(module: Any) -> Sequence[float]:
    """Return the epsilons that a layer may use: those it holds, or the usual ones."""
    attributes = ("eps", "epsilon", "variance_epsilon")
    return [getattr(module, name) for name in attributes if hasattr(module, name)] or _EPSILONS


def _agrees(
    module: nn.Module, other: nn.Module, shapes: Sequence[Sequence[int]], own: bool
) -> bool:
    """Whether two layers compute the same on seeded inputs, all that both take, in evaluation and
    in training.
    """
    # Some layers take no double precision; these are compared in single.
    for dtype in (torch.float64, torch.float32):
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            values = _values(module, dtype, own)
            verdicts = {
                _agrees_on((module, other), values, x, training)
                for shape in shapes or _shapes(other)
                for x in _inputs(shape, dtype)
                for training in (False, True)
            }
        taken = verdicts - {None}
        if taken:
            return taken == {True}
    return False


def _agrees_on(
    layers: Sequence[nn.Module], values: dict[str, Tensor], x: Tensor, training: bool
) -> bool | None:
    """Whether two layers with the given values agree on an input, in outputs, gradients and
    buffers; None if one does not take it.
    """
    try:
        ours, theirs = (_results(layer, values, x, training) for layer in layers)
    # A layer's own code may raise anything.
    except Exception:
        return None
    return all(map(_close, ours, theirs))


def _shapes(layer: Any) -> list[tuple[int, ...]]:
    """Return shapes of which some fit a layer of a known class."""
    if isinstance(layer, nn.LayerNorm):
        shape = tuple(layer.normalized_shape)
        rows = [(*(2,) * dims, *shape) for dims in range(1, 5)]
        return [*rows, (2, *shape, 3, 4), (1, *shape, 1, 1)]
    if hasattr(layer, "num_channels"):
        channels = layer.num_channels
    elif hasattr(layer, "num_features"):
        channels = layer.num_features
    else:
        channels = len(layer.running_mean)
    return [(4, channels), (3, channels, 5), (3, channels, 4, 5), (2, channels, 3, 2, 2)]


def _inputs(shape: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a random tensor of a shape in two memory layouts: contiguous, and transposed and so
    small that eps counts, also where there is a single sample.
    """
    scale = 10 ** (4 * torch.rand(shape[0], *[1] * (len(shape) - 1), dtype=torch.float64) - 3)
    x = (scale * (torch.randn(*shape, dtype=torch.float64) + 0.5)).to(dtype)
    yield x
    yield 1e-3 * x.transpose(0, -1).contiguous().transpose(0, -1)


def _values(module: nn.Module, dtype: torch.dtype, own: bool) -> dict[str, Tensor]:
    """Return random parameters and statistics for a layer, by name, or its own ones."""
    values = {}
    tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
    for name, tensor in tensors:
        shape = tensor.shape
        if not tensor.is_floating_point():
            values[name] = torch.zeros(shape, dtype=tensor.dtype)
        elif own:
            values[name] = tensor.detach().cpu().to(dtype)
        elif "var" in name:
            exponents = 6 * torch.rand(shape, dtype=torch.float64) - 5
            values[name] = (10**exponents).to(dtype)
        else:
            # Far from 0, so that no parameter is without effect.
            center = 1.0 if "weight" in name else 0.3
            values[name] = torch.randn(shape, dtype=dtype) + center
    return values


def _results(
    layer: nn.Module, values: dict[str, Tensor], x: Tensor, training: bool
) -> list[Tensor | None]:
    """Return the output of a layer with the given values, its gradients by the input and the
    parameters, and the buffers afterwards. No hook is called.
    """
    layer = _with_values(layer, values, training)
    x = x.detach().requires_grad_()
    out: Tensor = layer.forward(x)
    weights = torch.arange(out.numel(), dtype=x.dtype).sin().view(out.shape)
    parameters = [value for value in layer._parameters.values() if value is not None]
    grads = torch.autograd.grad((out * weights).sum(), [x, *parameters], allow_unused=True)
    return [out, *grads, *layer._buffers.values()]


def _with_values(layer: nn.Module, values: dict[str, Tensor], training: bool) -> nn.Module:
    """Return a copy of a layer with other parameters and buffers."""
    layer = copy.copy(layer)
    parameters = dict(layer._parameters)
    for name in parameters.keys() & values.keys():
        parameters[name] = nn.Parameter(values[name].clone())
    buffers = dict(layer._buffers)
    for name in buffers.keys() & values.keys():
        buffers[name] = values[name].clone()
    vars(layer).update(_parameters=parameters, _buffers=buffers, training=training)
    return layer


@torch.no_grad()
def _close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    # Some classes compute in float32 whatever they are given.
    share = 1e-4 if theirs.dtype == torch.float32 else 1e-5
    return ours.dtype == theirs.dtype and largest_gap(ours, theirs) <= share * scale_of(theirs)
