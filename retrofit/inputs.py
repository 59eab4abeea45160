"""What a network is run on: the example inputs that its user gives, or random ones that it is known
to take.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from retrofit.errors import RetrofitError, UsageError
from retrofit.record import record_of
from retrofit.utils.forward_pass import (
    forked_random_state,
    hooked,
    placement_of,
    standard_normal,
    undisturbed,
)
from retrofit.utils.text import with_class

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""As a user gives them: one tensor, the positional arguments, or the keyword arguments of one call.
"""

# The second for a network that refuses a single sample
_BATCHES = (1, 2), (2, 3)
# Of a video clip; torchvision's S3D and MViT take no fewer
_FRAMES = 16
# Of two images of different sizes
_SIDES = (64, 96), (96, 64)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, the submodule that is called (empty for the network itself), and
    the seed of its random numbers.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stage: str = ""
    seed: int = 0

    def on(self, model: Any) -> Any:
        """Call a network with copies of the tensors, which it may overwrite.

        Random numbers are seeded; torch's random state is restored afterwards.
        """
        copies = self.mapped(lambda x: x.detach().clone())
        module = model
        if self.stage:
            module = model.get_submodule(self.stage)
        device = next((tensor.device for tensor in copies.tensors), torch.device("cpu"))
        with forked_random_state(device):
            torch.manual_seed(self.seed)
            return module(*copies.args, **copies.kwargs)

    @property
    def batch(self) -> int:
        """The first dimension of the first tensor; 0 if there is none."""
        return next((len(tensor) for tensor in self.tensors if tensor.ndim), 0)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, at any depth."""
        return [
            leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)
        ]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample; empty where a call takes something else than one tensor."""
        arguments = [*self.args, *self.kwargs.values()]
        if len(arguments) != 1 or not isinstance(arguments[0], Tensor):
            return ()
        return tuple(arguments[0].shape[1:])

    def to(self, device: torch.device, dtype: torch.dtype) -> "Call":
        """Return the call with its tensors on a device, floating-point numbers in a precision."""
        return self.mapped(
            lambda x: x.detach().to(device, dtype if x.is_floating_point() else x.dtype)
        )

    def select(self, rows: Tensor) -> "Call":
        """Return the call with some of its samples: rows of each tensor that has as many as the
        first.
        """
        batch = self.batch
        return self.mapped(lambda x: x[rows.to(x.device)] if x.ndim and len(x) == batch else x)

    def resized(self, rows: int) -> "Call":
        """Return the call with another number of samples: the first ones, or all of them repeated
        in turn.
        """
        if rows == self.batch:
            return self
        return self.select(torch.arange(rows, device="cpu") % self.batch)

    def stretched(self, dims: Collection[int], size: Callable[[int], int]) -> "Call":
        """Return the call with `size` of the elements along some dimensions, as far as its tensors
        have them: these repeated in turn.
        """

        def stretch(x: Tensor) -> Tensor:
            for dim in dims:
                if dim < x.ndim:
                    old = x.shape[dim]
                    positions = torch.arange(max(1, size(old)), device=x.device) % old
                    x = x.index_select(dim, positions)
            return x

        return self.mapped(stretch)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Call":
        """Return the call with `function` of each of its tensors."""
        args, kwargs = tree_map_only(Tensor, function, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)


def example_calls(
    model: nn.Module, inputs: Inputs | None = None, input_size: Sequence[int] | None = None
) -> list[Call]:
    """Return calls that a network takes: the one with the `inputs` as they are, or two with seeded
    random numbers.

    The batches are of 1 and 2 samples, or of 2 and 3 where the network refuses a single one. The
    network is left as it was.

    Args:
        model: The network.
        inputs: Example inputs; None for random ones.
        input_size: The shape of one random sample, (C, H, W) for images; the network's own if None.

    Raises:
        UsageError: If both arguments are given.
        RetrofitError: If the network does not take random samples of that size.
    """
    if inputs is not None:
        if input_size is not None:
            raise UsageError(
                "`inputs` and `input_size` both say what the network is run on; leave one out"
            )
        return [call_with(inputs)]
    size = tuple(input_size or own_input_size(model))
    # Anything may come out of a network's own code.
    try:
        return _random_calls(model, size)
    except Exception as error:
        raise RetrofitError(
            f"the network did not take a random input of size {'x'.join(map(str, size))} "
            f"({with_class(error)}); give example tensors with `inputs`, or another `input_size`"
        ) from error


def _random_calls(model: nn.Module, size: tuple[int, ...]) -> list[Call]:
    """Return random calls that a network takes; raise what it raises on a single sample if it takes
    none.
    """
    placement = placement_of(model)
    refusals = []
    with undisturbed(model) as start_again:
        listed = len(size) == 3 and _batches_images(model, size[0], placement)
        for batches in _BATCHES:
            calls = [_random_call(model, size, batch, listed).to(*placement) for batch in batches]
            start_again()
            try:
                calls[0].on(model)
                return calls
            except Exception as error:
                refusals.append(error)
    raise refusals[0]


def call_with(inputs: Inputs) -> Call:
    """Return the call with a user's example inputs."""
    if isinstance(inputs, Mapping):
        return Call(kwargs=dict(inputs))
    if isinstance(inputs, Tensor):
        return Call((inputs,))
    return Call(tuple(inputs))


def own_input_size(model: nn.Module) -> tuple[int, ...]:
    """Return the (C, H, W) that a network's record, its user or the network itself says it was made
    for; 3 x 224 x 224 where none does.
    """
    record = record_of(model)
    if record.preprocess is not None:
        return record.preprocess.input_size
    if record.input_size is not None:
        return record.input_size
    if size := (getattr(model, "pretrained_cfg", None) or {}).get("input_size"):
        return tuple(size)
    # torchvision's vision transformers have this attribute.
    side = getattr(model, "image_size", 224)
    return (3, side, side)


def input_shapes(model: nn.Module, size: tuple[int, ...], batch: int) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a network takes with a batch of samples of `size`, (C,
    H, W).
    """
    home = type(model).__module__
    if home.startswith("torchvision.models.optical_flow"):
        channels, *sides = size
        return [(batch, channels, *(max(128, side - side % 8) for side in sides))] * 2
    if home.startswith("torchvision.models.video"):
        return [(batch, size[0], _FRAMES, *size[1:])]
    return [(batch, *size)]


class _TookListError(Exception):
    """A network made a batch of a list of images."""


def takes_image_list(model: nn.Module, channels: int = 3) -> bool:
    """Tell whether a network takes a list of images of several sizes, as detectors do.

    The network is left as it was.
    """
    with undisturbed(model):
        return _batches_images(model, channels, placement_of(model))


def _batches_images(
    model: nn.Module, channels: int, placement: tuple[torch.device, torch.dtype]
) -> bool:
    """Tell whether a network makes a batch of two images of different sizes.

    It is stopped at its first layer with parameters, which gets the batch. A network that takes no
    list refuses it before that.
    """

    def stop(_layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Raise _TookListError at a layer that gets a batch of both images."""
        if not args or not isinstance(args[0], Tensor):
            return
        batch = args[0]
        holds_both = batch.ndim == 4 and len(batch) == 2
        if holds_both:
            raise _TookListError

    device, dtype = placement
    images = [torch.zeros(channels, *sides, device=device, dtype=dtype) for sides in _SIDES]
    layers = [module for module in model.modules() if module._parameters]
    stopping = hooked(layer.register_forward_pre_hook(stop) for layer in layers)
    try:
        with stopping:
            model(images)
    except _TookListError:
        return True
    # Anything may come out of a network's own code.
    except Exception:
        return False
    return False


def _random_call(model: nn.Module, size: tuple[int, ...], batch: int, listed: bool) -> Call:
    """Return a call with seeded random samples of `size`: a batch, or `listed` one by one."""
    generator = torch.Generator().manual_seed(batch)
    shapes = [size] * batch
    if not listed:
        shapes = input_shapes(model, size, batch)
    tensors = [standard_normal(shape, generator) for shape in shapes]
    if listed:
        return Call((tensors,))
    return Call(tuple(tensors))
