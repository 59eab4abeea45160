"""The report of gpu.py: its sections, what failed, what was not reached, and the time that is left."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

Row = list[object]


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and on what.

    Attributes:
        device: "cuda", or "cpu" in a dry run.
        rounds: Turns that each contender takes, after those that warm up.
        warm_up: Turns that are not counted.
        types: Types of a layer's input.
        half_types: Types of autocast in training steps.
        layouts: Memory formats of a layer's input.
        errors_of: (N, C, H, W) of the tensors that are compared with float64.
        image: (C, H, W) of a convolutional layer's input.
        tokens: (length, features) of a transformer layer's input.
        layer_batch: Samples in a layer's input.
        convolutional: The network that is trained with every target.
        targets: What it is converted to; "bn.eval()" is the source with constant statistics.
        pixels: Height and width of its images.
        transformer: The network that is trained with `lnn`, on images of the size that it takes.
        batch: Images in a training step, and in the batches of `finetune`.
        jpegs: Images of an epoch of `finetune`.
        tiles: Elements of a kernel's tile, at least.
        columns: Lanes of a kernel's tile of columns.
        compile_modes: Modes of `torch.compile`.
    """

    device: str
    rounds: int
    warm_up: int
    types: tuple[torch.dtype, ...]
    half_types: tuple[torch.dtype, ...]
    layouts: tuple[torch.memory_format, ...]
    errors_of: tuple[int, int, int, int]
    image: tuple[int, int, int]
    tokens: tuple[int, int]
    layer_batch: int
    convolutional: str
    targets: tuple[str, ...]
    pixels: int
    transformer: str
    batch: int
    jpegs: int
    tiles: tuple[int, ...]
    columns: tuple[int, ...]
    compile_modes: tuple[str, ...]


FULL = Sizes(
    device="cuda",
    rounds=15,
    warm_up=3,
    types=(torch.float32, torch.bfloat16, torch.float16),
    half_types=(torch.bfloat16, torch.float16),
    layouts=(torch.contiguous_format, torch.channels_last),
    errors_of=(16, 64, 56, 56),
    image=(256, 56, 56),
    tokens=(197, 384),
    layer_batch=64,
    convolutional="resnet50",
    targets=("bn.eval()", "frozen", "ln", "gn", "ln-pn", "gn-pn", "bnn"),
    pixels=224,
    transformer="vit_small_patch16_224",
    batch=128,
    jpegs=5120,
    tiles=(512, 1024, 2048, 4096),
    columns=(32, 64, 128),
    compile_modes=("default", "reduce-overhead"),
)
# On the CPU: whether the script runs, and nothing else
DRY = Sizes(
    device="cpu",
    rounds=2,
    warm_up=0,
    types=(torch.float32,),
    half_types=(torch.bfloat16,),
    layouts=(torch.contiguous_format,),
    errors_of=(2, 8, 3, 3),
    image=(32, 1, 2),
    tokens=(2, 8),
    layer_batch=2,
    convolutional="test_resnet",
    targets=("bn.eval()", "ln-pn"),
    pixels=32,
    transformer="test_vit",
    batch=2,
    jpegs=8,
    tiles=(512,),
    columns=(32,),
    compile_modes=("default",),
)


class Report:
    """What was measured so far. It is written after every section, so that a run that is stopped
    keeps what it had.

    Args:
        machine: Of which it speaks. A file that speaks of another one is written anew; in one of
            the same, sections of the same title are replaced.
        minutes: Time for all parts.
        file: Where it is written; None writes nothing.
    """

    def __init__(self, machine: str, minutes: float, file: Path | None) -> None:
        self.file = file
        self.failed: list[str] = []
        self.missing: list[str] = []
        self._head = f"Machine: {machine}."
        self._end = time.monotonic() + 60 * minutes
        self._sections = self._earlier_sections()

    def _earlier_sections(self) -> dict[str, str]:
        if self.file is None or not self.file.exists():
            return {}
        text = self.file.read_text()
        if not text.startswith(self._head):
            return {}
        titled = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)[1:]
        return dict(zip(titled[::2], titled[1::2], strict=True))

    @contextmanager
    def part(self, name: str, seconds: float = 5.0) -> Iterator[bool]:
        """Give whether so many seconds are left; note what fails inside, and let the rest go on."""
        is_time = self._end - time.monotonic() >= seconds
        if not is_time:
            self.missing.append(name)
        try:
            yield is_time
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            self.fail(f"{name}: {type(error).__name__}: {first_line}"[:300])

    def fail(self, what: str) -> None:
        """Note a failure."""
        self.failed.append(what)
        print(f"failed: {what}", flush=True)

    def table(self, title: str, head: str, rows: list[Row]) -> None:
        """Add a section with a table, or replace that of the same title."""
        lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
        self.section(title, "\n".join(lines))

    def section(self, title: str, text: str) -> None:
        """Add a section, or replace that of the same title."""
        self._sections[title] = f"\n{text}\n\n"
        print(f"\n## {title}\n\n{text}", flush=True)
        self.write()

    def write(self) -> None:
        """Write what there is."""
        if self.file is None:
            return
        notes = f"\nFailed: {_listed(self.failed)}\n\nNot reached: {_listed(self.missing)}\n"
        # Last, whatever was added since
        self._sections.pop("What is missing", None)
        self._sections["What is missing"] = notes
        text = "".join(f"## {title}\n{body}" for title, body in self._sections.items())
        self.file.write_text(f"{self._head}\n\n{text}")


def _listed(notes: list[str]) -> str:
    return "; ".join(notes) or "nothing"


def short(value: object) -> str:
    """Return a type's or a memory format's name without its package."""
    return str(value).removeprefix("torch.").removesuffix("_format")
