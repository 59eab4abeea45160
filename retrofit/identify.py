"""Recognising a network: which one of timm's or torchvision's it is, proved by building that one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.library import ModelSource, build, parse, shortlist, timm_source


def source_of(model: nn.Module, hint: str | ModelSource | None = None) -> ModelSource:
    """Tell where a network comes from, checked by building it and comparing the tensors' names and shapes.

    Args:
        model: A network of timm or torchvision, not converted.
        hint: The answer, where the network cannot tell ("tv:resnet50").

    Raises:
        RetrofitError: If it cannot be told, or what the library builds differs.
    """
    return identify(model, hint)[0]


def identify(
    model: nn.Module, hint: str | ModelSource | None = None, convert: Callable[[nn.Module], nn.Module] | None = None
) -> tuple[ModelSource, nn.Module]:
    """Do `source_of`'s work for a network that may be converted, and hand back the skeleton that proves it.

    Args:
        model: The network.
        hint: As for `source_of`.
        convert: Repeats on a freshly built network what was done to this one.

    Returns:
        The source, and the converted skeleton: names and shapes as `model`'s, on the meta device where it builds there.

    Raises:
        RetrofitError: As `source_of`.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}
    first: str | None = None
    for candidate in _candidates(model, hint):
        adjusted = candidate
        for _ in range(2):
            try:
                built = skeleton(adjusted, convert)
            except RetrofitError as error:
                first = first or str(error)
                break
            found = {name: tuple(tensor.shape) for name, tensor in tensors_of(built).items()}
            if found == shapes:
                return adjusted, built
            first = first or f"{candidate} has {_difference(shapes, found)}"
            classes = _classes(model, shapes, found)
            adjusted = replace(candidate, kwargs={**candidate.kwargs, "num_classes": classes})
    if first is None:
        kind = type(model).__name__
        raise RetrofitError(f'cannot tell which network this {kind} is; pass source="resnet50" or source="tv:resnet50"')
    raise RetrofitError(f"this network is not the one that the library builds: {first}; pass the matching source=")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the state dict themselves (aliases are the same objects), without other extra state."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def skeleton(source: ModelSource, convert: Callable[[nn.Module], nn.Module] | None = None) -> nn.Module:
    """Build a network for its structure: without memory for its tensors, where it can be built so."""
    finish = convert or (lambda model: model)
    try:
        with torch.device("meta"):
            return finish(build(source))
    except Exception:  # some builders compute with values; then the real ones are needed
        with torch.random.fork_rng(devices=[]):
            return finish(build(source))


def _candidates(model: nn.Module, hint: str | ModelSource | None) -> Iterator[ModelSource]:
    if hint is not None:
        yield parse(hint) if isinstance(hint, str) else hint
        return
    attached = getattr(model, "_retrofit_source", None)
    if isinstance(attached, ModelSource):
        yield attached
    elif (found := timm_source(model)) is not None:
        yield found
    else:
        yield from _torchvision_sources(model)


def _torchvision_sources(model: nn.Module) -> Iterator[ModelSource]:
    """List the networks of the file of torchvision that the model's class comes from."""
    from torchvision.models import get_model_builder, list_models

    file = type(model).__module__
    if file.startswith("torchvision."):
        for name in list_models():
            if get_model_builder(name).__module__ == file:
                yield ModelSource("torchvision", name)


def _classes(
    model: nn.Module, ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]
) -> int | None:
    """Guess the number of classes of a network whose classifier was replaced after it was built."""
    if isinstance(classes := getattr(model, "num_classes", None), int):
        return classes
    changed = {shape[0] for name, shape in ours.items() if shape != theirs.get(name, shape) and shape}
    return changed.pop() if len(changed) == 1 else None


def _difference(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the first tensors in which two networks differ, in words that follow "NAME has"."""
    lacking, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    reshaped = [
        f"{name} {list(theirs[name])} for {list(ours[name])}"
        for name in ours
        if theirs.get(name, ours[name]) != ours[name]
    ]
    parts = (("no", lacking), ("also", extra), ("shapes", reshaped))
    return "; ".join(f"{word} {shortlist(names)}" for word, names in parts if names)
