"""The strength in Lightning's trainer."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from retrofit.callbacks.strength_walk import StrengthWalk


class LightningStrength(StrengthWalk, Callback):
    """Raise the strength with the optimizer's steps, log it as `strength`, and continue when a run
    resumes.

    The callback follows `trainer.global_step`, so gradients may be accumulated. A checkpoint holds
    the strength of its step. The averaged weights that a weight-averaging callback evaluates or
    leaves in place have that strength too.

    Args:
        **options: Arguments of `StrengthSchedule`; `total_steps` defaults to the trainer's
            estimate.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the schedule, or continue it."""
        total = self.options.get("total_steps") or int(trainer.estimated_stepping_batches)
        self.begin(pl_module, total, trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Set the strength of the current step again, since weight averaging swaps the weights."""
        self.go(trainer.global_step)

    on_validation_batch_start = on_fit_end = on_train_batch_start

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Set the next strength, before a checkpoint is saved, and log it."""
        self.go(trainer.global_step)
        if self.strength is not None:
            self.log("strength", self.strength)
