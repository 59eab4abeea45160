"""What a file holds of a network: its tensors, layers' settings for training, and sampled outputs
that verify it.

Sampled are a few numbers of what the network and some of its layers answer to an image. It is the
same on every machine, and float32 arithmetic on another processor, with another library, changes
the numbers by far less than `TOLERANCE`.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retrofit import compare
from retrofit.errors import RetrofitError
from retrofit.inputs import Call, input_shapes, takes_image_list
from retrofit.layers.base import NormalityMixin, check_noise, check_noise_kind
from retrofit.record import check_size
from retrofit.utils.running import hooked, placement_of, undisturbed
from retrofit.utils.text import printable, shortlist, with_class

# of the largest value: AVX2 and AVX-512 differ by some 1e-6 of it an operation
TOLERANCE = 1e-3

# numbers of an image; parameters times pixels, 4.3e12 for ViT-B
_INPUTS, _PRODUCTS = 4e6, 5e12
_LAYERS, _SAMPLES, _SIDE = 12, 6, 32


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict themselves (aliases are the same objects), without other
    extra state.
    """
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor that goes by several to its first name."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(model).items()}
    return {name: original for name, original in names.items() if name != original}


def to_write(model: nn.Module, twin: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for a file: each one once, contiguous, on the CPU, with storage of its
    own.

    `twin`, the network as it will be built again, tells which tensors are one; a RetrofitError
    names two that differ.
    """
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    for name, original in _aliases(twin).items():
        if not torch.equal(tensors[name], tensors[original]):
            raise RetrofitError(
                f"{name} and {original} are one tensor in the library's network, two here; tie them"
            )
        del tensors[name]
    form = torch.contiguous_format
    return {
        name: tensor.to("cpu", copy=True, memory_format=form) for name, tensor in tensors.items()
    }


def under_all_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors also under the further names that they have in the network."""
    further = {
        name: tensors[original] for name, original in _aliases(model).items() if original in tensors
    }
    return further | dict(tensors)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a file's tensors, with their names, shapes and types."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether a tensor can take another's values: of its shape, and a number with a fraction if it
    is one.
    """
    kinds = [
        (tensor.shape, tensor.is_floating_point(), tensor.is_complex()) for tensor in (ours, theirs)
    ]
    return kinds[0] == kinds[1]


def misfit(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Say how given tensors differ from a network's own; empty if they do not."""
    missing, unexpected = (
        [name for name in own if name not in given],
        sorted(given.keys() - own.keys()),
    )
    unfit = {
        name: (given[name], own[name])
        for name in own
        if name in given and not fits(own[name], given[name])
    }
    return list_misfit(missing, unexpected, unfit)


def list_misfit(
    missing: Iterable[str], unexpected: Iterable[str], unfit: Mapping[str, tuple[Tensor, Tensor]]
) -> str:
    """Count and list the tensors that are not given, that are not the network's, and the (given,
    own) that differ.
    """
    parts = {
        "missing": [*missing],
        "unexpected": [*unexpected],
        "of another shape": [],
        "of another type": [],
    }
    for name, (theirs, ours) in unfit.items():
        if theirs.shape != ours.shape:
            parts["of another shape"].append(f"{name} {list(theirs.shape)} for {list(ours.shape)}")
        else:
            parts["of another type"].append(
                f"{name} {theirs.dtype} for {ours.dtype}".replace("torch.", "")
            )
    return ", ".join(
        f"{len(names)} {what} ({shortlist(names, limit=120)})"
        for what, names in parts.items()
        if names
    )


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a file's tensors, which fit, strictly, each into new memory of its own type on the
    model's device.
    """
    tensors = under_all_names(model, tensors)
    parameters = [
        name for name, tensor in tensors_of(model).items() if isinstance(tensor, nn.Parameter)
    ]
    floating = {tensors[name].dtype for name in parameters if tensors[name].is_floating_point()}
    if len(floating) == 1:
        # also the buffers that are in no file
        model.to(dtype=floating.pop())
    for name, tensor in tensors_of(model).items():
        tensor.data = torch.empty_like(tensor.data, dtype=tensors[name].dtype)
    model.load_state_dict(tensors, strict=True)


def _check_momentum(value: Any) -> float | None:
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise ValueError(f"momentum must be a number or None, not {value!r}")
    return value


SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "momentum": _check_momentum,
    "noise": check_noise,
    "noise_kind": check_noise_kind,
}
"""What runs set on a layer and only training depends on, with what checks it."""


def training_settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of each normalization layer that has some, as JSON values."""
    layers = (NormalityMixin, nn.modules.batchnorm._NormBase)
    rows = {name: vars(layer) for name, layer in model.named_modules() if isinstance(layer, layers)}
    return {
        name: {key: values[key] for key in SETTINGS if key in values}
        for name, values in rows.items()
    }


def set_training_settings(model: nn.Module, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Give layers what `training_settings` returned; AttributeError, TypeError or ValueError for
    anything else.
    """
    for name, values in settings.items():
        layer = model.get_submodule(name)
        for key, value in values.items():
            if key in vars(layer):
                setattr(layer, key, SETTINGS[key](value))


@dataclass(frozen=True)
class Sample:
    """The largest value of a layer's output, and a few of its values, evenly spread."""

    scale: float
    samples: list[float]


@dataclass(frozen=True)
class SampledOutputs:
    """What a network answers to an image."""

    # (C, H, W) of the image
    size: tuple[int, ...] = ()
    classes: int | None = (
        # how many scores the network gives, where it gives one number for each class
        None
    )
    # by layer; "" is the network's output
    values: dict[str, Sample] = field(default_factory=dict)
    # why the network was not run; the other fields are empty then
    not_checked: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the attributes, or why there are none."""
        values = asdict(self)
        why = values.pop("not_checked")
        return {"not_checked": why} if why else values

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
        return cls(tuple(values["size"]), values["classes"], rows)

    def difference(self, model: nn.Module) -> str:
        """Say where a network's outputs differ most from these by more than rounding; empty if they
        do not.
        """
        if not is_small(model, self.size):
            return f"its manifest asks for a run of a large network on images of {printable(self.size, 80)}"
        other = sample_outputs_at(model, self.size, self.values)
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
        return (
            f"the output of {where or 'the network'} differs by {worst:.2g} of its scale"
            if worst
            else ""
        )


def sample_outputs(model: nn.Module, own_size: Sequence[int]) -> SampledOutputs:
    """Run a network on an image of half its own size, or of that, or a smaller one where the
    network is large.
    """
    size = tuple(own_size)
    while not is_small(model, size):
        if _halved(size) == size:
            return SampledOutputs(not_checked="it is large")
        size = _halved(size)
    outputs = sample_outputs_at(model, _halved(size))
    return sample_outputs_at(model, size) if outputs.not_checked else outputs


def sample_outputs_at(
    model: nn.Module, size: Sequence[int], layers: Collection[str] | None = None
) -> SampledOutputs:
    """Run a network on an image of `size`, (C, H, W), on the CPU, in float32 or, if it is all
    float64, that.

    Sampled are those of `layers` that it has, or some of all if None. The network is left as it
    was. Of a detector the backbone is run: its boxes come out of sorting, where rounding swaps two.
    """
    values: dict[str, Sample] = {}

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        values.setdefault(name, _sample(output))

    try:
        model = _on_cpu(model)
        images = [
            _images(shape).to(placement_of(model)[1])
            for shape in input_shapes(model, tuple(size), 1)
        ]
        detector = "backbone" in model._modules and takes_image_list(model, size[0])
        call = Call(tuple(images), stage="backbone" if detector else "")
        names = [
            name
            for name, module in model.named_modules()
            if name and (module._parameters or module._buffers)
        ]
        some = names[:: max(1, -(-len(names) // _LAYERS))]
        names = some if layers is None else [name for name in names if name in layers]
        watched = hooked(
            model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in names
        )
        with undisturbed(model), watched:
            answer = call.on(model)
    # anything may come out of a network's own code
    except Exception as error:
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
    return (
        channels,
        *(max(side // 2 // _SIDE, 1) * _SIDE if side >= 2 * _SIDE else side for side in sides),
    )


def is_small(model: nn.Module, size: Sequence[int]) -> bool:
    """Whether a network costs little on an image: a second or so, if no parameter is used more than
    once a pixel.
    """
    if math.prod(size) > _INPUTS:
        return False
    return (
        sum(parameter.numel() for parameter in model.parameters()) * math.prod(size[1:]) < _PRODUCTS
    )


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return a network that computes on the CPU in float32 or float64: this one, or a copy."""
    tensors = list(chain(model.parameters(), model.buffers()))
    floating = {tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.ndim}
    wide = torch.float64 if floating == {torch.float64} else torch.float32
    # by accelerate, for mixed precision
    wrapped = "_original_forward" in vars(model)
    if (
        not wrapped
        and all(tensor.device.type == "cpu" for tensor in tensors)
        and floating <= {wide}
    ):
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
    for tensor in compare.tensors_of(output):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        largest = float(tensor.detach().abs().max())
        if math.isfinite(largest):
            scale = max(scale, largest)
            flat = tensor.detach().flatten()
            places = torch.linspace(
                0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64
            ).long()
            samples += [float(f"{number:.7g}") for number in flat[places].tolist()]
    return Sample(float(f"{scale:.7g}"), samples)
