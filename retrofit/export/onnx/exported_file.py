"""An exported file as a classifier: run by ONNX Runtime or OpenVINO, its images prepared as its own metadata say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.export.approximation.choose import Runtime
from retrofit.export.onnx.runtime import runner
from retrofit.networks.library import Preprocess
from retrofit.utils.text import one_line

SUFFIX = ".onnx"
_TITLES: dict[Runtime, str] = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}


class ExportedNetwork(nn.Module):
    """A file as a module, for code that takes one; there are no parameters in it.

    Args:
        run: Takes a batch and returns the outputs.
    """

    def __init__(self, run: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self._run = run

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the output; of several, a list."""
        outputs = self._run(x)
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
        return ", ".join([*parts, f"fold {self.facts.get('fold', 'unknown')}, run by {_TITLES[self.runtime]}"])


def open_exported(path: Path, runtime: Runtime = "onnxruntime") -> ExportedFile:
    """Open a file that `retrofit export` wrote.

    Raises:
        UsageError: If the runtime is not installed.
        RetrofitError: If the file cannot be read or run, or does not say how its images are prepared.
    """
    if not path.is_file():
        raise RetrofitError(f"there is no file {path}; retrofit export MODEL -o {path} writes one")
    try:
        entries = onnx.load(path, load_external_data=False).metadata_props
    except Exception as error:  # protobuf's errors have no common class
        raise RetrofitError(f"{path} is not an ONNX file ({one_line(error)}); export it again") from error
    known = {entry.key: _value(entry.value) for entry in entries}
    wanted = {field.name for field in fields(Preprocess)}
    try:
        preprocess = Preprocess.from_dict({name: known[name] for name in sorted(wanted)})
    except KeyError as lacking:
        raise RetrofitError(
            f"{path} does not say how its images are prepared (its metadata lack {lacking}); "
            "evaluate takes the files that retrofit export writes"
        ) from None
    run = _openvino(path) if runtime == "openvino" else runner(path, str(path), "export it again")
    facts = {name: known[name] for name in ("model", "target", "strength", "fold") if name in known}
    return ExportedFile(path, runtime, ExportedNetwork(run), preprocess, known.get("labels"), facts)


def _value(text: str) -> Any:
    """Read a value of the metadata: JSON, or a string as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _openvino(path: Path) -> Callable[[Tensor], list[Tensor]]:
    try:
        import openvino
    except ImportError:
        raise UsageError("openvino is not installed; pip install openvino, or leave out --runtime openvino") from None
    try:
        compiled = openvino.Core().compile_model(str(path), "CPU")
    except Exception as error:  # as its C++ raises
        raise RetrofitError(f"OpenVINO cannot run {path} ({one_line(error)}); try --runtime onnxruntime") from error

    def run(x: Tensor) -> list[Tensor]:
        return [torch.from_numpy(value.copy()) for value in compiled(x.float().numpy()).values()]

    return run
