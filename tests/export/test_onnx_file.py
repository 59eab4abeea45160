"""Files appear whole or not at all, with the weights that are theirs, whatever fails meanwhile."""

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from retrofit.export import onnx_file
from retrofit.utils.files import atomic_write
from tests.export.networks import slow
from tests.faults import faults_of, injected

NAMES = ("net.onnx", "net.onnx.data", "net.json")


def model_of(value: float) -> onnx.ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        network (float[n, 64] input) => (float[n, 64] output) { output = Add(input, weight) }""")
    model.producer_name = f"writer of {value}"
    weight = np.full(64, value, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    return model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in NAMES}


@pytest.mark.parametrize("beside", [True, *slow(False)])
def test_a_fault_at_any_system_call(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is old or new, its weights are its own, and a new report has its model."""
    monkeypatch.chdir(tmp_path)  # where the files lie: onnx looks for weights there
    monkeypatch.setattr(onnx_file, "SMALL", 16)
    if beside:
        monkeypatch.setattr(onnx_file, "LARGEST", 100)
    path = tmp_path / "net.onnx"

    def write(model: onnx.ModelProto, report: str) -> None:
        with (
            atomic_write(tmp_path / "net.json", True) as aside,
            onnx_file.written(copy.deepcopy(model), path, True, []),
        ):
            aside.write_text(report)

    def rewrite() -> None:
        write(model_of(2.0), "new")

    faults = faults_of(rewrite)
    new = contents(tmp_path)
    write(model_of(1.0), "old")
    old = contents(tmp_path)
    assert len(old) == 2 + beside
    assert all(old[name] != new[name] for name in old)
    for fault in faults:
        write(model_of(1.0), "old")
        with injected(fault):
            rewrite()
        left = contents(tmp_path)
        model = {name: left.get(name) for name in old if name != "net.json"}
        assert model in ({name: state[name] for name in model} for state in (old, new)), fault
        assert left["net.json"] in (b"old", b"new"), fault
        if left["net.json"] == b"new":
            assert model == {name: new[name] for name in model}, fault
        visible = {one.name for one in tmp_path.iterdir() if not one.name.startswith(".")}
        assert set(left) == visible, fault
    assert len(faults) > 60
