"""The strength in Lightning's trainer."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from retrofit.callbacks.walk import Walk


class LightningStrength(Walk, Callback):
    """Raise the strength with the optimizer's steps, log it as `strength`, and go on with it when a run resumes.

    It counts `trainer.global_step`, so that gradients may be accumulated. Checkpoints hold the strength of the step
    that they were made at. What a weight-averaging callback evaluates with, and leaves behind, stands there too.

    Args:
        **options: `StrengthSchedule`'s; `total_steps` is the trainer's estimate unless given.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, or go on."""
        total = self.options.get("total_steps") or int(trainer.estimated_stepping_batches)
        self.begin(pl_module, total, trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Stand where the step is, whatever averaging, which exchanges the weights, did to the strength."""
        self.go(trainer.global_step)

    on_validation_batch_start = on_fit_end = on_train_batch_start

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Move on before anyone saves."""
        self.go(trainer.global_step)
        if self.strength is not None:
            self.log("strength", self.strength)
