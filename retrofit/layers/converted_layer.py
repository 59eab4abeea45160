"""What a converted layer says of itself: its source's layer, its constant map, its inference form,
its plain layer.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _forward_unimplemented

from retrofit.errors import RetrofitError
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.inference_forms import channel_form, constant_copy, in_sequence

# The name of the buffer that holds a setting begins with it.
_SETTING = "setting_"
# Methods by which a class with a forward of its own answers for itself.
_ANSWERS = {"_form", "_sets", "channel_map", "fused_modules"}


class ConvertedLayer(nn.Module):
    """A layer of ours, which says what it is in the layers of torch and timm, and in plain
    operations.

    A trace by fx records it as one call. Inside, a trace would fail at the first look at a shape;
    and what is no longer a layer can neither be set to a strength nor converted or exported.
    """

    # Class of the layer at strength 0: torch's of that name, else timm's.
    source_name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let forward record itself, and let no class with a forward of its own inherit another's
        answers: it is exported as the module it is, and has no plain layer.
        """
        super().__init_subclass__(**kwargs)
        defined = vars(cls).keys()
        if "forward" in defined and not defined & _ANSWERS:
            answers = {
                "channel_map": ConvertedLayer.channel_map,
                "inference_form": constant_copy,
                "source_layer": _not_plain,
                "plain_layer": _not_plain,
            }
            for name in answers.keys() - defined:
                setattr(cls, name, answers[name])
        forward: Callable[..., Any] = cls.forward
        if forward is not _forward_unimplemented and not hasattr(forward, "_records_itself"):
            cls.forward = _recording(forward)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which does not know the language that the layers are written
        in.
        """
        raise RetrofitError(
            f"torch.jit.script cannot compile {type(self).__name__}; use torch.jit.trace, torch.compile or torch.export"
        )

    def source_layer(self) -> nn.Module:
        """Return the library's layer that this one is at strength 0, with its tensors, dropout and
        activation.

        Raises:
            RetrofitError: If no library has such a layer.
        """
        name = self.source_name
        if isinstance(self, ThenActivate):
            name = name.replace("Norm", "NormAct")
        return self._as_source(library_class(name))

    def _as_source(self, cls: Any) -> nn.Module:
        """Return a `cls` with this layer's settings, tensors, dropout and activation."""
        new = self._build_source(cls)
        for name in ("weight", "bias"):
            value = getattr(self, name)
            # Pruning computes a tensor that is no parameter.
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                value = nn.Parameter(value.detach(), requires_grad=False)
            new.register_parameter(name, value)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            if name in self._buffers:
                new._buffers[name] = self._buffers[name]
        shared = new._modules.keys() & self._modules.keys()
        for name in shared:
            setattr(new, name, self._modules[name])
        return new.train(self.training)

    def _build_source(self, cls: Any) -> nn.Module:
        """Return a `cls` on the meta device, with this layer's settings."""
        raise NotImplementedError

    def channel_map(self) -> ChannelMap | None:
        """Return what the layer computes in evaluation, before dropout and activation, if that is
        a constant map per channel.
        """
        return None

    def affine_map(self) -> tuple[Tensor, Tensor] | None:
        """Return (scale, shift), (C,) each in float64, of `channel_map` if it is affine."""
        constant = self.channel_map()
        return constant.affine() if constant is not None and constant.is_affine else None

    @torch.no_grad()
    def inference_form(self) -> nn.Module:
        """Return a module of plain torch operations with float32 constants: this layer in
        evaluation, all of it.
        """
        fused = (
            module.inference_form() if isinstance(module, ConvertedLayer) else constant_copy(module)
            for module in self.fused_modules()
        )
        return in_sequence([*self._form(), *fused])

    def _form(self) -> list[nn.Module]:
        """Return the operations of the layer in evaluation, before dropout and activation."""
        constant = self.channel_map()
        assert constant is not None
        return channel_form(constant)

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return what trains the same parameters in layers of torch and timm.

        Returns:
            A constant affine map of the input, (scale, shift), (C,) each in float64, or None; and
            the layer behind it.

        Raises:
            RetrofitError: If no such layers compute what this one does.
        """
        return None, self.source_layer()

    def fused_modules(self) -> list[nn.Module]:
        """Return the dropout and the activation of a fused layer, in the order in which they
        follow.
        """
        return []

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _write_settings(self)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        _read_settings(self, *args)
        super()._load_from_state_dict(*args)


def _recording(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(self: nn.Module, x: Any) -> Any:
        tracer: Any = x.tracer if isinstance(x, fx.Proxy) else None
        if tracer is not None and (name := tracer.path_of_module(self)):
            return tracer.create_proxy("call_module", name, (x,), {})
        return forward(self, x)

    vars(wrapper)["_records_itself"] = True
    return wrapper


def _not_plain(layer: ConvertedLayer) -> NoReturn:
    raise no_plain_layer(
        f"nobody has said what a {type(layer).__name__} is in plain layers; export_onnx takes it as it is"
    )


def no_plain_layer(reason: str) -> RetrofitError:
    """Return the refusal of a layer that only this package has."""
    return RetrofitError(f"no layer of torch or timm computes what this one does: {reason}")


def library_class(name: str) -> Any:
    """Return torch's layer class of a name, or timm's, which takes long to import."""
    cls = getattr(nn, name, None)
    if cls is None:
        import timm.layers

        cls = getattr(timm.layers, name)
    return cls


def reset_affine(layer: Any) -> None:
    """Return gamma to 1 and beta to 0, as far as there are any; running statistics stay."""
    if layer.weight is not None:
        nn.init.ones_(layer.weight)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.bias)


def hold_settings(
    module: nn.Module, settings: Mapping[str, Callable[[float], Any]], device: Any = None
) -> None:
    """Let the state dict of a layer hold attributes that its function depends on and no shape
    shows, each as a 0-dim buffer: `layer.groups` as `setting_groups`.

    A layer that loads another's state dict becomes that function; a state dict that lacks the
    setting leaves the layer's own.

    Args:
        module: The layer.
        settings: For each attribute, a function that makes its value of a stored number, or raises
            a ValueError.
        device: Where the buffers lie.
    """
    # A converted layer takes over its source's hooks, so it does this by its methods.
    if not isinstance(module, ConvertedLayer):
        module.register_state_dict_pre_hook(_write_settings)
        module.register_load_state_dict_pre_hook(_read_settings)
    vars(module)["_held_settings"] = dict(settings)
    for name in settings:
        module.register_buffer(_SETTING + name, torch.zeros((), dtype=torch.float32, device=device))
    # A trace saves the buffers as they are.
    _write_settings(module)


def check_groups(channels: int, groups: float) -> int:
    """Return the whole number of groups if it divides the channels; averages of state dicts are
    rounded.

    Raises:
        ValueError: If it does not.
    """
    whole = round(groups)
    if abs(groups - whole) > 1e-3 or whole < 1 or channels % whole:
        raise ValueError(f"{groups:g} groups do not divide {channels} channels")
    return whole


@torch.no_grad()
def _write_settings(module: nn.Module, *_: Any) -> None:
    """Bring the buffers up to date with the attributes, before they are saved."""
    for name in vars(module).get("_held_settings", ()):
        value = getattr(module, name)
        buffer = module.get_buffer(_SETTING + name)
        if buffer.is_inference():
            module._buffers[_SETTING + name] = torch.full_like(buffer, value)
        else:
            buffer.fill_(value)


def _read_settings(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Set the attributes by what is about to be loaded; a value that the stored type rounds stays
    exact.
    """
    _write_settings(module)
    for name, check in vars(module).get("_held_settings", {}).items():
        key = prefix + _SETTING + name
        stored = state_dict.setdefault(key, module.get_buffer(_SETTING + name))
        # torch refuses anything else
        if not isinstance(stored, Tensor) or stored.numel() != 1:
            continue
        if stored.is_meta or torch.equal(stored, torch.full_like(stored, getattr(module, name))):
            continue
        number = stored.item()
        try:
            setattr(module, name, check(number))
        except (ValueError, OverflowError) as error:
            error_messages = rest[-1]
            error_messages.append(f"{key} holds {number}: {error}")


class ThenActivate(ConvertedLayer):
    """Mixin: the layer's own forward, then `drop`, then `act`, both the identity until assigned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self._at_once(x)
        if out is None:
            out = self.act(self.drop(super().forward(x)))
        return out

    def _at_once(self, x: Tensor) -> Tensor | None:
        """Return the result by a kernel that normalizes and activates, None where there is none."""
        return None

    def fused_modules(self) -> list[nn.Module]:
        return [module for module in (self.drop, self.act) if type(module) is not nn.Identity]
