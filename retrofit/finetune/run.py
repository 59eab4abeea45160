"""One run from its recipe to its last step, in one process or many, interrupted or not."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.evaluation import Accuracy
from retrofit.finetune import run_report, run_state
from retrofit.finetune.accelerator import make_accelerator, summed
from retrofit.finetune.batches import seed_generators
from retrofit.finetune.divergence import Fault, divergence_of, not_finite
from retrofit.finetune.prepared_run import PreparedRun
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_position import Position
from retrofit.finetune.run_report import RunCallback, Step
from retrofit.finetune.validation import validate
from retrofit.networks import artifact
from retrofit.networks.open_model import Network
from retrofit.running_statistics import local_norms, recentre, update_bn
from retrofit.utils.forward_pass import training_advice
from retrofit.utils.text import one_line, shortlist

# Images that show whether the network answers the same to all.
_FEW = 8
# Images that moments are measured on before the way back, a few at a time.
_RECENTRED = 128
# Images that running statistics are estimated on at a time.
_PRECISE_BATCH = 32


def finetune(
    network: Network,
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    callback: RunCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Position:
    """Train a network as a recipe says. A run that has saved no state leaves nothing behind.

    Args:
        network: The network; to resume, what `resume_network` opens.
        recipe: The settings of the run.
        folder: The run's folder: new or empty.
        resume: Whether to go on from the state in the folder.
        callback: Called with the run's progress, in the main process.
        stop: Asked after each step; a true answer saves the state and ends the run.

    Returns:
        Where the run stands at its end, and how it went.

    Raises:
        UsageError: If a setting does not fit the network or the data.
        RetrofitError: If the folder is in use, the data or the state cannot be read, the disk is
            full, or the loss is not finite.
    """
    accelerator = make_accelerator(recipe, folder)
    is_main = accelerator.is_main_process
    if callback is None or not is_main:
        callback = RunCallback()
    with run_state.owned(folder, resume) if is_main else nullcontext():
        state = None
        if resume:
            state = run_state.load_state(folder)
        run = Run(network, recipe, folder, accelerator, callback, state)
        if state is None:
            run.begin()
        else:
            run.restore(state)
        run.init_trackers()
        with run_state.resumable():
            return _train(run, stop)


def _train(run: "Run", stop: Callable[[], bool]) -> Position:
    stopped = False
    while not (run.position.finished or stopped):
        stopped = run.train_epoch(stop)
        if run.is_epoch_end:
            run.end_epoch()
        run.save_state(run.folder)
    return run.end()


class Run(PreparedRun):
    """A run in progress; it may be one of several processes, and go on with an interrupted run."""

    def begin(self) -> None:
        """Fill the folder with what the run begins with."""
        is_main = self.accelerator.is_main_process
        first_files: AbstractContextManager[Path] = nullcontext(self.folder)
        if is_main:
            first_files = run_state.beginning(self.folder)
        with first_files as folder:
            if is_main:
                self.recipe.save(folder / run_state.RECIPE)
                # Its saving proves that the network can be built again.
                start = folder / run_state.START
                self._write_artifact(self.model, start, self.network.weights, proved=False)
            self.save_state(folder)
        self.callback.started(self.folder)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            RetrofitError: If the images, processes or settings are not those that the run began
                with.
        """
        changed = [name for name, value in self.kept.items() if value != state["kept"][name]]
        if changed:
            raise RetrofitError(
                f"{shortlist(changed)} differ from those that the run in {self.folder} began with; "
                "resume it with the same images, as many processes, and the recipe in it, "
                f"{run_state.RECIPE}"
            )
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        rank = self.accelerator.process_index
        self.position = Position(**state["positions"][rank])
        self.callback.note(f"resumed at step {self.position.step} of {self.position.steps}")

    def save_state(self, folder: Path) -> None:
        """Write the state of all processes into the run's folder, or what is to become of it."""
        # Each process has losses and unreadable images of its own.
        positions = gather_object([asdict(self.position)])
        if not self.accelerator.is_main_process:
            return
        state = {
            "positions": positions,
            "kept": self.kept,
            "new_tensors": list(self.new_tensors),
        }
        for name, part in self._stateful().items():
            state[name] = part.state_dict()
        run_state.save_state(folder, state)

    def init_trackers(self) -> None:
        """Begin to log; trackers may write to the folder, which a run has to itself by now."""
        settings = {name: str(value) for name, value in self.recipe}
        self.accelerator.init_trackers(self.folder.name, settings)

    @property
    def is_epoch_end(self) -> bool:
        """Whether the last step of an epoch is done."""
        return self.position.step % self.epoch_steps == 0

    def train_epoch(self, stop: Callable[[], bool]) -> bool:
        """Train to the end of the epoch, or until a process is asked to stop; return whether it was.

        Raises:
            RetrofitError: If the loss, a gradient or the network's state is not finite.
        """
        position = self.position
        epoch, steps_done = divmod(position.step, self.epoch_steps)
        first_batch = steps_done * self.recipe.grad_accum_steps
        # By default, at the end of an epoch alone, which leaves the loop
        checkpoint_every = self.recipe.checkpoint_every or self.epoch_steps
        batches = self.batches.epoch(epoch, first_batch)
        self.gate.start(position.loss_sum)
        self.model.train()
        for layer in self.frozen_norms:
            layer.training = False
        for _ in range(steps_done, self.epoch_steps):
            self._train_step(batches)
            step = self._progress(epoch)
            place = step, position.images
            self.gate.send(place, self.last_images)
            is_asked = stop()
            stopping = self._any_process(is_asked)
            leaving = stopping or self.is_epoch_end
            saving = position.step % checkpoint_every == 0
            self._judge_steps(every=leaving or saving)
            if leaving:
                return stopping
            if saving:
                self.save_state(self.folder)
        return False

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        position = self.position
        strength_schedule = self.strength_schedule
        began = time.monotonic()
        for _ in range(self.recipe.grad_accum_steps):
            images, targets = next(batches)
            self._train_batch(images, targets)
        position.step += 1
        if self.lr_schedule is not None:
            self.lr_schedule.step_update(position.step)
        if self.average is not None:
            self.average.update(self.model, position.step)
        if strength_schedule is not None:
            strength_schedule.step()
            if strength_schedule.turning:
                self._recentre()
        elapsed = time.monotonic() - began
        position.seconds += elapsed

    def _train_batch(self, images: Tensor, targets: Tensor) -> None:
        """Do a batch's share of a step; images (N, C, H, W) and targets (N,) are on the device."""
        self._list_unreadable(self.batches.take_unreadable(), "another image takes its place")
        # By what is done so far: then a run that is resumed goes on as if it had not stopped.
        position = self.position
        rank = self.accelerator.process_index
        seed_generators(self.recipe.seed, rank, position.step, position.images)
        images = images.contiguous(memory_format=self.layout)
        images, targets = self.objective.mix(images, targets)
        fits = training_advice(len(images))
        with fits, self.accelerator.accumulate(self.wrapped):
            loss = self.objective.loss(self.wrapped(images), images, targets)
            self.gate.add(loss, len(images))
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.gate.close()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.last_images = images
        position.images += len(images)

    def _recentre(self) -> None:
        """Before the strength falls again, put the network's present estimates into constants."""
        for model in self.networks:
            recentre(self.plain_images.batches(_RECENTRED, _FEW), model, self.device)

    def _any_process(self, asked: bool) -> bool:
        """Tell whether any process was asked to stop: then all do."""
        if self.accelerator.num_processes == 1:
            return asked
        return summed([asked], self.accelerator)[0] > 0

    def _list_unreadable(self, names: Iterable[str], then: str) -> None:
        for name in names:
            if name not in self.position.unreadable:
                self.position.unreadable.append(name)
                self.callback.note(f"warning: cannot read {name}; {then}")

    def _progress(self, epoch: int) -> Step:
        """Describe the step just done; its loss is known once the device has come so far."""
        position = self.position
        images = position.images * self.accelerator.num_processes
        return Step(
            epoch=epoch + 1,
            epochs=self.recipe.epochs,
            step=position.step,
            steps=position.steps,
            loss=math.nan,
            **self._course(images),
        )

    def _course(self, images: float) -> dict[str, Any]:
        """Return learning rate, strength, and the speed for so many images of the epoch so far."""
        strength = None
        if self.strength_schedule is not None:
            strength = self.strength_schedule.strength
        return {
            "lr": float(max(group["lr"] for group in self.optimizer.param_groups)),
            "strength": strength,
            "images_per_second": round(images / max(self.position.seconds, 1e-9), 1),
        }

    def _judge_steps(self, every: bool) -> None:
        """Report the steps that are due, or every one; end the run after one that is not finite."""
        for verdict in self.gate.verdicts(all_of_them=every):
            step, images = verdict.step
            if verdict.fault is not None:
                raise self._diverged(verdict.description, step.step, verdict.images, verdict.fault)
            self.position.loss_sum = verdict.loss_sum
            step = replace(step, loss=verdict.loss_sum / images)
            self.callback.step(step)
            figures = {"train_loss": step.loss, "lr": step.lr, "strength": step.strength or 0.0}
            self.accelerator.log(figures, step=step.step)
        if every:
            name = not_finite(self.model)
            if name is not None:
                raise self._diverged(name, self.position.step, self.last_images)

    def _diverged(
        self, description: str, step: int, images: Tensor, fault: Fault = "state"
    ) -> RetrofitError:
        """Say what is not finite, which layer went first, where the last good state is, and what to
        do.
        """
        # The other processes do not take part.
        with local_norms(self.model):
            cause, advice = divergence_of(self.model, images, fault)
        return RetrofitError(
            f"{description} is not finite at step {step} of {self.position.steps}: {cause}; "
            f"the last good state is {self.folder / run_state.STATE}; {advice}"
        )

    def end_epoch(self) -> None:
        """Validate, write the epoch's line, and the network if it is the best so far."""
        position = self.position
        loss_sum, images = summed([position.loss_sum, position.images], self.accelerator)
        train_loss = loss_sum / images
        self._estimate_statistics()
        accuracy = self._validate()
        measured = _measured(accuracy)
        noise = None
        progress = 0.0
        if self.strength_schedule is not None:
            noise = self.strength_schedule.noise
            progress = 1 - self.strength_schedule.remaining
        for names in gather_object([position.unreadable]):
            self._list_unreadable(names, "it is left out")
        row: dict[str, Any] = {
            "epoch": position.step // self.epoch_steps,
            "step": position.step,
            "train_loss": train_loss,
            **self._course(images),
            "noise": noise,
            "unreadable": len(position.unreadable),
            **measured,
        }
        position.begin_epoch(row)
        is_best = position.note_if_best(row["val_top1"], progress)
        figures = {name: value for name, value in measured.items() if value is not None}
        self.accelerator.log(figures, position.step)
        if not self.accelerator.is_main_process:
            return
        if is_best:
            self._write_artifact(self.validated, self.folder / "best.safetensors")
        run_report.write_metrics(self.folder, position.rows)
        # The callback may look at the files.
        self.callback.epoch(row)
        if accuracy is not None:
            self._warn_of_chance(row, accuracy)

    def _estimate_statistics(self) -> None:
        if self.recipe.precise_bn is None:
            return
        for model in self.networks:
            batches = self.plain_images.batches(self.recipe.precise_bn, _PRECISE_BATCH)
            update_bn(batches, model, self.device)

    def _validate(self) -> Accuracy | None:
        if self.val is None:
            return None
        preprocess = self.network.preprocess
        accuracy = validate(self.validated, self.val, preprocess, self.recipe, self.accelerator)
        self._list_unreadable(accuracy.skipped, "it is left out")
        return accuracy

    def _warn_of_chance(self, row: dict[str, Any], accuracy: Accuracy) -> None:
        few = self.plain_images.batches(_FEW, _FEW)
        warning = self.chance.warning(row, accuracy, self.validated, few)
        if warning is not None:
            self.callback.note(warning)

    def end(self) -> Position:
        """Write the networks and the picture that the run leaves behind."""
        if self.accelerator.is_main_process:
            self._write_artifact(self.model, self.folder / "last.safetensors")
            if self.val is None and self.position.finished:
                self._write_artifact(self.validated, self.folder / "best.safetensors")
            self._draw()
        self.accelerator.end_training()
        return self.position

    def _draw(self) -> None:
        if not self.position.rows:
            return
        try:
            run_report.draw(self.folder, self.position.rows)
        # matplotlib or the disk may fail, which is not worth the run.
        except Exception as error:
            self.callback.note(
                f"warning: a picture cannot be drawn ({one_line(error)}); "
                "the run is complete without it"
            )

    def _write_artifact(
        self,
        model: nn.Module,
        path: Path,
        weights: dict[str, Any] | None = None,
        proved: bool = True,
    ) -> None:
        """Write a network, by default as one that the run has trained."""
        with local_norms(model):
            artifact.save(
                model,
                path,
                source=self.network.source,
                weights=weights or self._trained_weights(),
                force=True,
                proved=proved,
            )

    def _trained_weights(self) -> dict[str, Any]:
        """Say where the weights come from."""
        steps = self.position.step
        origin = self.network.weights.get("from") or self.network.source.name
        source = f"{self.folder}, step {steps}, from {origin}"
        weights: dict[str, Any] = {"kind": "checkpoint", "from": source}
        if self.strength_schedule is not None:
            weights["steps"] = steps
        return weights


def _measured(accuracy: Accuracy | None) -> dict[str, float | None]:
    """Return an epoch's validation metrics."""
    if accuracy is None:
        return dict.fromkeys(("val_top1", "val_top5", "val_loss"))
    loss = accuracy.loss
    return {
        "val_top1": accuracy.top1,
        "val_top5": accuracy.top5,
        # Where no image has finite scores, it is NaN.
        "val_loss": loss if math.isfinite(loss) else None,
    }
