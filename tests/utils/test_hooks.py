"""Hooks are gone when the body ends, however it ends."""

from __future__ import annotations

import pytest
from torch import nn

from retrofit.utils.hooks import hooked


def test_hooks_are_called_within_and_gone_after() -> None:
    layer, called = nn.Identity(), []
    with hooked([layer.register_forward_hook(lambda *_: called.append("within"))]):
        layer(1)
    layer(2)
    assert called == ["within"]


def test_those_that_were_registered_before_one_that_cannot_be_are_gone_too() -> None:
    layer, none = nn.Identity(), None
    with pytest.raises(AttributeError):
        hooked(one.register_forward_hook(lambda *_: None) for one in (layer, none)).__enter__()  # type: ignore[union-attr]
    assert not layer._forward_hooks


def test_hooks_are_gone_after_a_failure() -> None:
    layer = nn.Identity()
    with pytest.raises(RuntimeError, match="amid"), hooked([layer.register_forward_hook(_fail)]):
        layer(1)
    assert not layer._forward_hooks


def _fail(*_: object) -> None:
    raise RuntimeError("amid")
