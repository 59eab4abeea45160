"""Instructions an element of the Triton kernels, compiled for GPUs that are not here.

    python benchmarks/sass.py [CAPABILITY ...]

It needs triton, no GPU. A line is a launch: instructions an element in its loops over elements (and
how many more where a set's power is near 0 and needs a series), registers, bytes of stack (spilled
registers), the widths of its accesses, and calls of subroutines in a loop (a 64-bit division is one
of 60 to 100 instructions). An H100 issues 132 x 128 x 1.8e9 = 3e13 instructions a second: 100
instructions an element take 3.3 ps, the time in which 4 TB/s move 13 bytes.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

from retrofit.layers.kernels.triton import (
    launcher,
    maps,
    migration,
    norm_backward,
    norm_forward,
    norm_result,
    tiles,
)
from retrofit.layers.kernels.triton_plan import plan_of

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Of an H100; batch normalization then shares its sets
PROCESSORS = 132
# Shapes in the order of memory, dimensions of sets, shapes of gamma
LAYERS = {
    "bnn, channels_last": ((128 * 3136, 256), (0,), (1, 256)),
    "bnn, contiguous": ((128, 64, 3136), (0, 2), (1, 64, 1)),
    "lnn": ((128 * 197, 384), (1,), (1, 384)),
    "gnn, channels_last": ((128, 3136, 32, 8), (1, 3), (1, 1, 32, 8)),
    "gnn, contiguous": ((128, 32, 8, 3136), (2, 3), (1, 32, 8, 1)),
}
# Maps by a scale and a shift: the activation in them, and their kernels with what they are not given
_NO_STATISTICS = "Mean", "Var"
_LN = {
    migration.moments_kernel: (),
    maps.map_kernel: (*_NO_STATISTICS, "Inner"),
    migration.products_kernel: ("Inner", "Scale"),
    migration.combine_kernel: ("Inner", "Scale"),
}
_LN_AND_PROXY = {
    migration.moments_kernel: (),
    maps.map_kernel: _NO_STATISTICS,
    migration.products_kernel: (),
    migration.combine_kernel: (),
}
_PROXY = {maps.map_kernel: (*_NO_STATISTICS, "Inner"), maps.map_backward_kernel: _NO_STATISTICS}
_CHANNELS_LAST = (128 * 3136, 256), (0,), (1, 256)
_CONTIGUOUS = (128, 256, 3136), (0, 2), (1, 256, 1)
_ROWS_LAST = (128, 3136, 256), (1,), (1, 1, 256)
_ROWS = (128, 256, 3136), (2,), (1, 256, 1)
MAPS = {
    "ln, channels_last": (5, _LN, _ROWS_LAST),
    "ln, contiguous": (5, _LN, _ROWS),
    "ln with ProxyNorm SiLU, channels_last": (3, _LN_AND_PROXY, _ROWS_LAST),
    "ln with ProxyNorm SiLU, contiguous": (3, _LN_AND_PROXY, _ROWS),
    "ProxyNorm ReLU, channels_last": (0, _PROXY, _CHANNELS_LAST),
    "ProxyNorm SiLU, channels_last": (3, _PROXY, _CHANNELS_LAST),
    "ProxyNorm GELU, channels_last": (4, _PROXY, _CHANNELS_LAST),
    "ProxyNorm ReLU, contiguous": (0, _PROXY, _CONTIGUOUS),
    "ProxyNorm SiLU, contiguous": (3, _PROXY, _CONTIGUOUS),
}
_ELEMENTS = ("Out", "X", "Grad", "GradX")
_TYPES = {
    **dict.fromkeys(tiles.NUMBERS, "i32"),
    **dict.fromkeys(
        ("unit", "step_unit", "noise_unit", "eps", "momentum", "lower", "upper"), "fp32"
    ),
    **dict.fromkeys(("Code", "Batches"), "*i64"),
    "Seed": "*i32",
}
_NOISE = ("Seed",)


# Operations of a loop for a tile, by name: fractions where it takes several tiles at once
Operations = collections.Counter[str]


class Built(NamedTuple):
    """A launch's machine code: of each loop over elements, its operations an element."""

    loops: list[Operations]
    # Those that stand for a loop where a p of some set is near 0, and a series is needed
    rare: list[Operations]
    elements: int
    resources: dict[str, int]

    @property
    def instructions(self) -> float:
        """Instructions an element."""
        return sum(loop.total() for loop in self.loops) / self.elements

    @property
    def extra(self) -> float:
        """Instructions more an element where a p of some set is near 0."""
        return sum(loop.total() for loop in self.rare) / self.elements

    def count(self, operation: str) -> int:
        """Return how many operations of the loops begin so."""
        return sum(
            n for loop in self.loops for name, n in loop.items() if name.startswith(operation)
        )


def launches(
    shape: tuple[int, ...], dims: tuple[int, ...], affine: tuple[int, ...], everything: bool = True
) -> Iterator[Any]:
    """Yield the kernels of a layer; without `everything`, the two with most registers."""
    plan = plan_of(shape, dims, affine, PROCESSORS)
    assert plan is not None
    if plan.splits == 1:
        yield from (norm_forward.forward_kernel, norm_backward.backward_kernel)
    elif everything:
        yield from (norm_forward.statistics_kernel, norm_forward.step_kernel)
        yield norm_result.result_kernel
        yield from (norm_backward.gradient_sums_kernel, norm_backward.gradient_kernel)
    else:
        yield from (norm_forward.step_kernel, norm_backward.gradient_sums_kernel)


def built(
    kernel: Any,
    layer: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    dtype: str = "bf16",
    capability: int = 90,
    absent: tuple[str, ...] = _NOISE,
    activation: int | None = None,
) -> Built:
    """Compile a launch as a real one is: the same tile, warps and divisibility."""
    plan = plan_of(*layer, PROCESSORS)
    assert plan is not None
    constants = {"TILE": plan.tile, "KIND": activation} | dict.fromkeys(absent)
    types = _TYPES | dict.fromkeys(_ELEMENTS, f"*{dtype}")
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names
    }
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*")]
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): v for name, v in constants.items() if name in names},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    is_backward = kernel.fn.__module__ == norm_backward.__name__
    registers = norm_backward.REGISTERS if is_backward else None
    options = launcher.launch_options(plan, registers)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    elements = plan.tile.rows * plan.tile.cols // (32 * options["num_warps"])
    bits = elements * int(dtype[-2:]) * sum(name in names for name in ("X", "Grad"))
    return _read(compiled, elements, bits, plan.tile.single)


def _read(compiled: Any, elements: int, bits: int, straight: bool) -> Built:
    """Disassemble; a kernel whose sets fit a tile has no loop, and counts as one. A thread has some
    elements of a tile, and reads so many bits for them.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = _tool("nvdisasm", "-c", file.name)
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    used["SHARED"] += compiled.metadata.shared
    code, spans = _loops(text)
    if straight:
        counted = [collections.Counter(code)]
    else:
        counted = [_rolled(collections.Counter(code[a:b]), bits) for a, b in spans]
    return Built(*_usual([loop for loop in counted if _over_elements(loop)]), elements, used)


def _rolled(loop: Operations, bits: int) -> Operations:
    """Return the operations of a loop for a tile, where the compiler takes several at once."""
    wide = sum(
        int(op[-3:].strip(".")) * loop[op] for op in loop if re.match(r"LDG.*\.(64|128)$", op)
    )
    tiles = max(1, wide // bits)
    return collections.Counter({op: n / tiles for op, n in loop.items()})


def _usual(loops: list[Operations]) -> tuple[list[Any], list[Any]]:
    """Return loops, the shorter of two that raise to powers and access the same; and by what the
    longer one, with a series, exceeds it.
    """
    usual: list[Any] = [loop for loop in loops if not loop["MUFU.EX2"]]
    rare = []
    by_accesses = collections.defaultdict(list)
    for loop in loops:
        if loop["MUFU.EX2"]:
            accesses = [sum(loop[op] for op in loop if op[:3] == way) for way in ("LDG", "STG")]
            by_accesses[tuple(accesses)].append(loop)
    for alike in by_accesses.values():
        short, *long = sorted(alike, key=collections.Counter.total)
        usual.append(short)
        rare += [loop - short for loop in long]
    return usual, rare


def _tool(name: str, *arguments: str) -> str:
    command = [TOOLS / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loops(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the operations of machine code, and where its innermost loops lie in it."""
    labels: dict[str, int] = {}
    code: list[str] = []
    jumps: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            labels[label[1]] = len(code)
        elif operation := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)", line):
            target = re.search(r"(\.L_x?_?\w+)", line)
            if operation[1].startswith("BRA") and target:
                jumps.append((len(code), target[1]))
            code.append(operation[1])
    code = code[: _end(code)]
    spans = [(labels[to], at + 1) for at, to in jumps if labels.get(to, at + 1) <= at]
    inner = [
        (start, end)
        for start, end in spans
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in spans)
    ]
    return code, inner


def _end(code: list[str]) -> int:
    """Return where a program ends: behind it stand a jump to itself and NOPs, which fill the file
    and are never reached.
    """
    end = len(code)
    while end and code[end - 1] in ("NOP", "BRA"):
        end -= 1
    return end


def _over_elements(loop: Operations) -> bool:
    """Whether a loop goes over elements; others add up parts, number by number and past L1."""
    loads = [name for name in loop if name.startswith("LDG")]
    return bool(loads) and not any("STRONG" in name for name in loads)


def _shown(code: Built) -> str:
    widths = sorted({op for loop in code.loops for op in loop if op[:3] in ("LDG", "STG")})
    used = code.resources
    return (
        f"{code.instructions:.1f} (+ {code.extra:.1f}) an element, registers {used['REG']}, "
        f"stack {used['STACK']}, calls {code.count('CALL')}, {widths}"
    )


def print_all(label: str, launched: Iterable[tuple[str, Built]]) -> None:
    """Print a line for each launch, and their sum."""
    total = extra = 0.0
    for name, code in launched:
        total += code.instructions
        extra += code.extra
        print(f"{label} {name}: {_shown(code)}", flush=True)
    print(f"{label}: {total:.0f} (+ {extra:.0f}) an element in all", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("capabilities", nargs="*", type=int, default=[80, 90, 100])
    for capability in parser.parse_args().capabilities:
        for dtype in ("bf16", "fp32"):
            for name, layer in LAYERS.items():
                codes = (
                    (kernel.__name__, built(kernel, layer, dtype, capability))
                    for kernel in launches(*layer)
                )
                print_all(f"sm_{capability} {name} {dtype}", codes)
            for name, (kind, kernels, layer) in MAPS.items():
                codes = (
                    (kernel.__name__, built(kernel, layer, dtype, capability, absent, kind))
                    for kernel, absent in kernels.items()
                )
                print_all(f"sm_{capability} {name} {dtype}", codes)


if __name__ == "__main__":
    main()
