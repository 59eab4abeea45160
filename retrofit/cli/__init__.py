"""The command line: `retrofit COMMAND ...`.

Commands are imported when called, and torch inside their bodies, so that `retrofit --help` responds
at once. People read stderr, programs read stdout. A user's mistake ends as one line, `error: what
happened; what to do`, with exit code 1 (refused, failed check, nothing to do) or 2 (usage);
RETROFIT_DEBUG=1 adds the traceback.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from retrofit import __version__
from retrofit.errors import RetrofitError
from retrofit.utils.extras import named_extra
from retrofit.utils.text import did_you_mean, printable, with_class

# Characters of an error's line, which may quote what the user gave, of any length; longer than
# every line that retrofit writes itself.
_LONGEST_LINE = 2000
COMMANDS = {
    "inspect": "List a network's normalization layers and what a conversion would do to them.",
    "convert": "Replace a network's normalization layers, check the outputs and write a file.",
    "finetune": "Train a converted network while its strength rises to 1.",
    "evaluate": "Measure top-1 and top-5 accuracy on a folder or tar of images.",
    "diagnose": "Measure and plot how normal a network's features are; compare two with --against.",
    "bench": "Measure a network's time and memory against its source or another network.",
    "bake": "Replace a converted network's per-image statistics with constants.",
    "export": "Write a network as ONNX, folded and checked against PyTorch.",
    "recipes": "List, show or copy the recipes for finetune.",
}


class _Commands(click.Group):
    """A group that imports a command's module when the command is called, and reports every
    exception in one line.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command.

        Raises:
            UsageError: If there is none of that name; it suggests the closest.
        """
        if cmd_name in COMMANDS:
            module = importlib.import_module(f"retrofit.cli.{cmd_name}")
            command: click.Command = module.command
            return command
        hint = did_you_mean(cmd_name, COMMANDS)
        raise click.UsageError(f"there is no command {cmd_name!r}{hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = "retrofit", **extra: Any
    ) -> Any:
        """Run the command line and exit with the code for the outcome."""
        try:
            settings = {**extra, "standalone_mode": False}
            outcome = super().main(args, prog_name, **settings)
            sys.exit(outcome or 0)
        except _NO_ARGUMENTS as bare:
            click.echo(bare.format_message(), err=True)
            sys.exit(bare.exit_code)
        except Exception as raised:
            if os.environ.get("RETROFIT_DEBUG"):
                traceback.print_exception(raised)
            error = named_extra(raised)
            line = printable(_line(error), _LONGEST_LINE)
            # A broken pipe: nobody is left to read the line.
            with suppress(BrokenPipeError):
                click.echo(line, err=True)
            code = getattr(error, "exit_code", 1)
            # Shells exit with 130 after an interrupt.
            if isinstance(error, click.Abort):
                code = 130
            sys.exit(code)


# Click 8.1 prints the help page itself where a command got no arguments.
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


def _line(error: Exception) -> str:
    """Return the line that the user sees for an exception: what happened and what to do."""
    match error:
        case click.Abort():
            return "interrupted"
        case click.ClickException():
            context = getattr(error, "ctx", None)
            page = context.command_path if context else "retrofit"
            return f"error: {error.format_message().rstrip('.')}; see {page} --help"
        case RetrofitError():
            return f"error: {error}"
        case OSError():
            return f"error: {error}; check the path, its permissions and the free space"
    advice = "RETROFIT_DEBUG=1 shows the traceback, please report it"
    return f"error: unexpected {with_class(error)}; {advice}"


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__)
def main() -> None:
    """Replace the normalization layers of a trained network and keep what it has learned.

    \b
        $ retrofit inspect resnet50 --to ln
        $ retrofit convert resnet50 --to frozen --pretrained
        $ retrofit evaluate resnet50-frozen.safetensors --data-dir imagenet
    """
