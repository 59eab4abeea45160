"""The strength in Lightning's trainer."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from retrofit.callbacks.strength_walk import StrengthWalk
from retrofit.errors import UsageError


class LightningStrength(StrengthWalk, Callback):
    """Raise the strength with the optimizer's steps, log it as `strength`, and continue when a run
    resumes.

    The callback follows `trainer.global_step`, so gradients may be accumulated. With manual
    optimization, where several optimizers count there, or none for some batches, it follows the
    batches instead, unless `total_steps` is given. A checkpoint holds the strength of its step. The
    averaged weights that a weight-averaging callback evaluates or leaves in place have that
    strength too.

    Args:
        **options: Arguments of `StrengthSchedule`; `total_steps` defaults to the trainer's
            estimate.
    """

    _follows_batches = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the schedule, or continue it.

        Raises:
            UsageError: If the optimization is manual and `max_steps` is set without `total_steps`.
        """
        given = self.options.get("total_steps")
        self._follows_batches = not (given or pl_module.automatic_optimization)
        if self._follows_batches and trainer.max_steps != -1:
            raise UsageError(
                "with manual optimization and `max_steps`, a run's length is not known in batches "
                "or steps; pass `total_steps`, the steps that all optimizers will take together"
            )
        total = given or int(trainer.estimated_stepping_batches)
        self.begin(pl_module, total, self._step(trainer))

    def _step(self, trainer: Trainer) -> int:
        """Return how far the run is, in the unit of the schedule's total."""
        if self._follows_batches:
            return trainer.fit_loop.epoch_loop.batch_progress.total.processed
        return trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Set the strength of the current step again, since weight averaging swaps the weights."""
        self.go(self._step(trainer))

    on_validation_batch_start = on_fit_end = on_train_batch_start

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Set the next strength, before a checkpoint is saved, and log it."""
        self.go(self._step(trainer))
        if self.strength is not None:
            self.log("strength", self.strength)
