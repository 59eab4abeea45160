"""MODEL as the command line takes it -> a network, its preprocessing, and whose weights it has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.strength import common_strength
from retrofit.networks import artifact
from retrofit.networks.checkpoint import Checkpoint, read_checkpoint
from retrofit.networks.load_weights import Loaded, Match, load_into
from retrofit.networks.manifest import Manifest, is_artifact
from retrofit.networks.model_sources import build, parse, with_options
from retrofit.networks.own_networks import class_source
from retrofit.networks.weights_metadata import labels_of, preprocess_of, weights_name
from retrofit.record import ModelSource, Preprocess, record_of, set_record
from retrofit.surgery import plans_of
from retrofit.utils.text import plural, printable, shortlist


@dataclass
class Network:
    """A network, whose record holds what is known about it."""

    model: nn.Module
    # Sentences for the user.
    warnings: tuple[str, ...] = ()
    # The file that it was read from, if any.
    artifact: str | None = None

    @property
    def source(self) -> ModelSource:
        """Where its structure comes from."""
        return record_of(self.model).source or class_source(self.model)

    @property
    def preprocess(self) -> Preprocess:
        """What it expects of its images."""
        return record_of(self.model).preprocess or preprocess_of(self.model, self.source)

    @property
    def labels(self) -> list[str] | None:
        """Names of its outputs; None if unknown."""
        return record_of(self.model).labels

    @property
    def weights(self) -> dict[str, Any]:
        """Whose weights it has."""
        return dict(record_of(self.model).weights or artifact.UNKNOWN_WEIGHTS)

    @property
    def facts(self) -> dict[str, Any]:
        """What it is, as JSON values: `model`, `target` (what it was converted to last), `strength`
        and `weights`.
        """
        plans = plans_of(self.model)
        return {
            "model": self.source.name,
            "target": plans[-1].to if plans else None,
            "strength": common_strength(self.model),
            "weights": self.weights,
        }


def weights_sentence(weights: Mapping[str, Any], artifact: str | None = None) -> str:
    """Say whose weights a network has, in words that nobody can miss.

    Args:
        weights: What its record says of them.
        artifact: The file that it was read from, if any, which takes no other weights.
    """
    origin = printable(weights.get("from"), 200)
    match weights.get("kind"):
        case "random" if artifact is not None:
            return "weights: RANDOM (convert again with trained ones)"
        case "random":
            return "weights: RANDOM (pass `pretrained=True` or `checkpoint=FILE` for trained ones)"
        case "pretrained":
            return f"weights: pretrained ({origin})"
        case "checkpoint":
            return f"weights: checkpoint {origin}{_part_taken(weights)}"
        case _:
            return "weights: of unknown origin (saved from Python without weights=)"


def _part_taken(weights: Mapping[str, Any]) -> str:
    """Say which part of a checkpoint was taken, and what else it holds."""
    description = ""
    if key := weights.get("key"):
        description += f", its {printable(key, 64)}"
    if weights.get("left_random"):
        description += " in PART"
    if others := weights.get("others"):
        description += f" (it also holds {shortlist(others)}: `checkpoint_key=NAME`)"
    return description


def open_model(
    text: str,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    match: Match | None = None,
    checkpoint_key: str | None = None,
    checkpoint_partial: bool = False,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    network: str | None = None,
) -> Network:
    """Open a network by a name that `parse` takes, or an artifact by its path or the hub's name of
    it.

    Args:
        text: The name or path.
        pretrained: Whether to fetch the library's weights.
        checkpoint: A file of weights to load.
        match: How its tensors are paired with the network's; None is "name". As `load_into` takes
            it.
        checkpoint_key: Which of its weights to take, as `read_checkpoint` takes it.
        checkpoint_partial: Whether to take what fits.
        num_classes: Number of outputs; like the sizes below, the library's if None.
        in_chans: Number of image channels.
        img_size: Image height and width in pixels.
        model_kwargs: More arguments of the builder.
        network: What builds the network in an artifact of the user's own,
            `py:package.module:callable`.

    Raises:
        RetrofitError: If the network cannot be built, or its weights cannot be had.
        UsageError: If there is no such network, or the arguments contradict each other.
    """
    sizes: dict[str, Any] = {
        "num_classes": num_classes,
        "in_chans": in_chans,
        "img_size": img_size,
        "model_kwargs": model_kwargs,
    }
    choices = {
        "match": match,
        "checkpoint_key": checkpoint_key,
        "checkpoint_partial": checkpoint_partial,
    }
    file = artifact.artifact_path(text)
    if file is not None:
        passed = _passed({"pretrained": pretrained, "checkpoint": checkpoint, **choices, **sizes})
        if passed:
            raise UsageError(f"{text} is an artifact with its own weights and sizes; drop {passed}")
        return _open_artifact(str(file), builder=network)
    if network is not None:
        raise UsageError(
            f"`network` builds what an artifact of your own network holds; {text} is none, drop it"
        )
    _check_choices(checkpoint, choices)
    _check_weights_arguments(pretrained, checkpoint, model_kwargs)
    source = with_options(parse(text), **sizes)
    if pretrained and source.library == "own":
        raise UsageError(
            f"no library has weights for {text}; drop `pretrained`, load them in it or give "
            "`checkpoint`"
        )
    # Before any time is spent on building.
    read = _read(checkpoint, checkpoint_key)

    model = build(source, pretrained)
    source = record_of(model).source or source
    set_record(model, preprocess=_preprocess(model, source, text, img_size))
    labels = None
    warnings: tuple[str, ...] = ()
    weights = {"kind": "random", "from": None}
    if read is not None:
        loaded = load_into(model, read.tensors, match or "name", checkpoint_partial)
        weights = _checkpoint_weights(checkpoint, read, loaded)
        warnings = tuple(loaded.warnings)
    elif pretrained:
        weights = {"kind": "pretrained", "from": weights_name(model, source)}
        labels = labels_of(model, source)
        warnings = _classifier_warnings(model, num_classes)
    set_record(model, labels=labels, weights=weights)
    return Network(model, warnings)


def _passed(arguments: Mapping[str, Any]) -> str:
    """Name the arguments that were passed."""
    return ", ".join(
        f"`{name}`"
        for name, value in arguments.items()
        # By identity: 0 == False, and `num_classes` may be 0.
        if value is not None and value is not False
    )


def _check_choices(checkpoint: str | Path | None, choices: Mapping[str, Any]) -> None:
    """Refuse choices of what to take of a checkpoint where there is none."""
    passed = _passed(choices)
    if passed and checkpoint is None:
        raise UsageError(f"{passed} says what to take of a checkpoint; give `checkpoint=FILE` too")


def _check_weights_arguments(
    pretrained: bool, checkpoint: str | Path | None, model_kwargs: Mapping[str, Any] | None
) -> None:
    """Refuse two sources of weights, and weights that are not asked for."""
    if pretrained and checkpoint is not None:
        raise UsageError(
            "`pretrained` and `checkpoint` are two sources of weights; pass one of them"
        )
    if "weights" in (model_kwargs or {}) and not pretrained:
        raise UsageError(
            "'weights' in `model_kwargs` chooses among pretrained weights; pass "
            "`pretrained=True` too"
        )


def _read(checkpoint: str | Path | None, key: str | None) -> Checkpoint | None:
    if checkpoint is None:
        return None
    if is_artifact(checkpoint):
        raise RetrofitError(
            f"{checkpoint} is a retrofit artifact, a whole network; pass it as MODEL"
        )
    return read_checkpoint(checkpoint, key)


def _preprocess(
    model: nn.Module, source: ModelSource, text: str, img_size: int | None
) -> Preprocess:
    """Return what a network that was just built expects of its images."""
    preprocess = preprocess_of(model, source)
    if img_size is None:
        return preprocess
    # Behind hf-hub: and local-dir:, only the built network shows whether its size is an argument. If
    # it is, it was not passed, and adding it changes the source.
    if with_options(source, img_size=img_size) != source:
        raise UsageError(
            f"{text} is built for one size; pass `model_kwargs={{'img_size': {img_size}}}`"
        )
    return replace(preprocess, input_size=(preprocess.input_size[0], img_size, img_size))


def _checkpoint_weights(
    checkpoint: str | Path | None, read: Checkpoint, loaded: Loaded
) -> dict[str, Any]:
    """Return the record of weights that came from a checkpoint; see `Record`."""
    details = {
        "key": read.key,
        "others": [*read.others],
        "left_random": loaded.left_random,
        "left_out": [*read.left_out, *loaded.left_out],
    }
    details = {name: value for name, value in details.items() if value}
    return {"kind": "checkpoint", "from": str(checkpoint), **details}


def _classifier_warnings(model: nn.Module, num_classes: int | None) -> tuple[str, ...]:
    """Return a warning if the pretrained weights are of another number of classes."""
    trained = getattr(model, "pretrained_cfg", {}).get("num_classes")
    if num_classes is None or trained in (None, num_classes):
        return ()
    theirs = f"the pretrained weights have {plural(trained, 'class')}"
    return (f"the classifier is RANDOM: {theirs}, not {num_classes}",)


def _open_artifact(path: str, builder: str | None) -> Network:
    into = None
    if builder is not None:
        into = _own_network(builder, Manifest.read(path).source.kwargs)
    model, manifest = artifact.opened(
        path, into, "say what builds it with `network='py:MODULE:CALLABLE'`"
    )
    return Network(model, tuple(filter(None, [manifest.not_checked])), path)


def _own_network(builder: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Build a network of the user's own with the sizes that the artifact's was built with."""
    sizes: dict[str, Any] = {
        name: kwargs[name]
        for name in ("num_classes", "in_chans", "img_size")
        if type(kwargs.get(name)) is int
    }
    return build(with_options(parse(builder), **sizes)).train()
