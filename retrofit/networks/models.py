"""MODEL as the command line takes it -> a network, its preprocessing, and whose weights it has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.strength import common_strength
from retrofit.networks import artifact
from retrofit.networks.checkpoint import Match, load_into, read_checkpoint
from retrofit.networks.library import (
    build,
    class_source,
    labels_of,
    parse,
    preprocess_of,
    weights_name,
    with_options,
)
from retrofit.networks.manifest import Manifest, is_artifact
from retrofit.record import ModelSource, Preprocess, record_of, set_record
from retrofit.surgery import plans_of
from retrofit.utils.text import plural, printable, shortlist


@dataclass
class Network:
    """A network, whose record holds what is known about it."""

    model: nn.Module
    # sentences for the user
    warnings: tuple[str, ...] = ()
    # the file it was read from, if it was
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
        plans, strength = plans_of(self.model), common_strength(self.model)
        target = plans[-1].to if plans else None
        return {
            "model": self.source.name,
            "target": target,
            "strength": strength,
            "weights": self.weights,
        }


def weights_sentence(weights: Mapping[str, Any]) -> str:
    """Say whose weights a network has, in words that nobody can miss."""
    match weights.get("kind"):
        case "random":
            return "weights: RANDOM (pass `pretrained=True` or `checkpoint=FILE` for trained ones)"
        case "pretrained":
            return f"weights: pretrained ({printable(weights.get('from'), 200)})"
        case "checkpoint":
            key, others = weights.get("key"), weights.get("others") or []
            part = f", its {printable(key, 64)}" if key else ""
            part += " in PART" if weights.get("left_random") else ""
            instead = (
                f" (it also holds {shortlist(others)}: `checkpoint_key=NAME`)" if others else ""
            )
            return f"weights: checkpoint {printable(weights.get('from'), 200)}{part}{instead}"
        case _:
            return "weights: of unknown origin (saved from Python without weights=)"


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

    `match` (None is "name"), `checkpoint_key` and `checkpoint_partial` are what `load_into` and
    `read_checkpoint` take; sizes that are None are the library's. `network`,
    `py:package.module:callable`, builds what an artifact of a user's own network holds.
    """
    options: dict[str, Any] = {
        "num_classes": num_classes,
        "in_chans": in_chans,
        "img_size": img_size,
    }
    options["model_kwargs"] = model_kwargs
    if (file := artifact.artifact_path(text)) is not None:
        others = {"pretrained": pretrained, "checkpoint": checkpoint, **options}
        if given := [f"`{name}`" for name, value in others.items() if value not in (None, False)]:
            raise UsageError(
                f"{text} is an artifact with its own weights and sizes; drop {', '.join(given)}"
            )
        return _open_artifact(str(file), network)
    if network is not None:
        raise UsageError(
            f"`network` builds what an artifact of your own network holds; {text} is none, drop it"
        )
    if pretrained and checkpoint is not None:
        raise UsageError(
            "`pretrained` and `checkpoint` are two sources of weights; pass one of them"
        )
    chosen = {
        "match": match,
        "checkpoint_key": checkpoint_key,
        "checkpoint_partial": checkpoint_partial,
    }
    if checkpoint is None and (names := [name for name, value in chosen.items() if value]):
        raise UsageError(
            f"`{names[0]}` says what to take of a checkpoint; give `checkpoint=FILE` too"
        )
    if "weights" in (model_kwargs or {}) and not pretrained:
        raise UsageError(
            "'weights' in `model_kwargs` chooses among pretrained weights; pass `pretrained=True` too"
        )
    source = with_options(parse(text), **options)
    if pretrained and source.library == "own":
        raise UsageError(
            f"no library has weights for {text}; drop `pretrained`, load them in it or give `checkpoint`"
        )
    if checkpoint is not None and is_artifact(checkpoint):
        raise RetrofitError(
            f"{checkpoint} is a retrofit artifact, a whole network; pass it as MODEL"
        )
    read = None if checkpoint is None else read_checkpoint(checkpoint, checkpoint_key)

    model = build(source, pretrained)
    source = record_of(model).source or source
    preprocess = preprocess_of(model, source)
    if img_size is not None:
        if (
            with_options(source, img_size=img_size) != source
        ):  # what lies behind hf-hub: or local-dir: is known by now
            raise UsageError(
                f"{text} is built for one size; pass `model_kwargs={{'img_size': {img_size}}}`"
            )
        preprocess = replace(preprocess, input_size=(preprocess.input_size[0], img_size, img_size))
    labels, warnings = None, []
    weights: dict[str, Any] = {"kind": "random", "from": None}
    if read is not None:
        loaded = load_into(model, read.tensors, match or "name", checkpoint_partial)
        warnings += loaded.warnings
        known = {"key": read.key, "others": [*read.others], "left_random": loaded.left_random}
        known["left_out"] = [*read.left_out, *loaded.left_out]
        weights = {"kind": "checkpoint", "from": str(checkpoint)}
        weights |= {name: value for name, value in known.items() if value}
    elif pretrained:
        labels = labels_of(model, source)
        weights = {"kind": "pretrained", "from": weights_name(model, source)}
        trained = getattr(model, "pretrained_cfg", {}).get("num_classes")
        if num_classes is not None and trained not in (None, num_classes):
            theirs = f"the pretrained weights have {plural(trained, 'class')}"
            warnings.append(f"the classifier is RANDOM: {theirs}, not {num_classes}")
    set_record(model, preprocess=preprocess, labels=labels, weights=weights)
    return Network(model, tuple(warnings))


def _open_artifact(path: str, network: str | None) -> Network:
    source, into = Manifest.read(path).source, None
    if network is not None:
        if source.library != "own":
            raise UsageError(f"{path} holds {source}, which its library builds; drop `network`")
        # with the sizes that the artifact's network was built with
        sizes = {name: source.kwargs.get(name) for name in ("num_classes", "in_chans", "img_size")}
        given: dict[str, Any] = {name: size for name, size in sizes.items() if type(size) is int}
        into = build(with_options(parse(network), **given)).train()
    model, held = artifact.opened(
        path, into, "say what builds it with `network='py:MODULE:CALLABLE'`"
    )
    return Network(model, (held.not_checked,) if held.not_checked else (), path)
