r"""README's first run, with several seeds: ImageNet weights on scikit-learn's digits in batches of
2.

    python benchmarks/first_run.py --checkpoint efficientnet-lite0.pth
    python benchmarks/first_run.py --table

The commands are README's, with `--seed` added. The unconverted network is trained in the same way,
at the one of three learning rates that is best on the validation images with the first seed. Each
finished run is a line of first_run.jsonl; started again, the script goes on with what is missing.
`--table` writes first_run.md from the lines.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from harness import (
    Line,
    Recorded,
    command_line,
    grouped,
    machine,
    machines,
    markdown,
    mean,
    publish,
    with_error,
)

NETWORK = "tf_efficientnet_lite0"
SETTINGS = ["--dataset", "digits", "--img-size", "64", "-b", "2", "--no-aug"]
SETTINGS += ["--val-split", "0.65", "--epochs", "2"]
RATES = {"frozen": ["3e-4"], "BatchNorm": ["3e-4", "1e-3", "3e-3"]}


def retrofit(*words: str) -> str:
    """Run a command in the current folder; return what it writes for programs."""
    command = [sys.executable, "-m", "retrofit", *words]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def run(checkpoint: str, key: Line) -> Line:
    """Fine-tune once, and return the line of the run."""
    weights = ["--checkpoint", checkpoint, "--match", "order"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as folder:
        network = [NETWORK, *weights]
        if key["arm"] == "frozen":
            network = [f"{folder}/frozen.safetensors"]
            retrofit("convert", NETWORK, "--to", "frozen", *weights, "-o", *network)
        output = f"{folder}/run"
        rate = ["--lr", key["lr"], "--seed", str(key["seed"])]
        retrofit("finetune", *network, *SETTINGS, *rate, "-o", output)
        best = f"{output}/best.safetensors"
        result = json.loads(retrofit("evaluate", best, "--dataset", "digits", "--json"))
        metrics = Path(output, "metrics.jsonl").read_text().splitlines()
    return {
        **key,
        "val": max(round(json.loads(line)["val_top1"], 2) for line in metrics),
        "test": round(result["top1"], 2),
        "cpu_seconds": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, 1),
        "machine": machine(),
    }


def table(lines: list[Line]) -> list[str]:
    """Return the rows: the mean of each network at each learning rate."""
    rows = []
    for (arm, rate), runs in grouped(lines, ["arm", "lr"]).items():
        test = with_error([line["test"] for line in runs])
        seconds = f"{mean(runs, 'cpu_seconds'):.0f}"
        rows.append((arm, rate, len(runs), with_error([r["val"] for r in runs]), test, seconds))
    return markdown(["network", "lr", "seeds", "validation", "test top-1", "CPU s a run"], rows)


def main() -> None:
    parser = command_line(
        __doc__, "--table", "--checkpoint", "--seeds", "--until", out="first_run.jsonl"
    )
    parser.set_defaults(seeds=[42, 0, 1])
    args = parser.parse_args()
    recorded = Recorded(args.out)

    def done(arm: str, rate: str, seed: int) -> Line:
        key = {"arm": arm, "lr": rate, "seed": seed}
        return recorded.done(key, lambda: [run(args.checkpoint, key)], args.until)

    def val(arm: str, rate: str) -> float:
        return done(arm, rate, args.seeds[0])["val"]

    if not args.table:
        best = {arm: max(rates, key=partial(val, arm)) for arm, rates in RATES.items()}
        for seed in args.seeds[1:]:
            for arm, rate in best.items():
                done(arm, rate, seed)
    lines = recorded.lines()
    note = (
        "Top-1 in percent of 360 of scikit-learn's digits, mean ± standard error over seeds: tf_efficientnet_lite0 "
        "with ImageNet weights, fine-tuned on 503 other digits at 64 px in batches of 2, two "
        "epochs. CPU seconds are of "
        "the whole commands, start of Python included."
    )
    publish(args.out, [note, "", *machines(lines), "", *table(lines)])


if __name__ == "__main__":
    main()
