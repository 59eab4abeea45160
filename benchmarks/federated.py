"""Federated averaging of a trained network: BatchNorm, frozen statistics, and layers that do not
use the batch.

    python benchmarks/federated.py --checkpoint efficientnet-lite0.pth --train train.tar --test
    test.tar \
        --arms bn bn-frozen ln ln-pn
    python benchmarks/federated.py --table

The pictures of each class are dealt to ten clients in shares of a Dirichlet distribution with
concentration 0.1, so that most clients have few classes. In each round every client trains one
epoch on its own pictures, from the server's network, and the server takes the average of all state
dicts (FedAvg, McMahan et al. 2017), running statistics included, each counted by its number of
pictures. Strength rises over the first half of the rounds. The arms, the search of their learning
rates and the table are those of evidence.py; an epoch there is a round here.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from evidence import RESULTS, main
from evidence_arms import ARMS, convert, strength_schedule, trained_network, training_mode
from evidence_data import Epochs, Labelled, Pictures, draw, normalization
from evidence_train import line_of
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLIENTS, CONCENTRATION = 10, 0.1
MIDDLE = {8: 3e-3}


def split(pictures: Labelled, seed: int) -> list[Labelled]:
    """Deal the pictures of each class to the clients in Dirichlet shares; a client may get none."""
    generator = np.random.default_rng(seed)
    clients: list[Labelled] = [[] for _ in range(CLIENTS)]
    for label in sorted({label for _, label in pictures}):
        own = [one for one in pictures if one[1] == label]
        ends = (
            (generator.dirichlet([CONCENTRATION] * CLIENTS).cumsum() * len(own)).round().astype(int)
        )
        for client, part in zip(clients, np.split(np.arange(len(own)), ends[:-1]), strict=True):
            client += [own[place] for place in part]
    return clients


def average(states: Sequence[dict[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
    """Return the weighted mean of state dicts; whole numbers are those of the last."""
    shares = torch.tensor(weights) / sum(weights)
    return {
        name: sum(share * state[name] for share, state in zip(shares, states, strict=True))
        if value.is_floating_point()
        else value
        for name, value in states[-1].items()
    }


def run(args: Namespace, data: Pictures, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Train for all rounds, and return the line of the run."""
    arm, worked, began = ARMS[key["arm"]], time.process_time(), time.monotonic()
    classes = 1 + max(label for _, label in data.test)
    model = convert(trained_network(args.model, args.checkpoint, classes, key["seed"]), arm)
    pictures = [
        own for own in split(draw(data.pool, key["images"], key["seed"]), key["seed"]) if own
    ]
    clients = [
        Epochs(own, args.img_size, key["seed"], data.flip, normalization(args.model))
        for own in pictures
    ]
    strength = strength_schedule(model, arm, key["epochs"])
    torch.manual_seed(key["seed"])
    for round in range(key["epochs"]):
        server = {name: value.clone() for name, value in model.state_dict().items()}
        states = []
        for client in clients:
            model.load_state_dict(server)
            train(model, client, round, key)
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        model.load_state_dict(average(states, [len(own) for own in pictures]))
        if strength is not None:
            strength.step()
    seconds, worked = time.monotonic() - began, time.process_time() - worked
    return [line_of(model, args, data, key, seconds, worked)]


def train(model: nn.Module, epochs: Epochs, round: int, key: dict[str, Any]) -> None:
    """Train a client's network for one epoch."""
    optimizer = create_optimizer_v2(model, key["opt"], key["lr"], weight_decay=0.0)
    training_mode(model, ARMS[key["arm"]])
    for images, labels in epochs.batches(round, key["batch"]):
        cross_entropy(model(images), labels).backward()
        if key["clip_grad"]:
            nn.utils.clip_grad_norm_(model.parameters(), key["clip_grad"])
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(
        __doc__,
        run,
        MIDDLE,
        RESULTS / "federated.jsonl",
        images=300,
        epochs=20,
        warmup_epochs=0,
        opt="sgd",
    )
