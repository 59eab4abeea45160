"""Code that would compute a converted layer's source without calling it."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import retrofit
from retrofit.errors import RetrofitError

SIZE = (3, 16, 16)


class Transformer(nn.Module):
    """Patches through torch's own encoder."""

    def __init__(self, norm_first: bool = False, activation: str = "relu") -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        return self.head(self.encoder(tokens, src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformers_of_torch_call_their_converted_norms_in_evaluation(
    norm_first: bool, activation: str, masked: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source, x = Transformer(norm_first, activation).eval(), torch.randn(3, *SIZE)
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[0, 12:] = True
    given = mask if masked else None
    model, report = retrofit.convert(copy.deepcopy(source), "lnn", input_size=SIZE)
    assert any("masked tokens" in note for note in report.notes) != norm_first
    expected = source(x, given).detach()  # with gradients torch takes no fast path, and packs no tokens
    with torch.no_grad():
        torch.testing.assert_close(model(x, given), expected)
    retrofit.set_strength(model, 1.0)
    followed = model(x, given).detach()
    with torch.inference_mode():
        torch.testing.assert_close(model(x, given), followed)
    assert (expected - followed).abs().max() > 1e-3
    file = tmp_path / "model.safetensors"
    retrofit.save(model, file)
    loaded = retrofit.load(file, into=Transformer(norm_first, activation)).eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x, given), followed)


class Small(nn.Module):
    """A convolution, a norm and a classifier; `how` calls the norm."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.bn, self.head, self.how = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5), how
        self.hidden = [self.bn]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.how(self, self.conv(x)).relu().mean((2, 3)))


def by_name(model: nn.Module, x: Tensor) -> Tensor:
    return model.bn(x)  # type: ignore[operator]


def by_list(model: nn.Module, x: Tensor) -> Tensor:
    return model.hidden[0](x)  # type: ignore[operator,index]


def by_tensors(model: nn.Module, x: Tensor) -> Tensor:
    norm = model.bn
    return functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)  # type: ignore[arg-type,union-attr]


def own_forward(self: nn.Module, x: Tensor) -> Tensor:
    return type(self).forward(self, x.float())


@pytest.mark.parametrize("to", ["bnn", "ln", "gn", "frozen"])
def test_a_network_that_calls_the_source_by_another_reference_is_refused(to: str) -> None:
    model = Small(by_list).eval()
    norm = model.bn
    with pytest.raises(RetrofitError, match="calls the source of bn, which is converted"):
        retrofit.convert(model, to, input_size=SIZE)
    assert model.bn is norm


def test_a_layer_that_is_never_called_is_named() -> None:
    for how, said in ((by_tensors, True), (by_name, False)):
        _, report = retrofit.convert(Small(how).eval(), "bnn", input_size=SIZE)
        assert any("1 converted layer (bn)" in note for note in report.notes) == said


@pytest.mark.parametrize("to", ["bnn", "ln", "dbn", "frozen"])
def test_a_forward_of_the_instance_is_no_layer_that_is_known(to: str) -> None:
    model = Small(by_name)
    model.bn.forward = types.MethodType(own_forward, model.bn)  # type: ignore[method-assign]
    with pytest.raises(RetrofitError, match="its forward was replaced"):
        retrofit.convert(model, to, input_size=SIZE)


def test_a_compiled_call_of_the_source_is_not_taken_over() -> None:
    model = Small(by_name)
    model.bn.compile()
    model, _ = retrofit.convert(model, "bnn", input_size=SIZE)
    assert model.bn._compiled_call_impl is None


@pytest.mark.parametrize(("groups", "passes"), [(8, False), (4, True)])
def test_groups_of_a_single_value_are_refused(groups: int, passes: bool) -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Flatten()).eval()
    if passes:
        retrofit.convert(model, "gn", groups=groups, input_size=SIZE)
        return
    with pytest.raises(RetrofitError, match="every group of 2 would hold a single value"):
        retrofit.convert(model, "gn", groups=groups, input_size=SIZE)
    assert type(model[2]) is nn.BatchNorm2d
