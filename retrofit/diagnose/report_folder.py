"""Write a diagnosis: PNG figures, results.json and index.html in one folder, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrofit.diagnose.diagnosis import Diagnosis
from retrofit.diagnose.page import page
from retrofit.diagnose.plots import plots
from retrofit.diagnose.summary import sentences
from retrofit.errors import RetrofitError
from retrofit.utils.files import atomic_folder

_OURS = "results.json"  # marks a folder as a report of ours, which may be replaced


def check_folder(folder: Path, force: bool) -> None:
    """Make sure that a report may be written to `folder`.

    Raises:
        RetrofitError: If something is there that must not be replaced, or the place cannot be written to.
    """
    if folder.is_symlink() or folder.exists():
        if not force:
            raise RetrofitError(f"{folder} exists; choose another `folder`, or pass `force=True` to replace it")
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / _OURS).is_file()):
            raise RetrofitError(f"{folder} is not a report that diagnose wrote and is kept; choose another `folder`")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise RetrofitError(f"there is no folder {parent}; create it or choose another `folder`")
    if not os.access(parent, os.W_OK):
        raise RetrofitError(f"cannot write to {parent}; choose another `folder`")


def write_report(networks: Mapping[str, Diagnosis], facts: Mapping[str, Any], folder: Path) -> None:
    """Write the report; a folder that is there is replaced once the new one is whole.

    Args:
        networks: One or two diagnoses by the name to show.
        facts: What else results.json shall hold.
        folder: Where to.
    """
    drawn = {plot: plot.png() for plot in plots(networks)}
    models = facts.get("models", {})
    title = "Diagnosis of " + " and ".join(_titled(name, models.get(name, {})) for name in networks)
    about = [_about(name, diagnosis, models.get(name, {})) for name, diagnosis in networks.items()]
    with atomic_folder(folder) as staged:
        for plot, png in drawn.items():
            (staged / f"{plot.name}.png").write_bytes(png)
        results = {**facts, "networks": {name: diagnosis.to_dict() for name, diagnosis in networks.items()}}
        (staged / _OURS).write_text(json.dumps(results, indent=1) + "\n")
        (staged / "index.html").write_text(page(networks, drawn, sentences(networks), title, about), encoding="utf-8")


def _titled(name: str, model: Mapping[str, Any]) -> str:
    """Name a network with how far it is converted; the name of a run's file says which run it is from."""
    if not model.get("target"):
        return name
    strength = "" if model.get("strength") is None else f", t = {model['strength']:.3g}"
    return f"{name} ({model['model']} to {model['target']}{strength})"


def _about(name: str, diagnosis: Diagnosis, model: Mapping[str, Any]) -> str:
    """Say which network this is: its architecture, how far it is converted, whose weights it has."""
    parts = [str(model["model"])] if "model" in model else []
    if model.get("target"):
        parts.append(f"converted to {model['target']}")
    if model.get("strength") is not None:
        parts.append(f"strength {model['strength']:.3g}")
    if weights := model.get("weights"):
        parts.append(f"weights: {weights['kind']}" + (f" ({weights['from']})" if weights.get("from") else ""))
    return f"{name}: " + ", ".join([*parts, f"{diagnosis.images} images"])
