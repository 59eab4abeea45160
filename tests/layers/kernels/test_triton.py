"""The Triton kernels without a GPU: in Triton's interpreter, and through its compiler to machine code."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = (75, 80, 86, 89, 90, 100)  # of T4, A100, RTX 30, RTX 40 and L4, H100, B200
# Registers that a thread may have on all of these; bytes of stack, to which registers are spilled; bytes of the 48 KiB
# that every GPU gives a program without asking.
MOST = {"REG": 255, "STACK": 64, "SHARED": 16 * 1024}


@pytest.mark.slow
def test_interpreted_kernels() -> None:
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


def built(kernel: Any, capability: int, columns: int, dtype: str, **constants: Any) -> Any:
    """Compile a kernel for a GPU that is not here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from retrofit.layers.kernels.triton import _TILE, _Options, _Where

    constants |= {"ROWS": _TILE // columns, "COLUMNS": columns}
    kinds = {
        "X": dtype,
        "Out": dtype,
        "Grad": dtype,
        "GradX": dtype,
        "seed": "*i32",
        "eps": "fp32",
        "numbering": ("i64",) * 4,
    }
    kinds |= dict.fromkeys(_Where._fields, "i64") | dict.fromkeys(constants, "constexpr")
    signature, constexprs = {}, {}
    for place, name in enumerate(kernel.arg_names):
        fields = {"options": _Options, "where": _Where}.get(name)
        names = fields._fields if fields else (name,)
        found = [kinds.get(each, "*fp32") for each in names]
        signature[name] = fields(*found) if fields else found[0]
        paths = [(place, k) if fields else (place,) for k in range(len(names))]
        constexprs |= {path: constants[each] for path, each in zip(paths, names, strict=True) if each in constants}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """Return registers and bytes of stack (what is spilled) a thread, and shared bytes a program, of machine code."""
    from triton import knobs

    code = folder / "kernel.cubin"
    code.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(code)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(amount) for name, amount in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    return {**found, "SHARED": found["SHARED"] + kernel.metadata.shared}  # what it has of its own, and asks for


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(("columns", "dtype"), [(1, "*bf16"), (16, "*fp32")])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit_gpus_that_are_not_here(capability: int, columns: int, dtype: str, tmp_path: Path) -> None:
    """The largest kernels for every GPU, all of them for one."""
    from retrofit.layers.kernels import triton as kernels

    variants = [(kernels._forward, {"STAGE": -1}), (kernels._backward, {"STAGE": -1})]
    if capability == 90:
        quiet = dict.fromkeys(("Weight", "Bias", "factor", "seed"))
        variants += [(kernels._forward, {"STAGE": stage}) for stage in range(5)]
        variants += [(kernels._backward, {"STAGE": stage}) for stage in range(2)]
        variants += [(kernels._forward, {"STAGE": -1, **quiet}), (kernels._affine_gradients, {}), (kernels._apply, {})]
        ones = dict.fromkeys(("inner", "length", "sets", "elements", "share"), 1)  # which Triton takes for constants
        variants += [(kernels._forward, {"STAGE": stage, **ones}) for stage in (-1, 4)]
        variants += [(kernels._backward, {"STAGE": -1, **ones}), (kernels._apply, ones)]
    for kernel, constants in variants:
        used = resources(built(kernel, capability, columns, dtype, **constants), tmp_path)
        assert all(used[name] <= most for name, most in MOST.items()), (kernel.__name__, constants, used)
