"""The artifact: one safetensors file that holds a converted network and how to build it again.

The file's metadata holds a manifest, which may come from anyone. Loading builds the network from
its library, or takes one that the user built, repeats the conversion on its structure and loads the
tensors strictly; nothing from the file is executed. What the tensors do not say (strides, eps,
classes of layers) shows in sampled outputs, which the manifest holds and `load` compares.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import huggingface_hub
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from retrofit import __version__, surgery
from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.strength import common_strength, refuse_partial_state
from retrofit.networks import contents, library
from retrofit.networks.contents import SampledOutputs, checksum, fill, misfit, tensors_of
from retrofit.networks.rebuild import bounded_by, check_numbers, identify, rebuilt, skeleton
from retrofit.record import ModelSource, Preprocess, record_of, set_record, unwrapped
from retrofit.surgery.execute import unchanged_on_failure
from retrofit.utils.files import atomic_write, ensure_writable
from retrofit.utils.text import one_line, plural, printable, with_class

SCHEMA = 1
KEY = "retrofit"
WEIGHTS, CONFIG, LIBRARY = (
    "model.safetensors",
    "config.json",
    "retrofit",
)  # in a repository of the hub
UNKNOWN_WEIGHTS = {"kind": "unknown", "from": None}


@dataclass(frozen=True)
class Manifest:
    """A manifest that is whole; what it says may still not fit its tensors."""

    source: ModelSource
    # the conversions, in order
    plans: list[surgery.Plan]
    preprocess: Preprocess
    # of the network's outputs
    labels: list[str] | None
    weights: dict[str, Any]
    # of the libraries that wrote it
    versions: dict[str, Any]
    # by layer, what only training depends on
    training: dict[str, dict[str, Any]]
    # of the tensors
    checksum: str
    # what the network answered when it was saved
    outputs: SampledOutputs

    @classmethod
    def read(cls, path: str | Path) -> "Manifest":
        """Read an artifact's manifest; raise RetrofitError as `read_manifest` does, and if it is
        malformed.
        """
        values = read_manifest(path)
        try:
            return cls(
                source=ModelSource.from_dict(values["model"]),
                plans=[surgery.Plan.from_dict(step) for step in values["conversion"]["steps"]],
                preprocess=Preprocess.from_dict(values["preprocess"]),
                labels=None
                if values["labels"] is None
                else [str(label) for label in values["labels"]],
                weights=dict(values["weights"]),
                versions=dict(values["versions"]),
                training={str(name): dict(row) for name, row in values["training"].items()},
                checksum=str(values["checksum"]),
                outputs=SampledOutputs.from_dict(values["sampled_outputs"]),
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            raise _damaged(path, f"its manifest is malformed: {one_line(error)}") from error

    @property
    def not_checked(self) -> str:
        """A line that says why the network in the file was not run; empty if it was."""
        why = printable(self.outputs.not_checked, 300)
        return (
            why
            and f"not checked: {why}; only the names and shapes of its tensors tell which network it is"
        )


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read what an artifact says about itself, as it stands in the file; a RetrofitError says why
    it cannot be read.
    """
    file = Path(path)
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise RetrofitError(
            f"{path} {problem}; give an artifact, which `retrofit.save` and `retrofit convert` write"
        )
    try:
        if (text := _manifest_text(file)) is None:
            raise RetrofitError(
                f"{path} is a plain checkpoint, which holds no network; give the network's name, and "
                f"`checkpoint='{path}'` (in Python build the network and call its load_state_dict)"
            )
        values = json.loads(text)
        schema = values["schema"]
    except (SafetensorError, OSError) as error:
        raise _damaged(path, one_line(error)) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "its manifest is not readable") from error
    said = f"schema {printable(schema, 40)}"
    if type(schema) is not int or schema < 1:
        raise _damaged(path, f"its manifest has {said}")
    if schema > SCHEMA:
        raise RetrofitError(
            f"{path} has {said}, this retrofit reads up to {SCHEMA}; upgrade retrofit"
        )
    return dict(values)


def is_artifact(path: str | Path) -> bool:
    """Tell whether a file is a safetensors file with a manifest of ours, of any schema."""
    try:
        return _manifest_text(Path(path)) is not None
    except (SafetensorError, OSError):
        return False


def _manifest_text(path: Path) -> str | None:
    with safe_open(path, framework="pt") as opened:
        return (opened.metadata() or {}).get(KEY)


def _damaged(path: str | Path, why: str) -> RetrofitError:
    return RetrofitError(f"{path} is not a whole artifact ({why}); write or fetch it again")


def artifact_path(text: str) -> Path | None:
    """Return the artifact that MODEL names, which has weights and sizes of its own; None if it
    names a network.

    An artifact is named by its path, `*.safetensors`, or is what `local-dir:FOLDER` or
    `hf-hub:OWNER/NAME[@REVISION]` holds. From the hub it is fetched; a RetrofitError says that this
    failed. None also if the hub gives no answer, or what lies there is not ours.
    """
    prefix, name = library.split_prefix(text)
    if prefix == "local-dir":
        file = Path(name) / WEIGHTS
        return file if is_artifact(file) else None
    if prefix != "hf-hub":
        return Path(text) if Path(text).suffix == ".safetensors" else None
    repo_id, _, revision = name.partition("@")

    def fetched(name: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(repo_id, name, revision=revision or None))

    with library.no_waiting_for_the_hub():
        try:
            config = json.loads(fetched(CONFIG).read_text("utf-8"))
        # what opens a network of timm's there says why it cannot
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict) or config.get("library_name") != LIBRARY:
            return None
        try:
            return fetched(WEIGHTS)
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
            difference), its layers differ in strength because part of a state was loaded into
            it, or the file cannot be written.
    """
    ensure_writable(path, force)
    model = unwrapped(model)
    refuse_partial_state(model)
    record = record_of(model)
    plans = surgery.plans_of(model)
    if source == "own":
        source = library.class_source(model)
    elif isinstance(source, str):
        source = library.with_options(library.parse(source), model_kwargs=model_kwargs)
    elif model_kwargs:
        raise UsageError(
            "`model_kwargs` are the arguments of a library's builder; say which with `source`"
        )
    source, structure = (
        (source, model) if proved and source is not None else identify(model, source)
    )
    tensors = contents.to_write(model, structure)
    preprocess = preprocess or record.preprocess or library.preprocess_of(model, source)
    outputs = contents.sample_outputs(model, preprocess.input_size)
    if not outputs.not_checked and structure is not model:
        twin = rebuilt(source, plans)
        fill(twin, tensors)
        if problem := outputs.difference(twin):
            raise RetrofitError(
                f"built again, {source} differs: {problem}; save it with `save(source='own')`"
            )
    names = record.labels if labels is None else labels
    classes = getattr(model, "num_classes", None) if outputs.classes is None else outputs.classes
    if names is not None and isinstance(classes, int) and classes not in (0, len(names)):
        if labels is not None:
            raise UsageError(
                f"{plural(len(names), 'label')} for {plural(classes, 'output')}; pass as many `labels`"
            )
        # those noted were of another classifier
        names = None
    steps = [plan.to_dict() for plan in plans]
    manifest = {
        "schema": SCHEMA,
        "model": asdict(source),
        "conversion": {"to": plans[-1].to if plans else None, "steps": steps},
        "layers": steps[-1]["layers"] if steps else [],
        "preprocess": preprocess.to_dict(),
        "labels": None if names is None else list(names),
        "weights": dict(weights or record.weights or UNKNOWN_WEIGHTS),
        "strength": common_strength(model),
        "training": contents.training_settings(model),
        "checksum": checksum(tensors),
        "sampled_outputs": outputs.to_dict(),
        "versions": {"retrofit": __version__}
        | {name: version(name) for name in ("torch", "timm", "torchvision")},
    }
    with atomic_write(path, force) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(manifest)})
        except SafetensorError as error:
            why = one_line(error)
            raise RetrofitError(
                f"cannot write {path} ({why}); free space or choose another place"
            ) from error


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
    return into if into is not None and unwrapped(into) is model else model


def opened(
    path: str | Path,
    into: nn.Module | None = None,
    needs: str = "build that network and pass it as `into`",
) -> tuple[nn.Module, Manifest]:
    """Return the network that `load` returns, and its manifest; `needs` is what a file of one's own
    network lacks.
    """
    manifest = Manifest.read(path)
    source, plans, origin = manifest.source, manifest.plans, manifest.source
    if into is not None:
        into = unwrapped(into)
        if record_of(into).plans:
            raise RetrofitError(
                "the network to load into is converted already; pass it as it was before that"
            )
        plans = surgery.unrepeated(plans, into)
        if any(tensor.is_meta for tensor in tensors_of(into).values()):
            raise RetrofitError(
                "the network to load into is on the meta device, without memory; build it on the CPU"
            )
        if source.library == "own":
            origin = record_of(into).source or library.class_source(into)
    elif source.library == "own":
        raise UsageError(f"{path} holds a network of one's own, {printable(source, 100)}; {needs}")
    try:
        tensors = load_file(path)
    # torch raises anything on types and shapes that it does not have
    except Exception as error:
        raise _damaged(path, with_class(error)) from error
    if checksum(tensors) != manifest.checksum:
        raise RetrofitError(
            f"the tensors of {path} were changed after it was saved: they do not match its checksum; write or fetch it "
            "again (to change tensors, load the network, change them there and save it)"
        )
    builder = "torch" if source.library == "own" else source.library
    then = printable(manifest.versions.get(builder, "another version"), 40)
    made_with = f"{builder} {version(builder)} (it was made with {then})"
    with nullcontext() if into is None else unchanged_on_failure(into):
        try:
            options = [[row.options for row in (*plan.layers, *plan.edits)] for plan in plans]
            check_numbers([source.kwargs, options], tensors)
            with bounded_by(tensors):
                model = skeleton(source, plans) if into is None else surgery.replay(into, plans)
            problem = misfit(tensors_of(model), contents.under_all_names(model, tensors))
            if not problem:
                model = rebuilt(source, plans) if into is None else model
                fill(model, tensors)
                contents.set_training_settings(model, manifest.training)
        # a plan of other making may ask the layers for anything
        except Exception as error:
            raise RetrofitError(
                f"{path} cannot be rebuilt with {made_with}: {one_line(error)}"
            ) from error
        if problem:
            what = f"the tensors of {path} do not fit the network in its manifest: {problem}"
            raise RetrofitError(f"{what}; write it again, or check what it is loaded into")
        if not manifest.outputs.not_checked and (problem := manifest.outputs.difference(model)):
            raise RetrofitError(
                f"{path} does not come back as it was saved with {made_with}: {problem}"
            )
    set_record(
        model,
        source=origin,
        preprocess=manifest.preprocess,
        labels=manifest.labels,
        weights=manifest.weights,
    )
    return model, manifest
