"""Faults that folding and exporting once had, each in the network that showed it and in another of its kind."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.export.onnx import precision
from tests.export.networks import norm


def statistics(model: nn.Module) -> nn.Module:
    """Give BatchNorms statistics as of training."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


class Masked(nn.Module):
    """A convolution and a norm, between which an optional argument acts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, mask: Tensor | None = None, bypass: bool = False) -> Tensor:
        h = self.conv(x)
        h = h if mask is None else h * mask
        return h if bypass else self.norm(h)


X, MASK = torch.randn(4, 3, 9), (torch.rand(4, 1, 7) > 0.5).float()


@pytest.mark.parametrize("to", ["frozen", "ln"])
def test_what_an_optional_argument_does_between_a_convolution_and_its_norm(to: str) -> None:
    model, _ = retrofit.convert(statistics(Masked()), to, check=False)
    if to == "ln":
        retrofit.set_strength(model, 1.0)
    plain, masked = retrofit.fold(model, inputs=(X,)), retrofit.fold(model, inputs={"x": X, "mask": MASK})
    torch.testing.assert_close(plain(X), model(X), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(masked(x=X, mask=MASK), model(X, MASK), atol=1e-5, rtol=1e-4)
    for wrong in (
        lambda: plain(X, MASK),
        lambda: plain(X, None, True),
        lambda: masked(x=X),
        lambda: plain(X[:, :, :5]),
    ):
        with pytest.raises((ValueError, AssertionError, RuntimeError)):
            wrong()


class Refining(nn.Module):
    """Calls one convolution again, without its norm, where its caller asks for more: nothing that fx can trace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        h = self.norm(self.conv(x))
        for _ in range(options.get("more", 0) if isinstance(options, dict) else 0):
            h = self.conv(torch.relu(h))
        return h


@pytest.mark.parametrize("more", [0, 2])
def test_a_convolution_that_another_call_uses_without_its_norm(more: int) -> None:
    model, _ = retrofit.convert(statistics(Refining()), "frozen", check=False)
    folded = retrofit.fold(model, inputs={"x": X, "more": more})
    torch.testing.assert_close(folded(x=X, more=more), model(X, more=more), atol=1e-5, rtol=1e-4)
    with pytest.raises((ValueError, AssertionError)):
        folded(x=X, more=1)


class ByNumber(nn.Module):
    """Does something else to a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return h if x.shape[0] == 1 else self.norm(h)


def test_another_path_for_a_single_sample_is_refused_or_right() -> None:
    model = statistics(ByNumber())
    with pytest.raises(RetrofitError, match="differs from the given one"):
        retrofit.fold(model, inputs=X)
    with pytest.raises(RetrofitError, match="differs from the given one"):
        retrofit.fold(model, input_size=(3, 9))
    folded = retrofit.fold(model, inputs=X[:1], batch=1)
    torch.testing.assert_close(folded(X[:1]), model(X[:1]))
    with pytest.raises(AssertionError):
        folded(X)


@dataclass
class Answer:
    """What a network may answer with."""

    scores: Tensor
    parts: list[Any]


class InDataclass(nn.Module):
    """Answers with a dataclass, which torch.export does not take."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.conv, self.norm, self.factor = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), factor

    def forward(self, x: Tensor) -> Answer:
        h = self.norm(self.conv(x)) * self.factor
        return Answer(h.mean(2), [{"h": h}])


def test_an_answer_in_a_dataclass_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = retrofit.convert(statistics(InDataclass()), "frozen", check=False)
    with pytest.warns(UserWarning, match="^nothing is fused: torch.export cannot capture the network"):
        folded = retrofit.fold(model, inputs=X)
    torch.testing.assert_close(folded(X).parts[0]["h"], model(X).parts[0]["h"])
    real = retrofit.layers.FrozenBatchNorm.inference_form
    monkeypatch.setattr(
        retrofit.layers.FrozenBatchNorm, "inference_form", lambda self: nn.Sequential(real(self), nn.ReLU())
    )
    with pytest.raises(RetrofitError, match="differs from the given one"):
        retrofit.fold(model, inputs=X)


def test_nothing_compared_is_no_pass() -> None:
    with pytest.raises(RetrofitError, match="NaN or infinity alone"):
        retrofit.fold(nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8).requires_grad_(False), Nan()), inputs=X)
    model = statistics(nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Conv1d(8, 2, 1)))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    with pytest.warns(UserWarning, match="^not checked: every output is zero"):
        retrofit.fold(model, inputs=X)


class Nan(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["running_lambda", "running_mean"])
def test_constants_that_are_no_numbers_are_refused(name: str, value: float) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8, **{name: torch.full((8,), value)}))
    with pytest.raises(RetrofitError, match=r"NaN or infinity alone|differs from the given one by inf"):
        retrofit.fold(model, input_size=(3, 9, 9))


def in_half(path: Path, x: Tensor) -> np.ndarray[Any, Any]:
    """Run a file in strict float16, its own definition of every operation."""
    with np.errstate(over="ignore"):  # to infinity, where the sign of a value is all that counts
        return ReferenceEvaluator(onnx.load(path)).run(None, {"input": x.numpy()})[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("source", "to", "strength", "size"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), "lnn", 1.0, (16,)),
        (lambda: nn.Sequential(nn.Conv1d(16, 16, 1), nn.GroupNorm(2, 16)), "gnn", 0.5, (16, 8)),
        (lambda: nn.Sequential(nn.Conv1d(16, 16, 1), nn.BatchNorm1d(16)), "ln", 0.5, (16, 8)),
        (lambda: nn.Sequential(nn.Conv1d(16, 16, 1), nn.InstanceNorm1d(16, affine=True)), "inn", 1.0, (16, 8)),
    ],
)
def test_large_values_are_normalized_in_half_precision(
    source: Any, to: str, strength: float, size: tuple[int, ...], tmp_path: Path
) -> None:
    """Squares of centred values overflow float16 above 256."""
    torch.manual_seed(0)
    model, _ = retrofit.convert(source(), to, check=False)
    retrofit.set_strength(model, strength)
    with torch.no_grad():
        model[0].weight.mul_(500)
    retrofit.export_onnx(model.eval(), tmp_path / "a.onnx", input_size=size, precision="float16")
    x = torch.randn(2, *size)
    expected = model(x).detach()
    found = torch.from_numpy(in_half(tmp_path / "a.onnx", x))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x).mean(-1).sqrt()


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax((x @ x.transpose(-1, -2)) / 1e4, -1) @ x


@pytest.mark.parametrize("last", [Squares, Scores])
def test_what_overflows_half_precision_is_refused(last: type[nn.Module], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), last()).eval()
    with torch.no_grad():
        model[0].weight.mul_(2000)
    with pytest.raises(RetrofitError, match="overflow float16"):
        retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(4, 16), precision="float16")
    assert not list(tmp_path.iterdir())


class OfBatches(nn.Module):
    """Refuses a single sample, as batch statistics over one value do."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] < 2:
            raise ValueError("more than one value is needed")
        return x - x.mean(0)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False)),
        nn.Sequential(nn.Linear(5, 6), OfBatches()),
    ],
)
def test_networks_that_refuse_a_single_sample(model: nn.Module, tmp_path: Path) -> None:
    report = retrofit.export_onnx(model.eval(), tmp_path / "a.onnx", input_size=(5,))
    assert report.parity.passed
    assert report.parity.batches == (2, 3)


class Rows(nn.Module):
    """Goes through the samples one by one, so that tracing fixes how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        return torch.stack([row - row.mean() for row in h.unbind(0)])


class Anchors(nn.Module):
    """Reshapes by a number of samples that it noted when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).reshape(int(x.shape[0]), 2, -1)


@pytest.mark.parametrize("source", [Rows, Anchors])
def test_a_fixed_batch(source: type[nn.Module], tmp_path: Path) -> None:
    model = statistics(source())
    if source is Rows:
        with pytest.raises(RetrofitError, match=r"cannot capture the network .*`batch=1`"):
            retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 9))
    report = retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 9), batch=4)
    assert report.parity.batches == (4,)
    assert [dim.dim_value for dim in onnx.load(tmp_path / "a.onnx").graph.input[0].type.tensor_type.shape.dim] == [
        4,
        3,
        9,
    ]
    folded = retrofit.fold(model, inputs=X, batch=4)
    torch.testing.assert_close(folded(X), model(X), atol=1e-5, rtol=1e-4)
    with pytest.raises(AssertionError):
        folded(X[:2])
    with pytest.raises(UsageError, match="`inputs` are 4 samples, `batch` says 3"):
        retrofit.fold(model, inputs=X, batch=3)


class Pair(nn.Module):
    """Takes two inputs of different shapes in a dict, and answers with one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(4, 6), nn.Embedding(10, 6), nn.BatchNorm1d(6)

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        h = self.norm(self.left(batch["values"])) * scale
        return {"sum": h + self.right(batch["token"]), "values": h}


def test_several_inputs_are_named_in_the_file(tmp_path: Path) -> None:
    model = statistics(Pair())
    batch = {"values": torch.randn(3, 4), "token": torch.tensor([1, 2, 3])}
    report = retrofit.export_onnx(model, tmp_path / "a.onnx", inputs=(batch,))
    assert report.judged_on == "given inputs"
    assert "BatchNormalization" not in report.nodes
    found = {value.name for value in onnx.load(tmp_path / "a.onnx").graph.input}
    assert len(found) == 2
    assert report.parity.passed


def test_a_full_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(onnx, "save_model", full)
    with pytest.raises(RetrofitError, match=r"temporary folder /.* \(.*No space left.*TMPDIR"):
        precision.to_int8(onnx.ModelProto(), [], "onnxruntime")


def test_one_image_is_not_enough_for_ranges(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="images, 2 or more"):
        retrofit.export_onnx(
            nn.Conv2d(3, 4, 1),
            tmp_path / "a.onnx",
            input_size=(3, 4, 4),
            precision="int8",
            calibrate=[torch.ones(1, 3, 4, 4)],
        )
