"""A run of reproduce.py: a network trained from scratch as the authors do, epoch by epoch, so that
a run that was stopped goes on from its last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from ablations import network
from evidence_data import Labelled
from evidence_train import file_name, measure
from harness import Line, machine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot, pad
from torchvision.transforms import ColorJitter
from torchvision.transforms.functional import to_tensor

import retrofit
from retrofit.networks.cifar import resnet18

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
FULL_EPOCHS = 200


@dataclass(frozen=True)
class Arm:
    """A network to train.

    Attributes:
        label: What the table calls it.
        to: Target of the conversion; None: the network as it is.
        options: Of the conversion.
        dropout: Rate of the dropout before the classifier.
    """

    label: str
    to: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0


DROPOUT = {
    f"bn-drop-{rate}": Arm(f"BatchNorm with dropout {rate}", dropout=rate)
    for rate in (0.1, 0.3, 0.5)
}
ARMS = {
    "bn": Arm("BatchNorm"),
    "bn-noise": Arm("BatchNorm with noise 0.4", "bnn", {"alpha": 0.0, "noise": 0.4}),
    "bnn-quiet": Arm("bnn, no noise", "bnn", {"noise": 0.0}),
    "bnn": Arm("bnn, noise 0.4", "bnn", {"noise": 0.4}),
    **DROPOUT,
    "ln": Arm("LayerNorm"),
    "ln-noise": Arm("LayerNorm with noise 1", "lnn", {"alpha": 0.0, "noise": 1.0}),
    "lnn-quiet": Arm("lnn, no noise", "lnn", {"noise": 0.0}),
    "lnn": Arm("lnn, noise 1", "lnn", {"noise": 1.0}),
}


def build(key: Line, classes: int) -> nn.Module:
    """Build a run's network, at full strength."""
    torch.manual_seed(key["seed"])
    arm = ARMS[key["arm"]]
    model = build_vit(key, classes) if key["network"] == "vit" else build_resnet(key, classes)
    if arm.dropout:
        model[-1] = nn.Sequential(nn.Dropout(arm.dropout), model[-1])
    if arm.to is not None:
        model, _ = retrofit.convert(model, arm.to, input_size=(3, 32, 32), **arm.options)
        retrofit.set_strength(model, 1.0)
    return model.to(memory_format=torch.channels_last)


def build_vit(key: Line, classes: int) -> nn.Module:
    """Build a ViT of a width and a depth."""
    return timm.create_model(
        "vit_tiny_patch16_224",
        num_classes=classes,
        img_size=32,
        patch_size=4,
        mlp_ratio=3.0,
        embed_dim=key["width"],
        depth=key["depth"],
        num_heads=8 if key["width"] > 128 else 4,
    )


def build_resnet(key: Line, classes: int) -> nn.Module:
    """Build a ResNet of a width and a depth, with He's first weights."""
    if key["network"] == "resnet18":
        model = resnet18(classes)
    else:
        model = network(3, key["width"], (key["depth"] - 2) // 6, classes)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def rate(key: Line, epoch: int) -> float:
    """Return the learning rate of an epoch."""
    share = epoch / key["epochs"]
    highest = key["lr"]
    if key["network"] != "vit":
        return highest * 0.1 ** int(share / 0.3 + 1e-9)
    warm = max(1, key["epochs"] // 20)
    if epoch < warm:
        return highest * (0.1 + 0.9 * epoch / warm)
    length = 50 if is_full(key) else key["epochs"] - warm
    place = epoch - warm
    # CosineAnnealingWarmRestarts(T_0=50, T_mult=2)
    while place >= length:
        place -= length
        length *= 2
    return 1e-6 + (highest - 1e-6) * (1 + math.cos(math.pi * place / length)) / 2


def is_full(key: Line) -> bool:
    """Tell whether a run has the authors' length."""
    return key["epochs"] == FULL_EPOCHS


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
        self.classes = int(self.labels.max()) + 1
        self.test = _standardized(test, device)
        self.val = _standardized(val, device) if val else None
        self.device = device

    def batches(self, key: Line, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give an epoch's whole batches, the same for every arm; labels are shares of classes after
        MixUp.
        """
        generator = torch.Generator().manual_seed(1000 * key["seed"] + epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * key["seed"] + epoch)
            jitter = ColorJitter(0.1, 0.1, 0.1) if is_full(key) and key["augment"] else None
            order = torch.randperm(len(self.train), generator=generator)
            for part in order.split(key["batch"])[: len(order) // key["batch"]]:
                chosen = part.to(self.device)
                images = self.train[chosen]
                labels = self.labels[chosen]
                if key["augment"]:
                    images = crop_and_flip(images, generator)
                if jitter is not None:
                    images = torch.stack([jitter(image) for image in images])
                    images, labels = mix_up(images, labels, self.classes)
                yield standardize(images), labels


def _tensors(pictures: Labelled, device: str) -> tuple[Tensor, Tensor]:
    images = torch.stack([to_tensor(picture) for picture, _ in pictures])
    return images.to(device), torch.tensor([label for _, label in pictures], device=device)


def _standardized(pictures: Labelled, device: str) -> tuple[Tensor, Tensor]:
    images, labels = _tensors(pictures, device)
    return standardize(images), labels


def standardize(images: Tensor) -> Tensor:
    """Map (N, 3, H, W) of 0 to 1 to the mean and standard deviation of CIFAR-10."""
    mean, std = (torch.tensor(each, device=images.device).view(3, 1, 1) for each in (MEAN, STD))
    return ((images - mean) / std).contiguous(memory_format=torch.channels_last)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each picture by up to four pixels, black where nothing is, and mirror half of them."""
    count = len(images)
    device = images.device
    offsets = torch.randint(9, (2, count, 1), generator=generator).to(device)
    rows, columns = (offset + torch.arange(32, device=device) for offset in offsets)
    flipped = (torch.rand(count, 1, generator=generator) < 0.5).to(device)
    columns = torch.where(flipped, columns.flip(1), columns)
    wide = pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)
    picture = torch.arange(count, device=device)[:, None, None]
    return wide[picture, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mix_up(images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mix each picture with the one before it, in a share that is uniform from 0 to 1
    (torchvision's MixUp).
    """
    share = float(torch.rand(()))
    shares = one_hot(labels, classes).float()
    return images.lerp(images.roll(1, 0), 1 - share), shares.lerp(shares.roll(1, 0), 1 - share)


class Training:
    """A run, from its last finished epoch if it was stopped.

    Args:
        key: What tells the run from others.
        data: The pictures.
        folder: Of the files with unfinished runs.
    """

    def __init__(self, key: Line, data: Data, folder: Path) -> None:
        self.key = key
        self.data = data
        self.path = state_file(folder, key)
        self.model = build(key, data.classes).to(data.device)
        if key["network"] == "vit":
            kind: Any = torch.optim.AdamW
            settings = {"weight_decay": 0.05}
        else:
            kind = torch.optim.SGD
            settings = {"weight_decay": 5e-4, "momentum": 0.9}
        self.optimizer = kind(self.model.parameters(), key["lr"], **settings)
        torch.manual_seed(key["seed"])
        self.epoch = 0
        self.seconds = 0.0
        self.curve: list[float] = []
        self.train_curve: list[float] = []
        if self.path.exists():
            self.restore()

    def restore(self) -> None:
        """Go back to the end of the last epoch."""
        state = torch.load(self.path, map_location=self.data.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"].cpu())
        if self.data.device != "cpu":
            torch.cuda.set_rng_state(state["random_cuda"].cpu())
        self.epoch = state["epoch"]
        self.seconds = state["seconds"]
        self.curve = state["curve"]
        self.train_curve = state["train_curve"]

    def save(self) -> None:
        """Keep what is needed to go on from here."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "epoch": self.epoch,
            "seconds": self.seconds,
            "curve": self.curve,
            "train_curve": self.train_curve,
        }
        if self.data.device != "cpu":
            state["random_cuda"] = torch.cuda.get_rng_state()
        # A file is whole or it is not there, also when the process is killed.
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.path)

    def train_epoch(self) -> None:
        """Train for an epoch, and measure the network on the test pictures."""
        began = time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.key, self.epoch)
        self.model.train()
        losses = []
        for images, labels in self.data.batches(self.key, self.epoch):
            loss = cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.seconds += time.process_time() - began
        self.epoch += 1
        self.train_curve.append(round(float(torch.stack(losses).mean()), 5))
        self.curve.append(round(measure(self.model, *self.data.test)["top1"], 2))
        print(
            f"epoch {self.epoch}: loss {self.train_curve[-1]:.3f}, top-1 {self.curve[-1]}",
            flush=True,
        )

    def line(self) -> Line:
        """Return the line of the finished run."""
        data = self.data
        test = measure(self.model, *data.test)
        return {
            **self.key,
            "test": self.curve[-1],
            "curve": self.curve,
            "train_curve": self.train_curve,
            **({} if data.val is None else self.fit()),
            "test_loss": round(test["loss"], 4),
            "images": len(data.train),
            "test_images": len(data.test[1]),
            "cpu_seconds": round(self.seconds, 1),
            "machine": machine() if data.device == "cpu" else torch.cuda.get_device_name(),
            "correct": test["correct"],
        }

    def fit(self) -> dict[str, float]:
        """Measure the network, in evaluation mode, on its training and its validation pictures."""
        seen = measure(self.model, standardize(self.data.train), self.data.labels)
        unseen = measure(self.model, *self.data.val)
        return {
            "fit": round(seen["top1"], 2),
            "fit_loss": round(seen["loss"], 5),
            "val": round(unseen["top1"], 2),
        }


def state_file(folder: Path, key: Line) -> Path:
    """Return the file that holds an unfinished run."""
    return folder / f"{file_name(key)}.pt"


def run(key: Line, data: Data, state: Path, until: float) -> Line:
    """Train a run to its end, from its last finished epoch if it was stopped, and return its line.

    Args:
        key: What tells the run from others.
        data: The pictures.
        state: Folder of unfinished runs.
        until: Begin no epoch after this time, in Unix seconds.

    Returns:
        The line. The file in `state` stays until the line is recorded.

    Raises:
        SystemExit: An epoch would begin after `until`.
    """
    training = Training(key, data, state)
    while training.epoch < key["epochs"]:
        if time.time() > until:
            raise SystemExit("the time is over")
        training.train_epoch()
        training.save()
    return training.line()
