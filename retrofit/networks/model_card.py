"""The model card of an artifact: what its manifest says, in Markdown for people and YAML for the hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from retrofit.utils.text import printable

_PATENT = (
    "Training with proxy normalization is described in US patent 12430552 (Graphcore, 2025). If you use it "
    "commercially, check whether that concerns you."
)


def model_card(
    manifest: Mapping[str, Any], license: str | None = None, details: Mapping[str, str] | None = None
) -> str:
    """Write the card.

    Args:
        manifest: What `read_manifest` returns.
        license: As the hub spells it; the card says that there is none to be found if None.
        details: Further lines, by heading.
    """
    model, weights, to = manifest["model"], manifest["weights"], manifest["conversion"]["to"]
    name, origin = printable(model["name"], 100), weights.get("from")
    head: dict[str, Any] = {"library_name": "retrofit", "tags": ["retrofit", *([to] if to else []), model["library"]]}
    if license is not None:
        head["license"] = license
    lines = ["---", yaml.safe_dump(head, sort_keys=False).rstrip(), "---", ""]
    lines += [f"# {name}, {f'converted to {to}' if to else 'not converted'}", ""]
    facts = {"Base model": f"{model['library']} {name}"}
    if to:
        strength = manifest["strength"]
        rows = [row["status"] for row in manifest["layers"]]
        facts["Target"] = to
        facts["Strength"] = (
            "differs by layer" if strength is None else f"{strength:g} (0: the base model, 1: the target)"
        )
        facts["Layers"] = f"{rows.count('converted')} of {len(rows)} normalization layers are converted"
    facts["Weights before"] = f"{printable(weights['kind'], 40)}" + (
        "" if weights.get("from") is None else f": {origin}"
    )
    facts["Images"] = _images(manifest["preprocess"])
    facts |= {printable(key, 60): printable(value, 500) for key, value in (details or {}).items()}
    facts["License"] = license or "none is given: that of the base model's weights counts"
    facts["Made with"] = ", ".join(f"{key} {printable(value, 40)}" for key, value in manifest["versions"].items())
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    if any(str(step["to"]).endswith("-pn") for step in manifest["conversion"]["steps"]):
        lines += ["", _PATENT]
    into = ", into=network" if model["library"] == "own" else ""
    lines += ["", "```python", "import retrofit", f'model = retrofit.load("hf-hub:OWNER/NAME"{into})', "```", ""]
    opens = model["library"] == "timm" and not to
    lines.append("timm opens it too." if opens else "timm alone does not open it, and says so.")
    return "\n".join(lines) + "\n"


def _images(preprocess: Mapping[str, Any]) -> str:
    size = " x ".join(str(side) for side in preprocess["input_size"])
    return f"{size}, mean {preprocess['mean']}, std {preprocess['std']}, {preprocess['interpolation']}"
