"""A target of another package is taken as the built-in ones are."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import retrofit
from retrofit.conversion_options import ConversionOptions
from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.registry import OPTIONS, TARGETS, Option, listed_targets
from retrofit.surgery import Converter, LayerRow
from retrofit.surgery.converter import adopt
from retrofit.surgery.norm_layers import NormLayer

SIZE = (3, 12, 12)


class ShrunkNorm(ConvertedLayer):
    """BatchNorm in evaluation, its output divided by a number."""

    def __init__(self, shrink: float) -> None:
        super().__init__()
        self.shrink = shrink

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )
        return x / self.shrink


class ShrunkConverter(Converter):
    identity = False
    has_strength = False

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        return layer.row("converted", target="ShrunkNorm", shrink=options.shrink or 1.0)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        return adopt(ShrunkNorm(**row.options), module)


def register() -> None:
    retrofit.register_target(
        "shrunk",
        families=["bn"],
        converter=ShrunkConverter(),
        layers=[ShrunkNorm],
        options={"shrink": Option(float, "Divisor of the output (default: 1).", low=1)},
        help="a smaller output",
    )


@pytest.fixture
def shrunk() -> Iterator[None]:
    with patch.dict(TARGETS), patch.dict(OPTIONS):
        register()
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))


@pytest.mark.usefixtures("shrunk")
def test_it_goes_through_convert_save_load_fold_and_export(tmp_path: Path) -> None:
    import onnxruntime

    x = torch.randn(2, *SIZE)
    source = net().eval()
    expected = source[3](source[:3](x) / 2).detach()
    model, report = retrofit.convert(copy.deepcopy(source), "shrunk", shrink=2.0, input_size=SIZE)
    assert type(model[1]) is retrofit.layers.ShrunkNorm
    assert report.plan.options["shrink"] == 2.0
    torch.testing.assert_close(model(x), expected)
    retrofit.save(model, tmp_path / "a.safetensors")
    again = retrofit.load(tmp_path / "a.safetensors", into=net()).eval()
    torch.testing.assert_close(again(x), expected)
    torch.testing.assert_close(
        retrofit.fold(again, input_size=SIZE)(x), expected, rtol=1e-4, atol=1e-5
    )
    retrofit.export_onnx(again, tmp_path / "a.onnx", input_size=SIZE)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    (answer,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(answer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("shrunk")
def test_its_options_are_its_own() -> None:
    assert listed_targets().endswith("; shrunk (a smaller output)")
    with pytest.raises(UsageError, match=r"`shrink` means nothing to this target \(ln\)"):
        retrofit.plan(net(), "ln", shrink=2.0)
    with pytest.raises(UsageError, match="`shrink` must be a number of at least 1, not 0"):
        retrofit.plan(net(), "shrunk", shrink=0.0)
    with pytest.raises(UsageError, match="`groups` means nothing to this target"):
        retrofit.plan(net(), "shrunk", groups=2)


@pytest.mark.usefixtures("shrunk")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "'shrunk' is registered already"),
        ({"name": "other", "families": ["xn"]}, "'xn' is no family"),
        ({"name": "other", "options": {"ws": Option(bool, "Another.")}}, "'ws' .* differs from"),
    ],
)
def test_what_cannot_be_registered(change: dict[str, Any], message: str) -> None:
    arguments = {"name": "shrunk", "families": ["bn"], "converter": ShrunkConverter(), **change}
    before = (list(TARGETS), list(OPTIONS))
    with pytest.raises(UsageError, match=message):
        retrofit.register_target(**arguments)
    assert (list(TARGETS), list(OPTIONS)) == before


def test_a_file_says_that_its_target_is_gone(tmp_path: Path) -> None:
    with patch.dict(TARGETS), patch.dict(OPTIONS):
        register()
        model, _ = retrofit.convert(net(), "shrunk", input_size=SIZE)
        retrofit.save(model, tmp_path / "a.safetensors")
    with pytest.raises(RetrofitError, match=r"unknown target 'shrunk'; .* import the package"):
        retrofit.load(tmp_path / "a.safetensors", into=net())


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder on Python's path where a package with a target is installed."""
    (tmp_path / "plugged.py").write_text("from tests.test_registry import register\nregister()\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('half installed')\n")
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[retrofit.targets]\nshrunk = plugged\nother = broken\n")
    return tmp_path


@pytest.mark.slow
def test_the_command_line_takes_it_by_its_entry_point(package: Path) -> None:
    # The repository stands before packages that install a folder `tests` of their own.
    folders = [str(package), str(Path(__file__).parents[1])]
    script = f"""
import sys
sys.path[:0] = {folders!r}
from retrofit.cli import main
main(sys.argv[1:])
"""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=package)

    result = run("convert", "test_resnet", "--to", "shrunk", "--shrink", "2", "--json")
    assert result.returncode == 0, result.stderr
    assert "no targets of broken: half installed" in result.stderr
    assert set(json.loads(result.stdout)["layers"][0]) >= {"source", "target"}
    assert run("inspect", "test_resnet-shrunk.safetensors").returncode == 0
    text = run("convert", "--help").stdout
    assert "--shrink F" in text
    assert "shrunk (a smaller output)" in " ".join(text.split())


def test_a_refused_target_names_the_others() -> None:
    from retrofit.cli import main

    result = CliRunner().invoke(main, ["inspect", "test_resnet", "--to", "shrunk"])
    assert result.exit_code == 2
    assert "'shrunk' is not one of 'frozen', 'ln'" in result.stderr
