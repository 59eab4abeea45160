"""A training run's progress for people: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from retrofit.cli.console import bar_on, say, stderr
from retrofit.finetune.run_callback import RunCallback, Step

_EVERY = 30.0  # seconds between lines within an epoch, where there is no terminal


class Lines(RunCallback):
    """Writes a line for each epoch, and within long ones now and then."""

    def __init__(self) -> None:
        self._written = self._started = time.monotonic()
        self._first: int | None = None

    def note(self, text: str) -> None:
        """Write a sentence."""
        say(text if text.startswith("warning") else f"note: {text}", "yellow" if text.startswith("warning") else None)

    def started(self, folder: Path) -> None:
        """Write the folder's name."""
        say(f"run: {folder}")

    def step(self, step: Step) -> None:
        """Write a line if the last one is long ago."""
        if self._first is None:
            self._first, self._started = step.step, time.monotonic()
        if time.monotonic() - self._written > _EVERY:
            self._written = time.monotonic()
            where = f"epoch {step.epoch} of {step.epochs}, step {step.step} of {step.steps}"
            say(f"{where}: {_figures(step)}{self._left(step)}")

    def epoch(self, row: dict[str, Any]) -> None:
        """Write an epoch's line."""
        self._written = time.monotonic()
        strength = "" if row["strength"] is None else f", strength {row['strength']:.2f}"
        top1 = "" if row["val_top1"] is None else f", top-1 {row['val_top1']:.2f}%"
        say(
            f"epoch {row['epoch']}: loss {row['train_loss']:.4f}{top1}, lr {row['lr']:.2e}{strength}, "
            f"{row['images_per_second']:.0f} images/s"
        )

    def _left(self, step: Step) -> str:
        done = step.step - (self._first or 0)
        if done < 1:
            return ""
        left = (time.monotonic() - self._started) / done * (step.steps - step.step)
        return f", {left / 60:.0f} min left"


class Bar(Lines):
    """The same lines above a bar that moves with every step."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        super().__init__()
        self._progress, self._task = progress, task

    def step(self, step: Step) -> None:
        """Move the bar."""
        text = f"epoch {step.epoch}/{step.epochs}  {_figures(step)}"
        self._progress.update(self._task, completed=step.step, total=step.steps, description=text)


def _figures(step: Step) -> str:
    strength = "" if step.strength is None else f", strength {step.strength:.2f}"
    return f"loss {step.loss:.4f}, lr {step.lr:.2e}{strength}, {step.images_per_second:.0f} images/s"


@contextmanager
def run_callback() -> Iterator[RunCallback]:
    """Give what writes down a run's progress: a bar on a terminal, a line an epoch otherwise, and now and then."""
    console = stderr()
    if not console.is_terminal:
        yield Lines()
        return
    with bar_on(console) as progress:
        yield Bar(progress, progress.add_task("starting", total=None))
