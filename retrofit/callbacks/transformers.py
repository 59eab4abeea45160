"""The strength in transformers' Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from retrofit.callbacks.walk import Walk


class TransformersStrength(TrainerCallback, ExportableState):
    """Raise the strength with the optimizer's steps, log it as `strength`, and go on with it when a run resumes.

    Args:
        **options: `StrengthSchedule`'s; `total_steps` is the trainer's own unless given.
    """

    def __init__(self, **options: Any) -> None:
        self.walk = Walk(options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **_: Any
    ) -> None:
        """Begin, or go on."""
        own = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and isinstance(own, dict):
            self.walk.load_state_dict(own.get("attributes", {}))
        self.walk.begin(model, self.walk.options.get("total_steps") or state.max_steps, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Move on before anyone saves."""
        self.walk.go(state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Add the strength to what is logged."""
        if logs is not None and self.walk.strength is not None:
            logs["strength"] = self.walk.strength
            if state.log_history:
                state.log_history[-1]["strength"] = self.walk.strength

    def state(self) -> dict[str, Any]:
        """Return what the trainer saves of the callback."""
        return {"args": dict(self.walk.options), "attributes": self.walk.state_dict()}
