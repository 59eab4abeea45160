"""Networks of libraries that retrofit does not know, from conversion to ONNX: each is right, or
refused as listed.

Run with `--group foreign`. Each network is converted, its strength is raised, it is saved, loaded
into a fresh build, made plain, folded and exported; what comes out is compared with the converted
network in PyTorch here, apart from the comparisons that retrofit makes. Folding is tried by itself
where `export`, which writes the folded network, is refused.
"""

import collections
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.surgery.norm_layers import find_norms
from retrofit.utils.output_tensors import tensors_in
from tests.foreign.networks import NETWORKS, build

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = ("convert", "load", "fold", "plain", "export")
# What the one line says with which a step is refused.
REFUSED_STEPS = {
    # ONNX Runtime computes something else than PyTorch for convolutions that standardize their
    # weights by F.batch_norm.
    ("transformers Bit", "export"): "ONNX Runtime differs from PyTorch by",
    ("pytorch_tabnet TabNet", "export"): "ONNX Runtime differs from PyTorch by",
    ("pytorchcv revnet38", "export"): "torch.export cannot capture the network",
    ("pytorchcv shakeshakeresnet26_2x32d_cifar100", "export"): "ONNX Runtime cannot run",
    # PyTorch leaves a squeezed dimension of more than one as it is, and ONNX refuses it.
    ("speechbrain CRDNN", "export"): "the exported model is not valid ONNX",
    ("torchaudio Tacotron2", "export"): "torch.export cannot capture the network",
}


def answers(
    model: Any, inputs: Any
) -> list[Tensor]:  # the tensors that a network answers with, in order
    torch.manual_seed(0)
    with torch.no_grad():
        answer = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return [tensor for tensor in tensors_in(answer) if tensor.is_floating_point()]


def assert_same(one: list[Tensor], other: list[Tensor], tolerance: float = 1e-3) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= tolerance * float(a.abs().max()) + 1e-7


def target_of(model: nn.Module) -> str:  # a target that converts what the network holds most of
    families = collections.Counter(
        norm.family for norm in find_norms(model) if norm.status == "known"
    )
    return {"bn": "ln", "ln": "lnn", "gn": "gnn", "in": "inn"}[
        families.most_common(1)[0][0] or "bn"
    ]


class Case:  # a converted network, and a method a step
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        source, self.given = build(name)
        self.inputs = self.given if isinstance(self.given, Mapping) else (self.given,)
        self.target = target_of(source)
        # Heads keep the shape of the first call, TabNet splits a batch by its size, CRDNN's LiGRU
        # keeps its state's, and torch.export needs a minute for diffusers' attention with any
        # number of samples.
        fixed = name.startswith(("ultralytics", "pytorch_tabnet", "diffusers", "speechbrain CRDNN"))
        self.batch = 2 if fixed else None
        before = answers(source, self.given)
        self.model, self.report = retrofit.convert(source, self.target, inputs=self.inputs)
        assert_same(before, answers(self.model, self.given), 1e-4)
        retrofit.set_strength(self.model, 1.0 if self.target == "ln" else 0.5)
        self.expected = answers(self.model, self.given)

    def convert(self) -> None:
        assert not str(self.report).count("not checked")

    def load(self) -> None:
        path = self.folder / "a.safetensors"
        retrofit.save(self.model, path, source="own")
        model = retrofit.load(path, into=build(self.name)[0]).eval()
        assert_same(self.expected, answers(model, self.given), 1e-5)

    def fold(self) -> None:
        folded = retrofit.fold(self.model, inputs=self.inputs, batch=self.batch)
        assert_same(self.expected, answers(folded, self.given))

    def plain(self) -> None:
        strength = 1.0 if self.target == "ln" else 0.0  # a power transform has no plain form
        retrofit.set_strength(self.model, strength)
        plain = retrofit.plain(self.model, inputs=self.inputs)
        assert_same(answers(self.model, self.given), answers(plain, self.given))
        retrofit.set_strength(self.model, strength or 0.5)
        ours = {
            type(module).__name__
            for module in plain.modules()
            if type(module).__module__.startswith("retrofit")
        }
        assert ours <= {"ConstantAffine", "TrainedAffine"}

    def export(self) -> None:
        path = self.folder / "a.onnx"
        retrofit.export_onnx(self.model, path, inputs=self.inputs, batch=self.batch)
        session = onnxruntime.InferenceSession(str(path))
        given = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        names = [one.name for one in session.get_inputs()]
        found = session.run(
            None, {name: value.numpy() for name, value in zip(names, given, strict=True)}
        )
        assert_same(
            self.expected, [torch.from_numpy(one) for one in found if one.dtype.kind == "f"]
        )


# One of each library, or of each kind of network that one has, is exported by .ci/run
EXPORTED = {
    *("smp Unet resnet18", "monai UNet 2d", "monai VNet 3d", "ultralytics yolov8n-cls"),
    *("kornia HardNet", "transformers ResNet", "transformers Bit", "transformers Bert"),
    *("efficientnet_pytorch b0", "open_clip ModifiedResNet", "torch_geometric GCN"),
    *("pytorch_tabnet TabNet", "torchrl MLP", "diffusers AutoencoderKL"),
    "deep_sort_realtime MobileNetV2",
}


def _marks(name: str, step: str) -> list[pytest.MarkDecorator]:
    """What was drawn at random is tried before a release, as are networks of sound, but for two, and
    the exports of networks beside one that is like them.
    """
    is_swept = name.startswith(("pytorchcv", "speechbrain", "torchaudio"))
    is_like_another = step == "export" and name not in EXPORTED
    return [pytest.mark.sweep] if is_swept or is_like_another else []


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize(
    ("case", "step"),
    [
        pytest.param(name, step, id=f"{name}-{step}", marks=_marks(name, step))
        for name in NETWORKS
        for step in STEPS
        if step != "fold" or (name, "export") in REFUSED_STEPS
    ],
    indirect=["case"],
)
def test_cell(case: Case, step: str) -> None:
    expected = REFUSED_STEPS.get((case.name, step))
    if expected is None:
        getattr(case, step)()
        return
    with pytest.raises(RetrofitError, match=re.escape(expected)) as refusal:
        getattr(case, step)()
    assert "\n" not in str(refusal.value)


def test_the_documentation_counts_the_networks() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "coverage.md").read_text().split())
    right = len(NETWORKS) - len(REFUSED_STEPS)
    assert f"{right} of {len(NETWORKS)} networks are right in all five steps" in page
