"""What the scripts share: their command line, the runs they record, and tables of paired
differences.

A run is a line of JSON: what tells it from the others (its key), what was measured, and the
machine. A script that is started again goes on with the runs that have no line yet.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
Line = dict[str, Any]
UNPRINTED = ("correct", "machine")
# Tolerance where the deviation is what is measured.
ANY_DEVIATION = 1e9

OPTIONS: dict[str, dict[str, Any]] = {
    "--table": {
        "action": "store_true",
        "help": "write the table from the recorded runs, train nothing",
    },
    "--model": {"default": "tf_efficientnet_lite0"},
    "--checkpoint": {"help": "weights of the source network"},
    "--match": {"default": "order", "choices": ["name", "order"]},
    "--train": {"metavar": "TAR", "help": "one folder a class"},
    "--test": {"metavar": "TAR", "help": "one folder a class"},
    "--class-map": {"default": "", "help": "the classes of the network, in order"},
    "--img-size": {"type": int, "default": 64},
    "--seeds": {"nargs": "+", "type": int, "default": [0, 1, 2]},
    "--threads": {"type": int, "default": 1},
    "--until": {
        "type": float,
        "default": float("inf"),
        "help": "start nothing after this time, in Unix seconds",
    },
}
"""What several scripts take."""


def command_line(
    description: str | None, *options: str, out: str, required: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Return a parser.

    Args:
        description: The script's docstring.
        options: Names of OPTIONS that the script takes.
        out: Default of `--out`, in the folder of results.
        required: Further names of OPTIONS, which must be given.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in options:
        parser.add_argument(name, **OPTIONS[name])
    for name in required:
        parser.add_argument(name, required=True, **OPTIONS[name])
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    return parser


class Recorded:
    """The runs of a file, a line of JSON each.

    Args:
        path: Of the file, or of the table beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_suffix(".jsonl")

    def lines(self, **values: Any) -> list[Line]:
        """Read the runs that have some values."""
        if not self.path.exists():
            return []
        lines = map(json.loads, self.path.read_text().splitlines())
        return [line for line in lines if matches(line, values)]

    def find(self, key: Mapping[str, Any]) -> Line | None:
        """Return the run of a key, if it is recorded."""
        return next(iter(self.lines(**key)), None)

    def add(self, line: Line) -> None:
        """Record a run, and show it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print({name: line[name] for name in line if name not in UNPRINTED}, flush=True)

    def done(
        self, key: Line, make: Callable[[], Sequence[Line]], until: float = float("inf")
    ) -> Line:
        """Return the run of a key, which is made if it is not recorded.

        Args:
            key: What tells the run from others.
            make: Makes the run. It may return other runs beside it, of keys with the same names.
            until: Start nothing after this time, in Unix seconds.

        Returns:
            The line of the run.

        Raises:
            SystemExit: A run would start after `until`.
        """
        if (line := self.find(key)) is not None:
            return line
        if time.time() > until:
            raise SystemExit("the time is over")
        for line in make():
            if self.find({name: line[name] for name in key}) is None:
                self.add(line)
        return self.lines(**key)[0]


def best_rate(rates: Sequence[float], middle: float, val: Callable[[float], float]) -> float:
    """Return the learning rate of a grid that does best on validation data: the middle and both
    neighbours are tried, and further ones while the best is the last tried.

    Args:
        rates: The grid, in order.
        middle: One of them.
        val: Gives what a rate reaches.
    """
    reached: dict[int, float] = {}
    places = [rates.index(middle)]
    while places:
        for place in places:
            reached[place] = val(rates[place])
        best = max(reached, key=reached.__getitem__)
        neighbours = {best - 1, best + 1}.intersection(range(len(rates)))
        places = sorted(neighbours - reached.keys())
    return rates[best]


def matches(line: Line, values: Mapping[str, Any]) -> bool:
    """Tell whether a line has these values."""
    return all(line.get(name) == value for name, value in values.items())


def grouped(lines: Iterable[Line], names: Sequence[str]) -> dict[tuple[Any, ...], list[Line]]:
    """Return the lines by their values of some names, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in names), []).append(line)
    return groups


def publish(path: Path, lines: Iterable[str]) -> None:
    """Write lines of Markdown beside a file of runs, and show them."""
    text = "\n".join(lines) + "\n"
    path.with_suffix(".md").write_text(text)
    print(text)


def row(cells: Iterable[object]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown(head: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [row(head), "|" + "---|" * len(head), *map(row, rows)]


def error(values: Sequence[float]) -> str:
    """Return the standard error of a mean; ? with one value."""
    if len(values) < 2:
        return "?"
    return f"{statistics.stdev(values) / len(values) ** 0.5:.1f}"


def with_error(values: Sequence[float], sign: str = "") -> str:
    """Return mean and standard error; nothing of no value."""
    return f"{statistics.fmean(values):{sign}.1f} ± {error(values)}" if values else ""


def with_deviation(values: Sequence[float], sign: str = "") -> str:
    """Return mean and standard deviation; a dash of no value."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):{sign}.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def mean(lines: Iterable[Line], name: str) -> float:
    """Return the mean of a measurement."""
    return statistics.fmean(line[name] for line in lines)


def spread(runs: Sequence[Line]) -> str:
    """Return mean, standard error and number of the test top-1; nothing of no run."""
    values = [line["test"] for line in runs]
    return f"{with_error(values)} (n = {len(values)})" if values else ""


def paired(runs: Sequence[Line], others: Sequence[Line]) -> str:
    """Return the difference of test top-1, ours minus others, over the seeds that both have.

    Returns:
        Mean difference, its standard error over seeds and that over test pictures; nothing without
        a common seed.
    """
    pairs = [(run, other) for run in runs for other in others if run["seed"] == other["seed"]]
    if not pairs:
        return ""
    gains = [run["test"] - other["test"] for run, other in pairs]
    each = np.mean([right(run) - right(other) for run, other in pairs], axis=0)
    by_picture = 100 * each.std(ddof=1) / len(each) ** 0.5
    return f"{with_error(gains, '+')} / {by_picture:.1f}"


def right(line: Line) -> np.ndarray:
    """Return which test pictures a run got right, (N,), as zeros and ones."""
    digits = line["correct"]
    bits = np.unpackbits(
        np.frombuffer(bytes.fromhex(digits.zfill(len(digits) + len(digits) % 2)), np.uint8)
    )
    return bits[-line.get("test_images", 4 * len(digits)) :].astype(float)


def machine() -> str:
    """Name the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    name = names[0] if names else platform.machine()
    cores = max(1, len(names))
    return f"{name}, {cores} cores, {torch.get_num_threads()} used, torch {torch.__version__}"


def machines(lines: Iterable[Line]) -> list[str]:
    """Say how many runs each machine made."""
    counts = Counter(line["machine"] for line in lines)
    return [f"Machine of {count} runs: {name}." for name, count in counts.most_common()]
