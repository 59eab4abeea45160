"""Statistics of a network's norms, converted or not: estimated again, held where they are, or
shared by processes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import swa_utils

from retrofit import layers as ours
from retrofit.errors import RetrofitError
from retrofit.layers import MigratedGroupNorm, StrengthMixin
from retrofit.record import unwrapped
from retrofit.surgery import apply, plan
from retrofit.utils.forward_pass import device_of, evaluating, hooked, input_of
from retrofit.utils.snapshot import left_as_it_was

_SYNCHRONIZED: dict[type[nn.Module], type[nn.Module]] = {
    ours.BatchNormalNorm1d: ours.SyncBatchNormalNorm,
    ours.BatchNormalNorm2d: ours.SyncBatchNormalNorm,
    ours.BatchNormalNorm3d: ours.SyncBatchNormalNorm,
    ours.BatchNormalNormAct2d: ours.SyncBatchNormalNormAct,
    nn.BatchNorm1d: nn.SyncBatchNorm,
    nn.BatchNorm2d: nn.SyncBatchNorm,
    nn.BatchNorm3d: nn.SyncBatchNorm,
    BatchNormAct2d: SyncBatchNormAct,
}
_NOT_FINITE = (
    "the images or the weights hold NaN or infinity, or values grow without bound: mend them"
)


@torch.no_grad()
def update_bn(
    loader: Iterable[Any], model: nn.Module, device: torch.device | str | int | None = None
) -> int:
    """Re-estimate the running statistics of batch normalizations; in converted layers, also lambda
    and whitening.

    `torch.optim.swa_utils.update_bn` does the work. Unlike it, this function reads no data if there
    is nothing to estimate, refuses an empty loader, and restores every mode. Migrated and frozen
    statistics stay constant.

    Args:
        loader: Batches: tensors, or lists and tuples whose first entry is the input.
        model: The network; its mode is restored.
        device: The device to move inputs to; None leaves them where they are.

    Returns:
        The number of layers re-estimated; if there are no such layers, it is 0 and the loader is
        not read. A layer that no batch reached keeps its statistics and is not counted.

    Raises:
        RetrofitError: If the loader holds no sample, or statistics are not finite; all statistics
            are then restored.
    """
    layers = estimated_layers(model)
    if not layers:
        return 0
    if device is not None:
        device = torch.device(device)
    # Torch's function resets every layer first, and puts no momentum back if it fails.
    with left_as_it_was(model, unwritten=model.parameters()):
        swa_utils.update_bn(_with_samples(loader), model, device)
        reached = [layer for layer in layers if layer.num_batches_tracked > 0]
        estimated = _buffers_of(reached)
        estimates = [buffer.clone() for buffer in estimated]
    if not reached:
        raise RetrofitError("the loader held no batch to estimate statistics from; give it data")
    _check_finite(estimates, "statistics")
    pairs = zip(_buffers_of(reached), estimates, strict=True)
    for buffer, value in pairs:
        buffer.copy_(value)
    return len(reached)


def _with_samples(loader: Iterable[Any]) -> Iterator[Any]:
    """Leave out batches without samples, which have no moments but would count as batches."""
    for batch in loader:
        samples = input_of(batch)
        if not isinstance(samples, Tensor) or samples.numel():
            yield batch


def _check_finite(estimates: Iterable[Tensor], description: str) -> None:
    """Refuse estimates that hold NaN or infinity."""
    if not all(values.isfinite().all() for values in estimates):
        raise RetrofitError(f"{description} are not finite; {_NOT_FINITE}")


def _buffers_of(layers: Iterable[nn.Module]) -> list[Tensor]:
    return [buffer for layer in layers for buffer in layer.buffers(recurse=False)]


def estimated_layers(model: nn.Module) -> list[Any]:
    """Return the layers whose running statistics `update_bn` estimates: those that track them and
    are not frozen.
    """
    return [layer for layer in _tracking(model) if not getattr(layer, "frozen", False)]


def _tracking(model: nn.Module) -> list[nn.Module]:
    """Return layers that normalize by the batch in training, by running statistics after it."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if getattr(norm, "running_mean", None) is not None]


@torch.no_grad()
def recentre(
    loader: Iterable[Any], model: nn.Module, device: torch.device | str | int | None = None
) -> int:
    """Update the constants of migrated norms to match the trained network, before its strength
    falls from 1 to 0.

    A migrated norm standardizes with constants, then with the moments (mean and variance) of each
    image and group. During training, the mean of these moments may drift, but at strength 0 only
    the constants remain. So the constants of each group are shifted and scaled until the moments
    average 0 and 1. At strength 1, the function stays the same, since group normalization undoes a
    shift and a scale of its groups (with several groups, up to their eps).

    Args:
        loader: Batches like those used in training: tensors, or lists and tuples whose first entry
            is the input.
        model: The network, changed in place; its mode is restored.
        device: The device to move inputs to; None leaves them where they are.

    Returns:
        The number of layers updated.

    Raises:
        RetrofitError: If the loader is empty, or moments are not finite; nothing is changed in that
            case.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MigratedGroupNorm)
    }
    if not layers:
        return 0
    moments = _mean_moments(loader, model, layers, device)
    for name, (mean, deviation) in moments.items():
        _check_finite((mean, deviation), f"the moments of {name}")
    for name, (mean, deviation) in moments.items():
        _standardize(layers[name], mean, deviation)
    return len(moments)


def _mean_moments(
    loader: Iterable[Any],
    model: nn.Module,
    layers: dict[str, MigratedGroupNorm],
    device: torch.device | str | int | None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and deviation of each layer's groups over a set of images, (G,) in float64.

    With m and v the moments of an image's group and k = 1 / sqrt(v + eps), they are the mean of m,
    weighted by k, and the harmonic mean of sqrt(v + eps): group normalization multiplies by k.
    """
    sums: dict[str, Tensor] = {}

    def measure(name: str, layer: MigratedGroupNorm, args: tuple[Tensor, ...]) -> None:
        sums[name] = sums.get(name, 0) + _sums_of_moments(layer, args[0])

    watched = hooked(
        layer.register_forward_pre_hook(partial(measure, name)) for name, layer in layers.items()
    )
    with evaluating(model), watched:
        for images in map(input_of, _with_samples(loader)):
            model(images if device is None else images.to(device))
    if not sums:
        raise RetrofitError("the loader held no batch to measure moments on; give it data")
    return {name: (mk / k, count / k) for name, (mk, k, count) in sums.items()}


def _sums_of_moments(layer: MigratedGroupNorm, x: Tensor) -> Tensor:
    """Return the sums over images of m k, k and 1 of each group, (3, G) in float64."""
    scale, shift = layer.input_affine()
    # One a channel, (C,), beside x's positions.
    shape = (-1, *(1,) * (x.ndim - 2))
    standardized = x.double() * scale.view(shape) + shift.view(shape)
    by_group = standardized.reshape(len(x), layer.num_groups, -1)
    var, mean = torch.var_mean(by_group, 2, correction=0)
    k = torch.rsqrt(var + layer.group_eps)
    return torch.stack([mean * k, k, torch.ones_like(k)]).sum(1)


def _standardize(layer: Any, mean: Tensor, deviation: Tensor) -> None:
    """Have a layer's constants give (x' - mean) / deviation of each group, where they gave x'."""
    channels = layer.num_channels // layer.num_groups
    slope, _ = layer.input_affine()
    shift = mean.repeat_interleave(channels) / slope
    layer.running_mean.copy_(layer.running_mean.double() + shift)
    group_variance = deviation.square()
    variance = group_variance.repeat_interleave(channels)
    source_variance = layer.running_var.double() + layer.eps
    layer.running_var.copy_(source_variance * variance)
    layer.eps.zero_()
    layer.group_eps.div_(group_variance.mean())


def freeze_norms(model: nn.Module) -> int:
    """Keep the running statistics of batch normalizations, converted or not, fixed during training
    too.

    Converted layers then compute as in evaluation, even after `model.train()`; torch's and timm's
    BatchNorm layers become `FrozenBatchNorm`. gamma and beta are still trained. Migrated statistics
    are already constants.

    Args:
        model: The network, changed in place. It must not itself be a normalization layer.

    Returns:
        The number of layers frozen.
    """
    layers = _tracking(model)
    for layer in layers:
        if isinstance(layer, StrengthMixin):
            layer.frozen = True
            layer.eval()
    if any(not isinstance(layer, StrengthMixin) for layer in layers):
        network = unwrapped(model)
        apply(plan(network, "frozen", source="bn"), network)
    return len(layers)


def sync_norms(model: nn.Module, device: torch.device | str | None = None) -> int:
    """Compute the training statistics of batch normalizations across all processes, with exact
    gradients.

    Each layer becomes its synchronized form in place: object, parameters, buffers and state-dict
    names stay the same.

    Args:
        model: The network.
        device: The device that the network will run on; None for its current device. On a CPU, only
            converted layers synchronize, since torch's need a GPU.

    Returns:
        The number of layers that synchronize.

    Raises:
        RetrofitError: If a layer has no synchronized form: one that whitens needs all values of a
            set in one process.
    """
    for module in model.modules():
        if isinstance(module, StrengthMixin) and module.unsynchronized:
            raise RetrofitError(module.unsynchronized)
    if device is None:
        device = device_of(model)
    layers = [module for module in model.modules() if type(module) in _SYNCHRONIZED]
    if torch.device(device).type == "cpu":
        layers = [layer for layer in layers if isinstance(layer, StrengthMixin)]
    for layer in layers:
        vars(layer)["_retrofit_local_form"] = type(layer)
        layer.__class__ = _SYNCHRONIZED[type(layer)]
        vars(layer).setdefault("process_group", None)
    return len(layers)


@contextmanager
def local_norms(model: nn.Module) -> Iterator[None]:
    """Give the layers that `sync_norms` changed their own class for a while: an artifact describes
    that network.
    """
    synchronized = {
        module: type(module) for module in model.modules() if "_retrofit_local_form" in vars(module)
    }
    for module in synchronized:
        module.__class__ = vars(module)["_retrofit_local_form"]
    try:
        yield
    finally:
        for module, synchronized_class in synchronized.items():
            module.__class__ = synchronized_class
