"""Prove that a foreign normalization layer computes what a known one does, so that it can be
converted as that.

Libraries derive classes from torch's normalization layers, or write them anew, and change no
arithmetic: LayerNorm over the channels of maps, a frozen BatchNorm, GroupNorm with an activation.
The layer and its candidate hold the same attributes and tensors under two classes, and are run on
the same seeded inputs with the same random parameters: in evaluation and in training, contiguous
and not. Outputs, gradients and running statistics have to agree.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from retrofit.graph.source import methods_of
from retrofit.utils.snapshot import left_as_it_was

_EPSILONS = (1e-5, 1e-6, 1e-3, 1e-12)
# Of the largest value of an output, gradient or statistic
_TOLERANCE = 1e-4
_PROCESSES = re.compile(r"^dist(ributed)?$|world_size|process_group|all_(reduce|gather)|sync")
_MODULE = ("train", "eval", "__call__", "parameters", "named_parameters")
_MAPS = "torchvision.models.convnext.LayerNorm2d"
_ROWS = "torch.nn.modules.normalization.LayerNorm"
_FROZEN = "torchvision.ops.misc.FrozenBatchNorm2d"
_FUSED = {
    "torch.nn.modules.batchnorm.BatchNorm2d": "timm.layers.norm_act.BatchNormAct2d",
    "torch.nn.modules.normalization.GroupNorm": "timm.layers.norm_act.GroupNormAct",
    _ROWS: "timm.layers.norm_act.LayerNormAct",
    _MAPS: "timm.layers.norm_act.LayerNormAct2d",
}


@dataclass(frozen=True)
class Formula:
    """A known class, and the attributes that it needs beside those of the layer; `is_fused` if the
    layer's only child is its activation.
    """

    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)
    is_fused: bool = False

    def layer(self, module: nn.Module) -> nn.Module:
        """Return a layer of the known class around tensors, hooks and attributes of `module`."""
        path, _, name = self.kind.rpartition(".")
        cls = getattr(import_module(path), name)
        new: nn.Module = cls.__new__(cls)
        vars(new).update(vars(module))
        for store in ("_parameters", "_buffers", "_modules"):
            vars(new)[store] = dict(vars(module)[store])
        if self.is_fused:
            (activation,) = module.children()
            new._modules = {"act": activation, "drop": nn.Identity()}
            vars(new)["_fast_norm"] = False
        vars(new).update(self.attributes)
        for name in {"weight", "bias"} - new._buffers.keys():
            new._parameters.setdefault(name, None)
        return new


def full_name(cls: type) -> str:
    """Return a class's module and name."""
    return f"{cls.__module__}.{cls.__qualname__}"


_BASES = {
    nn.modules.batchnorm._BatchNorm: ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    nn.modules.instancenorm._InstanceNorm: ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"),
}
"""torch's private bases, and the classes that fix the number of an input's dimensions."""

# The known class, or why none is proved, by class and by all that modules of the class may differ in
# but their tensors' values.
_PROVED: dict[tuple[type, str], Formula | str] = {}

ANOTHER_FUNCTION = "another function on random inputs"


def proved_formula(
    module: nn.Module, known: Iterable[str], shapes: Sequence[Sequence[int]] = ()
) -> Formula | str:
    """Return the known class that a layer is one of in all but name, or why none is proved.

    Args:
        module: The layer, which is not changed.
        known: Full names of the known classes.
        shapes: Shapes of inputs, (N, C, *), that it has to agree on; all that fit the known class
            if there are none.
    """
    key = type(module), f"{_settings(module)} {shapes}"
    if key not in _PROVED:
        _PROVED[key] = _first_agreeing(module, _candidates(module, set(known)), shapes)
    return _PROVED[key]


def _settings(module: nn.Module) -> str:
    """Describe all that a layer's function depends on beside its class and its tensors' values."""
    tensors = *module.named_parameters(), *module.named_buffers()
    shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors]
    attributes = [
        (name, value)
        for name, value in vars(module).items()
        if name != "training" and not isinstance(value, dict)
    ]
    return f"{shapes} {attributes} {list(module.children())}"


def _first_agreeing(
    module: nn.Module, candidates: Iterable[Formula], shapes: Sequence[Sequence[int]]
) -> Formula | str:
    if reason := _unprovable(module):
        return reason
    verdicts = set()
    for formula in candidates:
        verdict = agrees(module, formula, shapes)
        if verdict:
            return formula
        verdicts.add(verdict)
    if False in verdicts:
        return ANOTHER_FUNCTION
    return "compared with nothing: it takes none of the inputs that the known layer takes"


def _unprovable(module: nn.Module) -> str:
    """Say why no comparison of outputs would prove what a layer is; empty if one does."""
    names = {name for method in methods_of(type(module)) for name in method.__code__.co_names}
    if any(map(_PROCESSES.search, names)):
        return "it may exchange values with other processes, which no comparison shows"
    for name in _MODULE:
        if getattr(type(module), name) is not getattr(nn.Module, name):
            # A `train` of its own, for example, may keep the module in evaluation.
            return f"it has a `{name}` of its own, which no comparison shows"
    return ""


def agrees(
    module: nn.Module, formula: Formula, shapes: Sequence[Sequence[int]] = ()
) -> bool | None:
    """Whether a layer computes what a known class does, on inputs of some shapes, or all that fit
    the known class; None if it takes none of them. The layer is not changed.
    """
    # Anything may come out of a layer's own code.
    with (
        suppress(Exception),
        left_as_it_was(module),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)
        other = formula.layer(module)
        values = _random_values(module)
        verdicts = {
            _same((module, other), values, x, training)
            for shape in shapes or _shapes(other)
            for x in _inputs(shape)
            for training in (False, True)
        }
        if verdicts != {None}:
            return False not in verdicts
    return None


def _candidates(module: nn.Module, known: set[str]) -> list[Formula]:
    """Return the formulas that a layer may have, by the class it is derived from or by what it
    holds.
    """
    ancestors = [full_name(cls) for cls in type(module).__mro__]
    parent = next((name for name in ancestors if name in known), None)
    plain = _by_tensors(module) if parent is None else [Formula(parent)]
    if isinstance(module, nn.LayerNorm):
        plain.append(Formula(_MAPS))
    return plain + _with_activation(module, plain)


def _by_tensors(module: Any) -> list[Formula]:
    """Return the formulas that a layer derived from no known class may have, by its base of torch's
    or its tensors.
    """
    for base, names in _BASES.items():
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
        formulas += [Formula(_ROWS, settings), Formula(_MAPS, settings)]
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
    if len(children) != 1 or children[0].state_dict():
        return []
    return [
        replace(formula, kind=_FUSED[formula.kind], is_fused=True)
        for formula in plain
        if formula.kind in _FUSED
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


def _inputs(shape: Sequence[int]) -> Iterator[Tensor]:
    """Yield random tensors of a shape, some samples so small that eps counts: in order, transposed,
    and with gaps.
    """
    one_a_sample = (shape[0], *[1] * (len(shape) - 1))
    scale = 10 ** (4 * torch.rand(one_a_sample) - 3)
    x = scale * (torch.randn(*shape) + 0.5)
    yield x
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield x.repeat_interleave(2, -1)[..., ::2]


def _random_values(module: nn.Module) -> dict[str, Tensor]:
    """Return values for a layer's tensors, far from 0, so that none is without effect."""
    tensors = {**module._parameters, **module._buffers}
    return {
        name: _random_value(name, tensor) for name, tensor in tensors.items() if tensor is not None
    }


def _random_value(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if "var" in name:
        return 10 ** (6 * torch.rand(tensor.shape) - 5)
    if "weight" in name:
        return torch.randn(tensor.shape) + 1.0
    return torch.randn(tensor.shape) + 0.3


def _same(
    layers: Sequence[Any], values: dict[str, Tensor], x: Tensor, training: bool
) -> bool | None:
    """Whether copies of a layer and its candidate, with other values, answer an input alike; None
    if the layer refuses it.
    """
    layer, candidate = layers
    try:
        ours = _answers(layer, values, x, training)
    # A layer's own code may raise anything.
    except Exception:
        return None
    # A known class that refuses what the layer takes is another function.
    with suppress(Exception):
        return all(map(_close, ours, _answers(candidate, values, x, training)))
    return False


def _answers(
    layer: Any, values: dict[str, Tensor], x: Tensor, training: bool
) -> list[Tensor | None]:
    """Return the output, gradients and buffers of a copy with other values; no hook is called."""
    cls = cast(Any, type(layer))
    copied = cls.__new__(cls)
    buffers = {name: _copy(values.get(name)) for name in layer._buffers}
    parameters = {name: _trained(values.get(name)) for name in layer._parameters}
    vars(copied).update(
        vars(layer),
        _buffers=buffers,
        _parameters=parameters,
        training=training,
    )
    inputs = x.detach().requires_grad_()
    out = copied.forward(inputs)
    trained = [inputs, *(value for value in parameters.values() if value is not None)]
    seeded = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=seeded)).sum()
    return [out, *torch.autograd.grad(loss, trained, allow_unused=True), *buffers.values()]


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()


def _trained(value: Tensor | None) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(value.clone())


def _close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    largest = float(theirs.detach().abs().nan_to_num(0, 0, 0).max()) if theirs.numel() else 0.0
    return torch.allclose(
        ours,
        theirs,
        rtol=0,
        atol=_TOLERANCE * largest,
        equal_nan=True,
    )
