"""The strength t of converted layers: 0 is the source, 1 the target; how it is held, set and read.

It is a buffer, so it travels with a state dict, and where part of a state travels, part of the
strengths does. A network whose layers differ in strength is right if `set_strength`, or a
conversion of some layers, made it so; each layer remembers where its strength came from, and
`refuse_partial_state` stops what would write any other mixture to a file.
"""

import time
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.function_transforms import exporting, followed
from retrofit.layers.kernels.kernel_options import Strength
from retrofit.utils.text import ROOT, plural, shortlist

UNIT = 2.0**-40
# Of t squared: rounding of integers that are averaged stays below 1e-5; this is a spread of t of
# 0.01.
_SPREAD = 1e-4
# Decimals of a strength that somebody chose.
_DIGITS = 4


class _Origin(NamedTuple):
    """Where the strength of a layer came from."""

    # what the buffer held then; None where it had no values
    code: tuple[int, ...] | None
    # nanoseconds; the same for all layers of one call of `load_state_dict`
    moment: int
    # by a state dict; else by `set_strength` or as the layer was built
    loaded: bool


class _Load:
    """One call of `load_state_dict`, by the list of missing keys that all modules share in it."""

    def __init__(self, missing_keys: list[str]) -> None:
        self.missing_keys = missing_keys
        self.moment = time.time_ns()
        # every layer with a strength that the call reached, by name
        self.layers: WeakValueDictionary[str, StrengthMixin] = WeakValueDictionary()

    @classmethod
    def of(cls, missing_keys: list[str]) -> "_Load":
        if not _LATEST or _LATEST[0].missing_keys is not missing_keys:
            _LATEST.append(cls(missing_keys))
        return _LATEST[0]

    def warn_of_a_part(self) -> None:
        """Warn once, at the first evaluation, if the call brought strengths to some layers
        alone.
        """
        layers = dict(self.layers)
        self.layers.clear()
        if problem := _partial_state(layers):
            warnings.warn(problem, stacklevel=2)


_LATEST: deque[_Load] = deque(maxlen=1)


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
    # why `retrofit.sync_norms` has no synchronized form of it; empty if it has one, or needs none
    unsynchronized: str = ""
    # the last code that was found to be no average, by identity and version of the buffer
    _checked: tuple[int, int] | None = None
    _origin: _Origin
    # the last load, until the first evaluation behind it
    _load: _Load | None = None

    def _register_options(self, device: Any = None, *, strength: float = 1.0) -> None:
        # A property has the name, so `register_buffer` refuses it.
        self._buffers["strength"] = strength_code(check_strength(strength), device)
        self._origin = _Origin(_in_units(strength), time.time_ns(), loaded=False)

    @property
    def _code(self) -> Tensor:
        code = self._buffers["strength"]
        assert code is not None
        return code

    @property
    def strength(self) -> Tensor:
        """The strength t in [0, 1], a 0-dim float32 tensor.

        It is a copy: `layer.strength = 0.5` and `set_strength` set t, `layer.strength.fill_(0.5)`
        does not.

        Raises:
            RuntimeError: In evaluation, if t is an average of different values.
        """
        return self._t

    @property
    def _t(self) -> Tensor:
        """What `strength` is, for layers to read: compilers of older versions find the buffer of
        that name in place of the property.
        """
        return self._strength.value(torch.float32)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set t where a number is assigned; torch would take it for the buffer that holds t."""
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
        if name == "strength" and is_number:
            self.set_strength(float(value))
            return
        super().__setattr__(name, value)

    @property
    def _strength(self) -> Strength:
        """The strength for kernels, which read the buffer themselves, unless it is an average in
        evaluation.
        """
        code: Any = self._buffers["strength"]
        if self.training or code.is_meta:
            return Strength(code, UNIT)
        if torch.compiler.is_compiling() and not exporting():
            return Strength(_nan_if_average(code), UNIT)
        if not followed():
            self._refuse_average()
        return Strength(code, UNIT)

    @property
    def stored_strength(self) -> float:
        """The strength t as stored, even if it is an average of different values."""
        return float(self._code[0]) * UNIT

    def _refuse_average(self) -> None:
        """Raise if t is an average; waits for a GPU only where t may have changed since the last
        time.
        """
        if self._load is not None:
            self._load.warn_of_a_part()
            self._load = None
        code = self._code
        seen: tuple[int, int] | None = None
        if not (code.is_cpu or code.is_inference()):
            seen = (id(code), code._version)
            if seen == self._checked:
                return
        units = code.detach().cpu().tolist()
        t, square = (value * UNIT for value in units)
        spread = abs(square - t * t)
        if spread > _SPREAD:
            raise RuntimeError(
                f"the strength of this layer, {t:.3g}, is an average over training: average weights without buffers "
                "(use_buffers=False), or set it in the average (retrofit.set_strength)"
            )
        self._checked = seen

    @property
    def plain_eps(self) -> float:
        """What is added to the variance, whatever the layer shows to others as its `eps`.

        A layer reads it as an attribute, which every compiler finds where eager code does.
        """
        layer: Any = self
        eps: float = layer.eps
        return eps

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
        return {**super().__getstate__(), "_checked": None, "_load": None}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *lists: Any,
    ) -> None:
        """Accept the source layer's checkpoint, which has no strength: that stays as it is."""
        arrives = prefix + "strength" in state_dict
        state_dict.setdefault(prefix + "strength", self._code.detach().clone())
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *lists
        )
        self._load = _Load.of(missing_keys)
        self._load.layers[prefix.rstrip(".") or ROOT] = self
        if arrives:
            self._origin = _Origin(_units_of(self), self._load.moment, loaded=True)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), shown("strength", self.strength))))

    def set_strength(self, strength: float) -> None:
        """Set t in place.

        Raises:
            UsageError: If `strength` lies outside [0, 1].
        """
        with torch.no_grad():
            self._code.copy_(strength_code(check_strength(strength), self._code.device))
        self._origin = _Origin(_in_units(strength), time.time_ns(), loaded=False)


def _nan_if_average(code: Tensor) -> Tensor:
    """Return the first element of what a buffer holds, as a float32 tensor (1,), and NaN if it is an
    average: compiled code cannot raise.
    """
    first, square = code.to(torch.float32).split(1)
    t = first * UNIT
    spread = (square * UNIT - t * t).abs()
    return torch.where(spread > _SPREAD, torch.nan, first)


def strength_layers(model: nn.Module) -> list[StrengthMixin]:
    """Return the layers of `model` that have a strength, each once."""
    return [module for module in model.modules() if isinstance(module, StrengthMixin)]


def set_strength(model: nn.Module, strength: float) -> int:
    """Set the strength of every converted layer of `model`: 0 is the source, 1 the target.

    All layers get the same strength, even if the network was converted in several steps. To set
    only some, pass the part of the network that contains them (`retrofit.set_strength(model.layer4,
    0.5)`).

    Args:
        model: A converted network, or a part of one.
        strength: The strength t, in [0, 1].

    Returns:
        The number of layers set.

    Raises:
        UsageError: If `strength` lies outside [0, 1].
        RetrofitError: If the model has no converted layer with a strength.
    """
    layers = strength_layers(model)
    if not layers:
        raise RetrofitError(
            "the model holds no converted layer that has a strength; convert it first"
        )
    set_strength_of(layers, strength)
    return len(layers)


def set_strength_of(layers: Iterable[StrengthMixin], strength: float) -> None:
    """Set the strength of some layers, in [0, 1]."""
    for layer in layers:
        layer.set_strength(strength)


def strength_of(model: nn.Module) -> float | None:
    """Return the strength of `model`'s converted layers; None if no layer has one, or they are on
    the meta device.

    Raises:
        RetrofitError: If the layers differ in strength.
    """
    strengths = _strengths(model)
    if len(strengths) > 1:
        raise RetrofitError(
            f"the converted layers differ in strength ({min(strengths)} to {max(strengths)}); set_strength first"
        )
    return strengths.pop() if strengths else None


def common_strength(model: nn.Module) -> float | None:
    """Return the strength of all converted layers; None if there are none, or they differ."""
    strengths = _strengths(model)
    return strengths.pop() if len(strengths) == 1 else None


def strength_sentence(model: nn.Module) -> str | None:
    """Say how far a network is on its way from its source to its target; None if no layer has a
    strength.
    """
    layers = strength_layers(model)
    strengths = _strengths(model)
    if not strengths:
        return None
    return f"strength: {_span(strengths)} in {plural(len(layers), 'converted layer')} (0 is the source, 1 the target)"


def odd_strengths(model: nn.Module) -> str | None:
    """Say that layers stand at a strength that looks like no one's choice; None if none does.

    torch's averages of weights average every buffer, if asked to, and so the strength: after 50
    steps of a ramp to 1 with decay 0.98 it stands at 0.36, and the average would evaluate as other
    layers than its model's.
    """
    strengths = {layer.stored_strength for layer in strength_layers(model)}
    odd = {t for t in strengths if abs(t - round(t, _DIGITS)) > 1e-6}
    if not odd:
        return None
    return (
        f"layers stand at strength {_span(odd, '.4f')}, as an average of weights or a walk that was "
        "stopped leaves them; if it is an average, give it its network's strength "
        "(retrofit.set_strength) and save it again"
    )


def partial_state(model: nn.Module) -> str | None:
    """Say that a state reached some converted layers alone and left a mixture of strengths; None if
    none did.
    """
    modules = model.named_modules()
    return _partial_state({name or ROOT: m for name, m in modules if isinstance(m, StrengthMixin)})


def refuse_partial_state(model: nn.Module) -> None:
    """Refuse a network whose layers differ in strength because part of a state was loaded.

    Raises:
        RetrofitError: If they do; mixtures that `set_strength`, `only` or `skip` made pass.
    """
    if problem := partial_state(model):
        raise RetrofitError(problem)


def _partial_state(layers: Mapping[str, StrengthMixin]) -> str | None:
    """Say which layers a state did not reach, if the strengths differ for that alone."""
    # by what a layer's buffer holds, and where its strength came from when that was last known
    names: dict[tuple[Any, Any], list[str]] = {}
    for name, layer in layers.items():
        code = _units_of(layer)
        if code is not None:
            names.setdefault((code, layer._origin), []).append(name)
    for (one, one_origin), (other, other_origin) in combinations(names, 2):
        if one != other and _came_in_part((one, other), (one_origin, other_origin)):
            return (
                "the converted layers differ in strength, "
                f"{one[0] * UNIT:.3g} ({shortlist(names[one, one_origin])}) and "
                f"{other[0] * UNIT:.3g} ({shortlist(names[other, other_origin])}), because only part of a state was "
                "loaded or copied into the network; send the tensors named `strength` too, or call "
                "retrofit.set_strength(model, t), on each part if they shall differ"
            )
    return None


def _came_in_part(codes: tuple[Any, ...], origins: tuple[_Origin, _Origin]) -> bool:
    """Whether a state reached only one of two layers that differ in strength, or the other later."""
    earlier, later = sorted(origins, key=lambda origin: origin.moment)
    if codes != tuple(origin.code for origin in origins):
        # Written to in place, as averages and some federated code do. A copy of a network whose
        # layers differed by somebody's choice began with that choice.
        return earlier.code == later.code
    return later.loaded and earlier.moment != later.moment


def _strengths(model: nn.Module) -> set[float]:
    layers = strength_layers(model)
    return {layer.strength.item() for layer in layers if not layer._code.is_meta}


def _span(strengths: Collection[float], form: str = ".3g") -> str:
    ends = dict.fromkeys([format(min(strengths), form), format(max(strengths), form)])
    return " to ".join(ends)


def shown(name: str, value: Tensor) -> str:
    """Return "NAME=VALUE" of a 0-dim tensor; nothing where it has no value to show (meta, under a
    trace).
    """
    return f"{name}={value.item():.3g}" if type(value) is Tensor and not value.is_meta else ""


def strength_code(strength: float, device: Any = None) -> Tensor:
    """Return the buffer that holds t = `strength`; see `StrengthMixin`."""
    return torch.tensor(_in_units(strength), device=device)


def _in_units(strength: float) -> tuple[int, ...]:
    return round(strength / UNIT), round(strength**2 / UNIT)


def _units_of(layer: StrengthMixin) -> tuple[int, ...] | None:
    """Return what the buffer holds; None where it has no values (meta, or fake under a trace)."""
    code = layer._code
    return None if code.is_meta or type(code) is not Tensor else tuple(code.tolist())


def within_one(name: str, meaning: str, value: float) -> float:
    """Return `value` if it lies in [0, 1].

    Raises:
        UsageError: If it does not.
    """
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} must lie in [0, 1], not {value}; {meaning}")
    return float(value)


def check_strength(strength: float) -> float:
    """Return `strength` if it lies in [0, 1].

    Raises:
        UsageError: If it does not.
    """
    return within_one("strength", "0 is the source, 1 the paper's", strength)
