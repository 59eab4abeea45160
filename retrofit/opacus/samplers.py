"""Per-sample gradients of our layers, by torch.func, for Opacus's hooks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.utils import register_grad_sampler
from opacus.utils.module_utils import has_trainable_params, trainable_modules
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from retrofit.layers import ProxyNorm
from retrofit.layers.frozen_batch_norm import ConstantAffine, TrainedAffine
from retrofit.opacus.validators import OF_SAMPLES, over_batches, refusal


@register_grad_sampler(OF_SAMPLES)
def per_sample_gradients(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    """Return, by parameter of one of our layers, the gradients of each sample, (N, *).

    A ProxyNorm's include those that reach gamma and beta of its norm through the proxy; where the norm holds it, the
    norm's own do.
    """
    run = _Bare(layer)
    parameters = {name: p for name, p in run.named_parameters() if p.requires_grad and run.counts(name)}
    held = (*run.named_parameters(), *run.named_buffers())
    others = {name: tensor for name, tensor in held if name not in parameters}

    def loss(trained: dict[str, Tensor], x: Tensor, backprop: Tensor) -> Tensor:
        out = functional_call(run, {**others, **trained}, (x.unsqueeze(0),))
        return (out * backprop.unsqueeze(0)).sum()

    with torch.enable_grad():
        detached = {name: p.detach() for name, p in parameters.items()}
        gradients = vmap(grad(loss), (None, 0, 0))(detached, activations[0].to(backprops.dtype), backprops)
    return {parameters[name]: value for name, value in gradients.items()}


@register_grad_sampler(TrainedAffine)
def affine_gradients(layer: TrainedAffine, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    """Return, by parameter, the gradients of each sample of x * weight + bias."""
    gradients: dict[Any, Tensor] = {}
    if layer.weight.requires_grad:
        gradients[layer.weight] = torch.einsum("nc...->nc", activations[0] * backprops)[..., None, None]
    if layer.bias is not None and layer.bias.requires_grad:
        gradients[layer.bias] = torch.einsum("nc...->nc", backprops)
    return gradients


class _Bare(nn.Module):
    """A layer around the same tensors, and the norm that a ProxyNorm follows, without Opacus's hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = _without_hooks(layer)
        norm = layer.norm if isinstance(layer, ProxyNorm) else None
        within = norm is not None and any(module is layer for module in norm.modules())
        self.norm = None if norm is None or within else _without_hooks(norm)
        if isinstance(self.layer, ProxyNorm) and self.norm is not None:
            self.layer._norm = (self.norm,)

    def counts(self, name: str) -> bool:
        """Whether a parameter is the layer's own, or its norm's: Opacus asks what the layer holds for the others."""
        return name in ("norm.weight", "norm.bias") or name.count(".") == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def _without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module around the same tensors, which calls no hooks."""
    new = copy.copy(module)
    for store in ("_parameters", "_buffers"):
        vars(new)[store] = dict(vars(module)[store])
    for key in [key for key in vars(new) if "_hooks" in key]:
        vars(new)[key] = OrderedDict()
    new._modules = {name: child and _without_hooks(child) for name, child in module._modules.items()}
    for child in new.modules():
        if isinstance(child, ProxyNorm) and child.norm is module:
            child._norm = (new,)
    return new


def _validate(cls: type, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
    """Opacus's check for buffers, which may hold statistics, but those of our layers count as constants.

    Layers that mix the samples are refused too, trained or not.
    """
    mixing = over_batches(module)
    ours = (*OF_SAMPLES, ConstantAffine)
    constants = {id(buffer) for layer in module.modules() if type(layer) in ours for buffer in layer.buffers()}
    errors = [
        NotImplementedError(f"{name or 'the model'} ({type(layer).__name__}) is trained and holds buffers")
        for name, layer in trainable_modules(module)
        if any(id(buffer) not in constants for buffer in layer.buffers()) and layer not in mixing.values()
    ]
    if mixing:
        errors.append(NotImplementedError(refusal(mixing)))
    errors += [
        NotImplementedError(f"{name} gives gamma and beta a gradient but has no parameters trained: no hook reaches it")
        for name, layer in module.named_modules()
        if isinstance(layer, ProxyNorm) and not has_trainable_params(layer) and _reaches_outside(layer)
    ]
    if strict and errors:
        raise NotImplementedError(errors)
    return errors


def _reaches_outside(layer: ProxyNorm) -> bool:
    norm = layer.norm
    return norm is not None and has_trainable_params(norm) and not any(child is layer for child in norm.modules())


def _add_hooks(self: GradSampleHooks, **options: Any) -> None:
    """Opacus's hooks, on modules that leave what they are given as it is: an output behind a hook cannot be changed."""
    for module in self._module.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False
    _opacus_add_hooks(self, **options)


# Samplers can be registered; which buffers are constants, and what may not happen in place, cannot.
_opacus_add_hooks = GradSampleHooks.add_hooks
GradSampleHooks.validate = classmethod(_validate)
GradSampleHooks.add_hooks = _add_hooks
