"""Tests of the Triton kernels in Triton's interpreter, which test_triton.py runs in a process of their own."""

import pytest
import torch

from retrofit.layers.kernels import VARIABLE
from tests.layers.kernels.test_agree import Sets, run

TINY = {  # the interpreter takes about a second a program
    "batch": Sets((3, 2, 3, 3), (0, 2, 3), (1, 2, 1, 1)),
    "columns": Sets((9, 5), (0,), (1, 5)),
    "layer": Sets((2, 9), (1,), (1, 9)),
    "group": Sets((1, 2, 3, 3, 3), (2, 3, 4), (1, 2, 3, 1, 1)),
}


@pytest.mark.parametrize(("name", "shared"), [*((name, False) for name in TINY), ("batch", True), ("columns", True)])
def test_interpreted_briefly(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, outputs and gradients, with one program a set and with sets that several share."""
    from retrofit.layers.kernels import triton

    if shared:
        monkeypatch.setattr(triton, "_programs", lambda device: 100)
        monkeypatch.setattr(triton, "_TILE", 4 * (triton._COLUMNS if name == "columns" else 1))
        monkeypatch.setattr(triton, "_ROUNDS", 1)
    monkeypatch.setenv(VARIABLE, "triton")
    got, _ = run(TINY[name], torch.float32, noise=0.5)
    monkeypatch.setenv(VARIABLE, "eager")
    for key, wanted in run(TINY[name], torch.float32, noise=0.5)[0].items():
        torch.testing.assert_close(got[key], wanted, rtol=1e-4, atol=1e-5)
