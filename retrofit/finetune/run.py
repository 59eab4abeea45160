"""A run in progress: its network, data and position, and what is done with them in a step and after an epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from timm.data import create_transform
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.finetune import run_report, setup
from retrofit.finetune.batch_statistics import local_norms, sync_norms
from retrofit.finetune.classifier import outputs_of
from retrofit.finetune.data import open_data
from retrofit.finetune.distillation import Distillation, check_untrained, source_network
from retrofit.finetune.divergence import ChanceWatch, Fault, divergence_of, not_finite
from retrofit.finetune.loaders import Batches, Part, training_transform
from retrofit.finetune.objective import Objective
from retrofit.finetune.optim import build_optimizer, build_scheduler, freeze_all_but_norm, unconverted_norms
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_callback import Result, RunCallback, Step
from retrofit.finetune.run_folder import RECIPE, START, STATE
from retrofit.finetune.run_state import (
    Position,
    load_state,
    random_state,
    save_state,
    seed_everything,
    set_random_state,
)
from retrofit.finetune.running_statistics import group_moments, move_standardisation, update_bn
from retrofit.finetune.step_gate import StepGate, Verdict
from retrofit.finetune.validation import summed, validate, validation_share
from retrofit.layers.lambdas import lambda_values
from retrofit.networks import artifact
from retrofit.networks.models import Network
from retrofit.surgery import strength_layers
from retrofit.utils.evaluating import evaluating
from retrofit.utils.text import shortlist

_SHOWN = 8  # images that lambda is estimated on for a picture
_RECENTRED = 128  # images that moments are measured on before the way back
_PRECISE_BATCH = 32  # images that running statistics are estimated on at a time


class Run:
    """A run in progress."""

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        folder: Path,
        accelerator: Accelerator,
        callback: RunCallback,
        state: dict[str, Any] | None,
    ) -> None:
        """Open the data and prepare the network; `state` is that of a run to go on with."""
        self.recipe, self.folder, self.accelerator, self.callback = recipe, folder, accelerator, callback
        self.main, self.device = accelerator.is_main_process, accelerator.device
        self.position = Position()
        seed_everything(recipe.seed)

        images = open_data(recipe, network.labels, network.preprocess.input_size[0])
        for note in images.notes:
            callback.note(note)
        if state is None:
            if recipe.teacher == "source":
                check_untrained(network)
            network, self.fresh = setup.fit_network(network, images, recipe, callback.note)
            self.origin = network.weights.get("from") or network.source.name
        else:
            self.fresh, self.origin = tuple(state["fresh"]), state["origin"]
        self.network = network
        self.layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.model = network.model.to(self.device).to(memory_format=self.layout).train()
        teacher = source_network(self.model) if recipe.teacher == "source" else None
        distillation = None if teacher is None else Distillation(teacher, recipe.kd_temperature)
        self.objective = Objective(recipe, outputs_of(self.model), distillation)

        self.val = validation_share(images.val, network, None if recipe.labelled else teacher, accelerator)
        self.shown, self.learned = Part((self.val or images.train).images), Part(images.train.images)
        self.shown.transform = self.learned.transform = create_transform(**network.preprocess.to_dict())
        self.data = {"images": len(images.train.images), "classes": images.names and list(images.names)}
        augmentation = training_transform(recipe, network.preprocess)
        self.batches = Batches(
            images.train.images, augmentation, recipe, accelerator.process_index, accelerator.num_processes
        )
        self.epoch_steps = len(self.batches) // recipe.grad_accum_steps
        if not self.epoch_steps:
            raise RetrofitError(
                f"an epoch has {len(self.batches)} batches, a step takes {recipe.grad_accum_steps}; lower "
                "`grad_accum_steps` or `batch_size`"
            )
        self.steps = self.epoch_steps * recipe.epochs
        classes = images.train.classes if recipe.labelled else outputs_of(self.model)
        self.chance = ChanceWatch(recipe, self.steps, classes, network.weights["kind"] == "random")
        self._prepare_training()

    def _prepare_training(self) -> None:
        """Set up what changes the weights, and what follows them."""
        recipe, callback, accelerator = self.recipe, self.callback, self.accelerator
        setup.adjust_layers(self.model, recipe, self.steps * recipe.grad_accum_steps, callback.note)
        self.held: list[nn.Module] = []
        if recipe.freeze == "all-but-norm":
            self.held = unconverted_norms(self.model)
            trained = freeze_all_but_norm(self.model, self.fresh)
            callback.note(f"training {trained:,} parameters, those of the converted normalization layers")
        self.average: Any = ModelEmaV3(self.model, recipe.model_ema_decay) if recipe.model_ema else None
        self.validated: nn.Module = self.model if self.average is None else self.average.module
        self.schedule = setup.strength_schedule(self.model, self.average and self.validated, self.steps, recipe)
        fixed = strength_layers(self.model)
        self.fixed_strength = fixed[0].stored_strength if fixed else None
        if recipe.sync_norm and not sync_norms(self.model, self.device):
            raise RetrofitError("`sync_norm` finds no batch normalization to synchronize; drop it")
        optimizer = build_optimizer(self.model, recipe)
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.scheduler = build_scheduler(optimizer, recipe, self.epoch_steps)
        self.gate = StepGate(accelerator, self.model, optimizer, recipe.clip_grad)
        if recipe.log_with:
            settings = {name: str(value) for name, value in recipe.model_dump(mode="json").items()}
            accelerator.init_trackers(self.folder.name, settings)

    def begin(self) -> None:
        """Fill the folder with what the run begins with."""
        if self.main:
            (self.folder / STATE).mkdir(exist_ok=True)
            self.recipe.save(self.folder / RECIPE)
            self._write_artifact(self.model, self.folder / START, self.network.weights)
        self.callback.started(self.folder)
        seed_everything(self.recipe.seed + self.accelerator.process_index)
        self.checkpoint()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        processes = len(state["generators"])
        if processes != self.accelerator.num_processes:
            raise RetrofitError(
                f"the run had {processes} processes, this is {self.accelerator.num_processes}; resume it with as many"
            )
        if state["data"] != self.data:  # outputs and the order of images go by these
            what = "images" if state["data"]["classes"] == self.data["classes"] else "classes"
            raise RetrofitError(
                f"the {what} to train on are not those that the run in {self.folder} began with; put them back, or "
                "start a new run"
            )
        settings = self.recipe.decisive()
        if changed := [name for name in settings if settings[name] != state["recipe"][name]]:
            raise RetrofitError(
                f"{shortlist(changed)} of the recipe differ from those that the run in {self.folder} began with; pass "
                f"the recipe that is in it, {RECIPE}"
            )
        for name, part in self._stateful():
            part.load_state_dict(state[name])
        self.position = Position(**state["position"])
        set_random_state(state["generators"][self.accelerator.process_index])
        self.callback.note(f"resumed at step {self.position.step} of {self.steps}")

    def checkpoint(self) -> None:
        """Write the state of all processes; one that holds NaN or infinity ends the run instead."""
        self._check_finite()
        generators = gather_object([random_state()])
        if self.main:
            state = {name: part.state_dict() for name, part in self._stateful()}
            state |= {"generators": generators, "position": asdict(self.position), "data": self.data}
            state |= {"recipe": self.recipe.decisive()}
            save_state(self.folder / STATE, {**state, "fresh": list(self.fresh), "origin": self.origin})

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        """Give what has a state of its own."""
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average and self.validated,
            "schedule": self.schedule,
            "scaler": self.accelerator.scaler,
        }
        return ((name, part) for name, part in parts.items() if part is not None)

    def train_epoch(self, stop: Callable[[], bool]) -> bool:
        """Train to the end of the epoch; return whether to stop here, if need be before that."""
        position, recipe = self.position, self.recipe
        epoch, done = divmod(position.step, self.epoch_steps)
        batches = self.batches.epoch(epoch, done * recipe.grad_accum_steps)
        self.gate.start(position.loss_sum)
        self.model.train()
        for layer in self.held:  # their statistics are as frozen as their weights
            layer.training = False
        for _ in range(done, self.epoch_steps):
            began = time.monotonic()
            for _ in range(recipe.grad_accum_steps):
                self._train_batch(*next(batches))
            position.step += 1
            if self.scheduler is not None:
                self.scheduler.step_update(position.step)
            if self.average is not None:
                self.average.update(self.model, position.step)
            if self.schedule is not None:
                self.schedule.step()
                if self.schedule.turning:
                    self._recentre()
            position.seconds += time.monotonic() - began
            self.gate.send((self._step_done(epoch), position.images), self.last_images)
            stopping = self._any_process(stop())
            last = stopping or position.step % self.epoch_steps == 0
            saving = recipe.checkpoint_every and position.step % recipe.checkpoint_every == 0
            for verdict in self.gate.verdicts(all_of_them=bool(last or saving)):
                self._judge(verdict)
            if last:
                return stopping
            if saving:
                self.checkpoint()
        return False

    def _train_batch(self, images: Tensor, targets: Tensor) -> None:
        """Do a batch's share of a step."""
        self._list_unreadable(self.batches.replace_unreadable(images, targets), "another image takes its place")
        images = images.to(self.device, non_blocking=True, memory_format=self.layout)
        images, targets = self.objective.mix(images, targets.to(self.device, non_blocking=True))
        with self.accelerator.accumulate(self.wrapped):
            loss = self.objective.loss(self.wrapped(images), images, targets)
            self.gate.add(loss, len(images))
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.gate.close()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.last_images = images
        self.position.images += len(images)

    def _list_unreadable(self, names: Iterable[str], then: str) -> None:
        for name in dict.fromkeys(names):
            if name not in self.position.unreadable:
                self.position.unreadable.append(name)
                self.callback.note(f"warning: cannot read {name}; {then}")

    def _step_done(self, epoch: int) -> Step:
        """Describe the step that was just done; its loss is known once the device has come so far."""
        position = self.position
        return Step(
            epoch=epoch + 1,
            epochs=self.recipe.epochs,
            step=position.step,
            steps=self.steps,
            loss=math.nan,
            lr=self._rate,
            strength=self._strength,
            images_per_second=position.images * self.accelerator.num_processes / max(position.seconds, 1e-9),
        )

    def _judge(self, verdict: Verdict) -> None:
        """Tell of a step whose loss and gradient were finite; end the run after any other."""
        step, images = verdict.step
        if verdict.fault is not None:
            raise self._diverged(verdict.what, step.step, verdict.images, verdict.fault)
        self.position.loss_sum = verdict.loss_sum
        self.callback.step(step := replace(step, loss=verdict.loss_sum / images))
        if self.recipe.log_with:
            figures = {"train_loss": step.loss, "lr": step.lr, "strength": step.strength or 0.0}
            self.accelerator.log(figures, step=step.step)

    def _diverged(self, what: str, step: int, images: Tensor, fault: Fault = "state") -> RetrofitError:
        """Say what is not finite, which layer went first, where the last good state is, and what to do."""
        with local_norms(self.model):  # the other processes do not take part
            cause = divergence_of(self.model, images, fault, self.recipe)
        good = load_state(self.folder / STATE)["position"]["step"]
        where = f"the last good state is {self.folder / STATE}, step {good}"
        return RetrofitError(f"{what} is not finite at step {step} of {self.steps}: {cause[0]}; {where}; {cause[1]}")

    def _check_finite(self) -> None:
        if self.position.step and (name := not_finite(self.model)) is not None:
            raise self._diverged(name, self.position.step, self.last_images)

    @property
    def _rate(self) -> float:
        return float(max(group["lr"] for group in self.optimizer.param_groups))

    @property
    def _strength(self) -> float | None:
        moving = None if self.schedule is None else self.schedule.strength
        return self.fixed_strength if moving is None else moving

    def _any_process(self, stop: bool) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return stop
        if stop:
            self.accelerator.set_trigger()
        return bool(self.accelerator.check_trigger())

    def _recentre(self) -> None:
        """Before the way back, let constants say what the network estimates by now; the same on all processes."""
        images = self.learned.spread(_RECENTRED)
        if images is None:
            return
        moments = group_moments(images.to(self.device).split(_SHOWN), self.model)
        for model in dict.fromkeys((self.model, self.validated)):
            for name, (mean, deviation) in moments.items():
                move_standardisation(model.get_submodule(name), mean, deviation)

    def end_epoch(self) -> None:
        """Validate, write the epoch's line, and the network if it is the best so far."""
        position, recipe = self.position, self.recipe
        self._check_finite()
        loss_sum, images = summed([position.loss_sum, position.images], self.accelerator)
        if recipe.precise_bn is not None:
            for model in dict.fromkeys((self.model, self.validated)):
                update_bn(self.learned.batches(recipe.precise_bn, _PRECISE_BATCH, recipe.seed, self.device), model)
        accuracy = validate(self.validated, self.val, self.network.preprocess, recipe, self.accelerator)
        top1 = None if accuracy is None else accuracy.top1
        self._list_unreadable(() if accuracy is None else accuracy.skipped, "it is left out")
        self._list_unreadable(
            [name for names in gather_object([position.unreadable]) for name in names], "it is left out"
        )
        row: dict[str, Any] = {
            "epoch": position.step // self.epoch_steps,
            "step": position.step,
            "train_loss": loss_sum / images,
            "lr": self._rate,
            "strength": self._strength,
            "noise": None if self.schedule is None else self.schedule.noise,
            "images_per_second": round(images / max(position.seconds, 1e-9), 1),
            "unreadable": len(position.unreadable),
            "val_top1": top1,
            "val_top5": None if accuracy is None else accuracy.top5,
            "val_loss": None if accuracy is None or math.isnan(accuracy.loss) else accuracy.loss,
        }
        position.rows.append(row)
        position.loss_sum, position.images, position.seconds = 0.0, 0, 0.0
        reached = self._strength or 0.0
        if self.schedule is not None and self.schedule.strength is not None:
            reached = 1 - self.schedule.remaining  # on a rising way, t
        better = position.is_best(top1, reached)
        if self.main:
            if better:
                self._write_artifact(self.validated, self.folder / "best.safetensors")
            run_report.write_metrics(self.folder, position.rows)
        if recipe.log_with:
            figures = {name: value for name, value in row.items() if name.startswith("val_") and value is not None}
            self.accelerator.log(figures, step=position.step)
        self.callback.epoch(row)
        images_seen = 0 if accuracy is None else accuracy.images
        few = partial(self._on_device, self.shown)
        if self.main and (warning := self.chance.warning(row, images_seen, self.validated, few)) is not None:
            self.callback.note(warning)

    def _on_device(self, part: Part) -> Tensor | None:
        """Return a few images of a part; None if they cannot be read."""
        images = part.spread(_SHOWN)
        return None if images is None else images.to(self.device)

    def end(self) -> Result:
        """Write the networks and pictures that the run leaves behind."""
        position = self.position
        if self.main:
            self._write_artifact(self.model, self.folder / "last.safetensors")
            if self.val is None and position.step == self.steps:
                self._write_artifact(self.validated, self.folder / "best.safetensors")
            if position.rows and (problem := run_report.draw(self.folder, position.rows, self._lambdas)) is not None:
                self.callback.note(f"warning: a picture cannot be drawn ({problem}); the run is complete without it")
        self.accelerator.end_training()
        return Result(position.step, self.steps, position.rows, position.best, position.unreadable)

    def _lambdas(self) -> dict[str, Tensor]:
        """Return each layer's estimates of lambda; those of single samples on a few of the run's images."""
        with evaluating(self.validated):
            return lambda_values(self.validated, self._on_device(self.shown))

    def _write_artifact(self, model: nn.Module, path: Path, weights: dict[str, Any] | None = None) -> None:
        steps, network = self.position.step, self.network
        trained: dict[str, Any] = {"kind": "checkpoint", "from": f"{self.folder}, step {steps}, from {self.origin}"}
        if self.fixed_strength is not None:
            trained["steps"] = steps
        with local_norms(model):
            artifact.save(
                model,
                path,
                source=network.source,
                labels=network.labels,
                weights=weights or trained,
                preprocess=network.preprocess,
                force=True,
                proved=weights is None,  # by the artifact that the run began with
            )
