"""What converted layers have in common: a strength, and the options of normality normalization.

A converted layer's state dict holds all that its function depends on: two networks of one target
with the same tensors are the same function, whatever they were converted from. Noise and momentum,
which only training uses, stay with the layer, as the p of a dropout does.
"""

from functools import partial
from typing import Any, ClassVar, Self, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from retrofit.errors import UsageError
from retrofit.layers.converted_layer import (
    ConvertedLayer,
    hold_settings,
    library_class,
    no_plain_layer,
)
from retrofit.layers.forms import EstimatedTransform, Sets, constants_of
from retrofit.layers.kernels.eager import Running, Strength
from retrofit.layers.normality_norm import NoiseKind, Normalization, estimate, normalize
from retrofit.layers.transforms import transformed
from retrofit.utils.running import hooked

_UNIT = 2.0**-40
# of t squared: rounding of integers that are averaged stays below 1e-5; this is a spread of t of
# 0.01
_SPREAD = 1e-4


class StrengthMixin(ConvertedLayer):
    """A layer between its source layer (strength 0) and the target (strength 1).

    The buffer `strength` holds t and its square as integers, (2,), in units of 2^-40. It is a
    tensor so that changing t does not trigger recompilation. It holds integers because moving
    averages of weights copy integers from the model but would let a float lag behind it for
    thousands of steps. Some average integers too; the square then shows that different values of t
    were averaged, and evaluation is refused.
    """

    # whether the layer evaluates in training too: see `retrofit.freeze_norms`
    frozen: bool = False
    _checked: tuple[int, int] | None = None

    def _register_options(self, device: Any = None, *, strength: float = 1.0) -> None:
        self._buffers["strength"] = strength_code(
            check_strength(strength), device
        )  # a property has the name

    @property
    def _code(self) -> Tensor:
        code = self._buffers["strength"]
        assert code is not None
        return code

    @property
    def strength(self) -> Tensor:
        """The strength t in [0, 1], a 0-dim float32 tensor; `set_strength` sets it.

        Raises:
            RuntimeError: In evaluation, if t is an average of different values.
        """
        return self._checked_code()[0].to(torch.float32) * _UNIT

    def _checked_code(self) -> Tensor:
        """Return the buffer that holds t, unless it is an average in evaluation."""
        code = self._code
        if not (self.training or code.is_meta or torch.compiler.is_compiling() or transformed()):
            self._refuse_average()
        return code

    @property
    def stored_strength(self) -> float:
        """The strength t as stored, even if it is an average of different values."""
        return float(self._code[0]) * _UNIT

    def _refuse_average(self) -> None:
        """Raise if t is an average; waits for a GPU only where t may have changed since the last
        time.
        """
        code = self._code
        seen = None if code.is_cpu or code.is_inference() else (id(code), code._version)
        if seen is not None and seen == self._checked:
            return
        t, square = (value * _UNIT for value in code.detach().cpu().tolist())
        if abs(square - t * t) > _SPREAD:
            raise RuntimeError(
                f"the strength of this layer, {t:.3g}, is an average over training: average weights without buffers "
                "(use_buffers=False), or set it in the average (retrofit.set_strength)"
            )
        self._checked = seen

    def channel_dims(self, x: Tensor) -> tuple[int, ...]:
        """Return the dimensions of the input that share one value of gamma."""
        return (0, *range(2, x.ndim))

    def bakeable(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values nearest to `weight` and `bias` that `bake` can give the layer."""
        return weight, bias

    def bake(self, weight: Tensor, bias: Tensor) -> None:
        """Set the layer to strength 0, where it then computes `weight` times its normalization,
        plus `bias`.
        """
        layer: Any = self
        self.set_strength(0.0)
        layer.weight.copy_(weight.view_as(layer.weight))
        layer.bias.copy_(bias.view_as(layer.bias))

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the layer and its children; a frozen layer itself stays in evaluation
        mode.
        """
        super().train(mode)
        self.training = mode and not self.frozen
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_checked": None}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the source layer's checkpoint, which has no strength: that stays as it is."""
        state_dict.setdefault(prefix + "strength", self._code.detach().clone())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return ", ".join(
            part for part in (super().extra_repr(), shown("strength", self.strength)) if part
        )

    def set_strength(self, strength: float) -> None:
        """Set t in place.

        Raises:
            UsageError: If `strength` lies outside [0, 1].
        """
        with torch.no_grad():
            self._code.copy_(strength_code(check_strength(strength), self._code.device))


class NormalityMixin(StrengthMixin):
    """The options of a normality-normalized layer (Eftekhari & Papyan 2025).

    Attributes:
        noise: xi, the factor of the Gaussian noise in training (section 4.2); by default, the
            paper's 0.4 (LayerNorm: 1.0); 0 for no noise.
        noise_kind: "scaled" is the paper's additive noise; "unscaled" is noise of the same size for
            every set; "gaussian-dropout" multiplies by noise. The paper compares with these two
            (section 5.6, figure 7).
        alpha: Degree of gaussianization in [0, 1] (eq. 6): lambda = 1 + strength * alpha *
            (estimate - 1). 1 is the paper's value; 0 leaves only the plain normalization and its
            noise.
    """

    paper_noise: ClassVar[float] = 0.4
    per_channel: ClassVar[bool] = (
        # whether gamma and beta, (C,), belong to dimension 1 of the input
        True
    )

    def _register_options(
        self,
        device: Any = None,
        *,
        noise: float | None = None,
        strength: Tensor | float = 1.0,
        noise_kind: NoiseKind = "scaled",
        alpha: float = 1.0,
    ) -> None:
        self.noise = self.paper_noise if noise is None else check_noise(noise)
        self.noise_kind = check_noise_kind(noise_kind)
        self.alpha = check_alpha(alpha)
        super()._register_options(device, strength=float(strength))
        hold_settings(self, {"alpha": check_alpha}, device)

    def _sets(self) -> Sets:
        raise NotImplementedError

    def _by_own_statistics(
        self, x: Tensor, group: ProcessGroup | None = None, running: Running | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return `x` normalized by statistics of its own sets, which ranks of `group` may share,
        and the numbers of each set; see `normalize`.
        """
        layer: Any = self
        spec = self._normalization(group, running)
        return normalize(x, layer.weight, layer.bias, Strength(self._checked_code(), _UNIT), spec)

    def _normalization(
        self, group: ProcessGroup | None = None, running: Running | None = None
    ) -> Normalization:
        """Return what the layer asks of `normalize`."""
        noise = self.noise if self.training else 0.0
        kind = noise, self.noise_kind, self.alpha
        return Normalization(
            self._sets(), self.per_channel, vars(self)["eps"], *kind, group, running
        )

    def _form(self) -> list[nn.Module]:
        """Return the operations of the layer in evaluation: by its running statistics, or an
        estimate of lambda.
        """
        if self.channel_map() is not None:
            return super()._form()
        alpha = float(self.effective_alpha)
        if alpha == 0:
            return [self._source_form()]
        layer: Any = self
        affine = layer.weight, layer.bias
        return [
            EstimatedTransform(self._sets(), vars(self)["eps"], alpha, affine, self.per_channel)
        ]

    def _source_form(self) -> nn.Module:
        return constants_of(self._build_source(library_class(self.source_name)), self)

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        if float(self.strength) > 0:
            raise no_plain_layer(
                "it has a power transform; set_strength(model, 0) leaves its source, export_onnx takes it as it is"
            )
        return super().plain_layer()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the source layer's checkpoint: with no `strength` in it, lambda restarts at 1 and
        t stays as it is.
        """
        lmbda = getattr(self, "running_lambda", None)
        if prefix + "strength" not in state_dict and lmbda is not None:
            state_dict.setdefault(prefix + "running_lambda", torch.ones_like(lmbda))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def effective_alpha(self) -> Tensor:
        """Strength times alpha: the layer uses lambda = 1 + effective_alpha * (estimate - 1)."""
        return self.strength if self.alpha == 1 else self.strength * self.alpha

    def extra_repr(self) -> str:
        usual = {"noise_kind": "scaled", "alpha": 1.0}
        extra = [
            f"{name}={getattr(self, name)}"
            for name, value in usual.items()
            if getattr(self, name) != value
        ]
        return ", ".join([super().extra_repr(), f"noise={self.noise:g}", *extra])


def lambda_values(model: nn.Module, images: Tensor | None = None) -> dict[str, Tensor]:
    """Return the lambda estimates of each normality-normalized layer of a network in evaluation,
    whatever its strength.

    By layer name, in the order of registration, one value a normalized set: the running average
    where the layer keeps one, else the estimates on `images`, (N, C, H, W). Without images the
    layers that need them are left out.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, NormalityMixin)
    }
    running = {name: getattr(layer, "running_lambda", None) for name, layer in layers.items()}
    values = {
        name: [] if kept is None else [kept.detach().float().cpu()]
        for name, kept in running.items()
    }

    def collect(found: list[Tensor], layer: NormalityMixin, inputs: tuple[Tensor, ...]) -> None:
        sets, dim = layer._sets()(inputs[0].float())
        var, mean = torch.var_mean(sets, dim, correction=0, keepdim=True)
        found.append(
            estimate((sets - mean) * torch.rsqrt(var + vars(layer)["eps"]), dim).flatten().cpu()
        )

    if images is not None and not all(values.values()):
        estimating = [(layers[name], found) for name, found in values.items() if not found]
        with (
            hooked(
                one.register_forward_pre_hook(partial(collect, found)) for one, found in estimating
            ),
            torch.no_grad(),
        ):
            model(images)
    return {name: torch.cat(found) for name, found in values.items() if found}


def shown(name: str, value: Tensor) -> str:
    """Return "NAME=VALUE" of a 0-dim tensor; nothing where it has no value to show (meta, under a
    trace).
    """
    return f"{name}={value.item():.3g}" if type(value) is Tensor and not value.is_meta else ""


def strength_code(strength: float, device: Any = None) -> Tensor:
    """Return the buffer that holds t = `strength`; see `StrengthMixin`."""
    return torch.tensor([round(value / _UNIT) for value in (strength, strength**2)], device=device)


def _within_one(name: str, meaning: str, value: float) -> float:
    """Return `value` if it lies in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} must lie in [0, 1], not {value}; {meaning}")
    return float(value)


check_strength = partial(_within_one, "strength", "0 is the source, 1 the paper's")
check_alpha = partial(_within_one, "alpha", "0 is no transform, 1 the paper's")


def check_noise(noise: float) -> float:
    """Return `noise` if it is finite and not negative."""
    if not 0.0 <= noise < float("inf"):
        raise UsageError(f"noise must be a finite number >= 0, not {noise}; 0 turns it off")
    return float(noise)


def check_noise_kind(kind: NoiseKind) -> NoiseKind:
    """Return `kind` if there is noise of that kind."""
    if kind not in get_args(NoiseKind):
        raise UsageError(
            f"noise_kind must be one of {', '.join(get_args(NoiseKind))}, not {kind!r}"
        )
    return kind
