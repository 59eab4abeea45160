"""Whoever traces with fx finds converted layers whole."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from retrofit.errors import RetrofitError
from retrofit.layers import FrozenBatchNorm, FrozenBatchNormAct
from retrofit.layers.frozen_batch_norm import ConstantAffine
from tests.layers.test_transforms import LAYERS, build


def _frozen_act() -> nn.Module:
    layer = FrozenBatchNormAct(8)
    layer.act = nn.ReLU()
    return layer


OTHERS = {
    "frozen": lambda: FrozenBatchNorm(8),
    "frozen act": _frozen_act,
    "constant": lambda: ConstantAffine(torch.rand(8), torch.rand(8)),
}


def assert_is_one_call(layer: nn.Module, x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Identity(), layer).eval()
    traced = fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op != "placeholder"][:-1]
    assert all(str(target).startswith(("0", "1")) for target in calls)
    assert {traced.get_submodule(str(target)) for target in calls} >= {module for module in _steps(layer)}
    torch.testing.assert_close(traced(x), model(x))


def _steps(layer: nn.Module) -> list[nn.Module]:
    return list(layer) if isinstance(layer, nn.Sequential) else [layer]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_call_to_a_trace(name: str) -> None:
    assert_is_one_call(*build(name))


@pytest.mark.parametrize("name", OTHERS)
def test_so_is_one_without_strength(name: str) -> None:
    assert_is_one_call(OTHERS[name](), torch.randn(3, 8, 4, 5))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_script_is_refused_in_one_line() -> None:
    with pytest.raises(RetrofitError, match=r"torch.jit.script cannot compile FrozenBatchNorm; use torch.jit.trace"):
        torch.jit.script(nn.Sequential(FrozenBatchNorm(8)))
