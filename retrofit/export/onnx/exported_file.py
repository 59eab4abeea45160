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


class ExportedNetwork(nn.Module):
    """A file as a module, for code that takes one; there are no parameters in it.

    Args:
        run: What runs it.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the output; of several, a list."""
        outputs = [torch.from_numpy(values) for values in self._run(x.float().numpy())]
        return outputs[0] if len(outputs) == 1 else outputs


@dataclass(frozen=True)
class ExportedFile:
    """A file that export wrote, ready to run.

    Attributes:
        path: The file.
        runtime: What runs it.
        network: It, as a module.
        preprocess: What it expects of its images.
        labels: Names of its outputs; None if unknown.
        facts: The rest of its metadata: model, target, strength, fold.
    """

    path: Path
    runtime: Runtime
    network: ExportedNetwork
    preprocess: Preprocess
    labels: list[str] | None
    facts: dict[str, Any]

    def __str__(self) -> str:
        """Say which network it is, and what runs it."""
        parts = [f"{self.path}: {self.facts.get('model', 'a network')}"]
        if self.facts.get("target"):
            parts.append(f"converted to {self.facts['target']}")
        if self.facts.get("strength") is not None:
            parts.append(f"strength {self.facts['strength']:.3g}")
        return ", ".join([*parts, f"fold {self.facts.get('fold', 'unknown')}, run by {RUNTIMES[self.runtime]}"])


def open_exported(path: Path, runtime: Runtime = "onnxruntime") -> ExportedFile:
    """Open a file that `retrofit export` wrote.

    Raises:
        UsageError: If the runtime is not installed.
        RetrofitError: If the file cannot be read or run, or does not say how its images are prepared.
    """
    known = metadata(path)
    wanted = {field.name for field in fields(Preprocess)}
    try:
        preprocess = Preprocess.from_dict({name: known[name] for name in sorted(wanted)})
    except KeyError as lacking:
        raise RetrofitError(
            f"{path} does not say how its images are prepared (its metadata lack {lacking}); "
            "evaluate takes files that `retrofit.export_onnx` or `retrofit export` wrote"
        ) from None
    run = open_onnx(path, runtime, advice="export it again")
    facts: dict[str, Any] = {name: known[name] for name in ("model", "target", "strength", "fold") if name in known}
    return ExportedFile(path, runtime, ExportedNetwork(run), preprocess, known.get("labels"), facts)
