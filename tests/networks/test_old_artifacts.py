"""Artifacts that an earlier version wrote open as the function that they were.

`old_artifacts.json` holds what that version wrote, without its weights: the manifest's text, the tensors' names, shapes
and types, and what the network answered when the tensors had the values of `_tensor` below. (It was made with the
package as it was before its modules moved, and before the state dict held eps and the like.)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import retrofit
from retrofit.layers.base import as_strength_code

OLD: list[dict[str, Any]] = json.loads(Path(__file__).with_name("old_artifacts.json").read_text())


def _tensor(name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Values that hang on the name and the place alone, the same with every version of torch."""
    count = math.prod(shape)
    if not dtype.is_floating_point:
        return torch.full(shape, 3, dtype=dtype)
    if name.endswith("strength"):
        return torch.full(shape, 0.625, dtype=dtype)
    mixed = torch.arange(count) * 2654435761 + sum(map(ord, name)) * 40503 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 2246822519 & 0xFFFFFFFF
    spread = (mixed ^ mixed >> 13).double() / 2**31 - 1
    values = spread * (3 * shape[0] / count) ** 0.5 if len(shape) > 1 else 1 + 0.4 * spread
    return values.reshape(shape).to(dtype)


@pytest.mark.parametrize("old", OLD, ids=[old["name"] for old in OLD])
def test_an_artifact_of_an_earlier_version_opens_unchanged(tmp_path: Path, old: dict[str, Any]) -> None:
    tensors = {name: _tensor(name, shape, getattr(torch, dtype)) for name, shape, dtype in old["tensors"]}
    path = tmp_path / "old.safetensors"
    save_file(tensors, path, {"format": "pt", "retrofit": old["manifest"]})
    model = retrofit.load(path).eval()
    state = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], as_strength_code(tensor)), name
    assert sorted({layer.noise for layer in model.modules() if hasattr(layer, "noise")}) == old["noise"]
    images = 2.5 * _tensor("images", [math.prod(old["input"])], torch.float32).reshape(old["input"]) - 2.5
    with torch.no_grad():
        torch.testing.assert_close(model(images), torch.tensor(old["output"]), rtol=1e-3, atol=1e-3)

    retrofit.save(model, tmp_path / "new.safetensors")
    with torch.no_grad():
        assert torch.equal(retrofit.load(tmp_path / "new.safetensors").eval()(images), model(images))
