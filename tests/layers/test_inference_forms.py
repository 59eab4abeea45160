"""What each layer says of itself: its form in plain operations, its constant map, its plain and its
source's layer.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import retrofit
from retrofit import layers
from retrofit.errors import RetrofitError
from retrofit.layers.frozen_batch_norm import ConstantAffine
from retrofit.layers.inference_forms import ConstantNorm, EstimatedTransform, TwoBranch
from tests import oracles as oracle

C = 8
IMAGES = (3, C, 4, 5)
LAMBDAS = (0.0, 2.0, 5e-5, 2 - 5e-5, -1.0, 3.0, 1.0, 0.04)


def proxy(**options: Any) -> nn.Module:
    norm = layers.GroupNormalNorm(2, C)
    return layers.ProxyNorm(nn.PReLU(C), C, norm=_filled(norm), **options)


RUNNING: dict[str, Callable[[], nn.Module]] = {
    "bnn1d": lambda: layers.BatchNormalNorm1d(C), "bnn3d": lambda: layers.BatchNormalNorm3d(C),
    "bnn2d": lambda: layers.BatchNormalNorm2d(C, affine=False),
    "sync": lambda: layers.SyncBatchNormalNorm(C, alpha=0.7),
    "bnn act": lambda: _activated(layers.BatchNormalNormAct2d(C)),
    "inn tracked": lambda: layers.InstanceNormalNorm2d(C, affine=True, track_running_stats=True),
    "dbn": lambda: layers.DecorrelatedBatchNorm2d(C, group_size=4),
    "dbnn": lambda: layers.DecorrelatedBatchNormalNorm2d(C, group_size=4),
    "dbnn flat": lambda: layers.DecorrelatedBatchNormalNorm1d(C, group_size=4),
    "dbnn act": lambda: _activated(layers.DecorrelatedBatchNormalNormAct2d(C, group_size=2)),
}  # fmt: skip
ESTIMATING: dict[str, Callable[[], nn.Module]] = {
    "bnn untracked": lambda: layers.BatchNormalNorm2d(C, track_running_stats=False),
    "sync untracked": lambda: layers.SyncBatchNormalNorm(C, track_running_stats=False),
    "lnn": lambda: layers.LayerNormalNorm((C, 5)), "lnn2d": lambda: layers.LayerNormalNorm2d(C, eps=0.5),
    "lnn act": lambda: _activated(layers.LayerNormalNormAct(5, alpha=0.5)),
    "lnn act 2d": lambda: _activated(layers.LayerNormalNormAct2d(C)),
    "gnn": lambda: layers.GroupNormalNorm(2, C), "gnn act": lambda: _activated(layers.GroupNormalNormAct(2, C)),
    "inn": lambda: layers.InstanceNormalNorm2d(C, affine=True),
}  # fmt: skip
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "gn": lambda: layers.MigratedGroupNorm(2, C, group_eps=0.02),
    "ln act": lambda: _activated(layers.MigratedGroupNormAct(1, C, bias=False)),
    "frozen": lambda: layers.FrozenBatchNorm(C),
    "frozen act": lambda: _activated(layers.FrozenBatchNormAct(C, affine=False)),
    "proxy": proxy,
    "proxy restored": lambda: proxy(restore=True, scale=False),
    "proxy last": lambda: layers.ProxyNorm(torch.tanh, C, channel_dim=-1),
    "standardized": lambda: layers.WeightStandardizedConv2d(C, 6, 3, padding=1),
    "constant": lambda: ConstantAffine(torch.rand(C), torch.rand(C)),
}
ALL = {**RUNNING, **ESTIMATING, **OTHERS}
SHAPES = {
    "bnn1d": (6, C, 7), "bnn3d": (2, C, 3, 4, 2), "dbnn flat": (9, C), "lnn": (2, 3, C, 5), "lnn act": (2, 3, C, 5),
    "proxy last": (3, 4, C),
}  # fmt: skip


def _activated(layer: Any) -> nn.Module:
    layer.drop, layer.act = nn.Dropout(0.3), nn.LeakyReLU(0.2)
    return layer


def _filled(layer: nn.Module) -> nn.Module:  # values of a trained network, on a layer in evaluation
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            values = torch.rand(tensor.shape, generator=generator) + 0.3
            if name in ("running_mean", "bias", "proxy_bias", "restore_shift"):
                tensor.copy_(3 * values - 2)
            elif name == "running_lambda":
                tensor.copy_(torch.tensor(LAMBDAS))
            elif name == "running_whitening":
                tensor.copy_(values + values.mT)
            elif tensor.is_floating_point() and tensor.ndim:
                tensor.copy_(values)
        if isinstance(getattr(layer, "weight", None), Tensor) and layer.weight.ndim == 1:
            layer.weight[0] *= -1
    return layer.eval()


def built(name: str, strength: float = 1.0) -> Any:
    layer: Any = _filled(ALL[name]())
    if isinstance(layer, layers.StrengthMixin):
        layer.set_strength(strength)
    return layer


def inputs(name: str, scale: float = 1.5) -> Tensor:
    x = torch.randn(
        SHAPES.get(name, IMAGES), generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    return scale * (0.5 + (0.4 * x).exp())


def precise(layer: nn.Module, x: Tensor) -> Tensor:  # the layer in float64
    wide = copy.deepcopy(layer).double()
    with torch.no_grad():
        return wide(x.double())


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ALL)
def test_the_form_is_the_layer_in_plain_operations(name: str, strength: float) -> None:
    layer, x = built(name, strength), inputs(name)
    modes = [module.training for module in layer.train().modules()]
    form = layer.inference_form()
    assert [
        module.training for module in layer.modules()
    ] == modes  # not even those of a fused activation
    assert not any(
        isinstance(module, layers.converted_layer.ConvertedLayer) for module in form.modules()
    )
    assert not any(parameter.requires_grad for parameter in form.parameters())
    expected = precise(layer.eval(), x)
    torch.testing.assert_close(
        form(x.float()).double(), expected, rtol=2e-5, atol=2e-5 * expected.std().item()
    )
    if name in RUNNING:
        assert (layer.affine_map() is None) == (strength > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_constant_norm_of_half_precision_scales_exactly(dtype: torch.dtype) -> None:
    form, x = (
        ConstantNorm(*torch.tensor([[0.0] * C, [2.0] * C, [1.0] * C]).to(dtype)),
        torch.randn(IMAGES),
    )
    torch.testing.assert_close(form(x), 2 * x + 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lmbda", [0.0, 2.0, 5e-5, -5e-5, 2 + 5e-5, 0.049, -1.0, 3.0])
def test_the_transform_is_exact_near_its_singular_points(lmbda: float) -> None:
    h = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    form = TwoBranch(lmbda * one, 2 * one, 0 * one)
    found = form(h.float().view(-1, 1)).flatten().double()
    expected = torch.from_numpy(2 * oracle.psi(h.numpy(), lmbda))
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("kappa", [-1.0, 1.0, -1 + 1e-4, 1 - 1e-4, 0.3])
def test_an_estimate_may_be_one_of_the_singular_points(kappa: float) -> None:
    """Scaled so that the first set's lambda is 1 + kappa."""
    x = inputs("gnn").flatten(2)
    rows = x.unflatten(1, (2, -1)).flatten(2)
    h = (rows - rows.mean(2, True)) / (rows.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    estimate = oracle.newton_estimate(h, (2,)) - 1
    layer: Any = layers.GroupNormalNorm(2, C, affine=False).eval()
    strength = kappa / estimate.flatten()[0].item()
    found = EstimatedTransform(layer._sets(), 1e-5, strength, (None, None), per_channel=True)(
        x.float()
    )
    lmbda = 1 + strength * estimate
    expected = np.stack(
        [
            [oracle.psi(v.numpy(), float(p)) for v, p in zip(*pair, strict=True)]
            for pair in zip(h, lmbda, strict=True)
        ]
    )
    torch.testing.assert_close(
        found.double(), torch.from_numpy(expected).view(x.shape), rtol=1e-4, atol=2e-5
    )


HALF = [*(name for name in ESTIMATING if "act" not in name), "gn", "ln act"]


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 300.0])
@pytest.mark.parametrize("name", HALF)
def test_forms_hold_in_strict_float16(name: str, scale: float, strength: float) -> None:
    """Every operation rounds to float16; centred values of 300 and more would overflow when
    squared.
    """
    layer, x = built(name, strength), inputs(name, scale).half()
    found = layer.inference_form().half()(x)
    expected = precise(layer, x)
    torch.testing.assert_close(
        found.double(), expected, rtol=0.02, atol=0.02 * expected.std().item()
    )


def test_far_outliers_do_not_upset_the_estimate_in_float16() -> None:
    """h = 150 in a set of 30,000 values: squares of d psi / d lambda would overflow too."""
    x = torch.randn(1, 2, 30_000, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] = 400.0
    layer: Any = layers.InstanceNormalNorm1d(2).eval()
    found = layer.inference_form().half()(x.half())
    torch.testing.assert_close(found.double(), precise(layer, x.half()), rtol=0.02, atol=0.02)


def test_constant_sets_become_beta_in_float16() -> None:
    layer: Any = built("gnn")
    found = layer.inference_form().half()(torch.full((2, C, 3, 3), 7.0, dtype=torch.float16))
    torch.testing.assert_close(
        found, layer.bias.half().view(1, -1, 1, 1).expand_as(found), atol=1e-2, rtol=1e-2
    )


def test_instance_norm_takes_single_samples() -> None:
    layer, x = built("inn tracked", 0.5), inputs("inn")[0]
    torch.testing.assert_close(
        layer.inference_form()(x.float()).double(), precise(layer, x), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize(
    "name", [name for name in ALL if not name.startswith(("proxy", "constant"))]
)
def test_the_source_layer_is_the_layer_at_strength_0_around_the_same_tensors(name: str) -> None:
    layer, x = built(name, 0.0), inputs(name)
    source = layer.source_layer()
    assert type(source).__module__.startswith(("torch.nn", "timm.layers"))
    torch.testing.assert_close(precise(source, x), precise(layer, x), rtol=1e-5, atol=1e-5)
    for key, tensor in (*source.named_parameters(), *source.named_buffers()):
        assert tensor is dict((*layer.named_parameters(), *layer.named_buffers()))[key]


PLAIN = {
    "lnn": 0.0,
    "bnn act": 0.0,
    "inn": 0.0,
    "gnn act": 0.0,
    "dbnn": 0.0,
    "frozen act": 1.0,
    "standardized": 0.5,
}


@pytest.mark.parametrize(
    ("name", "strength"),
    [
        *PLAIN.items(),
        ("frozen", 1.0),
        ("gn", 0.0),
        ("gn", 1.0),
        ("ln act", 1.0),
        ("proxy", 0.5),
        ("proxy last", 1.0),
    ],
)
def test_the_plain_layer_behind_its_constants_is_the_layer(name: str, strength: float) -> None:
    layer, x = built(name, strength), inputs(name)
    affine, plain = layer.plain_layer()
    expected = precise(layer, x)
    if affine is not None:
        x = x * affine[0].view(-1, 1, 1) + affine[1].view(-1, 1, 1)
    torch.testing.assert_close(copy.deepcopy(plain).double()(x), expected, rtol=1e-5, atol=1e-5)
    trained, kept = (
        sum(p.numel() for p in of.parameters() if p.requires_grad) for of in (layer, plain)
    )
    assert kept == trained - (
        2 * C if name.startswith("proxy") else 0
    )  # the proxy's own become constants


@pytest.mark.parametrize(
    ("name", "strength", "reason"),
    [
        ("bnn2d", 1.0, "power transform"),
        ("dbn", 0.5, "whitens"),
        ("gn", 0.5, "between"),
        ("gnn", 0.1, "power"),
    ],
)
def test_what_no_library_computes_is_refused(name: str, strength: float, reason: str) -> None:
    with pytest.raises(RetrofitError, match=reason):
        built(name, strength).plain_layer()
    with pytest.raises(RetrofitError, match="its whitening is no constant; skip it"):
        layers.DecorrelatedBatchNorm2d(4, track_running_stats=False).eval().inference_form()


class Doubled(layers.BatchNormalNormAct2d):
    """A class of someone's own, which inherits from ours and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_class_with_a_forward_of_its_own_inherits_no_answers() -> None:
    layer, x = _filled(Doubled(C)), inputs("bnn2d").float()
    assert isinstance(layer, Doubled)
    assert layer.channel_map() is None
    torch.testing.assert_close(layer.inference_form()(x), layer(x))
    with pytest.raises(RetrofitError, match="nobody has said what a Doubled is"):
        layer.plain_layer()


def test_a_pruned_layer_folds_at_strength_0() -> None:
    layer = layers.GroupNormalNorm(2, C, strength=0.0).eval()
    prune.random_unstructured(layer, "weight", 0.5)
    x = torch.randn(2, C, 4, 4)
    folded = retrofit.fold(nn.Sequential(layer), inputs=x)
    torch.testing.assert_close(folded(x), layer(x))
