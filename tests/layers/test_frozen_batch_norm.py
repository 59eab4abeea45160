"""Constant statistics beside parameters of another type, and the gradient in channels_last on a
GPU.
"""

import pytest
import torch
from torch import nn

from retrofit.layers import BatchNormalNorm2d, DecorrelatedBatchNorm2d
from retrofit.layers.frozen_batch_norm import FrozenBatchNorm
from retrofit.layers.kernels.triton import maps

MEAN, VAR, WEIGHT, BIAS = torch.linspace(-1, 4, 24, dtype=torch.float64).square().view(4, 6) + 0.1
X = torch.randn(4, 6, 5, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_on_cuda(dtype: torch.dtype, affine: bool) -> None:
    exact = torch.promote_types(dtype, torch.float32)
    theirs = nn.BatchNorm2d(6, affine=affine, device="cuda", dtype=exact).eval()
    theirs.load_state_dict(
        {"running_mean": MEAN, "running_var": VAR, "weight": WEIGHT, "bias": BIAS}, strict=False
    )
    ours, x, found = (
        FrozenBatchNorm(6, affine=affine, device="cuda", dtype=exact),
        X.to("cuda", dtype),
        [],
    )
    ours.load_state_dict(theirs.state_dict())
    for layer in (theirs, ours):
        own = x.clone().requires_grad_()
        layer(own).square().sum().backward()
        found.append([layer(x), own.grad, *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(found[1], found[0])
    assert found[1][1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("affine", [(WEIGHT, BIAS), (None, None)])
def test_second_derivative(affine: tuple[torch.Tensor | None, ...]) -> None:
    """Where kernels for a GPU have computed the output."""
    x, *trained = (None if one is None else one.clone().requires_grad_() for one in (X, *affine))
    grad = torch.randn_like(x).requires_grad_()

    def gradients(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad_x, affine = maps._differentiably(x, grad, MEAN, VAR, trained[0], 1e-3)
        return (grad_x, *affine)[: len(leaves)]

    out = nn.functional.batch_norm(x, MEAN, VAR, *trained, eps=1e-3)
    leaves = [leaf for leaf in (x, *trained) if leaf is not None]
    expected = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(gradients(x, grad), expected)
    assert torch.autograd.gradcheck(gradients, (x, grad))


@pytest.mark.parametrize("cls", [FrozenBatchNorm, BatchNormalNorm2d, DecorrelatedBatchNorm2d])
@pytest.mark.parametrize("cast", ["parameters", "buffers"])
def test_one_of_parameters_and_constants_in_bfloat16(cls: type[nn.Module], cast: str) -> None:
    """FSDP2's mixed precision casts parameters and leaves buffers; some casts do the reverse."""
    layer = cls(6).eval()
    layer.load_state_dict(
        {"running_mean": MEAN, "running_var": VAR, "weight": WEIGHT, "bias": BIAS}, strict=False
    )
    if hasattr(layer, "set_strength"):
        layer.set_strength(0.0)
    for tensor in getattr(layer, cast)():
        if tensor.is_floating_point():
            tensor.data = tensor.data.bfloat16()
    x = X.float().requires_grad_()
    expected = nn.functional.batch_norm(
        X, *(value.detach().double() for value in (layer.running_mean, layer.running_var)),
        *(value.detach().double() for value in layer.parameters()), eps=1e-5,
    )  # fmt: skip
    out = layer(x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == layer.weight.dtype
