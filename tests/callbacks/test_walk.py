"""The strength schedule of a trainer's callback, without a trainer (with one: tests/integrations/test_callbacks.py)."""

from __future__ import annotations

import pytest
import timm

import retrofit
from retrofit.callbacks import Walk
from retrofit.errors import UsageError
from retrofit.surgery import strength_of


def test_it_stands_where_the_step_is_and_goes_on_from_its_state() -> None:
    model, _ = retrofit.convert(timm.create_model("test_resnet"), "ln", check=False)
    walk = Walk(ramp=1.0)
    walk.begin(model, 8, 0)
    walk.go(2)
    assert strength_of(model) == walk.strength == 0.25
    resumed = Walk(ramp=1.0)
    resumed.load_state_dict(walk.state_dict())
    resumed.begin(model, 8, 4)  # the model is that of the checkpoint, on its way
    assert strength_of(model) == resumed.strength == 0.5


def test_there_and_back_is_refused_before_the_training() -> None:
    """Nothing would estimate the constants anew at the turn."""
    with pytest.raises(UsageError, match=r"`retrofit finetune --strength-sched there-and-back`, or `StrengthSchedule`"):
        Walk(shape="there-and-back", end=0.0)
    Walk(start=1.0, end=0.0)
