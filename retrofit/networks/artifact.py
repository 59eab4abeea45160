"""The artifact: one safetensors file that holds a converted network and how to build it again.

The file's metadata holds a manifest. Loading builds the network from its library, or takes one that the user built,
repeats the conversion on its structure and loads the tensors strictly; nothing from the file is executed. What the
tensors do not say (strides, eps, classes of layers) shows in sampled outputs, which the manifest holds and `load`
compares.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retrofit import surgery
from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import own
from retrofit.networks.budget import bounded_by, check_numbers
from retrofit.networks.identify import identify, rebuilt, skeleton
from retrofit.networks.library import parse, with_options
from retrofit.networks.manifest import KEY, SCHEMA, Manifest, artifact_path, damaged
from retrofit.networks.preprocess import preprocess_of
from retrofit.networks.sampled_outputs import SampledOutputs, is_small, sample_outputs, sample_outputs_at
from retrofit.networks.tensors import (
    checksum,
    fill,
    misfit,
    set_training_settings,
    tensors_of,
    to_write,
    training_settings,
    under_all_names,
)
from retrofit.record import ModelSource, Preprocess, record_of, set_record, unwrapped
from retrofit.surgery.execute import unchanged_on_failure
from retrofit.utils.files import atomic_write, ensure_writable
from retrofit.utils.text import one_line, plural, printable, with_class
from retrofit.version import __version__

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
    proved: bool = False,
) -> None:
    """Write a network, converted or not, as an artifact.

    What is not given is taken from the network's record. A network of timm or torchvision is built again before
    anything is written, and compared with this one: every module's class and plain attributes, and what it answers. So
    what is written can be loaded, and is the same function. Any other network is one of the user's own: `load` asks for
    one that the user built, and compares what it answers.

    A network that is very large, or takes no images, is not run; the file says so, and `load` repeats it.

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
        proved: Whether this network, with other tensors, was saved or loaded before as the `source` that is given: it
            is not built again.

    Raises:
        RetrofitError: If its library does not build the network, with the first difference, or the file cannot be
            written.
    """
    ensure_writable(path, force)
    model = unwrapped(model)
    record = record_of(model)
    source = _source(model, source, model_kwargs)
    source, structure = (source, model) if proved and source is not None else identify(model, source)
    tensors = to_write(model, structure)
    preprocess = preprocess or record.preprocess or preprocess_of(model, source)
    outputs = sample_outputs(model, preprocess.input_size)
    if not outputs.not_checked and structure is not model:
        twin = rebuilt(source, record.plans)
        fill(twin, tensors)
        if problem := _difference(outputs, twin):
            raise RetrofitError(
                f"built again, {source} is another function than this network: {problem}; "
                "save it with `save(source='own')`"
            )
    manifest = {
        "schema": SCHEMA,
        "model": source.to_dict(),
        "conversion": {
            "to": record.plans[-1].to if record.plans else None,
            "steps": [plan.to_dict() for plan in record.plans],
        },
        "layers": record.plans[-1].to_dict()["layers"] if record.plans else [],
        "preprocess": preprocess.to_dict(),
        "labels": _labels(model, labels, outputs),
        "weights": dict(weights or record.weights or UNKNOWN_WEIGHTS),
        "strength": common_strength(model),
        "training": training_settings(model),
        "checksum": checksum(tensors),
        "sampled_outputs": outputs.to_dict(),
        "versions": _versions(),
    }
    with atomic_write(path, force) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(manifest)})
        except SafetensorError as error:
            raise RetrofitError(
                f"cannot write {path} ({one_line(error)}); free space or choose another place"
            ) from error


def _source(
    model: nn.Module, source: str | ModelSource | None, model_kwargs: Mapping[str, Any] | None
) -> ModelSource | None:
    """Return the source that the user says a network is of; None if that is for the network to tell."""
    if source == "own":
        return own.source_of(model)
    if isinstance(source, str):
        return with_options(parse(source), model_kwargs=model_kwargs)
    if model_kwargs:
        raise UsageError("`model_kwargs` are the arguments of a library's builder; say which with `source`")
    return source


def _labels(model: nn.Module, labels: Sequence[str] | None, outputs: SampledOutputs) -> list[str] | None:
    """Return the names of the outputs: those given, else those noted, unless the network has another classifier now.

    How many outputs there are is known from what the network answered or, where it was not run, from what timm's
    networks say. A UsageError says that the names given are not one for each.
    """
    names = record_of(model).labels if labels is None else labels
    classes = getattr(model, "num_classes", None) if outputs.classes is None else outputs.classes
    if names is None or not isinstance(classes, int) or not classes or len(names) == classes:
        return None if names is None else list(names)
    if labels is None:
        return None
    raise UsageError(f"{plural(len(names), 'label')} for {plural(classes, 'output')}; pass `labels` with one for each")


def common_strength(model: nn.Module) -> float | None:
    """Return the strength of all converted layers; None if there are none, or they differ."""
    strengths = {float(layer.strength) for layer in surgery.strength_layers(model)}
    return strengths.pop() if len(strengths) == 1 else None


def _versions() -> dict[str, str]:
    return {"retrofit": __version__} | {name: version(name) for name in ("torch", "timm", "torchvision")}


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
    model, manifest = opened(artifact_path(str(path)) or path, into)
    if manifest.not_checked:
        warnings.warn(f"{path} is {manifest.not_checked}", stacklevel=2)
    return into if into is not None and unwrapped(into) is model else model


def opened(path: str | Path, into: nn.Module | None = None) -> tuple[nn.Module, Manifest]:
    """Return the network that `load` returns, and its manifest."""
    manifest = Manifest.read(path)
    source = manifest.source
    if into is not None:
        into = unwrapped(into)
        if surgery.plans_of(into):
            raise RetrofitError(
                "the network to load into is converted already; pass it as it was before its conversion"
            )
        if any(tensor.is_meta for tensor in tensors_of(into).values()):
            raise RetrofitError("the network to load into is on the meta device, without memory; build it on the CPU")
        if source.library == "own":
            source = record_of(into).source or own.source_of(into)
    elif source.library == "own":
        raise RetrofitError(
            f"{path} holds a network of one's own, {printable(source, 100)}; build that network and pass it as `into`"
        )
    try:
        tensors = load_file(path)
    except Exception as error:  # torch raises anything on types and shapes that it does not have
        raise damaged(path, with_class(error)) from error
    if checksum(tensors) != manifest.checksum:
        raise RetrofitError(
            f"the tensors of {path} were changed after it was saved: they do not match its checksum; write or fetch it "
            "again (to change tensors, load the network, change them there and save it)"
        )
    with nullcontext() if into is None else unchanged_on_failure(into):
        with _explained(path, manifest):
            model = _converted(manifest, tensors, into)
        if problem := misfit(tensors_of(model), under_all_names(model, tensors)):
            raise RetrofitError(
                f"the tensors of {path} do not fit the network in its manifest: {problem}; write it again, or check "
                "what it is loaded into"
            )
        with _explained(path, manifest):
            if into is None:
                model = rebuilt(manifest.source, manifest.plans)
            fill(model, tensors)
            set_training_settings(model, manifest.training)
        if not manifest.outputs.not_checked and (problem := _difference(manifest.outputs, model)):
            raise RetrofitError(f"{path} does not come back as it was saved with {_library(manifest)}: {problem}")
    set_record(model, source=source, preprocess=manifest.preprocess, labels=manifest.labels, weights=manifest.weights)
    return model, manifest


def _converted(manifest: Manifest, tensors: Mapping[str, Tensor], into: nn.Module | None) -> nn.Module:
    """Repeat the conversion on `into`, or on a skeleton, whose tensors need no memory, of the library's network."""
    options = [[row.options for row in plan.layers] + [row.options for row in plan.edits] for plan in manifest.plans]
    check_numbers([manifest.source.kwargs, options], tensors)
    with bounded_by(tensors):
        if into is not None:
            return surgery.replay(into, manifest.plans)
        return skeleton(manifest.source, manifest.plans)


@contextmanager
def _explained(path: str | Path, manifest: Manifest) -> Iterator[None]:
    """Say of any error that the file cannot be rebuilt: a plan of other making may ask the layers for anything."""
    try:
        yield
    except Exception as error:
        raise RetrofitError(f"{path} cannot be rebuilt with {_library(manifest)}: {one_line(error)}") from error


def _difference(outputs: SampledOutputs, model: nn.Module) -> str:
    """Say how a network's outputs differ from those that are known; empty if they do not."""
    if not is_small(model, outputs.size):
        return f"its manifest asks for a run of a large network on images of {printable(outputs.size, 80)}"
    return outputs.difference(sample_outputs_at(model, outputs.size, outputs.values))


def _library(manifest: Manifest) -> str:
    """Name the library that builds the network, with its version here and then."""
    name = "torch" if manifest.source.library == "own" else manifest.source.library
    then = printable(manifest.versions.get(name, "another version"), 40)
    return f"{name} {_versions()[name]} (it was made with {then})"
