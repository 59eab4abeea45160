"""ONNX models in the runtimes: the same numbers on every processor, and one line for what they
refuse.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from retrofit.errors import UsageError
from retrofit.utils.onnx_runtimes import Runtime, metadata, open_onnx
from tests.networks.conftest import refused

EACH_RUNTIME = pytest.mark.parametrize(
    "runtime",
    [
        "onnxruntime",
        pytest.param("openvino", marks=pytest.mark.slow),
    ],  # slow runs have the group `bench`
)


def parsed(body: str, *, rows: str = "n") -> bytes:
    text = f"""<ir_version: 10, opset_import: ["": 18]>
    network (float[{rows}, 3] input) => (float[{rows}, 3] first, float[{rows}, 3] second) {{ {body} }}"""
    return onnx.parser.parse_model(text).SerializeToString()


@EACH_RUNTIME
@pytest.mark.parametrize("shape", [None, (4, 3)])
def test_outputs_in_order_of_bytes_and_files(
    runtime: Runtime, shape: tuple[int, ...] | None, tmp_path: Path
) -> None:
    content = parsed("second = Neg(input) first = Relu(input)")
    (tmp_path / "a.onnx").write_bytes(content)
    images = np.random.default_rng(0).standard_normal((4, 3), dtype=np.float32)
    for model in (content, tmp_path / "a.onnx"):
        run = open_onnx(model, runtime, shape=shape, threads=1)
        first, second = run(images)
        run(images + 1)  # what was returned is the caller's
        np.testing.assert_array_equal(first, np.maximum(images, 0))
        np.testing.assert_array_equal(second, -images)


@EACH_RUNTIME
def test_float32_on_every_processor(runtime: Runtime) -> None:
    """OpenVINO computes in bfloat16 by itself where the processor can: 3 digits instead of 7."""
    generator = np.random.default_rng(0)
    images, weight = (generator.standard_normal((256, 256), dtype=np.float32) for _ in range(2))
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        network (float[n, 256] input) => (float[n, 256] output) { output = MatMul(input, weight) }""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    (found,) = open_onnx(model.SerializeToString(), runtime)(images)
    expected = images.astype(np.float64) @ weight.astype(np.float64)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@EACH_RUNTIME
def test_what_cannot_be_opened_or_run_is_one_line(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "damaged.onnx").write_bytes(b"no protobuf")
    with refused(r"cannot run .*damaged.onnx \(.*; export it again$"):
        open_onnx(tmp_path / "damaged.onnx", runtime, advice="export it again")
    with refused(r"cannot run the exported model \(.*; please report it$"):
        open_onnx(parsed("first = Unheard(input) second = Relu(input)"), runtime)
    run = open_onnx(parsed("first = Relu(input) second = Neg(input)", rows="2"), runtime)
    assert run(np.ones((2, 3), np.float32))[0].shape == (2, 3)
    with refused("cannot run"):
        run(np.ones((2, 4), np.float32))


@pytest.mark.parametrize("body", ["Reshape(input, size)", "Gather <axis = 1> (input, size)"])
def test_onnx_runtime_logs_nothing_when_a_run_fails(
    body: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = parsed(f"size = Constant <value_ints = [7]> () first = {body} second = Neg(input)")
    run = open_onnx(model)
    with refused("cannot run"):
        run(np.ones((2, 3), np.float32))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_runtime_that_is_not_there(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, runtime, None)
    with pytest.raises(UsageError, match=f"^{runtime} is not installed; pip install {runtime}"):
        open_onnx(parsed("first = Relu(input) second = Neg(input)"), runtime)


def test_metadata_are_json_where_they_are(tmp_path: Path) -> None:
    model = onnx.load_from_string(parsed("first = Relu(input) second = Neg(input)"))
    onnx.helper.set_model_props(
        model, {"input_size": "[3, 8, 8]", "model": "resnet18", "strength": "0.5"}
    )
    onnx.save(model, tmp_path / "a.onnx")
    assert metadata(tmp_path / "a.onnx") == {
        "input_size": [3, 8, 8],
        "model": "resnet18",
        "strength": 0.5,
    }
    with refused("there is no file"):
        metadata(tmp_path / "absent.onnx")
