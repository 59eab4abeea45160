"""The Yeo-Johnson transform against scipy and autograd."""

import numpy as np
import pytest
import torch

from retrofit.layers import yeo_johnson
from retrofit.layers.yeo_johnson import lmbda_derivative
from tests.oracles import normality as oracle

LMBDAS = [-3.0, -1.0, -1e-6, 0.0, 1e-9, 1e-4, 0.4, 1.0, 1.6, 2 - 1e-5, 2.0, 2 + 1e-9, 3.3, 5.0]


@pytest.mark.parametrize("lmbda", LMBDAS)
def test_matches_scipy(lmbda: float) -> None:
    h = np.concatenate([np.linspace(-50, 50, 2001), [0.0, 1e-12, -1e-12]])
    ours = yeo_johnson(torch.tensor(h), torch.tensor(lmbda, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(ours, oracle.psi(h, lmbda), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lmbda", LMBDAS)
def test_gradients(lmbda: float) -> None:
    h = torch.tensor([-4.0, -0.7, -1e-3, 0.0, 2e-3, 0.3, 6.0], dtype=torch.float64, requires_grad=True)
    lam = torch.full_like(h, lmbda).requires_grad_()
    assert torch.autograd.gradcheck(yeo_johnson, (h, lam))
    assert torch.autograd.gradgradcheck(yeo_johnson, (h, lam))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identity_at_one(dtype: torch.dtype) -> None:
    h = torch.cat([torch.randn(10_000, dtype=dtype) * 3, torch.tensor([0.0, 1e-30, -1e-30, 1e4, -1e4], dtype=dtype)])
    out = yeo_johnson(h, torch.ones((), dtype=dtype))
    torch.testing.assert_close(out, h, rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_limits_and_nan() -> None:
    h = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    assert yeo_johnson(h, torch.tensor(1.0))[:2].tolist() == [torch.inf, -torch.inf]
    out = yeo_johnson(h, torch.tensor(-1.0))
    assert out[0] == 1.0
    assert out[1] == -torch.inf
    assert out[2].isnan()
    assert out[3] == 0.0


@pytest.mark.parametrize("u", [0.0, 1e-8, 1e-3, 0.3, 0.4999, 0.5001, 1.0, 5.0, -0.4999, -0.5001, -20.0])
def test_lmbda_derivative_has_no_cancellation(u: float) -> None:
    """Against the defining integral of x * exp(u * x), whose quadrature does not cancel."""
    from scipy.integrate import quad

    expected, _ = quad(lambda x: x * np.exp(u * x), 0, 1)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        at = torch.tensor(u, dtype=dtype)
        got = lmbda_derivative(at, torch.ones((), dtype=dtype), at.expm1()).item()
        assert got == pytest.approx(expected, rel=tolerance)
