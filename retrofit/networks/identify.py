"""Tell where a network comes from: what its library builds is compared with it."""

import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
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
    misses: list[_Attempt] = []
    for candidate in candidates:
        is_own = candidate.library == "own"
        if is_own and candidate.name not in own_networks.named_builders:
            return candidate, model
        for attempt in _attempts(model, candidate):
            if attempt.built is not None:
                return attempt.source, attempt.built
            misses.append(attempt)
    if not misses:
        return own_networks.class_source(model), model
    nearest = min(misses, key=lambda miss: len(miss.unlike))
    raise RetrofitError(
        f"this network is not the one that the library builds: {nearest.problem}; say which it is "
        "with `save(source=NAME, model_kwargs=ARGUMENTS)`, or save it with `save(source='own')`"
    )


@dataclass(frozen=True)
class _Attempt:
    """What came of building a source.

    Attributes:
        source: What was built.
        built: Its skeleton; None if that is another network.
        problem: What differs then.
        unlike: The names of the tensors that differ.
    """

    source: ModelSource
    built: nn.Module | None = None
    problem: str = ""
    unlike: frozenset[str] = frozenset()


def _attempts(model: nn.Module, source: ModelSource) -> Iterator[_Attempt]:
    """Compare a network with a source; then, if tensors differ, with other numbers of classes: the
    one that the network states, and, if they are few, the lengths of these tensors.
    """
    first = _compared(model, source)
    yield first
    if not first.unlike:
        return
    ours = state_tensors(model)
    sizes = {len(ours[name]) for name in first.unlike if name in ours and ours[name].ndim}
    numbers = [getattr(model, "num_classes", None)]
    if len(sizes) <= _SIZES:
        numbers += sorted(sizes)
    for number in dict.fromkeys(numbers):
        if isinstance(number, int) and number != source.kwargs.get("num_classes"):
            kwargs = {**source.kwargs, "num_classes": number}
            yield _compared(model, replace(source, kwargs=kwargs))


def _compared(model: nn.Module, source: ModelSource) -> _Attempt:
    """Build a source's skeleton and compare it with a network."""
    ours = state_tensors(model)
    try:
        built = skeleton(source, plans_of(model))
    except RetrofitError as error:
        return _Attempt(source, problem=str(error), unlike=frozenset(ours))
    theirs = state_tensors(built)
    alike = {name for name in ours.keys() & theirs.keys() if ours[name].shape == theirs[name].shape}
    unlike = (ours.keys() | theirs.keys()) - alike
    if unlike:
        problem = f"of the tensors of {source} here are {misfit(wanted=theirs, given=ours)}"
        return _Attempt(source, problem=problem, unlike=frozenset(unlike))
    problem = _module_difference(model, built, source)
    if problem:
        return _Attempt(source, problem=problem)
    return _Attempt(source, built)


def _torchvision_sources(model: nn.Module) -> Iterator[ModelSource]:
    """Yield the torchvision sources that build the model's class: builders in the file of that
    class first, and their usual arguments first.
    """
    home = type(model).__module__
    if not home.startswith("torchvision."):
        return
    builders = {name: get_model_builder(name) for name in list_models()}
    homes = {name: builder.__module__ for name, builder in builders.items()}
    # A builder's file imports the class that it builds. Trying all builders takes 15 seconds.
    names = [
        name
        for name in builders
        if getattr(sys.modules[homes[name]], type(model).__name__, None) is type(model)
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


def _module_difference(model: nn.Module, built: nn.Module, source: ModelSource) -> str:
    """Name the first thing in which a network differs from what its library builds; empty if there
    is none.

    Names, classes and plain attributes of modules are compared. An attribute that only one of the
    two has does not count: it is a note, or depends on the library's version.
    """
    ours = dict(model.named_modules())
    theirs = dict(built.named_modules())
    names = dict.fromkeys((*ours, *theirs))
    for name in names:
        our_module = ours.get(name)
        our_facts = _facts(our_module)
        their_module = theirs.get(name)
        their_facts = _facts(their_module)
        for key, our_value in our_facts.items():
            their_value = their_facts.get(key, our_value)
            if our_value == their_value:
                continue
            label = printable(name, 64) or "the network"
            return (
                f"{printable(key, 64)} of {label} is {printable(our_value, 80)} here, "
                f"{printable(their_value, 80)} in {source}"
            )
    return ""


def _facts(module: nn.Module | None) -> dict[str, Any]:
    """Return what tells what a module computes: its class, and attributes that are numbers, words
    or lists of them.

    Those that stand in a buffer are compared as tensors are.
    """
    if module is None:
        return {"class": None}
    # Sampled outputs do not show one that differs in training, or that of a large network.
    # accelerate's keeps the module's beside it.
    replaced = "forward" in vars(module) and "_original_forward" not in vars(module)
    facts: dict[str, Any] = {"class": type(module).__name__, "replaced forward": replaced}
    for name, value in vars(module).items():
        is_neutral = name.startswith("_") or name in _NEUTRAL or isinstance(value, dict)
        if is_neutral or f"setting_{name}" in module._buffers:
            continue
        # What is no JSON value does not count. NaN becomes a word, which is equal to itself.
        with suppress(TypeError, ValueError):
            facts[name] = json.loads(json.dumps(value), parse_constant=str)
    return facts
