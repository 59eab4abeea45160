"""Whoever traces with fx finds converted layers whole."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from retrofit.errors import RetrofitError
from retrofit.layers import FrozenBatchNorm
from tests.layers.test_transforms import LAYERS, build


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_one_call_to_a_trace(name: str) -> None:
    layer, x = build(name)
    model = nn.Sequential(nn.Identity(), layer).eval()
    traced = fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op != "placeholder"][:-1]
    assert all(str(target).startswith(("0", "1")) for target in calls)
    steps = list(layer) if isinstance(layer, nn.Sequential) else [layer]
    assert {traced.get_submodule(str(target)) for target in calls} >= set(steps)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_script_is_refused_in_one_line() -> None:
    with pytest.raises(RetrofitError, match=r"torch.jit.script cannot compile FrozenBatchNorm; use torch.jit.trace"):
        torch.jit.script(nn.Sequential(FrozenBatchNorm(8)))
