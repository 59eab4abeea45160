"""What a missing optional package says, in processes that cannot import it."""

import subprocess
import sys

import pytest

from retrofit.errors import RetrofitError
from retrofit.utils.extras import EXTRAS, named_extra

BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRAS)})); "
NETWORK = "import timm; model = timm.create_model('test_resnet'); "


def python(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BLOCKED + code]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.slow
def test_convert_save_load_and_fold_need_no_extra() -> None:
    done = python(
        "import pathlib, tempfile, retrofit; "
        + NETWORK
        + "path = pathlib.Path(tempfile.mkdtemp(), 'a.safetensors'); "
        "model, _ = retrofit.convert(model, 'bnn'); retrofit.set_strength(model, 0.5); "
        "retrofit.save(model, path); retrofit.fold(retrofit.load(path))"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["export", "test_resnet"], "export"),
        pytest.param(
            ["finetune", "test_resnet", "--dataset", "digits"], "train", marks=pytest.mark.slow
        ),
        pytest.param(
            ["evaluate", "test_resnet", "--dataset", "digits"], "train", marks=pytest.mark.slow
        ),
    ],
)
def test_a_command_names_the_extra_that_it_needs(words: list[str], extra: str) -> None:
    done = python(f"from retrofit.cli import main; main({words})")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"pip install 'retrofit-norm[{extra}]'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("package", ["retrofit", "retrofit.export"])
def test_a_python_name_says_the_same(package: str) -> None:
    done = python(f"import {package}; {package}.export_onnx(None, 'a.onnx')")
    assert "retrofit-norm[export]" in done.stderr.splitlines()[-1]


def test_other_errors_are_left_as_they_are() -> None:
    missing = ModuleNotFoundError("No module named 'mine'", name="mine")
    assert named_extra(missing) is missing
    assert isinstance(named_extra(ModuleNotFoundError(name="onnx.helper")), RetrofitError)
