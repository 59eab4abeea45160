r"""Deep re-training: the later half of a trained network starts from random weights, and all of it
is trained.

    python benchmarks/half_reset.py --checkpoint efficientnet-lite0.pth --train train.tar \
        --test test.tar --arms bn bn-frozen ln ln-pn gn-pn
    python benchmarks/half_reset.py --table

The later half of the convolutions, in the order of the network, and the BatchNorm layers behind
them are set to what they are in a new network. As nothing is known of what they see, all running
statistics are then taken from the training pictures: for every arm, before its conversion.
Pictures, training, the search of a learning rate, seeds and the table are those of evidence.py.
"""

from __future__ import annotations

from functools import partial

import timm
import torch
from evidence import MIDDLE, main
from evidence_train import run, take_statistics
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def reset(model: nn.Module, images: Tensor) -> None:
    """Set the later half of the convolutions and their norms to a new network's; take all running
    statistics anew.
    """
    fresh = dict(timm.create_model(model.default_cfg["architecture"]).named_modules())
    names = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | _BatchNorm)
    ]
    for name in names[len(names) // 4 * 2 :]:
        model.get_submodule(name).load_state_dict(fresh[name].state_dict())
    with torch.no_grad():
        take_statistics(model, images)


if __name__ == "__main__":
    main(__doc__, partial(run, prepare=reset), MIDDLE, "half_reset.jsonl")
