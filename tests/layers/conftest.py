"""The kernels that a test runs on: by `on` of cases.py those that it names."""

import pytest

from retrofit.layers.kernels import VARIABLE


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(request, "param"):
        monkeypatch.setenv(VARIABLE, request.param)
