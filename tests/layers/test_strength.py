"""A network whose layers differ in strength: by somebody's choice, or because part of a state
arrived.
"""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import retrofit
from retrofit.errors import RetrofitError
from retrofit.layers.strength import partial_state
from tests.layers.cases import build

SIZE = (3, 8, 8)
X = torch.randn(4, *SIZE, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """One norm has "bn" in its name and one has not, as in every ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.downsample = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn1(self.conv1(x)) + self.downsample(x)


def converted(strength: float = 0.0, **rules: str) -> nn.Module:
    torch.manual_seed(0)
    model, _ = retrofit.convert(Residual(), "ln", strength=strength, input_size=SIZE, **rules)
    return model.eval()


def load_without_bn(client: nn.Module, server: nn.Module) -> None:
    """FedBN's rule, as a state dict."""
    state = {name: value for name, value in server.state_dict().items() if "bn" not in name}
    client.load_state_dict(state, strict=False)


def copy_without_bn(client: nn.Module, server: nn.Module) -> None:
    """FedBN's rule, as its authors' code does it."""
    for name, value in server.state_dict().items():
        if "bn" not in name:
            client.state_dict()[name].copy_(value)


def load_one_part(client: nn.Module, server: nn.Module) -> None:
    client.downsample.load_state_dict(server.downsample.state_dict())


@pytest.mark.parametrize("transfer", [load_without_bn, copy_without_bn, load_one_part])
def test_part_of_a_state_is_refused_by_all_that_writes_a_network(
    transfer: Callable[[nn.Module, nn.Module], None], tmp_path: Path
) -> None:
    client = converted()
    transfer(client, converted(1.0))
    refusal = r"differ in strength, 0 \(bn1\) and 1 \(downsample.1\), because only part of a state"
    with pytest.raises(RetrofitError, match=refusal):
        retrofit.save(client, tmp_path / "a.safetensors", source="own")
    with pytest.raises(RetrofitError, match=refusal):
        retrofit.fold(client, input_size=SIZE)
    with pytest.raises(RetrofitError, match=refusal):
        retrofit.export_onnx(client, tmp_path / "a.onnx", input_size=SIZE)
    with pytest.raises(RetrofitError, match=refusal):
        retrofit.bake(client, [X])
    assert not list(tmp_path.iterdir())
    retrofit.set_strength(client, 1.0)
    retrofit.save(client, tmp_path / "a.safetensors", source="own")


def test_evaluation_behind_a_partial_load_warns_once() -> None:
    client = converted()
    load_without_bn(client, converted(1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client(X)
        client(X)
    assert ["only part of a state" in str(warning.message) for warning in caught] == [True]


def test_a_state_that_arrives_in_two_parts_before_evaluation_is_whole() -> None:
    client = converted()
    state = converted(1.0).state_dict()
    for with_bn in (False, True):
        part = {name: value for name, value in state.items() if ("bn" in name) == with_bn}
        client.load_state_dict(part, strict=False)
    client(X)
    assert partial_state(client) is None


def converted_in_two_steps() -> nn.Module:
    model = converted(1.0, only="bn1")
    return retrofit.convert(model, "ln", input_size=SIZE)[0]


def set_in_part() -> nn.Module:
    model = converted()
    retrofit.set_strength(model.downsample, 0.5)
    return model


def loaded_whole() -> nn.Module:
    model = converted()
    model.load_state_dict(set_in_part().state_dict())
    return model


def loaded_whole_then_set_in_part() -> nn.Module:
    model = loaded_whole()
    retrofit.set_strength(model.downsample, 1.0)
    return model


def averaged() -> nn.Module:
    """Copies the buffers of a network that was converted in two steps, one of which walks on."""
    model = converted_in_two_steps()
    average = AveragedModel(model)
    retrofit.set_strength(model.downsample, 0.25)
    average.update_parameters(model)
    return average.module


@pytest.mark.parametrize(
    "build",
    [converted_in_two_steps, set_in_part, loaded_whole, loaded_whole_then_set_in_part, averaged],
)
def test_a_mixture_by_choice_goes_on(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = build()
    assert partial_state(model) is None
    assert partial_state(copy.deepcopy(model)) is None
    with pytest.raises(RetrofitError, match="the converted layers differ in strength"):
        retrofit.strength_of(model)
    retrofit.save(model, tmp_path / "a.safetensors", source="own")


def test_a_checkpoint_of_the_source_brings_no_strength() -> None:
    model = set_in_part()
    model.load_state_dict(Residual().state_dict(), strict=False)
    assert partial_state(model) is None


@pytest.mark.parametrize("value", [0.25, 1, torch.tensor(0.25)])
def test_a_number_that_is_assigned_is_the_strength(value: float) -> None:
    model = converted()
    model.bn1.strength = value
    assert model.bn1.strength == value
    expected = converted()
    expected.bn1.set_strength(float(value))
    assert torch.equal(model(X), expected(X))
    for wrong in (2, torch.tensor(float("nan"))):
        with pytest.raises(RetrofitError, match=r"strength must lie in \[0, 1\]"):
            model.bn1.strength = wrong


@pytest.mark.parametrize("name", ["batch2d", "layer", "migrated", "proxy", "standardized weights"])
def test_an_average_that_was_compiled_answers_nan(name: str) -> None:
    """Compiled code cannot raise an error that says why, as an eager layer does."""
    model, x = build(name, 0.2)
    average = AveragedModel(model, use_buffers=True).eval()
    compiled = torch.compile(average, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        for strength in (0.2, 1.0):
            retrofit.set_strength(model, strength)
            average.update_parameters(model)
        assert compiled(x).isnan().all()
        retrofit.set_strength(average, 1.0)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    torch.compiler.reset()
