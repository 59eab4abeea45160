"""The course of strength and noise, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from torch import nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune import StrengthSchedule
from retrofit.layers import BatchNormalNorm1d, BatchNormalNorm2d, MigratedGroupNorm
from retrofit.surgery import strength_of


def network(*strengths: float) -> nn.Sequential:
    model = nn.Sequential(BatchNormalNorm2d(4), nn.Conv2d(4, 4, 1), BatchNormalNorm2d(4, noise=0.4))
    for layer, strength in zip(model[::2], strengths or (0.0, 0.0), strict=True):
        layer.set_strength(strength)
    return model


def course(schedule: StrengthSchedule, model: nn.Module, steps: int) -> list[float | None]:
    seen = []
    for _ in range(steps):
        seen.append(strength_of(model))
        schedule.step()
    return seen


def test_linear() -> None:
    model = network()
    seen = course(StrengthSchedule(model, 8), model, 8)
    assert seen == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]


def test_cosine_between_two_values() -> None:
    model = network()
    schedule = StrengthSchedule(model, 10, shape="cosine", ramp=1.0, start=0.2, end=0.8)
    wanted = [0.2 + 0.6 * (1 - math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    assert course(schedule, model, 10) == pytest.approx(wanted)
    assert strength_of(model) == pytest.approx(0.8)


def test_there_and_back() -> None:
    model = network()
    schedule = StrengthSchedule(model, 16, shape="there-and-back", end=0.0)
    turned = []
    seen = []
    remaining = []
    for step in range(17):
        seen.append(strength_of(model))
        turned += [step] if schedule.turning else []
        remaining.append(schedule.remaining)
        schedule.step()
    assert seen == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0]
    assert remaining == [2, 1.75, 1.5, 1.25, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0]
    assert turned == [8]


def test_a_layer_that_was_further_along_returns_with_the_others() -> None:
    model = network(0.5, 0.0)
    schedule = StrengthSchedule(model, 16, shape="there-and-back", end=0.0)
    seen = []
    for _ in range(13):
        seen.append((float(model[0].strength), float(model[2].strength)))
        schedule.step()
    assert seen[::4] == [(0.5, 0), (1, 1), (1, 1), (0, 0)]


def test_no_ramp_is_full_strength_at_once_and_off_leaves_it_alone() -> None:
    model = network()
    StrengthSchedule(model, 10, ramp=0.0)
    assert strength_of(model) == 1.0
    model = network(0.3, 0.3)
    schedule = StrengthSchedule(model, 10, shape="off", noise=0.0)
    schedule.step()
    assert strength_of(model) == pytest.approx(0.3)
    assert (schedule.strength, schedule.remaining) == (pytest.approx(0.3), 0)


def test_layers_of_an_earlier_conversion_are_not_taken_back() -> None:
    model = network(0.5, 0.0)
    schedule = StrengthSchedule(model, 4, ramp=1.0)
    seen = []
    for _ in range(5):
        seen.append((float(model[0].strength), float(model[2].strength), schedule.strength))
        schedule.step()
    assert seen == [(0.5, 0, 0), (0.625, 0.25, 0.25), (0.75, 0.5, 0.5), (0.875, 0.75, 0.75), (1, 1, 1)]


@pytest.mark.parametrize(
    ("stands", "options", "expected"),
    [
        (1.0, {}, [1, 1, 1, 1, 1]),
        (0.5, {}, [0.5, 0.625, 0.75, 0.875, 1]),
        (0.5, {"start": 0.75}, [0.75, 0.8125, 0.875, 0.9375, 1]),
        (0.5, {"end": 0.0}, [0.5, 0.375, 0.25, 0.125, 0]),
        (0.5, {"start": 1.0, "end": 0.0}, [1, 0.75, 0.5, 0.25, 0]),
        (1.0, {"shape": "there-and-back", "end": 0.0}, [1, 1, 1, 0.5, 0]),
    ],
)
def test_a_network_that_stands_higher_begins_there(
    stands: float, options: dict[str, Any], expected: list[float]
) -> None:
    """All its layers do, as after an earlier training."""
    model = network(stands, stands)
    assert course(StrengthSchedule(model, 4, ramp=1.0, **options), model, 5) == expected


def test_what_lies_above_the_end_comes_down_to_it_though_the_rest_stays() -> None:
    model = network(1.0, 0.0)
    schedule = StrengthSchedule(model, 2, ramp=1.0, end=0.0)
    schedule.step()
    assert (float(model[0].strength), float(model[2].strength)) == (0.5, 0)
    assert schedule.remaining == 0.5  # of the layer that is furthest from the end


def test_a_resumed_schedule_knows_where_each_layer_began() -> None:
    model = network(1.0, 0.0)
    schedule = StrengthSchedule(model, 4, ramp=1.0, end=0.5)
    schedule.step()
    again = StrengthSchedule(model, 4, ramp=1.0, end=0.5)  # built when the layers have moved on
    again.load_state_dict(schedule.state_dict())
    assert (float(model[0].strength), float(model[2].strength)) == (0.875, 0.125)


def test_noise_has_a_course_of_its_own() -> None:
    model = network()
    schedule = StrengthSchedule(model, 10, noise=0.4, noise_start=0.4, noise_ramp=0.4)
    seen = []
    for _ in range(10):
        seen.append(model[0].noise)
        assert model[0].noise == model[2].noise == schedule.noise
        schedule.step()
    assert seen == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2, 0.3, 0.4, 0.4])
    StrengthSchedule(network_without_change := network(), 10)
    assert [layer.noise for layer in network_without_change[::2]] == [0.4, 0.4]


def test_the_state_goes_on_where_it_was() -> None:
    model, other = network(), network()
    one, two = StrengthSchedule(model, 7, noise=0.2), StrengthSchedule(other, 7, noise=0.2)
    for _ in range(3):
        one.step()
    two.load_state_dict(one.state_dict())
    for _ in range(4):
        assert strength_of(model) == strength_of(other)
        assert model[0].noise == other[0].noise
        one.step()
        two.step()


def test_several_networks_and_layers_of_every_kind() -> None:
    models = nn.ModuleList([MigratedGroupNorm(2, 4), BatchNormalNorm1d(3)])
    retrofit.set_strength(models, 0.0)
    StrengthSchedule(models, 4, noise=0.1).step()
    assert strength_of(models) == 0.5


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"shape": "square"}, "linear, cosine, there-and-back, off"),
        ({"shape": "there-and-back"}, "returns to a strength below 1"),
        ({"ramp": 1.5}, "`ramp` is a fraction"),
        ({"noise_start": -0.1}, "`noise_start` is a fraction"),
        ({"end": 2.0}, "strength must lie"),
        ({"noise": -1.0}, "noise must be"),
        ({"total_steps": 0}, "total_steps"),
    ],
)
def test_refusals(options: dict[str, object], pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        StrengthSchedule(network(), **{"total_steps": 10, **options})  # type: ignore[arg-type]


def test_a_network_without_converted_layers() -> None:
    with pytest.raises(RetrofitError, match="no converted layer"):
        StrengthSchedule(nn.Linear(2, 2), 10)


@pytest.mark.slow
def test_a_compiled_network_is_not_compiled_again_for_every_strength_and_noise() -> None:
    model = network().train()
    schedule = StrengthSchedule(model, 32, noise=0.4, noise_start=0.0, noise_ramp=1.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager")
    kinds = set()
    for _ in range(32):
        compiled(torch.randn(2, 4, 3, 3)).sum().backward()
        kinds.add(model[0].noise)
        schedule.step()
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert frames <= 2 * (len(kinds) + 1)


def test_noise_is_refused_where_no_layer_draws_any() -> None:
    model, _ = retrofit.convert(timm.create_model("test_resnet"), "ln")
    with pytest.raises(UsageError, match="`noise` means nothing to these layers"):
        StrengthSchedule(model, 10, noise=0.1)
    assert StrengthSchedule(model, 10, noise=0.0).noise == 0.0


@pytest.mark.parametrize(
    "state", [5, {}, {"last_epoch": 3}, {"steps": 4, "starts": [0.0]}, {"steps": "x"}, {"steps": 4, "starts": None}]
)
def test_the_state_of_something_else_changes_nothing(state: Any) -> None:
    model = network()
    schedule = StrengthSchedule(model, 8, ramp=1.0)
    schedule.step()
    before = schedule.state_dict(), strength_of(model)
    with pytest.raises(UsageError, match="of 2 layers"):
        schedule.load_state_dict(state)
    assert (schedule.state_dict(), strength_of(model)) == before
