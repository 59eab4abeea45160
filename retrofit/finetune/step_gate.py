"""The gate between a gradient and the weights: steps that are not finite change nothing."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from retrofit.finetune.divergence import Fault

# A step's fault, which the device computes as a number: its place here.
_FAULTS: tuple[Fault | None, ...] = (None, "loss", "gradient")
_FINITE, _LOSS, _GRADIENT = range(3)
# Of a step that is sent: the step, its last batch, the sum of the losses with the fault, the names
# and norms of gradients, and what tells that a GPU is done with it.
_Sent = tuple[Any, Tensor, Tensor, list[str], Tensor, Any]
# After so many halvings in a row, float16's scale of the loss is no longer the cause of overflows.
_HALVINGS = 30


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
        sizes = self.norms.nan_to_num(math.inf, math.inf)
        # The first of the largest, from the last layer back.
        first = int(sizes.flip(0).argmax())
        return f"the gradient of {self.names[-1 - first]}"


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
        device = accelerator.device
        self._device = device
        self._trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        is_queued = device.type == "cuda"
        self._lag = int(is_queued)
        self._sent: deque[_Sent] = deque()
        # It stays once it is not `_FINITE`.
        self._fault = torch.zeros((), dtype=torch.int32, device=device)
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
            parameters = self._trained.values()
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        # The scaler leaves a step out by itself.
        if self._has_scaler:
            return
        is_fused = self._optimizer.defaults.get("fused")
        if is_fused:
            # As GradScaler sets it.
            self._optimizer.found_inf = self._is_faulty.float()  # type: ignore[attr-defined]
            return
        for gradient in gradients.values():
            gradient.masked_fill_(self._is_faulty, 0.0)

    @property
    def _has_scaler(self) -> bool:
        return self._accelerator.scaler is not None

    @property
    def _is_faulty(self) -> Tensor:
        return self._fault != _FINITE

    def _judge(self, norm: Tensor) -> None:
        """Note the step's fault by the norm of its gradient, without waiting for the device."""
        # Without a scaler of the loss, the first overflow is a fault.
        overflows_allowed = 0
        if self._has_scaler:
            overflows_allowed = _HALVINGS
        self._overflows = torch.where(norm.isfinite(), 0, self._overflows + 1)
        fault = torch.where(self._overflows > overflows_allowed, _GRADIENT, _FINITE)
        fault = torch.where(self._finite, fault, _LOSS)
        self._fault = torch.where(self._is_faulty, self._fault, fault)
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
