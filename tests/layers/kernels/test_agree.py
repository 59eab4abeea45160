"""Every kernel choice against the paper's algorithm in float64, left to autograd, and against each
other.
"""

import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from retrofit.layers.kernels import VARIABLE, cpp
from retrofit.layers.normality_norm import Statistics, apply_statistics
from tests import oracles as oracle
from tests.layers.cases import EPS, MARKS, normality_norm, on


class Sets(
    NamedTuple
):  # a tensor, the dimensions of its normalized sets, and the shape of its affine parameters
    shape: tuple[int, ...]
    dim: tuple[int, ...]
    affine: tuple[int, ...]
    channels_last: bool = False

    @property
    def kept(self) -> tuple[int, ...]:  # one number a set
        return tuple(1 if d in self.dim else n for d, n in enumerate(self.shape))

    def input(
        self, dtype: torch.dtype
    ) -> Tensor:  # skewed and away from zero, so that lambda is far from 1
        x = numbers(self.shape, seed=2).mul(0.6).exp().add(2).to(dtype)
        if self.channels_last:  # also where the channels are split into groups, dimensions 1 and 2
            order = (0, *range(x.ndim - 2, x.ndim), *range(1, x.ndim - 2))
            x = x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])
        return x

    def given(
        self, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:  # gamma, beta, and the gradient of the output
        weight, bias = numbers((2, *self.affine), seed=3).float()
        return weight, bias, numbers(self.shape, seed=4).to(dtype)


SETS = {  # of every kind that geometry_of tells apart
    "batch": Sets((4, 6, 5, 7), (0, 2, 3), (1, 6, 1, 1)),
    "batch large": Sets((3, 5, 65, 33), (0, 2, 3), (1, 5, 1, 1)),
    "batch channels last": Sets((4, 6, 5, 7), (0, 2, 3), (1, 6, 1, 1), True),
    "batch channels last wide": Sets((4, 21, 5, 7), (0, 2, 3), (1, 21, 1, 1), True),
    "batch one channel": Sets((5, 1, 3, 3), (0, 2, 3), (1, 1, 1, 1)),
    "layer": Sets((3, 5, 44), (2,), (1, 1, 44)),
    "layer short": Sets((7, 3), (1,), (1, 3)),
    "layer channels first": Sets((3, 24, 3, 5), (1,), (1, 24, 1, 1)),
    "group": Sets((4, 2, 3, 9, 7), (2, 3, 4), (1, 2, 3, 1, 1)),
    "group channels last": Sets((3, 11, 3, 9, 7), (2, 3, 4), (1, 11, 3, 1, 1), True),
    "group channels last wide": Sets((2, 3, 20, 5, 7), (2, 3, 4), (1, 3, 20, 1, 1), True),
    "group flat": Sets((4, 2, 16), (2,), (1, 2, 16)),
    "instance": Sets((4, 6, 9, 7), (2, 3), (1, 6, 1, 1)),
    "instance channels last": Sets((4, 10, 9, 7), (2, 3), (1, 10, 1, 1), True),
}
# And more columns than a thread takes at once, and too long for what it keeps aside
OF_CPP = {**SETS, "many columns": Sets((2, 133, 47, 37), (0, 2, 3), (1, 133, 1, 1), True)}
FEW = {
    name: SETS[name]
    for name in ("batch", "batch channels last wide", "layer", "group channels last", "instance")
}
"""Stretches and columns, whole vectors and parts, affine parameters of a set and within one."""
ON_FEW = pytest.mark.parametrize("sets", FEW.values(), ids=FEW)
CPP = on("cpp", ids=["compiled"])


def each(**of: dict[str, Sets]) -> pytest.MarkDecorator:
    """Run a test for these kernels on these sets; what is eager does not depend on how sets lie."""
    cases = [
        pytest.param(kernels, sets, marks=MARKS[kernels], id=f"{kernels}-{name}")
        for kernels, named in of.items()
        for name, sets in named.items()
    ]
    return pytest.mark.parametrize(("kernels", "sets"), cases, indirect=["kernels"])


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device())


def device() -> str:  # Triton's kernels run on the GPU, or in their interpreter on the CPU
    return (
        "cuda"
        if os.environ.get(VARIABLE) == "triton" and os.environ.get("TRITON_INTERPRET") != "1"
        else "cpu"
    )


def leaves_of(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    return {
        name: leaf.requires_grad_() for name, leaf in (("x", x), ("weight", weight), ("bias", bias))
    }


def pulled(out: Tensor, grad: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run backward; the output and the gradients by name."""
    out.backward(grad)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def run(sets: Sets, dtype: torch.dtype, noise: float = 0.0) -> tuple[dict[str, Tensor], Statistics]:
    weight, bias, grad = sets.given(dtype)
    leaves = leaves_of(sets.input(dtype), weight, bias)
    torch.manual_seed(5)
    out, statistics = normality_norm(
        *leaves.values(), dim=sets.dim, eps=EPS, strength=0.8, noise=noise
    )
    return pulled(out, grad, leaves), statistics


def expected(sets: Sets, dtype: torch.dtype) -> dict[str, Tensor]:
    """The oracle's answer for the very numbers that `run` sees in `dtype`."""
    weight, bias, grad = (given.double() for given in sets.given(dtype))
    leaves = leaves_of(sets.input(dtype).double(), weight, bias)
    return pulled(oracle.normality_norm(*leaves.values(), sets.dim, EPS, 0.8), grad, leaves)


def assert_near(got: dict[str, Tensor], wanted: dict[str, Tensor], out: float, grad: float) -> None:
    """Compare relative to each tensor's largest entry."""
    for name, reference in wanted.items():
        scale = reference.abs().max().clamp_min(1.0 if name == "out" else 0.0).item()
        difference = (got[name].double() - reference).abs().max().item()
        assert difference <= (out if name == "out" else grad) * scale, (
            f"{name}: {difference / scale:.1e}"
        )


@each(eager=FEW, cpp=OF_CPP, triton=SETS)
@pytest.mark.parametrize(
    ("dtype", "out", "grad"),
    [
        *((torch.float16, 2e-3, 2e-3), (torch.bfloat16, 1e-2, 1e-2)),
        *((torch.float32, 1e-5, 1e-4), (torch.float64, 1e-6, 1e-5)),
    ],
)
def test_the_paper(
    sets: Sets, dtype: torch.dtype, out: float, grad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype in cpp.TYPES:
        monkeypatch.setattr(cpp, "eager", None)  # which compiled kernels hand nothing to in silence
    got, statistics = run(sets, dtype)
    assert got["out"].dtype == got["x"].dtype == dtype
    assert_near(got, expected(sets, dtype), out, grad)
    x = sets.input(dtype).double()
    mean = x.mean(sets.dim, keepdim=True)
    var = ((x - mean) ** 2).mean(sets.dim, keepdim=True)
    lmbda = oracle.newton_estimate((x - mean) / (var + EPS).sqrt(), sets.dim)
    for statistic, wanted in zip(statistics[:3], (mean, var, lmbda), strict=True):
        torch.testing.assert_close(statistic.double(), wanted, rtol=1e-4, atol=1e-5)


@each(eager=FEW, triton=SETS)
def test_noise_is_brought_back_in_gammas_gradient_and_changes_no_other(sets: Sets) -> None:
    """With gamma 1 and beta 0 the output is what gamma multiplies, so its gradient is sum(g *
    out).
    """
    grads = []
    for noise in (0.0, 0.5):
        x = sets.input(torch.float32).requires_grad_()
        weight = torch.ones(sets.affine, device=x.device, requires_grad=True)
        out, _ = normality_norm(x, weight, None, dim=sets.dim, eps=EPS, noise=noise)
        g = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out)
        out.backward(g)
        torch.testing.assert_close(
            weight.grad, (g * out.detach()).sum_to_size(sets.affine), rtol=1e-4, atol=1e-4
        )
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@each(
    **{
        kernels: {name: sets for name, sets in SETS.items() if name.startswith("batch")}
        for kernels in MARKS
    }
)
def test_given_statistics(sets: Sets) -> None:
    x, (weight, bias, _) = sets.input(torch.float32), sets.given(torch.float32)
    ends = (1, 3), (0.5, 2), (-0.9, 2.9)  # mean, variance, lambda
    given = [torch.linspace(*pair, weight.numel(), device=x.device) for pair in ends]
    given += [weight.flatten(), bias.flatten()]
    with torch.no_grad():
        got = apply_statistics(x, *given, EPS)
    mean, var, lam, w, b = (s.double().view(sets.kept) for s in given)
    wanted = oracle.power_transform((x.double() - mean) / (var + EPS).sqrt(), lam) * w + b
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@on(*MARKS)
def test_what_overflows_is_not_finite() -> None:
    """In evaluation nothing bounds a normalized value. Triton has NaN where others have infinity."""
    extremes = [torch.inf, -torch.inf, torch.nan, 1e25, -1e25, 1e36, -1e36]
    powers = torch.tensor([-0.5, 0.3, 0.9, 1.3, 2.4], device=device())
    h = torch.tensor(extremes, device=device()).view(-1, 1).expand(-1, 5).contiguous()
    zero = torch.zeros_like(powers)
    got = apply_statistics(h, zero, zero + 1, powers, None, None, 0.0)
    wanted = oracle.power_transform(h.double(), powers.double()).float()
    finite = got.isfinite()
    torch.testing.assert_close(got[finite], wanted[finite], rtol=2e-5, atol=0)
    of_finite = h.isfinite()
    assert torch.equal(finite[of_finite], wanted.isfinite()[of_finite])


@on(*MARKS)
@pytest.mark.parametrize("centre", [0.0, 2.0])
def test_given_lambda_at_and_beside_its_singular_points(centre: float) -> None:
    offsets = [0.0, 1e-9, -1e-9, 1e-7, -1e-7, 1e-5, -1e-5, 2e-4, -2e-4, 4.9e-4, -4.9e-4, 6e-4]
    lmbda = torch.tensor(
        [centre + offset for offset in offsets], dtype=torch.float32, device=device()
    )
    h = torch.linspace(-6, 9, 41, device=device()).view(-1, 1).expand(41, len(offsets)).contiguous()
    zero = torch.zeros_like(lmbda)
    got = apply_statistics(h, zero, zero + 1, lmbda, None, None, 0.0)
    columns = [
        oracle.psi(h[:, i].double().cpu().numpy(), value) for i, value in enumerate(lmbda.tolist())
    ]
    torch.testing.assert_close(
        got.cpu().double(), torch.tensor(np.stack(columns, 1)), rtol=2e-6, atol=1e-6
    )


@on(*MARKS)
@pytest.mark.parametrize("lmbda", [1e-5, 2 + 3e-4])
def test_estimated_lambda_beside_its_singular_points(lmbda: float) -> None:
    """At the strength for which one set has this lambda."""
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float32).exp()
    exact = x.double()
    h = (exact - exact.mean()) / (exact.var(correction=0) + EPS).sqrt()
    t = ((lmbda - 1) / (oracle.newton_estimate(h, (0, 1)) - 1)).item()
    leaf, exact_leaf = x.to(device()).requires_grad_(), exact.requires_grad_()
    out, _ = normality_norm(leaf, None, None, dim=(0, 1), eps=EPS, strength=t)
    wanted = oracle.normality_norm(exact_leaf, None, None, (0, 1), EPS, t)
    for each in (out, wanted):
        each.backward(
            torch.linspace(-1, 2, x.numel(), dtype=each.dtype, device=each.device).view_as(each)
        )
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(leaf.grad.cpu().double(), exact_leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sets", OF_CPP.values(), ids=OF_CPP)
@pytest.mark.compiler
def test_the_noise_is_the_same_whichever_kernels_run(
    sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for kernels in ("eager", "cpp"):
        monkeypatch.setenv(VARIABLE, kernels)
        results.append(run(sets, torch.float32, noise=0.5)[0])
    assert_near(
        results[1],
        {name: value.double() for name, value in results[0].items()},
        out=1e-4,
        grad=1e-4,
    )


@CPP
@ON_FEW
def test_results_repeat_to_the_bit_with_any_number_of_threads(
    sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp, "_SINGLE_THREADED", 0)
    torch.set_num_threads(2)
    first, second = (run(sets, torch.float32)[0] for _ in range(2))
    for key, value in first.items():
        assert torch.equal(value, second[key])
    assert_near(first, expected(sets, torch.float32), out=1e-5, grad=1e-4)


@CPP
@pytest.mark.parametrize(
    "sets", [SETS[name] for name in ("batch", "batch channels last wide", "group channels last")]
)
@pytest.mark.parametrize(
    "values", [(1e4,), (-torch.inf,), (torch.inf, -torch.inf), (torch.nan,)], ids=str
)
def test_a_first_value_that_is_far_out(sets: Sets, values: tuple[float, ...]) -> None:
    """The moments are taken about it where it is finite."""
    x = sets.input(torch.float32)
    for place, value in zip((0, -1), values, strict=False):
        x[tuple(place if d in sets.dim else slice(None) for d in range(x.ndim))] = value
    _, statistics = normality_norm(x, None, None, dim=sets.dim, eps=EPS)
    mean = x.double().mean(sets.dim, keepdim=True)
    var = (x.double() - mean).square().mean(sets.dim, keepdim=True)
    torch.testing.assert_close(statistics.mean.double(), mean, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(statistics.var.double(), var, rtol=1e-5, atol=1e-5, equal_nan=True)
