"""The artifact: one safetensors file that holds a converted network and how to build it again.

The file's metadata holds a manifest. Loading builds the network from its library, or takes one that the user built,
repeats the conversion on its structure and loads the tensors strictly; nothing from the file is executed. What the
tensors do not say (strides, eps, classes of layers) is compared too, and so are a few numbers that the network answers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import retrofit
from retrofit import surgery
from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import fingerprint, own
from retrofit.networks.budget import bounded_by
from retrofit.networks.description import describe, first_difference, is_all, pack, restore
from retrofit.networks.identify import candidates, identify, skeleton
from retrofit.networks.library import build, parse, with_options
from retrofit.networks.locate import artifact_behind
from retrofit.networks.manifest import KEY, SCHEMA, Manifest, is_artifact, read_header, read_manifest
from retrofit.networks.preprocess import preprocess_of
from retrofit.networks.tensors import aliases, emptied, fill, misfit, tensors_of, to_write, wide_dtype
from retrofit.record import ModelSource, Preprocess, record_of, set_record, unwrapped
from retrofit.surgery import Plan
from retrofit.utils.files import atomic_write, ensure_writable
from retrofit.utils.text import one_line, plural, printable, with_class

__all__ = ["SCHEMA", "is_artifact", "load", "read_manifest", "save"]

OWN: Literal["own"] = "own"
UNKNOWN_WEIGHTS = {"kind": "unknown", "from": None}


def save(
    model: nn.Module,
    path: str | Path,
    *,
    source: str | ModelSource | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    labels: Sequence[str] | None = None,
    weights: Mapping[str, Any] | None = None,
    preprocess: Preprocess | None = None,
    force: bool = False,
) -> None:
    """Write a network, converted or not, as an artifact.

    What is not given is taken from the network, if `load` or the command line made it. A network of timm or
    torchvision is built again before anything is written, and compared with this one: every module's class and
    attributes, and where that is cheap what it answers. So what is written can be loaded, and is the same function. Any
    other network is one of the user's own: `load` asks for one that the user built, and compares it in the same way.

    Args:
        model: The network; wrappers of DistributedDataParallel and torch.compile are taken off.
        path: The file to write, by custom `*.safetensors`.
        source: Which network it is ("resnet50", "tv:resnet50"), where it cannot tell; "own" for a network that no
            library builds as it is.
        model_kwargs: Arguments that the library's builder got, where it cannot tell.
        labels: Names of its outputs, one for each.
        weights: Whose weights it had before: {"kind": "random" | "pretrained" | "checkpoint", "from": str | None}.
        preprocess: What it expects of its images; the library's prescription if not known.
        force: Whether to replace an existing file.

    Raises:
        RetrofitError: If its library does not build the network, with the first difference, or the file cannot be
            written.
    """
    ensure_writable(path, force)
    model = unwrapped(model)
    plans = surgery.plans_of(model)
    source, twin = _identified(model, source, model_kwargs, plans)
    tensors = to_write(model, model if twin is None else twin)
    preprocess = preprocess or record_of(model).preprocess or preprocess_of(model, source)
    description = describe(model)
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "model": source.to_dict(),
        "conversion": {"to": plans[-1].to if plans else None, "steps": [plan.to_dict() for plan in plans]},
        "layers": [row.to_dict() for row in plans[-1].layers] if plans else [],
        "modules": pack(description),
        "preprocess": preprocess.to_dict(),
        "weights": dict(weights or record_of(model).weights or UNKNOWN_WEIGHTS),
        "strength": _strength(model),
        "versions": _versions(),
    }
    wide = wide_dtype(tensors)
    try:
        manifest["fingerprint"] = known = _fingerprint_of(model, wide, preprocess.input_size)
    except fingerprint.CannotTakeError as reason:
        manifest["fingerprint"] = {"left out": str(reason)}
    else:
        if twin is not None:
            again = _with_memory(twin, source, plans, tensors)
            fill(again, tensors, wide)
            restore(again, description)
            if problem := _answers_otherwise(again, known):
                raise RetrofitError(
                    f"built again, {source} is another function than this network: {problem}; "
                    "save it with `save(source='own')`"
                )
    manifest["labels"] = _labels(model, labels, manifest["fingerprint"].get("outputs"))
    with atomic_write(path, force) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(manifest)})
        except SafetensorError as error:
            raise RetrofitError(
                f"cannot write {path} ({one_line(error)}); free space or choose another place"
            ) from error


def load(path: str | Path, *, into: nn.Module | None = None) -> nn.Module:
    """Build the network that an artifact holds, on the CPU.

    Args:
        path: A file that `save` wrote; or `hf-hub:OWNER/NAME[@REVISION]`, or `local-dir:FOLDER`, where
            `retrofit.push_to_hub` or `save_for_hub` put one.
        into: For a network of one's own, or in place of the library's: the network as it was before its conversion,
            with any weights. It is converted and filled in place, on its own device.

    Returns:
        The network with its tensors, in their dtypes, in training mode as timm and torchvision hand networks out
        (`into` stays in its mode). Use what is returned, also where `into` was given.

    Raises:
        RetrofitError: If the file is damaged, not an artifact, or of a newer schema, the installed libraries do not
            build the network that it holds, or `into` is another one; `into` is then as it was.
    """
    path = artifact_behind(str(path)) or path
    manifest = Manifest.read(path)
    source, plans = manifest.source, manifest.plans
    if into is None and source.library == OWN:
        raise RetrofitError(
            f"{path} holds a network of one's own, {printable(source, 100)}; build that network and pass it as `into`"
        )
    if into is not None and surgery.plans_of(into):
        raise RetrofitError("the network to load into is converted already; pass it as it was before its conversion")
    header = read_header(path)
    shapes = {name: shape for name, (shape, _) in header.items()}
    with _explaining(path, manifest), bounded_by(shapes):
        manifest.check_sizes(shapes)
        twin = (
            skeleton(source, lambda fresh: surgery.replay(fresh, plans))
            if into is None
            else surgery.replay(emptied(into, "meta"), plans)
        )
    if problem := misfit(twin, header):
        raise RetrofitError(
            f"the tensors of {path} do not fit the network in its manifest: {problem}; write it again, or check what "
            "it is loaded into"
        )
    description = manifest.description or {}
    with _explaining(path, manifest), bounded_by(shapes):
        grown = restore(twin, description)
        runs = manifest.fingerprint is not None and _may_run(twin, manifest.fingerprint["size"], grown)
        tensors = load_file(path)
        if into is None:
            twin = _with_memory(twin, source, plans, tensors)
        elif runs:
            twin = surgery.replay(copy.deepcopy(into).cpu(), plans)
        if runs:
            fill(twin, tensors, wide_dtype(tensors))
        restore(twin, description)
        problem = _unlike(twin, manifest, runs)
    if problem is not None:
        raise RetrofitError(f"{path} does not come back as it was saved with {_library(manifest)}: {problem}")
    model = twin if into is None else surgery.replay(into, plans)
    fill(model, tensors)
    restore(model, description)
    if into is not None and source.library == OWN:
        source = record_of(into).source or ModelSource(OWN, own.name_of(into))
    set_record(model, source=source, preprocess=manifest.preprocess, labels=manifest.labels, weights=manifest.weights)
    return model


def source_in(path: str | Path) -> ModelSource:
    """Tell which network an artifact holds; nothing is built.

    Raises:
        RetrofitError: As `load`.
    """
    return Manifest.read(path).source


@contextmanager
def _explaining(path: str | Path, manifest: Manifest) -> Iterator[None]:
    """Say of any error that the file cannot be rebuilt: a plan of other making may ask the layers for anything."""
    try:
        yield
    except Exception as error:
        raise RetrofitError(f"{path} cannot be rebuilt with {_library(manifest)}: {one_line(error)}") from error


def _unlike(model: nn.Module, manifest: Manifest, runs: bool) -> str | None:
    """Say how a network that was built again differs from the one that was saved; None if it does not.

    What a network of a library answers is proof enough: its modules may come to be called otherwise.
    """
    unlike = None
    if manifest.description is not None:
        unlike = first_difference(manifest.description, describe(model), ("in the file", "here"))
    if runs:
        assert manifest.fingerprint is not None
        problem = _answers_otherwise(model, manifest.fingerprint)
        if problem is not None:
            return problem if unlike is None else f"{problem} ({unlike})"
        if manifest.source.library != OWN:
            return None
    return unlike


def _may_run(twin: nn.Module, size: Sequence[int], grown: bool) -> bool:
    """Whether a network that is built again may be run; `grown`: it was given sizes that its library did not.

    Raises:
        TooCostlyError: If it may not, though the one that was saved was run.
    """
    if not grown and fingerprint.is_small(twin, size):
        return True
    try:
        fingerprint.check_cost(emptied(twin, "meta"), size)
    except fingerprint.TooCostlyError:
        raise
    except fingerprint.CannotTakeError:
        return False
    return True


def _fingerprint_of(model: nn.Module, dtype: torch.dtype, size: Sequence[int]) -> dict[str, Any]:
    """Return what a network answers, computed on the CPU by a copy: nothing of the network itself changes."""
    try:
        copied = copy.deepcopy(model)
        if not fingerprint.is_small(model, size):
            size = fingerprint.cheap_size(emptied(model, "meta"), size)
    except fingerprint.CannotTakeError:
        raise
    except Exception as error:  # anything may come out of what a network holds
        raise fingerprint.CannotTakeError(f"it cannot be copied ({with_class(error, 100)})") from error
    for name in ("forward", "_original_forward"):  # where accelerate wraps a network for mixed precision
        vars(copied).pop(name, None)
    return fingerprint.measure(copied.to("cpu", dtype), size)


def _answers_otherwise(model: nn.Module, known: Mapping[str, Any]) -> str | None:
    """Say how a network's answer differs from the one that is known; None if it does not."""
    try:
        return fingerprint.difference(known, fingerprint.measure(model, known["size"], known["values"]))
    except fingerprint.CannotTakeError as error:
        return str(error)


def _with_memory(
    twin: nn.Module, source: ModelSource, plans: Sequence[Plan], tensors: Mapping[str, Tensor]
) -> nn.Module:
    """Give a twin memory for all of its tensors, whose values `tensors` has; build it anew if it holds other values."""
    own = tensors_of(twin)
    if not any(tensor.is_meta for tensor in own.values()):
        return twin
    unsaid = any(module._non_persistent_buffers_set for module in twin.modules()) or not is_all(describe(twin))
    if unsaid or own.keys() - tensors.keys() - aliases(twin).keys():
        with torch.random.fork_rng(devices=[]):
            return surgery.replay(build(source), plans)
    return emptied(twin, "cpu")


def _identified(
    model: nn.Module, hint: str | ModelSource | None, model_kwargs: Mapping[str, Any] | None, plans: Sequence[Plan]
) -> tuple[ModelSource, nn.Module | None]:
    """Tell where a network comes from, with a twin that was built anew; without one if nobody knows how to build it."""
    stranger = ModelSource(OWN, own.name_of(model))
    if hint == OWN:
        hint = stranger
    elif isinstance(hint, str):
        hint = with_options(parse(hint), model_kwargs=model_kwargs)
    elif model_kwargs:
        raise UsageError("`model_kwargs` are the arguments of a library's builder; say which with `source`")
    found = next(candidates(model, hint), stranger)
    if found.library == OWN and not own.is_typed(found.name):
        return found, None
    return identify(model, hint, lambda fresh: surgery.replay(fresh, plans))


def _labels(model: nn.Module, given: Sequence[str] | None, answered: int | None) -> list[str] | None:
    """Return the names of the outputs: those given, else those noted, unless the network has another classifier now.

    Their number is that of what the network answered or, where it was not run, what timm's networks say.

    Raises:
        UsageError: If those given are not one for each output.
    """
    labels = record_of(model).labels if given is None else given
    outputs = getattr(model, "num_classes", None) if answered is None else answered
    if labels is None or not isinstance(outputs, int) or not outputs or len(labels) == outputs:
        return None if labels is None else list(labels)
    if given is None:
        return None
    raise UsageError(f"{plural(len(labels), 'label')} for {plural(outputs, 'output')}; pass `labels` with one for each")


def _strength(model: nn.Module) -> float | None:
    """Return the strength of all converted layers; None if there are none, or they differ."""
    with suppress(RetrofitError):
        return surgery.strength_of(model)
    return None


def _versions() -> dict[str, str]:
    return {"retrofit": retrofit.__version__} | {name: version(name) for name in ("torch", "timm", "torchvision")}


def _library(manifest: Manifest) -> str:
    """Name the library that builds the network, with its version here and then."""
    name = "torch" if manifest.source.library == OWN else manifest.source.library
    made = printable(manifest.versions.get(name, "another version"), 40)
    return f"{name} {_versions()[name]} (it was made with {made})"
