"""From scratch: a small network with each kind of normalization, at its own learning rate.

    python benchmarks/scratch.py --train train.tar --test test.tar --arms bn gn-8 gn-pn-8
    python benchmarks/scratch.py --train train.tar --test test.tar --model "small ViT" --arms
    layer-norm-noise-1 lnn-1 python benchmarks/scratch.py --table

The ResNet is that of ablations.py, the ViT has 4 blocks of 64 features, both see pictures of 12 px.
Converted layers are at full strength from the first step. The frozen statistics of a network that
was never trained are no normalization. Pictures, training, the search of a learning rate, seeds and
the table are those of evidence.py.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import timm
import torch
from ablations import network
from evidence import RESULTS, main
from evidence_arms import ARMS, convert
from evidence_data import Epochs, Pictures, draw
from evidence_train import line_of, train
from torch import nn

MIDDLE = {8: 1e-3, 64: 3e-3}
VIT = {"img_size": 12, "patch_size": 3, "embed_dim": 64, "depth": 4, "num_heads": 4}
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "small ResNet": lambda classes: network(channels=3, width=16, blocks=1, classes=classes),
    "small ViT": lambda classes: timm.create_model(
        "vit_tiny_patch16_224", num_classes=classes, **VIT
    ),
}


def run(args: Namespace, data: Pictures, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Train once, and return the line of the run."""
    began, worked = time.monotonic(), time.process_time()
    torch.manual_seed(key["seed"])
    model = convert(
        NETWORKS[args.model](1 + max(label for _, label in data.test)), ARMS[key["arm"]]
    )
    epochs = Epochs(
        draw(data.pool, key["images"], key["seed"]), args.img_size, key["seed"], data.flip
    )
    loss = train(model, epochs, args, key, ramp=0.0)
    seconds, worked = time.monotonic() - began, time.process_time() - worked
    return [{**line_of(model, args, data, key, seconds, worked), "train_loss": loss}]


if __name__ == "__main__":
    main(
        __doc__,
        run,
        MIDDLE,
        RESULTS / "scratch.jsonl",
        model="small ResNet",
        img_size=12,
        images=5000,
        epochs=10,
        batch_sizes=[64],
    )
