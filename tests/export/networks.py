"""Layers and networks with trained-looking statistics for the export tests, and images."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import retrofit
from retrofit.layers import BatchNormalNorm2d
from tests.networks.conftest import HALF


def slow(*values: Any) -> list[Any]:  # parameters that are tried with the slow tests
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def norm(channels: int, **changes: Any) -> BatchNormalNorm2d:
    """A BatchNormalNorm2d whose statistics look trained: lambda from -0.5 to 2.4, gamma and beta of
    both signs.
    """
    generator = torch.Generator().manual_seed(channels)

    def spread(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(channels, generator=generator)

    layer = BatchNormalNorm2d(channels, noise=0.0).eval()
    values = {
        "running_mean": spread(-1, 1),
        "running_var": spread(0.3, 3),
        "running_lambda": spread(-0.5, 2.4),
    }
    values |= {"weight": spread(-1.5, 1.5), "bias": spread(-1, 1)}
    with torch.no_grad():
        for name, value in {**values, **changes}.items():
            getattr(layer, name).copy_(torch.as_tensor(value))
    return layer


def batch_norm(layer: Any) -> Any:  # give a BatchNorm affines and statistics as of training
    for tensor in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer


def images(
    number: int = 16, size: int = 32
) -> list[Tensor]:  # batches of 8 images of unlike contrast
    generator = torch.Generator().manual_seed(1)
    levels = 1 + 0.2 * torch.randn(number, 1, 1, 1, generator=generator)
    return list((levels * torch.randn(number, 3, size, size, generator=generator)).split(8))


def converted(
    to: str,
) -> nn.Module:  # a small network at strength 1 whose statistics are those of `images`
    name, options = ("test_vit", {"img_size": 32}) if to == "lnn" else ("test_resnet", HALF)
    model = timm.create_model(name, num_classes=5, **options).train()
    with torch.no_grad():
        for batch in images():
            model(batch)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    model, _ = retrofit.convert(model.eval(), to, check=False, strength=1.0)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("running_lambda"):
            nn.init.uniform_(buffer, 0.8, 1.2)
    return model.eval()
