"""The manifest of an artifact: what the file says about its network, read and checked.

It is JSON in the metadata of a safetensors file, and may come from anyone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from retrofit import surgery
from retrofit.errors import RetrofitError
from retrofit.networks.sampled_outputs import SampledOutputs
from retrofit.record import ModelSource, Preprocess
from retrofit.utils.files import ensure_readable
from retrofit.utils.text import one_line, printable, with_class

SCHEMA = 1
KEY = "retrofit"
# The checksum of the manifest's other fields. Files that version 0.2.0 wrote do not have it.
_SEAL = "manifest_checksum"
# What reading a field of another type, or one that is not there, raises.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Manifest:
    """A manifest that is whole; what it says may still not fit its tensors.

    Attributes:
        source: What builds the network.
        plans: Its conversions, in order.
        preprocess: How its images are prepared.
        labels: Names of its outputs, if they are known.
        weights: Where its source's weights came from.
        versions: Of the libraries that wrote the file.
        training: By layer, momentum and noise; nothing of the run that trained it.
        checksum: Of the tensors.
        outputs: What the network answered when it was saved.
    """

    source: ModelSource
    plans: list[surgery.Plan]
    preprocess: Preprocess
    labels: list[str] | None
    weights: dict[str, Any]
    versions: dict[str, Any]
    training: dict[str, dict[str, Any]]
    checksum: str
    outputs: SampledOutputs

    @classmethod
    def read(cls, path: str | Path) -> "Manifest":
        """Read an artifact's manifest.

        Raises:
            RetrofitError: As for `read_manifest`, or if the manifest is malformed or was changed.
        """
        values = read_manifest(path)
        digest = _digest(values)
        if values.get(_SEAL, digest) != digest:
            raise RetrofitError(
                f"the manifest of {path} was changed after it was saved: it does not match its "
                "checksum; write or fetch it again (to change labels or preprocessing, load the "
                "network and save it with others)"
            )
        try:
            labels = values["labels"]
            if labels is not None:
                labels = [str(label) for label in labels]
            return cls(
                source=ModelSource.from_dict(values["model"]),
                plans=[surgery.Plan.from_dict(step) for step in values["conversion"]["steps"]],
                preprocess=Preprocess.from_dict(values["preprocess"]),
                labels=labels,
                weights=dict(values["weights"]),
                versions=dict(values["versions"]),
                training={str(name): dict(row) for name, row in values["training"].items()},
                checksum=str(values["checksum"]),
                outputs=SampledOutputs.from_dict(values["sampled_outputs"]),
            )
        except _MALFORMED as error:
            raise damaged(path, f"its manifest is malformed: {one_line(error)}") from error

    @property
    def not_checked(self) -> str:
        """A line that says why the network in the file was not run; empty if it was."""
        why = printable(self.outputs.not_checked, 300)
        if not why:
            return ""
        return (
            f"not checked: {why}; only the names and shapes of its tensors tell which network it is"
        )


def seal(values: Mapping[str, Any]) -> str:
    """Return a manifest as text, with the checksum of its fields among them."""
    return json.dumps({**values, _SEAL: _digest(values)})


def _digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's fields but for this checksum itself."""
    fields = {name: value for name, value in values.items() if name != _SEAL}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read what an artifact says about itself, as it stands in the file.

    Raises:
        RetrofitError: If there is no such file, or it is no artifact, damaged or of a newer schema.
    """
    advice = "give an artifact, which `retrofit.save` and `retrofit convert` write"
    file = ensure_readable(path, "artifact", advice=advice)
    try:
        text = _manifest_text(file)
        if text is None:
            raise RetrofitError(
                f"{path} is a plain checkpoint, which holds no network; give the network's name, "
                f"and `checkpoint='{path}'` (in Python build the network and call its "
                "load_state_dict)"
            )
        values = dict(json.loads(text))
        schema = values["schema"]
    except (SafetensorError, OSError, *_MALFORMED) as error:
        raise damaged(path, with_class(error)) from error
    if schema != SCHEMA:
        raise RetrofitError(
            f"{path} has schema {printable(schema, 40)}, this retrofit reads {SCHEMA}; upgrade "
            "retrofit"
        )
    return values


def is_artifact(path: str | Path) -> bool:
    """Tell whether a file is a safetensors file with a manifest of ours, of any schema."""
    try:
        return _manifest_text(ensure_readable(path)) is not None
    except (SafetensorError, OSError, RetrofitError):
        return False


def _manifest_text(path: Path) -> str | None:
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
    return metadata.get(KEY)


def damaged(path: str | Path, why: str) -> RetrofitError:
    """Return the error for a file that is not what `save` wrote."""
    return RetrofitError(f"{path} is not a whole artifact ({why}); write or fetch it again")
