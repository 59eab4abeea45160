"""Keep what is not finite from the weights, without a wait of the host for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

_HALVINGS = 30  # of float16's scale of the loss in a row, which then is no longer the reason
_FAULTS: tuple[Literal["loss", "gradient"] | None, ...] = (None, "loss", "gradient")


@dataclass(frozen=True)
class Verdict:
    """What the device says of a step."""

    step: Any  # as passed to `send`
    images: Tensor  # the step's last batch
    loss_sum: float  # of all images since `start`
    fault: Literal["loss", "gradient"] | None  # what was not finite
    names: list[str]  # of the parameters that have a gradient
    norms: Tensor  # of their gradients, (len(names),)

    @property
    def what(self) -> str:
        """What was not finite, in words: of gradients the one that went first.

        They are computed from the last layer back: the last, or, if only their common norm is infinite, the largest.
        """
        if self.fault == "loss":
            return "the loss"
        norms = dict(zip(self.names, self.norms.tolist(), strict=True))
        broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
        return f"the gradient of {broken[-1] if broken else max(norms, key=norms.__getitem__)}"


class StepGate:
    """Judges every step on the device: one whose loss or gradient is not finite, and all after it, change no weight.

    A fused optimizer takes a flag and leaves the step out; for others the gradient is zeroed. With float16, whose
    loss is scaled, the scaler leaves out steps whose gradient overflows; only a row of them is a fault. The host reads
    a step's verdict one step later, when the device is likely to be done with it; on a CPU, where nothing is queued,
    at once. `clip` is the largest norm of a gradient; None or 0 for any.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None
    ) -> None:
        self._accelerator, self._optimizer, self._clip = accelerator, optimizer, clip
        self._device = accelerator.device
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._lag = int(self._device.type == "cuda")
        self._sent: deque[tuple[Any, Tensor, Tensor, list[str], Tensor, Any]] = deque()
        self._overflows = self._fault = torch.zeros((), dtype=torch.int32, device=self._device)
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
        """Judge the step whose gradient is complete, and clip it; the optimizer's step comes next."""
        self._accelerator.unscale_gradients()
        scaled = self._accelerator.scaler is not None
        gradients = {name: one.grad for name, one in self._trained.items() if one.grad is not None}
        norms = torch._foreach_norm(list(gradients.values()))
        self._names, self._norms = list(gradients), torch.stack([norm.float() for norm in norms])
        norm = torch.linalg.vector_norm(self._norms)
        self._overflows = torch.where(norm.isfinite(), 0, self._overflows + 1)
        fault = torch.where(self._overflows > (_HALVINGS if scaled else 0), 2, 0)
        fault = torch.where(self._finite, fault, 1)
        self._fault = torch.where(self._fault > 0, self._fault, fault)
        self._finite = torch.ones_like(self._finite)
        if self._clip:
            nn.utils.clip_grads_with_norm_(self._trained.values(), self._clip, norm)
        if scaled:
            return
        if self._optimizer.defaults.get("fused"):
            self._optimizer.found_inf = (self._fault > 0).float()  # type: ignore[attr-defined]  # as GradScaler sets it
        else:
            for gradient in gradients.values():
                gradient.masked_fill_(self._fault > 0, 0.0)

    def send(self, step: Any, images: Tensor) -> None:
        """Ask for the verdict of a step that is done."""
        figures, event = torch.stack([self._loss_sum, self._fault.float()]), None
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
