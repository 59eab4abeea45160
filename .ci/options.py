"""Write docs/reference/options.md: the help of every command, as the terminal prints it.

python .ci/options.py
"""

from collections.abc import Iterator
from pathlib import Path

import click

from retrofit.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "options.md"


def sections(command: click.Command, parent: click.Context | None = None) -> Iterator[str]:
    """Give a command's help under its name, then its commands'."""
    name = command.name or "" if parent else "retrofit"
    context = command.make_context(name, [], parent, resilient_parsing=True, terminal_width=100)
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield f"{'##' if parent else '#'} {context.command_path if parent else 'All options'}\n\n```text\n{text}\n```\n"
    if isinstance(command, click.Group):
        for own in command.list_commands(context):
            found = command.get_command(context, own)
            assert found is not None
            yield from sections(found, context)


if __name__ == "__main__":
    PAGE.write_text("\n".join(sections(main)))
