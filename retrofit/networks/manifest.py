"""What an artifact says about itself, read with nothing built and no tensor loaded: it may come from anyone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from retrofit.errors import RetrofitError
from retrofit.networks.library import no_waiting_for_the_hub
from retrofit.networks.sampled_outputs import SampledOutputs
from retrofit.record import ModelSource, Preprocess
from retrofit.surgery import Plan
from retrofit.utils.text import one_line, printable

SCHEMA = 1
KEY = "retrofit"
WEIGHTS, CONFIG, LIBRARY = "model.safetensors", "config.json", "retrofit"  # in a repository of the hub


@dataclass(frozen=True)
class Manifest:
    """A manifest that is whole; what it says may still not fit its tensors."""

    source: ModelSource
    plans: list[Plan]  # the conversions, in order
    preprocess: Preprocess
    labels: list[str] | None  # of the network's outputs
    weights: dict[str, Any]
    versions: dict[str, Any]  # of the libraries that wrote it
    training: dict[str, dict[str, Any]]  # by layer, what only training depends on
    checksum: str  # of the tensors
    outputs: SampledOutputs  # what the network answered when it was saved

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Read an artifact's manifest; raise RetrofitError as `read_manifest` does, and if it is malformed."""
        values = read_manifest(path)
        try:
            return cls(
                source=ModelSource.from_dict(values["model"]),
                plans=[Plan.from_dict(step) for step in values["conversion"]["steps"]],
                preprocess=Preprocess.from_dict(values["preprocess"]),
                labels=None if values["labels"] is None else [str(label) for label in values["labels"]],
                weights=dict(values["weights"]),
                versions=dict(values["versions"]),
                training={str(name): dict(row) for name, row in values["training"].items()},
                checksum=str(values["checksum"]),
                outputs=SampledOutputs.from_dict(values["sampled_outputs"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise damaged(path, f"its manifest is malformed: {one_line(error)}") from error

    @property
    def not_checked(self) -> str:
        """A line that says why the network in the file was not run; empty if it was."""
        why = printable(self.outputs.not_checked, 300)
        return why and f"not checked: {why}; only the names and shapes of its tensors tell which network it is"


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read what an artifact says about itself, as it stands in the file; a RetrofitError says why it cannot be read."""
    file = Path(path)
    if not file.is_file():
        problem = "is a folder" if file.is_dir() else "does not exist"
        raise RetrofitError(
            f"{path} {problem}; give the path of an artifact, which `retrofit.save` and `retrofit convert` write"
        )
    try:
        text = _manifest_text(file)
    except (SafetensorError, OSError) as error:
        raise damaged(path, one_line(error)) from error
    if text is None:
        raise RetrofitError(
            f"{path} is a plain checkpoint, which holds no network; give the network's name, and `checkpoint='{path}'` "
            "(in Python build the network and call its load_state_dict)"
        )
    try:
        values = json.loads(text)
        schema = values["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, "its manifest is not readable") from error
    if type(schema) is not int or schema < 1:
        raise damaged(path, f"its manifest has schema {printable(schema, 40)}")
    if schema > SCHEMA:
        raise RetrofitError(
            f"{path} has schema {printable(schema, 40)}, this retrofit reads up to {SCHEMA}; upgrade retrofit"
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
        text: str | None = (opened.metadata() or {}).get(KEY)
        return text


def artifact_path(text: str) -> Path | None:
    """Return the artifact that MODEL names, which has weights and sizes of its own; None if it names a network.

    An artifact is named by its path, `*.safetensors`, or is what `local-dir:FOLDER` or `hf-hub:OWNER/NAME[@REVISION]`
    holds. From the hub it is fetched; a RetrofitError says that this failed. None also if the hub gives no answer, or
    what lies there is not ours.
    """
    prefix, colon, rest = text.partition(":")
    prefix = prefix.replace("_", "-").lower()
    if prefix == "local-dir" and colon:
        file = Path(rest) / WEIGHTS
        return file if is_artifact(file) else None
    if prefix != "hf-hub" or not rest:
        return Path(text) if Path(text).suffix == ".safetensors" else None
    from huggingface_hub import hf_hub_download

    repo_id, _, revision = rest.partition("@")
    with no_waiting_for_the_hub():
        try:
            config = json.loads(Path(hf_hub_download(repo_id, CONFIG, revision=revision or None)).read_text("utf-8"))
        except (OSError, ValueError):  # what opens a network of timm's there says why it cannot
            return None
        if not isinstance(config, dict) or config.get("library_name") != LIBRARY:
            return None
        try:
            return Path(hf_hub_download(repo_id, WEIGHTS, revision=revision or None))
        except (OSError, ValueError) as error:
            raise RetrofitError(f"{text} cannot be fetched: {one_line(error)}; check the connection") from error


def damaged(path: str | Path, why: str) -> RetrofitError:
    """Return the error for a file that is not what was once written."""
    return RetrofitError(f"{path} is not a whole artifact ({why}); write or fetch it again")
