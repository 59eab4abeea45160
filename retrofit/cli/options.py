"""Options that several commands share: which network, with which weights, and which of its layers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import click

from retrofit.cli import completion
from retrofit.conversion_options import CONVERTERS, OPTIONS, Option

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


class NumberOr(click.ParamType):
    """A number, or one word."""

    def __init__(self, kind: type[int] | type[float], word: str) -> None:
        """Name the type by its metavar."""
        self.kind, self.word = kind, word
        self.name = f"{'N' if kind is int else 'F'}|{word}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Return the number or the word."""
        if value == self.word or isinstance(value, self.kind):
            return value
        try:
            return self.kind(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {self.word}", param, ctx)


class Share(click.ParamType):
    """A number, or a fraction such as 4/255."""

    name = "N/255"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, which lies above 0 and up to 1."""
        try:
            number = float(Fraction(value))
        except (ValueError, ZeroDivisionError, OverflowError):
            number = 0.0
        if not 0 < number <= 1:
            self.fail(f"{value!r} is no number above 0 and up to 1, such as 4/255", param, ctx)
        return number


def _stacked(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _conversion_option(name: str, known: Option) -> Callable[[Command], Command]:
    """The flag of an option of a conversion."""
    first = f"--{name.replace('_', '-')}"
    text = f"{known.help.replace('_', '-')} Targets: {', '.join(known.targets)}."
    if known.kind is bool:
        form = first if known.switch else f"{first}/--no-{first[2:]}"
        return click.option(form, name, is_flag=True, default=None, help=text)
    if known.kind == "batches":
        return click.option(first, name, type=click.Path(), metavar="DIR", help=text)
    if known.kind is str:
        return click.option(first, name, type=click.Choice(known.words), help=text)
    kind: Any = NumberOr(known.kind, known.words[0]) if known.words else known.kind
    metavar = kind.name if known.words else "N" if known.kind is int else "F"
    return click.option(first, name, type=kind, metavar=metavar, help=text)


def _dictionary(
    _ctx: click.Context, _param: click.Parameter, pairs: tuple[tuple[str, Any], ...]
) -> dict[str, Any] | None:
    return dict(pairs) or None


def _or_none(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> list[str] | None:
    return list(values) or None


model_argument = click.argument("model", metavar="MODEL", shell_complete=completion.model)

target_completion = completion.one_of(CONVERTERS)

network_option = click.option(
    "--network",
    metavar="py:MODULE:CALLABLE",
    help="What builds the network that an artifact of your own network holds.",
)

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
    network_option,
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
    click.option(
        "--checkpoint-key",
        metavar="NAME",
        help="Which weights of a checkpoint with several: model_ema, state_dict, ..., or a prefix of names.",
    ),
    click.option(
        "--checkpoint-partial",
        is_flag=True,
        help="Take what fits of a checkpoint: say what is left random and what is left out.",
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
        shell_complete=completion.one_of(completion.FAMILIES),
        help=f"Convert layers of this family ({', '.join(completion.FAMILIES)}), not the target's own; repeatable.",
    ),
    click.option(
        "--only", multiple=True, callback=_or_none, metavar="REGEX", help="Convert only layers so named; repeatable."
    ),
    click.option("--skip", multiple=True, callback=_or_none, metavar="REGEX", help="Keep layers so named; repeatable."),
    *(_conversion_option(name, known) for name, known in OPTIONS.items()),
)

attack_options = _stacked(
    click.option("--attack", type=click.Choice(["fgsm", "pgd"]), help="Also count what stays right under attack."),
    click.option("--eps", type=Share(), help="Largest change of a pixel, of an image from 0 to 1 (default: 4/255)."),
)

inputs_option = click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Example inputs of a network that takes no single image: a .safetensors file, its tensors named by argument.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")


def take_plan_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove and return what `plan_options` gathered: arguments of `retrofit.surgery.plan`, calibrate still a path."""
    names = ("source", "only", "skip", *OPTIONS)
    return {name: options.pop(name) for name in names}
