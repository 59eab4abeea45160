"""Looking at a network changes nothing that its code can reach, whatever that keeps of its
calls.
"""

import collections
import functools
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.diagnose.diagnosis import diagnose
from retrofit.errors import RetrofitError
from retrofit.evaluation import predictions

calls = 0
kept: list[Any] = []


class Habit(nn.Module):
    """A factor of ones, whose forward keeps something of its calls; `held` is what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError

    def held(self) -> Any:
        raise NotImplementedError


class AssignsBuffer(Habit):
    def forward(self, x: Tensor) -> Any:
        self.k = self.k.to(x.device, copy=True)
        return self.k

    def held(self) -> Any:
        return self._buffers


class WritesParameterData(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.written = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        self.written.data.add_(1)
        return self.k

    def held(self) -> Any:
        return self._parameters


class FillsList(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x)
        return self.k

    def held(self) -> Any:
        return self.seen


class FillsDictOfDicts(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[str, Any] = collections.defaultdict(collections.OrderedDict)

    def forward(self, x: Tensor) -> Any:
        grids = self.grids["ones"]
        if len(grids) < 3:
            grids[len(grids)] = self.k * 1
        return next(iter(grids.values()))

    def held(self) -> Any:
        return self.grids


class FillsSetInObject(Habit):
    class Notes:
        __slots__ = ("shapes",)

        def __init__(self) -> None:
            self.shapes: set[Any] = set()

    def __init__(self) -> None:
        super().__init__()
        self.notes = (self.Notes(),)

    def forward(self, x: Tensor) -> Any:
        self.notes[0].shapes.add(x)
        return self.k

    def held(self) -> Any:
        return self.notes[0].shapes


class FillsDeque(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = collections.deque([1, 2], maxlen=2)

    def forward(self, x: Tensor) -> Any:
        self.last.append(x)
        return self.k

    def held(self) -> Any:
        return self.last


class CachesMethod(Habit):
    @functools.cache  # noqa: B019  the habit
    def ones(self, _shape: Any) -> Any:
        return self.k * 1

    def forward(self, x: Tensor) -> Any:
        return self.ones("always")

    def held(self) -> Any:
        return type(self).ones, type(self).ones.cache_info().currsize, self.ones("always")


class CountsInGlobals(Habit):
    def forward(self, x: Tensor) -> Any:
        global calls  # noqa: PLW0603  the habit
        calls += 1
        kept.append(x)
        return self.k

    def held(self) -> Any:
        return calls, kept


class CountsInClass(Habit):
    calls = 0
    seen: ClassVar[list[Any]] = []

    def forward(self, x: Tensor) -> Any:
        type(self).calls += 1
        self.seen.append(x)
        return self.k

    def held(self) -> Any:
        return type(self).calls, self.seen


class FillsDefault(Habit):
    def forward(self, x: Tensor, seen: list[Any] = []) -> Any:  # noqa: B006  the habit
        seen.append(x)
        return self.k

    def held(self) -> Any:
        return type(self).forward.__defaults__


class WritesInPlace(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.memory = [torch.zeros(2)]

    def forward(self, x: Tensor) -> Any:
        self.memory[0].add_(1)
        return self.k

    def held(self) -> Any:
        return self.memory


# What torch.export does not capture.
UNCAPTURED = [WritesParameterData, WritesInPlace]
HABITS = [AssignsBuffer, FillsList, FillsDictOfDicts, FillsSetInObject, FillsDeque,
          CachesMethod, CountsInGlobals, CountsInClass, FillsDefault]  # fmt: skip


class Network(nn.Module):
    def __init__(self, habits: list[type[Habit]]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.habits = nn.ModuleList([habit() for habit in habits])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x))).mean((2, 3))
        for habit in self.habits:
            x = x * habit(x)
        return self.head(x)


def description(value: Any) -> Any:
    """A value's identity and content, of which nothing is shared with it."""
    if isinstance(value, Tensor):
        return type(value), id(value), value.data_ptr(), value.tolist()
    if isinstance(value, dict):
        return id(value), [(key, description(held)) for key, held in value.items()]
    if isinstance(value, tuple):
        return [*map(description, value)]
    if isinstance(value, list | set | collections.deque):
        return id(value), [*map(description, value)]
    return value if isinstance(value, int) else id(value)


def descriptions(model: Network) -> dict[str, Any]:
    return {type(habit).__name__: description(habit.held()) for habit in model.habits}


def refused(model: nn.Module) -> None:
    with pytest.raises(RetrofitError, match="is not a source of lnn"):
        retrofit.convert(model, "lnn", input_size=(3, 8, 8))
    with pytest.raises(RetrofitError, match="would hold a single value"):
        retrofit.convert(model, "gn", groups=4, input_size=(3, 3, 3))


def diagnosed(model: nn.Module) -> None:
    diagnose(model, [(torch.randn(4, 3, 8, 8), None)] * 2)
    predictions(model, [torch.randn(4, 3, 8, 8)])


@pytest.mark.filterwarnings("ignore:nothing is fused")
@pytest.mark.parametrize("habits", [HABITS, UNCAPTURED])
@torch.no_grad()
def test_what_code_keeps_of_its_calls_is_left_alone(
    habits: list[type[Habit]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Network(habits).eval(), torch.randn(2, 3, 8, 8)
    answer = model(x)
    before = descriptions(model)

    def check(look: Any) -> None:
        look(model)
        assert descriptions(model) == before
        assert type(model.bn) is type(norm)

    norm = model.bn
    check(lambda model: retrofit.plan(model, "ln-pn", ws=True))
    check(refused)
    check(diagnosed)
    after = model(x)
    assert type(after) is Tensor
    assert torch.equal(after, answer)

    before = descriptions(model)
    _, report = retrofit.convert(model, "gn-pn", input_size=(3, 8, 8), ws=True)
    assert report.check is not None
    retrofit.set_strength(model, 1.0)
    norm = model.bn
    assert descriptions(model) == before
    check(diagnosed)
    check(lambda model: retrofit.save(model, tmp_path / "a.safetensors", source="own"))
    check(lambda model: retrofit.plain(model, input_size=(3, 8, 8)))
    check(lambda model: retrofit.fold(model, input_size=(3, 8, 8)))
    refusal = pytest.raises(RetrofitError, match="cannot capture the network")
    with refusal if habits is UNCAPTURED else nullcontext():
        retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 8, 8))
    check(lambda model: None)
    assert type(model(x)) is Tensor


class Draws(nn.Module):
    """Draws from every generator of random numbers that code shares."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1), random.random(), np.random.rand()
        return x


@pytest.mark.filterwarnings("ignore")
def test_the_random_states_are_the_callers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Draws(), nn.ReLU()).eval()
    retrofit.plan(model, "ln-pn")
    x = torch.randn(2, 3, 8, 8)
    looks = (
        lambda: retrofit.plan(model, "ln-pn"),
        lambda: retrofit.convert(model, "ln-pn", inputs=x),
        lambda: retrofit.fold(model, inputs=x),
        lambda: retrofit.export_onnx(model, tmp_path / "a.onnx", inputs=x),
    )
    for look in looks:
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
        look()
        assert torch.equal(torch.get_rng_state(), states[0])
        assert (random.getstate(), np.random.get_state()[2]) == states[1:]
