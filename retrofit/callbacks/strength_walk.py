"""What the callbacks share: the walk of the strength along a run's steps."""

from typing import Any

from torch import nn

from retrofit.errors import UsageError
from retrofit.finetune.strength_schedule import StrengthSchedule


class StrengthWalk:
    """Sets the layers to the strength that the schedule has for each optimizer step.

    Args:
        **options: Arguments of `StrengthSchedule`, all but the model.

    Raises:
        UsageError: If the shape is "there-and-back": at its turn constants are estimated on images,
            and a callback has none.
    """

    def __init__(self, **options: Any) -> None:
        if options.get("shape") == "there-and-back":
            raise UsageError(
                "a callback cannot go there-and-back, which needs `retrofit.recentre` on images "
                "at its turn; take `retrofit finetune --strength-sched there-and-back`, or "
                "`StrengthSchedule` in a loop of your own"
            )
        self.options = options
        self._schedule: StrengthSchedule | None = None
        self._state: dict[str, Any] = {}

    @property
    def strength(self) -> float | None:
        """The strength that was set last."""
        if self._schedule is None:
            return None
        return self._schedule.strength

    def begin(self, model: nn.Module, total_steps: int, step: int) -> None:
        """Start on a network, at `step` of a run; a resumed one goes on from where its layers
        began.
        """
        self._schedule = StrengthSchedule(model, **{"total_steps": total_steps, **self.options})
        self.go(step)

    def go(self, step: int) -> None:
        """Set the layers to the strength after `step` optimizer steps, even if something else has
        set another.
        """
        if self._schedule is not None:
            state = {**self._schedule.state_dict(), **self._state, "steps": step}
            self._schedule.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        if self._schedule is None:
            return self._state
        return {"starts": self._schedule.state_dict()["starts"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from another run's state, when it begins."""
        self._state = state_dict
