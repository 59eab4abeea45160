"""Write a diagnosis of one network, or two beside each other: PNG figures, results.json and a page
that opens from disk, in one folder, whole or not at all.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from retrofit.diagnose.diagnosis import Layer
from retrofit.diagnose.findings import sentences
from retrofit.diagnose.plots import PLOTS, Networks, Plot, plots
from retrofit.errors import RetrofitError
from retrofit.utils.files import atomic_folder, ensure_writable
from retrofit.utils.text import printable, shortlist

_RESULTS = "results.json"
_PAGE = "index.html"
_FIGURES = {
    "R²": "r2", "R² before": "r2_before",
    "P1": "power.p1", "P2": "power.p2", "P3": "power.p3", "P4": "power.p4",
    "balance": "power.balance",
    "linearity": "linearity", "HZ": "henze_zirkler", "AMI": "dependence",
}  # fmt: skip
"""The columns of numbers: a title, and the attribute of a layer."""
# Every report holds these files, and no report others than the ones below.
_ALWAYS = {_RESULTS, _PAGE, "gaussianity.png", "power.png"}
_WRITTEN = {_RESULTS, _PAGE, *(f"{plot.name}.png" for plot in PLOTS)}


def check_folder(folder: Path, force: bool) -> None:
    """Make sure that a report may be written to `folder`; a RetrofitError says why not."""
    # A ~ that the shell did not expand is a name.
    target = folder.absolute()
    if folder.is_symlink() or folder.exists():
        if not force:
            raise RetrofitError(
                f"{folder} exists; choose another `folder`, or pass `force=True` to replace it"
            )
        _refuse_what_others_wrote(folder)
        # The new one is made beside it.
        target = target.with_name(f".{target.name}.tmp")
    ensure_writable(target)


def _refuse_what_others_wrote(folder: Path) -> None:
    """Refuse a folder that is no report, or holds more than one: all that is in it is replaced."""
    names = {folder.name}
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()}
    others = names - _WRITTEN
    is_part = bool(names) and not names >= _ALWAYS
    if others or is_part:
        raise RetrofitError(
            f"{folder} is no report of diagnose alone ({shortlist(sorted(others or names))}) and "
            "is kept; move that elsewhere, or choose another `folder`"
        )


def write_report(networks: Networks, facts: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the report of one or two diagnoses by the name to show; `facts` is what else
    results.json shall hold.

    A folder that is there is replaced once the new one is whole.

    Returns:
        What results.json holds.
    """
    models = facts.get("models", {})
    figures = {name: diagnosis.to_dict() for name, diagnosis in networks.items()}
    results = {**facts, "networks": figures}
    with atomic_folder(folder) as staged:
        pictures = {plot: plot.png(networks) for plot in plots(networks)}
        for plot, png in pictures.items():
            (staged / f"{plot.name}.png").write_bytes(png)
        page = _page(networks, models, pictures)
        (staged / _PAGE).write_text(page, encoding="utf-8")
        text = json.dumps(results, indent=1)
        (staged / _RESULTS).write_text(text + "\n")
        # Measuring takes long, and something may have come into the folder meanwhile.
        if folder.exists():
            _refuse_what_others_wrote(folder)
    return results


def _page(
    networks: Networks, models: Mapping[str, Mapping[str, Any]], pictures: Mapping[Plot, bytes]
) -> str:
    """Return the page, HTML that holds its figures and its style."""
    environment = Environment(
        loader=PackageLoader("retrofit", "diagnose"),
        autoescape=True,
        # Names come from files.
        finalize=printable,
    )
    template = environment.get_template("report.html")
    titles = {name: _titled(name, models.get(name, {})) for name in networks}
    return template.render(
        titles=titles,
        networks=networks,
        models=models,
        sentences=sentences(networks),
        figures=[
            (plot.title, plot.text, base64.b64encode(png).decode())
            for plot, png in pictures.items()
        ],
        columns=_columns,
        figure=_figure,
    )


def _columns(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the columns that have an entry."""
    return {
        title: attribute
        for title, attribute in _FIGURES.items()
        if any(attrgetter(attribute)(layer) is not None for layer in layers)
    }


def _figure(layer: Layer, attribute: str) -> str:
    value = attrgetter(attribute)(layer)
    if value is None:
        return ""
    return f"{value:z.3f}"


def _titled(name: str, model: Mapping[str, Any]) -> str:
    """Return a network's name with its architecture, target and strength: the name alone says only
    which run it is from.
    """
    title = model.get("model", name)
    target = model.get("target")
    strength = model.get("strength")
    if target:
        title += f" to {target}"
    if strength is not None:
        title += f", t = {strength:.3g}"
    if title == name:
        return name
    return f"{name} ({title})"
