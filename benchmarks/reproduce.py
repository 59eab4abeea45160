r"""Tables 1 and 2 and figures 2 to 4 of Eftekhari & Papyan: small on two cores, or whole on a GPU.

The miniature takes hours of a core:

    python benchmarks/reproduce.py --train train.tar --test test.tar
    python benchmarks/reproduce.py --train train.tar --test test.tar \
        --parts figure-4 figure-2 figure-3
    python benchmarks/reproduce.py --train train.tar --test test.tar \
        --parts find-epochs-resnet find-epochs-vit --seeds 0
    python benchmarks/reproduce.py --train train.tar --test test.tar --full --device cuda
    python benchmarks/reproduce.py --table

train and test are tars with one folder a class, CIFAR-10 of 32 px. The settings are those of the
authors' code (github.com/DanielEftekhari/normality-normalization): He's first weights, SGD with
0.1, divided by 10 after 60, 120 and 180 of 200 epochs, momentum 0.9, weight decay 5e-4 on all
parameters, batches of 128, no augmentation; for the ViT patch 4, AdamW with 1e-3, weight decay 0.05
on all parameters, batches of 32. --full has their length and networks: ResNet-18 with a 3x3 stem
and no pooling; a ViT of 8 layers, 768/2304, with their augmentation, MixUp and warm restarts.

The miniature has ResNet-20 (16 to 64 channels) and a ViT of 4 layers of 128/384, for 10 epochs,
with the steps after 3, 6 and 9, and one cosine for the ViT. Every arm is trained as the authors do,
and with RandomCrop (padding 4) and mirroring. The figures vary the batch size, the width and the
depth of a ResNet-8 that is trained for 5 epochs on 5,000 pictures. Other batch sizes have their
learning rate in proportion, of which the paper says nothing.

The part "until it fits" asks whether the power transform helps where the paper measures it: after
training to a loss near zero. A small ResNet-20 and the ViT are trained on 5,000 pictures, without
augmentation, for as many epochs as the plain network needs to get 99.5 % of its training pictures
right with a loss below 0.02 (both in evaluation mode, after the last epoch; the parts
"find-epochs-resnet" and "find-epochs-vit" try lengths, the shortest first). All arms then have that
length. Written before the first of these runs:

- A gain of the transform is: bnn with noise 0.4 (lnn with noise 1) is above BatchNorm (LayerNorm)
  with the same noise, in the test top-1 of the last epoch, by more than two standard errors of the
  paired difference over seeds, and by more than two over test pictures, with at least four seeds.
- Nothing else counts as one: no other epoch, arm or measure. No run is stopped early or left out,
  and the number of seeds does not depend on what comes out.
- Dropout stands at the rate whose validation top-1 is best with the first seed. The validation
  pictures are those of the training tar that no seed's draw took.

A seed decides the first weights, which pictures the figures take, their order, their augmentation
and the noise; all arms share them. Each finished run is a line of reproduce.jsonl, and a run that
was stopped goes on from its last epoch (--state).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from ablations import network as small_resnet
from evidence_data import Labelled, draw, read_tar
from evidence_table import machines, paired, spread
from evidence_train import file_name, machine, measure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torchvision.transforms import ColorJitter
from torchvision.transforms.functional import to_tensor

import retrofit
from retrofit.networks.cifar import resnet18

RESULTS = Path(__file__).parent / "results"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Key = dict[str, Any]

ARMS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "bn": ("BatchNorm", None, {}),
    "bn-noise": ("BatchNorm with noise 0.4", "bnn", {"alpha": 0.0, "noise": 0.4}),
    "bnn-quiet": ("bnn, no noise", "bnn", {"noise": 0.0}),
    "bnn": ("bnn, noise 0.4", "bnn", {"noise": 0.4}),
    "bn-drop-0.1": ("BatchNorm with dropout 0.1", None, {}),
    "bn-drop-0.3": ("BatchNorm with dropout 0.3", None, {}),
    "bn-drop-0.5": ("BatchNorm with dropout 0.5", None, {}),
    "ln": ("LayerNorm", None, {}),
    "ln-noise": ("LayerNorm with noise 1", "lnn", {"alpha": 0.0, "noise": 1.0}),
    "lnn-quiet": ("lnn, no noise", "lnn", {"noise": 0.0}),
    "lnn": ("lnn, noise 1", "lnn", {"noise": 1.0}),
}
"""Label, target of the conversion (None: the network as it is) and its options."""

DROPOUT = {"bn-drop-0.1": 0.1, "bn-drop-0.3": 0.3, "bn-drop-0.5": 0.5}
"""Rate of the dropout before the classifier."""

BATCH, LAYER = ("bn", "bn-noise", "bnn-quiet", "bnn"), ("ln", "ln-noise", "lnn")
RESNET = {"network": "resnet", "width": 16, "depth": 20, "batch": 128, "lr": 0.1, "epochs": 10}
SMALL = {**RESNET, "depth": 8, "epochs": 5, "augment": False, "images": 5000}
VIT = {"network": "vit", "width": 128, "depth": 4, "batch": 32, "lr": 1e-3, "epochs": 10}
FIT_IMAGES = 5000
FIT_RESNET = {**RESNET, "width": 8, "augment": False, "images": FIT_IMAGES}
FIT_VIT = {**VIT, "augment": False, "images": FIT_IMAGES}
FIT_LENGTHS = (40, 60, 90, 120, 180)
FULL_RESNET = {
    "network": "resnet18",
    "width": 64,
    "depth": 18,
    "batch": 128,
    "lr": 0.1,
    "epochs": 200,
}
FULL_VIT = {"network": "vit", "width": 768, "depth": 8, "batch": 32, "lr": 1e-3, "epochs": 200}


PAIR = ("bn-noise", "bnn")
PARTS: dict[str, list[tuple[Key, Sequence[str]]]] = {
    "tables": [
        ({**base, "augment": augment}, arms)
        for augment in (False, True)
        for base, arms in ((RESNET, BATCH), (VIT, LAYER))
    ],
    "figure-4": [
        ({**SMALL, "batch": batch, "lr": 0.1 * batch / 128}, PAIR) for batch in (128, 32, 8, 2)
    ],
    "figure-2": [({**SMALL, "width": width}, PAIR) for width in (4, 8, 16, 32)],
    "figure-3": [({**SMALL, "depth": depth}, PAIR) for depth in (8, 14, 20)],
    "find-epochs-resnet": [({**FIT_RESNET, "epochs": epochs}, ["bn"]) for epochs in FIT_LENGTHS],
    "find-epochs-vit": [({**FIT_VIT, "epochs": epochs}, ["ln"]) for epochs in FIT_LENGTHS],
    "full": [
        ({**FULL_RESNET, "augment": False}, BATCH),
        ({**FULL_VIT, "augment": True}, LAYER),
    ],
}
"""The settings and the arms of each part."""


def wanted(parts: Sequence[str], seeds: Sequence[int]) -> Iterator[Key]:
    """Give what tells each run from the others, in the order of running: a seed of every arm, then
    the next seed.
    """
    for part in parts:
        for seed in seeds:
            for changes, arms in PARTS[part]:
                yield from ({**changes, "arm": arm, "seed": seed} for arm in arms)


def build(key: Key, classes: int) -> nn.Module:
    """Build a run's network, at full strength."""
    torch.manual_seed(key["seed"])
    if key["network"] == "vit":
        shape = {
            "embed_dim": key["width"],
            "depth": key["depth"],
            "num_heads": 8 if key["width"] > 128 else 4,
        }
        model = timm.create_model(
            "vit_tiny_patch16_224",
            num_classes=classes,
            img_size=32,
            patch_size=4,
            mlp_ratio=3.0,
            **shape,
        )
    else:
        model = (
            resnet18(classes)
            if key["network"] == "resnet18"
            else small_resnet(3, key["width"], (key["depth"] - 2) // 6, classes)
        )
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if key["arm"] in DROPOUT:
        model[-1] = nn.Sequential(nn.Dropout(DROPOUT[key["arm"]]), model[-1])
    _, to, options = ARMS[key["arm"]]
    if to is not None:
        model, _ = retrofit.convert(model, to, input_size=(3, 32, 32), **options)
        retrofit.set_strength(model, 1.0)
    return model.to(memory_format=torch.channels_last)


def rate(key: Key, epoch: int) -> float:
    """Return the learning rate of an epoch."""
    share, whole = epoch / key["epochs"], key["lr"]
    if key["network"] != "vit":
        return whole * 0.1 ** int(share / 0.3 + 1e-9)
    warm = max(1, key["epochs"] // 20)
    if epoch < warm:
        return whole * (0.1 + 0.9 * epoch / warm)
    length = 50 if key["epochs"] == FULL_VIT["epochs"] else key["epochs"] - warm
    place = epoch - warm
    while place >= length:  # CosineAnnealingWarmRestarts(T_0=50, T_mult=2)
        place, length = place - length, 2 * length
    return 1e-6 + (whole - 1e-6) * (1 + math.cos(math.pi * place / length)) / 2


class Data:
    """Pictures on a device: (N, 3, 32, 32) of 0 to 1, with labels.

    Args:
        train: To train on.
        test: To measure on.
        device: Where they lie.
        val: To choose by; none where nothing is chosen.
    """

    def __init__(
        self, train: Labelled, test: Labelled, device: str, val: Labelled | None = None
    ) -> None:
        self.train, self.labels = _tensors(train, device)
        images, self.answers = _tensors(test, device)
        self.test = standardize(images)
        self.val = _tensors(val, device) if val else None
        self.device = device

    def batches(self, key: Key, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give an epoch's whole batches, the same for every arm; labels are shares of classes after
        MixUp.
        """
        generator = torch.Generator().manual_seed(1000 * key["seed"] + epoch)
        full = key["epochs"] == FULL_VIT["epochs"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * key["seed"] + epoch)
            jitter = ColorJitter(0.1, 0.1, 0.1) if full and key["augment"] else None
            order = torch.randperm(len(self.train), generator=generator)
            for part in order.split(key["batch"])[: len(order) // key["batch"]]:
                chosen = part.to(self.device)
                images, labels = self.train[chosen], self.labels[chosen]
                if key["augment"]:
                    images = crop_and_flip(images, generator)
                if jitter is not None:
                    images = torch.stack([jitter(one) for one in images])
                    images, labels = mix_up(images, labels, int(self.labels.max()) + 1)
                yield standardize(images), labels


def _tensors(pictures: Labelled, device: str) -> tuple[Tensor, Tensor]:
    images = torch.stack([to_tensor(picture) for picture, _ in pictures])
    return images.to(device), torch.tensor([label for _, label in pictures], device=device)


def standardize(images: Tensor) -> Tensor:
    """Map (N, 3, H, W) of 0 to 1 to the mean and standard deviation of CIFAR-10."""
    mean, std = (torch.tensor(one, device=images.device).view(3, 1, 1) for one in (MEAN, STD))
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each picture by up to four pixels, black where nothing is, and mirror half of them."""
    count, device = len(images), images.device
    offsets = torch.randint(9, (2, count, 1), generator=generator).to(device)
    rows, columns = (offset + torch.arange(32, device=device) for offset in offsets)
    flipped = (torch.rand(count, 1, generator=generator) < 0.5).to(device)
    columns = torch.where(flipped, columns.flip(1), columns)
    wide = pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    at = torch.arange(count, device=device)[:, None, None]
    return wide[at, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mix_up(images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mix each picture with the one before it, in a share that is uniform from 0 to 1
    (torchvision's MixUp).
    """
    share, shares = float(torch.rand(())), torch.nn.functional.one_hot(labels, classes).float()
    return images.lerp(images.roll(1, 0), 1 - share), shares.lerp(shares.roll(1, 0), 1 - share)


def run(key: Key, data: Data, state: Path, until: float) -> dict[str, Any]:
    """Train a run to its end, from its last finished epoch if it was stopped, and return its line."""
    model = build(key, int(data.labels.max()) + 1).to(data.device)
    kind: Any = torch.optim.AdamW if key["network"] == "vit" else torch.optim.SGD
    settings = (
        {"weight_decay": 0.05}
        if key["network"] == "vit"
        else {"weight_decay": 5e-4, "momentum": 0.9}
    )
    optimizer = kind(model.parameters(), key["lr"], **settings)
    torch.manual_seed(key["seed"])
    begin, seconds, curve, train_curve = 0, 0.0, [], []
    path = state / f"{file_name(key)}.pt"
    if path.exists():
        kept = torch.load(path, map_location=data.device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"].cpu())
        if data.device != "cpu":
            torch.cuda.set_rng_state(kept["random_cuda"].cpu())
        begin, seconds, curve = kept["epoch"], kept["seconds"], kept["curve"]
        train_curve = kept["train_curve"]
    measured: dict[str, Any] = {}
    for epoch in range(begin, key["epochs"]):
        if time.time() > until:
            raise SystemExit("the time is over")
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate(key, epoch)
        model.train()
        losses = []
        for images, labels in data.batches(key, epoch):
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        seconds += time.process_time() - began
        measured = measure(model, data.test, data.answers)
        curve.append(round(measured["top1"], 2))
        train_curve.append(round(float(torch.stack(losses).mean()), 5))
        print(
            f"epoch {epoch + 1}: loss {train_curve[-1]:.3f}, top-1 {curve[-1]}",
            flush=True,
        )
        kept = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        if data.device != "cpu":
            kept["random_cuda"] = torch.cuda.get_rng_state()
        torch.save(
            {
                **kept,
                "epoch": epoch + 1,
                "seconds": seconds,
                "curve": curve,
                "train_curve": train_curve,
            },
            path.with_suffix(".part"),
        )
        path.with_suffix(".part").replace(path)
    measured = measured or measure(model, data.test, data.answers)
    return {
        **key,
        "test": curve[-1],
        "curve": curve,
        "train_curve": train_curve,
        **(fit(model, data) if data.val is not None else {}),
        "test_loss": round(measured["loss"], 4),
        "images": len(data.train),
        "test_images": len(data.test),
        "cpu_seconds": round(seconds, 1),
        "machine": machine() if data.device == "cpu" else torch.cuda.get_device_name(),
        "correct": measured["correct"],
    }


def fit(model: nn.Module, data: Data) -> dict[str, float]:
    """Measure a trained network, in evaluation mode, on its training and its validation pictures."""
    seen = measure(model, standardize(data.train), data.labels)
    unseen = measure(model, standardize(data.val[0]), data.val[1])
    return {
        "fit": round(seen["top1"], 2),
        "fit_loss": round(seen["loss"], 5),
        "val": round(unseen["top1"], 2),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a table for each setting: the mean of each arm, and its paired differences."""
    text = [
        "Top-1 in percent after the last epoch, mean ± standard error over seeds (n of them). Differences are paired,",
        "seed by seed: their first error is that over seeds (? with one seed), their second that over test pictures.",
        "",
        *machines(lines),
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    same = ("network", "width", "depth", "batch", "lr", "epochs", "augment", "images")
    for line in lines:
        groups.setdefault(tuple(line[name] for name in same), []).append(line)
    for values, own in groups.items():
        now = dict(zip(same, values, strict=True))
        title = f"{now['network']}, width {now['width']}, depth {now['depth']}, batches of {now['batch']}"
        how = "RandomCrop and mirroring" if now["augment"] else "no augmentation"
        text += ["", f"## {title}, {how}", ""]
        text += [
            f"{now['images']:,} pictures, {now['epochs']} epochs, learning rate {now['lr']:g}.",
            "",
        ]
        found = {arm: [line for line in own if line["arm"] == arm] for arm in ARMS}
        found = {
            arm: sorted(runs, key=lambda one: one["seed"]) for arm, runs in found.items() if runs
        }
        others = [arm for arm in found if arm in ("bn", "bn-noise", "ln", "ln-noise")]
        heads = "".join(f" | minus {ARMS[arm][0]}" for arm in others)
        text += [f"| network | top-1 of each seed | mean{heads} | best epoch | CPU s |"]
        text += ["|" + "---|" * (5 + len(others))]
        for arm, runs in found.items():
            each = ", ".join(f"{one['test']:.1f}" for one in runs)
            gains = "".join(
                f" | {'' if arm == other else paired(runs, found[other])}" for other in others
            )
            best = statistics.fmean(max(one["curve"]) for one in runs)
            work = statistics.fmean(one["cpu_seconds"] for one in runs)
            text += [
                f"| {ARMS[arm][0]} | {each} | {spread(runs)}{gains} | {best:.1f} | {work:.0f} |"
            ]
    return "\n".join(text) + "\n"


def finished(out: Path) -> list[dict[str, Any]]:
    """Read the runs that are done."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def reproduce(args: argparse.Namespace, parts: Sequence[str]) -> None:
    """Make the runs of some parts that are missing."""
    args.state.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pool, test = read_tar(args.train), read_tar(args.test)
    for part in parts:
        for key in wanted([part], args.seeds):
            line = _line(args, key, pool, test)
            if part.startswith("find-epochs") and fits(line):
                break


def fits(line: dict[str, Any]) -> bool:
    """Tell whether a run has fitted its training pictures."""
    return line["fit"] >= 99.5 and line["fit_loss"] < 0.02


def _line(args: argparse.Namespace, key: Key, pool: Labelled, test: Labelled) -> dict[str, Any]:
    """Return the line of a run, which is made if there is none yet."""
    own = {"images": len(pool), **key}
    for line in finished(args.out):
        if all(line[name] == value for name, value in own.items()):
            return line
    print(key, flush=True)
    train = draw(pool, key["images"], key["seed"]) if "images" in key else pool
    taken = {id(picture) for picture, _ in train}
    left = [one for one in pool if id(one[0]) not in taken]
    line = run(key, Data(train, test, args.device, left), args.state, args.until)
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    (args.state / f"{file_name(key)}.pt").unlink(missing_ok=True)
    return line


def full(train: str, test: str, minutes: float, device: str = "cuda") -> None:
    """Make, or go on with, the runs of tables 1 and 2 at the authors' size, for some minutes."""
    state, until = Path("reproduce-state"), time.time() + 60 * minutes
    seeds = list(range(6))  # as many as the paper's
    args = argparse.Namespace(
        train=train, test=test, device=device, seeds=seeds, state=state, until=until
    )
    args.out = RESULTS / "reproduce.jsonl"
    reproduce(args, ["full"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="write the table from the recorded runs, train nothing"
    )
    parser.add_argument("--train", metavar="TAR")
    parser.add_argument("--test", metavar="TAR")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["tables"],
        choices=[name for name in PARTS if name != "full"],
    )
    parser.add_argument(
        "--full", action="store_true", help="the authors' networks and 200 epochs, for a GPU"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--until",
        type=float,
        default=float("inf"),
        help="begin no epoch after this time, in Unix seconds",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "reproduce.jsonl")
    parser.add_argument(
        "--state", type=Path, default=Path("reproduce-state"), help="folder for unfinished runs"
    )
    args = parser.parse_args()
    if args.table:
        args.out.with_suffix(".md").write_text(table(finished(args.out)))
        print(args.out.with_suffix(".md").read_text())
        return
    if args.train is None or args.test is None:
        parser.error("--train and --test are needed")
    torch.set_num_threads(args.threads)
    print(f"process {os.getpid()}", flush=True)
    reproduce(args, ["full"] if args.full else args.parts)


if __name__ == "__main__":
    main()
