"""The Triton kernels without a GPU: in Triton's interpreter, and through its compiler to machine code."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_interpreted_kernels_match_eager_ones() -> None:
    """In a process of its own: functions are interpreted or not when first read."""
    file = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
    done = subprocess.run(
        [*command, str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=file.parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("tile", [(1024, 1), (64, 16)], ids=["stretches", "columns"])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_kernels_compile_for_a_gpu_that_is_not_here(tile: tuple[int, int], dtype: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from retrofit.layers.kernels import triton as kernels

    def build(kernel: Any, **constants: Any) -> None:
        constants |= {"ROWS": tile[0], "COLUMNS": tile[1]}
        kinds = {"X": dtype, "Out": dtype, "Grad": dtype, "GradX": dtype, "Seed": "*i32", "eps": "fp32"}
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, "*fp32" if name[0].isupper() else "i64")
            for name in kernel.arg_names
        }
        built = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
        assert "cubin" in built.asm

    for stage in (-1, 0, 1, 2, 3, 4):
        build(kernels._forward, STAGE=stage, NOISE=True)
    build(kernels._forward, STAGE=-1, NOISE=False, Weight=None, Bias=None, Factor=None, Seed=None)
    for stage in (-1, 0, 1):
        build(kernels._backward, STAGE=stage, NOISE=True)
    build(kernels._affine_gradients, NOISE=True)
    build(kernels._apply)
