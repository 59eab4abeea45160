r"""Top-1 under attack, after fine-tuning: FGSM and PGD on the networks of the evidence, each
against its best baseline.

    python benchmarks/evidence_attack.py --checkpoint efficientnet-lite0.pth --train train.tar \
        --test test.tar
    python benchmarks/evidence_attack.py --table

Each arm's network is trained as in evidence.jsonl, at its learning rate there (batches of 8, 500
pictures), and measured on the first pictures of each test class. A seed of every arm is done before
the next. The lines go to evidence_attack.jsonl, the table to evidence_attack.md; started again, the
script goes on with what is missing.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from evidence_arms import ARMS, convert, trained_network
from evidence_data import HALF, Epochs, Labelled, cifar, draw, still
from evidence_kept import NAMES, of_arms, recorded_setup
from evidence_table import SETUP
from evidence_train import train
from harness import RESULTS, Line, Recorded, command_line, machine, markdown, publish, with_error
from torch import nn

from retrofit.attack import Attack

AGAINST = {
    "bn": "",
    "bn-noise-0.1": "bn",
    "bnn": "bn",
    "bnn-0.1": "bn-noise-0.1",
    "bn-frozen": "",
    "ln": "bn-frozen",
}
ATTACKS = [Attack(kind, n / 255, HALF, HALF) for n in (1, 4) for kind in ("fgsm", "pgd")]
COLUMNS = ["clean", *map(str, ATTACKS)]
MODEL = "tf_efficientnet_lite0"
BATCH = 8


def trained(run: Line, args: argparse.Namespace, pool: Labelled) -> nn.Module:
    """Train a run of the evidence again."""
    model = convert(trained_network(MODEL, args.checkpoint, 10, run["seed"]), ARMS[run["arm"]])
    epochs = Epochs(draw(pool, run["images"], run["seed"]), run["img_size"], run["seed"], flip=True)
    train(model, epochs, argparse.Namespace(**{name: run[name] for name in SETUP}), run)
    return model.eval()


def attacked(model: nn.Module, run: Line, pictures: Labelled) -> dict[str, float]:
    """Return top-1 in percent without attack and under each."""
    images, labels = still(pictures, run["img_size"])
    right = dict.fromkeys(COLUMNS, 0)
    for x, y in zip(images.split(50), labels.split(50), strict=True):
        with torch.no_grad():
            hit = model(x).argmax(1) == y
        right["clean"] += int(hit.sum())
        if not hit.any():
            continue
        for attack in ATTACKS:
            changed = attack(model, x[hit], y[hit])
            with torch.no_grad():
                right[str(attack)] += int((model(changed).argmax(1) == y[hit]).sum())
    return {name: 100 * count / len(labels) for name, count in right.items()}


def table(lines: list[Line]) -> list[str]:
    """Return top-1 of each arm, with the paired difference from its baseline over seeds."""
    runs = of_arms(lines, list(AGAINST), BATCH)
    top1 = {arm: {line["seed"]: line["top1"] for line in own} for arm, own in runs.items()}
    rows = []
    for arm, seeds in top1.items():
        other = AGAINST[arm]
        baseline = top1.get(other, {})
        label = ARMS[arm].label + (f" (against {ARMS[other].label})" if other else "")
        rows.append([label, len(seeds)])
        for column in COLUMNS:
            common = sorted(seeds.keys() & baseline.keys())
            gains = [seeds[seed][column] - baseline[seed][column] for seed in common]
            gain = f" ({with_error(gains, '+')})" if gains else ""
            rows[-1].append(f"{statistics.fmean(one[column] for one in seeds.values()):.1f}{gain}")
    return [
        f"{MODEL} fine-tuned on 500 pictures of CIFAR-10 at 64 px, batches of 8; {lines[0]['pictures']} test pictures.",
        "Top-1 in percent, mean over seeds; in brackets the difference from the named arm, paired by seed, ± standard",
        "error over seeds (? with one).",
        "",
        *markdown(["network", "seeds", *COLUMNS], rows),
    ]


def attack_all(args: argparse.Namespace) -> None:
    """Attack the networks that are not done, a seed of every arm before the next."""
    setup = recorded_setup(RESULTS / "evidence.jsonl", MODEL)
    data = cifar(args.train, args.test, 100)
    pictures = [
        picture
        for label in range(data.classes)
        for picture in [one for one in data.test if one[1] == label][: args.each]
    ]

    def made(run: Line, key: Line) -> list[Line]:
        top1 = attacked(trained(run, args, data.pool), run, pictures)
        return [{**key, "top1": top1, "pictures": len(pictures), "machine": machine()}]

    for seed in args.seeds:
        for arm in AGAINST:
            for run in setup.of(arm, BATCH):
                if run["seed"] == seed:
                    key = {name: run[name] for name in NAMES}
                    Recorded(args.out).done(key, lambda run=run, key=key: made(run, key))


def main() -> None:
    parser = command_line(
        __doc__,
        *("--table", "--checkpoint", "--train", "--test", "--seeds"),
        out="evidence_attack.jsonl",
    )
    parser.add_argument("--each", type=int, default=50, help="test pictures of each class")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.table:
        attack_all(args)
    publish(args.out, table(Recorded(args.out).lines()))


if __name__ == "__main__":
    main()
