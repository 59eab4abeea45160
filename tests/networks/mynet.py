"""A network of a user's own: a small U-Net with BatchNorm, as it might stand in a file of
theirs.
"""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.norm, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.down1, self.down2, self.merge = Block(3, 8), Block(8, 16), Block(24, 8)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.head = nn.Conv2d(8, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        return self.head(self.merge(torch.cat([fine, self.up(coarse)], 1)))


def build(num_classes: int = 2) -> UNet:
    model = UNet(num_classes)
    model.pretrained_cfg = {
        "input_size": (3, 64, 64),
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
    }
    return model


class Classifier(nn.Module):  # a classifier, for the commands that count classes right
    def __init__(self, num_classes: int = 3, in_chans: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.features = nn.Sequential(nn.Conv2d(in_chans, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def small(num_classes: int = 3) -> Classifier:
    model = Classifier(num_classes)
    model.pretrained_cfg = {"input_size": (3, 32, 32), "crop_pct": 1.0}
    return model


def broken() -> nn.Module:
    raise RuntimeError("no weights\nat all")


def nothing() -> str:
    return "a network"


NUMBER = 3
