"""Runs that fail: steps that are not finite, which layer diverged first, and why a network stays at
chance.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.finetune.recipe import Recipe
from retrofit.layers import FrozenBatchNorm, MigratedGroupNorm, StrengthMixin
from retrofit.utils.forward_pass import device_of, evaluating, hooked

Fault = Literal["loss", "gradient", "state"]

# After so many halvings in a row, float16's scale of the loss is no longer the cause of overflows.
_HALVINGS = 30
_FAULTS: tuple[Fault | None, ...] = (None, "loss", "gradient")
_NORMS = (StrengthMixin, FrozenBatchNorm, _NormBase, nn.LayerNorm, nn.GroupNorm)
# A network that has begun to learn has a loss below this share of that of guessing.
_NEAR = 0.95
# Steps of a run that may have ended before it began to learn.
_FEW_STEPS = 100
# Outputs do not depend on the image if they differ between images by less than this share of their
# difference between classes.
_SAME = 0.05


@dataclass(frozen=True)
class Verdict:
    """The device's verdict on a step."""

    # The step, as passed to `send`.
    step: Any
    # The step's last batch.
    images: Tensor
    # Sum of the losses of all images since `start`.
    loss_sum: float
    # What was not finite.
    fault: Fault | None
    # Names of the parameters that have a gradient.
    names: list[str]
    # Norms of their gradients, (len(names),).
    norms: Tensor

    @property
    def description(self) -> str:
        """What was not finite, in words.

        Among several gradients it is the one that was computed first, which is the last, since they
        are computed from the last layer back. If only their common norm is infinite, it is the
        largest.
        """
        if self.fault == "loss":
            return "the loss"
        norms = dict(zip(self.names, self.norms.tolist(), strict=True))
        broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
        if not broken:
            broken = [max(norms, key=norms.__getitem__)]
        return f"the gradient of {broken[-1]}"


class StepGate:
    """Judges every step on the device. A step whose loss or gradient is not finite changes no
    weight, and neither do the steps after it.

    A fused optimizer takes a flag and skips the step; for others the gradient is set to zero. With
    float16, the scaler of the loss skips steps whose gradient overflows: only many of them in a row
    are a fault. The host reads a step's verdict one step later, when the device has probably
    finished it; on a CPU, which queues nothing, at once.

    Args:
        accelerator: The processes and the device.
        model: The network.
        optimizer: The optimizer of its parameters.
        clip: Largest norm of a gradient; None or 0 for any.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float | None,
    ) -> None:
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._clip = clip
        self._device = accelerator.device
        self._trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._lag = int(self._device.type == "cuda")
        self._sent: deque[tuple[Any, Tensor, Tensor, list[str], Tensor, Any]] = deque()
        # Which of `_FAULTS`; it stays once it is there.
        self._fault = torch.zeros((), dtype=torch.int32, device=self._device)
        # Steps in a row whose gradient was not finite.
        self._overflows = torch.zeros_like(self._fault)
        self.start(0.0)

    def start(self, loss_sum: float) -> None:
        """Begin an epoch, or go on with one whose losses add up to `loss_sum` so far."""
        self._loss_sum = torch.tensor(loss_sum, device=self._device)
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)

    def add(self, loss: Tensor, images: int) -> None:
        """Take a batch's mean loss into account."""
        self._loss_sum = self._loss_sum + loss.detach().float() * images
        self._finite = self._finite & loss.detach().isfinite()

    def close(self) -> None:
        """Judge a step whose gradient is complete, and clip it; the optimizer's step comes next."""
        self._accelerator.unscale_gradients()
        gradients = {
            name: parameter.grad
            for name, parameter in self._trained.items()
            if parameter.grad is not None
        }
        norms = torch._foreach_norm(list(gradients.values()))
        self._names = list(gradients)
        self._norms = torch.stack([norm.float() for norm in norms])
        norm = torch.linalg.vector_norm(self._norms)
        self._judge(norm)
        if self._clip:
            nn.utils.clip_grads_with_norm_(self._trained.values(), self._clip, norm)
        # The scaler leaves a step out by itself.
        if self._accelerator.scaler is not None:
            return
        if self._optimizer.defaults.get("fused"):
            # As GradScaler sets it.
            self._optimizer.found_inf = (self._fault > 0).float()  # type: ignore[attr-defined]
            return
        for gradient in gradients.values():
            gradient.masked_fill_(self._fault > 0, 0.0)

    def _judge(self, norm: Tensor) -> None:
        """Note the step's fault by the norm of its gradient, without waiting for the device."""
        # Without a scaler of the loss, the first overflow is a fault.
        overflows_allowed = _HALVINGS * (self._accelerator.scaler is not None)
        self._overflows = torch.where(norm.isfinite(), 0, self._overflows + 1)
        fault = torch.where(self._overflows > overflows_allowed, 2, 0)
        fault = torch.where(self._finite, fault, 1)
        self._fault = torch.where(self._fault > 0, self._fault, fault)
        self._finite = torch.ones_like(self._finite)

    def send(self, step: Any, images: Tensor) -> None:
        """Ask for the verdict of a step that is done."""
        figures = torch.stack([self._loss_sum, self._fault.float()])
        event = None
        if self._device.type == "cuda":
            figures = torch.empty(2, pin_memory=True).copy_(figures, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._sent.append((step, images, figures, self._names, self._norms, event))

    def verdicts(self, all_of_them: bool = False) -> Iterator[Verdict]:
        """Give the verdicts that are due: of all steps, or of those before the last one sent."""
        while len(self._sent) > (0 if all_of_them else self._lag):
            step, images, figures, names, norms, event = self._sent.popleft()
            if event is not None:
                event.synchronize()
            loss_sum, fault = figures.tolist()
            yield Verdict(step, images, loss_sum, _FAULTS[int(fault)], names, norms)


def not_finite(model: nn.Module) -> str | None:
    """Name the first tensor of a network's state that holds NaN or infinity; None if none does."""
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            return name
    return None


def divergence_of(
    model: nn.Module, images: Tensor, fault: Fault, recipe: Recipe
) -> tuple[str, str]:
    """Say which layer diverged first, shown by a batch of images (N, C, H, W), and what to do.

    It is the first in the order of the computation whose statistics or outputs are not finite.
    Normalization layers come before all others: their statistics show a divergence before the loss
    does.
    """
    advice = "lower `lr` or `noise`, or lengthen `strength_ramp`"
    diverged = _diverged_modules(model, images)
    if diverged:
        first = min(diverged, key=_rank)
        names = {module: name for name, module in model.named_modules()}
        return f"{names[first] or 'the network'} ({type(first).__name__}) went first", advice
    if fault == "loss":
        return "all layers are finite, the loss alone is not", advice
    if fault == "state":
        return "no layer's output is affected", advice
    cause = "the loss and all layers are finite, so the cause is not `lr`"
    if recipe.amp:
        return cause, "start again with `amp=False`"
    return cause, "start again on another `device`"


def _diverged_modules(model: nn.Module, images: Tensor) -> list[nn.Module]:
    """Return the modules whose buffers or outputs are not finite, in the order of their calls."""
    diverged: list[nn.Module] = []

    def look(module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = list(module.buffers(recurse=False))
        if isinstance(output, Tensor):
            tensors.append(output)
        if not all(tensor.isfinite().all() for tensor in tensors):
            diverged.append(module)

    hooks = (module.register_forward_hook(look) for module in model.modules())
    with hooked(hooks), torch.no_grad():
        model(images)
    return diverged


def _rank(module: nn.Module) -> int:
    """Return 0 for a normalization layer, 1 for another layer, 2 for what holds layers."""
    if isinstance(module, _NORMS):
        return 0
    return 1 + any(True for _ in module.children())


class ChanceWatch:
    """Warns once, after warm-up, that a run learns nothing, and says why.

    Args:
        recipe: The settings of the run.
        steps: The optimizer steps of the run.
        classes: The number of classes; None if it is unknown.
        untrained: Whether the run began with random weights.
    """

    def __init__(self, recipe: Recipe, steps: int, classes: int | None, untrained: bool) -> None:
        self._recipe = recipe
        self._steps = steps
        self._classes = classes
        self._untrained = untrained
        self._in_a_row = 0
        self._done = False

    def warning(
        self, row: dict[str, Any], images: int, model: nn.Module, few: Iterator[Tensor]
    ) -> str | None:
        """Return a warning after an epoch, or None.

        Args:
            row: The epoch's metrics.
            images: How many images they were measured on.
            model: The network.
            few: Gives some images, (N, C, H, W), if asked.
        """
        epoch = row["epoch"]
        top1 = row["val_top1"]
        loss = row["val_loss"]
        if self._done or loss is None or self._classes is None:
            return None
        is_last = epoch >= self._recipe.epochs
        is_early = epoch < max(2, self._recipe.warmup + 1)
        if is_early and not is_last:
            return None
        if not at_chance(top1, loss, images, self._classes):
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        # A rising strength may cost accuracy for an epoch.
        if self._in_a_row < 2 and not is_last:
            return None
        self._done = True
        collapsed = any(all_alike(model, some) for some in few)
        why = explanation(model, self._recipe, self._steps, collapsed, self._untrained)
        figures = f"top-1 {top1:.1f}% of {self._classes} classes, loss {loss:.2f}"
        return (
            f"warning: after epoch {epoch} the network does no better than guessing "
            f"({figures}): {why}"
        )


def at_chance(top1: float, loss: float, images: int, classes: int) -> bool:
    """Whether top-1 in percent, and mean cross-entropy, are those of guessing, up to two standard
    errors.
    """
    if classes < 2:
        return False
    guess = 1 / classes
    error = math.sqrt(guess * (1 - guess) / images)
    return top1 / 100 <= guess + 2 * error and loss >= _NEAR * math.log(classes)


def all_alike(model: nn.Module, images: Tensor) -> bool:
    """Whether a network's outputs are the same for all images, (N, C, H, W).

    A new classifier, whose outputs are all zero, does not count.
    """
    with evaluating(model):
        scores = model(images.to(device_of(model))).float()
    by_class = scores - scores.mean(dim=1, keepdim=True)
    by_image = by_class - by_class.mean(dim=0)
    return bool(by_image.abs().max() < _SAME * by_class.abs().max())


def explanation(
    model: nn.Module, recipe: Recipe, steps: int, collapsed: bool, untrained: bool
) -> str:
    """Say what a run at chance most likely suffers from, and what to change."""
    if not collapsed and untrained:
        return "it began with random weights: train it longer, or begin with trained ones"
    if not collapsed and steps < _FEW_STEPS:
        return (
            f"{steps} steps are few: train it longer, and if that does not help lower `lr` or "
            "raise `warmup_epochs`"
        )
    cause = f"the learning rate {recipe.lr:g} is probably too high"
    if collapsed:
        cause = f"its features have collapsed, all images get the same answer: {cause}"
    if any(isinstance(module, MigratedGroupNorm) for module in model.modules()):
        cause += " for layers that take no statistics of the batch"
    if recipe.warmup:
        return f"{cause}; lower `lr` or raise `warmup_epochs`"
    return f"{cause} without warm-up; lower `lr` or give `warmup_epochs=1`"
