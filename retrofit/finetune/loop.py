"""The loop: one run from its recipe to its last step, in one process or many, interrupted or not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, gather_object
from timm.data import create_transform
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.evaluation.accuracy import evaluate
from retrofit.evaluation.strengths import odd_strengths
from retrofit.finetune import run_report
from retrofit.finetune.batch_statistics import local_norms, sync_norms
from retrofit.finetune.chance import all_alike, at_chance, explanation
from retrofit.finetune.classifier import outputs_of
from retrofit.finetune.distillation import Distillation, check_untrained, source_network
from retrofit.finetune.divergence import first_to_diverge, gradient_at_fault, gradient_norm, not_finite
from retrofit.finetune.loaders import Batches, Part, open_data, training_transform
from retrofit.finetune.objective import Objective
from retrofit.finetune.optim import build_optimizer, build_scheduler, freeze_all_but_norm, unconverted_norms
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_callback import Result, RunCallback, Step
from retrofit.finetune.run_state import load_state, random_state, save_state, seed_everything, set_random_state
from retrofit.finetune.running_statistics import estimated_layers, group_moments, move_standardisation, update_bn
from retrofit.finetune.setup import (
    check_unused,
    fit_network,
    make_accelerator,
    make_folder,
    removed_on_failure,
    validation_share,
)
from retrofit.finetune.strength_schedule import StrengthSchedule
from retrofit.layers import NormalityMixin
from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.lambdas import lambda_values
from retrofit.networks import artifact
from retrofit.networks.models import Network, open_model
from retrofit.surgery import strength_layers
from retrofit.utils.evaluating import evaluating
from retrofit.utils.text import one_line, shortlist

_REDRAW = 60.0  # seconds between pictures of a run in progress
_OLD = 0.05  # of running statistics, at the end of a run
_HALVINGS = 30  # of float16's scale of the loss in a row, which then is no longer the reason
_SHOWN = 8  # images that lambda is estimated on for a picture
_RECENTRED = 128  # images that moments are measured on before the way back
_PRECISE_BATCH = 32  # images that running statistics are estimated on at a time


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


def resume_network(folder: Path, network: str | None = None) -> Network:
    """Open the network that a run in `folder` began with.

    Args:
        folder: The run's.
        network: What builds it, if it is the user's own; as for `open_model`.

    Raises:
        RetrofitError: If there is no such run.
    """
    start = folder / "state" / "start.safetensors"
    if not start.is_file():
        raise RetrofitError(f"no run to resume in {folder}; give the folder of one, or start one without `resume`")
    return open_model(str(start), network=network)


def finetune(
    network: Network,
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    callback: RunCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train a network as a recipe says, and leave a run folder behind.

    Args:
        network: The network to train; to resume, the one that `resume_network` opens.
        recipe: The run's settings.
        folder: Where the run goes, empty or not there yet. It is made once data, recipe and network are known to fit.
        resume: Whether to go on from the state in `folder`.
        callback: Hears of the progress.
        stop: Asked after every step; a true answer saves the state and ends the run.

    Raises:
        UsageError: If a setting does not fit the network or the data.
        RetrofitError: If the data or state cannot be read, the disk is full, or the loss is not finite.
    """
    run = _Run(network, recipe, folder, resume, callback or RunCallback())
    return run.to_end(stop)


class _Run:
    """A run in progress."""

    def __init__(self, network: Network, recipe: Recipe, folder: Path, resume: bool, callback: RunCallback) -> None:
        self.recipe, self.folder = recipe, folder
        self.accelerator = make_accelerator(recipe, folder)
        self.main = self.accelerator.is_main_process
        if self.main and not resume:
            check_unused(folder)
        self.callback = callback if self.main else RunCallback()
        self.position = _Position()
        self.overflows = 0
        self.at_chance, self.warned_of_chance = 0, False
        self.drawn, self.undrawn = time.monotonic(), False
        seed_everything(recipe.seed)
        images = open_data(recipe, network.labels, network.preprocess.input_size[0])
        for note in images.notes:
            self.callback.note(note)
        state = load_state(folder / "state") if resume else None
        if state is None:
            if recipe.teacher == "source":
                check_untrained(network)
            self.network, self.fresh = fit_network(network, images, recipe, self.callback.note)
            self.origin = network.weights.get("from") or network.source.name
        else:
            self.network, self.fresh, self.origin = network, tuple(state["fresh"]), state["origin"]

        device = self.accelerator.device
        self.layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.plain = self.network.model.to(device).to(memory_format=self.layout).train()
        teacher = source_network(self.plain) if recipe.teacher == "source" else None
        distillation = None if teacher is None else Distillation(teacher, recipe.kd_temperature)
        self.objective = Objective(recipe, outputs_of(self.plain), distillation)
        self.val = validation_share(images.val, self.network, None if recipe.labelled else teacher, self.accelerator)
        self.classes = images.train.classes if recipe.labelled else outputs_of(self.plain)
        self.shown, self.learned = (Part(part.images) for part in (self.val or images.train, images.train))
        for part in (self.shown, self.learned):
            part.transform = create_transform(**self.network.preprocess.to_dict())
        self.batches = Batches(
            images.train.images,
            training_transform(recipe, self.network.preprocess),
            recipe,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        self.data = {"images": len(images.train.images), "classes": images.names and list(images.names)}
        self.epoch_steps = len(self.batches) // recipe.grad_accum_steps
        if not self.epoch_steps:
            raise RetrofitError(
                f"an epoch has {len(self.batches)} batches, a step takes {recipe.grad_accum_steps}; lower "
                "`grad_accum_steps` or `batch_size`"
            )
        self.steps = self.epoch_steps * recipe.epochs
        self._prepare_model()
        if state is None:
            self._begin()
        else:
            self._restore(state)
        if recipe.log_with:
            settings = {name: str(value) for name, value in recipe.model_dump(mode="json").items()}
            self.accelerator.init_trackers(folder.name, settings)

    def _begin(self) -> None:
        """Make the folder: nothing that is known from the start stands in the way of the run any more.

        One that is interrupted before its first state is saved could not be resumed: nothing of it stays.
        """
        with removed_on_failure(self.folder) if self.main else nullcontext():
            if self.main:
                make_folder(self.folder / "state")
                self.recipe.save(self.folder / "recipe.yaml")
                self._write_artifact(self.plain, self.folder / "state" / "start.safetensors", self.network.weights)
            self.callback.started(self.folder)
            seed_everything(self.recipe.seed + self.accelerator.process_index)
            self._checkpoint()

    def _prepare_model(self) -> None:
        """Set up what changes the network: averages, strength, synchronization, optimizer."""
        recipe, model = self.recipe, self.plain
        if recipe.bn_momentum is not None:
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.momentum = recipe.bn_momentum
        running = [m.momentum for m in model.modules() if isinstance(m, RunningNormality) and m.momentum is not None]
        batches = self.steps * recipe.grad_accum_steps
        if running and recipe.precise_bn is None and (old := (1 - min(running)) ** batches) > _OLD:
            self.callback.note(
                f"warning: running statistics move by {min(running):g} a batch, so after {batches} batches {old:.0%} "
                "of them are those from before; raise `bn_momentum`"
            )
        if recipe.precise_bn is not None and not estimated_layers(model):
            self.callback.note("no layer of the network tracks batch statistics: `precise_bn` does nothing")
        self.held: list[nn.Module] = []
        if recipe.freeze == "all-but-norm":
            self.held = unconverted_norms(model)
            trained = freeze_all_but_norm(model, self.fresh)
            self.callback.note(f"training {trained:,} parameters, those of the converted normalization layers")
        self.ema: Any = None
        if recipe.model_ema:
            self.ema = ModelEmaV3(model, recipe.model_ema_decay, use_warmup=recipe.model_ema_warmup)
        noisy = [module for module in model.modules() if isinstance(module, NormalityMixin)]
        if recipe.noise_kind is not None:
            for layer in noisy:
                layer.noise_kind = recipe.noise_kind
        if (recipe.noise or recipe.noise_kind) and self._converted and not noisy:
            self.callback.note("no layer of the network draws noise: `noise` and `noise_kind` of the recipe do nothing")
        self.schedule = None
        if self._converted:
            self.schedule = StrengthSchedule(
                model if self.ema is None else nn.ModuleList([model, self.ema.module]),
                self.steps,
                shape=recipe.strength_sched,
                ramp=recipe.strength_ramp,
                start=recipe.strength_start,
                end=recipe.strength_end,
                noise=recipe.noise if noisy else None,
                noise_start=recipe.noise_start,
                noise_ramp=recipe.noise_ramp,
            )
        else:
            self.callback.note("no layer of the network has a strength: this is plain training")
        if recipe.strength_sched == "off" and (odd := odd_strengths(model)):
            self.callback.note(f"warning: {odd}")
        if recipe.sync_norm and not sync_norms(model, self.accelerator.device):
            raise RetrofitError("`sync_norm` finds no batch normalization to synchronize; drop it")
        self.model, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, recipe))
        self.scheduler = build_scheduler(self.optimizer.optimizer, recipe, self.epoch_steps)

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
    def _converted(self) -> bool:
        """Whether the network has layers on the way from a source to a target."""
        return bool(strength_layers(self.plain))

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
        for layer in self.held:  # their statistics are as frozen as their weights
            layer.training = False
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
                if self.schedule.turning:
                    self._recentre()
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
                layer = self._layer_at_fault(images)
                why = "all layers are finite, the loss alone is not" if layer is None else f"{layer} went first"
                raise self._diverged("the loss", self.position.step + 1, why)
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self._check_gradient(images)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.last_images = images
        self.position.loss_sum += value * len(images)
        self.position.images += len(images)

    def _check_gradient(self, images: Tensor) -> None:
        """Clip the gradient, and end the run before one that is not finite reaches the weights."""
        clip = self.recipe.clip_grad
        norm = (
            gradient_norm(self.plain) if not clip else self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
        )
        self.overflows = 0 if math.isfinite(norm) else self.overflows + 1
        # With float16 the loss is scaled: a step whose gradient overflows is left out, and the scale halved.
        if self.overflows <= (0 if self.accelerator.scaler is None else _HALVINGS):
            return
        what, step = f"the gradient of {gradient_at_fault(self.plain)}", self.position.step + 1
        if (layer := self._layer_at_fault(images)) is not None:
            raise self._diverged(what, step, f"{layer} went first")
        advice = "start again with `amp=False`" if self.recipe.amp else "start again on another `device`"
        raise self._diverged(what, step, "the loss and all layers are finite, so the cause is not `lr`", advice)

    def _readable(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Put readable images of the batch in the places of those that could not be read, and list these."""
        unread = (targets < 0).nonzero().flatten().tolist()
        if not unread:
            return images, targets
        names = [self.batches.unreadable(int(targets[place])) for place in unread]
        readable = (targets >= 0).nonzero().flatten().tolist()
        if not readable:
            raise RetrofitError(
                f"none of a batch's {len(names)} images can be read ({shortlist(names)}); check the files"
            )
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
                self.callback.note(f"warning: cannot read {name}; {then}")

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
        self.callback.step(step)
        if self.recipe.log_with:
            figures = {"train_loss": step.loss, "lr": step.lr, "strength": step.strength or 0.0}
            self.accelerator.log(figures, step=step.step)

    @property
    def _rate(self) -> float:
        return float(max(group["lr"] for group in self.optimizer.param_groups))

    @property
    def _strength(self) -> float | None:
        if self.schedule is not None and self.schedule.strength is not None:
            return self.schedule.strength
        return float(strength_layers(self.plain)[0].strength) if self._converted else None

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
        loss_sum, images = self._summed([position.loss_sum, position.images])
        if self.recipe.precise_bn is not None:
            self._estimate_statistics(self.recipe.precise_bn)
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
        # Of two epochs the one that is further on the way to the target counts, whatever the way costs.
        top1, strength = row["val_top1"], self._strength or 0.0
        if self.schedule is not None and self.schedule.strength is not None:
            strength = 1 - self.schedule.remaining  # on a rising way, t
        better = top1 is not None and (
            position.best is None or (strength, top1) > (position.best_strength, position.best)
        )
        if better:
            position.best, position.best_strength = top1, strength
        if self.main:
            if better:
                self._write_artifact(self._answering, self.folder / "best.safetensors")
            run_report.write_metrics(self.folder, position.rows)
        if self.recipe.log_with:
            figures = {name: value for name, value in row.items() if name.startswith("val_") and value is not None}
            self.accelerator.log(figures, step=position.step)
        self.callback.epoch(row)
        if self.main:
            self._warn_of_chance(row)
        self._checkpoint()
        if self.main and time.monotonic() - self.drawn > _REDRAW:  # what may be missing comes after the state
            self._write_artifact(self.plain, self.folder / "last.safetensors")
            self._draw()

    def _summed(self, figures: list[float]) -> list[float]:
        """Return the sums of figures over all processes."""
        device = self.accelerator.device if self.accelerator.device.type == "cuda" else "cpu"
        sums: Tensor = self.accelerator.reduce(torch.tensor(figures, dtype=torch.float64, device=device))
        return sums.tolist()

    def _validate(self) -> dict[str, float | None]:
        if self.val is None:
            return {"val_top1": None, "val_top5": None, "val_loss": None}
        recipe = self.recipe
        if self.accelerator.num_processes > 1:  # each has running statistics of its own; the first's are saved
            for buffer in self._answering.buffers():
                buffer.copy_(broadcast(buffer.contiguous()))
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
        own = result.images - result.not_finite
        counts = [result.images, result.correct1, result.correct5, own, result.loss * own if own else 0.0]
        self.validated, correct1, correct5, finite, loss = self._summed(counts)
        return {
            "val_top1": 100 * correct1 / self.validated,
            "val_top5": 100 * correct5 / self.validated,
            "val_loss": loss / finite if finite else None,
        }

    def _warn_of_chance(self, row: dict[str, Any]) -> None:
        """Say once that the run learns nothing, and why; not before warm-up is over."""
        epoch, loss, classes = row["epoch"], row["val_loss"], self.classes
        early = epoch < self.recipe.epochs and epoch < max(2, self.recipe.warmup + 1)
        if self.warned_of_chance or early or loss is None or classes is None:
            return
        guessing = at_chance(row["val_top1"], loss, round(self.validated), classes)
        self.at_chance = self.at_chance + 1 if guessing else 0
        if self.at_chance < (2 if epoch < self.recipe.epochs else 1):  # the walk may stumble for an epoch
            return
        self.warned_of_chance = True
        images = self._few_images(self.shown)
        collapsed = images is not None and all_alike(self._answering, images)
        untrained = self.network.weights["kind"] == "random"
        why = explanation(self.plain, self.recipe, self.steps, collapsed, untrained)
        self.callback.note(
            f"warning: after epoch {epoch} the network does no better than guessing (top-1 {row['val_top1']:.1f}% of "
            f"{classes} classes, loss {loss:.2f}): {why}"
        )

    def _check_finite(self) -> None:
        """End the run before weights or statistics that are not finite are saved."""
        if self.position.step and (name := not_finite(self.plain)) is not None:
            layer = self._layer_at_fault(self.last_images)
            why = "no layer's output is affected" if layer is None else f"{layer} went first"
            raise self._diverged(name, self.position.step, why)

    def _layer_at_fault(self, images: Tensor) -> str | None:
        with local_norms(self.plain):  # the other processes do not take part
            return first_to_diverge(self.plain, images)

    def _diverged(
        self, what: str, step: int, why: str, advice: str = "lower `lr` or `noise`, or lengthen `strength_ramp`"
    ) -> RetrofitError:
        good = load_state(self.folder / "state")["position"]["step"]
        return RetrofitError(
            f"{what} is not finite at step {step} of {self.steps}: {why}; the last good state is "
            f"{self.folder / 'state'}, step {good}; {advice}"
        )

    def _write_artifact(self, model: nn.Module, path: Path, weights: dict[str, Any] | None = None) -> None:
        steps, network = self.position.step, self.network
        trained: dict[str, Any] = {"kind": "checkpoint", "from": f"{self.folder}, step {steps}, from {self.origin}"}
        if self._converted:
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
            )

    def _draw(self) -> None:
        """Draw the curves and the distribution of lambda so far; a picture that fails does not end the run."""
        if not self.position.rows:
            return
        try:
            run_report.plot_curves(self.folder / "curves.png", self.position.rows)
            if values := self._lambdas():
                run_report.plot_lambdas(self.folder / "lambda.png", values)
        except Exception as error:  # of matplotlib, the disk, an image, the network: none is worth the run
            if not self.undrawn:
                self.undrawn = True
                self.callback.note(
                    f"warning: a picture cannot be drawn ({one_line(error)}); the run goes on without it"
                )
        self.drawn = time.monotonic()

    def _lambdas(self) -> dict[str, Tensor]:
        """Return each layer's estimates of lambda; those of single samples on a few of the run's images."""
        with evaluating(self._answering):
            return lambda_values(self._answering, self._few_images(self.shown))

    def _recentre(self) -> None:
        """Before the way back, let constants say what the network estimates by now; the same on all processes."""
        images = self._few_images(self.learned, _RECENTRED)
        if images is None:
            return
        moments = group_moments(images.split(_SHOWN), self.plain)
        for model in (self.plain,) if self.ema is None else (self.plain, self.ema.module):
            for name, (mean, deviation) in moments.items():
                move_standardisation(model.get_submodule(name), mean, deviation)

    def _estimate_statistics(self, number: int) -> None:
        """Estimate running statistics on a random choice of training images, each time the same (PreciseBN)."""
        order = torch.randperm(len(self.learned), generator=torch.Generator().manual_seed(self.recipe.seed))
        chosen = order[:number]

        def batches() -> Iterator[Tensor]:
            for places in chosen.tensor_split(math.ceil(len(chosen) / _PRECISE_BATCH)):
                if (images := self._images(self.learned, places.tolist())) is not None:
                    yield images

        for model in dict.fromkeys((self.plain, self._answering)):
            update_bn(batches(), model)

    def _few_images(self, part: Part, number: int = _SHOWN) -> Tensor | None:
        """Return a few of a part's images, spread over its classes; None if they cannot be read."""
        return self._images(part, [place * len(part) // number for place in range(number)])

    def _images(self, part: Part, places: Iterable[int]) -> Tensor | None:
        """Return images of a part, those that can be read; None if there is none."""
        readable = [image for image, target in map(part.__getitem__, places) if target >= 0]
        return torch.stack(readable).to(self.accelerator.device) if readable else None

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
            "data": self.data,
        }
        save_state(self.folder / "state", state)

    def _restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        processes = len(state["generators"])
        if processes != self.accelerator.num_processes:
            raise RetrofitError(
                f"the run had {processes} processes, this is {self.accelerator.num_processes}; resume it with as many"
            )
        if (data := state.get("data", self.data)) != self.data:  # outputs and the order of images go by these
            what = "images" if data["classes"] == self.data["classes"] else "classes"
            raise RetrofitError(
                f"the {what} to train on are not those that the run in {self.folder} began with; put them back, or "
                "start a new run"
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
        self.callback.note(f"resumed at step {self.position.step} of {self.steps}")
