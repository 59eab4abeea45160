"""MODEL as the command line takes it -> a network, its preprocessing, and whose weights it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from retrofit import artifact
from retrofit.checkpoint import load_into, read_state_dict
from retrofit.errors import RetrofitError, UsageError
from retrofit.library import ModelSource, Preprocess, build, parse, with_options
from retrofit.preprocess import labels_of, preprocess_of, weights_name

__all__ = ["ModelSource", "Network", "Preprocess", "open_model", "weights_sentence"]

_CHECKPOINTS = (".pth", ".pt", ".bin", ".tar", ".ckpt", ".onnx", ".npz")


@dataclass
class Network:
    """A network and what is known about it.

    Attributes:
        model: The network.
        source: Where its structure comes from.
        preprocess: What it expects of its images.
        labels: Names of its outputs (ImageNet's as WordNet ids, "n01440764"); None if unknown.
        weights: {"kind": "random" | "pretrained" | "checkpoint" | "unknown", "from": str | None}.
        warnings: Sentences for the user.
        artifact: The artifact it was read from, if it was.
    """

    model: nn.Module
    source: ModelSource
    preprocess: Preprocess
    labels: list[str] | None
    weights: dict[str, Any]
    warnings: tuple[str, ...] = ()
    artifact: str | None = None


def weights_sentence(weights: Mapping[str, Any]) -> str:
    """Say whose weights a network has, in words that nobody can miss."""
    match weights.get("kind"):
        case "random":
            return "weights: RANDOM (pass --pretrained or --checkpoint FILE for trained ones)"
        case "pretrained":
            return f"weights: pretrained ({weights.get('from')})"
        case "checkpoint":
            return f"weights: checkpoint {weights.get('from')}"
        case _:
            return "weights: of unknown origin (saved from Python without weights=)"


def is_artifact(text: str) -> bool:
    """Whether `text` names an artifact, which has weights and sizes of its own, rather than a network."""
    return Path(text).suffix == ".safetensors"


def open_model(
    text: str,
    *,
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
    match: Literal["name", "order"] = "name",
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Network:
    """Open a network by name, or an artifact by path.

    Args:
        text: A name as `retrofit.library.parse` takes it, or the path of an artifact (`*.safetensors`).
        pretrained: Whether to fetch the library's trained weights.
        checkpoint: File to load weights from.
        match: How the checkpoint's tensors find their places: by name, or in order.
        num_classes: Number of outputs; the library's default if None.
        in_chans: Number of input channels.
        img_size: Side of the input images.
        model_kwargs: Further arguments for the library's builder.

    Raises:
        UsageError: If the name is unknown, an option is wrong, or options contradict each other.
        RetrofitError: If weights or the artifact cannot be read or do not fit.
    """
    options = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size, "model_kwargs": model_kwargs}
    if is_artifact(text):
        flags = {"pretrained": pretrained, "checkpoint": checkpoint, **options}
        given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value not in (None, False)]
        if given:
            raise UsageError(f"{text} is an artifact with its own weights and sizes; drop {', '.join(given)}")
        return _open_artifact(text)
    if text.endswith(_CHECKPOINTS) and ":" not in text:
        raise UsageError(f"{text} is not a network's name or an artifact; give a name, and --checkpoint {text}")
    if pretrained and checkpoint is not None:
        raise UsageError("--pretrained and --checkpoint are two sources of weights; pass one of them")
    if "weights" in (model_kwargs or {}) and not pretrained:
        raise UsageError("'weights' in --model-kwargs chooses among pretrained weights; pass --pretrained too")

    source = with_options(parse(text), **options)  # type: ignore[arg-type]
    state = _read(checkpoint) if checkpoint is not None else None
    model = build(source, pretrained)
    source = vars(model)["_retrofit_source"]
    preprocess = preprocess_of(model, source)
    if img_size is not None:
        if (
            with_options(source, img_size=img_size) != source
        ):  # only now is known what lies behind hf-hub: or local-dir:
            raise UsageError(f"{text} is built for one size; pass --model-kwargs img_size={img_size}")
        preprocess = replace(preprocess, input_size=(preprocess.input_size[0], img_size, img_size))
    labels, weights, warnings = None, {"kind": "random", "from": None}, []
    if state is not None:
        warnings += load_into(model, state, match)
        weights = {"kind": "checkpoint", "from": str(checkpoint)}
    elif pretrained:
        labels = labels_of(model, source)
        weights = {"kind": "pretrained", "from": weights_name(model, source)}
        trained = getattr(model, "pretrained_cfg", {}).get("num_classes")
        if num_classes is not None and trained not in (None, num_classes):
            warnings.append(
                f"the classifier is RANDOM: the pretrained weights have {trained} classes, not {num_classes}"
            )
    vars(model).update(_retrofit_preprocess=preprocess, _retrofit_labels=labels, _retrofit_weights=weights)
    return Network(model, source, preprocess, labels, weights, tuple(warnings))


def _read(checkpoint: str | Path) -> dict[str, Any]:
    if artifact.is_artifact(checkpoint):
        raise RetrofitError(f"{checkpoint} is a retrofit artifact, a whole network; pass it as MODEL")
    return read_state_dict(checkpoint)


def _open_artifact(path: str) -> Network:
    model = artifact.load(path)
    known = vars(model)
    return Network(
        model,
        known["_retrofit_source"],
        known["_retrofit_preprocess"],
        known["_retrofit_labels"],
        known["_retrofit_weights"],
        artifact=path,
    )
