import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from retrofit import bench
from retrofit.bench import Setting, Spread, measure, measure_files, peak_memory
from retrofit.errors import RetrofitError

CPU = torch.device("cpu")


def small(width: int = 4) -> nn.Module:
    layers = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


def test_peak_memory_is_what_was_alive_at_once() -> None:
    x = torch.ones(1000, 1000)

    def twice() -> torch.Tensor:
        return ((x + 1) * 2).sum()

    assert peak_memory(twice, CPU) == pytest.approx(2 * x.nbytes, rel=0.01)
    assert peak_memory(partial(x.add_, 1), CPU) < 0.01 * x.nbytes
    layers = nn.Sequential(*(nn.Sigmoid() for _ in range(4)))
    assert peak_memory(partial(layers, x), CPU) == pytest.approx(2 * x.nbytes, rel=0.01)
    x.requires_grad_()  # backward needs every output
    assert peak_memory(lambda: layers(x).sum(), CPU) == pytest.approx(4 * x.nbytes, rel=0.01)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_networks_take_turns(mode: str) -> None:
    network, turns = small(), []
    before = copy.deepcopy(network.state_dict())
    setting = Setting(batch_size=2, rounds=3)
    networks = {"wide": (small(64), (3, 16, 16)), "plain": (network, (3, 16, 16))}
    wide, plain = measure(
        networks, setting, mode, lambda done, total, what: turns.append((done, total, what))
    )
    assert (wide.network, plain.network, plain.mode) == ("wide", "plain", mode)
    assert plain.time_ratio is plain.memory_ratio is None
    assert wide.time_ratio is not None
    assert wide.time_ratio.low <= wide.time_ratio.median <= wide.time_ratio.high
    assert wide.memory_ratio == wide.bytes / plain.bytes
    assert wide.bytes > 4 * plain.bytes
    assert turns == [(1, 3, mode), (2, 3, mode), (3, 3, mode)]
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


def test_training_needs_class_scores() -> None:
    with pytest.raises(RetrofitError, match="no class scores"):
        measure({"dense": (nn.Conv2d(3, 2, 1), (3, 8, 8))}, Setting(batch_size=2, rounds=3))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batches_beyond_the_memory_are_refused_with_advice(mode: str) -> None:
    setting = Setting(batch_size=10**11, rounds=3)
    with pytest.raises(
        RetrofitError, match=r"100,000,000,000 images .* memory; lower `batch_size`"
    ):
        measure({"plain": (small(), (3, 16, 16))}, setting, mode)


def test_files_of_batches_beyond_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "metadata", lambda _path: {"input_size": (3, 16, 16)})
    with pytest.raises(RetrofitError, match="memory; lower `batch_size`"):
        measure_files({"a": tmp_path / "a.onnx"}, "onnxruntime", batch_size=10**12)


def test_spread() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0)
