"""One place for an option: the signatures, the flags, the record and the checks all come from
it.
"""

import inspect
from contextlib import nullcontext
from typing import Any, get_args

import pytest
from torch import nn

import retrofit
from retrofit import UsageError
from retrofit.cli.convert import command
from retrofit.conversion_options import OPTIONS, ConversionOptions
from retrofit.layers.noise import NoiseKind
from retrofit.surgery import TARGETS

VALUES: dict[str, Any] = {
    "groups": 4, "group_channels": 4, "noise": 0.1, "noise_kind": "unscaled", "alpha": 0.5,
    "group_size": 4, "pn_params": False, "pn_restore": False, "ws": True, "calibrate": [],
}  # fmt: skip
"""A value of each that is in range."""


def test_each_option_is_a_keyword_a_flag_and_a_line_of_the_record() -> None:
    assert set(VALUES) == set(OPTIONS)
    flags = {option.name: option for option in command.params}
    plan = retrofit.plan(nn.Sequential(nn.BatchNorm2d(4)), "bnn")
    for name, known in OPTIONS.items():
        for function in (retrofit.plan, retrofit.convert):
            assert inspect.signature(function).parameters[name].default is None
            assert name in str(function.__doc__)
        assert f"--{name.replace('_', '-')}" in flags[name].opts
        assert (name in plan.options) is (known.kind != "batches")
    keywords = list(inspect.signature(retrofit.convert).parameters)
    settled = ["model", "to", "only", "skip", "source", "check", "input_size", "inputs", "strength"]
    assert keywords[: len(settled)] == settled
    assert OPTIONS["noise_kind"].words == get_args(NoiseKind)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_refused_where_it_means_nothing(name: str) -> None:
    options = ConversionOptions(**{name: VALUES[name]})
    for to in TARGETS:
        refused = pytest.raises(UsageError, match=f"`{name}` means nothing to this target")
        with nullcontext() if name in TARGETS[to].options else refused:
            options.check(TARGETS[to])


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("gn", {"groups": 0}, "`groups` must be a whole number of at least 1 or auto, not 0"),
        ("gn", {"groups": 2.5}, "`groups` must be a whole number of at least 1 or auto, not 2.5"),
        (
            "gn",
            {"groups": "many"},
            "`groups` must be a whole number of at least 1 or auto, not 'many'",
        ),
        ("gn", {"groups": True}, "`groups` must be a whole number"),
        ("gn", {"group_channels": 16, "groups": 8}, "`groups` and `group_channels` both say"),
        ("gn", {"groups": "auto"}, "measures on images; pass some with `calibrate`"),
        ("gn", {"pn_restore": False}, "`pn_restore` means nothing without ProxyNorm or `ws`"),
        ("bnn", {"noise": -1}, "`noise` must be a number of at least 0 or paper"),
        ("bnn", {"noise": float("nan")}, "`noise` must be a number of at least 0 or paper"),
        (
            "bnn",
            {"noise_kind": "none"},
            "`noise_kind` must be one of scaled, unscaled, gaussian-dropout",
        ),
        ("bnn", {"alpha": 1.5}, "`alpha` must be a number from 0 to 1, not 1.5"),
        ("bnn", {"alpha": "all"}, "`alpha` must be a number from 0 to 1, not 'all'"),
    ],
)
def test_out_of_range(to: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        retrofit.plan(nn.Sequential(nn.BatchNorm2d(4)), to, **options)


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(TypeError, match=r"no argument nois; see help\(retrofit.plan\)"):
        retrofit.convert(nn.Sequential(nn.BatchNorm2d(4)), "bnn", nois=0.1)  # type: ignore[call-arg]
