"""Lines are the best ones where the data is, sane where there is none, and what a runtime sees is what was fitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

import retrofit
from retrofit.export.approximation.calibration import gaussian
from retrofit.export.approximation.fit import LayerFunction
from retrofit.export.approximation.lines import LineFitter
from tests.export.approximation.test_polynomial import LMBDA, Folded, channels, network, plain, rms, truth


@pytest.mark.parametrize("high", [None, float("inf"), 1.5])
@pytest.mark.parametrize("beta", [-0.5, 0.0, 0.7])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_fit(size: int, beta: float, high: float | None) -> None:
    found = channels(LMBDA[2:-2], beta=beta)
    data = gaussian(len(found.lmbda))
    target = LayerFunction(found, data, high)
    fit = LineFitter(target).fit(size)
    expected, values = truth(found, data.h), fit(data.h)
    if high is not None:
        expected, values = expected.clamp(0, high), values.clamp(0, high)
    error = (values - expected) / target.scale
    assert (fit.form, fit.size, fit.has_activation) == ("lines", size, False)
    assert fit.rms_error == pytest.approx(rms(error, data), rel=1e-6)
    assert fit.max_error == pytest.approx(float(error[:, : data.seen].abs().max()), rel=1e-6)
    assert fit.rms_error < 0.4 / size**2


@pytest.mark.parametrize("high", [None, 6.0])
def test_more_lines_are_better(high: float | None) -> None:
    fitter = LineFitter(LayerFunction(channels(), gaussian(8), high))
    errors = [fitter.fit(size).rms_error for size in range(2, 9)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("lmbda", [-0.5, 0.4, 1.5, 2.4])
def test_no_other_two_or_three_lines_are_better(lmbda: float) -> None:
    found = channels(torch.tensor([lmbda]))
    h = gaussian(1).h
    expected = truth(found, h)[0].numpy()

    def error(wanted: np.ndarray) -> float:
        """Of the best function with given divisions."""
        columns = [np.ones(h.shape[1]), h[0].numpy(), *(np.maximum(h[0].numpy() - t, 0) for t in wanted)]
        a = np.stack(columns, 1)
        return float(np.sqrt(np.mean((a @ np.linalg.lstsq(a, expected, rcond=None)[0] - expected) ** 2)))

    for divisions in (1, 2):
        starts = [np.array(start[:divisions]) for start in ((-1.0, 1.0), (0.0, 1.5), (-2.0, 0.0), (1.0, 2.0))]
        best = min(minimize(error, start, method="Nelder-Mead").fun for start in starts)
        fit = LineFitter(LayerFunction(found, plain(h), None)).fit(divisions + 1)
        ours = float((fit(h)[0] - torch.from_numpy(expected)).square().mean().sqrt())
        assert ours < 1.05 * best


@example(lmbda=-1.0, gamma=1.0, beta=-1.0, spread=15.0, high=6.0, size=8)  # never above 0, from -37,000 to -0.02
@given(
    st.floats(-3, 4),
    st.floats(1e-3, 3),
    st.floats(-8, 8),
    st.floats(0.05, 20),
    st.sampled_from([None, 6.0, float("inf")]),
    st.integers(2, 8),
)
def test_monotone_and_near_whatever_the_channel(
    lmbda: float, gamma: float, beta: float, spread: float, high: float | None, size: int
) -> None:
    found = channels(torch.tensor([lmbda, 1.0]), gamma, beta)
    generator = torch.Generator().manual_seed(0)
    h = spread * torch.randn(2, 500, generator=generator, dtype=torch.float64)
    target = LayerFunction(found, plain(h), high)
    fit = LineFitter(target).fit(size)
    wide = torch.linspace(float(h.min()) - 5, float(h.max()) + 5, 300, dtype=torch.float64).expand(2, -1)
    assert fit(wide).isfinite().all()
    rise = fit(wide).diff(dim=1)
    assert (rise >= -1e-5 * fit(wide).abs().max()).all()
    values = fit(h) if high is None else fit(h).clamp(0, high)
    error = (values - target.values).square().mean(1).sqrt()
    line = target.affine()(h)
    flat = ((line if high is None else line.clamp(0, high)) - target.values).square().mean(1).sqrt()
    assert error[0] <= 1.1 * flat[0] + 1e-4 * target.values.abs().max()
    assert error[1] <= 1e-4 * (1 + wide.abs().max() * gamma)


@pytest.mark.parametrize("high", [None, float("inf"), 6.0])
@pytest.mark.parametrize(("gamma", "beta"), [(0.0, 1.0), (0.0, 0.0), (0.5, -9.0), (0.5, 20.0)])
def test_channels_that_are_constant_behind_the_relu(gamma: float, beta: float, high: float | None) -> None:
    found = channels(torch.full((3,), 0.5), gamma, beta)
    data = gaussian(3)
    target = LayerFunction(found, data, high)
    values = LineFitter(target).fit(4)(target.h)
    values = values if high is None else values.clamp(0, high)
    assert (values - target.values)[:, : data.seen].abs().max() < 0.15


@pytest.mark.parametrize("size", [2, 5])
def test_no_data_between_the_limits_of_a_relu6(size: int) -> None:
    found = channels(torch.tensor([1.25, 0.4, 1.0]), 2.2, -1.0)
    h = torch.cat([torch.linspace(-2, -0.5, 50), torch.linspace(15, 17, 5)]).double().expand(3, -1)
    target = LayerFunction(found, plain(h), 6.0)
    fit = LineFitter(target).fit(size)
    torch.testing.assert_close(fit(h).clamp(0, 6), target.values, rtol=0, atol=1e-4)
    assert fit(torch.linspace(-3, 20, 100, dtype=torch.float64).expand(3, -1)).isfinite().all()


def test_network_within_tolerance_keeps_its_activation() -> None:
    images = list(torch.randn(3, 8, 4, 9, 9))
    for act, kind in ((nn.ReLU(), "relu"), (nn.ReLU6(), "hardtanh"), (nn.SiLU(), "silu")):
        model = network(0.2, 1.8, act)
        folded = Folded(model, images, runtime="openvino", degree=4)
        assert (folded.layers, folded.degrees) == ({"1": "lines"}, [4])
        assert kind in {node.name for node in folded.model.graph.nodes}
        for tolerance in (0.1, 0.02):
            folded = Folded(model, images, runtime="openvino", tolerance=tolerance)
            with torch.no_grad():
                expected, found = model(torch.cat(images)), folded.model(torch.cat(images))
            assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_exported_lines_are_prelus(tmp_path: Any) -> None:
    images, model = list(torch.randn(3, 8, 4, 9, 9)), network(0.2, 1.8, nn.ReLU())
    report = retrofit.export_onnx(
        model,
        tmp_path / "lines.onnx",
        "poly",
        (4, 9, 9),
        runtime="openvino",
        degree=3,
        tolerance=0.5,
        calibrate=images,
    )
    assert report.nodes["PRelu"] == 2
    assert set(report.nodes) == {"Conv", "PRelu", "Add", "Relu"}
