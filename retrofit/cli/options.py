"""Options that several commands share; an option goes by the name of the Python argument that it sets.

Importing this imports no torch: `--help` and the shell's completion answer at once.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from retrofit.conversion_options import CONVERTERS, FAMILIES, OPTIONS, Option
from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.text import with_class

Decorator = Callable[[Any], Any]

GROUPS = {
    "data_dir": "Images",
    "pretrained": "Weights",
    "source": "Which layers",
    "groups": "Settings of single targets",
    "num_classes": "The network",
    "force": "Output",
    "as_json": "Output",
}
"""The first option of each group of the help, where a command's options are those below."""

MODEL = "timm name, tv:NAME, hf-hub:ID, local-dir:DIR, py:MODULE:CALLABLE (your own), or .safetensors of retrofit's."

_ENOUGH = 2  # typed characters from which names of networks are worth the seconds that importing timm takes


class Grouped(click.Command):
    """A command whose help shows its options in groups; `groups` names the first option of each."""

    def __init__(self, *args: Any, groups: Mapping[str, str], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what MODEL may be, and each group under its title."""
        title, listed = "Options", dict[str, list[tuple[str, str]]]()
        for option in self.get_params(ctx):
            if isinstance(option, click.Argument):  # of which some versions of click have a record too
                listed["Argument"] = [("MODEL", MODEL)]
                continue
            title = self.groups.get(option.name or "", title)
            if (record := option.get_help_record(ctx)) is not None:
                listed.setdefault(title, []).append(record)
        for name, records in listed.items():
            with formatter.section(name):
                formatter.write_dl(records)


def typed_flags() -> dict[str, str]:
    """Return what the user typed for the running command, by the name of the argument: flags, and MODEL."""
    context = click.get_current_context()
    return {
        param.name: max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
        for param in context.command.params
        if param.name and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }


def refuse_flags(reason: str, *, but: Collection[str]) -> None:
    """Raise UsageError if anything else than the arguments named was typed."""
    if refused := [flag for name, flag in typed_flags().items() if name not in but]:
        raise UsageError(f"{reason}; drop {', '.join(refused)}")


def complete_model(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete files, and once some of it is typed the networks of timm and, behind tv:, of torchvision."""
    known: Iterable[str] = ()
    if typed.startswith("tv:"):
        from torchvision.models import list_models

        known = (f"tv:{name}" for name in list_models())
    elif len(typed) >= _ENOUGH and "/" not in typed:
        from timm import list_models as timm_models

        known = timm_models(f"{typed}*")
    return _completed(known, typed)


def complete_recipe(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete files and the recipes that come with the package."""
    from retrofit.finetune.recipe import recipe_summaries

    return _completed(recipe_summaries(), typed)


def _completed(words: Iterable[str], typed: str) -> list[CompletionItem]:
    items = [CompletionItem(word) for word in words if word.startswith(typed)]
    return [*items, CompletionItem(typed, type="file")]


def _key_value(text: str) -> tuple[str, Any]:
    """Read `key=value`, whose value is a Python literal or else a string."""
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise click.BadParameter(f"{text!r} is not of the form key=value")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _share(text: str) -> float:
    """Read a number above 0 and up to 1, or a fraction such as 4/255."""
    try:
        if 0 < (number := float(Fraction(text))) <= 1:
            return number
    except (ValueError, ArithmeticError):
        pass
    raise click.BadParameter(f"{text!r} is no number above 0 and up to 1, such as 4/255")


def _number_or(kind: type, word: str) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            return text if text == word else kind(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is neither a number nor {word}") from None

    return number


def _inputs(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Any:
    """Read tensors named as a network's arguments from a safetensors file."""
    if path is None:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RetrofitError(
            f"{path} holds no example inputs ({with_class(error)}); write them with safetensors, named as the "
            "arguments of the network's `forward`"
        ) from error
    if not tensors:
        raise RetrofitError(f"{path} holds no tensor; write the arguments of the network's `forward` into it")
    return tensors


def _stacked(*options: Decorator) -> Decorator:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _conversion_option(name: str, known: Option) -> Decorator:
    """Make the flag of an option of a conversion."""
    flag = f"--{name.replace('_', '-')}"
    text = f"{known.help.replace('_', '-')} Targets: {', '.join(known.targets)}."
    if known.kind is bool:
        form = flag if known.switch else f"{flag}/--no-{flag[2:]}"
        return click.option(form, name, is_flag=True, default=None, help=text)
    if known.kind == "batches":
        return click.option(flag, name, type=click.Path(), metavar="DIR", help=text)
    if known.kind is str:
        return click.option(flag, name, type=click.Choice(known.words), help=text)
    kind = _number_or(known.kind, known.words[0]) if known.words else known.kind
    metavar = "|".join(["N" if known.kind is int else "F", *known.words])
    return click.option(flag, name, type=kind, metavar=metavar, help=text)


def command(name: str, help: str, **groups: str) -> Callable[[Any], Grouped]:
    """Make a command whose help has the groups of options below, and `groups`: title by first option."""
    return click.command(name, cls=Grouped, groups=GROUPS | groups, help=help)


def choice(flag: str, words: Sequence[str], help: str, *name: str, **rest: Any) -> Decorator:
    """Make an option that takes one of a few words."""
    return click.option(flag, *name, type=click.Choice(words), help=help, **rest)


def count(*flags: str, least: int, help: str, default: int | None = None) -> Decorator:
    """Make an option that takes a whole number; the default stands behind its help."""
    text = f"{help}." if default is None else f"{help} (default: {default})."
    return click.option(*flags, type=click.IntRange(min=least), default=default, metavar="N", help=text)


def number(flag: str, help: str, kind: Any = float, **rest: Any) -> Decorator:
    """Make an option that takes a number."""
    return click.option(flag, type=kind, metavar="N" if kind is int else "F", help=help, **rest)


def path(flag: str, help: str, *name: str, metavar: str = "FILE", **rest: Any) -> Decorator:
    """Make an option that takes a file or a folder."""
    return click.option(flag, *name, type=click.Path(path_type=Path), metavar=metavar, help=help, **rest)


def output(name: str, default: str, metavar: str = "FILE") -> Decorator:
    """Make -o, which sets the argument `name`."""
    kind = "Folder" if metavar == "DIR" else "File"
    return path("-o", f"{kind} to write (default: {default}).", "--output", name, metavar=metavar)


def target(help: str, **rest: Any) -> Decorator:
    """Make --to, which takes every target."""
    return choice("--to", list(CONVERTERS), help, metavar="TARGET", **rest)


def against(help: str) -> Decorator:
    """Make --against, which takes a second MODEL."""
    return click.option("--against", metavar="MODEL", shell_complete=complete_model, help=help)


RUNTIMES = ("onnxruntime", "openvino")
model = click.argument("model", metavar="MODEL", shell_complete=complete_model)
device = click.option("--device", metavar="NAME", help="Where it runs (default: cuda if there is one, else cpu).")
runtime = choice("--runtime", RUNTIMES, "What runs exported files, .onnx (default: onnxruntime).")
force = click.option("--force", is_flag=True, help="Replace what is there.")
json = click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
inputs = path(
    "--inputs",
    "Example inputs, for a network whose input is not one image: a .safetensors file, its tensors named by argument.",
    callback=_inputs,
)
network = click.option(
    "--network",
    metavar="py:MODULE:CALLABLE",
    help="Function that builds your own network, if MODEL was converted from it.",
)

architecture = _stacked(
    count("--num-classes", least=0, help="Outputs of the classifier"),
    count("--in-chans", least=1, help="Channels of the images"),
    count("--img-size", least=1, help="Side of the images in pixels"),
    click.option(
        "--model-kwargs",
        type=_key_value,
        multiple=True,
        callback=lambda _ctx, _param, pairs: dict(pairs) or None,
        metavar="K=V",
        help="Argument of the model's constructor; repeatable.",
    ),
    network,
)

weights = _stacked(
    click.option("--pretrained", is_flag=True, help="Fetch the library's pretrained weights (default: random)."),
    path("--checkpoint", "Load .safetensors, .pth, .pt or .bin."),
    choice(
        "--match", ["name", "order"], "Pair the checkpoint's tensors by name, or by order and shape (default: name)."
    ),
    click.option(
        "--checkpoint-key",
        metavar="NAME",
        help="Which weights of a checkpoint with several: model_ema, state_dict, ..., or a prefix of names.",
    ),
    click.option(
        "--checkpoint-partial", is_flag=True, help="Load the tensors that fit; list those left random or left out."
    ),
)

data = _stacked(
    click.option("--data-dir", metavar="DIR", help="Folder or .tar with a folder per class, or with parts."),
    click.option("--dataset", default="", metavar="NAME", help='timm\'s dataset name, or "digits", which is built in.'),
    click.option("--split", default="validation", metavar="NAME", help="Part, such as test (default: validation)."),
    path("--class-map", "Class names in the order of the outputs."),
)

precision = _stacked(
    device,
    click.option("--amp", is_flag=True, help="Mixed precision."),
    choice("--amp-dtype", ["float16", "bfloat16"], "Data type of --amp (default: float16; on cpu bfloat16)."),
    click.option("--channels-last", is_flag=True, help="Use the channels-last memory format."),
)

plan = _stacked(
    choice(
        "--from",
        list(FAMILIES),
        f"Family to convert ({', '.join(FAMILIES)}; default: the target's own); repeatable.",
        "source",
        multiple=True,
        metavar="FAMILY",
    ),
    click.option("--only", multiple=True, metavar="REGEX", help="Convert only layers whose name matches; repeatable."),
    click.option("--skip", multiple=True, metavar="REGEX", help="Keep layers whose name matches; repeatable."),
    *(_conversion_option(name, known) for name, known in OPTIONS.items()),
)

attack = _stacked(
    choice("--attack", ["fgsm", "pgd"], "Also measure top-1 under attack."),
    click.option(
        "--eps", type=_share, metavar="N/255", help="Largest change of a pixel, pixels from 0 to 1 (default: 4/255)."
    ),
)
