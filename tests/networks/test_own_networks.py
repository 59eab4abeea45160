"""Networks of one's own: saved, loaded into what the user built, named on the command line; and
their records.
"""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

import retrofit
from retrofit.errors import RetrofitError
from retrofit.networks import own_networks, sampled_outputs
from retrofit.networks.manifest import read_manifest
from retrofit.networks.model_sources import build
from retrofit.networks.open_model import open_model
from retrofit.record import ModelSource, Record, record_of, set_record, unwrapped
from tests.networks import mynet
from tests.networks.conftest import assert_same_answers, refused, same_tensors

NAME = "py:tests.networks.mynet:build"
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _nothing_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # start as a process in which nobody named a network
    monkeypatch.setattr(own_networks, "named_builders", {})


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Expect the same modules, tensors in the same places, values and record afterwards."""
    before, pointers = copy.deepcopy(model), [tensor.data_ptr() for tensor in model.parameters()]
    yield
    assert [type(module) for module in model.modules()] == [
        type(module) for module in before.modules()
    ]
    assert [tensor.data_ptr() for tensor in model.parameters()] == pointers
    assert pointers[0] == 0 or same_tensors(model.state_dict(), before.state_dict())
    assert record_of(model) == record_of(before)


@pytest.fixture
def saved(tmp_path: Path) -> Path:  # a converted network of one's own, saved from Python
    retrofit.save(retrofit.convert(mynet.build(), "gn-pn")[0], tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_loading_without_the_network_imports_nothing(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_networks, "imported", lambda *_: pytest.fail("nobody typed it"))
    with pytest.raises(
        RetrofitError, match=r"tests.networks.mynet:UNet; build that network .* as `into`"
    ):
        retrofit.load(saved)
    with pytest.raises(RetrofitError, match="holds a network of one's own"):
        open_model(str(saved))
    with pytest.raises(RetrofitError, match="which nobody named"):
        build(ModelSource("own", "os:getcwd"))


def _unusual_unet() -> nn.Module:
    model = mynet.build()
    model.down1.norm.eps = 0.3
    return model


def _extractor(
    node: str = "layer2",
) -> nn.Module:  # its activations are shared, and its graphs are attributes
    return create_feature_extractor(torchvision.models.resnet18(), [node]).train()


@pytest.mark.parametrize(
    ("make", "to", "other", "message"),
    [
        (_unusual_unet, "bnn", mynet.build, r"does not come back .* the output of .* differs by"),
        (
            _extractor,
            "ln-pn",
            lambda: _extractor("layer1"),
            "made for another model|do not fit|does not come back",
        ),
    ],
)
def test_it_comes_back_in_its_own_network_alone(
    tmp_path: Path, make: Make, to: str, other: Make, message: str
) -> None:
    model, report = retrofit.convert(make(), to, input_size=(3, 64, 64))
    assert to != "ln-pn" or "5 of 9 activations" in report.plan.note_on_activations
    retrofit.set_strength(model, 1.0)
    retrofit.save(model, tmp_path / "a.safetensors")
    with refused(message):
        retrofit.load(tmp_path / "a.safetensors", into=other())
    assert_same_answers(
        retrofit.load(tmp_path / "a.safetensors", into=make()), model, torch.rand(2, 3, 64, 64)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mynet.build(5), r"head.bias \[2\] float32 for \[5\]"),
        (mynet.small, "made for another model"),
        (lambda: retrofit.convert(mynet.build(), "gn-pn")[0], "is converted already"),
        (lambda: mynet.build().to("meta"), "is on the meta device"),
    ],
)
def test_another_network_is_refused_and_stays_as_it_was(
    saved: Path, make: Make, message: str
) -> None:
    into = make()
    with left_as_it_was(into), refused(message):
        retrofit.load(saved, into=into)


# --- py:MODULE:CALLABLE


def test_a_typed_name_is_a_model() -> None:
    network = open_model(NAME, num_classes=5)
    assert network.source == ModelSource("own", "tests.networks.mynet:build", {"num_classes": 5})
    assert str(network.source) == NAME
    assert network.preprocess.input_size == (3, 64, 64)
    assert network.model(torch.zeros(1, 3, 64, 64)).shape == (1, 5, 64, 64)
    usual = open_model("py:tests.networks.mynet:Classifier", in_chans=1)
    assert usual.preprocess.input_size == (1, 224, 224)
    assert usual.preprocess.mean == pytest.approx((0.449,))


def test_the_working_folder_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_only_here.py").write_text(
        "import torch\n\nclass Nets:\n    small = torch.nn.ReLU\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert isinstance(open_model("py:found_only_here:Nets.small").model, nn.ReLU)


def test_its_artifact_is_proved_by_building_it_again(saved: Path, tmp_path: Path) -> None:
    model = retrofit.load(saved, into=(into := open_model(NAME).model))
    assert model is into
    retrofit.save(model, tmp_path / "b.safetensors")
    assert (
        read_manifest(tmp_path / "b.safetensors")["model"]["name"] == "tests.networks.mynet:build"
    )
    model.pool = nn.AvgPool2d(2)
    with pytest.raises(
        RetrofitError, match=f"class of pool is AvgPool2d here, MaxPool2d in {NAME}"
    ):
        retrofit.save(model, tmp_path / "c.safetensors")


def test_network_says_what_builds_an_artifacts_network(tmp_path: Path) -> None:
    network = open_model(NAME, num_classes=5)
    retrofit.save(retrofit.convert(network.model, "bnn")[0], tmp_path / "a.safetensors")
    path = str(tmp_path / "a.safetensors")
    again = open_model(path, network=NAME)
    assert (again.source, again.artifact, again.preprocess) == (
        network.source,
        path,
        network.preprocess,
    )
    with pytest.raises(RetrofitError, match=r"small builds no network .*argument 'in_chans'"):
        open_model("py:tests.networks.mynet:small", in_chans=1)
    with pytest.raises(RetrofitError, match="made for another model"):
        open_model(path, network="py:tests.networks.mynet:small")


class Activated(
    nn.Module
):  # its activation has parameters, which ProxyNorm's state dict gives other names
    pretrained_cfg: ClassVar = {"input_size": (3, 16, 16)}

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def test_parameters_that_the_state_dict_names_otherwise(tmp_path: Path) -> None:
    model = retrofit.convert(Activated(), "gn-pn")[0].half()
    model.conv.float()
    names = {name for name, _ in model.named_parameters()}
    assert not names <= model.state_dict().keys()
    retrofit.save(model, tmp_path / "a.safetensors")
    again = retrofit.load(tmp_path / "a.safetensors", into=Activated())
    assert same_tensors(again.state_dict(), model.state_dict())  # their dtypes too


def test_an_interrupt_leaves_the_network_to_load_into_as_it_was(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:  # when all is loaded
        raise KeyboardInterrupt

    into = mynet.build().half()
    monkeypatch.setattr(sampled_outputs.SampledOutputs, "difference", interrupt)
    with left_as_it_was(into), pytest.raises(KeyboardInterrupt):
        retrofit.load(saved, into=into)


def test_a_network_without_memory_is_refused_where_nothing_is_run_too(tmp_path: Path) -> None:
    def vectors() -> nn.Module:  # it takes no images
        return nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4))

    model, _ = retrofit.convert(vectors(), "bnn", inputs=torch.randn(4, 7))
    retrofit.save(model, tmp_path / "a.safetensors")
    with pytest.raises(RetrofitError, match="is on the meta device"):
        retrofit.load(tmp_path / "a.safetensors", into=vectors().to("meta"))


class Rotated(nn.Module):
    """Turns its values by complex numbers that are in no file, as rotary embeddings do."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        angles = torch.linspace(0, 3, 4)
        turn = torch.polar(torch.ones(4), angles).reshape(4, 1, 1)
        self.register_buffer("turn", turn, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.norm(self.conv(x)).float() * self.turn
        return turned.real + turned.imag


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_numbers_that_are_in_no_file_stay(tmp_path: Path, dtype: torch.dtype) -> None:
    model, _ = retrofit.convert(Rotated(), "bnn", input_size=(3, 8, 8))
    if dtype == torch.bfloat16:
        model.bfloat16()
    retrofit.save(model, tmp_path / "a.safetensors")
    assert "not_checked" not in read_manifest(tmp_path / "a.safetensors")["sampled_outputs"]
    again = retrofit.load(tmp_path / "a.safetensors", into=Rotated())
    assert again.conv.weight.dtype == dtype
    assert torch.equal(again.turn, Rotated().turn)


# --- the record travels with a network: through wrappers, copies and conversions


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


@pytest.mark.parametrize("carry", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_carry_it(carry: Callable[[nn.Module], nn.Module]) -> None:
    net, _ = retrofit.convert(_net(), "bnn", input_size=(3, 8, 8))
    set_record(net, labels=["a", "b"])
    twin = carry(net)
    assert record_of(twin) == record_of(net)
    set_record(twin, labels=None)
    assert record_of(net).labels == ["a", "b"]


def test_a_wrapped_network_keeps_its_record_inside(tmp_path: object) -> None:
    def wrap(net: nn.Module) -> nn.Module:
        return torch.compile(nn.DataParallel(net))

    net = _net()
    set_record(net, labels=["a", "b", "c", "d"])
    model, report = retrofit.convert(wrap(net), "bnn", input_size=(3, 8, 8))
    assert unwrapped(model) is net is not model
    assert [row.name for row in report.plan.layers] == [
        "1"
    ]  # the network's own name, not the wrapper's
    assert record_of(model) is record_of(net)
    assert record_of(net) == Record(
        labels=["a", "b", "c", "d"], plans=(report.plan,), input_size=(3, 8, 8)
    )
    retrofit.save(model, f"{tmp_path}/a.safetensors")
    into = wrap(_net())
    assert retrofit.load(f"{tmp_path}/a.safetensors", into=into) is into
    again = unwrapped(into)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(again.eval()(images), net.eval()(images))
