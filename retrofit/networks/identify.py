"""Tell where a network comes from: what its library builds is compared with it."""

import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torchvision.models import get_model_builder, list_models

from retrofit.errors import RetrofitError
from retrofit.networks import model_sources, own_networks
from retrofit.networks.rebuild import skeleton
from retrofit.networks.state_tensors import misfit, state_tensors
from retrofit.networks.training_settings import SETTINGS
from retrofit.record import ModelSource, record_of
from retrofit.surgery import plans_of
from retrofit.utils.text import printable

# At most so many different sizes are tried as a number of classes. A classifier has one, a detector's
# head two: for classes and for their boxes.
_SIZES = 4
# Attributes that say nothing of what a network computes, that a file holds by itself, or that a
# layer works out when it is called first.
_NEUTRAL = {"training", "grad_checkpointing", "fused_attn", "scales", "map_levels", *SETTINGS}
# Arguments that make torchvision's builders build other modules: a parameter to look for in the
# builder's signature, and the argument to pass then.
_STRUCTURES = {
    "aux_loss": ("aux_loss", True),
    "aux_logits": ("aux_logits", False),
    "weights_backbone": ("trained_backbone", True),
}


def identify(model: nn.Module, source: ModelSource | None = None) -> tuple[ModelSource, nn.Module]:
    """Tell where a network, converted or not, comes from, and return the skeleton that proves it.

    The skeleton is what the source builds, converted as `model` is, on the meta device if possible.
    It is compared with `model`: names and shapes of tensors, and every module's class and plain
    attributes.

    If the network is the user's own, and nobody said how to build it, the source is its class and
    the skeleton is the network itself.

    Args:
        model: The network.
        source: The source to prove; by default, the one that the network records.

    Raises:
        RetrofitError: If the library builds another network; the message says what differs.
    """
    known = source or record_of(model).source or model_sources.timm_source(model)
    candidates = _torchvision_sources(model)
    if known is not None:
        candidates = iter([known])
    misses: list[_Miss] = []
    for candidate in candidates:
        if candidate.library == "own" and candidate.name not in own_networks.named_builders:
            return candidate, model
        attempt = _compared(model, candidate)
        if not isinstance(attempt, _Miss):
            return attempt
        misses.append(attempt)
        for other in attempt.others:
            attempt = _compared(model, other)
            if not isinstance(attempt, _Miss):
                return attempt
            misses.append(attempt)
    if not misses:
        return own_networks.class_source(model), model
    nearest = min(misses, key=attrgetter("tensors"))
    raise RetrofitError(
        f"this network is not the one that the library builds: {nearest.problem}; say which it is "
        "with `save(source=NAME, model_kwargs=ARGUMENTS)`, or save it with `save(source='own')`"
    )


@dataclass(frozen=True)
class _Miss:
    """A source that builds another network.

    Attributes:
        tensors: How many tensors differ.
        problem: What differs.
        others: The source with other numbers of classes, which may build the network.
    """

    tensors: int
    problem: str
    others: tuple[ModelSource, ...] = ()


def _compared(model: nn.Module, source: ModelSource) -> tuple[ModelSource, nn.Module] | _Miss:
    """Build a source's skeleton and compare it with a network."""
    ours = state_tensors(model)
    try:
        built = skeleton(source, plans_of(model))
    except RetrofitError as error:
        return _Miss(len(ours), str(error))
    theirs = state_tensors(built)
    alike = {name for name in ours.keys() & theirs.keys() if ours[name].shape == theirs[name].shape}
    unlike = (ours.keys() | theirs.keys()) - alike
    if unlike:
        problem = f"of the tensors of {source} here are {misfit(wanted=theirs, given=ours)}"
        others = _other_classes(source, model, [ours[name] for name in unlike if name in ours])
        return _Miss(len(unlike), problem, others)
    problem = _module_difference(model, built, source)
    if problem:
        return _Miss(0, problem)
    return source, built


def _torchvision_sources(model: nn.Module) -> Iterator[ModelSource]:
    """Yield the torchvision sources that build the model's class: builders in the file of that
    class first, and their usual arguments first.
    """
    home = type(model).__module__
    if not home.startswith("torchvision."):
        return
    package = home.rpartition(".")[0]
    builders = {name: get_model_builder(name) for name in list_models()}
    homes = {name: builder.__module__ for name, builder in builders.items()}
    # A builder's file imports the class that it builds. Trying all builders takes 15 seconds.
    names = [
        name
        for name in builders
        if homes[name].startswith(package)
        and getattr(sys.modules[homes[name]], type(model).__name__, None) is type(model)
    ]
    names.sort(key=lambda name: homes[name] != home)
    for name in names:
        for kwargs in _structures_of(builders[name]):
            source = ModelSource("torchvision", name, kwargs)
            with suppress(RetrofitError):
                if homes[name] == home or type(skeleton(source)) is type(model):
                    yield source


def _structures_of(builder: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments by which a builder makes other modules, in every combination."""
    parameters = inspect.signature(builder).parameters
    present = [argument for name, argument in _STRUCTURES.items() if name in parameters]
    for chosen in itertools.product((False, True), repeat=len(present)):
        yield dict(itertools.compress(present, chosen))


def _other_classes(
    source: ModelSource, model: nn.Module, unlike: list[Tensor]
) -> tuple[ModelSource, ...]:
    """Return a source with other numbers of classes: the one that the network states, and, if they
    are few, the lengths of the tensors that differ.
    """
    sizes = sorted({len(tensor) for tensor in unlike if tensor.ndim})
    numbers = [getattr(model, "num_classes", None)]
    if len(sizes) <= _SIZES:
        numbers += sizes
    return tuple(
        replace(source, kwargs={**source.kwargs, "num_classes": number})
        for number in dict.fromkeys(numbers)
        if isinstance(number, int) and number != source.kwargs.get("num_classes")
    )


def _module_difference(model: nn.Module, built: nn.Module, source: ModelSource) -> str:
    """Name the first thing in which a network differs from what its library builds; empty if there
    is none.

    Names and classes of modules are compared, and attributes that are numbers, strings or lists of
    them. An attribute that only one of the two has does not count: it is a note, or depends on the
    library's version.
    """
    ours = dict(model.named_modules())
    theirs = dict(built.named_modules())
    for name in dict.fromkeys((*ours, *theirs)):
        label = printable(name, 64) or "the network"
        our_class = _kind(ours.get(name))
        their_class = _kind(theirs.get(name))
        if our_class != their_class:
            return f"{label} is {our_class} here, {their_class} in {source}"
        if _has_forward(ours[name]) and not _has_forward(theirs[name]):
            return f"{label} has a forward of its own here, none in {source}"
        for key in _compared_attributes(ours[name], theirs[name]):
            our_value = vars(ours[name])[key]
            their_value = vars(theirs[name])[key]
            if _differ(our_value, their_value):
                return (
                    f"{printable(key, 64)} of {label} is {printable(our_value, 80)} here, "
                    f"{printable(their_value, 80)} in {source}"
                )
    return ""


def _kind(module: nn.Module | None) -> str:
    if module is None:
        return "absent"
    return f"a {type(module).__name__}"


def _has_forward(module: nn.Module) -> bool:
    """Whether somebody gave a module another forward; accelerate's keeps the first beside it."""
    return "forward" in vars(module) and "_original_forward" not in vars(module)


def _compared_attributes(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Return the names of the attributes that tell what two modules compute.

    Those that stand in a buffer are compared as tensors are.
    """
    return [
        name
        for name in vars(ours)
        if name in vars(theirs)
        and not name.startswith("_")
        and name not in _NEUTRAL
        and f"setting_{name}" not in ours._buffers
    ]


def _differ(ours: object, theirs: object) -> bool:
    """Whether two plain values differ; what is no plain value does not count."""
    try:
        return bool(_plain(ours) != _plain(theirs))
    except (TypeError, ValueError):
        return False


def _plain(value: object) -> Any:
    """Return a number, a word or a list of them so that NaN is itself and a tuple is a list; else
    raise TypeError.
    """
    if not isinstance(value, int | float | str | list | tuple | None):
        raise TypeError
    return json.loads(json.dumps(value), parse_constant=str)
