"""What a snapshot puts back, and what it looks at without touching it."""

import dataclasses
import queue
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from retrofit.utils.snapshot import Snapshot, left_as_it_was

counter: Any


class Lazy(dict[str, Any]):
    """Computes what it gives, as transformers' table of configurations imports it."""

    loads = 0

    def __iter__(self) -> Iterator[str]:
        self.loads += 1
        return super().__iter__()

    def items(self) -> Any:
        self.loads += 1
        return super().items()

    values = keys = items


@dataclasses.dataclass
class Settings:
    table: Lazy
    size: int = 4


class Network(nn.Module):
    made = 0
    mean: Tensor
    weights: Any

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(Lazy(first=1))
        self.one: dict[str, int] = {"moved": 1}
        self.other: dict[str, int] = {}
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        global counter  # noqa: PLW0603
        counter = 1
        Network.made += 1
        self.other["moved"] = self.one.pop("moved")
        self.settings.size += 1
        self.mean += 1
        return x


def test_everything_is_put_back_each_time() -> None:
    network = Network()
    snapshot = Snapshot(network)
    for _ in range(2):
        network(torch.ones(2))
        assert (counter, Network.made) == (1, 1)
        snapshot.restore()
        assert "counter" not in globals()
        assert (Network.made, network.settings.size) == (0, 4)
        assert (network.one, network.other) == ({"moved": 1}, {})
        assert network.mean.eq(0).all()


def test_a_dict_that_computes_what_it_gives_is_left_alone() -> None:
    network = Network()
    Snapshot(network).restore()
    assert network.settings.table.loads == 0


def test_what_cannot_be_written_to_is_in_no_ones_way() -> None:
    network = Network()
    network.weights = np.broadcast_to(np.ones(2), (3, 2))
    with left_as_it_was(network):
        network(torch.ones(2))
    assert (network.settings.size, network.one) == (4, {"moved": 1})


class Note:
    """What somebody notes."""

    text = ""


class Other(Note):
    """What a note may become."""


noted = Note()


@pytest.mark.parametrize(
    ("held", "change", "state"),
    [
        (np.zeros(2), lambda a: a.fill(1), list),
        (weakref.ref(noted), lambda ref: setattr(ref(), "text", "new"), lambda ref: ref().text),
        (Note(), lambda note: setattr(note, "__class__", Other), type),
        (torch.zeros(2), lambda x: setattr(x, "note", 1), lambda x: [*vars(x)]),
        (weakref.WeakSet(), lambda notes: notes.add(noted), len),
        (torch.zeros(2), lambda x: setattr(x, "grad", torch.ones(2)), lambda x: x.grad is None),
        (queue.Queue(), lambda line: line.put(1), queue.Queue.qsize),
        (np.random.RandomState(0), lambda r: r.rand(), lambda r: r.get_state()[2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_holds_something_is_put_back(
    held: Any, change: Callable[[Any], Any], state: Callable[[Any], Any]
) -> None:
    network = nn.Identity()
    network.held = held
    before = state(held)
    with left_as_it_was(network):
        change(held)
        assert state(held) != before
    assert network.held is held
    assert state(held) == before
