"""Opacus with what `import retrofit.opacus` registers: the validator, the fixer and per-sample
gradients.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from opacus import PrivacyEngine
from opacus.grad_sample.utils import wrap_model
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from timm.layers import BatchNormAct2d, EvoNorm2dB0, LayerNorm2d
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrofit
import retrofit.opacus

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def network(
    name: str,
) -> nn.Module:  # a network in training, with running statistics that have moved
    torch.manual_seed(0)
    model = (
        torchvision.models.resnet18(num_classes=5)
        if name == "tv"
        else timm.create_model(name, num_classes=5)
    )
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 64, 64))
    return model


def converted(name: str, to: str, strength: float | None = 1.0) -> nn.Module:
    model, _ = retrofit.convert(network(name), to)
    if strength is not None and to != "frozen":
        retrofit.set_strength(model, strength)
    return model


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def assert_gradients_are_a_loops(model: nn.Module, mode: str, size: int = 64) -> None:
    """Compare with single samples, each trained tensor at its own scale."""
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(4, 3, size, size, dtype=dtype), torch.randint(0, 5, (4,))
    source = copy.deepcopy(model)
    cross_entropy(wrap_model(model, mode)(x), y).backward()
    for i in range(len(x)):
        source.zero_grad()
        cross_entropy(source(x[i : i + 1]), y[i : i + 1]).backward()
        for name, other in source.named_parameters():
            if not other.requires_grad:
                continue
            one = model.get_parameter(name)
            error = (one.grad_sample[i] - other.grad).abs().max()
            scale = other.grad.abs().max().clamp_min(1e-3)
            assert error <= TOLERANCE[dtype] * scale, (name, float(error))


@pytest.mark.parametrize(
    ("norm", "to", "options"),
    [
        (nn.BatchNorm2d(8), "gn", {"ws": True}),
        (nn.BatchNorm2d(8), "frozen", {}),
        (nn.GroupNorm(2, 8), "gnn", {}),
        (nn.InstanceNorm2d(8, affine=True), "inn", {}),
        (LayerNorm2d(8), "lnn", {}),
        (nn.BatchNorm2d(8), "ln-pn", {}),  # gamma gets its share through a proxy that stands alone
    ],
)
def test_each_kind_of_layer_by_hooks(norm: nn.Module, to: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    head = nn.Conv2d(8, 5, 3), nn.Flatten(), nn.LazyLinear(5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm, nn.ReLU(), *head).train()
    model(torch.randn(4, 3, 16, 16))
    retrofit.convert(model, to, **options)
    if to != "frozen":
        retrofit.set_strength(model, 1)
    assert ModuleValidator.validate(model, strict=True) == []
    assert_gradients_are_a_loops(model, "hooks", 16)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("to", ["frozen", "ln", "gn-pn", "lnn"])
def test_poisson_sampling_may_draw_nobody(to: str, mode: str) -> None:
    norm = LayerNorm2d(4) if to == "lnn" else nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    retrofit.convert(model, to, input_size=(3, 8, 8))
    wrap_model(model.train(), mode)(torch.empty(0, 3, 8, 8)).sum().backward()
    for name, one in model.named_parameters():
        gradients = one._norm_sample if mode == "ghost" else one.grad_sample
        assert gradients.shape == ((0,) if mode == "ghost" else (0, *one.shape)), name


@pytest.mark.parametrize("to", ["frozen", "ln-pn"])
def test_ghost_clipping_measures_a_loops_norms(to: str) -> None:
    torch.manual_seed(0)
    head = nn.Flatten(), nn.Linear(288, 5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head).double()
    x, y = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (4,))
    model(x)
    retrofit.convert(model, to, inputs=x)
    source = copy.deepcopy(model).train()
    cross_entropy(wrap_model(model.train(), "ghost")(x), y).backward()
    for i in range(len(x)):
        source.zero_grad()
        cross_entropy(source(x[i : i + 1]), y[i : i + 1]).backward()
        for name, other in source.named_parameters():
            one = model.get_parameter(name)
            torch.testing.assert_close(one._norm_sample[i], other.grad.norm(), msg=name)


def test_a_proxy_that_no_hook_reaches_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3))
    retrofit.convert(model, "ln-pn", pn_params=False)
    with pytest.raises(NotImplementedError, match="no hook reaches it"):
        wrap_model(model.train(), "hooks")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("options", [{}, {"to": "ln"}, {"to": "gn"}, {"num_groups": 4}], ids=str)
def test_fixed_networks_in_every_mode(options: dict[str, Any], mode: str) -> None:
    source = network("test_efficientnet")
    assert not ModuleValidator.is_valid(source)
    fixed = ModuleValidator.fix(source, **options)
    assert ModuleValidator.validate(fixed, strict=True) == []
    assert_gradients_are_a_loops(fixed, mode)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "tv"])
def test_the_fixer_keeps_the_trained_function(name: str) -> None:
    source = network(name)
    x = torch.randn(4, 3, 64, 64)
    fixed = ModuleValidator.fix(source)
    torch.testing.assert_close(fixed.eval()(x), source.eval()(x), rtol=1e-4, atol=1e-5)
    migrated, _ = retrofit.convert(copy.deepcopy(source), "ln")
    retrofit.set_strength(migrated, 1)
    fixed = ModuleValidator.fix(source, to="ln")
    torch.testing.assert_close(fixed.eval()(x), migrated.eval()(x), rtol=1e-4, atol=1e-5)


def test_an_untrained_network_gets_normalization() -> None:
    fixed = ModuleValidator.fix(timm.create_model("test_efficientnet"))
    assert any(isinstance(module, nn.GroupNorm) for module in fixed.modules())


def test_residual_sums_in_place_take_mode_ew() -> None:
    assert_gradients_are_a_loops(retrofit.plain(converted("test_resnet", "ln")).train(), "ew")
    with pytest.raises(
        RuntimeError, match="modified inplace"
    ):  # Opacus's hooks, whatever the layers
        assert_gradients_are_a_loops(converted("test_resnet", "ln"), "hooks")


def training_norms_and_last_layer(source: nn.Module) -> nn.Module:
    """What `fix` makes of a torchvision ResNet, in float64."""
    model = ModuleValidator.fix(source, to="frozen").double().train().requires_grad_(False)
    for name in [*batch_norms(source), "fc"]:
        model.get_submodule(name).requires_grad_(True)
    return model


def batch_norms(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.usefixtures("_float64")
def test_a_torchvision_resnet_whose_norms_and_last_layer_are_trained(mode: str) -> None:
    """It adds in place."""
    model = training_norms_and_last_layer(network("tv"))
    assert ModuleValidator.validate(model, strict=True) == []
    assert_gradients_are_a_loops(model, mode, 32)


@pytest.mark.parametrize("to", ["frozen", "ln", "gn"])
def test_a_resnet_that_adds_in_place_takes_hooks_once_it_is_fixed(to: str) -> None:
    assert_gradients_are_a_loops(ModuleValidator.fix(network("test_resnet"), to=to), "hooks")


@pytest.mark.parametrize("name", ["tv", "test_efficientnet"])
def test_gamma_and_beta_go_back_into_batch_norm(name: str) -> None:
    """As the guide on privacy hands a network over."""
    source = network(name)
    trained = ModuleValidator.fix(source, to="frozen")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    source.load_state_dict(trained.state_dict(), strict=False)
    for place in batch_norms(source):
        batch_norm, norm = source.get_submodule(place), trained.get_submodule(f"{place}.norm")
        batch_norm.weight.data = norm.weight.data.flatten()
        batch_norm.bias.data = norm.bias.data
    x = torch.randn(4, 3, 64, 64)
    torch.testing.assert_close(source.eval()(x), trained.eval()(x), rtol=1e-4, atol=1e-5)


class Subclass(nn.BatchNorm2d):
    """To Opacus, a type that it knows nothing of."""


def mixing(norm: nn.Module, to: str | None = None) -> nn.Module:
    """A network in which only the last layer is trained, around a norm of the batch."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    if to is not None:
        retrofit.convert(model, to, check=False)
    model.requires_grad_(False)[-1].requires_grad_(True)
    return model.train()


MIXING = {
    "bn": lambda: mixing(nn.BatchNorm2d(8)),
    "bn without parameters": lambda: mixing(nn.BatchNorm2d(8, affine=False)),
    "timm's": lambda: mixing(BatchNormAct2d(8)),
    "bnn": lambda: mixing(nn.BatchNorm2d(8), "bnn"),
    "dbn": lambda: mixing(nn.BatchNorm2d(8), "dbn"),
}


@pytest.mark.parametrize("case", list(MIXING))
def test_layers_that_are_not_trained_may_not_mix_samples(case: str) -> None:
    model = MIXING[case]()
    remedy = r"before you set requires_grad to False, ModuleValidator.fix\("
    if case in ("bnn", "dbn"):
        remedy = "convert the source network"
    advice = (
        r"normalizes each sample by its batch, trained or not \(1\w*\); "
        rf"call retrofit.freeze_norms\(model\), or,? {remedy}"
    )
    for found in (model, ModuleValidator.fix(model)):
        assert not ModuleValidator.is_valid(found)
        with pytest.raises(UnsupportedModuleError, match=advice):
            PrivacyEngine().validate(module=found, optimizer=None, data_loader=None)
        with pytest.raises(NotImplementedError, match=advice):
            wrap_model(found, "hooks")
    retrofit.freeze_norms(model)
    assert ModuleValidator.validate(model.train(), strict=True) == []
    assert_gradients_are_a_loops(model, "hooks", 16)


def frozen() -> nn.Module:
    model = mixing(nn.BatchNorm2d(8), "bnn").requires_grad_(True)
    retrofit.freeze_norms(model)
    return model


untracked = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
REFUSED = {
    "a subclass, trained": (
        lambda: mixing(Subclass(8)).requires_grad_(True),
        "its batch.*call retrofit.freeze_norms",
    ),
    "without running statistics": (
        lambda: mixing(untracked),
        "its batch.*with track_running_stats=True and train",
    ),
    "frozen, trained": (frozen, r"is frozen.*set requires_grad of its weight and bias to False"),
    "noise": (
        lambda: retrofit.convert(timm.create_model("test_vit"), "lnn", noise=0.5)[0],
        "adds noise",
    ),
    "evaluating": (
        lambda: mixing(nn.BatchNorm2d(8)).eval(),
        r"^\[\w+\('Model needs to be in training mode'\)\]$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_validation_refuses(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UnsupportedModuleError, match=message):
        ModuleValidator.validate(make(), strict=True)


def test_what_it_cannot_train_is_refused() -> None:
    with pytest.raises(retrofit.UsageError, match="choose frozen, ln or gn"):
        ModuleValidator.fix(network("test_efficientnet"), to="bnn")


def test_an_epoch_with_differential_privacy() -> None:
    model = converted("tf_efficientnet_lite0", "ln")
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 64, 64), torch.randint(0, 5, (16,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, 8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    before = copy.deepcopy(model.state_dict())
    for step, (x, y) in enumerate(loader):
        retrofit.set_strength(model, 0.5 + step / 10)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-5) > 0
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert not torch.equal(
        before["_module.conv_stem.weight"], model.state_dict()["_module.conv_stem.weight"]
    )


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_network_that_opacus_gives_back_is_saved_as_it_was(mode: str, tmp_path: Path) -> None:
    model = converted("test_efficientnet", "ln", 0.5)
    model = wrap_model(model, mode).to_standard_module()
    retrofit.save(model, tmp_path / "a.safetensors")
    x = torch.randn(2, 3, 64, 64)
    opened = retrofit.load(tmp_path / "a.safetensors").eval()
    torch.testing.assert_close(opened(x), model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", [None, "inn"])
def test_frozen_layers_that_average_statistics_of_samples_are_refused(target: str | None) -> None:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True).requires_grad_(False)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten(), nn.Linear(144, 2))
    if target:
        model, _ = retrofit.convert(model, target, input_size=(3, 8, 8))
    model.train()
    errors = ModuleValidator.validate(model)
    assert "averages statistics of private samples, trained or not (1)" in str(errors)
    with pytest.raises(NotImplementedError, match="averages statistics of private samples"):
        wrap_model(model, "hooks")
    model.get_submodule("1").eval()
    assert not ModuleValidator.validate(model)


def test_a_frozen_evonorm_of_batches_is_refused() -> None:
    model = mixing(EvoNorm2dB0(8))
    assert "EvoNorm2dB0 normalizes each sample by its batch" in str(ModuleValidator.validate(model))
    with pytest.raises(NotImplementedError, match=r"evaluation by `eval\(\)`"):
        wrap_model(model, "hooks")
    model.get_submodule("1").eval()
    assert not ModuleValidator.validate(model)


def doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 2


def with_hook() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.register_forward_hook(doubled)
    return norm


UNFIXABLE = {
    "a hook": (with_hook, {}, "has hooks, or a forward of its own"),
    "another target's groups": (nn.BatchNorm2d, {"to": "ln", "num_groups": 2}, "drop one of them"),
    "convert's name for groups": (nn.BatchNorm2d, {"to": "gn", "groups": 2}, "pass `num_groups`"),
    "nothing to keep": (
        partial(nn.BatchNorm2d, track_running_stats=False),
        {"to": "frozen"},
        "leave `to` out",
    ),
    "single values": (nn.BatchNorm1d, {"to": "gn"}, "pass a smaller `num_groups`, or `to='ln'`"),
}


@pytest.mark.parametrize("case", UNFIXABLE)
def test_what_the_fixer_would_not_keep_is_refused(case: str) -> None:
    make, options, message = UNFIXABLE[case]
    norm = make() if case == "a hook" else make(4)
    with pytest.raises(retrofit.RetrofitError, match=message):
        ModuleValidator.fix(nn.Sequential(norm), **options)
