"""A run before its first step: the network, the data, and what changes the weights."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from timm.data import create_transform
from timm.utils import ModelEmaV3, random_seed
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.evaluation import layout_of
from retrofit.finetune import layer_settings
from retrofit.finetune.batches import Batches
from retrofit.finetune.chance_watch import ChanceWatch
from retrofit.finetune.objective import Objective
from retrofit.finetune.optimization import build_lr_schedule, build_optimizer
from retrofit.finetune.recipe import FREE, PLACES, Recipe
from retrofit.finetune.run_images import Images, ImageSubset, open_data
from retrofit.finetune.run_network import fit_network, scores_of, source_network
from retrofit.finetune.run_position import Position
from retrofit.finetune.run_report import RunCallback
from retrofit.finetune.step_gate import StepGate
from retrofit.finetune.strength_schedule import StrengthSchedule
from retrofit.finetune.validation import validation_share
from retrofit.images.dataset import ImageData
from retrofit.networks.open_model import Network
from retrofit.running_statistics import sync_norms
from retrofit.surgery import strength_layers


def _identity(data: ImageData) -> list[Any]:
    """Return what tells images from others: their order decides which are held out."""
    return [len(data.images), data.fingerprint]


class PreparedRun:
    """The network, the data and all that changes weights in a run.

    Args:
        network: The network to train.
        recipe: The settings of the run.
        folder: The run's folder.
        accelerator: The processes and the device.
        callback: Called with the run's progress.
        state: That of a run to go on with; None for a new run.
    """

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        folder: Path,
        accelerator: Accelerator,
        callback: RunCallback,
        state: dict[str, Any] | None,
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.accelerator = accelerator
        self.callback = callback
        self.device = accelerator.device
        random_seed(recipe.seed)

        input_size = network.preprocess.input_size
        channels = input_size[0]
        images = open_data(recipe, network.labels, channels)
        for note in images.notes:
            callback.note(note)
        if state is None:
            network, self.new_tensors = fit_network(network, images, recipe, callback.note)
        else:
            new_tensors = state["new_tensors"]
            self.new_tensors = tuple(new_tensors)
        self.network = network
        outputs = scores_of(network)
        self.layout = layout_of(recipe.channels_last)
        model = network.model.to(self.device)
        self.model = model.to(memory_format=self.layout)
        self.model.train()
        teacher = None
        if recipe.teacher == "source":
            is_resumed = state is not None
            teacher = source_network(network, resumed=is_resumed)
        self.objective = Objective(recipe, outputs, teacher)
        # Without labels, the teacher labels the images to validate on.
        classes: int | None = outputs
        labeller = teacher
        if recipe.labelled:
            classes = images.train.classes
            labeller = None
        self._set_up_data(images, labeller)
        steps = self.epoch_steps * recipe.epochs
        self.position = Position(steps)
        weights = network.weights["kind"]
        untrained = weights == "random"
        names = network.labels
        self.chance = ChanceWatch(recipe, steps, classes, untrained, names)
        self._set_up_training()

    def _set_up_data(self, images: Images, labeller: nn.Module | None) -> None:
        """Set up what is trained and validated on; a labeller gives the labels to validate with."""
        recipe = self.recipe
        accelerator = self.accelerator
        preprocess = self.network.preprocess
        train = images.train.images
        rank = accelerator.process_index
        processes = accelerator.num_processes
        self.val = validation_share(images.val, preprocess, labeller, accelerator)
        as_validated = create_transform(**preprocess.to_dict())
        self.plain_images = ImageSubset(train, transform=as_validated)
        self.batches = Batches(train, recipe, preprocess, rank, processes, self.device)
        settings = recipe.model_dump(mode="json", exclude=set(FREE | PLACES))
        # Settings and data that must be the same when the run is resumed.
        self.kept = {
            **settings,
            "images": [_identity(images.train), images.val and _identity(images.val)],
            "classes": images.names and list(images.names),
            "processes": processes,
        }
        batch_count = len(self.batches)
        self.epoch_steps = batch_count // recipe.grad_accum_steps
        if not self.epoch_steps:
            raise RetrofitError(
                f"an epoch has {batch_count} batches, a step takes "
                f"{recipe.grad_accum_steps}; lower `grad_accum_steps` or `batch_size`"
            )

    def _set_up_training(self) -> None:
        """Set up what changes the weights, and what follows them."""
        recipe = self.recipe
        accelerator = self.accelerator
        batches = self.position.steps * recipe.grad_accum_steps
        layer_settings.adjust_layers(self.model, recipe, batches, self.callback.note)
        # Their statistics are as frozen as their weights.
        self.frozen_norms: list[nn.Module] = []
        if recipe.freeze == "all-but-norm":
            self.frozen_norms = layer_settings.freeze_all_but_norm(
                self.model, self.new_tensors, self.callback.note
            )
        self.average: Any = None
        self.networks = [self.model]
        if recipe.model_ema:
            self.average = ModelEmaV3(self.model, recipe.model_ema_decay)
            self.networks.append(self.average.module)
        self.validated: nn.Module = self.networks[-1]
        self.strength_schedule = self._build_strength_schedule()
        if recipe.sync_norm and not sync_norms(self.model, self.device):
            raise RetrofitError("`sync_norm` finds no batch normalization to synchronize; drop it")
        optimizer = build_optimizer(self.model, recipe)
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.lr_schedule = build_lr_schedule(optimizer, recipe, self.epoch_steps)
        self.gate = StepGate(accelerator, self.model, optimizer, recipe.clip_grad)

    def _build_strength_schedule(self) -> StrengthSchedule | None:
        """Return the schedule of all networks' strength and noise; None if no layer has any."""
        if not strength_layers(self.model):
            return None
        recipe = self.recipe
        return StrengthSchedule(
            nn.ModuleList(self.networks),
            self.position.steps,
            shape=recipe.strength_sched,
            ramp=recipe.strength_ramp,
            end=recipe.strength_end,
            noise=recipe.noise if layer_settings.draws_noise(self.model) else None,
            noise_start=recipe.noise_start,
            noise_ramp=recipe.noise_ramp,
        )

    def _stateful(self) -> dict[str, Any]:
        """Return the parts of the run whose state goes to the disk, by name."""
        parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_schedule": self.lr_schedule,
            "strength_schedule": self.strength_schedule,
            "scaler": self.accelerator.scaler,
        }
        if self.average is not None:
            parts["average"] = self.validated
        return {name: part for name, part in parts.items() if part is not None}
