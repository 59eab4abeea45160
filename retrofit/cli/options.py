"""Options that several commands share: which network, with which weights, and which of its layers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


class KeyValue(click.ParamType):
    """`key=value` with a Python literal as value, or else a string: timm's --model-kwargs, one pair a flag."""

    name = "K=V"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Split the pair and read its value."""
        if isinstance(value, tuple):
            return value
        key, separator, text = str(value).partition("=")
        if not separator or not key.isidentifier():
            self.fail(f"{value!r} is not of the form key=value", param, ctx)
        try:
            return key, ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return key, text


class Groups(click.ParamType):
    """A number of groups, or "auto"."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number or the word."""
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor auto", param, ctx)


def _stacked(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _dictionary(
    _ctx: click.Context, _param: click.Parameter, pairs: tuple[tuple[str, Any], ...]
) -> dict[str, Any] | None:
    return dict(pairs) or None


def _or_none(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    return list(values) or None


model_argument = click.argument("model", metavar="MODEL")

architecture_options = _stacked(
    click.option("--num-classes", type=click.IntRange(min=0), metavar="N", help="Outputs of the classifier."),
    click.option("--in-chans", type=click.IntRange(min=1), metavar="N", help="Channels of the images."),
    click.option("--img-size", type=click.IntRange(min=1), metavar="N", help="Side of the images in pixels."),
    click.option(
        "--model-kwargs",
        type=KeyValue(),
        multiple=True,
        callback=_dictionary,
        help="Argument of the model's constructor; repeatable.",
    ),
)

weights_options = _stacked(
    click.option("--pretrained", is_flag=True, help="Fetch the library's pretrained weights (default: random)."),
    click.option(
        "--checkpoint", type=click.Path(path_type=Path), metavar="FILE", help="Load .safetensors, .pth, .pt or .bin."
    ),
    click.option(
        "--match",
        type=click.Choice(["name", "order"]),
        help="Pair the checkpoint's tensors by name (default) or by order and shape.",
    ),
)

data_options = _stacked(
    click.option("--data-dir", metavar="DIR", help="Folder or .tar with one folder a class."),
    click.option("--dataset", default="", metavar="NAME", help='timm\'s dataset name, or "digits", which is built in.'),
    click.option("--split", default="validation", metavar="NAME", help="Part of the data (default: validation)."),
    click.option(
        "--class-map", type=click.Path(path_type=Path), metavar="FILE", help="Class names in the order of the outputs."
    ),
)

plan_options = _stacked(
    click.option(
        "--from",
        "source",
        multiple=True,
        callback=_or_none,
        metavar="FAMILY",
        help="Convert layers of this family (bn, ln, gn, in) instead of the target's own; repeatable.",
    ),
    click.option(
        "--only", multiple=True, callback=_or_none, metavar="REGEX", help="Convert only layers so named; repeatable."
    ),
    click.option("--skip", multiple=True, callback=_or_none, metavar="REGEX", help="Keep layers so named; repeatable."),
    click.option(
        "--groups",
        type=Groups(),
        metavar="N|auto",
        help="Most groups a layer gets (gn targets; default: 8), or auto: as many as keep its output. evonorm-s0: 32.",
    ),
    click.option("--noise", type=float, metavar="F", help="Noise in training (normality targets; 0: none)."),
    click.option(
        "--noise-kind",
        type=click.Choice(["scaled", "unscaled", "gaussian-dropout"]),
        help="Kind of that noise (same; default: scaled, the paper's).",
    ),
    click.option(
        "--alpha", type=float, metavar="F", help="Degree of gaussianization (same; default: 1; 0: no transform)."
    ),
    click.option(
        "--newton-steps", type=int, metavar="N", help="Newton iterations of the lambda estimate (same; default: 1)."
    ),
    click.option("--group-size", type=int, metavar="N", help="Most channels whitened together (dbn, dbnn; 16)."),
    click.option(
        "--whitening",
        type=click.Choice(["eigen", "newton-schulz"]),
        help="Exact roots of covariances, or IterNorm's (same; eigen).",
    ),
    click.option("--pn-params/--no-pn-params", default=None, help="Learn ProxyNorm's parameters (-pn targets; yes)."),
    click.option(
        "--pn-restore/--no-pn-restore",
        default=None,
        help="Keep the scale the next layer was trained for (same, --ws; yes).",
    ),
    click.option("--ws", is_flag=True, default=None, help="Standardize convolution weights too (gn, ln targets)."),
    click.option(
        "--calibrate",
        type=click.Path(),
        metavar="DIR",
        help="Images to measure on: for --groups auto, and how often the predictions stay the same at strength 1.",
    ),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")


def take_plan_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove and return what `plan_options` gathered: arguments of `retrofit.surgery.plan`, calibrate still a path."""
    names = (
        "source",
        "only",
        "skip",
        "groups",
        "noise",
        "noise_kind",
        "alpha",
        "newton_steps",
        "group_size",
        "whitening",
        "pn_params",
        "pn_restore",
        "ws",
        "calibrate",
    )
    return {name: options.pop(name) for name in names}
