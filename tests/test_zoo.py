"""One small architecture of every timm family, and every torchvision one, converted for real."""

import csv
from pathlib import Path

import pytest
import timm
import torch
import torchvision

from retrofit.networks.models import open_model
from retrofit.surgery import convert

TABLE = Path(__file__).parents[1] / "benchmarks" / "results" / "zoo-normal.csv"
ROWS = {row["model"]: row for row in csv.DictReader(TABLE.read_text().splitlines())}
LARGEST = 30_000_000
# Video, optical flow and mask heads take minutes on a CPU; benchmarks/zoo.py plans them all the same.
RUNS_TOO_LONG = ("raft", "swin3d", "mvit", "maskrcnn", "keypointrcnn")


def sample() -> list[str]:
    """The smallest architecture of each timm module and all of torchvision's, up to `LARGEST` parameters."""
    sizes = {name: int(row["params"]) for name, row in ROWS.items() if int(row["converted"])}
    chosen = [name for name in sizes if name.startswith("tv:")]
    for module in timm.list_modules():
        family = [name for name in timm.list_models(module=module) if name in sizes]
        chosen += sorted(family, key=sizes.__getitem__)[:1]
    return sorted(name for name in chosen if sizes[name] <= LARGEST and not any(part in name for part in RUNS_TOO_LONG))


def test_the_table_holds_every_architecture() -> None:
    assert set(ROWS) == {*timm.list_models(), *(f"tv:{name}" for name in torchvision.models.list_models())}
    for name, row in ROWS.items():
        assert not row["error"], name
        assert int(row["layers"]) == sum(int(row[key]) for key in ("converted", "kept", "unsupported"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sample())
@pytest.mark.filterwarnings("ignore")  # the libraries' own, about their own models
@torch.inference_mode()
def test_converts_to_the_same_function(name: str) -> None:
    _, report = convert(open_model(name).model, "normal")
    assert report.plan.counts["converted"] > 0
    assert report.check is not None
    assert report.check.passed, report.check
