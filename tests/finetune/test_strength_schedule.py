"""The course of strength and noise, step by step; with a trainer around it:
tests/integrations/test_callbacks.py.
"""

from typing import Any

import pytest
from torch import nn

import retrofit
from retrofit.callbacks.strength_walk import StrengthWalk
from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune import StrengthSchedule
from retrofit.layers import BatchNormalNorm2d, MigratedGroupNorm
from retrofit.surgery import strength_of


def network(*strengths: float) -> nn.Sequential:
    model = nn.Sequential(BatchNormalNorm2d(4), nn.Conv2d(4, 4, 1), BatchNormalNorm2d(4, noise=0.4))
    for layer, strength in zip(model[::2], strengths or (0.0, 0.0), strict=True):
        layer.set_strength(strength)
    return model


@pytest.mark.parametrize(
    ("stood", "options", "expected"),
    [
        ((0, 0), {"ramp": 0.5}, [(0, 0), (0.5, 0.5), (1, 1), (1, 1), (1, 1)]),
        ((0, 0), {"ramp": 0.0}, [(1, 1)] * 5),  # at once
        ((0.25, 0.25), {"shape": "off"}, [(0.25, 0.25)] * 5),
        ((0, 0), {"start": 0.2, "end": 0.8}, [(t, t) for t in (0.2, 0.35, 0.5, 0.65, 0.8)]),
        (
            (0, 0),
            {"shape": "cosine", "end": 0.8},
            [(t, t) for t in (0, 0.11715729, 0.4, 0.68284271, 0.8)],
        ),
        # Layers that stand higher, as after an earlier conversion or training, are not taken back.
        ((0.5, 0), {}, [(0.5, 0), (0.625, 0.25), (0.75, 0.5), (0.875, 0.75), (1, 1)]),
        ((1, 1), {}, [(1, 1)] * 5),
        ((0.5, 0.5), {"start": 0.75}, [(t, t) for t in (0.75, 0.8125, 0.875, 0.9375, 1)]),
        ((1, 0), {"end": 0.0}, [(1, 0), (0.75, 0), (0.5, 0), (0.25, 0), (0, 0)]),
        ((0.5, 0.5), {"start": 1.0, "end": 0.0}, [(t, t) for t in (1, 0.75, 0.5, 0.25, 0)]),
        (
            (1, 0),
            {"shape": "there-and-back", "end": 0.0},
            [(1, 0), (1, 0.5), (1, 1), (0.5, 0.5), (0, 0)],
        ),
    ],
    ids=str,
)
def test_the_course_of_each_layer(
    stood: tuple[float, float], options: Any, expected: list[tuple[int, int]]
) -> None:
    model = network(*stood)
    schedule = StrengthSchedule(model, 4, **{"ramp": 1.0, **options})
    for each in expected:
        assert [float(layer.strength) for layer in model[::2]] == pytest.approx(each)
        assert schedule.strength == pytest.approx(min(each))
        schedule.step()


def test_there_and_back_turns_in_the_middle() -> None:
    schedule = StrengthSchedule(network(), 16, shape="there-and-back", end=0.0)
    course = []
    for _ in range(17):
        course.append((schedule.remaining, schedule.turning))
        schedule.step()
    remaining, turning = zip(*course, strict=True)
    assert remaining == (2, 1.75, 1.5, 1.25, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0)
    assert [step for step, turns in enumerate(turning) if turns] == [8]
    assert (
        StrengthSchedule(network(0.5, 0.0), 2, ramp=1.0, end=0.0).remaining == 0.5
    )  # of the one furthest from it
    assert StrengthSchedule(network(0.5, 0.0), 2, shape="off").remaining == 0


def test_noise_has_a_course_of_its_own_in_few_values_since_each_is_compiled_anew() -> None:
    model = network()
    schedule = StrengthSchedule(model, 20, noise=0.4, noise_start=0.4, noise_ramp=0.4)
    seen = []
    for _ in range(20):
        seen.append(model[0].noise)
        assert model[0].noise == model[2].noise == schedule.noise
        schedule.step()
    assert seen == pytest.approx([0.0] * 9 + [0.1, 0.1, 0.2, 0.2, 0.3, 0.3] + [0.4] * 5)
    StrengthSchedule(unchanged := network(), 10)
    assert [layer.noise for layer in unchanged[::2]] == [0.4, 0.4]


def test_a_schedule_built_when_the_layers_have_moved_goes_on_from_its_state() -> None:
    model = network(1.0, 0.0)
    schedule = StrengthSchedule(
        model, 4, ramp=1.0, end=0.5, noise=0.2, noise_start=0.0, noise_ramp=1.0
    )
    schedule.step()
    again = StrengthSchedule(
        model, 4, ramp=1.0, end=0.5, noise=0.2, noise_start=0.0, noise_ramp=1.0
    )
    retrofit.set_strength(model, 0.9)  # whatever has become of them
    again.load_state_dict(schedule.state_dict())
    for expected in ((0.875, 0.125, 0.05), (0.75, 0.25, 0.1)):
        assert (
            float(model[0].strength),
            float(model[2].strength),
            model[0].noise,
        ) == pytest.approx(expected)
        again.step()


@pytest.mark.parametrize(
    "state",
    [
        {"steps": 4, "starts": [0.0]},
        {"steps": 4},
        {"starts": [0.0, 0.0]},
        {"base_lrs": [0.1], "last_epoch": 3},  # torch's
    ],
    ids=str,
)
def test_the_state_of_another_network_or_of_anything_else_changes_nothing(state: Any) -> None:
    model = network()
    schedule = StrengthSchedule(model, 8, ramp=1.0)
    schedule.step()
    before = schedule.state_dict(), strength_of(model)
    with pytest.raises(UsageError, match="of 2 layers"):
        schedule.load_state_dict(state)
    assert (schedule.state_dict(), strength_of(model)) == before


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"shape": "square"}, "linear, cosine, there-and-back, off"),
        ({"shape": "there-and-back"}, "returns to a strength below 1"),
        *(
            ({"ramp": 1.5}, "`ramp` is a fraction"),
            ({"noise_start": -0.1}, "`noise_start` is a fraction"),
        ),
        *(
            ({"end": 2.0}, "strength must lie"),
            ({"noise": -1.0}, "noise must be"),
            ({"total_steps": 0}, "total_steps"),
        ),
    ],
)
def test_refusals(options: dict[str, object], pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern):
        StrengthSchedule(network(), **{"total_steps": 10, **options})  # type: ignore[arg-type]


def test_layers_without_strength_or_noise_are_refused() -> None:
    with pytest.raises(RetrofitError, match="no converted layer"):
        StrengthSchedule(nn.Linear(2, 2), 10)
    with pytest.raises(UsageError, match="`noise` means nothing to these layers"):
        StrengthSchedule(MigratedGroupNorm(2, 4), 10, noise=0.1)
    assert StrengthSchedule(MigratedGroupNorm(2, 4), 10, noise=0.0).noise == 0.0


def test_a_callback_stands_where_the_step_is_and_goes_on_from_its_state() -> None:
    model, walk = network(), StrengthWalk(ramp=1.0)
    walk.begin(model, 8, 0)
    walk.go(2)
    assert strength_of(model) == walk.strength == 0.25
    resumed = StrengthWalk(ramp=1.0)
    resumed.load_state_dict(walk.state_dict())
    resumed.begin(model, 8, 4)  # the model is that of the checkpoint, on its way
    assert strength_of(model) == resumed.strength == 0.5
    with pytest.raises(
        UsageError,
        match=r"`retrofit finetune --strength-sched there-and-back`, or `StrengthSchedule`",
    ):
        StrengthWalk(
            shape="there-and-back", end=0.0
        )  # nothing would estimate the constants anew at the turn
