"""An exported file as a classifier: run by ONNX Runtime or OpenVINO, its images prepared as its own metadata say."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.record import Preprocess
from retrofit.utils.onnx_runtimes import RUNTIMES, Run, Runtime, metadata, open_onnx
from retrofit.utils.text import printable, shown, with_class


class ExportedNetwork(nn.Module):
    """A file as a module, for code that takes one; there are no parameters in it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the output; of several, a list."""
        outputs = [torch.from_numpy(values) for values in self._run(x.float().numpy())]
        return outputs[0] if len(outputs) == 1 else outputs


@dataclass(frozen=True)
class ExportedFile:
    """A file that export wrote, ready to run."""

    model: ExportedNetwork
    preprocess: Preprocess
    labels: list[str] | None  # of its outputs
    facts: dict[str, Any]  # JSON values: `model`, `target`, `strength`, `weights`, `fold` and `runtime`

    def __str__(self) -> str:
        """Say which network it is, and what runs it."""
        facts = self.facts
        target = f", converted to {facts['target']}" if facts["target"] else ""
        strength = "" if facts["strength"] is None else f", strength {facts['strength']:.3g}"
        run = f"fold {facts['fold'] or 'unknown'}, run by {RUNTIMES[facts['runtime']]}"
        return f"{facts['weights']['from']}: {facts['model'] or 'a network'}{target}{strength}, {run}"


def open_exported(path: Path, runtime: Runtime = "onnxruntime") -> ExportedFile:
    """Open a file that `retrofit export` wrote; its metadata, which may come from anyone, are checked.

    A UsageError says that the runtime is not installed; a RetrofitError, that the file cannot be read or run, or does
    not say how its images are prepared.
    """
    known = metadata(path)
    labels, strength = known.get("labels"), known.get("strength")
    try:
        preprocess = Preprocess.from_dict({field.name: known[field.name] for field in fields(Preprocess)})
        if labels is not None and (not isinstance(labels, list) or not all(isinstance(one, str) for one in labels)):
            raise ValueError(f"labels {shown(labels)}")
        strength = None if strength is None else float(strength)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"{path} lacks the metadata that `retrofit export` writes ({with_class(error)})"
        raise RetrofitError(f"{what}; export it again") from error
    facts: dict[str, Any] = {key: known.get(key) and printable(known[key], 200) for key in ("model", "target", "fold")}
    facts |= {"strength": strength, "runtime": runtime, "weights": {"kind": "onnx", "from": str(path)}}
    run = open_onnx(path, runtime, advice="export it again")
    return ExportedFile(ExportedNetwork(run), preprocess, labels, facts)
