"""What every normality-normalized layer promises, against torch's own layers and the paper's
formulas.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import oracles as oracle
from tests.layers.cases import (
    CASES,
    EPS,
    WHITENED,
    Case,
    affine_of,
    as_sets,
    assert_same_gradient,
    gradients_when_recomputed,
    on,
    randomise,
)

ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
AND_WHITENED = pytest.mark.parametrize(
    "case", [*CASES.values(), WHITENED], ids=[*CASES, "whitened"]
)


def pair(case: Case, strength: float) -> tuple[nn.Module, nn.Module]:
    """Our layer and torch's with the same parameters and statistics; noise off."""
    ours = case.ours(noise=0.0, strength=strength, **{case.affine: True})
    torchs = randomise(case.torchs(**{case.affine: True}))
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in CASES.items() if case.running]
)
def test_running_lambda_of_one_is_torchs_layer_to_the_bit(case: Case) -> None:
    for strength in (0.0, 1.0):
        ours, torchs = pair(case, strength)
        assert torch.equal(ours.eval()(case.input()), torchs.eval()(case.input()))
    ours.running_lambda[0] = 0.9
    assert not torch.equal(ours(case.input()), torchs(case.input()))


@ALL
@pytest.mark.parametrize(("strength", "alpha"), [(1.0, 1.0), (0.35, 1.0), (0.7, 0.4), (0.7, 0.0)])
def test_matches_the_papers_algorithm(case: Case, strength: float, alpha: float) -> None:
    ours, _ = pair(case, strength)
    ours.alpha = alpha
    ours = ours.double().train()
    weight, bias = affine_of(case, ours)
    x, y = (case.input(torch.float64).requires_grad_() for _ in range(2))
    out = ours(x)
    expected = oracle.normality_norm(
        as_sets(case, y), weight, bias, case.dim, EPS, strength * alpha
    ).reshape(y.shape)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    assert_same_gradient(out, x, expected, y, 1e-5, 1e-7)


@pytest.mark.parametrize("case", [CASES["batch2d"], CASES["group"]])
def test_gradients_are_of_the_noise_that_is_drawn_when_the_layer_is_recomputed(case: Case) -> None:
    """Without the random state, activation checkpointing draws other noise than the first run
    did.
    """
    layer, x = case.ours(noise=0.5, **{case.affine: True}), case.input()
    torch.testing.assert_close(*gradients_when_recomputed(layer, x))


@pytest.mark.parametrize("case", [CASES["batch2d"], CASES["group"], WHITENED])
def test_noise_is_scaled_by_the_spread_of_each_set(case: Case) -> None:
    quiet, noisy = case.ours(noise=0.0), case.ours(noise=0.5)
    torch.manual_seed(3)
    x = torch.cat([case.input()] * 64) if case.dim[0] == 0 else case.input()
    draws = torch.stack(
        [as_sets(case, noisy(x) - quiet(x)).detach() for _ in range(100 // max(1, len(x) // 64))]
    )
    y = as_sets(case, quiet(x)).detach()
    scale = 0.5 * (y - y.mean(case.dim, keepdim=True)).abs().mean(case.dim, keepdim=True)
    z = (draws / scale).flatten()
    assert abs(z.mean()) < 5 / len(z) ** 0.5
    assert z.std().item() == pytest.approx(1.0, abs=5 / len(z) ** 0.5)


@AND_WHITENED
def test_noise_follows_the_strength_and_the_seed_in_training_only(case: Case) -> None:
    layer, x = case.ours(noise=0.5, strength=0.5), case.input()
    quiet = case.ours(noise=0.0, strength=0.5)

    def noise_of(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return (layer(x) - quiet(x)).detach()

    first = noise_of(1)
    assert torch.equal(first, noise_of(1))
    assert not torch.equal(first, noise_of(2))
    assert torch.equal(layer.eval()(x), layer(x))
    for module in (layer, quiet):
        module.train().set_strength(0.0)
    assert noise_of(1).abs().max() == 0


@ALL
def test_affine_and_bias_are_optional(case: Case) -> None:
    assert case.ours(**{case.affine: False})(case.input()).isfinite().all()
    no_bias, full = (
        case.ours(**{case.affine: True}, noise=0.0, bias=bias) for bias in (False, True)
    )
    assert no_bias.bias is None
    assert torch.equal(no_bias(case.input()), full(case.input()))


@on("eager", "cpp")
@ALL
@pytest.mark.parametrize("training", [True, False])
def test_nan_and_inf_where_torch_has_them(case: Case, training: bool) -> None:
    for value in (torch.nan, torch.inf, 1e4, -1e4, 1e18):
        ours, torchs = (module.train(training) for module in pair(case, strength=1.0))
        x = case.input()
        x.view(-1)[3] = value
        expected, out = torchs(x), ours(x)
        assert out[expected.isnan()].isnan().all()
        assert out[expected.isfinite()].isfinite().all()
        for name in ("running_mean", "running_var") if case.running else ():
            found, wanted = ours.get_buffer(name), torchs.get_buffer(name)
            torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


@AND_WHITENED
def test_answers_empty_input_and_wrong_input_as_torch_does(case: Case) -> None:
    ours, torchs = pair(case, strength=1.0)
    empty = case.input()[:0].requires_grad_()
    for training in (True, False):
        ours.train(training), torchs.train(training)
        before = [b.clone() for b in ours.buffers()]
        out = ours(empty)
        assert out.shape == empty.shape
        if not isinstance(
            torchs, nn.modules.instancenorm._InstanceNorm
        ):  # torch's own fails here when affine
            assert out.shape == torchs(empty).shape
        out.sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(before, ours.buffers(), strict=True))
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())
    for shape in (
        (),
        (3,),
        (2, 5),
        (2, 5, 3),
        (1, 1, 1, 1, 1, 1),
        (2, 7, 3, 3),
        (1, 6, 1, 1),
        (1, 6),
        # Large enough for compiled kernels
        (64, 5, 16, 16),
        (64, 7, 16, 16),
    ):
        try:
            torchs.train()(torch.ones(shape))
        except (RuntimeError, ValueError):
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                ours.train()(torch.ones(shape))


# What the paper compares its layer with: kinds of noise, degrees of gaussianization

XI, T = 0.3, 0.7


def built(
    case: Case, **options: Any
) -> nn.Module:  # a layer in float64 with random affine parameters, and noise
    return randomise(
        case.ours(**{case.affine: True}, **{"noise": XI, "strength": T, **options})
    ).double()


@pytest.mark.parametrize(
    "name", ["batch2d", "layer two dims", "layer channels first", "group", "instance2d"]
)
@pytest.mark.parametrize(("kind", "alpha"), [("unscaled", 0.4), ("gaussian-dropout", 1.0)])
def test_other_kinds_of_noise(name: str, kind: str, alpha: float) -> None:
    case = CASES[name]
    layer = built(case, noise_kind=kind, alpha=alpha)
    x, y = (case.input(torch.float64).requires_grad_() for _ in range(2))
    torch.manual_seed(3)
    out = layer(x)
    torch.manual_seed(3)
    plain = oracle.normality_norm(as_sets(case, y), None, None, case.dim, EPS, T * alpha)
    z = torch.randn_like(plain)
    noisy = (
        plain + T * XI * math.sqrt(2 / math.pi) * z
        if kind == "unscaled"
        else plain * (1 + T * XI * z)
    )
    weight, bias = affine_of(case, layer)
    expected = (noisy * weight + bias).reshape(y.shape)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)
    assert_same_gradient(out, x, expected, y, 1e-5, 1e-7)
    assert layer(case.input(torch.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(layer.eval()(x), layer(x))


def test_the_options_show_where_they_are_not_the_papers() -> None:
    make = CASES["group"].ours
    assert repr(make()).endswith("noise=0.4)")
    assert repr(make(noise_kind="unscaled", alpha=0.5)).endswith(
        "noise=0.4, noise_kind=unscaled, alpha=0.5)"
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_an_operation_in_place_behind_a_layer_copies_nothing(
    name: str, channels_last: bool
) -> None:
    """The output is no view: autograd would copy a view's base, and its gradient, twice each."""
    x = CASES[name].input()
    if channels_last and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    for noise_kind in ("scaled", "unscaled"):
        layer = built(CASES[name], noise_kind=noise_kind)
        out = layer(x.requires_grad_())
        assert not out._is_view()
        assert out.stride() == x.stride()
        nodes, seen = [torch.relu_(out).grad_fn], set()
        while nodes:
            node = nodes.pop()
            seen.add(type(node).__name__)
            nodes += [before for before, _ in node.next_functions if before is not None]
        assert "CopySlices" not in seen
