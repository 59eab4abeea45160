"""The artifact: one safetensors file that holds a converted network and how to build it again.

Loading builds the network from its library, or takes one that the user built. It repeats the
conversion on that structure and loads the tensors strictly. Nothing from the file is executed.
Strides, eps and classes of layers, which no tensor shows, are checked by the sampled outputs in the
manifest.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retrofit import __version__, surgery
from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.strength import common_strength, refuse_partial_state
from retrofit.networks import model_sources
from retrofit.networks.hub_connection import no_waiting_for_the_hub
from retrofit.networks.identify import identify
from retrofit.networks.manifest import KEY, SCHEMA, Manifest, damaged, is_artifact, seal
from retrofit.networks.own_networks import class_source
from retrofit.networks.rebuild import bounded_by, check_numbers, rebuilt, skeleton
from retrofit.networks.sampled_outputs import SampledOutputs, sample_outputs
from retrofit.networks.state_tensors import (
    checksum,
    fill,
    misfit,
    state_tensors,
    tensors_to_write,
    under_all_names,
)
from retrofit.networks.training_settings import set_training_settings, training_settings
from retrofit.networks.weights_metadata import preprocess_of
from retrofit.record import (
    ModelSource,
    Preprocess,
    record_of,
    refuse_sharded,
    set_record,
    unwrapped,
)
from retrofit.surgery.execute import unchanged_on_failure
from retrofit.surgery.norm_layers import find_norms
from retrofit.utils.files import UnwritableError, atomic_write, ensure_writable
from retrofit.utils.text import one_line, plural, printable, with_class

# What a repository of the hub holds.
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
LIBRARY = "retrofit"
# The libraries whose versions a file names.
_BUILDERS = ("torch", "timm", "torchvision")
UNKNOWN_WEIGHTS = {"kind": "unknown", "from": None}


def artifact_path(text: str) -> Path | None:
    """Return the path of the artifact that MODEL names; None if it names a network.

    An artifact is named by its path, `*.safetensors`, or by `local-dir:FOLDER` or
    `hf-hub:OWNER/NAME[@REVISION]`. From the hub it is fetched. None also if the hub does not
    answer, or holds no artifact of ours there.

    Raises:
        RetrofitError: If the hub's repository is ours and its artifact cannot be fetched.
    """
    prefix, name = model_sources.split_prefix(text)
    if prefix == "hf-hub":
        return _fetched(text, name)
    if prefix == "local-dir":
        file = Path(name) / WEIGHTS
        if is_artifact(file):
            return file
        return None
    file = Path(text)
    # Not `is_artifact`: what is missing, or a plain checkpoint, is refused by `Manifest.read`, which
    # says why.
    if file.suffix == ".safetensors":
        return file
    return None


def _fetched(text: str, name: str) -> Path | None:
    """Fetch the artifact of a repository of the hub; None if it holds none."""
    repo_id, _, revision = name.partition("@")

    def fetch(file: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(repo_id, file, revision=revision or None))

    with no_waiting_for_the_hub():
        try:
            config = json.loads(fetch(CONFIG).read_text("utf-8"))
        # What opens a network of timm's there says why it cannot.
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict) or config.get("library_name") != LIBRARY:
            return None
        try:
            return fetch(WEIGHTS)
        except (OSError, ValueError) as error:
            raise RetrofitError(
                f"{text} cannot be fetched: {one_line(error)}; check the connection"
            ) from error


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
    """Write a network, converted or not, to an artifact.

    Anything you do not pass is read from the network's record. A timm or torchvision network is
    first rebuilt and compared with `model`, so the file is known to load and compute the same
    function. Any other network is your own: pass it to `load` as your code builds it (`into=`);
    `load` compares its outputs. A network that is very large, or accepts no images, is not run; the
    file says so, and `load` warns about it.

    Args:
        model: The network; DistributedDataParallel and torch.compile wrappers are removed.
        path: The file to write; its name usually ends in `.safetensors`.
        source: The network's name in its library ("resnet50", "tv:resnet50"), if the network does
            not record it; "own" for a network that no library builds in this form.
        model_kwargs: Arguments that were passed to the library's builder, if the network does not
            record them.
        labels: Names of the network's outputs, one per output.
        weights: Origin of the source's weights: {"kind": "random" | "pretrained" | "checkpoint",
            "from": str | None}.
        preprocess: How images are prepared; by default, as the library specifies.
        force: Whether to replace an existing file.
        proved: Whether to skip rebuilding the network, because it was saved or loaded as this
            `source` before, with other tensors.

    Raises:
        RetrofitError: If the library does not build this network (the message names the first
            difference), its layers differ in strength because part of a state was loaded into it,
            it is sharded, or the file cannot be written.
        UsageError: If `model_kwargs` has no `source`, or `labels` are not one per output.
    """
    ensure_writable(path, force)
    refuse_sharded(model)
    model = unwrapped(model)
    refuse_partial_state(model)
    record = record_of(model)
    plans = surgery.plans_of(model)
    known = _known_source(model, source, model_kwargs)
    if proved and known is not None:
        origin = known
        structure = model
    else:
        origin, structure = identify(model, known)
    tensors = tensors_to_write(model, structure)
    preprocess = preprocess or record.preprocess or preprocess_of(model, origin)
    outputs = sample_outputs(model, preprocess.input_size)
    if structure is not model:
        _check_rebuilt(origin, plans, tensors, outputs)
    steps = [plan.to_dict() for plan in plans]
    # The last conversion counts.
    last = [{"to": None, "layers": []}, *steps][-1]
    values = {
        "schema": SCHEMA,
        "model": asdict(origin),
        "conversion": {"to": last["to"], "steps": steps},
        "layers": last["layers"],
        "preprocess": preprocess.to_dict(),
        "labels": _labels_of(model, labels, outputs),
        "weights": dict(weights or record.weights or UNKNOWN_WEIGHTS),
        "strength": common_strength(model),
        "training": training_settings(model),
        "checksum": checksum(tensors),
        "sampled_outputs": outputs.to_dict(),
        "versions": {"retrofit": __version__, **{name: version(name) for name in _BUILDERS}},
    }
    metadata = {"format": "pt", KEY: seal(values)}
    with atomic_write(path, force) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:
            why = one_line(error)
            raise UnwritableError(f"cannot write {path} ({why})") from error


def _known_source(
    model: nn.Module, source: str | ModelSource | None, model_kwargs: Mapping[str, Any] | None
) -> ModelSource | None:
    """Return what `save` was told of a network's source; None if nothing."""
    if source == "own":
        return class_source(model)
    if isinstance(source, str):
        return model_sources.with_options(model_sources.parse(source), model_kwargs=model_kwargs)
    if model_kwargs:
        raise UsageError(
            "`model_kwargs` are the arguments of a library's builder; say which with `source`"
        )
    return source


def _check_rebuilt(
    source: ModelSource,
    plans: Sequence[surgery.Plan],
    tensors: Mapping[str, Tensor],
    outputs: SampledOutputs,
) -> None:
    """Refuse to save a network whose library builds another function of its tensors."""
    twin = rebuilt(source, plans)
    fill(twin, tensors)
    problem = outputs.difference(twin)
    if problem:
        raise RetrofitError(
            f"built again, {source} differs: {problem}; save it with `save(source='own')`"
        )


def _labels_of(
    model: nn.Module, labels: Sequence[str] | None, outputs: SampledOutputs
) -> list[str] | None:
    """Return the names of a network's outputs, `labels` or those recorded, if they fit."""
    # An array of names has no truth value.
    known = record_of(model).labels if labels is None else labels
    if known is None:
        return None
    names = list(known)
    classes = outputs.classes or getattr(model, "num_classes", None)
    if classes in (None, 0, len(names)):
        return names
    if labels is not None:
        raise UsageError(
            f"{plural(len(names), 'label')} for {plural(classes, 'output')}; pass as many `labels`"
        )
    # Those recorded were of another classifier.
    return None


def load(path: str | Path, *, into: nn.Module | None = None) -> nn.Module:
    """Build the network stored in an artifact, on the CPU.

    Args:
        path: A file written by `save`; or `hf-hub:OWNER/NAME[@REVISION]` or `local-dir:FOLDER`, as
            written by `retrofit.push_to_hub` and `save_for_hub`.
        into: The network as it was before its conversion, with any weights; required for your own
            network, optional for a library's. It is converted and filled in place, on its own
            device.

    Returns:
        The network with the file's tensors, in their dtypes, in training mode like networks from
        timm and torchvision (`into` keeps its mode). Use the returned network, even if you passed
        `into`.

    Raises:
        RetrofitError: If the file is damaged, not an artifact, or of a newer schema; if the
            installed libraries do not build its network; or if `into` is a different network, which
            is then left unchanged.
    """
    model, manifest = opened(artifact_path(str(path)) or path, into)
    if manifest.not_checked:
        warnings.warn(f"{path} is {manifest.not_checked}", stacklevel=2)
    if into is not None and unwrapped(into) is model:
        return into
    return model


def opened(
    path: str | Path,
    into: nn.Module | None = None,
    advice: str = "build that network and pass it as `into`",
) -> tuple[nn.Module, Manifest]:
    """Return the network that `load` returns, and its manifest.

    Args:
        path: The file.
        into: The network to convert and fill, if the user built it.
        advice: What the error says to do where the file needs `into` and there is none.

    Raises:
        RetrofitError: As for `load`.
        UsageError: If the file holds a network of one's own, and `into` is None.
    """
    manifest = Manifest.read(path)
    source = manifest.source
    plans = manifest.plans
    kept: AbstractContextManager[Any] = nullcontext()
    if into is not None:
        into = unwrapped(into)
        if record_of(into).plans:
            raise RetrofitError(
                "the network to load into is converted already; pass it as it was before that"
            )
        # It would take the tensors without a word, and hold none.
        if any(tensor.is_meta for tensor in state_tensors(into).values()):
            raise RetrofitError(
                "the network to load into is on the meta device, without memory; build it on the CPU"
            )
        plans = surgery.unrepeated(plans, into)
        kept = unchanged_on_failure(into, find_norms(into))
        if source.library == "own":
            source = record_of(into).source or class_source(into)
    elif source.library == "own":
        raise UsageError(f"{path} holds a network of one's own, {printable(source, 100)}; {advice}")
    tensors = _read_tensors(path, manifest)
    try:
        with kept:
            model = _restored(manifest, plans, tensors, into)
    # A plan of other making may ask the layers for anything.
    except Exception as error:
        raise RetrofitError(
            f"{path} does not come back as it was saved, with {_made_with(manifest)}: "
            f"{one_line(error, 300)}; install that version, or check what it is loaded into"
        ) from error
    set_record(
        model,
        source=source,
        preprocess=manifest.preprocess,
        labels=manifest.labels,
        weights=manifest.weights,
    )
    return model, manifest


def _read_tensors(path: str | Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read an artifact's tensors, which must match its checksum."""
    try:
        tensors = load_file(path)
    # torch raises anything on types and shapes that it does not have.
    except Exception as error:
        raise damaged(path, with_class(error)) from error
    if checksum(tensors) != manifest.checksum:
        raise RetrofitError(
            f"the tensors of {path} were changed after it was saved: they do not match its "
            "checksum; write or fetch it again (to change tensors, load the network, change them "
            "there and save it)"
        )
    return tensors


def _restored(
    manifest: Manifest,
    plans: Sequence[surgery.Plan],
    tensors: Mapping[str, Tensor],
    into: nn.Module | None,
) -> nn.Module:
    """Build an artifact's network, or convert the one to load `into` by `plans`, and fill it.

    Raises:
        RetrofitError: If the tensors do not fit it, or its outputs are not those that it had.
    """
    options = []
    for plan in plans:
        rows = (*plan.layers, *plan.edits)
        options.append([row.options for row in rows])
    check_numbers([manifest.source.kwargs, options], tensors)
    with bounded_by(tensors):
        if into is None:
            model = skeleton(manifest.source, plans)
        else:
            model = surgery.replay(into, plans)
    problem = misfit(state_tensors(model), under_all_names(model, tensors))
    if problem:
        raise RetrofitError(f"the tensors do not fit the network in the manifest: {problem}")
    # The skeleton may be on the meta device.
    if into is None:
        model = rebuilt(manifest.source, plans)
    fill(model, tensors)
    set_training_settings(model, manifest.training)
    problem = manifest.outputs.difference(model)
    if problem:
        raise RetrofitError(problem)
    return model


def _made_with(manifest: Manifest) -> str:
    """Name the library that builds a network, with its version here and where the file was made."""
    source = manifest.source
    builder = "torch"
    if source.library != "own":
        builder = source.library
    then = printable(manifest.versions.get(builder, "another version"), 40)
    return f"{builder} {version(builder)} (it was made with {then})"
