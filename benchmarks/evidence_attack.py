"""Top-1 under attack, after fine-tuning: FGSM and PGD on the networks of the evidence, each against
its best baseline.

    python benchmarks/evidence_attack.py --checkpoint efficientnet-lite0.pth --train train.tar
    --test test.tar python benchmarks/evidence_attack.py --table

Each arm's network is trained as in evidence.jsonl, at its learning rate there (batches of 8, 500
pictures), and measured on the first pictures of each test class. A seed of every arm is done before
the next. The lines go to evidence_attack.jsonl, the table to evidence_attack.md; started again, the
script goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from evidence_arms import ARMS, convert, trained_network
from evidence_data import HALF, Epochs, Labelled, cifar, draw, still
from evidence_table import SETUP, Line, Setup, error
from evidence_train import file_name, machine, train
from torch import nn

from retrofit.attack import Attack

RESULTS = Path(__file__).parent / "results"
AGAINST = {
    "bn": None,
    "bn-noise-0.1": "bn",
    "bnn": "bn",
    "bnn-0.1": "bn-noise-0.1",
    "bn-frozen": None,
    "ln": "bn-frozen",
}
ATTACKS = [Attack(kind, n / 255, HALF, HALF) for n in (1, 4) for kind in ("fgsm", "pgd")]
MODEL = "tf_efficientnet_lite0"


def trained(run: Line, args: argparse.Namespace, pool: Labelled) -> nn.Module:
    """Train a run of the evidence again."""
    model = convert(trained_network(MODEL, args.checkpoint, 10, run["seed"]), ARMS[run["arm"]])
    epochs = Epochs(draw(pool, run["images"], run["seed"]), run["img_size"], run["seed"], flip=True)
    settings = argparse.Namespace(
        **{name: run[name] for name in ("epochs", "warmup_epochs", "clip_grad", "opt")}
    )
    train(model, epochs, settings, run)
    return model.eval()


def attacked(model: nn.Module, run: Line, pictures: Labelled) -> dict[str, float]:
    """Return top-1 in percent without attack and under each."""
    images, labels = still(pictures, run["img_size"])
    found = dict.fromkeys(["clean", *map(str, ATTACKS)], 0)
    for x, y in zip(images.split(50), labels.split(50), strict=True):
        with torch.no_grad():
            hit = model(x).argmax(1) == y
            found["clean"] += int(hit.sum())
            for attack in ATTACKS if hit.any() else []:
                changed = attack(model, x[hit], y[hit])
                found[str(attack)] += int((model(changed).argmax(1) == y[hit]).sum())
    return {name: 100 * count / len(labels) for name, count in found.items()}


def table(lines: list[Line]) -> str:
    """Return top-1 of each arm, with the paired difference from its baseline over seeds."""
    names = ["clean", *map(str, ATTACKS)]
    text = [
        f"{MODEL} fine-tuned on 500 pictures of CIFAR-10 at 64 px, batches of 8; {lines[0]['pictures']} test pictures.",
        "Top-1 in percent, mean over seeds; in brackets the difference from the named arm, paired by seed, ± standard",
        "error over seeds (? with one).",
        "",
        f"| network | seeds | {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for arm, other in AGAINST.items():
        own = {line["seed"]: line["top1"] for line in lines if line["arm"] == arm}
        theirs = {line["seed"]: line["top1"] for line in lines if line["arm"] == other}
        cells = []
        for name in names if own else []:
            gains = [own[seed][name] - theirs[seed][name] for seed in own.keys() & theirs.keys()]
            gain = f" ({sum(gains) / len(gains):+.1f} ± {error(gains)})" if gains else ""
            cells.append(f"{sum(one[name] for one in own.values()) / len(own):.1f}{gain}")
        label = ARMS[arm].label + (f" (against {ARMS[other].label})" if other else "")
        text += [f"| {label} | {len(own)} | {' | '.join(cells)} |"] if own else []
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="write the table, train nothing")
    parser.add_argument("--checkpoint")
    parser.add_argument("--train", metavar="TAR")
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument("--each", type=int, default=50, help="test pictures of each class")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "evidence_attack.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out.exists()
        else []
    )
    if not args.table:
        every = [json.loads(line) for line in (RESULTS / "evidence.jsonl").read_text().splitlines()]
        wanted: dict[str, Any] = {"data": "cifar10", "images": 500, "model": MODEL, "batch": 8}
        setup = Setup(
            [line for line in every if all(line[name] == value for name, value in wanted.items())]
        )
        data = cifar(args.train, args.test, 100)
        pictures = [
            one
            for label in range(10)
            for one in [two for two in data.test if two[1] == label][: args.each]
        ]
        for seed in args.seeds:
            for run in (
                line for arm in AGAINST for line in setup.of(arm, 8) if line["seed"] == seed
            ):
                key = {name: run[name] for name in (*SETUP, "arm", "batch", "lr", "seed")}
                if any(all(line[name] == value for name, value in key.items()) for line in done):
                    continue
                top1 = attacked(trained(run, args, data.pool), run, pictures)
                done.append({**key, "top1": top1, "pictures": len(pictures), "machine": machine()})
                with args.out.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(file_name(key), top1, flush=True)
    if done:
        args.out.with_suffix(".md").write_text(table(done))
        print(table(done))


if __name__ == "__main__":
    main()
