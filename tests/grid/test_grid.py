"""Every target through every command: each cell is right, or refused as listed.

A cell starts from a network with random weights, affines and statistics, converted by the command
line, its running lambdas random too. What a cell must answer is computed apart from the command:
from the plain network, or from the converted one in PyTorch. No cell skips: what cannot be answered
stands in `REFUSED` with its message.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform
from torch import Tensor, nn

import retrofit
from retrofit.cli import main
from retrofit.finetune import run
from retrofit.finetune.recipe_files import load_recipe
from retrofit.layers import StrengthMixin
from retrofit.networks.open_model import open_model
from retrofit.record import record_of
from retrofit.surgery import TARGETS
from tests.conftest import command_line
from tests.grid.networks import build
from tests.pictures import COLOURS, write_folder

SIZE = 32
STRENGTHS = (0.0, 0.5, 1.0)

# A network that holds the target's source, and another target that still finds something in it
# afterwards.
COATNET = "test_coatnet"  # BatchNorm and LayerNorm
OWN = "py:tests.grid.networks:build"  # GroupNorm and InstanceNorm
FROM_BATCH_NORM = (
    "bnn",
    "gn",
    "ln",
    "gn-pn",
    "ln-pn",
    "frozen",
    "dbn",
    "dbnn",
    "evonorm-s0",
    "frn-tlu",
)
NETWORKS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(FROM_BATCH_NORM, (COATNET, "lnn")),
    **dict.fromkeys(("lnn", "normal"), (COATNET, "bnn")),
    **dict.fromkeys(("gnn", "gn-pn, from GroupNorm"), ("test_efficientnet_gn", "normal")),
    **{"gnn, own": (OWN, "inn"), "inn, own": (OWN, "gnn")},
}
WITHOUT_STRENGTH = {"frozen", "evonorm-s0", "frn-tlu"}
NOT_IDENTICAL = {"evonorm-s0", "frn-tlu"}
UNMOVED = {"bnn", "dbn", "dbnn", "gn-pn, from GroupNorm"}  # nothing changes until training

# (command, row of `NETWORKS`, strength): what the one line of the refusal says.
REFUSED: dict[tuple[str, str, float], str] = {
    **{
        ("again", row, t): f"nothing to convert to {NETWORKS[row][1]}"
        for row in ("normal", "gnn")
        for t in (0.0, 0.5)
    },
    **{("bake", row, 0.0): "is at strength 0 already" for row in NETWORKS},
    **{("bake", row, 0.0): "no converted layer that has a strength" for row in WITHOUT_STRENGTH},
    ("bake", "gn-pn, from GroupNorm", 0.5): "is constant at inference already",
}

COMMANDS: dict[str, Callable[[Network], None]] = {}
QUICK = {"convert", "again", "save", "evaluate"}  # the others are run with the slow tests
BLIND = {
    "resume",
    "poly",
    "half",
    "int8",
    "bench",
}  # they see parameters or operations, whatever the layers are
EVERY_STRENGTH = {
    "bnn",
    "lnn",
    "ln-pn",
}  # running statistics, statistics of the input, proxy normalization
EVERY_COMMAND = {
    *EVERY_STRENGTH,
    "dbnn",
    "evonorm-s0",
}  # whitening, normalization and activation in one
WRITTEN = {
    *EVERY_COMMAND,
    "gnn, own",
    "inn, own",
}  # one of each kind of form that an exported file holds

# Commands that take long, because they export, train or measure: .ci/run tries each for targets
# between which it differs, at one strength. The other cells are tried before a release.
LONG: dict[str, dict[str, float]] = {
    "exact": {
        "bnn": 0.5,
        "lnn": 1.0,
        "ln-pn": 0.5,
        "dbnn": 0.5,
        "evonorm-s0": 0.0,
        "inn, own": 0.5,
    },
    "poly": {"bnn": 1.0, "lnn": 1.0},
    "half": {"ln-pn": 1.0},
    "int8": {"bnn": 1.0, "evonorm-s0": 0.0},
    "bake": {"bnn": 0.5, "lnn": 1.0, "dbnn": 0.5},
    "diagnose": {"bnn": 0.5, "lnn": 1.0, "evonorm-s0": 0.0},
    "bench": {"ln-pn": 1.0, "evonorm-s0": 0.0},
    "resume": {"bnn": 1.0, "dbnn": 0.5},
}


def command(function: Any) -> Any:  # make a function a row of the grid, named after it
    COMMANDS[function.__name__] = function
    return function


# a converted network in a folder of its own, and `source`, the plain network that it came from
class Network:
    def __init__(self, row: str, strength: float, folder: Path) -> None:
        self.row = row
        self.target, self.strength, self.folder = row.partition(",")[0], strength, folder
        self.name, self.other = NETWORKS[row]
        self.own = (
            ["--network", OWN] if self.name == OWN else []
        )  # what builds it is said anew each time
        self.source = open_model(self.name, num_classes=3, img_size=SIZE).model.eval()
        randomize(self.source)
        save_file(self.source.state_dict(), folder / "weights.safetensors")
        self.untouched = folder / "untouched.safetensors"  # what the command wrote
        self.artifact = (
            folder / "a.safetensors"
        )  # with running lambdas and covariances that have moved
        strength_flag = [] if self.target in WITHOUT_STRENGTH else ["--strength", strength]
        groups = ["--groups", 2] if row in ("gn", "gn-pn") else []
        flags = [
            "--to",
            self.target,
            "--img-size",
            SIZE,
            "--num-classes",
            3,
            *strength_flag,
            *groups,
        ]
        files = ["--checkpoint", "weights.safetensors", "-o", self.untouched]
        self.converted = self.run("convert", self.name, *flags, *files, "--json")
        model = self.load(self.untouched).train()
        with torch.no_grad():
            model(inputs(8))  # covariances, which are no free numbers
        generator = torch.Generator().manual_seed(1)
        for name, buffer in model.named_buffers():
            if name.endswith("running_lambda"):
                buffer.copy_(0.4 + 1.4 * torch.rand(buffer.shape, generator=generator))
        retrofit.save(model, self.artifact)

    def run(self, *words: object) -> dict[str, Any]:
        """Run a command line in the folder, which must succeed; return its JSON, if it writes
        some.
        """
        with contextlib.chdir(self.folder):
            result = command_line().invoke(main, [str(word) for word in words])
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout) if result.stdout.strip() else {}

    def load(self, path: Path | None = None) -> nn.Module:
        return retrofit.load(
            path or self.artifact, into=build(img_size=SIZE) if self.own else None
        ).eval()

    @cached_property
    def pictures(self) -> Path:  # pictures of three classes, eight each
        root = write_folder(self.folder / "pictures", wrong=0, each=8)
        noise = np.random.default_rng(0)
        for file in sorted(
            root.rglob("*.png")
        ):  # of one colour, they leave channels without variance
            colours = np.asarray(Image.open(file)) + noise.normal(0, 40, (30, 40, 3))
            Image.fromarray(colours.clip(0, 255).astype(np.uint8)).save(file)
        return root

    def prepared(
        self,
    ) -> tuple[Tensor, Tensor]:  # the pictures as timm prepares them, and their classes
        transform = create_transform(**record_of(self.load()).preprocess.to_dict())
        files = sorted(self.pictures.rglob("*.png"))
        labels = torch.tensor([sorted(COLOURS).index(file.parent.name) for file in files])
        return torch.stack([transform(Image.open(file)) for file in files]), labels

    @cached_property
    def trained(self) -> Path:  # the folder of a run to its end
        words = [
            "--epochs",
            2,
            "-b",
            4,
            "-j",
            0,
            "--val-split",
            0.25,
            "--lr",
            1e-3,
            "--device",
            "cpu",
            "-o",
            "whole",
        ]
        self.run("finetune", self.artifact, *self.own, "--data-dir", self.pictures, *words)
        return self.folder / "whole"


def randomize(model: nn.Module) -> None:
    """Give affines and running statistics values that training could have left there."""
    generator = torch.Generator().manual_seed(0)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=generator)

    for module in model.modules():
        norm = isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm)
        if norm and module.weight is not None:
            module.weight.data = uniform(module.weight, 0.5, 1.5)
            module.bias.data = uniform(module.bias, -0.5, 0.5)
        if getattr(module, "running_mean", None) is not None:
            module.running_mean = uniform(module.running_mean, -0.3, 0.3)
            module.running_var = uniform(module.running_var, 0.5, 2.0)


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def gap(one: Any, other: Any) -> float:
    """Largest difference of two networks' answers, as a share of their scale, over two batch
    sizes.
    """
    pairs = [(one(inputs(batch)), other(inputs(batch))) for batch in (1, 3)]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def strengths(model: nn.Module) -> dict[str, float]:
    layers = model.named_modules()
    return {
        name: float(module.strength) for name, module in layers if isinstance(module, StrengthMixin)
    }


@command
def convert(network: Network) -> None:  # strength 0 is the source, and every other is not
    check = network.converted["check"]
    assert check["passed"] if network.target not in NOT_IDENTICAL else not check["identity"]
    assert network.converted["counts"]["converted"] > 0
    model = network.load(network.untouched)
    identical = network.target not in NOT_IDENTICAL and (
        network.strength == 0 or network.target == "frozen"
    )
    if identical:
        assert gap(network.source, model) < 1e-4
    elif network.row not in UNMOVED:
        assert gap(network.source, model) > 1e-4
    expected = set() if network.target in WITHOUT_STRENGTH else {network.strength}
    assert set(strengths(model).values()) == expected


@command
def again(network: Network) -> None:
    """A second target converts what the first left, and leaves the first's layers as they are."""
    words = [network.artifact.name, *network.own, "--to", network.other, "-o", "again.safetensors"]
    network.run("convert", *words)
    first, second = network.load(), network.load(network.folder / "again.safetensors")
    assert gap(first, second) < 1e-4
    kept = strengths(first)
    assert strengths(second) == {name: kept.get(name, 0.0) for name in strengths(second)}


@command
def save(network: Network) -> None:  # saved and loaded, it is the same network, down to its bits
    model = network.load()
    retrofit.save(model, network.folder / "copy.safetensors", force=True)
    loaded = network.load(network.folder / "copy.safetensors")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert gap(model, loaded) == 0


@command
def evaluate(
    network: Network,
) -> None:  # the accuracy is that of the network in PyTorch, on pictures prepared by timm
    found = network.run(
        "evaluate", network.artifact, *network.own, "--data-dir", network.pictures, "--json", "-j0"
    )
    assert found["top1"] == pytest.approx(top1(network), abs=100 / 24)  # one picture may be a tie


def top1(network: Network) -> float:
    images, labels = network.prepared()
    return float(100 * (network.load()(images).argmax(1) == labels).float().mean())


@command
def fold(network: Network) -> None:  # the folded network answers as the converted one
    model = network.load()
    assert gap(model, retrofit.fold(model)) < 1e-4


def epochs(
    folder: Path,
) -> list[dict[str, str]]:  # what a run wrote of each epoch, but for its speed
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return [
        {name: text for name, text in row.items() if name != "images_per_second"} for row in rows
    ]


@command
def finetune(network: Network) -> None:
    """Fine-tuned to the end, it stands at full strength, its weights are others and as good as
    their figures say.
    """
    assert [row["epoch"] for row in epochs(network.trained)] == ["1", "2"]
    model = network.load(network.trained / "last.safetensors")
    assert set(strengths(model).values()) == (
        set() if network.target in WITHOUT_STRENGTH else {1.0}
    )
    before = dict(network.load().named_parameters())
    moved = [
        name for name, value in model.named_parameters() if not torch.equal(value, before[name])
    ]
    assert len(moved) > len(before) / 2
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


@command
def resume(network: Network) -> None:
    """A run that is stopped after its first epoch, and resumed, ends as the one that was not."""
    recipe, folder = load_recipe(network.trained / "recipe.yaml", {}), network.folder / "stopped"
    begun = open_model(str(network.artifact), network=OWN if network.own else None)
    epoch = int(epochs(network.trained)[0]["step"])
    asked = iter([*[False] * (epoch - 1), True])
    stopped = run.finetune(begun, recipe, folder, stop=lambda: next(asked))
    assert (stopped.step, stopped.finished) == (epoch, False)
    network.run("finetune", *network.own, "--resume", folder)
    for name in ("last.safetensors", "best.safetensors"):
        one, other = load_file(folder / name), load_file(network.trained / name)
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert epochs(folder) == epochs(network.trained)


def answers(path: Path) -> Callable[[Tensor], Tensor]:  # what ONNX Runtime computes with a file
    session = onnxruntime.InferenceSession(str(path))
    return lambda images: torch.from_numpy(session.run(None, {"input": images.numpy()})[0])


def difference(network: Network, most: float, words: tuple[str, ...]) -> None:
    """Export with pictures; how far the file is off on those that it was not fitted on is what the
    command says.
    """
    given = ["--calibrate", network.pictures, "-o", "a.onnx", "--force", "--json"]
    found = network.run("export", network.artifact, *network.own, *given, *words)
    judged = network.prepared()[0][1::2]
    with torch.no_grad():
        expected = network.load()(judged)
    share = float(
        (answers(network.folder / "a.onnx")(judged) - expected).abs().max() / expected.abs().max()
    )
    assert found["precision"] == {"--half": "float16", "--int8": "int8"}.get(words[0], "float32")
    said = found["parity"]
    assert said["passed"]
    assert share == pytest.approx(said["max_abs_diff"] / said["scale"], rel=1e-2, abs=1e-4)
    assert share < most


@command
def exact(network: Network) -> None:  # ONNX Runtime answers as the network does in PyTorch
    network.run("export", network.artifact, *network.own, "-o", "exact.onnx")
    assert gap(network.load(), answers(network.folder / "exact.onnx")) < 1e-4


# An approximation is as near as it has to be, a file in float16 is near; of INT8 it is said how far
# it is off.
COMMANDS["poly"] = partial(difference, most=0.05 + 1e-4, words=("--fold", "poly"))
COMMANDS["half"] = partial(difference, most=0.1, words=("--half", "--tolerance", "1"))
COMMANDS["int8"] = partial(difference, most=math.inf, words=("--int8", "--tolerance", "10"))


@command
def bake(network: Network) -> None:  # what is baked stands at strength 0, and exports as it is
    words = [
        "--calibrate",
        network.pictures,
        "--tolerance",
        "100",
        "-o",
        "baked.safetensors",
        "--json",
    ]
    found = network.run("bake", network.artifact, *network.own, *words)
    baked = network.load(network.folder / "baked.safetensors")
    expected = {row["name"]: 0.0 if row["baked"] else network.strength for row in found["layers"]}
    assert strengths(baked) == expected
    assert 0.0 in expected.values()
    network.run("export", "baked.safetensors", *network.own, "-o", "baked.onnx")
    assert gap(baked, answers(network.folder / "baked.onnx")) < 1e-4


@command
def diagnose(network: Network) -> None:
    """Every converted layer is measured, or said not to be, and the accuracy on clean pictures is
    the network's.
    """
    words = ["--images", 24, "-b", 6, "--channels", 2, "-o", "diagnosis", "--json"]
    found = network.run(
        "diagnose", network.artifact, *network.own, "--data-dir", network.pictures, *words
    )
    (measured,) = found["networks"].values()
    layers = {row["name"] for row in network.converted["layers"] if row["status"] == "converted"}
    fused = set(measured["unmeasured"])  # normalization and activation are one
    assert fused == (layers if network.target in NOT_IDENTICAL else set())
    assert layers - fused <= {layer["name"] for layer in measured["layers"]}
    assert measured["input_noise"][0]["top1"] == pytest.approx(top1(network), abs=100 / 24)


@command
def bench(
    network: Network,
) -> None:  # it is measured against its source, in evaluation and in training
    found = network.run("bench", network.artifact, *network.own, "-b", 2, "--rounds", 3, "--json")
    assert [cost["mode"] for cost in found["costs"]] == ["eval", "eval", "train", "train"]
    converted, source = found["networks"].values()
    assert (converted["target"], source["target"]) == (network.target, None)
    assert converted["strength"] == (
        None if network.target in WITHOUT_STRENGTH else network.strength
    )


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Network]:
    """Convert each network once a process: its cells follow one another."""
    return lru_cache(1)(
        lambda row, strength: Network(row, strength, tmp_path_factory.mktemp("grid"))
    )


def cells() -> Iterator[Any]:
    """Every command of every target; those of one network follow one another.

    Three kinds of target are tried at every strength, the others at 0 and 0.5; with slow commands
    at 0.5 alone, where no layer has a simpler form, and `BLIND` ones for five kinds at their
    highest. `fold` is tried where `exact`, which folds too, is not. By default quick commands are
    tried for proxy normalization, and conversion for `bnn`.
    """
    for row in NETWORKS:
        kind = row in EVERY_STRENGTH
        strengths = (
            STRENGTHS[:1] if row in WITHOUT_STRENGTH else STRENGTHS if kind else STRENGTHS[:2]
        )
        for strength in strengths:
            middle = strength == 0.5 or row in WITHOUT_STRENGTH
            tried = (
                COMMANDS.keys() - {"fold" if row in WRITTEN else "exact"}
                if middle or kind
                else {*QUICK, "fold"}
            )
            if row not in EVERY_COMMAND or strength < strengths[-1]:
                tried -= BLIND
            for name in [name for name in COMMANDS if name in tried]:
                default = middle and name in QUICK and row == "ln-pn"
                marks = [] if default or (name, row) == ("convert", "bnn") else [pytest.mark.slow]
                if is_swept(name, row, strength, middle):
                    marks.append(pytest.mark.sweep)
                yield pytest.param(
                    name, row, strength, id=f"{name}-{row}-{strength:g}", marks=marks
                )


def is_swept(name: str, row: str, strength: float, middle: bool) -> bool:
    """Whether a cell is tried before a release alone: not if it is refused, which takes no time,
    nor if it converts, as every target does at every strength.
    """
    if (name, row, strength) in REFUSED or name == "convert":
        return False
    if name in LONG:
        return LONG[name].get(row) != strength
    return not middle


def test_the_grid_holds_every_target() -> None:
    assert {row.partition(",")[0] for row in NETWORKS} == set(TARGETS)


def test_every_command_is_tried_without_a_sweep() -> None:
    tried = {
        cell.values
        for cell in cells()
        if pytest.mark.sweep.mark not in [m.mark for m in cell.marks]
    }
    wanted = {(name, row, at) for name, rows in LONG.items() for row, at in rows.items()}
    assert wanted <= tried
    assert {name for name, _, _ in tried - REFUSED.keys()} == COMMANDS.keys()


def test_the_documentation_counts_the_cells() -> None:
    total = len(list(cells()))
    refused = sum(tuple(cell.values) in REFUSED for cell in cells())
    page = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text()
    assert f"{total - refused} cells pass. {refused} are refused" in " ".join(page.split())


@pytest.mark.parametrize(("name", "row", "strength"), list(cells()))
def test_cell(
    name: str, row: str, strength: float, networks: Callable[[str, float], Network]
) -> None:
    network = networks(row, strength)
    if (expected := REFUSED.get((name, row, strength))) is None:
        COMMANDS[name](network)
        return
    with pytest.raises(
        AssertionError
    ) as refusal:  # the command's own error line, which `Network.run` found
        COMMANDS[name](network)
    assert str(refusal.value).count("error: ") <= 1
    assert expected in str(refusal.value)
