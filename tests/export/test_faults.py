"""Faults that folding and exporting once had, each in the network that showed it and in another of
its kind.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import own_input_size
from retrofit.layers import (
    DecorrelatedBatchNormalNorm2d,
    GroupNormalNorm,
    MigratedGroupNorm,
    ProxyNorm,
)
from tests.export.networks import batch_norm, norm, slow


class ConvNorm(
    nn.Module
):  # a convolution and a norm with statistics as of training, and what a subclass makes of them
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3), batch_norm(nn.BatchNorm1d(8))
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x))


class Masked(ConvNorm):  # an optional argument acts between the two
    def forward(self, x: Tensor, mask: Tensor | None = None, bypass: bool = False) -> Tensor:
        h = self.conv(x) if mask is None else self.conv(x) * mask
        return h if bypass else self.norm(h)


X, MASK = torch.randn(4, 3, 9), (torch.rand(4, 1, 7) > 0.5).float()


def test_what_an_optional_argument_does_between_a_convolution_and_its_norm() -> None:
    model, _ = retrofit.convert(Masked(), "frozen", check=False)
    plain, masked = (
        retrofit.fold(model, inputs=(X,)),
        retrofit.fold(model, inputs={"x": X, "mask": MASK}),
    )
    torch.testing.assert_close(plain(X), model(X), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(masked(x=X, mask=MASK), model(X, MASK), atol=1e-5, rtol=1e-4)
    for wrong in (
        lambda: plain(X, MASK),
        lambda: plain(X, None, True),
        lambda: masked(x=X),
        lambda: plain(X[..., :5]),
    ):
        with pytest.raises(RetrofitError, match="fold it again"):
            wrong()


class ByNumber(ConvNorm):  # does something else to a single sample
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return h if x.shape[0] == 1 else self.norm(h)


def test_another_path_for_a_single_sample_is_refused_or_right() -> None:
    model = ByNumber()
    for given in ({"inputs": X}, {"input_size": (3, 9)}):
        with pytest.raises(RetrofitError, match="differs from the given one"):
            retrofit.fold(model, **given)  # type: ignore[arg-type]
    folded = retrofit.fold(model, inputs=X[:1], batch=1)
    torch.testing.assert_close(folded(X[:1]), model(X[:1]))


@dataclass
class Answer:  # what a network may answer with, and torch.export does not take
    scores: Tensor
    parts: list[Any]


class InDataclass(ConvNorm):
    def forward(self, x: Tensor) -> Answer:
        h = super().forward(x)
        return Answer(h.mean(2), [{"h": h}])


def test_an_answer_in_a_dataclass_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = retrofit.convert(InDataclass(), "frozen", check=False)
    with pytest.warns(
        UserWarning, match="^nothing is fused: torch.export cannot capture the network"
    ):
        folded = retrofit.fold(model, inputs=X)
    torch.testing.assert_close(folded(X).parts[0]["h"], model(X).parts[0]["h"])
    monkeypatch.setattr(retrofit.layers.FrozenBatchNorm, "inference_form", lambda _: nn.ReLU())
    with pytest.raises(RetrofitError, match="differs from the given one"):
        retrofit.fold(model, inputs=X)


def test_nothing_compared_is_no_pass() -> None:
    model = nn.Conv1d(3, 8, 3, bias=False)
    nn.init.zeros_(model.weight)
    with pytest.warns(UserWarning, match="^not checked: every output is zero"):
        retrofit.fold(model, inputs=X)


@pytest.mark.parametrize(
    ("name", "where", "value", "message"),
    [
        ("running_lambda", slice(8), math.nan, "^the network answers with NaN or infinity alone"),
        ("running_mean", slice(8), math.inf, "NaN or infinity alone"),
        ("running_lambda", 3, math.nan, r"^1\.running_lambda holds NaN; export other weights$"),
    ],
)
def test_constants_that_are_no_numbers_are_refused(
    name: str, where: Any, value: float, message: str
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8))
    getattr(model[1], name)[where] = value
    with pytest.raises(RetrofitError, match=message):
        retrofit.fold(model, input_size=(3, 9, 9))


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_the_network_does_not_use_may_hold_anything() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8))
    model.register_buffer("table", torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8))
    model.register_buffer("best", torch.tensor(math.nan))
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(
        retrofit.fold(model, input_size=(3, 9, 9))(x), model(x), rtol=1e-4, atol=1e-5
    )


def test_networks_that_refuse_a_single_sample(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False)).eval()
    assert retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(5,)).parity.batches == (
        2,
        3,
    )


class Rows(
    ConvNorm
):  # goes through the samples one by one, so that tracing fixes how many there are
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row - row.mean() for row in super().forward(x).unbind(0)])


class Keeps(
    ConvNorm
):  # keeps what it made for the shape of its last call, as the heads of ultralytics' networks do
    shape: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if self.shape != h.shape:
            self.places, self.shape = torch.arange(h.shape[2]).float(), h.shape
        return h + self.places


class Three(ConvNorm):
    """Does something else to three samples."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return h if x.shape[0] == 3 else self.norm(h)


def test_a_number_of_samples_that_the_captured_network_does_not_take() -> None:
    with pytest.raises(
        RetrofitError, match=r"captured with 4 samples, the network does not take 3; .*`batch=4`"
    ):
        retrofit.fold(Three(), inputs=X)


@pytest.mark.parametrize("source", [Rows, Keeps])
def test_a_fixed_batch(source: type[nn.Module], tmp_path: Path) -> None:
    model, path = source(), tmp_path / "a.onnx"
    # What it keeps is put back before it is captured
    if source is not Keeps:
        with pytest.raises(RetrofitError, match=r"cannot capture the network .*`batch=1`"):
            retrofit.export_onnx(model, path, input_size=(3, 9))
    report = retrofit.export_onnx(model, path, input_size=(3, 9), batch=4)
    assert report.parity.batches == (4,)
    dims = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims] == [4, 3, 9]
    folded = retrofit.fold(model, inputs=X, batch=4)
    torch.testing.assert_close(folded(X), model(X), atol=1e-5, rtol=1e-4)
    with pytest.raises(RetrofitError, match="tensor of 4x3x9 as `x`, not a"):
        folded(X[:2])
    with pytest.raises(UsageError, match="`inputs` are 4 samples, `batch` says 3"):
        retrofit.fold(model, inputs=X, batch=3)


class Pair(nn.Module):  # takes two inputs of different shapes in a dict, and answers with one
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = (
            nn.Linear(4, 6),
            nn.Embedding(10, 6),
            batch_norm(nn.BatchNorm1d(6)),
        )

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
        h = self.norm(self.left(batch["values"])) * scale
        return {"sum": h + self.right(batch["token"]), "values": h}


def test_several_inputs_are_named_in_the_file(tmp_path: Path) -> None:
    batch = {"values": torch.randn(3, 4), "token": torch.tensor([1, 2, 3])}
    report = retrofit.export_onnx(Pair().eval(), tmp_path / "a.onnx", inputs=(batch,))
    assert (report.judged_on, report.parity.passed) == ("given inputs", True)
    assert "BatchNormalization" not in report.nodes
    assert len({value.name for value in onnx.load(tmp_path / "a.onnx").graph.input}) == 2


class Shared(nn.Module):  # takes samples and a matrix for all of them
    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix


def test_a_size_that_is_the_number_of_samples_by_chance() -> None:
    matrix = torch.randn(4, 4)
    advice = "cannot capture .* whose number of samples is no other size of theirs$"
    with pytest.warns(UserWarning, match=advice):
        retrofit.fold(Shared(), inputs=(torch.randn(4, 4), matrix))
    x = torch.randn(3, 4)
    folded = retrofit.fold(Shared(), inputs=(x, matrix))
    torch.testing.assert_close(folded(x[:2], matrix), x[:2] @ matrix)


IMAGES = [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))]
POLY, FROZEN = (
    {"fold": "poly", "tolerance": 0.5},
    {"freeze_lambda": True, "tolerance": 2.0, "calibrate": IMAGES},
)


@pytest.mark.parametrize("how", [{}, *slow({**POLY, "calibrate": IMAGES}, FROZEN)])
def test_fold_makes_its_tensors_where_the_network_lies(how: dict[str, Any]) -> None:
    """Tensors lie on the meta device here unless something says where; those would end in an
    error.
    """
    whitened = DecorrelatedBatchNormalNorm2d(8, group_size=4)
    whitened.train()(torch.randn(16, 8, 4, 4))
    layers = [
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        norm(8),
        nn.Conv2d(8, 8, 1),
        MigratedGroupNorm(2, 8),
    ]
    layers += [
        ProxyNorm(nn.PReLU(8), 8),
        nn.Conv2d(8, 8, 1),
        whitened,
        nn.Conv2d(8, 8, 1),
        GroupNormalNorm(2, 8),
    ]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.Conv2d(8, 4, 1)).eval()
    expected = retrofit.fold(model, input_size=(3, 6, 6), **how)
    with torch.device("meta"):
        folded = retrofit.fold(model, input_size=(3, 6, 6), **how)
    assert {tensor.device.type for tensor in (*folded.parameters(), *folded.buffers())} == {"cpu"}
    torch.testing.assert_close(folded(IMAGES[0]), expected(IMAGES[0]))


def small_network() -> nn.Module:
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *pool).eval()


@pytest.mark.parametrize("size", [(3, 32, 32), (3, 20)])
def test_the_size_that_a_network_was_converted_with_is_its_own(
    size: tuple[int, ...], tmp_path: Path
) -> None:
    model = small_network() if len(size) == 3 else ConvNorm()
    model, _ = retrofit.convert(model, "ln", input_size=size)
    x = torch.randn(2, *size)
    torch.testing.assert_close(retrofit.fold(model)(x), model(x), atol=1e-5, rtol=1e-4)
    retrofit.export_onnx(model, tmp_path / "a.onnx")
    dims = onnx.load(tmp_path / "a.onnx").graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in dims[1:]] == list(size)
    if len(size) == 3:
        retrofit.save(model, tmp_path / "a.safetensors")
        loaded = retrofit.load(tmp_path / "a.safetensors", into=small_network())
        assert own_input_size(loaded) == size


@pytest.mark.parametrize("named", [False, True])
def test_the_size_of_the_inputs_that_a_network_was_converted_with_is_its_own(named: bool) -> None:
    x = torch.randn(1, 3, 20)
    model, _ = retrofit.convert(ConvNorm(), "ln", inputs={"x": x} if named else x)
    torch.testing.assert_close(retrofit.fold(model)(x), model(x), atol=1e-5, rtol=1e-4)


def test_a_network_of_sound_as_wide_as_no_image_is_saved(tmp_path: Path) -> None:
    layers = [nn.Conv2d(1, 4, (1, 9), stride=(1, 8)), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)]
    model, _ = retrofit.convert(
        nn.Sequential(*layers).eval(), "ln", inputs=torch.randn(1, 1, 1, 20000)
    )
    retrofit.save(model, tmp_path / "a.safetensors", source="own")


def test_inputs_that_are_no_samples_of_real_numbers_say_no_size() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
    model, _ = retrofit.convert(model, "lnn", inputs=torch.tensor([[1, 2, 3]]))
    assert own_input_size(model) == (3, 224, 224)


class QuantizedInPart(nn.Module):
    """A fused layer of quantization-aware training, which calls F.batch_norm, before a
    LayerNorm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), batch_norm(nn.BatchNorm2d(8)))
        self.body.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        torch.ao.quantization.fuse_modules_qat(self.body.train(), [["0", "1"]], inplace=True)
        torch.ao.quantization.prepare_qat(self.body, inplace=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x).mean((2, 3)))


@pytest.mark.filterwarnings("ignore")
def test_a_network_in_quantization_aware_training_is_refused_in_its_words() -> None:
    model = QuantizedInPart()
    model(torch.randn(8, 3, 12, 12))
    with pytest.raises(RetrofitError, match=r"quantizes its values.*fold it before `prepare_qat`"):
        retrofit.fold(model.eval(), input_size=(3, 12, 12))


class ScaledInFloat32(nn.Module):
    """A norm behind an activation, whose output is cast and then scaled by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("scale", torch.rand(4, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(torch.relu(self.conv(x))).float() * self.scale)


def test_maps_merge_past_a_cast_that_torch_export_asserts() -> None:
    model, _ = retrofit.convert(ScaledInFloat32().eval(), "frozen", input_size=(3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(retrofit.fold(model)(x), model(x))


@pytest.mark.parametrize("groups", [16, *slow(4)])
def test_nearly_flat_images_in_a_group_norm_of_the_newest_opset(
    groups: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(groups, 16), nn.ReLU(), *pool).eval()
    retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 16, 16), opset=22)
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    images = 20 + 0.01 * torch.randn(4, 3, 16, 16)
    # A flat one
    images[0] = 20
    (outputs,) = session.run(None, {"input": images.numpy()})
    expected = model.double()(images.double()).detach()
    torch.testing.assert_close(torch.from_numpy(outputs).double(), expected, atol=2e-3, rtol=0)


def test_constant_tokens_in_a_folded_network_that_is_halved() -> None:
    model, _ = retrofit.convert(nn.Sequential(nn.LayerNorm(16)), "lnn", input_size=(16,))
    retrofit.set_strength(model, 1.0)
    folded = retrofit.fold(model, input_size=(16,)).half()
    x = torch.randn(3, 16)
    x[0] = 0.5
    torch.testing.assert_close(folded(x.half()).float(), model(x).detach(), atol=5e-3, rtol=0)
