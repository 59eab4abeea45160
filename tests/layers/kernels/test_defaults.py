"""No result depends on torch's default dtype or device, which any program may have set to its own liking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from retrofit import layers
from retrofit.layers.kernels import VARIABLE
from tests.layers.cases import CASES

SHAPE = (4, 6, 5, 3)
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    **{name: (CASES[name].ours, CASES[name].shape) for name in ("batch2d", "layer", "group", "instance tracked")},
    "batch, cumulative": (partial(layers.BatchNormalNorm2d, 6, momentum=None), SHAPE),
    "decorrelated": (partial(layers.DecorrelatedBatchNormalNorm2d, 6, group_size=3), SHAPE),
    "migrated": (partial(layers.MigratedGroupNorm, 2, 6), SHAPE),
    "proxy": (lambda **where: layers.ProxyNorm(nn.SiLU(), 6, norm=nn.GroupNorm(2, 6, **where), **where), SHAPE),
    "weight standardized": (partial(layers.WeightStandardizedConv2d, 6, 4, 3), SHAPE),
}


@contextmanager
def other_defaults() -> Iterator[None]:
    """A type that rounds whatever follows it, and a device that has no values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def run(name: str) -> dict[str, Tensor]:
    """Train two steps and evaluate; the outputs, the gradients and the state afterwards."""
    build, shape = LAYERS[name]
    x = (0.7 * torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32, device="cpu")).exp()
    torch.manual_seed(5)
    layer = build(dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float32, device="cpu"), alpha=0.3)
    found = {}
    for step in range(2):
        x.requires_grad_().grad = None
        out = layer(x)
        out.backward(torch.randn(out.shape, dtype=torch.float32, device="cpu"))
        found |= {f"out {step}": out.detach(), f"grad {step}": x.grad}
    found |= {f"gradient of {n}": p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    layer.eval()
    with torch.no_grad():
        return found | {"evaluated": layer(x)} | {f"state {n}": v.clone() for n, v in layer.state_dict().items()}


@pytest.mark.parametrize("kernels", ["eager", pytest.param("cpp", marks=pytest.mark.compiler)])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_do_not_follow_torchs_defaults(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    wanted = run(name)
    with other_defaults():
        got = run(name)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key
