import copy
import errno
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import retrofit
from retrofit.attack import Attack
from retrofit.diagnose import meters
from retrofit.diagnose.diagnosis import Diagnosis, diagnose, labelled_batches
from retrofit.diagnose.findings import sentences
from retrofit.diagnose.meters import Probe, probes
from retrofit.diagnose.perturbations import Batch, input_noise, under_attack
from retrofit.diagnose.plots import Plot, plots
from retrofit.diagnose.report_folder import check_folder, write_report
from retrofit.errors import RetrofitError
from retrofit.images.dataset import open_images
from retrofit.networks.open_model import Network
from retrofit.record import set_record
from tests.networks.conftest import HALF
from tests.pictures import write_folder
from tests.pretend_device import pretended

SMALL: dict[str, Any] = {"channels": 3, "plotted": 1}


def batches() -> list[Batch]:
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return [(pixels, torch.arange(4)) for pixels in images.split(4)]


def network(to: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5, **HALF)
    model, _ = retrofit.convert(model, to, check=False, strength=1.0)
    for pixels, _ in batches():
        model.train()(pixels)
    return model


def test_a_network_is_left_as_it_was() -> None:
    model = network("gn-pn")
    before = copy.deepcopy(model.state_dict())
    model.layer1.eval()
    diagnose(model, batches(), **SMALL)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {module.training for name, module in model.named_modules() if "layer1" not in name} == {
        True
    }
    assert {module.training for module in model.layer1.modules()} == {False}
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.fixture(scope="module")
def one() -> Diagnosis:  # what is found about a network
    torch.manual_seed(0)
    stages: set[str] = set()
    found = diagnose(
        network("bnn"), batches(), **SMALL, progress=lambda done, total, what: stages.add(what)
    )
    assert sorted(stages) == ["input noise", "layers", "noise", "statistics"]
    return found


def test_what_is_found(one: Diagnosis) -> None:
    assert one.images == 8
    assert [layer.name for layer in one.layers] == [
        probe.name for probe in probes(network("bnn"))[0]
    ]
    assert all(0 < r2 <= 1 for layer in one.layers for r2 in (layer.r2, layer.r2_before))
    assert {len(layer.lmbda) for layer in one.layers} == {7}
    followed = [layer.name for layer in one.layers if layer.linearity is not None]
    assert "bn1" in followed  # by the stem's ReLU
    assert not any(name.endswith("downsample.2") for name in followed)  # which ends in an addition
    assert one.input_noise[0].agreement == 100
    json.dumps(one.to_dict())


def test_noise_on_the_images_is_judged_against_clean_answers() -> None:
    model = network("bnn").eval()
    images, generator = [pixels for pixels, _ in batches()], torch.Generator().manual_seed(0)
    drawn = [torch.randn(pixels.shape, generator=generator) for pixels in images]
    with torch.no_grad():
        clean, noisy = (
            [model(x).argmax(1) for x in xs] for xs in (images, map(torch.add, images, drawn))
        )
    answers = [clean[0], clean[1] + 1]
    found = diagnose(model, list(zip(images, answers, strict=True)), **SMALL).input_noise
    clean, noisy, labels = (torch.cat(of) for of in (clean, noisy, answers))
    assert found[0].top1 == 50
    assert (found[-1].level, found[-1].agreement) == (
        1.0,
        100 * float((noisy == clean).double().mean()),
    )
    assert found[-1].top1 == 100 * float((noisy == labels).double().mean())


@pytest.mark.parametrize(
    ("wanted", "looked"), [(1, [0]), (2, [0, 2]), (3, [0, 2]), (9, [0, 1, 2, 3])]
)
def test_the_batches_that_are_looked_at_closely_are_evenly_spread(
    wanted: int, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(meters, "qq", lambda column: seen.append(round(column[0])))
    numbered = [(torch.full((2, 1, 4, 4), float(number)), None) for number in range(4)]
    diagnose(nn.Sequential(nn.BatchNorm2d(1)), numbered, channels=1, plotted=wanted)
    assert seen == looked


def test_noise_is_followed_from_where_it_is_added(one: Diagnosis) -> None:
    assert len(one.noise) == 2
    for followed in one.noise:
        assert (followed.layers[0], followed.errors[0]) == (
            followed.source,
            pytest.approx(0.1, rel=0.05),
        )


def test_answers_under_attack() -> None:
    model = network("bnn").eval()
    with torch.no_grad():
        clean = [model(pixels).argmax(1) for pixels, _ in batches()]
    right = [(pixels, answers) for (pixels, _), answers in zip(batches(), clean, strict=True)]
    weak, strong = (Attack("pgd", eps, (0.5,) * 3, (0.2,) * 3) for eps in (1e-6, 0.5))
    assert under_attack(model, right, clean, weak).top1 == 100
    found = diagnose(model, right, **SMALL, attack=strong)
    assert found.attack.top1 < 100
    said = f"top-1 {found.attack.top1:.1f}% under pgd within"
    assert any(said in sentence for sentence in sentences({"net": found}))
    unlabelled = [(pixels, None) for pixels, _ in right]
    assert under_attack(model, unlabelled, clean, strong) is None
    assert [entry.top1 for entry in input_noise(model, unlabelled, clean, seed=0)] == [None] * 5


def test_a_network_on_another_device_is_measured_there(one: Diagnosis) -> None:
    with pretended(network("bnn")) as model:
        found = diagnose(model, batches(), **SMALL)
    figures = [
        [figure for layer in of.layers for figure in (layer.r2, layer.linearity)]
        for of in (found, one)
    ]
    assert figures[0] == pytest.approx(figures[1], abs=1e-4)
    assert [entry.top1 for entry in found.input_noise] == [entry.top1 for entry in one.input_noise]


@pytest.mark.parametrize("to", ["gn", "ln"])
def test_a_migrated_norm_of_a_source_without_gamma_is_measured(to: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False))
    model, _ = retrofit.convert(model, to, check=False, strength=1.0)
    (layer,) = diagnose(model, batches(), **SMALL).layers
    assert layer.power.p1 + layer.power.p2 + layer.power.p3 + layer.power.p4 == pytest.approx(1)


class _Routed(nn.Module):
    """Calls a norm for few images alone."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.BatchNorm2d(3)
        self.many = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.many
        if len(x) < 4:
            norm = self.few
        return norm(x) + self.many(x)


def test_a_layer_that_these_batches_do_not_call_is_left_out() -> None:
    model = _Routed()
    found = diagnose(model, batches(), **SMALL)
    assert [layer.name for layer in found.layers] == ["many"]
    assert found.unmeasured == ("few",)
    model.many = nn.Identity()
    with pytest.raises(RetrofitError, match="calls none of its normalization layers on these"):
        diagnose(model, batches(), **SMALL)


(UNCALLED := nn.Tanh()).never_called = nn.BatchNorm2d(3)


@pytest.mark.parametrize(
    ("layers", "given", "message"),
    [
        ([UNCALLED], batches(), "the model calls no normalization layer that holds the images"),
        ([nn.Conv2d(3, 2, 1)], batches(), "no normalization layer that holds the images"),
        ([nn.BatchNorm2d(3)], [], "no images"),
        (
            [nn.BatchNorm2d(3), nn.Flatten(), nn.Threshold(math.inf, math.nan)],
            batches(),
            "not finite; check its weigh",
        ),
    ],
)
def test_nothing_to_measure(layers: list[nn.Module], given: list[Batch], message: str) -> None:
    with pytest.raises(RetrofitError, match=message):
        diagnose(nn.Sequential(*layers), given)


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "batch": (lambda: nn.BatchNorm2d(6), (2, 6, 4, 4)),
    "fused": (lambda: timm.layers.BatchNormAct2d(6), (2, 6, 4, 4)),
    "layer": (lambda: nn.LayerNorm(6), (2, 5, 6)),
    "layer, channels first": (lambda: timm.layers.LayerNorm2d(6), (2, 6, 6, 6)),
    "group": (lambda: nn.GroupNorm(2, 6), (2, 6, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_probe_leaves_out_the_affine_and_the_activation(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make().eval(), torch.randn(shape)
    plain = Probe("", copy.deepcopy(layer)).by_channel(
        nn.functional.layer_norm(x, (6,)) if name == "layer" else x
    )
    with torch.no_grad():
        layer.weight.uniform_(-2, 2)
        layer.bias.uniform_(-2, 2)
    probe = Probe("", layer)
    normalized = probe.normalized(x)
    assert normalized.shape == plain.shape == (2, 6, plain.shape[2])
    if name == "layer":
        torch.testing.assert_close(normalized, plain, atol=1e-4, rtol=1e-4)
    expected = normalized * layer.weight.view(1, 6, 1) + layer.bias.view(1, 6, 1)
    torch.testing.assert_close(probe.by_channel(probe.output(x)), expected)


def test_a_probe_sees_whitened_values() -> None:
    layer = retrofit.layers.DecorrelatedBatchNormalNorm2d(4, momentum=1.0)
    x = torch.randn(8, 4, 5, 5)
    x[:, 1] += x[:, 0]
    layer(x)
    layer.eval().running_lambda.fill_(0.5)
    before = Probe("", layer).normalized(x, transformed=False)
    torch.testing.assert_close(
        before.movedim(1, 0).flatten(1).corrcoef(), torch.eye(4), atol=1e-3, rtol=0
    )
    after = retrofit.layers.yeo_johnson(before, torch.tensor(0.5))
    torch.testing.assert_close(Probe("", layer).normalized(x), after)


@pytest.fixture
def unpainted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # let pictures be empty: painting them takes seconds
    monkeypatch.setattr(Plot, "png", lambda *_: b"")


def test_a_report_is_one_folder(one: Diagnosis, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    models = {
        "a <b>": {"model": "resnet18", "target": "bnn", "strength": 0.5},
        "other": {"model": "resnet18"},
    }
    write_report({"a <b>": one, "other": one}, {"schema": 1, "models": models}, folder)
    page = (folder / "index.html").read_text()
    assert (
        "<h1>Diagnosis of a &lt;b&gt; (resnet18 to bnn, t = 0.5) and other (resnet18)</h1>" in page
    )
    assert "<h2>a &lt;b&gt;</h2>" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<figure>") == len(list(folder.glob("*.png"))) == 8
    results = json.loads((folder / "results.json").read_text())
    assert results["schema"] == 1
    assert set(results["networks"]) == {"a <b>", "other"}
    assert all(
        sentence.startswith(("a <b>: ", "other: "))
        for sentence in sentences({"a <b>": one, "other": one})
    )


@pytest.mark.usefixtures("unpainted")
def test_a_table_shows_text_as_it_is_and_no_empty_columns(one: Diagnosis, tmp_path: Path) -> None:
    layer = replace(one.layers[0], name="<i>\n", kind="&", linearity=None)
    write_report({"a": replace(one, layers=(layer,), noise=())}, {}, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "<tr><td>0</td><td>&lt;i&gt;\\n</td><td>&amp;</td>" in page
    assert "<th>balance</th><th>HZ</th>" in page


def test_a_curve_of_noise_runs_through_the_layers_it_reaches(one: Diagnosis) -> None:
    figure = Figure()
    next(plot for plot in plots({"a": one}) if plot.name == "noise").draw(figure, {"a": one})
    places = {layer.name: number for number, layer in enumerate(one.layers)}
    curves = [list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].lines]
    reached = [zip(noise.layers, noise.errors, strict=True) for noise in one.noise]
    assert curves == [
        [(places[name], error) for name, error in errors if error > 0] for errors in reached
    ]
    assert len(curves) > 1


def test_a_figure_that_would_be_empty_is_left_out_with_a_reason(one: Diagnosis) -> None:
    bare = replace(
        one,
        layers=tuple(replace(layer, henze_zirkler=None, dependence=None) for layer in one.layers),
    )
    assert "independence" in [plot.name for plot in plots({"a": one})]
    assert "independence" not in [plot.name for plot in plots({"a": bare})]
    count = len(bare.layers)
    assert any(f"left out for {count} of {count} layers" in text for text in sentences({"a": bare}))


@pytest.mark.usefixtures("unpainted")
def test_a_report_replaces_only_a_report(
    one: Diagnosis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "report"
    write_report({"a": one}, {}, folder)
    with pytest.raises(RetrofitError, match="`force=True`"):
        check_folder(folder, force=False)
    check_folder(folder, force=True)
    write_report({"b": one}, {}, folder)
    assert "b" in json.loads((folder / "results.json").read_text())["networks"]
    with pytest.raises(RetrofitError, match=r"no report of diagnose alone .* and is kept"):
        check_folder(folder / "qq.png", force=True)
    results = folder / "results.json"
    results.rename(tmp_path / "results.json")
    with pytest.raises(RetrofitError, match="kept"):  # a page and pictures, perhaps somebody's
        check_folder(folder, force=True)
    (tmp_path / "results.json").replace(results)
    for name in ("notes.txt", "qq"):
        (folder / name).mkdir()
        for refused in (
            partial(check_folder, folder, force=True),
            partial(write_report, {"c": one}, {}, folder),
        ):
            with pytest.raises(
                RetrofitError, match=rf"diagnose alone \({name}\) and is kept; move"
            ):
                refused()
        (folder / name).rmdir()
    assert "b" in json.loads((folder / "results.json").read_text())["networks"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RetrofitError, match="~ does not exist"):
        check_folder(Path("~", "report"), force=False)
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(RetrofitError, match="is read-only"):  # said before the measuring
        check_folder(folder, force=True)


@pytest.mark.usefixtures("unpainted")
def test_a_failed_report_leaves_nothing(one: Diagnosis, tmp_path: Path) -> None:
    full = mock.patch(
        "retrofit.diagnose.report_folder._columns",
        side_effect=OSError(errno.ENOSPC, "No space left"),
    )
    with (
        full,
        pytest.raises(RetrofitError, match=r"cannot write .*report \(No space left.*free space"),
    ):
        write_report({"a": one}, {}, tmp_path / "report")
    assert not list(tmp_path.iterdir())


class TokensFirst(nn.Module):  # a norm on (tokens, images, channels), and one on images if `mixed`
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.patches, self.tokens, self.head = (
            nn.Conv2d(3, 8, 8, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 5),
        )
        self.maps = nn.BatchNorm2d(8) if mixed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.maps(self.patches(x)).flatten(2).permute(2, 0, 1)
        return self.head(self.tokens(tokens).mean(0))


def test_layers_that_cannot_be_followed_image_by_image_are_named() -> None:
    found = diagnose(TokensFirst(mixed=True), batches(), **SMALL)
    assert found.unmeasured == ("tokens",)
    assert [layer.name for layer in found.layers] == ["maps"]
    with pytest.raises(RetrofitError, match="no normalization layer that holds the images"):
        diagnose(TokensFirst(mixed=False), batches(), **SMALL)


@pytest.mark.parametrize(
    ("labels", "matched", "classes", "known"),
    [
        *((["ant", "bee", "cat"], "order", 3, True), (["ant", "bat", "bee"], "order", 3, False)),
        *((None, "order", 3, True), (None, "order", 5, False), (None, "order", None, False)),
        (None, "class map", 5, True),
    ],
)
def test_labels_are_left_out_that_may_not_be_the_outputs(
    labels: list[str] | None, matched: Any, classes: int | None, known: bool, tmp_path: Path
) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    set_record(model, labels=labels)
    data = open_images(write_folder(tmp_path / "pictures", each=1))
    data = replace(data, matched=matched, classes=classes)
    _, targets = next(iter(labelled_batches(Network(model), data, 2, 2)))
    assert (targets is not None) is known
