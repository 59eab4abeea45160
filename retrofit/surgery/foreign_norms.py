"""Prove that a foreign normalization layer computes what a known one does, so that it can be
converted as that.

Libraries derive classes from torch's normalization layers, or write them anew, and change no
arithmetic: LayerNorm over the channels of maps, a frozen BatchNorm, GroupNorm with an activation.
The layer and its candidate hold the same attributes and tensors under two classes, and are run on
the same seeded inputs in float64: in evaluation and in training, contiguous and not, with random
parameters and with the layer's own. Outputs, gradients and running statistics have to agree.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from retrofit.graph.source_code import methods_of
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


@dataclass(frozen=True)
class Formula:
    """A known class, and the attributes that it needs beside those of the layer."""

    class_path: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def layer(self, module: nn.Module) -> nn.Module:
        """Return a layer of the known class around tensors, hooks and attributes of `module`."""
        path, _, name = self.class_path.rpartition(".")
        cls = getattr(import_module(path), name)
        new: nn.Module = cls.__new__(cls)
        vars(new).update(vars(module))
        for store in ("_parameters", "_buffers", "_modules"):
            vars(new)[store] = dict(vars(module)[store])
        if "act" in self.attributes:
            new._modules.clear()
        for key, value in self.attributes.items():
            setattr(new, key, value)
        for name in {"weight", "bias"} - new._buffers.keys():
            new._parameters.setdefault(name, None)
        return new


def full_name(cls: type) -> str:
    """Return a class's module and name."""
    return f"{cls.__module__}.{cls.__qualname__}"


# torch's private bases, and the classes that fix the number of an input's dimensions.
_CLASSES_BY_BASE = {
    nn.modules.batchnorm._BatchNorm: ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    nn.modules.instancenorm._InstanceNorm: ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
}

_PROVED: WeakKeyDictionary[nn.Module, Formula | str] = WeakKeyDictionary()
# By class and settings: which candidate agrees, or why none does.
_AGREEING: dict[tuple[type, str], int | str] = {}

# Tensors, children and hooks, which are described by themselves or are not called.
_OF_EVERY_MODULE = vars(nn.Module()).keys()

# What a comparison says of two layers: "refused" if the foreign one takes none of the inputs.
Verdict = Literal["same", "different", "refused"]

ANOTHER_FUNCTION = "another function on random inputs"


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
    if shapes:
        return _first_agreeing(module, _candidates(module, set(known)), shapes)
    if module not in _PROVED:
        _PROVED[module] = _proved_by_class(module, list(_candidates(module, set(known))))
    return _PROVED[module]


def _proved_by_class(module: nn.Module, candidates: Sequence[Formula]) -> Formula | str:
    """Compare a layer with its candidates: with random parameters once for its class and settings,
    with its own parameters each time.
    """
    key = type(module), _settings(module)
    if key not in _AGREEING:
        first = _first_agreeing(module, candidates)
        if isinstance(first, Formula):
            _AGREEING[key] = candidates.index(first)
        else:
            _AGREEING[key] = first
    agreeing = _AGREEING[key]
    if isinstance(agreeing, str):
        return agreeing
    formula = candidates[agreeing]
    if verdict_on(module, formula, random=False) != "same":
        return ANOTHER_FUNCTION
    return formula


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
    module: nn.Module, candidates: Iterable[Formula], shapes: Sequence[Sequence[int]] = ()
) -> Formula | str:
    if reason := _unprovable(module):
        return reason
    verdicts = set()
    for formula in candidates:
        verdict = verdict_on(module, formula, shapes)
        if verdict == "same":
            return formula
        verdicts.add(verdict)
    if "different" in verdicts:
        return ANOTHER_FUNCTION
    return "compared with nothing: it takes none of the inputs that the known layer takes"


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


def verdict_on(
    module: nn.Module, formula: Formula, shapes: Sequence[Sequence[int]] = (), random: bool = True
) -> Verdict:
    """Return whether a layer computes what a known class does.

    The inputs have the given shapes, or all that fit the known class. Parameters and statistics are
    random, or the layer's own, which a layer on the meta device lacks. The layer is not changed.
    """
    if not random and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return "same"
    # Anything may come out of a layer's own code.
    with suppress(Exception), left_as_it_was(module):
        other = formula.layer(module)
        if not shapes:
            shapes = _shapes(other)
            if not random:
                shapes = shapes[:1]
        # Some layers take no double precision; these are compared in single.
        for dtype in (torch.float64, torch.float32):
            verdicts = _verdicts(module, other, shapes, random, dtype)
            if "different" in verdicts:
                return "different"
            if "same" in verdicts:
                return "same"
    return "refused"


def _verdicts(
    module: nn.Module,
    other: nn.Module,
    shapes: Sequence[Sequence[int]],
    random: bool,
    dtype: torch.dtype,
) -> set[Verdict]:
    """Compare two layers on seeded inputs of every shape, in evaluation and in training."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = _values(module, random, dtype)
        return {
            _verdict_on_input((module, other), values, x, training)
            for shape in shapes
            for x in _inputs(shape, dtype)
            for training in (False, True)
        }


def _candidates(module: nn.Module, known: set[str]) -> list[Formula]:
    """Return the formulas that a layer may have, by the class it is derived from or by what it
    holds.
    """
    ancestors = [full_name(cls) for cls in type(module).__mro__]
    parent = next((name for name in ancestors if name in known), None)
    plain = _by_tensors(module) if parent is None else [Formula(parent)]
    if isinstance(module, nn.LayerNorm):
        plain.append(Formula(_LAYER_NORM_2D))
    return plain + _with_activation(module, plain)


def _by_tensors(module: Any) -> list[Formula]:
    """Return the formulas that a layer derived from no known class may have, by its base of torch's
    or its tensors.
    """
    for base, names in _CLASSES_BY_BASE.items():
        if isinstance(module, base):
            return [Formula(f"{base.__module__}.{name}") for name in names]
    epsilons = _epsilons(module)
    if {"weight", "bias", "running_mean", "running_var"} <= module._buffers.keys():
        return [Formula(_FROZEN, {"eps": eps}) for eps in epsilons]
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or module._buffers:
        return []
    formulas = []
    for eps in epsilons:
        settings = {
            "normalized_shape": tuple(weight.shape),
            "elementwise_affine": True,
            "eps": eps,
        }
        formulas += [Formula(_LAYER_NORM, settings), Formula(_LAYER_NORM_2D, settings)]
    return formulas


def _epsilons(module: nn.Module) -> Sequence[float]:
    """Return the epsilons that a layer may use: those it holds, or the usual ones."""
    attributes = ("eps", "epsilon", "variance_epsilon")
    values = [getattr(module, name) for name in attributes if hasattr(module, name)]
    return values or _EPSILONS


def _with_activation(module: nn.Module, plain: Sequence[Formula]) -> list[Formula]:
    """Return the formulas of timm's fused layers, if the only child is an activation without
    tensors.
    """
    children = list(module.children())
    if len(children) != 1:
        return []
    activation = children[0]
    if activation.state_dict():
        return []
    fused = {"act": activation, "drop": nn.Identity(), "_fast_norm": False}
    return [
        Formula(_WITH_ACTIVATION[formula.class_path], {**formula.attributes, **fused})
        for formula in plain
        if formula.class_path in _WITH_ACTIVATION
    ]


def _shapes(layer: Any) -> list[tuple[int, ...]]:
    """Return shapes that fit a layer of a known class."""
    if isinstance(layer, nn.LayerNorm):
        shape = tuple(layer.normalized_shape)
        if "2d" in type(layer).__name__:
            return [(2, *shape, 3, 4), (1, *shape, 1, 1)]
        return [(*(2,) * dims, *shape) for dims in range(1, 5)]
    channels = _channels(layer)
    every = [(4, channels), (3, channels, 5), (3, channels, 4, 5), (2, channels, 3, 2, 2)]
    if isinstance(layer, nn.GroupNorm):
        return every
    name = type(layer).__name__
    if "1d" in name:
        return every[:2]
    if "3d" in name:
        return every[3:]
    return every[2:3]


def _channels(layer: Any) -> int:
    mean = getattr(layer, "running_mean", None)
    if mean is not None:
        return len(mean)
    return int(getattr(layer, "num_channels", None) or layer.num_features)


def _inputs(shape: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield a random tensor of a shape in three memory layouts: contiguous, transposed, with gaps.

    Some of its samples are so small that eps counts.
    """
    scale = 10 ** (4 * torch.rand(shape[0], *[1] * (len(shape) - 1), dtype=torch.float64) - 3)
    x = (scale * (torch.randn(*shape, dtype=torch.float64) + 0.5)).to(dtype)
    yield x
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield x.repeat_interleave(2, -1)[..., ::2]


def _values(module: nn.Module, random: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    values = {}
    for name, tensor in (
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ):
        shape = tensor.shape
        if not tensor.is_floating_point():
            values[name] = torch.zeros(shape, dtype=tensor.dtype)
        elif not random:
            values[name] = tensor.detach().cpu().to(dtype)
        elif "var" in name:
            uniform = torch.rand(shape, dtype=torch.float64)
            exponents = 6 * uniform - 5
            values[name] = (10**exponents).to(dtype)
        else:
            # Far from 0, so that no parameter is without effect.
            center = 0.3
            if "weight" in name:
                center = 1.0
            values[name] = torch.randn(shape, dtype=dtype) + center
    return values


def _verdict_on_input(
    layers: Sequence[Any], values: dict[str, Tensor], x: Tensor, training: bool
) -> Verdict:
    """Compare copies of a layer and its candidate, with the given values, on an input: in outputs,
    gradients and buffers. No hook is called.
    """
    results: list[list[Tensor | None]] = []
    for layer in layers:
        inputs = x.detach().requires_grad_()
        copy = _with_values(layer, values, training)
        try:
            out = copy.forward(inputs)
        # A layer's own code may raise anything, and a known class may take inputs that it refuses.
        except Exception:
            if results:
                return "different"
            return "refused"
        grads = _gradients(copy, inputs, out)
        results.append([out, *grads, *copy._buffers.values()])
    if all(map(_close, *results)):
        return "same"
    return "different"


def _gradients(layer: Any, inputs: Tensor, out: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of a sum of a layer's outputs, with seeded random weights, by its
    inputs and parameters.
    """
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator, dtype=inputs.dtype)
    loss = (out * weights).sum()
    parameters = [value for value in layer._parameters.values() if value is not None]
    return torch.autograd.grad(loss, [inputs, *parameters], allow_unused=True)


def _with_values(layer: Any, values: dict[str, Tensor], training: bool) -> Any:
    """Return a copy of a layer with other parameters and buffers, None where there is no value."""
    buffers: dict[str, Tensor | None] = dict.fromkeys(layer._buffers)
    parameters: dict[str, Tensor | None] = dict.fromkeys(layer._parameters)
    for name in buffers.keys() & values.keys():
        buffers[name] = values[name].clone()
    for name in parameters.keys() & values.keys():
        parameters[name] = nn.Parameter(values[name].clone())
    cls = cast(Any, type(layer))
    copy = cls.__new__(cls)
    vars(copy).update(vars(layer), _buffers=buffers, _parameters=parameters, training=training)
    return copy


def _close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    dtype = theirs.dtype
    if ours.shape != theirs.shape or ours.dtype != dtype:
        return False
    # Some classes compute in float32 whatever they are given.
    share = 1e-5
    if dtype == torch.float32:
        share = 1e-4
    largest = 0.0
    if theirs.numel():
        magnitudes = theirs.detach().abs().nan_to_num(0, 0, 0)
        largest = float(magnitudes.amax())
    return torch.allclose(
        ours.double(), theirs.double(), rtol=0, atol=share * largest, equal_nan=True
    )
