"""Sampled outputs, by which a network that was built again is verified.

They are a few numbers from the outputs of the network and of some of its layers on an image. The
image is the same on every machine. Another processor or library changes the numbers, computed in
float32, by far less than `TOLERANCE`.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.inputs import Call, input_shapes, takes_image_list
from retrofit.record import check_size
from retrofit.utils.forward_pass import hooked, undisturbed
from retrofit.utils.output_tensors import tensors_in
from retrofit.utils.text import printable, with_class

# Of the largest value; AVX2 and AVX-512 differ by some 1e-6 of it an operation.
TOLERANCE = 1e-3

# A network is run if an image has at most so many values, and parameters times pixels are fewer
# than so many: ViT-B at its own size has 4.3e12 of these.
_INPUTS = 4e6
_PRODUCTS = 5e12
# How many layers are sampled, and how many numbers of each output.
_LAYERS = 12
_SAMPLES = 6
# An image's sides are multiples of this.
_SIDE = 32


@dataclass(frozen=True)
class Sample:
    """The largest value of a layer's output, and a few of its values, evenly spread."""

    scale: float
    samples: list[float]

    @classmethod
    def of(cls, output: Any) -> "Sample":
        """Sample each of an output's tensors that is finite."""
        samples: list[float] = []
        scale = 0.0
        for tensor in tensors_in(output):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            flat = tensor.detach().flatten()
            if flat.isfinite().all():
                scale = max(scale, float(flat.abs().max()))
                count = min(_SAMPLES, len(flat))
                positions = torch.linspace(0, len(flat) - 1, count, dtype=torch.float64).long()
                samples += flat[positions].tolist()
        return cls(scale, samples)

    def share(self, other: "Sample") -> float:
        """Return the largest difference from another sample as a share of the scale."""
        gaps = [abs(a - b) for a, b in zip(self.samples, other.samples, strict=True)]
        return max(gaps) / (self.scale or 1e-30)


@dataclass(frozen=True)
class SampledOutputs:
    """A network's outputs on an image.

    Attributes:
        size: (C, H, W) of the image.
        classes: How many class scores the network outputs; None if it outputs something else.
        values: By layer; "" is the network's output.
        not_checked: Why the network was not run; the other fields are empty then.
    """

    size: tuple[int, ...] = ()
    classes: int | None = None
    values: dict[str, Sample] = field(default_factory=dict)
    not_checked: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the attributes, or why there are none."""
        values = asdict(self)
        why = values.pop("not_checked")
        if why:
            return {"not_checked": why}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SampledOutputs":
        """Rebuild from `to_dict`'s values; raise KeyError, TypeError or ValueError if they are
        others.
        """
        if "not_checked" in values:
            return cls(not_checked=str(values["not_checked"]))
        check_size(values["size"])
        rows = {
            str(name): Sample(float(row["scale"]), [float(number) for number in row["samples"]])
            for name, row in values["values"].items()
        }
        if not rows:
            raise ValueError("its sampled outputs hold none")
        return cls(tuple(values["size"]), values["classes"], rows)

    def difference(self, model: nn.Module) -> str:
        """Say where a network's outputs begin to differ from these by more than rounding; empty if
        they do not, or there are none.
        """
        if self.not_checked:
            return ""
        if not is_small(model, self.size):
            return (
                "its manifest asks for a run of a large network on images of "
                f"{printable(self.size, 80)}"
            )
        others = sample_outputs_at(model, self.size, self.values)
        if others.not_checked:
            return others.not_checked
        for name, sample in self.values.items():
            output = f"the output of {printable(name, 64) or 'the network'}"
            other = others.values.get(name)
            if other is None or len(other.samples) != len(sample.samples):
                return f"{output} has another shape, or other values that are not finite"
            share = sample.share(other)
            # A share that is not a number is larger than any.
            if not share <= TOLERANCE:
                return f"{output} differs by {share:.2g} of its scale"
        return ""


def sample_outputs(model: nn.Module, own_size: Sequence[int]) -> SampledOutputs:
    """Run a network on an image of half its own size; of the full size if it takes no half, and of
    less if the network is large.
    """
    size = tuple(own_size)
    while not is_small(model, size):
        if _halved(size) == size:
            return SampledOutputs(not_checked="it is large")
        size = _halved(size)
    outputs = sample_outputs_at(model, _halved(size))
    if outputs.not_checked:
        return sample_outputs_at(model, size)
    return outputs


def sample_outputs_at(
    model: nn.Module, size: Sequence[int], layers: Collection[str] | None = None
) -> SampledOutputs:
    """Run a network on an image of `size`, (C, H, W), on the CPU in float32.

    The outputs of `layers` are sampled, or of some layers if None. The network is left as it was.
    Only the backbone of a detector is run: it sorts its boxes, and rounding may swap two.
    """
    values: dict[str, Sample] = {}

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        values.setdefault(name, Sample.of(output))

    try:
        model = _on_cpu(model)
        call = _image_call(model, size)
        watched = hooked(
            model.get_submodule(name).register_forward_hook(partial(keep, name))
            for name in _sampled_layers(model, layers)
        )
        with undisturbed(model), watched:
            answer = call.on(model)
    # Anything may come out of a network's own code.
    except Exception as error:
        why = f"it takes no random images of {'x'.join(map(str, size))} ({with_class(error, 100)})"
        return SampledOutputs(not_checked=why)
    values[""] = Sample.of(answer)
    values = {name: sample for name, sample in values.items() if sample.samples}
    if not values:
        return SampledOutputs(not_checked="it answers random images with no finite number")
    classes = None
    if not call.stage and isinstance(answer, Tensor) and answer.ndim == 2:
        classes = answer.shape[1]
    return SampledOutputs(tuple(size), classes, values)


def is_small(model: nn.Module, size: Sequence[int]) -> bool:
    """Whether a network costs little on an image: a second or so, if no parameter is used more than
    once a pixel.
    """
    if math.prod(size) > _INPUTS:
        return False
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters * math.prod(size[1:]) < _PRODUCTS


def _halved(size: tuple[int, ...]) -> tuple[int, ...]:
    channels, *sides = size
    return (channels, *(_half(side) for side in sides))


def _half(side: int) -> int:
    """Return half of an image's side, a multiple of `_SIDE`; a small one stays."""
    if side < 2 * _SIDE:
        return side
    return side // 2 // _SIDE * _SIDE


def _image_call(model: nn.Module, size: Sequence[int]) -> Call:
    """Return a call of a network, or of a detector's backbone, with an image of `size`."""
    shapes = input_shapes(model, tuple(size), 1)
    images = [_image(shape) for shape in shapes]
    stage = ""
    if "backbone" in model._modules and takes_image_list(model, size[0]):
        stage = "backbone"
    return Call(tuple(images), stage=stage)


def _sampled_layers(model: nn.Module, layers: Collection[str] | None) -> list[str]:
    """Return the names of those of `layers` that hold tensors; of some layers if None."""
    names = [
        name
        for name, module in model.named_modules()
        if name and (module._parameters or module._buffers)
    ]
    if layers is not None:
        return [name for name in names if name in layers]
    names_per_layer = math.ceil(len(names) / _LAYERS)
    step = max(1, names_per_layer)
    return names[::step]


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return a network that computes on the CPU in float32: this one, or a copy."""
    # By accelerate, for mixed precision.
    wrapped = "_original_forward" in vars(model)
    elsewhere = [
        tensor
        for tensor in chain(model.parameters(), model.buffers())
        if tensor.device.type != "cpu"
        or (tensor.is_floating_point() and tensor.dtype != torch.float32)
    ]
    if not wrapped and not elsewhere:
        return model
    model = copy.deepcopy(model)
    if wrapped:
        for name in ("forward", "_original_forward"):
            vars(model).pop(name, None)
    # `to` would make real numbers of complex ones too.
    return model.cpu().float()


def _image(shape: tuple[int, ...]) -> Tensor:
    """Numbers of mean 0 and variance 1, the same with every version of torch."""
    mixed = torch.arange(math.prod(shape), device="cpu") * 2654435761 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 2246822519 & 0xFFFFFFFF
    mixed = mixed ^ mixed >> 13
    return (mixed.double() / 2**31 - 1).mul_(3**0.5).float().reshape(shape)
