"""Options that several commands share; an option is named after the Python argument that it sets.

Importing this imports no torch: `--help` and shell completion respond at once.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from retrofit.cli.console import in_flags, literal
from retrofit.conversion_options import OPTIONS
from retrofit.errors import RetrofitError, UsageError
from retrofit.registry import FAMILIES, Option, load_plugins, targets_of
from retrofit.utils.text import with_class

# The flags below are those of installed packages' targets too.
load_plugins()

Decorator = Callable[[Any], Any]

GROUPS = {
    "data_dir": "Images",
    "pretrained": "Weights",
    "source": "Which layers",
    "groups": "Settings for specific targets",
    "num_classes": "The network",
    "force": "Output",
    "json": "Output",
}
"""The first option of each group of the help, where a command's options are those below."""

MODEL = (
    "timm name, tv:NAME, hf-hub:ID, local-dir:DIR, py:MODULE:CALLABLE (your own), or a retrofit "
    ".safetensors file."
)

_METAVARS = {
    "integer": "N",
    "integer range": "N",
    "float": "F",
    "float range": "F",
    "path": "FILE",
    "text": "NAME",
}

# Typed characters from which names of networks are worth the seconds that importing timm takes
_ENOUGH = 2


class Command(click.Command):
    """A command whose errors name its own flags."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RetrofitError as error:
            error.args = (in_flags(str(error)),)
            raise


class Grouped(Command):
    """A command whose help shows its options in groups; `groups` names the first option of each."""

    def __init__(self, *args: Any, groups: Mapping[str, str], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what MODEL may be, and each group under its title."""
        title = "Options"
        listed = {"Argument": [("MODEL", MODEL)]}
        for parameter in self.get_params(ctx):
            title = self.groups.get(parameter.name or "", title)
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                listed.setdefault(title, []).append(record)
        for name, records in listed.items():
            with formatter.section(name):
                formatter.write_dl(records)


def refuse_flags(reason: str, *, but: Collection[str]) -> None:
    """Raise UsageError if anything other than the named arguments was typed: flags, or MODEL."""
    context = click.get_current_context()
    refused = [
        parameter.opts[-1]
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        and parameter.name not in but
    ]
    if refused:
        raise UsageError(f"{reason}; drop {', '.join(refused)}")


def complete_model(
    _ctx: click.Context, _param: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Complete files and, once a few characters are typed, the networks of timm or, after tv:,
    torchvision.
    """
    known: Iterable[str] = ()
    if typed.startswith("tv:"):
        from torchvision.models import list_models

        names = list_models()
        known = (f"tv:{name}" for name in names)
    elif len(typed) >= _ENOUGH and "/" not in typed:
        from timm import list_models as timm_models

        known = timm_models(f"{typed}*")
    return completed(known, typed)


def completed(words: Iterable[str], typed: str) -> list[CompletionItem]:
    """Complete files and some words."""
    items = [CompletionItem(word) for word in words if word.startswith(typed)]
    return [*items, CompletionItem(typed, type="file")]


def _key_value(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise click.BadParameter(f"{text!r} is not of the form key=value")
    return key, literal(value)


def _fraction(text: str) -> float:
    try:
        return float(Fraction(text))
    except (ValueError, ArithmeticError):
        raise click.BadParameter(f"{text!r} is no number such as 4/255") from None


def _inputs(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Any:
    """Read tensors named as a network's arguments from a safetensors file."""
    if path is None:
        return None
    from safetensors.torch import load_file

    from retrofit.utils.files import ensure_readable

    advice = "write them with safetensors, named as the arguments of the network's `forward`"
    file = ensure_readable(path, "file of example inputs", advice=advice)
    try:
        return load_file(file)
    # A damaged file, or a shape that torch does not have, raises almost anything.
    except Exception as error:
        raise RetrofitError(
            f"{path} holds no example inputs ({with_class(error)}); {advice}"
        ) from error


def option(flags: str, help: str, kind: Any = str, **rest: Any) -> Decorator:
    """Make an option; its help ends in the default.

    Args:
        flags: The flags, and the name of the argument that they set if that is another.
        help: The help.
        kind: bool for a switch, a tuple of words, Path, a click type, or a function from text to a
            value.
        **rest: Arguments of `click.option`.
    """
    if rest.get("default") not in (None, ""):
        help = f"{help.rstrip('.')} (default: {rest['default']})."
    if isinstance(kind, tuple):
        kind = click.Choice(kind)
    taken = click.types.convert_type(click.Path(path_type=Path) if kind is Path else kind)
    rest = {"metavar": _METAVARS.get(taken.name), "is_flag": kind is bool or None, **rest}
    return click.option(*flags.split(), type=taken, help=help, **rest)


def _stacked(*options: Decorator) -> Decorator:
    def decorate(function: Any) -> Any:
        for decorator in reversed(options):
            function = decorator(function)
        return function

    return decorate


def flag_of(name: str) -> str:
    """Return the flag that sets an argument: "--data-dir" for data_dir."""
    return f"--{name.replace('_', '-')}"


def _conversion_option(name: str, known: Option) -> Decorator:
    """Make the flag for a conversion option, whose value is checked with the others."""
    flag = flag_of(name)
    text = re.sub("`(.*?)`", r"--\1", known.help)
    targets = ", ".join(targets_of(name))
    text += f" Targets: {targets}."
    if known.kind is bool:
        if not known.switch:
            off = flag_of(f"no_{name}")
            flag = f"{flag}/{off}"
        return option(flag, text, bool, default=None)
    if known.kind == "batches":
        return option(flag, text, click.Path(), metavar="DIR")
    if known.kind is str:
        return option(flag, text, known.words)
    number = {int: "N", float: "F"}[known.kind]
    metavar = "|".join([number, *known.words])
    return option(flag, text, literal, metavar=metavar)


def command(name: str, help: str, **groups: str) -> Callable[[Any], Grouped]:
    """Make a command whose help has the groups of options below, and `groups`: title by first
    option.
    """
    return click.command(name, cls=Grouped, groups=GROUPS | groups, help=help)


def against(help: str) -> Decorator:
    return option("--against", help, metavar="MODEL", shell_complete=complete_model)


RUNTIMES = ("onnxruntime", "openvino")
model = click.argument("MODEL", shell_complete=complete_model)
device = option("--device", "Device to run on (default: cuda if available, else cpu).")
runtime = option("--runtime", "Runtime for exported .onnx files (default: onnxruntime).", RUNTIMES)
force = option("--force", "Overwrite existing output.", bool)
json = option(
    "--json",
    "Write one JSON object to stdout.",
    bool,
    expose_value=False,
    callback=lambda context, _param, value: context.meta.update(json=value),
)
inputs = option(
    "--inputs",
    "Example inputs for a network whose input is not one image: a .safetensors file with tensors "
    "named by argument.",
    Path,
    callback=_inputs,
)
network = option(
    "--network",
    "Function that builds your own network, if MODEL was converted from it.",
    metavar="py:MODULE:CALLABLE",
)

architecture = _stacked(
    option("--num-classes", "Number of classifier outputs.", click.IntRange(0)),
    option("--in-chans", "Number of image channels.", click.IntRange(1)),
    option("--img-size", "Image height and width in pixels.", click.IntRange(1)),
    option(
        "--model-kwargs",
        "Argument for the model's constructor; repeatable.",
        _key_value,
        multiple=True,
        callback=lambda _ctx, _param, pairs: dict(pairs) or None,
        metavar="K=V",
    ),
    network,
)

weights = _stacked(
    option("--pretrained", "Fetch the library's pretrained weights (default: random).", bool),
    option("--checkpoint", "Load weights from a .safetensors, .pth, .pt or .bin file.", Path),
    option(
        "--match",
        "Pair its tensors by name, or by order and shape (default: name).",
        ("name", "order"),
    ),
    option(
        "--checkpoint-key",
        "Which weights, if it holds several: model_ema, state_dict, ..., or a name prefix.",
    ),
    option(
        "--checkpoint-partial",
        "Load the tensors that fit; list those left random or left out.",
        bool,
    ),
)

data = _stacked(
    option("--data-dir", "Folder or .tar with a folder per class, or with splits.", metavar="DIR"),
    option("--dataset", 'timm dataset name, or "digits", which is built in.', default=""),
    option("--split", "Split to use, such as test.", default="validation"),
    option("--class-map", "Class names in the order of the outputs.", Path),
)

precision = _stacked(
    device,
    option("--amp", "Use mixed precision.", bool),
    option(
        "--amp-dtype",
        "Data type for --amp (default: float16; bfloat16 on cpu).",
        ("float16", "bfloat16"),
    ),
    option("--channels-last", "Use the channels-last memory format.", bool),
)

plan = _stacked(
    option(
        "--from source",
        f"Family to convert ({', '.join(FAMILIES)}; default: the target's own); repeatable.",
        tuple(FAMILIES),
        multiple=True,
        metavar="FAMILY",
    ),
    option(
        "--only",
        "Convert only layers whose name matches; repeatable.",
        multiple=True,
        metavar="REGEX",
    ),
    option("--skip", "Keep layers whose name matches; repeatable.", multiple=True, metavar="REGEX"),
    *(_conversion_option(name, known) for name, known in OPTIONS.items()),
)

attack = _stacked(
    option("--attack", "Also measure top-1 under this attack.", ("fgsm", "pgd")),
    option(
        "--eps",
        "Largest change to a pixel, with pixels from 0 to 1 (default: 4/255).",
        _fraction,
        metavar="N/255",
    ),
)
