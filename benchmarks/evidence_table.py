"""The tables of the evidence, from the recorded runs alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from evidence_arms import ARMS
from harness import Line, grouped, machines, markdown, mean, paired, right, spread

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
        return max(self.by_rate(arm, batch).values(), key=_rank, default=[])

    def by_rate(self, arm: str, batch: int) -> dict[float, list[Line]]:
        """Return an arm's runs by learning rate, in the order of seeds."""
        runs = [line for line in self.lines if (line["arm"], line["batch"]) == (arm, batch)]
        runs.sort(key=lambda line: line["seed"])
        return {rate: lines for (rate,), lines in grouped(runs, ["lr"]).items()}

    def measured(self, batch: int) -> dict[str, list[Line]]:
        """Return the runs of each arm that has any, at its learning rate."""
        runs = {arm: self.of(arm, batch) for arm in self.arms}
        return {arm: lines for arm, lines in runs.items() if lines}

    def baseline(self, batch: int) -> str:
        """Return the baseline that is best on the validation pictures."""
        runs = {arm: lines for arm, lines in self.measured(batch).items() if not ARMS[arm].ours}
        return max(runs, key=lambda arm: _rank(runs[arm]), default="")

    def against_baseline(self) -> list[str]:
        """Return the table: batch size against method."""
        baselines = {batch: self.baseline(batch) for batch in self.batches}
        head = ["network"]
        for batch in self.batches:
            head += [f"batch {batch}", "difference"]
        rows = []
        for arm in self.arms:
            bold = "**" * ARMS[arm].ours
            rows.append([f"{bold}{ARMS[arm].label}{bold}"])
            for batch, best in baselines.items():
                runs = self.of(arm, batch)
                gain = "best baseline" if arm == best else paired(runs, self.of(best, batch))
                rows[-1] += [spread(runs), gain if runs else ""]
        return markdown(head, rows)

    def details(self, batch: int) -> list[str]:
        """Return what else was measured at a batch size."""
        head = ["network", "lr", "n", "val", "test loss", "calibration error", "s a run"]
        rows = [
            (
                ARMS[arm].label,
                f"{runs[0]['lr']:g}",
                len(runs),
                f"{mean(runs, 'val'):.1f}",
                f"{mean(runs, 'test_loss'):.2f}",
                f"{mean(runs, 'ece'):.1f}",
                f"{mean(runs, 'cpu_seconds'):.0f}",
            )
            for arm, runs in self.measured(batch).items()
        ]
        return markdown(head, rows)

    def rates(self, batch: int) -> list[str]:
        """Return validation and test top-1 of every seed at every learning rate that was tried."""
        rates = sorted({line["lr"] for line in self.lines if line["batch"] == batch})
        rows = []
        for arm in self.measured(batch):
            tried = self.by_rate(arm, batch)
            cells = [
                ", ".join(f"{line['val']:.1f} / {line['test']:.1f}" for line in tried.get(rate, []))
                for rate in rates
            ]
            rows.append([ARMS[arm].label, *cells])
        return markdown(["network", *(f"{rate:g}" for rate in rates)], rows)

    def differences(self, batch: int) -> list[str]:
        """Return the paired differences of all arms (rows) to all that have the most seeds
        (columns).
        """
        runs = self.measured(batch)
        most = max(map(_seeds, runs.values()))
        columns = [arm for arm, lines in runs.items() if _seeds(lines) == most]
        rows = [
            [
                f"{ARMS[arm].label} ({arm})",
                *("" if arm == other else paired(lines, runs[other]) for other in columns),
            ]
            for arm, lines in runs.items()
        ]
        return markdown(["top-1 minus that of", *columns], rows)

    def tables(self) -> list[str]:
        """Return all tables of the setup."""
        text = self.against_baseline()
        for batch in self.batches:
            text += ["", f"### Batch {batch}", "", *self.details(batch), ""]
            text += ["Paired differences:", "", *self.differences(batch), ""]
            text.append("Validation / test top-1 of each seed by learning rate:")
            text += ["", *self.rates(batch)]
        return text


def _seeds(runs: Sequence[Line]) -> int:
    """Return how many seeds there are, enough at most."""
    return min(len(runs), ENOUGH)


def _rank(runs: Sequence[Line]) -> tuple[int, float]:
    """Return what the better of two learning rates or baselines has more of."""
    return _seeds(runs), statistics.fmean(line["val"] for line in runs)


def document(lines: Sequence[Line]) -> list[str]:
    """Return all tables, the setup with the most runs first."""
    text = [NOTE, "", *machines(lines)]
    for values, runs in sorted(grouped(lines, SETUP).items(), key=lambda item: -len(item[1])):
        text += [
            "",
            *_heading(dict(zip(SETUP, values, strict=True)), runs),
            "",
            *Setup(runs).tables(),
        ]
    return text


def _heading(setup: dict[str, Any], runs: Sequence[Line]) -> list[str]:
    """Return a setup's title and what its runs have in common."""
    return [
        f"## {setup['data']}, {setup['images']} training pictures, {setup['model']} at {setup['img_size']} px, "
        f"{setup['epochs']} epochs",
        "",
        f"{setup['opt']}, {setup['warmup_epochs']} epochs of warm-up, gradients clipped to {setup['clip_grad']:g}; "
        f"{len(right(runs[0]))} test pictures; {len(runs)} runs.",
    ]
