"""One run from its recipe to its last step, in one process or many, interrupted or not."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import gather_object
from timm.data import create_transform
from timm.utils import ModelEmaV3, random_seed
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune import prepare, run_report, run_state
from retrofit.finetune.data import Batches, Part, open_data, summed, validate, validation_share
from retrofit.finetune.divergence import (
    ChanceWatch,
    Fault,
    StepGate,
    Verdict,
    divergence_of,
    not_finite,
)
from retrofit.finetune.recipe import FREE, PLACES, Recipe
from retrofit.finetune.run_report import Position, RunCallback, Step
from retrofit.finetune.statistics import local_norms, recentre, sync_norms, update_bn
from retrofit.finetune.strength_schedule import StrengthSchedule
from retrofit.networks import artifact
from retrofit.networks.models import Network, open_model
from retrofit.surgery import strength_layers
from retrofit.utils.text import shortlist

# images that show whether the network answers the same to all
_FEW = 8
# images that moments are measured on before the way back, a few at a time
_RECENTRED = 128
# images that running statistics are estimated on at a time
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
    """Train a network as a recipe says; the run's folder is new, empty, or of a run killed before
    its first state.

    To `resume`, from the state in the folder, give the network that `resume_network` opens. `stop`
    is asked after each step; a true answer saves the state and ends the run. A UsageError says
    which setting does not fit the network or the data; a RetrofitError, that the folder is in use,
    the data or state cannot be read, the disk is full, or the loss is not finite. A run that has
    saved no state leaves nothing behind.
    """
    accelerator = make_accelerator(recipe, folder)
    main = accelerator.is_main_process
    with run_state.owned(folder, resume) if main else nullcontext():
        state = run_state.load_state(folder) if resume else None
        run = Run(
            network,
            recipe,
            folder,
            accelerator,
            callback if main and callback else RunCallback(),
            state,
        )
        if state is None:
            run.begin()
        else:
            run.restore(state)
        stopped = False
        while not (run.position.finished or stopped):
            stopped = run.train_epoch(stop)
            if run.position.step % run.epoch_steps == 0:
                run.end_epoch()
            run.checkpoint()
        return run.end()


def make_accelerator(recipe: Recipe, folder: Path) -> Accelerator:
    """Set up the run that `torchrun` or `accelerate launch` started; a UsageError names a missing
    device or tracker.
    """
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if recipe.device not in (None, "cpu") and (present is None or recipe.device != present.type):
        have = present.type if present else "no accelerator"
        raise UsageError(
            f"cannot use `device={recipe.device!r}`: there is {have}; leave it out or use cpu"
        )
    cpu = recipe.device == "cpu" or present is None
    if cpu and recipe.amp_dtype == "float16":
        raise UsageError("mixed precision on a CPU is bfloat16's; drop `amp_dtype='float16'`")
    half = {"bfloat16": "bf16", "float16": "fp16", None: "bf16" if cpu else "fp16"}[
        recipe.amp_dtype
    ]
    trackers = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    if missing := [name for name in recipe.log_with if name not in trackers]:
        have = f"installed here: {', '.join(trackers) or 'none'}"
        raise UsageError(
            f"`log_with={missing[:1]!r}` is no tracker of accelerate here ({have}); install it"
        )
    return Accelerator(
        cpu=cpu,
        mixed_precision=half if recipe.amp else "no",
        gradient_accumulation_steps=recipe.grad_accum_steps,
        log_with=recipe.log_with or None,
        project_dir=str(folder),
    )


def recipe_network(recipe: Recipe, network: str | None = None) -> Network:
    """Open the network that a recipe names, or raise UsageError if it names none; random weights
    come from its seed.

    `network` is `open_model`'s: what builds it, if an artifact holds the user's own.
    """
    if recipe.model is None:
        raise UsageError(
            "there is no network to train; give MODEL, an artifact or a network's name"
        )
    random_seed(recipe.seed)
    return open_model(
        recipe.model,
        pretrained=recipe.pretrained,
        checkpoint=recipe.checkpoint,
        match=recipe.match,
        num_classes=recipe.num_classes
        if recipe.checkpoint
        # else the run replaces the classifier
        else None,
        img_size=recipe.img_size if artifact.artifact_path(recipe.model) is None else None,
        network=network,
    )


def resume_network(folder: Path, network: str | None = None) -> Network:
    """Open the network that a run in `folder` began with; `network` as for `open_model`.
    RetrofitError if none did.
    """
    if not (folder / run_state.START).is_file():
        raise RetrofitError(
            f"no run to resume in {folder}; give the folder of one, or start one without `resume`"
        )
    return open_model(str(folder / run_state.START), network=network)


class Run:
    """A run in progress; it may be one of several processes, and go on with an interrupted run."""

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
        self.recipe, self.folder, self.accelerator, self.callback = (
            recipe,
            folder,
            accelerator,
            callback,
        )
        self.device = accelerator.device
        random_seed(recipe.seed)

        images = open_data(recipe, network.labels, network.preprocess.input_size[0])
        for note in images.notes:
            callback.note(note)
        if state is None:
            network, self.new_tensors = prepare.fit_network(network, images, recipe, callback.note)
        else:
            self.new_tensors = tuple(state["new_tensors"])
        self.network, outputs = network, prepare.scores_of(network)
        self.layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.model = network.model.to(self.device).to(memory_format=self.layout).train()
        teacher = (
            prepare.source_network(network, state is not None)
            if recipe.teacher == "source"
            else None
        )
        self.objective = prepare.Objective(recipe, outputs, teacher)
        self.val = validation_share(
            images.val, network.preprocess, None if recipe.labelled else teacher, accelerator
        )
        as_validated = create_transform(**network.preprocess.to_dict())
        self.plain_images = Part(images.train.images, transform=as_validated)
        rank, world = accelerator.process_index, accelerator.num_processes
        self.batches = Batches(images.train.images, recipe, network.preprocess, rank, world)
        # what a resumed run must have as it was
        self.kept = {
            **recipe.model_dump(mode="json", exclude=set(FREE | PLACES)),
            "images": len(images.train.images),
            "classes": images.names and list(images.names),
            "processes": world,
        }
        self.epoch_steps = len(self.batches) // recipe.grad_accum_steps
        if not self.epoch_steps:
            what = (
                f"an epoch has {len(self.batches)} batches, a step takes {recipe.grad_accum_steps}"
            )
            raise RetrofitError(f"{what}; lower `grad_accum_steps` or `batch_size`")
        self.position = Position(self.epoch_steps * recipe.epochs)
        classes = images.train.classes if recipe.labelled else outputs
        self.chance = ChanceWatch(
            recipe, self.position.steps, classes, network.weights["kind"] == "random"
        )
        self._prepare_training()

    def _prepare_training(self) -> None:
        """Set up what changes the weights, and what follows them."""
        recipe, callback, accelerator = self.recipe, self.callback, self.accelerator
        prepare.adjust_layers(
            self.model, recipe, self.position.steps * recipe.grad_accum_steps, callback.note
        )
        frozen = recipe.freeze == "all-but-norm"
        self.frozen_norms = (
            prepare.freeze_all_but_norm(self.model, self.new_tensors, callback.note)
            if frozen
            else []
        )
        self.average: Any = (
            ModelEmaV3(self.model, recipe.model_ema_decay) if recipe.model_ema else None
        )
        self.networks = [self.model] if self.average is None else [self.model, self.average.module]
        self.validated: nn.Module = self.networks[-1]
        self.schedule: StrengthSchedule | None = None
        if strength_layers(self.model):
            noise = recipe.noise if prepare.draws_noise(self.model) else None
            walk: dict[str, Any] = {
                "noise": noise,
                "noise_start": recipe.noise_start,
                "noise_ramp": recipe.noise_ramp,
            }
            walk |= {
                "shape": recipe.strength_sched,
                "ramp": recipe.strength_ramp,
                "end": recipe.strength_end,
            }
            self.schedule = StrengthSchedule(
                nn.ModuleList(self.networks), self.position.steps, **walk
            )
        if recipe.sync_norm and not sync_norms(self.model, self.device):
            raise RetrofitError("`sync_norm` finds no batch normalization to synchronize; drop it")
        optimizer = prepare.build_optimizer(self.model, recipe)
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.scheduler = prepare.build_scheduler(optimizer, recipe, self.epoch_steps)
        self.gate = StepGate(accelerator, self.model, optimizer, recipe.clip_grad)
        accelerator.init_trackers(self.folder.name, {name: str(value) for name, value in recipe})
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        parts |= {
            "average": self.average and self.validated,
            "schedule": self.schedule,
            "scaler": accelerator.scaler,
        }
        self.stateful: dict[str, Any] = {
            name: part for name, part in parts.items() if part is not None
        }

    def begin(self) -> None:
        """Fill the folder with what the run begins with."""
        if self.accelerator.is_main_process:
            (self.folder / run_state.STATE).mkdir(exist_ok=True)
            self.recipe.save(self.folder / run_state.RECIPE)
            self._write_artifact(self.model, self.folder / run_state.START, self.network.weights)
        self.callback.started(self.folder)
        random_seed(self.recipe.seed, self.accelerator.process_index)
        self.checkpoint()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        if changed := [name for name, value in self.kept.items() if value != state["kept"][name]]:
            what = (
                f"{shortlist(changed)} differ from those that the run in {self.folder} began with"
            )
            how = f"the same images, as many processes, and the recipe in it, {run_state.RECIPE}"
            raise RetrofitError(f"{what}; resume it with {how}")
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])
        self.position = Position(**state["position"])
        run_state.set_random_state(state["generators"][self.accelerator.process_index])
        self.callback.note(f"resumed at step {self.position.step} of {self.position.steps}")

    def checkpoint(self) -> None:
        """Write the state of all processes."""
        generators = gather_object([run_state.random_state()])
        if self.accelerator.is_main_process:
            state = {name: part.state_dict() for name, part in self.stateful.items()}
            state |= {
                "generators": generators,
                "position": asdict(self.position),
                "kept": self.kept,
            }
            state["new_tensors"] = list(self.new_tensors)
            run_state.save_state(self.folder, state)

    def train_epoch(self, stop: Callable[[], bool]) -> bool:
        """Train to the end of the epoch; return whether to stop here, if need be before that."""
        position, recipe = self.position, self.recipe
        epoch, done = divmod(position.step, self.epoch_steps)
        batches = self.batches.epoch(epoch, done * recipe.grad_accum_steps)
        self.gate.start(position.loss_sum)
        self.model.train()
        # their statistics are as frozen as their weights
        for layer in self.frozen_norms:
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
                if (
                    self.schedule.turning
                ):  # before the way back, constants say what the network estimates by now
                    for model in self.networks:
                        recentre(self.plain_images.batches(_RECENTRED, _FEW), model, self.device)
            position.seconds += time.monotonic() - began
            self.gate.send((self._step(epoch), position.images), self.last_images)
            stopping = stop()
            # because one was asked to
            if self.accelerator.num_processes > 1:
                stopping = summed([stopping], self.accelerator)[0] > 0
            last = stopping or position.step % self.epoch_steps == 0
            saving = recipe.checkpoint_every and position.step % recipe.checkpoint_every == 0
            for verdict in self.gate.verdicts(all_of_them=bool(last or saving)):
                self._judge(verdict)
            if (last or saving) and (name := not_finite(self.model)) is not None:
                raise self._diverged(name, position.step, self.last_images)
            if last:
                return stopping
            if saving:
                self.checkpoint()
        return False

    def _train_batch(self, images: Tensor, targets: Tensor) -> None:
        """Do a batch's share of a step."""
        self._list_unreadable(
            self.batches.replace_unreadable(images, targets), "another image takes its place"
        )
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
        for name in names:
            if name not in self.position.unreadable:
                self.position.unreadable.append(name)
                self.callback.note(f"warning: cannot read {name}; {then}")

    def _step(self, epoch: int) -> Step:
        """Describe the step that was just done; its loss is known once the device has come so far."""
        position = self.position
        rate = position.images * self.accelerator.num_processes / max(position.seconds, 1e-9)
        where = (epoch + 1, self.recipe.epochs, position.step, position.steps)
        return Step(*where, loss=math.nan, **self._now(), images_per_second=rate)

    def _judge(self, verdict: Verdict) -> None:
        """Report a step whose loss and gradient were finite; end the run after any other."""
        step, images = verdict.step
        if verdict.fault is not None:
            raise self._diverged(verdict.what, step.step, verdict.images, verdict.fault)
        self.position.loss_sum = verdict.loss_sum
        self.callback.step(step := replace(step, loss=verdict.loss_sum / images))
        figures = {"train_loss": step.loss, "lr": step.lr, "strength": step.strength or 0.0}
        self.accelerator.log(figures, step=step.step)

    def _diverged(
        self, what: str, step: int, images: Tensor, fault: Fault = "state"
    ) -> RetrofitError:
        """Say what is not finite, which layer went first, where the last good state is, and what to
        do.
        """
        # the other processes do not take part
        with local_norms(self.model):
            cause, advice = divergence_of(self.model, images, fault, self.recipe)
        good = run_state.load_state(self.folder)["position"]["step"]
        what = f"{what} is not finite at step {step} of {self.position.steps}: {cause}"
        where = f"the last good state is {self.folder / run_state.STATE}, step {good}"
        return RetrofitError(f"{what}; {where}; {advice}")

    def _now(self) -> dict[str, Any]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"lr": float(max(rates)), "strength": self.schedule and self.schedule.strength}

    def end_epoch(self) -> None:
        """Validate, write the epoch's line, and the network if it is the best so far."""
        position, recipe = self.position, self.recipe
        loss_sum, images = summed([position.loss_sum, position.images], self.accelerator)
        if recipe.precise_bn is not None:
            for model in self.networks:
                update_bn(
                    self.plain_images.batches(recipe.precise_bn, _PRECISE_BATCH), model, self.device
                )
        accuracy = None
        measured: dict[str, Any] = dict.fromkeys(("val_top1", "val_top5", "val_loss"))
        if self.val is not None:
            accuracy = validate(
                self.validated, self.val, self.network.preprocess, recipe, self.accelerator
            )
            loss = None if math.isnan(accuracy.loss) else accuracy.loss
            measured = {"val_top1": accuracy.top1, "val_top5": accuracy.top5, "val_loss": loss}
            self._list_unreadable(accuracy.skipped, "it is left out")
        for names in gather_object([position.unreadable]):
            self._list_unreadable(names, "it is left out")
        row: dict[str, Any] = {
            "epoch": position.step // self.epoch_steps,
            "step": position.step,
            "train_loss": loss_sum / images,
            **self._now(),
            "noise": self.schedule and self.schedule.noise,
            "images_per_second": round(images / max(position.seconds, 1e-9), 1),
            "unreadable": len(position.unreadable),
            **measured,
        }
        position.rows.append(row)
        position.loss_sum, position.images, position.seconds = 0.0, 0, 0.0
        better = position.is_best(
            row["val_top1"], 0.0 if self.schedule is None else 1 - self.schedule.remaining
        )
        self.accelerator.log(
            {name: value for name, value in measured.items() if value is not None}, position.step
        )
        if not self.accelerator.is_main_process:
            return
        if better:
            self._write_artifact(self.validated, self.folder / "best.safetensors")
        run_report.write_metrics(self.folder, position.rows)
        # which may look at the files
        self.callback.epoch(row)
        if accuracy is not None:
            few = self.plain_images.batches(_FEW, _FEW)
            if (
                warning := self.chance.warning(row, accuracy.images, self.validated, few)
            ) is not None:
                self.callback.note(warning)

    def end(self) -> Position:
        """Write the networks and the picture that the run leaves behind."""
        position = self.position
        if self.accelerator.is_main_process:
            self._write_artifact(self.model, self.folder / "last.safetensors")
            if self.val is None and position.finished:
                self._write_artifact(self.validated, self.folder / "best.safetensors")
            if (
                position.rows
                and (problem := run_report.draw(self.folder, position.rows)) is not None
            ):
                self.callback.note(
                    f"warning: a picture cannot be drawn ({problem}); the run is complete without it"
                )
        self.accelerator.end_training()
        return position

    def _write_artifact(
        self, model: nn.Module, path: Path, weights: dict[str, Any] | None = None
    ) -> None:
        steps, network = self.position.step, self.network
        origin = network.weights.get("from") or network.source.name
        trained: dict[str, Any] = {
            "kind": "checkpoint",
            "from": f"{self.folder}, step {steps}, from {origin}",
        }
        if self.schedule is not None:
            trained["steps"] = steps
        with local_norms(model):
            # which proves that the network can be built again
            first = weights is not None
            artifact.save(
                model,
                path,
                source=network.source,
                weights=weights or trained,
                force=True,
                proved=not first,
            )
