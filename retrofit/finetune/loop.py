"""The loop: one run from its recipe to its last step, in one process or many, interrupted or not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from retrofit import artifact
from retrofit.errors import RetrofitError
from retrofit.evaluate import evaluate
from retrofit.finetune import folder as paper
from retrofit.finetune.data import Batches, open_data, training_transform
from retrofit.finetune.distill import Distillation, source_network
from retrofit.finetune.head import outputs_of
from retrofit.finetune.health import first_to_diverge, is_finite
from retrofit.finetune.objective import Objective
from retrofit.finetune.optim import build_optimizer, build_scheduler, freeze_all_but_norm
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.setup import fit_network, make_accelerator, validation_share
from retrofit.finetune.state import load_state, random_state, save_state, seed_everything, set_random_state
from retrofit.finetune.strength import StrengthSchedule
from retrofit.finetune.sync import local_norms, sync_norms
from retrofit.finetune.watch import Result, Step, Watcher
from retrofit.lambdas import lambda_values
from retrofit.layers import NormalityMixin, StrengthMixin
from retrofit.layers.batch import RunningNormality
from retrofit.models import Network, open_model

_REDRAW = 60.0  # seconds between pictures of a run in progress
_OLD = 0.05  # of running statistics, at the end of a run


@dataclass
class _Position:
    """Where a run stands, beside its tensors."""

    step: int = 0
    loss_sum: float = 0.0
    images: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_strength: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def resume_network(folder: Path) -> Network:
    """Open the network that a run in `folder` began with.

    Raises:
        RetrofitError: If there is no such run.
    """
    start = folder / "state" / "start.safetensors"
    if not start.is_file():
        raise RetrofitError(f"no run to resume in {folder}; give the folder of one, or start one without --resume")
    return open_model(str(start))


def finetune(
    network: Network,
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train a network as a recipe says, and leave a run folder behind.

    Args:
        network: The network to train; to resume, the one that `resume_network` opens.
        recipe: The run's settings.
        folder: An existing folder for the run.
        resume: Whether to go on from the state in `folder`.
        watcher: Hears of the progress.
        stop: Asked after every step; a true answer saves the state and ends the run.

    Raises:
        UsageError: If a setting does not fit the network or the data.
        RetrofitError: If the data or state cannot be read, the disk is full, or the loss is not finite.
    """
    run = _Run(network, recipe, folder, resume, watcher or Watcher())
    return run.to_end(stop)


class _Run:
    """A run in progress."""

    def __init__(self, network: Network, recipe: Recipe, folder: Path, resume: bool, watcher: Watcher) -> None:
        self.recipe, self.folder = recipe, folder
        self.accelerator = make_accelerator(recipe, folder)
        self.main = self.accelerator.is_main_process
        self.watcher = watcher if self.main else Watcher()
        self.position = _Position()
        self.drawn = time.monotonic()
        seed_everything(recipe.seed)
        images = open_data(recipe, network.labels, network.preprocess.input_size[0])
        for note in images.notes:
            self.watcher.note(note)
        state = load_state(folder / "state") if resume else None
        if state is None:
            self.network, self.fresh = fit_network(network, images, recipe, self.watcher.note)
            self.origin = network.weights.get("from") or network.source.name
            if self.main:
                (folder / "state").mkdir(exist_ok=True)
                self._write_artifact(self.network.model, folder / "state" / "start.safetensors", network.weights)
        else:
            self.network, self.fresh, self.origin = network, tuple(state["fresh"]), state["origin"]

        device = self.accelerator.device
        self.layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.plain = self.network.model.to(device).to(memory_format=self.layout).train()
        teacher = source_network(self.plain) if recipe.teacher == "source" else None
        distillation = None if teacher is None else Distillation(teacher, recipe.kd_temperature)
        self.objective = Objective(recipe, outputs_of(self.plain), distillation)
        self.val = validation_share(images.val, self.network, None if recipe.labelled else teacher, self.accelerator)
        self.batches = Batches(
            images.train.images,
            training_transform(recipe, self.network.preprocess),
            recipe,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        self.epoch_steps = len(self.batches) // recipe.grad_accum_steps
        if not self.epoch_steps:
            raise RetrofitError(
                f"an epoch has {len(self.batches)} batches, a step takes {recipe.grad_accum_steps}; lower "
                "--grad-accum-steps or --batch-size"
            )
        self.steps = self.epoch_steps * recipe.epochs
        self._prepare_model()
        if state is None:
            seed_everything(recipe.seed + self.accelerator.process_index)
            self._checkpoint()
        else:
            self._restore(state)

    def _prepare_model(self) -> None:
        """Set up what changes the network: averages, strength, synchronization, optimizer."""
        recipe, model = self.recipe, self.plain
        if recipe.bn_momentum is not None:
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.momentum = recipe.bn_momentum
        running = [m.momentum for m in model.modules() if isinstance(m, RunningNormality) and m.momentum is not None]
        batches = self.steps * recipe.grad_accum_steps
        if running and (old := (1 - min(running)) ** batches) > _OLD:
            self.watcher.note(
                f"warning: running statistics move by {min(running):g} a batch, so after {batches} batches {old:.0%} "
                "of them are those from before; raise --bn-momentum"
            )
        if recipe.freeze == "all-but-norm":
            trained = freeze_all_but_norm(model, self.fresh)
            self.watcher.note(f"training {trained:,} parameters, those of the converted normalization layers")
        self.ema: Any = None
        if recipe.model_ema:
            self.ema = ModelEmaV3(model, recipe.model_ema_decay, use_warmup=recipe.model_ema_warmup)
        if recipe.noise_kind is not None:
            for module in model.modules():
                if isinstance(module, NormalityMixin):
                    module.noise_kind = recipe.noise_kind
        self.schedule = None
        if any(isinstance(module, StrengthMixin) for module in model.modules()):
            self.schedule = StrengthSchedule(
                model if self.ema is None else nn.ModuleList([model, self.ema.module]),
                self.steps,
                shape=recipe.strength_sched,
                ramp=recipe.strength_ramp,
                start=recipe.strength_start,
                end=recipe.strength_end,
                noise=recipe.noise,
                noise_start=recipe.noise_start,
                noise_ramp=recipe.noise_ramp,
            )
        else:
            self.watcher.note("no layer of the network has a strength: this is plain training")
        if recipe.sync_norm and not sync_norms(model, self.accelerator.device):
            raise RetrofitError("--sync-norm finds no batch normalization to synchronize; drop it")
        self.model, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, recipe))
        self.scheduler = build_scheduler(self.optimizer.optimizer, recipe, self.epoch_steps)
        if recipe.log_with:
            settings = {name: str(value) for name, value in recipe.model_dump(mode="json").items()}
            self.accelerator.init_trackers(self.folder.name, settings)

    def to_end(self, stop: Callable[[], bool]) -> Result:
        """Train until the last step, or until asked to stop."""
        position = self.position
        while position.step < self.steps and not self._epoch(stop):
            pass
        if self.main:
            self._write_artifact(self.plain, self.folder / "last.safetensors")
            if self.val is None and position.step == self.steps:
                self._write_artifact(self._answering, self.folder / "best.safetensors")
            self._draw()
        self.accelerator.end_training()
        return Result(position.step, self.steps, position.rows, position.best, position.unreadable)

    @property
    def _answering(self) -> nn.Module:
        """The network that is validated: the average of the weights, if there is one."""
        answering: nn.Module = self.plain if self.ema is None else self.ema.module
        return answering

    def _epoch(self, stop: Callable[[], bool]) -> bool:
        """Train to the end of the epoch; return whether to stop here."""
        position, recipe = self.position, self.recipe
        number, done = divmod(position.step, self.epoch_steps)
        batches = self.batches.epoch(number, done * recipe.grad_accum_steps)
        self.objective.start_epoch(number)
        self.model.train()
        for _ in range(done, self.epoch_steps):
            began = time.monotonic()
            for _ in range(recipe.grad_accum_steps):
                self._batch(*next(batches))
            position.step += 1
            if self.scheduler is not None:
                self.scheduler.step_update(position.step)
            if self.ema is not None:
                self.ema.update(self.plain, position.step)
            if self.schedule is not None:
                self.schedule.step()
            position.seconds += time.monotonic() - began
            self._tell(number)
            stopping = self._all_agree(stop())
            whole = position.step % self.epoch_steps == 0
            if not whole and (stopping or (recipe.checkpoint_every and position.step % recipe.checkpoint_every == 0)):
                self._checkpoint()
            if stopping and not whole:
                return True
        self._end_epoch(number)
        return stopping

    def _batch(self, images: Tensor, targets: Tensor) -> None:
        """Do a batch's share of a step."""
        images, targets = self._readable(images, targets)
        device = self.accelerator.device
        images = images.to(device, non_blocking=True, memory_format=self.layout)
        images, targets = self.objective.mix(images, targets.to(device, non_blocking=True))
        with self.accelerator.accumulate(self.model):
            loss = self.objective.loss(self.model(images), images, targets)
            value = loss.item()
            if not math.isfinite(value):
                raise self._diverged(images, "the loss")
            self.accelerator.backward(loss)
            if self.recipe.clip_grad is not None and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.last_images = images
        self.position.loss_sum += value * len(images)
        self.position.images += len(images)

    def _readable(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Put readable images of the batch in the places of those that could not be read, and list these."""
        unread = (targets < 0).nonzero().flatten().tolist()
        if not unread:
            return images, targets
        names = [self.batches.unreadable(int(targets[place])) for place in unread]
        readable = (targets >= 0).nonzero().flatten().tolist()
        if not readable:
            raise RetrofitError(f"none of a batch's {len(names)} images can be read ({names[0]}, ...); check the files")
        self._list(names, "another image takes its place")
        for number, place in enumerate(unread):
            images[place] = images[readable[number % len(readable)]]
            targets[place] = targets[readable[number % len(readable)]]
        return images, targets

    def _list(self, names: Iterable[str], then: str) -> None:
        """List images that cannot be read, and say so of those that are new."""
        for name in dict.fromkeys(names):
            if name not in self.position.unreadable:
                self.position.unreadable.append(name)
                self.watcher.note(f"warning: cannot read {name}; {then}")

    def _tell(self, number: int) -> None:
        position = self.position
        step = Step(
            epoch=number + 1,
            epochs=self.recipe.epochs,
            step=position.step,
            steps=self.steps,
            loss=position.loss_sum / position.images,
            lr=self._rate,
            strength=self._strength,
            images_per_second=position.images * self.accelerator.num_processes / max(position.seconds, 1e-9),
        )
        self.watcher.step(step)
        if self.recipe.log_with:
            figures = {"train_loss": step.loss, "lr": step.lr, "strength": step.strength or 0.0}
            self.accelerator.log(figures, step=step.step)

    @property
    def _rate(self) -> float:
        return float(max(group["lr"] for group in self.optimizer.param_groups))

    @property
    def _strength(self) -> float | None:
        layers = (module for module in self.plain.modules() if isinstance(module, StrengthMixin))
        layer = next(layers, None)
        if self.schedule is not None and self.schedule.strength is not None:
            return self.schedule.strength
        return None if layer is None else float(layer.strength)

    def _all_agree(self, stop: bool) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return stop
        if stop:
            self.accelerator.set_trigger()
        return bool(self.accelerator.check_trigger())

    def _end_epoch(self, number: int) -> None:
        """Validate, write the epoch's line and the artifacts, and save the state."""
        position = self.position
        self._check_finite()
        sums = torch.tensor([position.loss_sum, position.images], dtype=torch.float64, device=self._sum_device)
        loss_sum, images = self.accelerator.reduce(sums).tolist()
        accuracy = self._validate()
        self._list([name for names in gather_object([position.unreadable]) for name in names], "it is left out")
        row: dict[str, Any] = {
            "epoch": number + 1,
            "step": position.step,
            "train_loss": loss_sum / images,
            "lr": self._rate,
            "strength": self._strength,
            "noise": None if self.schedule is None else self.schedule.noise,
            "images_per_second": round(images / max(position.seconds, 1e-9), 1),
            "unreadable": len(position.unreadable),
            **accuracy,
        }
        position.rows.append(row)
        position.loss_sum, position.images, position.seconds = 0.0, 0, 0.0
        top1, strength = row["val_top1"], self._strength or 0.0
        # Of two epochs the one that is further on the way to the target counts, whatever the way costs.
        better = top1 is not None and (
            position.best is None or (strength, top1) > (position.best_strength, position.best)
        )
        if better:
            position.best, position.best_strength = top1, strength
        if self.main:
            if better:
                self._write_artifact(self._answering, self.folder / "best.safetensors")
            paper.write_metrics(self.folder, position.rows)
            if time.monotonic() - self.drawn > _REDRAW:
                self._write_artifact(self.plain, self.folder / "last.safetensors")
                self._draw()
        if self.recipe.log_with:
            figures = {name: value for name, value in row.items() if name.startswith("val_") and value is not None}
            self.accelerator.log(figures, step=position.step)
        self.watcher.epoch(row)
        self._checkpoint()

    @property
    def _sum_device(self) -> torch.device:
        return self.accelerator.device if self.accelerator.device.type == "cuda" else torch.device("cpu")

    def _validate(self) -> dict[str, float | None]:
        if self.val is None:
            return {"val_top1": None, "val_top5": None}
        recipe = self.recipe
        precision = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.accelerator.mixed_precision)
        result = evaluate(
            self._answering,
            self.val,
            self.network.preprocess,
            batch_size=recipe.batch_size,
            workers=recipe.workers,
            device=self.accelerator.device,
            amp=precision,
            channels_last=recipe.channels_last,
        )
        self._list(result.skipped, "it is left out")
        counts = torch.tensor([result.images, result.correct1, result.correct5], device=self.accelerator.device)
        images, correct1, correct5 = self.accelerator.reduce(counts).tolist()
        return {"val_top1": 100 * correct1 / images, "val_top5": 100 * correct5 / images}

    def _check_finite(self) -> None:
        if self.position.step and not is_finite(self.plain):
            raise self._diverged(self.last_images, "a parameter or statistic")

    def _diverged(self, images: Tensor, what: str) -> RetrofitError:
        with local_norms(self.plain):  # the other processes do not take part
            culprit = first_to_diverge(self.plain, images)
        good = load_state(self.folder / "state")["position"]["step"]
        return RetrofitError(
            f"{what} is not finite at step {self.position.step + 1} of {self.steps}: {culprit} went first; the last "
            f"good state is {self.folder / 'state'}, step {good}; lower --lr or --noise, or lengthen --strength-ramp"
        )

    def _write_artifact(self, model: nn.Module, path: Path, weights: dict[str, Any] | None = None) -> None:
        trained = {"kind": "checkpoint", "from": f"{self.folder}, step {self.position.step}, from {self.origin}"}
        network = self.network
        with local_norms(model):
            artifact.save(
                model,
                path,
                source=network.source,
                labels=network.labels,
                weights=weights or trained,
                preprocess=network.preprocess,
                force=True,
            )

    def _draw(self) -> None:
        """Draw the curves and the distribution of lambda so far."""
        if not self.position.rows:
            return
        paper.plot_curves(self.folder / "curves.png", self.position.rows)
        model = self._answering.eval()
        images = None
        if self.val is not None and len(self.val.images):
            images = torch.stack([self.val.images[number][0] for number in range(min(8, len(self.val.images)))])
        if values := lambda_values(model, images):
            paper.plot_lambdas(self.folder / "lambda.png", values)
        self.drawn = time.monotonic()

    def _checkpoint(self) -> None:
        """Write the state of all processes."""
        self._check_finite()
        generators = gather_object([random_state()])
        if not self.main:
            return
        scaler = self.accelerator.scaler
        state = {
            "model": self.plain.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "generators": generators,
            "position": asdict(self.position),
            "fresh": list(self.fresh),
            "origin": self.origin,
        }
        save_state(self.folder / "state", state)

    def _restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        processes = len(state["generators"])
        if processes != self.accelerator.num_processes:
            raise RetrofitError(
                f"the run had {processes} processes, this is {self.accelerator.num_processes}; resume it with as many"
            )
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.position = _Position(**state["position"])
        set_random_state(state["generators"][self.accelerator.process_index])
        self.watcher.note(f"resumed at step {self.position.step} of {self.steps}")
