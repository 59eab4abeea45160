"""The walk itself: how strength and noise of converted layers change from step to step."""

import math
from typing import Any, Literal, get_args

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers import NormalityMixin
from retrofit.layers.noise import check_noise
from retrofit.layers.strength import check_strength, strength_layers
from retrofit.utils.text import plural

Shape = Literal["linear", "cosine", "there-and-back", "off"]
# Noise is a plain number, on which a compiled network specializes: few values, few compilations.
NOISE_STAGES = 4


class StrengthSchedule:
    """Raises the strength t of converted layers during training, from 0 (the source) to 1 (the
    target).

    Construct it before the first step and call `step()` after every optimizer step. The noise
    factor xi of normality layers has its own schedule, because the paper's noise is meant for long
    training from scratch; the layers also multiply the noise by t.

    Layers may start at any strength, from an earlier conversion or training. Each starts at
    `start`, or at its current strength if that is higher, so that what it learned there is not
    lost. To begin at `start` again, first reset the strength with `retrofit.set_strength`.

    Args:
        model: A network with converted layers. To schedule several networks together, wrap them in
            an `nn.ModuleList`.
        total_steps: Number of optimizer steps in the whole training run.
        shape: "linear" or "cosine": how t rises. "there-and-back": t rises to 1, turns around
            halfway through training and returns to `end`, which must be below 1; at 0 the network
            costs what its source costs (see `retrofit.recentre`). "off": the strength does not
            change.
        ramp: Fraction of training over which t moves (there and back: half of it each way); 0 sets
            `end` at once.
        start: The strength t at the first step, for layers that are not already above it. (Not a
            fraction of training, unlike `noise_start`.)
        end: t after the ramp.
        noise: xi at the end of `noise_ramp`, for all layers; None keeps the xi of each layer.
        noise_start: Fraction of training at which noise begins.
        noise_ramp: Fraction of training over which xi grows to `noise`, in a few equal stages.

    Raises:
        UsageError: If an argument is out of range, or `noise` is given for layers that have none.
        RetrofitError: If the network has no converted layers.
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
        _check_fractions(ramp=ramp, noise_start=noise_start, noise_ramp=noise_ramp)
        if total_steps < 1:
            raise UsageError(f"`total_steps` must be at least 1, not {total_steps}")
        self._end = check_strength(end)
        self._there_and_back = shape == "there-and-back"
        if self._there_and_back and self._end == 1:
            raise UsageError(
                "there-and-back returns to a strength below 1; set `end`, 0 for the source's cost"
            )
        self._set_layers(model, noise)
        self._total = total_steps
        self._turn = total_steps // 2
        self._shape = shape
        self._ramp = ramp
        self._noise_start = noise_start
        self._noise_ramp = noise_ramp
        self._steps = 0
        lowest = check_strength(start)
        self._starts = [max(lowest, strength) for strength in self._strengths]
        # The factor that was set; None if the layers' own is left alone.
        self.noise: float | None = None
        self._set()

    def _set_layers(self, model: nn.Module, noise: float | None) -> None:
        layers = strength_layers(model)
        if not layers:
            raise RetrofitError("the model holds no converted layer; convert it first")
        noisy = [layer for layer in layers if isinstance(layer, NormalityMixin)]
        if noise and not noisy:
            raise UsageError("`noise` means nothing to these layers, which draw none; leave it out")
        if noise is not None:
            noise = check_noise(noise)
        self._layers = layers
        self._strengths = [float(layer.strength) for layer in layers]
        self._noisy = noisy
        self._most_noise = noise

    def step(self) -> None:
        """Advance by one step; call this once after every optimizer step."""
        self._steps += 1
        self._set()

    @property
    def strength(self) -> float:
        """The strength of the layers; if they differ, the lowest."""
        return min(self._strengths)

    @property
    def turning(self) -> bool:
        """Whether t starts to fall at the next step, so that now is the time to call
        `retrofit.recentre`.
        """
        return self._there_and_back and self._steps == self._turn

    @property
    def remaining(self) -> float:
        """How far t still has to move, there and back (if layers differ, the farthest); 0 with
        shape "off".
        """
        if self._shape == "off":
            return 0.0
        if self._there_and_back and self._steps <= self._turn:
            return (1 - min(self._strengths)) + (1 - self._end)
        return max(abs(t - self._end) for t in self._strengths)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule; the strength of the layers is in the model's state
        dict.
        """
        return {"steps": self._steps, "starts": list(self._starts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from another schedule's state, and set the layers accordingly.

        Raises:
            UsageError: If `state` is of a network with another number of layers, or of no schedule;
                nothing is changed in that case.
        """
        starts = state.get("starts", ())
        if "steps" not in state or len(starts) != len(self._layers):
            layers = plural(len(self._layers), "layer")
            raise UsageError(
                f"`state` is not that of a StrengthSchedule of {layers}; "
                "pass what `state_dict` of the schedule of the same network returned"
            )
        self._steps = state["steps"]
        self._starts = list(starts)
        self._set(again=True)

    def _set(self, again: bool = False) -> None:
        """Set strength and noise where they change, or `again`, whatever has become of them."""
        done = self._steps / self._total
        if self._shape != "off":
            strengths = self._strengths_at(done)
            is_due = again or strengths != self._strengths
            if is_due:
                pairs = zip(self._layers, strengths, strict=True)
                for layer, strength in pairs:
                    layer.set_strength(strength)
                self._strengths = strengths
        most = self._most_noise
        if most is not None:
            noise = self._noise_at(done, most)
            is_due = again or noise != self.noise
            if is_due:
                for noisy in self._noisy:
                    noisy.noise = noise
                self.noise = noise

    def _strengths_at(self, done: float) -> list[float]:
        """Return each layer's strength after this fraction of the training."""
        if not self._there_and_back:
            there = self._eased(_share(done, self._ramp))
            return [start + (self._end - start) * there for start in self._starts]
        there = _share(done, self._ramp / 2)
        if self._steps <= self._turn:
            return [start + (1 - start) * there for start in self._starts]
        back = _share(done - self._turn / self._total, self._ramp / 2)
        return [1 - (1 - self._end) * back] * len(self._starts)

    def _eased(self, share: float) -> float:
        if self._shape == "cosine":
            return (1 - math.cos(math.pi * share)) / 2
        return share

    def _noise_at(self, done: float, most: float) -> float:
        since = done - self._noise_start
        if since < 0:
            return 0.0
        stage = math.ceil(_share(since, self._noise_ramp) * NOISE_STAGES)
        return most * stage / NOISE_STAGES


def _share(done: float, ramp: float) -> float:
    """Return which share of a ramp is done, from 0 to 1; a ramp of length 0 is done at once."""
    if done >= ramp:
        return 1.0
    return done / ramp


def _check_fractions(**fractions: float) -> None:
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise UsageError(f"`{name}` is a fraction of the training, from 0 to 1, not {value}")
