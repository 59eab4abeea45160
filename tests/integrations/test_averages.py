"""Moving averages of weights, as others keep them, evaluate at the strength of their model."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import retrofit
from retrofit.layers import StrengthMixin

STEPS = 50


def converted(to: str) -> nn.Module:  # a small network; in training, as a run has it
    torch.manual_seed(0)
    name, size = ("test_vit", {"img_size": 64}) if to == "lnn" else ("test_resnet", {})
    return retrofit.convert(timm.create_model(name, num_classes=4, **size), to)[0].train()


def ramped(
    model: nn.Module, update: Callable[[nn.Module], object], strength: float | None = None
) -> None:
    """Walk from t = 0 to 1 in 50 steps, or stand at a strength, moving the weights a little at
    each.
    """
    for step in range(1, STEPS + 1):
        retrofit.set_strength(model, step / STEPS if strength is None else strength)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-4 * torch.randn_like(parameter))
        update(model)


def strengths(model: nn.Module) -> set[float]:
    return {
        float(module.strength) for module in model.modules() if isinstance(module, StrengthMixin)
    }


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("bnn", {}),
        ("lnn", {"foreach": False}),
        ("gn-pn", {"exclude_buffers": True}),
        ("dbnn", {"foreach": False}),
    ],
)
def test_timms_average_of_a_ramped_run_evaluates_at_its_models_strength(
    to: str, options: dict[str, bool]
) -> None:
    """With a decay of 0.999 over 50 steps, in which a float would have reached 0.02."""
    model, x = converted(to), torch.randn(8, 3, 64, 64)
    with torch.no_grad():
        for _ in range(3):
            model(x)  # lambda and whitening leave their first values
    ema = ModelEmaV3(model, decay=0.999, **options)

    def update(model: nn.Module) -> None:
        ema.update(model)
        assert strengths(ema.module) == strengths(model)

    ramped(model, update)
    expected = copy.deepcopy(model).eval()
    own = {name: value for name, value in model.state_dict().items() if name.endswith(".strength")}
    expected.load_state_dict({**ema.module.state_dict(), **own})
    torch.testing.assert_close(ema.module.eval()(x), expected(x))
    retrofit.set_strength(expected, 0.02)
    assert not torch.allclose(ema.module(x), expected(x), rtol=1e-3, atol=1e-4)


def test_a_network_averaged_with_itself_is_itself() -> None:
    model = converted("ln-pn").eval()
    retrofit.set_strength(model, 0.3)
    emas = [
        ModelEmaV3(model),
        ModelEmaV2(model),
        AveragedModel(model),
        AveragedModel(model, use_buffers=True),
    ]
    emas.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True))
    x, other = torch.randn(2, 3, 64, 64), converted("ln-pn").eval()
    for ema in emas:
        for _ in range(20):
            (ema.update_parameters if isinstance(ema, AveragedModel) else ema.update)(model)
        other.load_state_dict(ema.module.state_dict())
        for average in (ema.module.eval(), other):
            torch.testing.assert_close(average(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("to", "average"),
    [
        ("bnn", {"avg_fn": get_ema_avg_fn(0.999)}),
        ("ln", {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}),
        ("dbn", {}),
    ],
)
def test_an_averaged_strength_is_refused(
    to: str, average: dict[str, Callable[..., object]]
) -> None:
    model = converted(to)
    ema = AveragedModel(model, use_buffers=True, **average)
    ramped(model, ema.update_parameters)
    x, restored = torch.randn(2, 3, 64, 64), converted(to)
    restored.load_state_dict(ema.module.state_dict())
    for network in (ema, restored):
        with pytest.raises(
            RuntimeError,
            match=r"is an average over training: .*use_buffers=False.*retrofit.set_stre",
        ):
            network.eval()(x)
    retrofit.set_strength(ema, retrofit.strength_of(model))
    assert ema(x).isfinite().all()
    assert strengths(ema) == {1.0}


def test_a_strength_that_stays_may_be_averaged() -> None:
    model = converted("ln")
    retrofit.set_strength(model, 0.77)
    ema = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999), use_buffers=True)
    ramped(model, ema.update_parameters, 0.77)
    assert list(strengths(ema.eval())) == [pytest.approx(0.77, abs=1e-6)]


def test_settings_that_were_averaged_are_told_from_their_rounding() -> None:
    state = nn.Sequential(retrofit.layers.MigratedGroupNorm(4, 8)).state_dict()
    state["0.setting_num_groups"] *= 1 - 1e-6
    other = nn.Sequential(retrofit.layers.MigratedGroupNorm(2, 8))
    other.load_state_dict(state)
    assert other[0].num_groups == 4
