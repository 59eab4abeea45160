"""The strength in transformers' Trainer."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from retrofit.callbacks.strength_walk import StrengthWalk


class TransformersStrength(StrengthWalk, TrainerCallback, ExportableState):
    """Raise the strength with the optimizer's steps, log it as `strength`, and continue when a run
    resumes.

    Args:
        **options: Arguments of `StrengthSchedule`; `total_steps` defaults to the trainer's number
            of steps.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **_: Any,
    ) -> None:
        """Start the schedule, or continue it."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and isinstance(saved, dict):
            self.load_state_dict(saved.get("attributes", {}))
        self.begin(model, state.max_steps, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Set the next strength, before a checkpoint is saved."""
        self.go(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        """Add the strength to the logged values."""
        if logs is not None and self.strength is not None:
            logs["strength"] = self.strength
            if state.log_history:
                state.log_history[-1]["strength"] = self.strength

    def state(self) -> dict[str, Any]:
        """Return the state that the trainer saves for the callback."""
        return {"args": self.options, "attributes": self.state_dict()}
