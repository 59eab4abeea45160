"""Running statistics estimated again, and frozen, for converted networks and others."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn as torchs

import retrofit
from retrofit.errors import RetrofitError

LOADER = [torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i)) * 2 + 1 for i in range(4)]


def network(to: str | None, strength: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=4).train()
    model(torch.randn(8, 3, 32, 32))
    if to is not None:
        retrofit.convert(model, to, check=False)
        retrofit.set_strength(model, strength)
    return model


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}


@pytest.mark.parametrize("to", [None, "bnn", "dbn"])
def test_at_strength_0_it_is_torchs(to: str | None) -> None:
    model, source = network(to, 0.0).eval(), network(None)
    torchs(LOADER, source)
    assert retrofit.update_bn(LOADER, model) == 15
    found = statistics(model)
    for name, wanted in statistics(source).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-4)
    assert not any(module.training for module in model.modules())
    assert {module.momentum for module in model.modules() if hasattr(module, "running_mean")} == {0.1}


@pytest.mark.parametrize("to", ["bnn", "dbnn"])
def test_lambda_and_whitening_too(to: str) -> None:
    model = network(to, 1.0)
    before = statistics(model)
    retrofit.update_bn([(images, None) for images in LOADER], model)
    after = statistics(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_migrated_statistics_stay() -> None:
    model = network("gn", 1.0)
    before = statistics(model)
    assert retrofit.update_bn(LOADER, model) == 0
    torch.testing.assert_close(statistics(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("to", [None, "bnn", "dbn", "dbnn"])
def test_frozen_layers_evaluate_in_training(to: str | None) -> None:
    model = network(to)
    with torch.no_grad():
        wanted = model.eval()(LOADER[0])
    before = statistics(model)
    assert retrofit.freeze_norms(model) == 15
    model = copy.deepcopy(model).train()
    out = model(LOADER[0])
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics(model), before, rtol=0, atol=0)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_whitening_is_not_synchronized_in_silence() -> None:
    with pytest.raises(retrofit.RetrofitError, match="not synchronized"):
        retrofit.sync_norms(network("dbn"))
    assert retrofit.sync_norms(network("bnn")) == 15


@pytest.mark.parametrize("to", ["bnn", "dbn"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "no batch"),
        ([LOADER[0], LOADER[0] * float("nan")], "statistics are not finite"),
        ([LOADER[0], LOADER[0] * 1e30], "statistics are not finite"),
        ([LOADER[0], LOADER[0][:, :1]], "channels"),  # torch's own error
    ],
    ids=["empty", "nan", "large", "shape"],
)
def test_what_cannot_be_estimated_leaves_the_statistics_as_they_were(to: str, wrong: list[Tensor], said: str) -> None:
    model = network(to)
    retrofit.update_bn(LOADER, model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((RetrofitError, RuntimeError), match=said):
        retrofit.update_bn(wrong, model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(layer.momentum is not None for layer in model.modules() if isinstance(layer, _BatchNorm))


def test_a_layer_that_no_batch_reaches_keeps_its_statistics() -> None:
    class Heads(nn.Sequential):
        """Has a head for training alone, as Inception does."""

        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    model = Heads(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.BatchNorm2d(4))
    model[1].running_mean.fill_(5)
    assert retrofit.update_bn(LOADER, model) == 1
    assert model[1].running_mean.tolist() == [5] * 4
    assert model[0][1].running_mean.abs().sum() > 0
