"""Decorrelated batch normalization against scipy and torch's own layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrofit import layers
from retrofit.surgery.targets.dbn import DecorrelatedNorm, inverse_square_root
from tests import oracles as oracle
from tests.layers.cases import EPS, randomise

SHAPES = {
    "1d": (40, 12),
    "1d singular": (9, 12),
    "1d maps": (9, 12, 7),
    "2d": (5, 12, 4, 3),
    "3d": (4, 12, 2, 3, 3),
}
KIND = pytest.mark.parametrize("kind", SHAPES)
NORMAL = pytest.mark.parametrize("normal", [False, True], ids=["dbn", "dbnn"])


def build(kind: str, normal: bool, channels: int = 12, **options: Any) -> DecorrelatedNorm:
    quiet = {"noise": 0.0} if normal else {}
    cls = getattr(layers, f"DecorrelatedBatch{'NormalNorm' if normal else 'Norm'}{kind[:2]}")
    return cls(channels, **{"group_size": 4, **quiet, **options})


def data(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Skewed values, shifted, with channels that depend on each other."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).exp()
    mix = torch.eye(shape[1]) + 0.5 * torch.randn(shape[1], shape[1], generator=generator)
    return (torch.einsum("ab,nb...->na...", mix.double(), x) + 2).to(dtype)


def covariance(
    y: Tensor,
) -> Tensor:  # unbiased covariances of the groups of four channels of (N, C, *)
    rows = y.movedim(1, 0).flatten(1).unflatten(0, (-1, 4))
    rows = rows - rows.mean(-1, True)
    return rows @ rows.mT / (rows.shape[-1] - 1)


def roots(covariances: Tensor) -> Tensor:
    return torch.stack([torch.from_numpy(oracle.root(group.numpy(), EPS)) for group in covariances])


@KIND
@pytest.mark.parametrize(
    ("strength", "asked", "size"), [(0.0, 4, 4), (0.35, 5, 4), (1.0, 16, 12), (1.0, 1, 1)]
)
def test_is_zca_as_scipy_has_it(kind: str, strength: float, asked: int, size: int) -> None:
    layer = build(kind, False, strength=strength, momentum=1.0, group_size=asked).double()
    assert layer.group_size == size
    x = data(SHAPES[kind], torch.float64)
    expected = oracle.decorrelate(x, size, EPS, strength)
    torch.testing.assert_close(layer(x), expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(
        layer.running_whitening, roots(layer.running_covariance), rtol=1e-7, atol=1e-7
    )


@NORMAL
@pytest.mark.parametrize("training", [True, False])
def test_gradcheck(normal: bool, training: bool) -> None:
    layer = randomise(build("2d", normal, 6, group_size=3, strength=0.6).double())
    x = data((4, 6, 3, 1), torch.float64).requires_grad_()
    layer(x)
    layer.train(training)
    # gradcheck moves the parameters in place, where the layer finds them
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_gradient_of_the_root_at_equal_eigenvalues() -> None:
    a = torch.randn(4, 4, dtype=torch.float64)
    twin = torch.block_diag(a @ a.mT, a @ a.mT) + torch.eye(8)
    matrices = torch.stack(
        [2 * torch.eye(8).double(), torch.diag(torch.tensor([1.0] * 5 + [3.0] * 3)).double(), twin]
    )
    assert torch.autograd.gradcheck(
        lambda s: inverse_square_root((s + s.mT) / 2, 1e-9), matrices.requires_grad_()
    )


def test_root_of_ill_conditioned_matrices() -> None:
    basis = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0]
    matrix = (basis * torch.logspace(-5, 3, 16, dtype=torch.float64)) @ basis.T
    expected = torch.from_numpy(oracle.root(matrix.numpy(), 0.0))
    found = inverse_square_root(matrix, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@NORMAL
@pytest.mark.parametrize("tracked", [True, False])
def test_strength_0_evaluates_as_torchs_layer(normal: bool, tracked: bool) -> None:
    torchs = randomise(nn.BatchNorm2d(12, track_running_stats=tracked)).eval()
    ours = build("2d", normal, strength=0.0, track_running_stats=tracked).eval()
    ours.load_state_dict(torchs.state_dict())
    x = data(SHAPES["2d"])
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-5, atol=5e-6)


@KIND
def test_whitened_values_are_gaussianized(kind: str) -> None:
    """Against the paper's algorithm in float64, applied to what scipy whitens (eps so small that
    both agree).
    """
    layer = randomise(build(kind, True, eps=1e-12, momentum=1.0, strength=1.0, alpha=0.7).double())
    x = data(SHAPES[kind], torch.float64)
    h = oracle.decorrelate(x, 4, 1e-12, 1.0)
    affine = [p.detach().view(1, -1, *(1,) * (x.ndim - 2)) for p in (layer.weight, layer.bias)]
    expected = oracle.normality_norm(h, *affine, (0, *range(2, x.ndim)), 0.0, 0.7)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)
    assert (layer.running_lambda - 1).abs().min() > 1e-3


@NORMAL
@pytest.mark.parametrize("strength", [0.3, 1.0])
def test_evaluation_uses_the_running_averages(normal: bool, strength: float) -> None:
    layer = build("2d", normal, momentum=0.25, strength=strength).double()
    batches = [data((6, 12, 4, 3), torch.float64).roll(shift, 1) for shift in range(3)]
    average = torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    for x in batches:
        layer(x)
        average = 0.75 * average + 0.25 * covariance(x)
    torch.testing.assert_close(
        average.diagonal(dim1=1, dim2=2).flatten(), layer.running_var, rtol=1e-9, atol=1e-9
    )
    expected = roots(average)
    torch.testing.assert_close(layer.running_covariance, average, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer.running_whitening, expected, rtol=1e-7, atol=1e-8)
    scaling = torch.diag_embed(torch.rsqrt(layer.running_var + EPS).view(3, 4))
    matrix = torch.block_diag(*((1 - strength) * scaling + strength * expected))
    h = torch.einsum("ab,nb...->na...", matrix, batches[0] - layer.running_mean.view(1, 12, 1, 1))
    if normal:
        lmbda = (1 + strength * (layer.running_lambda - 1)).view(1, 12, 1, 1)
        h = layers.yeo_johnson(h, lmbda)
    torch.testing.assert_close(layer.eval()(batches[0]), h, rtol=1e-7, atol=1e-8)


def degenerate() -> dict[str, Tensor]:
    x = data((4, 16, 3, 3))
    return {
        "fewer values than channels": data((3, 16, 1, 1)), "two values": data((2, 16, 1, 1)),
        "dead channels": torch.where(torch.arange(16).view(1, 16, 1, 1) % 3 > 0, x, 0.0),
        "constant": torch.full_like(x, 3.7), "equal channels": x[:, :1].expand(4, 16, 3, 3).clone(),
        "far from zero": x + 1e4, "large": x * 1e6, "tiny": x * 1e-8,
        "outlier": torch.where(torch.rand(x.shape) < 0.02, 1e5, x),
    }  # fmt: skip


@NORMAL
@pytest.mark.parametrize("case", degenerate())
def test_degenerate_sets_stay_finite(normal: bool, case: str) -> None:
    x = degenerate()[case].requires_grad_()
    layer = build("2d", normal, 16, group_size=16)
    out = layer(x)
    out.square().sum().backward()
    for tensor in (out, x.grad, *layer.buffers(), *(p.grad for p in layer.parameters())):
        assert tensor.isfinite().all()
    assert out.abs().max() < 100
    assert layer.eval()(x).isfinite().all()


@NORMAL
def test_nothing_finite_is_made_of_nan_and_nothing_raises(normal: bool) -> None:
    x = data((4, 12, 3, 3))
    x[0, 5, 0, 0] = torch.nan
    out = build("2d", normal)(x.requires_grad_())
    assert out[:, 4:8].isnan().all()
    assert out[:, [*range(4), *range(8, 12)]].isfinite().all()
    out.sum().backward()


def test_a_checkpoint_of_batch_norm_has_no_correlations() -> None:
    layer, source = build("2d", True, strength=0.6), randomise(nn.BatchNorm2d(12))
    layer(data((5, 12, 4, 3)))
    layer.load_state_dict(source.state_dict())
    assert layer.strength.item() == pytest.approx(0.6)
    expected = torch.diag_embed(torch.rsqrt(source.running_var + 1e-5).view(3, 4))
    assert torch.equal(layer.running_whitening, expected)
    assert torch.equal(layer.running_covariance, torch.diag_embed(source.running_var.view(3, 4)))


def test_singular_groups_that_turn_evaluate_as_they_train() -> None:
    """Behind a layer with fewer inputs than outputs, whose weights change from step to step."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 9, generator=generator)
    layer = build("1d", False, 16, group_size=16)
    for _ in range(60):
        weight = weight + 0.02 * torch.randn(16, 9, generator=generator)
        x = torch.randn(128, 9, generator=generator) @ weight.T
        trained = layer(x)
    evaluated = layer.eval()(x)
    assert evaluated.std() < 3 * trained.std()
