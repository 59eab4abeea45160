"""The target that CONTRIBUTING shows is one: its lines convert networks, which are saved, loaded and exported."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.surgery import TARGETS
from tests.networks.conftest import built

ROOT = Path(__file__).parents[1]
IMPORTS = "from retrofit.surgery.planning import TARGETS, Converter, adopt"


@pytest.fixture
def target() -> Iterator[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(r"\*\*A target\*\*.*?```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"__name__": "mean_only"}
    exec(IMPORTS, names)
    exec(found[1], names)
    yield "mean-only"
    del TARGETS["mean-only"]


@pytest.mark.parametrize("name", ["test_efficientnet", pytest.param("test_resnet", marks=pytest.mark.slow)])
def test_the_target_works(name: str, target: str, tmp_path: Path) -> None:
    source, x = built(name).eval(), torch.randn(2, 3, 64, 64)
    model, report = retrofit.convert(copy.deepcopy(source), target)
    assert {row.status for row in report.plan.layers} == {"converted"}
    torch.testing.assert_close(model(x), source(x))
    for module in source.modules():  # at strength 1: no division
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.fill_(1 - module.eps)  # type: ignore[union-attr]
    retrofit.set_strength(model, 1.0)
    torch.testing.assert_close(model(x), source(x))
    retrofit.save(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(retrofit.load(tmp_path / "a.safetensors").eval()(x), model(x))
    retrofit.set_strength(model, 0.5)
    retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 64, 64))
    with pytest.raises(RetrofitError, match="nobody has said what a MeanOnly"):  # it is no FrozenBatchNorm any more
        retrofit.plain(model)


def test_it_keeps_a_source_that_has_no_affine(target: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    torch.testing.assert_close(retrofit.convert(model, target, check=False)[0](x), expected)
