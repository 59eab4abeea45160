"""Every target through the quick commands, at three strengths: each cell is right, or refused as listed.

A cell starts from a network with random weights, affines and statistics, converted by the command line, its running
lambdas random too. What a cell must answer is computed apart from the command: from the plain network, or from the
converted one in PyTorch. No cell skips: what cannot be answered stands in `REFUSED` with its message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform
from torch import Tensor, nn

import retrofit
from retrofit.cli import main
from retrofit.layers import StrengthMixin
from retrofit.networks.models import open_model
from retrofit.surgery import TARGETS
from tests.pictures import COLOURS, write_folder

SIZE = 32
STRENGTHS = (0.0, 0.5, 1.0)

# A network that holds the target's source, and another target that still finds something in it afterwards.
COATNET = "test_coatnet"  # BatchNorm and LayerNorm
NETWORKS: dict[str, tuple[str, str]] = {
    "bnn": (COATNET, "lnn"),
    "lnn": (COATNET, "bnn"),
    "gnn": ("test_efficientnet_gn", "normal"),
    "normal": (COATNET, "bnn"),
    "gn": (COATNET, "lnn"),
    "ln": (COATNET, "lnn"),
    "gn-pn": (COATNET, "lnn"),
    "ln-pn": (COATNET, "lnn"),
    "frozen": (COATNET, "lnn"),
    "dbn": (COATNET, "lnn"),
    "dbnn": (COATNET, "lnn"),
    "evonorm-s0": (COATNET, "lnn"),
    "frn-tlu": (COATNET, "lnn"),
}
WITHOUT_STRENGTH = {"frozen", "evonorm-s0", "frn-tlu"}
NOT_IDENTICAL = {"evonorm-s0", "frn-tlu"}

# (command, target): what the one line of the refusal says.
REFUSED: dict[tuple[str, str], str] = {
    ("again", "normal"): "nothing to convert to bnn",
    ("again", "gnn"): "nothing to convert to normal",
}
BY_HAND = {"inn"}  # no classifier of timm or torchvision holds InstanceNorm: see tests/export/test_grid.py

Cell = Callable[["Network"], None]
COMMANDS: dict[str, Cell] = {}


def command(function: Cell) -> Cell:
    """Make a function a row of the grid, named after it."""
    COMMANDS[function.__name__] = function
    return function


class Network:
    """A converted network in a folder of its own: `artifact`, and `source`, the plain network that it came from."""

    def __init__(self, target: str, strength: float, folder: Path) -> None:
        self.target, self.strength, self.folder = target, strength, folder
        self.name, self.other = NETWORKS[target]
        self.source = open_model(self.name, num_classes=3, img_size=SIZE).model.eval()
        randomize(self.source)
        save_file(self.source.state_dict(), folder / "weights.safetensors")
        self.artifact = folder / "a.safetensors"
        self.converted = self.run("convert", self.name, *self.flags(), "--checkpoint", "weights.safetensors", "--json")
        model = self.load().train()
        with torch.no_grad():
            model(inputs(8))  # covariances, which are no free numbers
        generator = torch.Generator().manual_seed(1)
        for name, buffer in model.named_buffers():
            if name.endswith("running_lambda"):
                buffer.copy_(0.4 + 1.4 * torch.rand(buffer.shape, generator=generator))
        retrofit.save(model, self.artifact, force=True)

    def flags(self) -> list[str]:
        """Arguments of the conversion."""
        size = ["--num-classes", "3"]
        strength = [] if self.target in WITHOUT_STRENGTH else ["--strength", str(self.strength)]
        groups = ["--groups", "2"] if self.target in ("gn", "gn-pn") else []
        return ["--to", self.target, "--img-size", str(SIZE), *size, *strength, *groups, "-o", self.artifact.name]

    def run(self, *words: object) -> dict[str, Any]:
        """Run a command line in the folder, which must succeed; return its JSON, if it writes some."""
        result = self.invoke(*words)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout) if result.stdout.strip() else {}

    def invoke(self, *words: object) -> Result:
        """Run a command line in the folder."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            return CliRunner().invoke(main, [str(word) for word in words])

    def load(self, path: Path | None = None) -> nn.Module:
        """Load an artifact in Python, in evaluation mode."""
        return retrofit.load(path or self.artifact).eval()

    @property
    def pictures(self) -> Path:
        """Pictures of three classes."""
        root = self.folder / "pictures"
        return root if root.is_dir() else write_folder(root, wrong=0, each=8)


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


def inputs(batch: int = 3, seed: int = 5) -> Tensor:
    """Seeded images."""
    return torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def gap(one: Any, other: Any) -> float:
    """Largest difference of two networks' answers, as a share of their scale, over two batch sizes."""
    worst = 0.0
    for batch in (1, 3):
        a, b = one(inputs(batch)), other(inputs(batch))
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst


def strengths(model: nn.Module) -> list[float]:
    return [float(module.strength) for module in model.modules() if isinstance(module, StrengthMixin)]


@command
def convert(network: Network) -> None:
    """Strength 0 is the source, and every other is not."""
    check = network.converted["check"]
    assert check["passed"] if network.target not in NOT_IDENTICAL else not check["identity"]
    assert network.converted["counts"]["converted"] > 0
    again = network.folder / "untouched.safetensors"  # the fixture's own has other lambdas
    words = [*network.flags()[:-1], again.name, "--checkpoint", "weights.safetensors"]
    network.run("convert", network.name, *words)
    model = network.load(again)
    identical = network.target not in NOT_IDENTICAL and (network.strength == 0 or network.target == "frozen")
    if identical:
        assert gap(network.source, model) < 1e-4
    elif network.target not in ("bnn", "dbn", "dbnn"):  # whose statistics say "nothing to do" until training moves them
        assert gap(network.source, model) > 1e-4
    assert set(strengths(model)) == (set() if network.target in WITHOUT_STRENGTH else {network.strength})


@command
def again(network: Network) -> None:
    """A second target converts what the first left, and leaves the first's layers as they are."""
    words = [network.artifact.name, "--to", network.other, "-o", "again.safetensors"]
    network.run("convert", *words)
    first, second = network.load(), network.load(network.folder / "again.safetensors")
    assert gap(first, second) < 1e-4
    kept = {name for name, module in first.named_modules() if isinstance(module, StrengthMixin)}
    for name, module in second.named_modules():
        if isinstance(module, StrengthMixin):
            assert float(module.strength) == (network.strength if name in kept else 0.0), name


@command
def save(network: Network) -> None:
    """Saved and loaded, it is the same network, down to its bits."""
    model = network.load()
    retrofit.save(model, network.folder / "copy.safetensors", force=True)
    loaded = network.load(network.folder / "copy.safetensors")
    state = loaded.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert gap(model, loaded) == 0


@command
def evaluate(network: Network) -> None:
    """The accuracy is that of the network in PyTorch, on pictures prepared by timm."""
    found = network.run("evaluate", network.artifact, "--data-dir", network.pictures, "--json", "-j0")
    model = network.load()
    preprocess = vars(model)["_retrofit_preprocess"].to_dict()
    transform = create_transform(
        **{key: preprocess[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")}
    )
    right = 0
    for label, name in enumerate(sorted(COLOURS)):
        for file in sorted((network.pictures / name).iterdir()):
            with torch.no_grad():
                right += int(model(transform(Image.open(file))[None]).argmax()) == label
    assert found["images"] == 24
    assert found["top1"] == pytest.approx(100 * right / 24, abs=100 / 24)  # one picture may be a tie


@command
def fold(network: Network) -> None:
    """The folded network answers as the converted one."""
    model = network.load()
    assert gap(model, retrofit.fold(model)) < 1e-4


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Network]:
    """Convert each network once a process."""
    made: dict[tuple[str, float], Network] = {}

    def get(target: str, strength: float) -> Network:
        if (target, strength) not in made:
            made[target, strength] = Network(target, strength, tmp_path_factory.mktemp("grid"))
        return made[target, strength]

    return get


def cells() -> Iterator[Any]:
    """Every command of every target at every strength that it has."""
    for name in COMMANDS:
        for target in NETWORKS:
            for strength in (0.0,) if target in WITHOUT_STRENGTH else STRENGTHS:
                yield pytest.param(name, target, strength, id=f"{name}-{target}-{strength:g}")


def test_the_grid_holds_every_target() -> None:
    assert set(NETWORKS) | BY_HAND == set(TARGETS)


@pytest.mark.parametrize(("name", "target", "strength"), list(cells()))
def test_cell(name: str, target: str, strength: float, networks: Callable[[str, float], Network]) -> None:
    check = partial(COMMANDS[name], networks(target, strength))
    if (expected := REFUSED.get((name, target))) is None:
        check()
        return
    with pytest.raises(AssertionError) as refusal:  # the command's own error line, which `Network.run` found
        check()
    lines = [line for line in str(refusal.value).splitlines() if line.startswith("error: ")]
    assert len(lines) <= 1
    assert expected in str(refusal.value)
