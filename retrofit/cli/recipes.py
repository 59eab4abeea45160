"""The recipes that come with retrofit, to run as they are or to copy and edit.

\b
    $ retrofit recipes
    $ retrofit recipes show digits
    $ retrofit recipes copy digits mine.yaml
    $ retrofit finetune resnet18-bnn.safetensors --recipe mine.yaml
"""

from pathlib import Path

import click

from retrofit.cli import options
from retrofit.cli.console import say
from retrofit.finetune.recipe_files import recipe_summaries, recipe_text
from retrofit.utils.files import atomic_write


@click.group("recipes", help=__doc__, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        for name, summary in recipe_summaries().items():
            click.echo(f"{name:30}{summary}")


@command.command("show")
@click.argument("name", metavar="NAME")
def show(name: str) -> None:
    """Write a recipe to stdout."""
    click.echo(recipe_text(name), nl=False)


@command.command("copy", cls=options.Command)
@click.argument("name", metavar="NAME")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@options.force
def copy(name: str, file: Path, force: bool) -> None:
    """Write a recipe to FILE."""
    text = recipe_text(name)
    with atomic_write(file, force) as temporary:
        temporary.write_text(text)
    say(f"wrote {file}", "bold")
    say(f"next: retrofit finetune MODEL --recipe {file}")
