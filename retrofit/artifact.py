"""The artifact: one safetensors file that holds a converted network and how to build it again.

The file's metadata holds a manifest. Loading builds the network from its library, repeats the conversion on its
structure and loads the tensors strictly; nothing from the file is executed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import retrofit
from retrofit import surgery
from retrofit.errors import RetrofitError
from retrofit.files import atomic_write, ensure_writable
from retrofit.identify import identify, tensors_of
from retrofit.library import ModelSource, Preprocess, build, one_line, shortlist
from retrofit.preprocess import preprocess_of
from retrofit.surgery import Plan

SCHEMA = 1
_UNKNOWN_WEIGHTS = {"kind": "unknown", "from": None}


def save(
    model: nn.Module,
    path: str | Path,
    *,
    source: str | ModelSource | None = None,
    labels: Sequence[str] | None = None,
    weights: Mapping[str, Any] | None = None,
    preprocess: Preprocess | None = None,
    force: bool = False,
) -> None:
    """Write a network of timm or torchvision, converted or not, as an artifact.

    What is not given is taken from the network, if `load` or the command line made it. Before anything is written, the
    network is built again from the manifest (without its weights), so that what is written can be loaded.

    Args:
        model: The network; wrappers of DistributedDataParallel and torch.compile are taken off.
        path: The file to write, by custom `*.safetensors`.
        source: Which network it is ("resnet50", "tv:resnet50"), where it cannot tell.
        labels: Names of its outputs.
        weights: Whose weights it had before: {"kind": "random" | "pretrained" | "checkpoint", "from": str | None}.
        preprocess: What it expects of its images; the library's prescription if not known.
        force: Whether to replace an existing file.

    Warns:
        UserWarning: If layers without tensors (activations, say) are not those that the library builds.

    Raises:
        RetrofitError: If the network cannot be rebuilt from its library, or the file cannot be written.
    """
    ensure_writable(path, force)
    while (inner := _wrapped(model)) is not None:
        model = inner
    plans: list[Plan] = getattr(model, "_retrofit_plans", [])
    source, skeleton = identify(model, source, lambda fresh: _replay(fresh, plans))
    _warn_of_changes(model, skeleton)
    labels = labels if labels is not None else getattr(model, "_retrofit_labels", None)
    preprocess = preprocess or getattr(model, "_retrofit_preprocess", None) or preprocess_of(model, source)
    manifest = {
        "schema": SCHEMA,
        "model": source.to_dict(),
        "conversion": {"to": plans[-1].to if plans else None, "steps": [plan.to_dict() for plan in plans]},
        "layers": [row.to_dict() for row in plans[-1].layers] if plans else [],
        "preprocess": preprocess.to_dict(),
        "labels": None if labels is None else list(labels),
        "weights": dict(weights or getattr(model, "_retrofit_weights", _UNKNOWN_WEIGHTS)),
        "strength": _strength(model),
        "versions": _versions(),
    }
    metadata = {"format": "pt", "retrofit": json.dumps(manifest)}
    with atomic_write(path, force) as temporary:
        try:
            save_file(_to_write(model, skeleton), temporary, metadata=metadata)
        except SafetensorError as error:
            raise RetrofitError(
                f"cannot write {path} ({one_line(error)}); free space or choose another place"
            ) from error


def load(path: str | Path) -> nn.Module:
    """Build the network that an artifact holds, on the CPU.

    Args:
        path: A file that `save` wrote.

    Returns:
        The network with its tensors, in their dtypes, in training mode as timm and torchvision hand networks out.

    Raises:
        RetrofitError: If the file is damaged, not an artifact, or of a newer schema, or the installed libraries do not
            build the network that it holds.
    """
    manifest = read_manifest(path)
    try:
        source = ModelSource.from_dict(manifest["model"])
        plans = [Plan.from_dict(step) for step in manifest["conversion"]["steps"]]
        preprocess = Preprocess.from_dict(manifest["preprocess"])
        labels = None if manifest["labels"] is None else [str(label) for label in manifest["labels"]]
        weights, versions = dict(manifest["weights"]), dict(manifest["versions"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"its manifest is malformed: {one_line(error)}") from error
    try:
        with torch.random.fork_rng(devices=[]):
            model = _replay(build(source), plans)
    except Exception as error:  # a plan of other making may ask the layers for anything
        have, made = _versions()[source.library], versions.get(source.library, "another version")
        raise RetrofitError(
            f"{path} cannot be rebuilt with {source.library} {have} (it was made with {made}): {one_line(error)}"
        ) from error
    _load_tensors(model, load_file(path), path)
    attached = {"source": source, "preprocess": preprocess, "labels": labels, "weights": weights}
    vars(model).update({f"_retrofit_{name}": value for name, value in attached.items()})
    return model


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read what an artifact says about itself.

    Raises:
        RetrofitError: If there is no such file, or it is not an artifact that this version reads.
    """
    file = Path(path)
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise RetrofitError(f"{path} {problem}; give the path of an artifact that `retrofit convert` wrote")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, one_line(error)) from error
    if "retrofit" not in metadata:
        raise RetrofitError(f"{path} is a plain checkpoint; give the network's name and --checkpoint {path}")
    try:
        manifest = json.loads(metadata["retrofit"])
        schema = int(manifest["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "its manifest is not readable") from error
    if schema > SCHEMA:
        raise RetrofitError(f"{path} has schema {schema}, this retrofit reads up to {SCHEMA}; upgrade retrofit")
    return dict(manifest)


def is_artifact(path: str | Path) -> bool:
    """Tell whether a file is a safetensors file with a manifest of ours, of any schema."""
    try:
        with safe_open(path, framework="pt") as opened:
            return "retrofit" in (opened.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _damaged(path: str | Path, why: str) -> RetrofitError:
    return RetrofitError(f"{path} is not a whole artifact ({why}); write or fetch it again")


def _replay(model: nn.Module, plans: Sequence[Plan]) -> nn.Module:
    for plan in plans:
        model, _ = surgery.apply(plan, model)
    return model


def _wrapped(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return model.module
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _warn_of_changes(model: nn.Module, skeleton: nn.Module) -> None:
    """Warn of layers without tensors that were exchanged after the network was built: the artifact cannot hold them."""
    ours, theirs = ({name: type(m).__name__ for name, m in net.named_modules()} for net in (model, skeleton))
    changed = [f"{name} is {ours.get(name)} here" for name in theirs if ours.get(name) != theirs[name]]
    if changed:
        first = f"{shortlist(changed)}, not what {type(model).__name__} has in its library"
        warnings.warn(f"{first}; the artifact will load as the library builds it", stacklevel=3)


def _strength(model: nn.Module) -> float | None:
    """Return the strength of all converted layers; None if there are none, or they differ."""
    with suppress(RetrofitError):
        return surgery.strength_of(model)
    return None


def _versions() -> dict[str, str]:
    return {"retrofit": retrofit.__version__} | {name: version(name) for name in ("torch", "timm", "torchvision")}


def _aliases(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tensor that goes by several to its first name."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(model).items()}
    return {name: original for name, original in names.items() if name != original}


def _to_write(model: nn.Module, skeleton: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for the file: each one once, contiguous, with storage of its own.

    Raises:
        RetrofitError: If the network holds as two tensors what its library builds as one.
    """
    tensors = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    for name, original in _aliases(skeleton).items():
        if not torch.equal(tensors[name], tensors[original]):
            raise RetrofitError(
                f"{name} and {original} are one tensor in the library's network, two here; make them equal to save it"
            )
        del tensors[name]
    stored: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        storage = whole.untyped_storage()
        if storage.data_ptr() in stored or storage.nbytes() != whole.nbytes:
            whole = whole.clone(memory_format=torch.contiguous_format)
        stored.add(whole.untyped_storage().data_ptr())
        tensors[name] = whole
    return tensors


def _load_tensors(model: nn.Module, tensors: dict[str, Tensor], path: str | Path) -> None:
    own = tensors_of(model)
    for name, original in _aliases(model).items():
        if original in tensors:
            tensors.setdefault(name, tensors[original])
    missing = [name for name in own if name not in tensors]
    unexpected = [name for name in tensors if name not in own]
    shapes = [
        f"{name} {list(tensors[name].shape)} for {list(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    parts = ((missing, "missing"), (unexpected, "unexpected"), (shapes, "of another shape"))
    if problems := [f"{len(names)} {word} ({shortlist(names)})" for names, word in parts if names]:
        raise RetrofitError(
            f"the tensors of {path} do not fit the network in its manifest: {', '.join(problems)}; write it again"
        )
    floating = {tensors[name].dtype for name, _ in model.named_parameters() if tensors[name].is_floating_point()}
    if len(floating) == 1:
        model.to(dtype=floating.pop())  # also the buffers that are in no file
    for name, tensor in tensors_of(model).items():
        tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors, strict=True)
