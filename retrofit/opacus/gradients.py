"""Gradients per sample of our layers, for GradSampleModule's hooks."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from opacus.grad_sample.utils import register_grad_sampler
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from retrofit.layers import ProxyNorm
from retrofit.layers.frozen_batch_norm import TrainedAffine
from retrofit.opacus.layer_classes import BATCH_INDEPENDENT

# The name under which a copy of a proxy holds its norm.
_NORM = "followed"


@register_grad_sampler(BATCH_INDEPENDENT)
def _per_sample_gradients(
    layer: nn.Module, activations: list[Tensor], backprops: Tensor
) -> dict[Any, Tensor]:
    """Return, by parameter of one of our layers, the gradients of each sample, (N, *).

    A ProxyNorm's include those that reach gamma and beta of its norm through the proxy; where the
    norm holds it, the norm's own do.
    """
    run = _runnable(layer)
    trained = {
        name: parameter
        for name, parameter in run.named_parameters()
        # Opacus asks each child for the gradients of its own parameters.
        if parameter.requires_grad and "." not in name.removeprefix(f"{_NORM}.")
    }

    # Poisson sampling may draw nobody; torch's vmap does not take 0 samples in every operation.
    if not len(backprops):
        return {
            parameter: parameter.new_zeros(0, *parameter.shape) for parameter in trained.values()
        }

    def loss(values: dict[str, Tensor], x: Tensor, backprop: Tensor) -> Tensor:
        out = functional_call(run, values, (x.unsqueeze(0),))
        return (out * backprop.unsqueeze(0)).sum()

    values = {name: parameter.detach() for name, parameter in trained.items()}
    x = activations[0].to(backprops.dtype)
    with torch.enable_grad():
        gradients = vmap(grad(loss), (None, 0, 0))(values, x, backprops)
    return {trained[name]: gradient for name, gradient in gradients.items()}


def _runnable(layer: nn.Module) -> Any:
    """Return a copy of a layer to run apart; a proxy's holds its norm, which stands elsewhere."""
    run = _without_hooks(layer)
    norm = None
    if isinstance(layer, ProxyNorm):
        norm = layer.norm
    if norm is not None and layer not in norm.modules():
        followed = _without_hooks(norm)
        run._modules[_NORM] = followed
        run._norm = (followed,)
    return run


@register_grad_sampler(TrainedAffine)
def _affine_gradients(
    layer: TrainedAffine, activations: list[Tensor], backprops: Tensor
) -> dict[Any, Tensor]:
    gradients: dict[Any, Tensor] = {}
    if layer.weight.requires_grad:
        products = torch.einsum("nc...->nc", activations[0] * backprops)
        gradients[layer.weight] = products[..., None, None]
    if layer.bias is not None and layer.bias.requires_grad:
        gradients[layer.bias] = torch.einsum("nc...->nc", backprops)
    return gradients


def _without_hooks(module: nn.Module) -> Any:
    """Return a copy of a module around the same tensors, which calls no hooks."""
    new = copy.copy(module)
    new._parameters = dict(module._parameters)
    new._buffers = dict(module._buffers)
    attributes = vars(new)
    for name in attributes:
        if "_hooks" in name:
            attributes[name] = OrderedDict()
    parts = module._modules
    children = dict(parts)
    for name, part in parts.items():
        if part is not None:
            child = _without_hooks(part)
            children[name] = child
    new._modules = children
    for child in new.modules():
        if isinstance(child, ProxyNorm) and child.norm is module:
            child._norm = (new,)
    return new
