"""Which convolutions are standardised, and which get a scale: the paper's rule (Labatie et al. 2021, appendix A.1)."""

from __future__ import annotations

import re

import pytest
import timm
import torch
from torch import Tensor, nn

import retrofit
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery import plan
from retrofit.surgery.plan_and_report import EditRow


def convolutions(name: str, **options: object) -> dict[str, EditRow]:
    with torch.device("meta"):
        model = timm.create_model(name)
    return {row.name: row for row in plan(model, "gn", ws=True, **options).edits if row.kind == "convolution"}


def test_all_of_resnet_50_v2_and_a_scale_at_the_end_of_every_block() -> None:
    rows = convolutions("resnetv2_50")
    assert {name for name, row in rows.items() if row.status == "left"} == {"head.fc"}
    assert sum(row.status == "converted" for row in rows.values()) == 53
    ends = {name for name in rows if re.fullmatch(r"stages\.\d\.blocks\.\d\.conv3", name)}
    assert {name for name, row in rows.items() if row.options.get("scale")} == ends
    assert len(ends) == 16


def test_squeeze_excites_are_left_and_norms_make_a_scale_needless() -> None:
    rows = convolutions("seresnet50")
    left = {name for name, row in rows.items() if row.status == "left"}
    assert left == {name for name in rows if ".se." in name}
    assert {row.reason for row in rows.values() if row.status == "left"} == {"inside a squeeze-excite"}
    assert not any(row.options.get("scale") for row in rows.values())


class Residual(nn.Module):
    """Two branches, the second with as many convolutions as `shortcut` says, and a convolution that is read."""

    def __init__(self, shortcut: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.past = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(shortcut)))
        self.read = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).relu()
        z = self.two(self.one(y)) + self.past(y)
        return nn.functional.conv2d(self.read(z), self.read.weight)


@pytest.mark.parametrize(
    ("shortcut", "ends", "unknown"), [(0, {"two"}, set()), (1, {"two"}, set()), (2, set(), {"two", "past.1"})]
)
def test_the_longer_branch_ends_a_block_and_equal_ones_are_listed(
    shortcut: int, ends: set[str], unknown: set[str]
) -> None:
    model, report = retrofit.convert(Residual(shortcut), "gn", ws=True, input_size=(4, 8, 8), groups=2)
    rows = {row.name: row for row in report.plan.edits}
    assert {name for name, row in rows.items() if row.options.get("scale")} == ends
    assert {name for name, row in rows.items() if "unknown whether it ends a block" in row.reason} == unknown
    assert rows["read"].reason == "its parameters are read elsewhere too"
    assert type(model.read) is nn.Conv2d
    assert any("convolutions are standardised" in note for note in report.notes)


def test_only_the_blocks_whose_norms_are_converted() -> None:
    rows = convolutions("resnet18", only="layer4")
    done = [name for name, row in rows.items() if row.status == "converted"]
    assert done == [name for name in rows if re.fullmatch(r"layer4.*(conv\d|downsample.0)", name)]
    assert len(done) == 5
    assert convolutions("resnet18", only="^bn1$")["conv1"].status == "converted"


@pytest.mark.parametrize("restore", [True, False])
def test_it_starts_as_the_source_and_its_scale_trains(restore: bool) -> None:
    model = Residual(0)
    expected_std = model.two.weight.detach().flatten(1).std(1, correction=0)
    x = torch.randn(2, 4, 8, 8)
    source = model.eval()(x)
    retrofit.convert(model, "gn", ws=True, groups=2, pn_restore=None if restore else False, check=False)
    torch.testing.assert_close(model(x), source, rtol=1e-4, atol=1e-5)
    retrofit.set_strength(model, 1.0)
    scale = model.two.scale
    torch.testing.assert_close(scale.data, torch.ones(4) if restore else expected_std, rtol=1e-3, atol=1e-5)
    model(x).square().sum().backward()
    assert scale.grad.abs().min() > 0
    plain = retrofit.plain(model, inputs=x)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, WeightStandardization) for module in plain.modules())
