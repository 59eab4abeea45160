"""`retrofit export`, run as a user would."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from click.testing import Result

from retrofit.cli.export import _show
from retrofit.compare import Comparison
from retrofit.export import api
from tests.cli.conftest import Run, answer


def test_export_and_report(classifier: Path, exported: Result) -> None:
    found = answer(exported)
    assert (classifier / "net.json").read_text() == exported.stdout
    assert (found["schema"], found["model"], found["fold"], found["opset"]) == (1, "test_resnet.r160_in1k", "exact", 18)
    assert (found["target"], found["strength"], found["weights"]["kind"]) == ("ln", 1.0, "unknown")
    assert (found["output"], found["bytes"]) == ("net.onnx", (classifier / "net.onnx").stat().st_size)
    assert set(found["parity"]) == {"batches", "max_abs_diff", "scale", "top1_agreement", "tolerance", "passed"}
    assert found["parity"]["passed"] is True
    assert found["nodes"]["Conv"] > 0
    assert len(found["layers"]) > 3
    for said in ("check passed: largest difference", "wrote net.onnx (", "wrote net.json"):
        assert said in exported.stderr
    metadata = {entry.key: entry.value for entry in onnx.load(classifier / "net.onnx").metadata_props}
    assert (metadata["model"], metadata["target"], metadata["strength"]) == (found["model"], "ln", "1.0")
    for name in ("input_size", "mean", "std", "crop_pct"):
        assert found["preprocess"][name] == json.loads(metadata[name])


def test_failed_check(run: Run, artifact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = api.fold_program

    def wrong(program: Any, fits: Any) -> None:
        real(program, fits)
        next(program.module.parameters())[0] += 1.0

    monkeypatch.setattr(api, "fold_program", wrong)
    result = run("export", artifact, "--json", "--report", "net.json")
    assert result.exit_code == 1
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("error: the folded network differs")
    assert len(lines) <= 3
    found = json.loads(result.stdout)
    assert (found["parity"]["passed"], found["output"], found["target"]) == (False, None, "ln")
    assert [path.name for path in Path().iterdir()] == [artifact]


def test_what_was_judged_on_noise_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"layers": (), "judged": "3 random inputs", "guessed": True, "output": "a.onnx", "bytes": 1, "nodes": {}}
    _show(SimpleNamespace(**facts, parity=Comparison(0.1, 1.0, top1_agreement=0.5)))  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "the same top-1 for 50.0% of 3 random inputs" in said
    assert "warning: judged on 3 random inputs, which are unlike photographs" in said
