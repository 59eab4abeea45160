"""What a converted layer says of itself: its source's layer, its constant map, its inference form, its plain layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _forward_unimplemented

from retrofit.errors import RetrofitError
from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.forms import channel_form, constant_copy, in_sequence
from retrofit.layers.normalized_sets import Sets, no_sets
from retrofit.layers.settings import SettingsMixin


class ConvertedLayer(SettingsMixin):
    """A layer of ours, which says what it is in the layers of torch and timm, and in plain operations.

    A trace by fx records it as one call. Inside, a trace would fail at the first look at a shape; and what is no longer
    a layer can neither be set to a strength nor converted or exported.
    """

    source_name: ClassVar[str] = ""  # class of the layer at strength 0: torch's of that name, else timm's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let forward record itself, and let no class with a forward of its own inherit another's answers."""
        super().__init_subclass__(**kwargs)
        own = vars(cls).keys()
        if "forward" in own and not own & {"_form", "_sets", "channel_map", "fused_modules"}:
            answers = {"channel_map": ConvertedLayer.channel_map, "inference_form": constant_copy}
            for name, answer in {**answers, "source_layer": _not_plain, "plain_layer": _not_plain}.items():
                setattr(cls, name, answer)
        forward: Callable[..., Any] = cls.forward
        if forward is not _forward_unimplemented and not hasattr(forward, "_records_itself"):
            cls.forward = _recording(forward)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which does not know the language that the layers are written in."""
        raise RetrofitError(
            f"torch.jit.script cannot compile {type(self).__name__}; use torch.jit.trace, torch.compile or torch.export"
        )

    def source_layer(self) -> nn.Module:
        """Return the library's layer that this one is at strength 0, with its tensors, dropout and activation."""
        fused = isinstance(self, _ThenActivate)
        new = self._build_source(library_class(self.source_name.replace("Norm", "NormAct" if fused else "Norm")))
        for name in ("weight", "bias"):
            new.register_parameter(name, getattr(self, name))
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        new._buffers.update({name: self._buffers[name] for name in statistics if name in self._buffers})
        for name in new._modules.keys() & self._modules.keys():
            setattr(new, name, self._modules[name])
        return new.train(self.training)

    def _build_source(self, cls: Any) -> nn.Module:
        """Return a `cls` on the meta device, with this layer's settings."""
        raise NotImplementedError

    def channel_map(self) -> ChannelMap | None:
        """Return what the layer computes in evaluation before dropout and activation, if a constant map per channel."""
        return None

    def affine_map(self) -> tuple[Tensor, Tensor] | None:
        """Return (scale, shift), (C,) in float64, of the same if it is affine."""
        constant = self.channel_map()
        return constant.affine() if constant is not None and constant.is_affine else None

    @torch.no_grad()
    def inference_form(self) -> nn.Module:
        """Return a module of plain torch operations with float32 constants: this layer in evaluation, all of it."""
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
        """Return what trains the same parameters in layers of torch and timm: a constant affine map of the input, (C,)
        each in float64, or None, and the layer behind it. A RetrofitError says why there is none.
        """
        return None, self.source_layer()

    def normalized_sets(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return a view of the input `x` and the dimensions that span a normalized set; none if it uses constants."""
        return self._sets()(x)

    def _sets(self) -> Sets:
        """Return the function that views an input so."""
        return no_sets

    def fused_modules(self) -> list[nn.Module]:
        """Return the dropout and the activation of a fused layer, in the order in which they follow."""
        return []


def _recording(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
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
    if hasattr(nn, name):
        return getattr(nn, name)
    import timm.layers

    return getattr(timm.layers, name)


def reset_affine(layer: Any) -> None:
    """Return gamma to 1 and beta to 0, as far as there are any; running statistics stay."""
    if layer.weight is not None:
        nn.init.ones_(layer.weight)
    if getattr(layer, "bias", None) is not None:
        nn.init.zeros_(layer.bias)


class _ThenActivate(ConvertedLayer):
    """Mixin: the layer's own forward, then `drop`, then `act`, both the identity until assigned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(super().forward(x)))
        return out

    def fused_modules(self) -> list[nn.Module]:
        return [module for module in (self.drop, self.act) if type(module) is not nn.Identity]
