"""Networks with values that show, artifacts of them, and what must hold of a network that comes
back.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.networks.manifest import read_manifest, seal
from retrofit.networks.model_sources import build
from retrofit.networks.state_tensors import checksum
from retrofit.record import ModelSource

HALF: dict[str, Any] = {"layers": [1, 1, 0, 0], "channels": [32, 48, 48, 48]}
"""Half of timm's test_resnet, for tests in which the number of layers counts: exports, reports and
training runs.
"""
FLAGS = [word for name, value in HALF.items() for word in ("--model-kwargs", f"{name}={value}")]


def spread(
    model: nn.Module,
) -> nn.Module:  # give all tensors, statistics too, values that show in the output
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 1) if tensor.ndim < 2 else tensor.normal_(
                0, tensor[0].numel() ** -0.5
            )
    return model


def built(name: str, to: str | None = None, **kwargs: Any) -> nn.Module:
    library, _, name = name.rpartition(":")
    model = spread(build(ModelSource("torchvision" if library else "timm", name, kwargs)))
    return retrofit.convert(model, to, check=False)[0] if to else model


@pytest.fixture(scope="session")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = retrofit.convert(
        built("test_resnet", num_classes=3), "bnn", only="conv1", noise=0.1, check=False
    )
    model, _ = retrofit.convert(model, "gn-pn", check=False)
    retrofit.set_strength(model, 0.5)
    vars(model.conv1[1]).update(
        momentum=None, noise=0.25, noise_kind="unscaled"
    )  # as a run may set them
    retrofit.save(model, path := tmp_path_factory.mktemp("saved") / "a.safetensors")
    return path


@pytest.fixture
def saved(_saved: Path, tmp_path: Path) -> Path:
    """The artifact of a network converted twice, its `conv1` to `bnn` and then the others to
    `gn-pn`; half-way.
    """
    return Path(shutil.copy(_saved, tmp_path))


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Change an artifact's manifest and tensors."""
    manifest, tensors = (
        read_manifest(path),
        {name: tensor.clone() for name, tensor in load_file(path).items()},
    )
    change(manifest, tensors)
    manifest["checksum"] = checksum(tensors)
    save_file(tensors, path, metadata={"format": "pt", "retrofit": seal(manifest)})


def shape_beyond_torch(path: Path) -> None:
    """Write a safetensors file with a shape that safetensors takes and torch does not."""
    entry = {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}
    header = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def refused(
    message: str, error: type[RetrofitError] = RetrofitError, names: object = ""
) -> pytest.RaisesExc[Any]:
    """Expect an error of one line that is not too long and, if asked for, names the file."""

    def as_it_should_be(error: RetrofitError) -> bool:
        return "\n" not in str(error) and len(str(error)) < 600 and str(names) in str(error)

    return pytest.raises(error, match=message, check=as_it_should_be)


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def assert_same_answers(a: nn.Module, b: nn.Module, images: Tensor) -> None:
    with torch.no_grad():
        ours, theirs = a.eval()(images), b.eval()(images)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def small_net(width: int = 4, classes: int = 3, channels: int = 3) -> nn.Sequential:
    layers = (
        nn.Conv2d(channels, width, 3),
        nn.BatchNorm2d(width),
        nn.Flatten(),
        nn.Linear(width * 4, classes),
    )
    return nn.Sequential(*layers)


def small_state(**options: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(small_net(**options).state_dict())


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}
