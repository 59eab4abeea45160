"""A few numbers that a network answers with: what tells one function from another when it is built again.

The images are the same on every machine, and float32 arithmetic on another processor, with another library, changes the
numbers by far less than `TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from retrofit.surgery.identity_check import input_shapes, is_detector
from retrofit.utils.evaluating import evaluating
from retrofit.utils.hooks import hooked
from retrofit.utils.placement import placement_of
from retrofit.utils.text import with_class

TOLERANCE = 1e-3
"""Of the largest value: AVX2 and AVX-512 differ by some 1e-6 of it an operation."""

_FLOPS, _ELEMENTS, _PARAMETERS = 50e9, 500e6, 150e6  # a second or so on two cores
_INPUTS = 4e6
_PRODUCTS = 2e12  # of parameters and pixels; resnet50 has 1.3e12 of them
_LAYERS, _SAMPLES = 12, 6
_SIDE = 32


class CannotTakeError(Exception):
    """The network is not run; the message says why."""


class TooCostlyError(CannotTakeError):
    """It would take long."""


def cheap_size(skeleton: nn.Module, size: Sequence[int]) -> tuple[int, ...]:
    """Return the size of images on which a network can be run at little cost: its own, or smaller.

    Args:
        skeleton: Its twin on the meta device.
        size: (C, H, W) of its own images.

    Raises:
        CannotTakeError: As `check_cost`, for its own images and all smaller ones.
    """
    try:
        check_cost(skeleton, size)
    except TooCostlyError:
        channels, *sides = size
        if min(sides) < 2 * _SIDE:
            raise
        return cheap_size(skeleton, (channels, *(side // 2 // _SIDE * _SIDE for side in sides)))
    return tuple(size)


def is_small(model: nn.Module, size: Sequence[int]) -> bool:
    """Whether a library's network surely costs little: no parameter is used more than once a pixel."""
    if math.prod(size) > _INPUTS:
        return False
    return sum(parameter.numel() for parameter in model.parameters()) * math.prod(size[1:]) < _PRODUCTS


def check_cost(skeleton: nn.Module, size: Sequence[int]) -> None:
    """Find out whether a network can be run at little cost, from its twin on the meta device.

    Args:
        skeleton: The twin, without memory for its tensors.
        size: (C, H, W) of its images.

    Raises:
        CannotTakeError: If it is large, or does not run on the meta device.
    """
    if sum(parameter.numel() for parameter in skeleton.parameters()) > _PARAMETERS:
        raise CannotTakeError("it has many parameters")
    stage, shapes = _call(skeleton, size)
    try:
        if sum(map(math.prod, shapes)) > _ELEMENTS:
            raise TooCostlyError("its images are large")
        with evaluating(skeleton), _Cost():
            stage(*(torch.empty(shape, device="meta") for shape in shapes))
    except CannotTakeError:
        raise
    except Exception as error:  # anything may come out of a network's own code
        raise CannotTakeError(f"it does not run without its tensors' values ({with_class(error, 100)})") from error


def measure(model: nn.Module, size: Sequence[int], layers: Collection[str] | None = None) -> dict[str, Any]:
    """Run a network on an image and sample its output and those of some of its layers.

    Args:
        model: A network on the CPU; its modes are put back.
        size: (C, H, W) of its images.
        layers: Names of the layers, of which those that it has count; some of all if None.

    Returns:
        JSON values: {"size": [C, H, W], "outputs": int, "values": {name: {"scale", "samples"}}}; "" names the
        network's output, and "outputs" is there if that is one number for each class. A detector is not run beyond its
        backbone: its boxes come out of sorting, where rounding swaps two.

    Raises:
        CannotTakeError: If it does not run on such images.
    """
    stage, shapes = _call(model, size)
    chosen = [name for name, module in model.named_modules() if name and (module._parameters or module._buffers)]
    if layers is None:
        chosen = chosen[:: max(1, -(-len(chosen) // _LAYERS))]
    else:
        chosen = [name for name in chosen if name in layers]
    values: dict[str, Any] = {}

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if name not in values:
            values[name] = _sample(output)

    _, dtype = placement_of(model)
    inputs = [_images(shape).to(dtype) for shape in shapes]
    watched = hooked(model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in chosen)
    try:
        with evaluating(model), watched, torch.random.fork_rng(devices=[]):
            output = stage(*inputs)
            values[""] = _sample(output)
    except Exception as error:  # anything may come out of a network's own code
        raise CannotTakeError(
            f"it takes no random images of {'x'.join(map(str, size))} ({with_class(error, 100)})"
        ) from error
    found: dict[str, Any] = {"size": list(size)}
    if stage is model and isinstance(output, Tensor) and output.ndim == 2:
        found["outputs"] = output.shape[1]
    return found | {"values": {name: value for name, value in values.items() if value["samples"]}}


def difference(known: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Say where two measurements differ most by more than rounding; None if they do not.

    Raises:
        KeyError, TypeError, ValueError: If `known` did not come from `measure`.
    """
    worst, where = 0.0, ""
    for name, value in known["values"].items():
        scale, wanted = float(value["scale"]), [float(number) for number in value["samples"]]
        answer = found["values"].get(name, {"samples": []})["samples"]
        if len(answer) != len(wanted):
            return f"the output of {name or 'the network'} has another shape"
        gaps = [abs(a - b) for a, b in zip(wanted, answer, strict=True)]
        share = max(gaps, default=0.0) / scale if scale else float(any(gaps))
        if not share <= max(worst, TOLERANCE):
            worst, where = share, name
    return f"the output of {where or 'the network'} differs by {worst:.2g} of its scale" if worst else None


class _Cost(TorchDispatchMode):
    """Adds up what operations would cost, on the meta device where nothing is done; stops where it is too much."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.elements = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        self.elements += sum(leaf.numel() for leaf in tree_leaves(answer) if isinstance(leaf, Tensor))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=answer)
        if self.flops > _FLOPS or self.elements > _ELEMENTS:
            raise TooCostlyError("it takes long to run")
        return answer


def _call(model: nn.Module, size: Sequence[int]) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """Return what to run, and the shapes of its inputs."""
    stage = model.get_submodule("backbone") if is_detector(model) else model
    return stage, input_shapes(model, tuple(size), 1)


def _images(shape: tuple[int, ...]) -> Tensor:
    """Numbers of mean 0 and variance 1, the same with every version of torch."""
    mixed = torch.arange(math.prod(shape), device="cpu") * 2654435761 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 2246822519 & 0xFFFFFFFF
    return ((mixed ^ mixed >> 13).double() / 2**31 - 1).mul_(3**0.5).float().reshape(shape)


def _sample(output: Any) -> dict[str, Any]:
    """Take a few numbers, evenly spread, of each tensor in an output, with the largest of all."""
    samples: list[float] = []
    scale = 0.0
    for leaf in tree_leaves(output):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        largest = float(leaf.abs().max())
        if not math.isfinite(largest):
            continue
        scale = max(scale, largest)
        flat = leaf.detach().flatten()
        places = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
        samples += [float(f"{number:.7g}") for number in flat[places].tolist()]
    return {"scale": float(f"{scale:.7g}"), "samples": samples}
