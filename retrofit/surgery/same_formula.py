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
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from retrofit.graph.trace import methods_of

_EPSILONS = (1e-5, 1e-6, 1e-3, 1e-12)
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
    """A known class, and the attributes that it needs beside those of the layer."""

    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def layer(self, module: nn.Module) -> nn.Module:
        """Return a layer of the known class around the tensors, hooks and attributes of `module`."""
        path, _, name = self.kind.rpartition(".")
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


_PROVED: WeakKeyDictionary[nn.Module, Formula | None] = WeakKeyDictionary()
# Which candidate agrees, by class and by all that modules of the class may differ in but their
# tensors' values.
_AGREEING: dict[tuple[type, str], int] = {}


def proved_formula(module: nn.Module, known: Iterable[str]) -> Formula | None:
    """Return the known class that a layer is one of in all but name; None if none is."""
    if module not in _PROVED:
        candidates = list(_candidates(module, set(known)))
        tensors = *module.named_parameters(), *module.named_buffers()
        shapes = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        settings = [
            item
            for item in vars(module).items()
            if not isinstance(item[1], dict) and item[0] != "training"
        ]
        kind = type(module), f"{shapes} {settings} {list(module.children())}"
        if kind not in _AGREEING:
            _AGREEING[kind] = next(
                (n for n, one in enumerate(candidates) if agrees(module, one)), len(candidates)
            )
        formula = [*candidates, None][_AGREEING[kind]]
        _PROVED[module] = (
            formula if formula is not None and agrees(module, formula, random=False) else None
        )
    return _PROVED[module]


def agrees(
    module: nn.Module, formula: Formula, shapes: Sequence[Sequence[int]] = (), random: bool = True
) -> bool:
    """Whether a layer computes what a known class does, on inputs of some shapes, or all that fit
    the known class.

    Parameters and statistics are random, or the layer's own, which a meta layer lacks. The layer is
    not changed.
    """
    names = {name for method in methods_of(type(module)) for name in method.__code__.co_names}
    if any(map(_PROCESSES.search, names)):
        # alone, it may be something else than among processes
        return False
    if any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _MODULE):
        # one that stays in evaluation, for example
        return False
    if not random and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return True
    # anything may come out of a layer's own code
    with suppress(Exception):
        other = formula.layer(module)
        shapes = shapes or _shapes(other)[: None if random else 1]
        # in the latter where it takes no other
        for dtype in (torch.float64, torch.float32):
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                values = _values(module, random, dtype)
                compared = {
                    _same((module, other), values, x, training)
                    for shape in shapes
                    for x in _inputs(shape, dtype)
                    for training in (False, True)
                }
            if compared != {None}:
                return False not in compared
    return False


def _candidates(module: Any, known: set[str]) -> Iterator[Formula]:
    """Yield the formulas that a layer may have, by the class it is derived from or by what it
    holds.
    """
    parent = next((full_name(cls) for cls in type(module).__mro__ if full_name(cls) in known), None)
    plain = [Formula(parent)] if parent else []
    own = [
        getattr(module, name)
        for name in ("eps", "epsilon", "variance_epsilon")
        if hasattr(module, name)
    ]
    eps = own or _EPSILONS
    if isinstance(module, nn.LayerNorm):
        plain.append(Formula(_MAPS))
    if (
        parent is None
        and {"weight", "bias", "running_mean", "running_var"} <= module._buffers.keys()
    ):
        plain += [Formula(_FROZEN, {"eps": value}) for value in eps]
    elif (
        parent is None
        and getattr(module._parameters.get("weight"), "ndim", 0) == 1
        and not module._buffers
    ):
        shape = tuple(module.weight.shape)
        given = {"normalized_shape": shape, "elementwise_affine": True}
        plain += [
            Formula(kind, {**given, "eps": value}) for value in eps for kind in (_ROWS, _MAPS)
        ]
    yield from plain
    children = list(module.children())
    if len(children) == 1 and not children[0].state_dict():
        act = {"act": children[0], "drop": nn.Identity(), "_fast_norm": False}
        yield from (
            Formula(_FUSED[one.kind], {**one.attributes, **act})
            for one in plain
            if one.kind in _FUSED
        )


def _shapes(layer: Any) -> list[tuple[int, ...]]:
    """Return shapes that fit a layer of a known class."""
    if isinstance(layer, nn.LayerNorm):
        shape = tuple(layer.normalized_shape)
        if "2d" in type(layer).__name__:
            return [(2, *shape, 3, 4), (1, *shape, 1, 1)]
        return [(*(2,) * dims, *shape) for dims in range(1, 5)]
    mean = getattr(layer, "running_mean", None)
    channels = (
        len(mean)
        if mean is not None
        else getattr(layer, "num_channels", None) or layer.num_features
    )
    every = [(4, channels), (3, channels, 5), (3, channels, 4, 5), (2, channels, 3, 2, 2)]
    if isinstance(layer, nn.GroupNorm):
        return every
    name = type(layer).__name__
    return every[:2] if "1d" in name else every[3:] if "3d" in name else every[2:3]


def _inputs(shape: Sequence[int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield random tensors of a shape, some samples so small that eps counts: in order, transposed,
    and with gaps.
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
        if not tensor.is_floating_point():
            values[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        elif not random:
            values[name] = tensor.detach().cpu().to(dtype)
        elif "var" in name:
            values[name] = (10 ** (6 * torch.rand(tensor.shape, dtype=torch.float64) - 5)).to(dtype)
        else:
            values[name] = torch.randn(tensor.shape, dtype=dtype) + (1 if "weight" in name else 0.3)
    return values


def _same(
    layers: Sequence[Any], values: dict[str, Tensor], x: Tensor, training: bool
) -> bool | None:
    """Whether copies of a layer and its candidate, with other values, answer an input alike; None
    if the layer refuses it. No hook is called.
    """
    answers: list[list[Tensor | None]] = []
    for layer in layers:
        cls, inputs = cast(Any, type(layer)), x.detach().requires_grad_()
        new = cls.__new__(cls)
        buffers = {
            name: values[name].clone() if name in values else None for name in layer._buffers
        }
        given = {
            name: nn.Parameter(values[name].clone()) if name in values else None
            for name in layer._parameters
        }
        vars(new).update(vars(layer), _buffers=buffers, _parameters=given, training=training)
        try:
            out = new.forward(inputs)
        except (
            Exception
        ):  # anything may come out of a layer's own code; a known class may take more
            return False if answers else None
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
        trained = [inputs, *(parameter for parameter in given.values() if parameter is not None)]
        grads = torch.autograd.grad((out * weights).sum(), trained, allow_unused=True)
        answers.append([out, *grads, *buffers.values()])
    return all(map(_close, *answers))


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # some classes compute in float32
    share = 1e-4 if one.dtype == torch.float32 else 1e-5
    largest = float(other.detach().abs().nan_to_num(0, 0, 0).amax()) if other.numel() else 0.0
    return torch.allclose(
        one.double(), other.double(), rtol=0, atol=share * largest, equal_nan=True
    )
