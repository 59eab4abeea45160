"""The tables of the evidence, from the recorded runs alone."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from evidence_arms import ARMS

Line = dict[str, Any]
SETUP = ("data", "model", "img_size", "images", "epochs", "warmup_epochs", "clip_grad", "opt")
ENOUGH = 3  # seeds
NOTE = """Each arm stands at the learning rate that is best on the validation pictures, of those with the most seeds
(three and more count alike). Accuracies are top-1 in percent, mean ± standard error over seeds (n of them); a seed
draws its own training pictures. A difference is paired: to the best baseline of the same batch size, which is that of
the highest validation top-1 among those of the most seeds, likewise. Its first error is that over seeds (? with one
seed), its second that over test pictures (of the seeds' mean for each). Seconds are of processor time, training
alone."""


class Setup:
    """The runs of one data set, network and length of training.

    Args:
        lines: The runs.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines
        self.batches = sorted({line["batch"] for line in lines})
        self.arms = [name for name in ARMS if any(line["arm"] == name for line in lines)]

    def of(self, arm: str, batch: int) -> list[Line]:
        """Return an arm's runs at its learning rate, by seed.

        It is the rate of the highest mean validation top-1, of those that the most seeds were
        trained at.
        """
        runs = self.by_rate(arm, batch).values()
        return max(
            runs,
            key=lambda own: (_seeds(own), statistics.fmean(line["val"] for line in own)),
            default=[],
        )

    def by_rate(self, arm: str, batch: int) -> dict[float, list[Line]]:
        """Return an arm's runs by learning rate, in the order of seeds."""
        found: dict[float, list[Line]] = {}
        for line in sorted(self.lines, key=lambda line: line["seed"]):
            if (line["arm"], line["batch"]) == (arm, batch):
                found.setdefault(line["lr"], []).append(line)
        return found

    def baseline(self, batch: int) -> str:
        """Return the baseline that is best on the validation pictures."""
        known = [name for name in self.arms if not ARMS[name].ours and self.of(name, batch)]
        most = max((_seeds(self.of(name, batch)) for name in known), default=0)
        known = [name for name in known if _seeds(self.of(name, batch)) == most]
        return max(
            known,
            key=lambda name: statistics.fmean(line["val"] for line in self.of(name, batch)),
            default="",
        )

    def difference(self, arm: str, against: str, batch: int) -> str:
        """Return the paired difference of test top-1 between two arms, with both standard errors."""
        ours, theirs = (self.of(name, batch) for name in (arm, against))
        return "best baseline" if arm == against else paired(ours, theirs)

    def against_baseline(self) -> list[str]:
        """Return the table: batch size against method."""
        head = " | ".join(f"batch {batch} | difference" for batch in self.batches)
        text = [f"| network | {head} |", "|---|" + "---|---|" * len(self.batches)]
        for name in self.arms:
            cells = []
            for batch in self.batches:
                own = self.of(name, batch)
                cells += [
                    spread(own),
                    self.difference(name, self.baseline(batch), batch) if own else "",
                ]
            text.append(
                f"| {'**' * ARMS[name].ours}{ARMS[name].label}{'**' * ARMS[name].ours} | {' | '.join(cells)} |"
            )
        return text

    def details(self, batch: int) -> list[str]:
        """Return what else was measured at a batch size."""
        measured = ("val", "test_loss", "ece", "cpu_seconds")
        text = [
            "| network | lr | n | val | test loss | calibration error | s a run |",
            "|---|---|---|---|---|---|---|",
        ]
        for name in self.arms:
            if own := self.of(name, batch):
                mean = [statistics.fmean(line[key] for line in own) for key in measured]
                cells = f"{own[0]['lr']:g} | {len(own)} | {mean[0]:.1f} | {mean[1]:.2f} | {mean[2]:.1f} | {mean[3]:.0f}"
                text.append(f"| {ARMS[name].label} | {cells} |")
        return text

    def rates(self, batch: int) -> list[str]:
        """Return validation and test top-1 of every seed at every learning rate that was tried."""
        rates = sorted({line["lr"] for line in self.lines if line["batch"] == batch})
        text = [
            "| network | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
            "|---|" + "---|" * len(rates),
        ]
        for name in self.arms:
            tried = self.by_rate(name, batch)
            cells = [
                ", ".join(f"{one['val']:.1f} / {one['test']:.1f}" for one in tried.get(rate, []))
                for rate in rates
            ]
            if tried:
                text.append(f"| {ARMS[name].label} | {' | '.join(cells)} |")
        return text

    def differences(self, batch: int) -> list[str]:
        """Return the paired differences of all arms (rows) to all that have the most seeds
        (columns).
        """
        own = {name: runs for name in self.arms if (runs := self.of(name, batch))}
        most = max(map(_seeds, own.values()))
        columns = [name for name, runs in own.items() if _seeds(runs) == most]
        text = [f"| top-1 minus that of | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for name, runs in own.items():
            cells = ["" if name == other else paired(runs, own[other]) for other in columns]
            text.append(f"| {ARMS[name].label} ({name}) | {' | '.join(cells)} |")
        return text


def _seeds(runs: Sequence[Line]) -> int:
    """Return how many seeds there are, enough at most."""
    return min(len(runs), ENOUGH)


def paired(ours: Sequence[Line], theirs: Sequence[Line]) -> str:
    """Return the difference of test top-1 over the seeds that both have, with its errors over seeds
    and pictures.
    """
    pairs = [(one, other) for one in ours for other in theirs if one["seed"] == other["seed"]]
    if not pairs:
        return ""
    gains = [one["test"] - other["test"] for one, other in pairs]
    each = np.mean([right(one) - right(other) for one, other in pairs], axis=0)
    by_picture = 100 * each.std(ddof=1) / len(each) ** 0.5
    return f"{statistics.fmean(gains):+.1f} ± {error(gains)} / {by_picture:.1f}"


def right(line: Line) -> np.ndarray:
    """Return which test pictures a run got right, as zeros and ones."""
    digits = line["correct"]
    bits = np.unpackbits(
        np.frombuffer(bytes.fromhex(digits.zfill(len(digits) + len(digits) % 2)), np.uint8)
    )
    return bits[-line.get("test_images", 4 * len(digits)) :].astype(float)


def error(values: Sequence[float]) -> str:
    """Return the standard error of a mean."""
    return f"{statistics.stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else "?"


def spread(own: Sequence[Line]) -> str:
    """Return mean and standard error of the test top-1."""
    values = [line["test"] for line in own]
    return f"{statistics.fmean(values):.1f} ± {error(values)} (n = {len(values)})" if values else ""


def machines(lines: Sequence[Line]) -> list[str]:
    """Say how many runs each machine made."""
    counts = Counter(line["machine"] for line in lines)
    return [f"Machine of {count} runs: {name}." for name, count in counts.most_common()]


def document(lines: Sequence[Line]) -> str:
    """Return all tables."""
    text = [NOTE, "", *machines(lines)]
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in SETUP), []).append(line)
    for values, own in sorted(groups.items(), key=lambda group: -len(group[1])):
        now = dict(zip(SETUP, values, strict=True))
        setup = Setup(own)
        tests = len(right(own[0]))
        text += [
            "",
            f"## {now['data']}, {now['images']} training pictures, {now['model']} at {now['img_size']} px, "
            f"{now['epochs']} epochs",
            "",
            f"{now['opt']}, {now['warmup_epochs']} epochs of warm-up, gradients clipped to {now['clip_grad']:g}; "
            f"{tests} test pictures; {len(own)} runs.",
            "",
            *setup.against_baseline(),
        ]
        for batch in setup.batches:
            text += ["", f"### Batch {batch}", "", *setup.details(batch), ""]
            text += ["Paired differences:", "", *setup.differences(batch), ""]
            text += [
                "Validation / test top-1 of each seed by learning rate:",
                "",
                *setup.rates(batch),
            ]
    return "\n".join(text) + "\n"
