"""The kernels where networks use them: in place activations, checkpointing, compilers, exporters."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrofit
from retrofit.layers import BatchNormalNorm2d, GroupNormalNorm, LayerNormalNorm
from tests.layers.cases import on

pytestmark = on("eager", "cpp")


def network(noise: float = 0.3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        BatchNormalNorm2d(6, noise=noise),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3),
        GroupNormalNorm(2, 6, noise=noise),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6 * 16, 10),
        LayerNormalNorm(10, noise=noise),
        nn.ReLU(inplace=True),
    )


def gradients(model: nn.Module, x: Tensor, run: object = None) -> list[Tensor]:
    torch.manual_seed(1)
    (model(x) if run is None else run(x)).square().sum().backward()  # type: ignore[operator]
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def test_activations_in_place_and_channels_last() -> None:
    model, x = network(), torch.randn(4, 3, 8, 8)
    plain = gradients(model, x)
    assert len(plain) == len(list(model.parameters()))
    assert all(g.isfinite().all() for g in plain)
    quiet = network(0.0)
    first = gradients(quiet, x)
    second = gradients(quiet.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


def test_checkpointing_draws_the_same_noise() -> None:
    model, x = network(), torch.randn(4, 3, 8, 8, requires_grad=True)
    expected = gradients(model, x)
    got = gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the compiler's own
@pytest.mark.parametrize("to", ["bnn", "gn-pn", "ln-pn"])
def test_a_converted_network_trains_compiled_as_it_does_eagerly(to: str) -> None:
    model, _ = retrofit.convert(timm.create_model("test_resnet"), to=to)
    retrofit.set_strength(model, 0.7)
    with torch.no_grad():  # a fresh residual block ends in gamma = 0, which leaves ReLUs at their kink, where
        for p in model.parameters():  # rounding chooses the derivative
            p.add_(torch.randn_like(p), alpha=0.05)
    model, x = model.train(), torch.randn(4, 3, 64, 64)
    reference = copy.deepcopy(model)
    try:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            for a, b in zip(gradients(model, x, compiled), gradients(reference, x), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()) + 1e-6)
        for (name, a), b in zip(model.named_buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    finally:
        torch.compiler.reset()
