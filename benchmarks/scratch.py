r"""From scratch: a small network with each kind of normalization, at its own learning rate.

    python benchmarks/scratch.py --train train.tar --test test.tar --arms bn gn-8 gn-pn-8
    python benchmarks/scratch.py --train train.tar --test test.tar --model "small ViT" \
        --arms layer-norm-noise-1 lnn-1
    python benchmarks/scratch.py --table

The ResNet is that of ablations.py, the ViT has 4 blocks of 64 features, both see pictures of 12 px.
Converted layers are at full strength from the first step. The frozen statistics of a network that
was never trained are no normalization. Pictures, training, the search of a learning rate, seeds and
the table are those of evidence.py.
"""

from __future__ import annotations

from argparse import Namespace

import timm
import torch
from ablations import network
from evidence import main
from evidence_arms import ARMS, convert
from evidence_data import Epochs, Pictures, draw
from evidence_train import Watch, line_of, train
from harness import Line
from torch import nn

MIDDLE = {8: 1e-3, 64: 3e-3}
VIT = {"img_size": 12, "patch_size": 3, "embed_dim": 64, "depth": 4, "num_heads": 4}


def build(name: str, classes: int) -> nn.Module:
    """Build a network with random weights."""
    if name == "small ResNet":
        return network(channels=3, width=16, blocks=1, classes=classes)
    return timm.create_model("vit_tiny_patch16_224", num_classes=classes, **VIT)


def run(args: Namespace, data: Pictures, key: Line) -> list[Line]:
    """Train once, and return the line of the run."""
    watch = Watch()
    torch.manual_seed(key["seed"])
    model = convert(build(args.model, data.classes), ARMS[key["arm"]])
    pictures = draw(data.pool, key["images"], key["seed"])
    epochs = Epochs(pictures, args.img_size, key["seed"], data.flip)
    loss = train(model, epochs, args, key, ramp=0.0)
    return [{**line_of(model, args, data, key, watch.seconds()), "train_loss": loss}]


if __name__ == "__main__":
    main(
        __doc__,
        run,
        MIDDLE,
        "scratch.jsonl",
        model="small ResNet",
        img_size=12,
        images=5000,
        epochs=10,
        batch_sizes=[64],
    )
