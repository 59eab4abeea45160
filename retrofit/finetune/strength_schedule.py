"""The walk itself: how strength and noise of converted layers change from step to step."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers import NormalityMixin, StrengthMixin
from retrofit.layers.base import check_noise, check_strength
from retrofit.utils.text import plural

Shape = Literal["linear", "cosine", "there-and-back", "off"]
NOISE_STAGES = 4  # noise is a plain number, on which a compiled network specializes: few values, few compilations


class StrengthSchedule:
    """Raises the strength t of converted layers from 0, the source's function, to 1, the paper's.

    Construct it before the first step and call `step()` after every optimizer step. The noise factor xi of normality
    layers has a course of its own, because the papers' noise is made for long training from scratch; the layers
    multiply it by t besides.

    Layers may stand anywhere, from an earlier conversion or training. Each walks from `start`, or from where it stands
    if that is higher, so that what it was trained for is not lost. To begin anew, set the
    strength back first, by `retrofit.set_strength`.

    Args:
        model: A network with converted layers; wrap several in an `nn.ModuleList` to move them together.
        total_steps: Optimizer steps of the whole training.
        shape: "linear" or "cosine" in t; "there-and-back" rises to 1, turns in the middle of the training and returns
            to `end`, where the network costs what its source costs (see `retrofit.recentre`); "off" leaves the
            strength as it is.
        ramp: Fraction of the training over which t moves: half of it each way, there and back; 0 starts at `end` at
            once.
        start: t at the first step, of the layers that do not stand higher.
        end: t from the end of the ramp on.
        noise: xi at the end, for all layers; None leaves each layer's own.
        noise_start: Fraction of the training at which noise begins.
        noise_ramp: Fraction of the training over which it grows to `noise`, in a few equal stages.

    Raises:
        UsageError: If an argument is out of range, or noise is asked of layers that have none.
        RetrofitError: If the network holds no converted layer.
    """

    def __init__(
        self,
        model: nn.Module,
        total_steps: int,
        *,
        shape: Shape = "linear",
        ramp: float = 0.5,
        start: float = 0.0,
        end: float = 1.0,
        noise: float | None = None,
        noise_start: float = 0.5,
        noise_ramp: float = 0.1,
    ) -> None:
        if shape not in get_args(Shape):
            raise UsageError(f"`shape` must be one of {', '.join(get_args(Shape))}, not {shape!r}")
        for name, value in (("ramp", ramp), ("noise_start", noise_start), ("noise_ramp", noise_ramp)):
            if not 0 <= value <= 1:
                raise UsageError(f"`{name}` is a fraction of the training, from 0 to 1, not {value}")
        if total_steps < 1:
            raise UsageError(f"`total_steps` must be at least 1, not {total_steps}")
        try:
            self._start, self._end = check_strength(start), check_strength(end)
            self._noise = None if noise is None else check_noise(noise)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if shape == "there-and-back" and self._end == 1:
            raise UsageError("there-and-back returns to a strength below 1; set `end`, 0 for the source's cost")
        self._layers = [module for module in model.modules() if isinstance(module, StrengthMixin)]
        if not self._layers:
            raise RetrofitError("the model holds no converted layer; convert it first")
        self._noisy = [layer for layer in self._layers if isinstance(layer, NormalityMixin)]
        if self._noise and not self._noisy:
            raise UsageError("`noise` means nothing to these layers, which draw none; leave it out")
        self._total = total_steps
        self._shape = shape
        self._ramp = ramp
        self._noise_span = noise_start, noise_ramp
        self._steps = 0
        self._starts = [max(self._start, float(layer.strength)) for layer in self._layers]
        self._current: tuple[list[float] | None, float | None] = (None, None)
        self._set()

    def step(self) -> None:
        """Move to the next step: call it once after every optimizer step."""
        self._steps += 1
        self._set()

    @property
    def strength(self) -> float | None:
        """The strength that the schedule has set (of several, the lowest); None if it leaves the strength alone."""
        return None if self._current[0] is None else min(self._current[0])

    @property
    def turning(self) -> bool:
        """Whether the way back begins with the next step: the time for `retrofit.recentre`."""
        return self._shape == "there-and-back" and self._steps == self._turn

    @property
    def remaining(self) -> float:
        """The way that t still has to go, there and back (of several, the longest); 0 if it is left alone."""
        strengths = self._current[0] or [self._end]
        if self._shape == "there-and-back" and self._steps <= self._turn:
            return (1 - min(strengths)) + (1 - self._end)
        return max(abs(t - self._end) for t in strengths)

    @property
    def noise(self) -> float | None:
        """The noise factor that the schedule has set; None if it leaves the noise alone."""
        return self._current[1]

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands; the layers' strength is in the model's own state."""
        return {"steps": self._steps, "starts": list(self._starts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where another schedule stood, and set the layers accordingly.

        Raises:
            UsageError: If this is not the state of a schedule of such a network; nothing is changed then.
        """
        try:
            steps, starts = int(state["steps"]), [float(start) for start in state["starts"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            starts = []
        if len(starts) != len(self._layers):
            raise UsageError(
                f"`state` is not that of a StrengthSchedule of {plural(len(self._layers), 'layer')}; pass what "
                "`state_dict` of the schedule of the same network returned"
            )
        self._steps, self._starts = steps, starts
        self._current = (None, None)
        self._set()

    def _set(self) -> None:
        done = self._steps / self._total
        strengths = None if self._shape == "off" else self._strengths_at(done)
        noise = None if self._noise is None else self._noise_at(done, self._noise)
        if strengths is not None and strengths != self._current[0]:
            for layer, own in zip(self._layers, strengths, strict=True):
                layer.set_strength(own)
        if noise is not None and noise != self._current[1]:
            for noisy in self._noisy:
                noisy.noise = noise
        self._current = (strengths, noise)

    @property
    def _turn(self) -> int:
        return self._total // 2

    def _strengths_at(self, done: float) -> list[float]:
        if self._shape == "there-and-back":
            way = self._ramp / 2
            turn = self._turn / self._total
            if done > turn:
                fallen = 1.0 if done >= turn + way else (done - turn) / way
                return [1 + (self._end - 1) * fallen for _ in self._starts]
            risen = 1.0 if done >= way else done / way
            return [start + (1 - start) * risen for start in self._starts]
        risen = 1.0 if done >= self._ramp else done / self._ramp
        if self._shape == "cosine":
            risen = (1 - math.cos(math.pi * risen)) / 2
        return [start + (self._end - start) * risen for start in self._starts]

    def _noise_at(self, done: float, most: float) -> float:
        start, ramp = self._noise_span
        if done < start:
            return 0.0
        grown = 1.0 if done >= start + ramp else (done - start) / ramp
        return most * math.ceil(grown * NOISE_STAGES) / NOISE_STAGES
