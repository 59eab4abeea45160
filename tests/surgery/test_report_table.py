"""A report and a plan are for people when printed, and hold the record as attributes."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import retrofit
from retrofit.surgery import TARGETS


def test_a_report_prints_as_a_small_table() -> None:
    _, report = retrofit.convert(timm.create_model("resnet18"), "gn-pn", skip="layer4", check=False)
    text = str(report)
    lines = text.splitlines()
    assert lines[0] == "to gn-pn: 15 converted, 5 kept, 0 unsupported"
    assert lines[1].split() == ["count", "found", "becomes", "first", "why"]
    assert len(lines) < 16
    assert max(map(len, lines[:-3])) < 170
    assert any(line.split()[:4] == ["15", "BatchNorm2d", "MigratedGroupNorm", "bn1"] for line in lines)
    assert "strength: 0" in lines
    assert any(line.startswith("note: 7 of 17 activations are converted") for line in lines)
    assert repr(report) == text
    assert report.plan.layers[0].name == "bn1"
    assert str(report.plan).splitlines()[0] == lines[0]
    html = report._repr_html_()
    assert html.count("<tr>") == len(str(report.plan).splitlines()) - 1
    assert "MigratedGroupNorm" in html


def test_names_from_a_network_are_escaped() -> None:
    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<b>\x1b[31m", nn.BatchNorm2d(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    plan = retrofit.plan(Sly(), "bnn")
    assert "\x1b" not in str(plan)
    assert "<b>\\x1b" in str(plan)
    assert "<b>\\x1b" not in plan._repr_html_()


def test_the_check_is_in_the_summary() -> None:
    report = retrofit.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "bnn")[1]
    assert "check: largest difference" in str(report)


@pytest.mark.parametrize("to", [to for to, target in TARGETS.items() if target.converter.has_strength])
def test_layers_show_their_strength_where_it_has_a_value(to: str) -> None:
    family = {"lnn": nn.LayerNorm(8), "gnn": nn.GroupNorm(2, 8), "inn": nn.InstanceNorm2d(8)}
    norm = family.get(to) or nn.BatchNorm2d(8)
    model, _ = retrofit.convert(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU()), to, check=False)
    retrofit.set_strength(model, 0.5)
    shown = [repr(module) for module in model.modules() if isinstance(module, retrofit.layers.StrengthMixin)]
    assert shown
    assert all("strength=0.5" in text for text in shown)
    assert "strength" not in repr(model.to("meta"))
