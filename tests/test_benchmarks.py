"""The scripts of benchmarks/, at tiny sizes; the table of all architectures, some of which are
converted for real.
"""

import argparse
import csv
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from PIL import Image
from torchvision.transforms.functional import crop, hflip
from torchvision.transforms.functional import pad as pad_image

from retrofit.networks.open_model import open_model
from retrofit.surgery import convert

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import detection  # noqa: E402
import evidence_arms  # noqa: E402
import features  # noqa: E402
import gpu_report  # noqa: E402
import harness  # noqa: E402
import reproduce  # noqa: E402
import reproduce_train  # noqa: E402

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
LINES = (BENCHMARKS / "results" / "zoo-normal.csv").read_text().splitlines()
ROWS = {row["model"]: row for row in csv.DictReader(LINES)}
# Parameters: of those that are tried before a release, and of those that .ci/run tries
LARGEST = 30_000_000
SMALL = 3_500_000
RUNS_TOO_LONG = (
    "raft",
    "swin3d",
    "mvit",
    "maskrcnn",
    "keypointrcnn",
)  # minutes on a CPU; zoo.py plans them


def test_the_full_schedules_are_the_authors() -> None:
    resnet, vit = reproduce.FULL_RESNET, reproduce.FULL_VIT
    steps = [reproduce_train.rate(resnet, epoch) for epoch in (0, 59, 60, 119, 120, 179, 180, 199)]
    assert steps == pytest.approx([0.1, 0.1, 1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), vit["lr"])
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, T_0=50, T_mult=2, eta_min=1e-6
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, restarts], [10])
    for epoch in range(vit["epochs"]):
        assert reproduce_train.rate(vit, epoch) == pytest.approx(optimizer.param_groups[0]["lr"]), (
            epoch
        )
        optimizer.step()
        schedule.step()


def test_pictures_are_moved_and_mirrored_as_torchvision_does() -> None:
    images = torch.rand(12, 3, 32, 32)
    found = reproduce_train.crop_and_flip(images, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    offsets = torch.randint(9, (2, 12, 1), generator=generator)
    mirrored = torch.rand(12, 1, generator=generator) < 0.5
    for number, image in enumerate(images):
        top, left = offsets[:, number, 0].tolist()
        expected = crop(pad_image(image, 4), top, left, 32, 32)
        torch.testing.assert_close(found[number], hflip(expected) if mirrored[number] else expected)


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = (255 * torch.rand(16, 32, 32, 3, generator=generator)).byte().numpy()
    pictures = [(Image.fromarray(one), number % 3) for number, one in enumerate(pixels)]
    data = reproduce_train.Data(pictures, pictures, "cpu")
    key: dict[str, Any] = {
        "network": "resnet",
        "width": 8,
        "depth": 8,
        "batch": 8,
        "lr": 0.1,
        "epochs": 3,
    }
    key |= {"augment": True, "arm": "bnn", "seed": 0}
    whole = reproduce_train.run(key, data, tmp_path, float("inf"))
    reproduce_train.state_file(tmp_path, key).unlink()
    clock = iter([0, 2])
    with monkeypatch.context() as patch:
        patch.setattr(reproduce_train.time, "time", lambda: next(clock))
        with pytest.raises(SystemExit, match="the time is over"):
            reproduce_train.run(key, data, tmp_path, 1)
    parts = reproduce_train.run(key, data, tmp_path, float("inf"))
    assert all(parts[name] == whole[name] for name in ("test", "curve", "test_loss", "correct"))


def test_a_run_that_fits_is_trained_at_the_first_length_that_is_enough(tmp_path: Path) -> None:
    """Seed 0 of every arm comes before seed 1, dropout with the rate that was best for seed 0."""
    recorded = harness.Recorded(tmp_path / "runs.jsonl")
    val = {"bn-drop-0.1": 51.0, "bn-drop-0.3": 55.0, "bn-drop-0.5": 53.0}

    def make(key: dict[str, Any]) -> dict[str, Any]:
        fits = key["epochs"] >= 90
        fit_loss = 0.019 if fits else 0.021
        return {**key, "fit": 99.5, "fit_loss": fit_loss, "val": val.get(key["arm"], 50.0)}

    runs = object.__new__(reproduce.Runs)
    runs.args = argparse.Namespace(seeds=[0, 1], state=tmp_path)
    runs.recorded = recorded
    runs.pool = []
    runs.make = make
    runs.part("until-it-fits-resnet")
    lines = [(line["epochs"], line["seed"], line["arm"]) for line in recorded.lines()]
    arms = ["bn-noise", "bnn", "bnn-quiet"]
    first = [(90, 0, arm) for arm in ("bn", *arms, *val)]
    second = [(90, 1, arm) for arm in ("bn", *arms, "bn-drop-0.3")]
    assert lines == [(40, 0, "bn"), (60, 0, "bn"), *first, *second]
    runs.make = None
    runs.part("until-it-fits-resnet")


def test_paired_differences_have_both_errors() -> None:
    """By hand: gains of 1 and 3 points, and four pictures of which one and two are gained."""
    theirs = [
        {"seed": seed, "test": 50.0, "correct": "c", "test_images": 4, "machine": "m"}
        for seed in (0, 1, 2)
    ]
    ours = [
        {**theirs[0], "test": 51.0, "correct": "d"},
        {**theirs[1], "test": 53.0, "correct": "d"},
    ]
    assert harness.paired(ours, theirs) == "+2.0 ± 1.0 / 25.0"
    assert harness.paired(ours[:1], theirs[1:]) == ""
    assert harness.paired(ours[:1], theirs) == "+1.0 ± ? / 25.0"


def test_features_are_compared_as_by_hand() -> None:
    """Two of three rows change places: similarity stays 1 for the third alone, and 1 of 3 rows has
    another neighbour.
    """
    source = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    assert features.agreement(source, source[[2, 1, 0]]) == ["0.333", "-0.333", "66.7%"]


@pytest.mark.parametrize(
    ("middle", "best", "tried"),
    [
        (3e-4, 3e-4, {1e-4, 3e-4, 1e-3}),
        (3e-4, 1e-3, {1e-4, 3e-4, 1e-3, 3e-3}),
        (3e-4, 3e-5, {3e-5, 1e-4, 3e-4, 1e-3}),
        (RATES[0], RATES[0], set(RATES[:2])),
    ],
)
def test_the_search_of_a_rate_goes_on_while_the_best_is_the_last(
    middle: float, best: float, tried: set[float]
) -> None:
    seen = set()

    def val(rate: float) -> float:
        seen.add(rate)
        return -abs(math.log(rate / best))

    assert harness.best_rate(RATES, middle, val) == best
    assert seen == tried


def test_average_precision_is_that_of_a_curve_drawn_by_hand() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 1])}
    # The best finds the first object, the second finds it again, the third finds the other.
    output = {
        "boxes": torch.tensor([[0.0, 0, 10, 9], [0, 0, 10, 10], [20, 20, 30, 30], [0, 0, 10, 10]]),
        "labels": torch.tensor([1, 1, 1, 2]),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.6]),
    }
    precision = detection.average_precision([(output, target)], 1, 0.5)
    assert precision == pytest.approx(1 / 2 * 1 + 1 / 2 * 2 / 3)
    # At a stricter overlap the second finds the first object.
    precision = detection.average_precision([(output, target)], 1, 0.95)
    assert precision == pytest.approx(1 / 2 * 1 / 2 + 1 / 2 * 2 / 3)
    assert detection.average_precision([(output, target)], 2, 0.5) == 0


def test_a_checkpoint_may_lack_the_classifier_alone(tmp_path: Path) -> None:
    source, model = (timm.create_model("test_efficientnet") for _ in range(2))
    state = source.state_dict()
    names = list(state)
    file = str(tmp_path / "weights.pth")
    torch.save({f"other.{name}": state[name] for name in names[:-2]}, file)
    evidence_arms.load_in_order(model, file)
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in names[:-2])
    for wrong in (names[:-1], names[:-3], [names[1], names[0], *names[2:]]):
        torch.save({name: state[name] for name in wrong}, file)
        with pytest.raises(SystemExit, match="are not those of the network"):
            evidence_arms.load_in_order(model, file)


@pytest.mark.slow
def test_every_arm_of_the_evidence_is_built() -> None:
    for arm in evidence_arms.ARMS.values():
        evidence_arms.convert(
            timm.create_model("test_vit" if arm.to == "lnn" else "test_efficientnet"), arm
        )


@pytest.mark.slow
def test_a_dry_run_reaches_its_end() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--dry", "--minutes", "60"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    titles = [line for line in done.stdout.splitlines() if line.startswith("## ")]
    # A table of steps grows as its rows come
    assert list(dict.fromkeys(title.split()[1] for title in titles)) == [
        "Slowest",
        "A",
        "Self-test,",
        "Forward",
        "Tiles",
        "Images",
        "Largest",
        "Tests",
    ]
    assert "not reached: " not in done.stdout


def test_a_second_run_on_a_gpu_replaces_its_own_tables_alone(tmp_path: Path) -> None:
    file = tmp_path / "gpu.md"
    first = gpu_report.Report("A GPU", 1.0, file)
    first.table("Steps", "name | time", [["old", 2]])
    first.table("Layers", "name | time", [["bnn", 3]])
    second = gpu_report.Report("A GPU", 1.0, file)
    second.table("Steps", "name | time", [["new", 1]])
    with second.part("tiles"):
        raise ValueError("no tile fits\nat all")
    with second.part("tests", seconds=90.0) as is_time:
        assert not is_time
    second.write()
    text = file.read_text()
    assert "old" not in text
    assert "| new | 1 |" in text
    assert "| bnn | 3 |" in text
    assert text.count("## What is missing") == 1
    ending = "Failed: tiles: ValueError: no tile fits\n\nNot reached: tests\n"
    assert text.endswith(ending)
    gpu_report.Report("Another GPU", 1.0, file).table("Steps", "name | time", [["other", 4]])
    assert "bnn" not in file.read_text()


def sample() -> list[Any]:
    """The smallest architecture of each timm module and all of torchvision's, up to `LARGEST`
    parameters.
    """
    sizes = {name: int(row["params"]) for name, row in ROWS.items() if int(row["converted"])}
    chosen = [name for name in sizes if name.startswith("tv:")]
    for module in timm.list_modules():
        chosen += sorted(
            sizes.keys() & timm.list_models(module=module), key=lambda name: (sizes[name], name)
        )[:1]
    return [
        pytest.param(name, marks=[] if sizes[name] <= SMALL else pytest.mark.sweep)
        for name in sorted(chosen)
        if sizes[name] <= LARGEST and not any(part in name for part in RUNS_TOO_LONG)
    ]


def test_the_table_holds_every_architecture() -> None:
    assert set(ROWS) == {
        *timm.list_models(),
        *(f"tv:{name}" for name in torchvision.models.list_models()),
    }
    for name, row in ROWS.items():
        assert not row["error"], name
        assert int(row["layers"]) == sum(
            int(row[key]) for key in ("converted", "kept", "unsupported")
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", sample())
@pytest.mark.filterwarnings("ignore")  # the libraries' own, about their own models
@torch.inference_mode()
def test_converts_to_the_same_function(name: str) -> None:
    _, report = convert(open_model(name).model, "normal")
    assert report.plan.counts["converted"] > 0
    assert report.check is not None
    assert report.check.passed, report.check
