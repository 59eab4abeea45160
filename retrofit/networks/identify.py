"""Recognising a network: which one of timm's or torchvision's it is, proved by building that one."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrofit.errors import RetrofitError
from retrofit.networks import own
from retrofit.networks.budget import TooLargeError
from retrofit.networks.library import build, timm_source
from retrofit.networks.tensors import SETTINGS, misfit, shapes_of, tensors_of
from retrofit.record import ModelSource, record_of
from retrofit.surgery import Plan, plans_of, replay
from retrofit.utils.text import printable

_SIZES = 4  # a detector's head has one for the classes and one for their boxes
# Attributes that say nothing of what a network computes, that a file holds by itself, or that a layer works out when it
# is called first.
_NEUTRAL = {"training", "grad_checkpointing", "fused_attn", "scales", "map_levels", *SETTINGS}

Shapes = Mapping[str, tuple[int, ...]]


def identify(model: nn.Module, source: ModelSource | None = None) -> tuple[ModelSource, nn.Module]:
    """Tell where a network, converted or not, comes from, and return the skeleton of what is built there as the proof.

    Compared are tensors' names and shapes, and every module's class and plain attributes; a RetrofitError says what
    differs. The skeleton is converted as `model` is, and on the meta device where it builds there. `source` is the
    answer where the network cannot tell.

    Of a network that is the user's own, and that nobody said how to build, the source is its class and the skeleton is
    the network itself.
    """
    ours = shapes_of(model)
    problems: dict[str, int] = {}  # with the number of tensors that differ
    for candidate in [source] if source is not None else _candidates(model):
        if candidate.library == "own" and candidate.name not in own.typed:
            return candidate, model
        sources = [candidate]
        for likely in sources:
            try:
                built = skeleton(likely, plans_of(model))
            except RetrofitError as error:
                problems[str(error)] = len(ours)
                continue
            theirs = shapes_of(built)
            unlike = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            if unlike:
                problem = f"of the tensors of {likely} here are {misfit(tensors_of(built), tensors_of(model))}"
            else:
                problem = _module_difference(model, built, likely)
            if not problem:
                return likely, built
            problems[problem] = len(unlike)
            if unlike and likely is candidate:
                sources += _other_classes(likely, model, [ours[name] for name in unlike if name in ours])
    if not problems:
        return own.source_of(model), model
    nearest = min(problems, key=lambda problem: problems[problem])
    raise RetrofitError(
        f"this network is not the one that the library builds: {nearest}; say which it is with "
        "`save(source=NAME, model_kwargs=ARGUMENTS)`, or save it with `save(source='own')`"
    )


def _module_difference(model: nn.Module, built: nn.Module, source: ModelSource) -> str:
    """Name the first thing in which a network differs from what its library builds; empty if there is none.

    Compared are names and classes of modules, and attributes that are numbers, words or lists of them. An attribute
    that only one of the two has does not count: it is a note, or comes and goes with a library's versions.
    """
    ours, theirs = dict(model.named_modules()), dict(built.named_modules())
    for name in dict.fromkeys((*ours, *theirs)):
        label = printable(name, 64) or "the network"
        kinds = [f"a {type(modules[name]).__name__}" if name in modules else "absent" for modules in (ours, theirs)]
        if kinds[0] != kinds[1]:
            return f"{label} is {kinds[0]} here, {kinds[1]} in {source}"
        here, there = vars(ours[name]), vars(theirs[name])
        if "forward" in here and "forward" not in there and "_original_forward" not in here:
            return f"{label} has a forward of its own here, none in {source}"
        for key in [key for key in here if key in there and not key.startswith("_") and key not in _NEUTRAL]:
            if f"setting_{key}" in ours[name]._buffers:  # the state dict holds it
                continue
            with suppress(TypeError, ValueError):  # it is no plain value
                if _plain(here[key]) != _plain(there[key]):
                    values = [printable(values[key], 80) for values in (here, there)]
                    return f"{printable(key, 64)} of {label} is {values[0]} here, {values[1]} in {source}"
    return ""


def _plain(value: object) -> Any:
    """Return a number, a word or a list of them so that NaN is itself and a tuple is a list; else raise TypeError."""
    if not isinstance(value, int | float | str | list | tuple | None):
        raise TypeError
    return json.loads(json.dumps(value), parse_constant=str)


def skeleton(source: ModelSource, plans: Iterable[Plan] = ()) -> nn.Module:
    """Build a network, converted, for its structure: without memory for its tensors, where it can be built so."""
    try:
        with torch.device("meta"):
            return replay(build(source), plans)
    except TooLargeError:
        raise
    except Exception:  # some builders compute with values; then the real ones are needed
        return rebuilt(source, plans)


def rebuilt(source: ModelSource, plans: Iterable[Plan] = ()) -> nn.Module:
    """Build a network, converted, whose tensors are about to be loaded: what would be random is zero."""
    with torch.random.fork_rng(devices=[]), _NoRandomValues():
        return replay(build(source), plans)


class _NoRandomValues(TorchDispatchMode):
    """Leaves out what fills tensors with random numbers: a fifth of a second for resnet50, seconds for large ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def _candidates(model: nn.Module) -> Iterable[ModelSource]:
    """List the sources that a network may be of, likely ones first; none for a network of nobody's."""
    known = record_of(model).source or timm_source(model)
    return _torchvision_sources(model) if known is None else [known]


def _torchvision_sources(model: nn.Module) -> Iterator[ModelSource]:
    """List what torchvision's builders make of the model's class, those of the class's own file first."""
    from torchvision.models import get_model_builder, list_models

    home = type(model).__module__
    if not home.startswith("torchvision."):
        return
    package = home.rpartition(".")[0]
    files = {name: get_model_builder(name).__module__ for name in list_models()}
    for name in sorted((n for n in files if files[n].startswith(package)), key=lambda name: files[name] != home):
        for kwargs in _torchvision_structures(get_model_builder(name)):
            source = ModelSource("torchvision", name, kwargs)
            with suppress(RetrofitError):
                if files[name] == home or type(skeleton(source)) is type(model):
                    yield source


def _torchvision_structures(builder: Callable[..., nn.Module]) -> Iterator[dict[str, Any]]:
    """List the arguments that make one of torchvision's builders build other modules, the usual ones first."""
    options = {"aux_loss": ("aux_loss", True), "aux_logits": ("aux_logits", False)}
    options["weights_backbone"] = ("trained_backbone", True)
    present = [options[name] for name in options if name in inspect.signature(builder).parameters]
    for chosen in itertools.product((False, True), repeat=len(present)):
        yield dict(itertools.compress(present, chosen))


def _other_classes(source: ModelSource, model: nn.Module, unlike: list[tuple[int, ...]]) -> list[ModelSource]:
    """Return a source with the numbers of classes that the network may have: what it says, or a size that differs."""
    sizes = sorted({shape[0] for shape in unlike if shape})
    numbers = [getattr(model, "num_classes", None), *(sizes if len(sizes) <= _SIZES else ())]
    return [
        replace(source, kwargs={**source.kwargs, "num_classes": number})
        for number in dict.fromkeys(numbers)
        if isinstance(number, int) and number != source.kwargs.get("num_classes")
    ]
