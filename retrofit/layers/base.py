"""What converted layers have in common: a strength, and for normality normalization noise and Newton steps."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn

from retrofit.layers.core import NoiseKind, NormalityOptions


class StrengthMixin(nn.Module):
    """A layer that lies on the path from its source layer (strength 0) to the paper's (strength 1).

    Attributes:
        strength: 0-dim float32 buffer t in [0, 1]. A tensor, so that changing it triggers no recompilation.
    """

    strength: Tensor

    def _register_strength(self, strength: float, device: Any = None) -> None:
        self.register_buffer("strength", torch.tensor(check_strength(strength), dtype=torch.float32, device=device))

    def set_strength(self, strength: float) -> None:
        """Set t in place.

        Raises:
            ValueError: If `strength` lies outside [0, 1].
        """
        with torch.no_grad():
            self.strength.fill_(check_strength(strength))


class NormalityMixin(StrengthMixin):
    """The options of a normality-normalized layer.

    Attributes:
        noise: xi, the factor of the Gaussian noise in training (paper's section 4.2); 0 for none.
        noise_kind: "scaled" is the paper's additive noise; "unscaled" gives every set the same, and
            "gaussian-dropout" multiplies instead: the paper compares with both (section 5.6, figure 7).
        alpha: Degree of gaussianization in [0, 1] (eq. 6): lambda = 1 + strength * alpha * (estimate - 1). 1 is the
            paper's; 0 leaves the plain normalization and its noise.
        steps: Newton iterations of the lambda estimate; one is the paper's.
    """

    noise: float
    noise_kind: NoiseKind
    alpha: float
    steps: int

    def _register_options(
        self, noise: float, strength: float, steps: int, noise_kind: NoiseKind, alpha: float, device: Any = None
    ) -> None:
        self.noise = check_noise(noise)
        self.noise_kind = check_noise_kind(noise_kind)
        self.alpha = check_alpha(alpha)
        self.steps = check_steps(steps)
        self._register_strength(strength, device)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Accept the source layer's checkpoint: with no `strength` in it, lambda restarts at 1 and t stays as it is."""
        if prefix + "strength" not in state_dict:
            state_dict[prefix + "strength"] = self.strength.detach().clone()
            lmbda = getattr(self, "running_lambda", None)
            if lmbda is not None:
                state_dict.setdefault(prefix + "running_lambda", torch.ones_like(lmbda))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def degree(self) -> Tensor:
        """Strength times alpha: the layer uses lambda = 1 + degree * (estimate - 1)."""
        return self.strength if self.alpha == 1 else self.strength * self.alpha

    @property
    def _options(self) -> NormalityOptions:
        """What `core.normality_norm` takes of the layer in its present mode."""
        return {
            "strength": self.strength,
            "noise": self.noise if self.training else 0.0,
            "noise_kind": self.noise_kind,
            "alpha": self.alpha,
            "steps": self.steps,
        }

    def _options_repr(self) -> str:
        usual = {"noise_kind": "scaled", "alpha": 1.0, "steps": 1}
        extra = {name: getattr(self, name) for name, value in usual.items() if getattr(self, name) != value}
        return f", noise={self.noise:g}" + "".join(f", {name}={value}" for name, value in extra.items())


def check_strength(strength: float) -> float:
    """Return `strength` if it lies in [0, 1]."""
    if not 0.0 <= strength <= 1.0:
        raise ValueError(f"strength must lie in [0, 1], not {strength}; 0 is the source layer, 1 the paper's")
    return float(strength)


def check_noise(noise: float) -> float:
    """Return `noise` if it is finite and not negative."""
    if not 0.0 <= noise < float("inf"):
        raise ValueError(f"noise must be a finite number >= 0, not {noise}; 0 turns it off")
    return float(noise)


def check_noise_kind(kind: NoiseKind) -> NoiseKind:
    """Return `kind` if there is noise of that kind."""
    if kind not in get_args(NoiseKind):
        raise ValueError(f"noise_kind must be one of {', '.join(get_args(NoiseKind))}, not {kind!r}")
    return kind


def check_alpha(alpha: float) -> float:
    """Return `alpha` if it lies in [0, 1]."""
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], not {alpha}; 0 is no transform, 1 the paper's")
    return float(alpha)


def check_steps(steps: int) -> int:
    """Return `steps` if it is at least 1."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}; 1 is the paper's")
    return int(steps)
