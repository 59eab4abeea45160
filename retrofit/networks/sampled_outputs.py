"""Sampled outputs that verify a rebuilt network: a few numbers of what it and some of its layers answer to an image.

The images are the same on every machine, and float32 arithmetic on another processor, with another library, changes the
numbers by far less than `TOLERANCE`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.compare import tensors_of
from retrofit.inputs import Call, input_shapes, is_detector
from retrofit.record import check_size
from retrofit.utils.running import hooked, placement_of, undisturbed
from retrofit.utils.text import with_class

TOLERANCE = 1e-3  # of the largest value: AVX2 and AVX-512 differ by some 1e-6 of it an operation

_INPUTS, _PRODUCTS = 4e6, 5e12  # numbers of an image; parameters times pixels, 4.3e12 for ViT-B
_LAYERS, _SAMPLES, _SIDE = 12, 6, 32


@dataclass(frozen=True)
class Sample:
    """The largest value of a layer's output, and a few of its values, evenly spread."""

    scale: float
    samples: list[float]


@dataclass(frozen=True)
class SampledOutputs:
    """What a network answers to an image."""

    size: tuple[int, ...] = ()  # (C, H, W) of the image
    classes: int | None = None  # how many scores the network gives, where it gives one number for each class
    values: dict[str, Sample] = field(default_factory=dict)  # by layer; "" is the network's output
    not_checked: str = ""  # why the network was not run; the other fields are empty then

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the attributes, or why there are none."""
        values = asdict(self)
        why = values.pop("not_checked")
        return {"not_checked": why} if why else values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SampledOutputs:
        """Rebuild from `to_dict`'s values; raise KeyError, TypeError or ValueError if they are others."""
        if "not_checked" in values:
            return cls(not_checked=str(values["not_checked"]))
        check_size(values["size"])
        rows = {
            str(name): Sample(float(row["scale"]), [float(number) for number in row["samples"]])
            for name, row in values["values"].items()
        }
        return cls(tuple(values["size"]), values["classes"], rows)

    def difference(self, other: SampledOutputs) -> str:
        """Say where another network's outputs differ most by more than rounding; empty if they do not."""
        if other.not_checked:
            return other.not_checked
        worst, where = 0.0, ""
        for name, sample in self.values.items():
            others = other.values[name].samples if name in other.values else []
            if len(others) != len(sample.samples):
                return f"the output of {name or 'the network'} has another shape, or other values that are not finite"
            gaps = [abs(a - b) for a, b in zip(sample.samples, others, strict=True)]
            share = max(gaps, default=0.0) / sample.scale if sample.scale else float(any(gaps))
            if not share <= max(worst, TOLERANCE):
                worst, where = share, name
        return f"the output of {where or 'the network'} differs by {worst:.2g} of its scale" if worst else ""


def sample_outputs(model: nn.Module, own_size: Sequence[int]) -> SampledOutputs:
    """Run a network on an image of half its own size, or of that, or a smaller one where the network is large."""
    size = tuple(own_size)
    while not is_small(model, size):
        if _halved(size) == size:
            return SampledOutputs(not_checked="it is large")
        size = _halved(size)
    outputs = sample_outputs_at(model, _halved(size))
    return sample_outputs_at(model, size) if outputs.not_checked else outputs


def sample_outputs_at(model: nn.Module, size: Sequence[int], layers: Collection[str] | None = None) -> SampledOutputs:
    """Run a network on an image of `size`, (C, H, W), on the CPU, in float32 or, if it is all float64, that.

    Sampled are those of `layers` that it has, or some of all if None. The network is left as it was. Of a detector the
    backbone is run: its boxes come out of sorting, where rounding swaps two.
    """
    values: dict[str, Sample] = {}

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        values.setdefault(name, _sample(output))

    try:
        model = _on_cpu(model)
        images = [_images(shape).to(placement_of(model)[1]) for shape in input_shapes(model, tuple(size), 1)]
        call = Call(tuple(images), stage="backbone" if is_detector(model) else "")
        names = [name for name, module in model.named_modules() if name and (module._parameters or module._buffers)]
        if layers is None:
            names = names[:: max(1, -(-len(names) // _LAYERS))]
        else:
            names = [name for name in names if name in layers]
        watched = hooked(model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in names)
        with undisturbed(model), watched:
            answer = call.on(model)
    except Exception as error:  # anything may come out of a network's own code
        why = f"it takes no random images of {'x'.join(map(str, size))} ({with_class(error, 100)})"
        return SampledOutputs(not_checked=why)
    values[""] = _sample(answer)
    values = {name: sample for name, sample in values.items() if sample.samples}
    if not values:
        return SampledOutputs(not_checked="it answers random images with no finite number")
    scores = not call.stage and isinstance(answer, Tensor) and answer.ndim == 2
    return SampledOutputs(tuple(size), answer.shape[1] if scores else None, values)


def _halved(size: tuple[int, ...]) -> tuple[int, ...]:
    channels, *sides = size
    return (channels, *(max(side // 2 // _SIDE, 1) * _SIDE if side >= 2 * _SIDE else side for side in sides))


def is_small(model: nn.Module, size: Sequence[int]) -> bool:
    """Whether a network costs little on an image: a second or so, if no parameter is used more than once a pixel."""
    if math.prod(size) > _INPUTS:
        return False
    return sum(parameter.numel() for parameter in model.parameters()) * math.prod(size[1:]) < _PRODUCTS


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return a network that computes on the CPU in float32 or float64: this one, or a copy."""
    tensors = list(chain(model.parameters(), model.buffers()))
    floating = {tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.ndim}
    wide = torch.float64 if floating == {torch.float64} else torch.float32
    wrapped = "_original_forward" in vars(model)  # by accelerate, for mixed precision
    if not wrapped and all(tensor.device.type == "cpu" for tensor in tensors) and floating <= {wide}:
        return model
    model = copy.deepcopy(model)
    for name in ("forward", "_original_forward") if wrapped else ():
        vars(model).pop(name, None)
    return model.to("cpu", wide)


def _images(shape: tuple[int, ...]) -> Tensor:
    """Numbers of mean 0 and variance 1, the same with every version of torch."""
    mixed = torch.arange(math.prod(shape), device="cpu") * 2654435761 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 2246822519 & 0xFFFFFFFF
    return ((mixed ^ mixed >> 13).double() / 2**31 - 1).mul_(3**0.5).float().reshape(shape)


def _sample(output: Any) -> Sample:
    """Sample each of an output's tensors that is finite."""
    samples: list[float] = []
    scale = 0.0
    for tensor in tensors_of(output):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        largest = float(tensor.detach().abs().max())
        if math.isfinite(largest):
            scale = max(scale, largest)
            flat = tensor.detach().flatten()
            places = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
            samples += [float(f"{number:.7g}") for number in flat[places].tolist()]
    return Sample(float(f"{scale:.7g}"), samples)
