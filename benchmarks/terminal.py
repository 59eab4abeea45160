"""The picture of a terminal in README: what inspect, convert and evaluate print."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI
from rich.text import Text

ENVIRONMENT = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "0", "COLUMNS": "104"}


def record_terminal(args: argparse.Namespace, images: Path) -> None:
    """Run the commands, and write what they print as a picture, for light and for dark pages.

    Args:
        args: Paths of the checkpoint, the photographs (`data_dir`) and the class map.
        images: Folder of the pictures.
    """
    weights, photographs, names = (
        os.path.abspath(path) for path in (args.checkpoint, args.data_dir, args.class_map)
    )
    shown = {weights: "lite0.pth", photographs: "photos.tar", names: "classes.txt"}
    lines = (
        "inspect tf_efficientnet_lite0 --to ln",
        f"convert tf_efficientnet_lite0 --to ln --strength 1 --checkpoint {weights} --match order",
        f"evaluate tf_efficientnet_lite0-ln.safetensors --data-dir {photographs} --class-map {names}",
    )
    console = Console(record=True, width=104, file=open(os.devnull, "w"))  # noqa: SIM115  nothing is printed
    with tempfile.TemporaryDirectory() as folder:
        for line in lines:
            done = subprocess.run(
                [sys.executable, "-m", "retrofit", *line.split()],
                cwd=folder,
                env={**os.environ, **ENVIRONMENT},
                capture_output=True,
                text=True,
                check=True,
            )
            text = f"$ retrofit {line}\n{done.stderr}"
            for path, name in shown.items():
                text = re.sub(rf"\S*(?<![\w.-]){re.escape(os.path.basename(path))}", name, text)
            console.print(Text.from_ansi(text))
    for theme, colours in (("light", DEFAULT_TERMINAL_THEME), ("dark", MONOKAI)):
        picture = images / f"terminal-{theme}.svg"
        console.save_svg(str(picture), title="retrofit", theme=colours, clear=False)
