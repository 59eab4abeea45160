r"""Federated averaging of a trained network: BatchNorm, frozen statistics, and layers that do not
use the batch.

    python benchmarks/federated.py --checkpoint efficientnet-lite0.pth --train train.tar \
        --test test.tar --arms bn bn-frozen ln ln-pn
    python benchmarks/federated.py --table

The pictures of each class are dealt to ten clients in shares of a Dirichlet distribution with
concentration 0.1, so that most clients have few classes. In each round every client trains one
epoch on its own pictures, from the server's network, and the server takes the average of all state
dicts (FedAvg, McMahan et al. 2017), running statistics included, each counted by its number of
pictures. Strength rises over the first half of the rounds. PreciseBN takes the statistics of the
averaged network, in the end, from the pictures of all clients in one pile: more than clients can do
that share no pictures. The arms, the search of their learning rates and the table are those of
evidence.py; an epoch there is a round here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np
import torch
from evidence import main
from evidence_arms import ARMS, convert, strength_schedule, trained_network, training_mode
from evidence_data import Epochs, Labelled, Pictures, draw, normalization, still
from evidence_train import Watch, descend, line_of, take_statistics
from harness import Line
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

CLIENTS = 10
CONCENTRATION = 0.1
MIDDLE = {8: 3e-3}


def split(pictures: Labelled, seed: int) -> list[Labelled]:
    """Deal the pictures of each class to the clients in Dirichlet shares; a client may get none."""
    generator = np.random.default_rng(seed)
    clients: list[Labelled] = [[] for _ in range(CLIENTS)]
    for label in sorted({label for _, label in pictures}):
        same = [picture for picture in pictures if picture[1] == label]
        shares = generator.dirichlet([CONCENTRATION] * CLIENTS)
        ends = (shares.cumsum() * len(same)).round().astype(int)
        for client, places in zip(clients, np.split(np.arange(len(same)), ends[:-1]), strict=True):
            client += [same[place] for place in places]
    return clients


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
    """Return the weighted mean of state dicts; whole numbers are those of the last."""
    shares = torch.tensor(weights) / sum(weights)
    mean = dict(states[-1])
    for name, value in mean.items():
        if value.is_floating_point():
            mean[name] = sum(
                share * state[name] for share, state in zip(shares, states, strict=True)
            )
    return mean


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a network's state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def run(args: Namespace, data: Pictures, key: Line) -> list[Line]:
    """Train for all rounds, and return the line of the run."""
    watch = Watch()
    arm = ARMS[key["arm"]]
    source = trained_network(args.model, args.checkpoint, data.classes, key["seed"])
    model = convert(source, arm)
    pictures = draw(data.pool, key["images"], key["seed"])
    dealt = split(pictures, key["seed"])
    normalize = normalization(args.model)
    clients = [
        Epochs(own, args.img_size, key["seed"], data.flip, normalize) for own in dealt if own
    ]
    strength = strength_schedule(model, arm, key["epochs"])
    torch.manual_seed(key["seed"])
    for round in range(key["epochs"]):
        server = copy_of(model)
        states = []
        for client in clients:
            model.load_state_dict(server)
            train(model, client, round, key)
            states.append(copy_of(model))
        model.load_state_dict(average(states, [len(client.pictures) for client in clients]))
        if strength is not None:
            strength.step()
    if arm.precise:
        take_statistics(model, still(pictures, args.img_size, normalize)[0])
    return [line_of(model, args, data, key, watch.seconds())]


def train(model: nn.Module, epochs: Epochs, round: int, key: Line) -> None:
    """Train a client's network for one epoch."""
    optimizer = create_optimizer_v2(model, key["opt"], key["lr"], weight_decay=0.0)
    training_mode(model, ARMS[key["arm"]], round / key["epochs"])
    for images, labels in epochs.batches(round, key["batch"]):
        descend(model, optimizer, images, labels, key["clip_grad"])


if __name__ == "__main__":
    main(
        __doc__,
        run,
        MIDDLE,
        "federated.jsonl",
        images=300,
        epochs=20,
        warmup_epochs=0,
        opt="sgd",
    )
