"""What README and the pages say is run as written; README's figures stand in the
recorded results.
"""

import ast
import copy
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sklearn.datasets
import timm
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.detection import fasterrcnn_resnet50_fpn_v2

import retrofit
from retrofit.cli import COMMANDS, main
from retrofit.errors import RetrofitError
from retrofit.registry import OPTIONS, TARGETS
from tests.conftest import command_line
from tests.networks.conftest import built
from tests.pictures import write_folder, write_tar

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from figures import FIGURES as PICTURES  # noqa: E402
from figures import IMAGES, number, table  # noqa: E402
from hospital import ARMS, code  # noqa: E402

AVERAGES = ROOT / "docs" / "reference" / "averages.md"
OWN_TARGET = ROOT / "docs" / "reference" / "own-target.md"
DETECTOR = ROOT / "docs" / "appendix" / "detector-export.md"
SCRIPT = ROOT / "docs" / "appendix" / "normality-script.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *GUIDES, AVERAGES, DETECTOR, SCRIPT]


@pytest.fixture
def folder(tmp_path: Path, real_weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the pages take as given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("lite0.pth").symlink_to(real_weights)
    write_tar(write_folder(Path("DIR/val"), wrong=0, each=8), Path("photos.tar"))
    for run, target in (("lite0-ln", "ln"), ("lite0", "frozen")):
        model, _ = retrofit.convert(timm.create_model("test_efficientnet", num_classes=3), target)
        if target == "ln":
            retrofit.set_strength(model, 1.0)
        Path("runs", run).mkdir(parents=True)
        retrofit.save(model, Path("runs", run, "best.safetensors"))
    torch.save(timm.create_model("resnet18").state_dict(), "resnet18.pth")
    return tmp_path


@pytest.fixture
def _trained_detector(page: Path, folder: Path) -> None:
    """What torchvision's train.py leaves for the page that exports it."""
    if page.stem == "detection":
        detector = fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=2)
        torch.save({"model": detector.state_dict()}, folder / "checkpoint.pth")


def blocks(page: Path) -> list[str]:  # the Python blocks of a page
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def words_of(page: Path) -> str:
    """A page as one line, wherever its lines end."""
    return " ".join(page.read_text().split())


TESTED = re.compile(r"^<!--tested-->\n\n((?:    .*\n)+)", re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each retrofit command in the blocks that a text marks as tested."""
    for block in TESTED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("    retrofit "):
                yield shlex.split(line, comments=True)[1:]


@pytest.fixture
def _few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixth of the digits for the commands, which load them as a pair. That training on all of
    them is worth it, README's test shows.
    """
    load = sklearn.datasets.load_digits

    def few(*, return_X_y: bool = False) -> Any:
        if not return_X_y:
            return load()
        return tuple(values[:300] for values in load(return_X_y=True))

    monkeypatch.setattr(sklearn.datasets, "load_digits", few)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")  # Opacus's and matplotlib's
@pytest.mark.usefixtures("folder", "_few_digits", "_trained_detector")
def test_a_guide_runs_as_written(page: Path) -> None:
    before, parts = (
        "",
        ["", *re.split(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)],
    )
    for block, following in zip(parts[::2], parts[1::2], strict=True):
        if name := re.search(r"Save this as\s+`(\w+)\.py`:\n\n$", before):
            Path(f"{name[1]}.py").write_text(block)
            sys.modules.pop(name[1], None)
        exec(compile(block, page.name, "exec"), {"__name__": "page"})
        for words in commands(following):
            result = command_line().invoke(main, words)
            assert result.exit_code == 0, (words, result.stderr)
        before = following


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs() -> None:
    cells = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(compile(code, "quickstart.ipynb", "exec"), {"__name__": "notebook"})


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_evidence_runs_as_written() -> None:
    Path("classes.txt").write_text("\n".join(["ant", "bee", "cat", *map(str, range(997))]))
    lines = list(commands((ROOT / "docs" / "evidence.md").read_text()))
    assert lines
    for words in lines:
        result = command_line().invoke(main, words)
        assert result.exit_code == 0, (words, result.stderr)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.filterwarnings("ignore")  # Opacus's
def test_readme_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list(commands(PAGES[0].read_text()))
    assert lines
    for words in lines:
        result = command_line().invoke(main, words)
        assert result.exit_code == 0, (words, result.stderr)
        if words[0] == "evaluate":  # the page shows 97.22%, which differs with the processor
            assert float(re.search(r"top-1 (\S+)%", result.output)[1]) > 90  # type: ignore[index]
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained, **options: create(name, **options)
    )  # there is no hub here
    private = TensorDataset(torch.randn(4, 3, 64, 64), torch.zeros(4).long())
    names: dict[str, Any] = {"total_steps": 2, "data_loader": DataLoader(private, 2)}
    exec(compile("".join(blocks(PAGES[0])), "README.md", "exec"), names)
    assert type(names["data_loader"]).__name__ == "DPDataLoader"
    assert Path("mine-ln.onnx").is_file()


# --- the target of the page on targets


@pytest.fixture
def target() -> Iterator[str]:
    names: dict[str, Any] = {"__name__": "mean_only"}
    layer, variant, its_map = blocks(OWN_TARGET)
    with patch.dict(TARGETS), patch.dict(OPTIONS):
        exec(layer, names)
        exec(variant, names)
        exec(its_map, names)
        names["MeanOnlyBatchNorm"].channel_map = names["channel_map"]
        yield "mean-only"


@pytest.mark.parametrize(
    "name", ["test_efficientnet", pytest.param("test_resnet", marks=pytest.mark.slow)]
)
def test_the_target_works(name: str, target: str, tmp_path: Path) -> None:
    source, x = built(name).eval(), torch.randn(2, 3, 64, 64)
    model, report = retrofit.convert(copy.deepcopy(source), target)
    assert {row.status for row in report.plan.layers} == {"converted"}
    torch.testing.assert_close(model(x), source(x))
    for module in source.modules():  # at strength 1: no division
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.fill_(1 - module.eps)  # type: ignore[union-attr]
    retrofit.set_strength(model, 1.0)
    torch.testing.assert_close(model(x), source(x))
    retrofit.save(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(retrofit.load(tmp_path / "a.safetensors").eval()(x), model(x))
    retrofit.set_strength(model, 0.5)
    retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 64, 64))
    with pytest.raises(
        RetrofitError, match="nobody has said what a MeanOnly"
    ):  # it is no FrozenBatchNorm any more
        retrofit.plain(model)


def test_the_variant_of_a_layer_works(target: str, tmp_path: Path) -> None:
    source, x = built("test_resnet").eval(), torch.randn(2, 3, 64, 64)
    model, _ = retrofit.convert(copy.deepcopy(source), "clipped-bnn")
    torch.testing.assert_close(model(x), source(x))
    plain, _ = retrofit.convert(copy.deepcopy(source), "bnn")
    for network in (model, plain):
        retrofit.set_strength(network, 1.0)
    features = 9 * torch.randn(2, 16, 8, 8)
    unclipped = plain.get_submodule("conv1.1")(features)
    assert (unclipped.abs() > 3).any()
    torch.testing.assert_close(model.get_submodule("conv1.1")(features), unclipped.clamp(-3, 3))
    retrofit.save(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(retrofit.load(tmp_path / "a.safetensors").eval()(x), model(x))
    retrofit.export_onnx(model, tmp_path / "a.onnx", input_size=(3, 64, 64))


# --- what every page is held to


@pytest.mark.parametrize(
    "page", sorted({*PAGES, *(ROOT / "docs").rglob("*.md")}), ids=lambda page: page.stem
)
def test_the_code_of_a_page_parses_and_its_links_lead_somewhere(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block)
    text = page.read_text()
    # A mark that is mistyped, or stands before something else, would test nothing.
    tested = TESTED.findall(text)
    assert text.count("<!--") == len(tested)
    assert all("    retrofit " in block for block in tested)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(
        r'src(?:set)?="([^"]+)"', text
    ):
        assert (page.parent / target).exists(), target


BN, FROZEN = "BatchNorm, batch statistics", "BatchNorm, frozen statistics, affine trained"
MAIN, DP = (
    ("evidence.md", "batch 1 ", "## cifar10, 500"),
    "## tf_efficientnet_lite0 at 64 px, 5000 pictures",
)
CLIENTS, LEFT, HALF, SCENES = (
    ("federated.md", "batch 8"),
    ("retention.md", "migrated"),
    ("half_reset_again.md", "batch 2"),
    ("detection.md", "mAP"),
)
FIGURES: list[tuple[str, int, Any]] = [
    *(
        ("ln", 1, LEFT),
        ("ln", 0, LEFT),
        (BN, 0, CLIENTS),
        ("frozen, norms and last layer trained", 0, CLIENTS),
        (BN, 4, MAIN),
        (FROZEN, 4, MAIN),
    ),
    *((name, 0, HALF) for name in (BN, FROZEN, "ln, t to 1")),
    *((name, 1, SCENES) for name in (BN, "frozen` (as `bn.eval()`)", "ln`, t to 1")),
]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_figures_of_readme_and_the_first_page_are_the_recorded_ones() -> None:
    known = {f"{number(table(*place)[row][column]):.1f}%" for row, column, place in FIGURES}
    assert "scores 89.0% top-1" in (RESULTS / "retention.md").read_text()
    dp = "".join(
        text[text.index(DP) :]
        for text in [(RESULTS / f"dp{end}.md").read_text() for end in ("", "_longer")]
    )
    private = {f"{value}%" for value in re.findall(r"\| (\d+\.\d) ±", dp)}
    readme = set(re.findall(r"\d+\.\d%", PAGES[0].read_text()))
    assert {f"{number(table(*LEFT)['ln'][column]):.1f}%" for column in (0, 1)} <= readme
    means_of_first_run = {
        f"{value}%"
        for value in re.findall(
            r"\| (\d+\.\d) ± \d+\.\d \| \d+ \|", (RESULTS / "first_run.md").read_text()
        )
    }
    assert len(means_of_first_run) == 2
    assert means_of_first_run <= readme
    # Where a network fits its images: each in its row, as another test says.
    fitted = {
        f"{number(row[1]):.1f}%"
        for rate in ("0.1.", "0.001.")
        for row in table(
            "reproduce.md", "network", f"5,000 pictures, 60 epochs, learning rate {rate}"
        ).values()
    }
    assert readme <= known | private | means_of_first_run | fitted | {"89.0%"}
    lines = (RESULTS / "first_run.jsonl").read_text().splitlines()
    first_run = {f"{json.loads(line)['test']:.2f}%" for line in lines}
    for page in (PAGES[0], ROOT / "docs" / "guides" / "small-batches.md"):
        shown = set(re.findall(r"\d+\.\d\d%", page.read_text()))
        assert shown
        assert shown <= first_run
    first_page = (ROOT / "docs" / "index.md").read_text()
    assert {figure for figure in known if figure not in readme} <= set(
        re.findall(r"\d+\.\d%", first_page)
    )


def test_the_figures_of_all_architectures_are_the_recorded_ones() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text()
    recorded = (RESULTS / "zoo-gn-pn.md").read_text()
    left = recorded.partition("| activations left, and why |  |\n|---|---|\n")[2]
    assert left
    assert left.strip() in page
    converted = re.search(r"converted / kept / unsupported \| ([\d,]+)", recorded)
    architectures = re.search(r"converted and none unsupported \| (\d+)", recorded)
    proxied = re.search(r"proxied / left \| ([\d,]+)", recorded)
    assert converted
    assert architectures
    assert proxied
    line = page[page.index("`benchmarks/zoo.py --to gn-pn`") :].partition("\n\n")[0]
    assert all(found[1] in line for found in (converted, architectures, proxied))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["before-training", "features", "privacy", "federated"])
def test_the_numbers_on_a_picture_are_the_recorded_ones(name: str, theme: str) -> None:
    figure = Figure()
    PICTURES[name][0](figure)
    drawn = [label.get_text() for axes in figure.axes for label in axes.texts]
    picture = (IMAGES / f"{name}-{theme}.svg").read_text()
    assert drawn
    assert set(drawn) <= set(re.findall(r">(\d+(?:\.\d+)?)</text>", picture))


@pytest.mark.parametrize("arm", ARMS)
def test_the_benchmark_of_the_private_digits_finds_the_lines_that_it_changes(arm: str) -> None:
    ast.parse(code({"arm": arm, "eps": 3, "lr": 1.0, "seed": 1}))


def test_the_figures_of_the_private_digits_are_the_recorded_ones() -> None:
    recorded = (RESULTS / "hospital.md").read_text()
    guide = (ROOT / "docs" / "guides" / "privacy.md").read_text()
    shown = re.findall(r"(\d+\.\d ± \d+\.\d)%", guide)
    assert len(shown) == 3
    assert all(f"| {figure} |" in recorded for figure in shown)
    page = (ROOT / "docs" / "integrations.md").read_text()
    for words, trained in (("norms and last layer", "norms"), ("all parameters", "all")):
        for samples, mebibytes in re.findall(rf"^\| {words} \| (\d+) \| (\S+) \|", page, re.M):
            assert f"| {trained} | {samples} | {mebibytes.replace(',', '')} |" in recorded


def test_the_gains_over_the_last_layer_alone_are_the_recorded_ones() -> None:
    recorded = (RESULTS / "dp_longer.md").read_text()
    gains = re.findall(r"^At epsilon 8, .*: \+(\d\.\d ± \d\.\d) /", recorded, re.M)
    assert len(gains) == 2
    docs = ROOT / "docs"
    for page in (PAGES[0], docs / "evidence.md", docs / "guides" / "privacy.md"):
        assert all(gain in page.read_text() for gain in gains), page


def test_the_gains_in_federated_averaging_are_the_recorded_ones() -> None:
    """Of `frozen`, norms and last layer trained, over BatchNorm (all layers trained, or the same) and
    over the last layer alone.
    """
    gains = {}
    trained = ("bn", "bn-norms")
    baselines = {"probe", *trained, *(f"{arm}-precise" for arm in trained), "bn-norms-fixed"}
    for network, part in enumerate((RESULTS / "federated.md").read_text().split("Paired diff")[1:]):
        head = re.search(r"^\| top-1 minus that of (.*)$", part, re.M)
        row = re.search(r"^\| .*\(frozen-norms\) (.*)$", part, re.M)
        assert head
        assert row
        arms = [cell.strip() for cell in head[1].split("|")]
        differences = [cell.strip() for cell in row[1].split("|")]
        for arm in baselines & {*arms}:
            gain = differences[arms.index(arm)].removeprefix("+").partition(" /")[0]
            gains[arm, network] = gain
    assert len(gains) == 9
    docs = ROOT / "docs"
    guide = (docs / "guides" / "federated.md").read_text()
    assert all(gain in guide for gain in gains.values())
    # The other pages name the best of these three, PreciseBN with all layers
    del gains["bn-norms-precise", 0], gains["bn-norms-fixed", 0]
    assert all(gain in (docs / "evidence.md").read_text() for gain in gains.values())
    cells = (("bn", 0), ("bn-precise", 0), ("probe", 0), ("probe", 1))
    shown = [gains[cell].partition(" ")[0] for cell in cells]
    over_batch_norm, over_precise, over_probe, second_over_probe = shown
    assert (
        f"{over_batch_norm} points over BatchNorm (all layers; {over_precise} after PreciseBN); "
        f"{over_probe} over the last layer alone (in MobileNetV2 {second_over_probe}, may be chance)"
    ) in words_of(PAGES[0])


@pytest.mark.parametrize(
    ("rate", "plain", "noise", "both", "until"),
    [
        ("0.1.", "BatchNorm", "BatchNorm with noise 0.4", "bnn, noise 0.4", "BatchNorm"),
        ("0.001.", "LayerNorm", "LayerNorm with noise 1", "lnn, noise 1", "LayerNorm"),
    ],
)
def test_the_gains_where_a_network_fits_are_the_recorded_ones(
    rate: str, plain: str, noise: str, both: str, until: str
) -> None:
    rows = table("reproduce.md", "network", f"5,000 pictures, 60 epochs, learning rate {rate}")
    means = {name: f"{number(rows[name][1]):.1f}%" for name in (plain, noise, both)}
    of_noise = over_seeds(rows[noise][2])
    of_transform = over_seeds(rows[both][3])
    guide = (ROOT / "docs" / "guides" / "normality.md").read_text()
    cells = [means[both], means[noise], f"+{of_transform}", means[plain]]
    assert f"[until {until} fits](../appendix/paper-checks.md#until-it-fits) 5,000 images" in guide
    assert f"5,000 images | {' | '.join(cells)} |" in guide
    assert of_noise in guide
    assert f"| {means[plain]} | {of_noise} | {of_transform} |" in PAGES[0].read_text()
    appendix = (ROOT / "docs" / "appendix" / "paper-checks.md").read_text()
    for name in (plain, noise, both):
        assert f"| {rows[name][0]} | {means[name]} |" in appendix


def over_seeds(difference: str) -> str:
    """A gain, with its standard error over seeds alone."""
    gain, _, _ = difference.partition(" / ")
    return gain.lstrip("+")


def test_the_times_of_readme_are_the_recorded_ones() -> None:
    parts = re.split("^#+ ", (RESULTS / "evidence.md").read_text(), flags=re.MULTILINE)
    row = r"^\| \**([^|*]+?)\** \|(?: [^|]* \|){5} (\d+) \|$"  # seconds of a run stand last
    runs = [
        dict(re.findall(row, p, re.MULTILINE))
        for b in (32, 1)
        for p in parts
        if p.startswith(f"Batch {b}\n")
    ]
    latency = re.findall(
        r"\| ln \| (\S+) .*? \| .*? \| (\S+) ", (RESULTS / "deploy_latency.md").read_text()
    )
    exported = [float(cell) for cells in latency for cell in cells]
    steps = dict(re.findall(r"channels_last \| (\S+) \| (\S+)", (RESULTS / "gpu.md").read_text()))
    frozen, ln = (
        " to ".join(f"{int(run[name]) / int(run[BN]):.1f}" for run in runs)
        for name in (FROZEN, "ln, t to 1")
    )
    on_gpu = " and ".join(f"{float(steps[target]):.1f}" for target in ("frozen", "ln"))
    said = words_of(PAGES[0])
    assert f"takes {frozen} of BatchNorm's time with `frozen`, {ln} with `ln`;" in said
    assert f"on an H200, {on_gpu} (" in said
    assert f"Exported, `ln` takes {min(exported):.1f} to {max(exported):.1f} on a CPU." in said


GLUED = re.compile(r"^(?!    |\|).*[.;:)] - [*\[`\w].*$", re.MULTILINE)


def test_each_item_of_a_list_stands_on_a_line_of_its_own() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert not GLUED.findall(page.read_text()), page.name


def test_readme_is_short() -> None:
    assert len(PAGES[0].read_text().split()) <= 900
    pages = [
        page
        for page in (ROOT / "docs").rglob("*.md")
        if page.parent.name not in ("reference", "appendix")
    ]
    # Pages to look things up in, which the site lists under Reference.
    reference = ("integrations", "coverage", "architecture")
    counted = [page for page in pages if page.stem not in reference]
    assert sum(len(page.read_text().split()) for page in counted) <= 11_500


def test_every_public_name_has_an_entry() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    for name in set(retrofit.__all__) - {"__version__", "callbacks", "layers"}:
        assert f"::: retrofit.{name}\n" in page, name
        assert getattr(retrofit, name).__doc__


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    code = "".join(file.read_text() for file in (ROOT / "retrofit").rglob("*.py"))
    code = re.sub(r'"\s*f?"', "", code)  # strings that follow each other are one
    entries = re.findall(
        r"^\*\*(`.*?)\*\*", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    messages = [message for entry in entries for message in re.findall("`(.*?)`", entry)]
    assert len(messages) > 15
    composed = {"check FAILED: largest difference", "the loss is not finite at step"}
    for part in {
        part.strip(" ;:,") for message in messages for part in message.split("...")
    } - composed:
        assert part in code


def test_every_flag_of_the_reference_and_of_troubleshooting_exists() -> None:
    options = [
        option
        for name in COMMANDS
        for option in importlib.import_module(f"retrofit.cli.{name}").command.params
    ]
    known = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "--version", "--group", "--nproc-per-node"}
    known |= {"--constant-gamma"}  # an option of the example in OWN_TARGET
    for page in (ROOT / "docs" / "troubleshooting.md", *(ROOT / "docs" / "reference").glob("*.md")):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text())) <= known, page.name
