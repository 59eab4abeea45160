"""What a network is run on: decided by what it takes and gives."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import backbone_utils

import retrofit
from retrofit.compare import Reference
from retrofit.inputs import Call, example_calls, takes_image_list


class Detector(nn.Module):  # of nobody's library: pads images to one size, and gives boxes by score
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        batch = torch.zeros(len(images), 3, height, width)
        for row, image in zip(batch, images, strict=True):
            row[:, : image.shape[1], : image.shape[2]] = image
        rows = self.head(self.backbone(batch)).flatten(2).transpose(1, 2)
        best = [row[row[:, 4].argsort(descending=True)[:3]] for row in rows]
        return [{"boxes": row[:, :4], "scores": row[:, 4]} for row in best]


class Features(nn.Sequential):  # a backbone: an ordered dict of feature maps
    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        return OrderedDict(zip("ab", (super().forward(x), x), strict=True))


def test_a_detectors_backbone_is_no_detector() -> None:
    build = backbone_utils.resnet_fpn_backbone
    model = build(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d).eval()
    model, report = retrofit.convert(model, "frozen", input_size=(3, 64, 64))
    assert report.check is not None
    assert report.check.passed
    assert report.notes == ()


def test_the_folder_of_a_class_does_not_make_it_a_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Features, "__module__", "torchvision.models.detection.mine")
    model = Features(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model, _ = retrofit.convert(model, "frozen", input_size=(3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    # That nothing is fused would be a warning, which fails the test.
    folded = retrofit.fold(model, input_size=(3, 8, 8))
    torch.testing.assert_close(folded(x)["a"], model(x)["a"])


def test_an_ordered_dict_of_tensors_is_compared() -> None:
    model = Features(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    reference = Reference(model, example_calls(model, None, (3, 8, 8)))
    assert reference.compare(model).passed
    model[1].running_mean += 1
    assert reference.compare(model).differs


def test_a_detector_of_any_library_is_compared_by_its_parts() -> None:
    model = Detector().eval()
    reference = Reference(model, example_calls(model, None, (3, 8, 8)))
    assert [call.stage for call in reference.calls] == ["", ""]
    assert [call.stage for call in reference.parts] == ["backbone", "head"] * 2
    assert reference.compare(model).passed
    model.head.bias.data += 1
    assert reference.compare(model).differs


def test_a_detector_is_called_once_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Detector().eval()
    calls = example_calls(model, None, (3, 8, 8))
    stages: list[str] = []
    make_call = Call.on

    def on(call: Call, model: Any) -> Any:
        stages.append(call.stage)
        return make_call(call, model)

    monkeypatch.setattr(Call, "on", on)
    Reference(model, calls)
    assert stages == ["", "backbone", "head"] * 2


class Busy(nn.Module):  # does not start again before it is done, and is never done with a list
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.busy = False

    def forward(self, x: Tensor) -> Tensor:
        assert not self.busy
        self.busy = True
        out: Tensor = self.norm(x)
        assert len(x) > 1
        self.busy = False
        return out


def test_what_a_network_refuses_leaves_no_trace_in_the_next_call() -> None:
    model = Busy()
    calls = example_calls(model, None, (3, 8, 8))
    assert [call.batch for call in calls] == [2, 3]
    assert not model.busy
    assert model.training


@pytest.mark.parametrize(
    ("model", "takes"),
    [
        (Detector(), True),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), False),
        (nn.Identity(), False),  # takes anything, and makes no batch
    ],
)
def test_who_takes_a_list_of_images(model: nn.Module, takes: bool) -> None:
    before = {name: len(module._forward_pre_hooks) for name, module in model.named_modules()}
    assert takes_image_list(model) is takes
    assert before == {name: len(m._forward_pre_hooks) for name, m in model.named_modules()}


def test_torchvisions_detectors_take_a_list_of_images() -> None:
    options: Any = {"weights": None, "weights_backbone": None}
    for name in ("ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn"):
        model = torchvision.models.get_model(name, **options)
        assert takes_image_list(model)
        assert not takes_image_list(model.backbone)
