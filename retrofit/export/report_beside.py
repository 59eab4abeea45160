"""A report in a file beside the exported one: both appear, or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from retrofit.errors import UsageError
from retrofit.export.export_report import ExportReport
from retrofit.export.report_page import report_page
from retrofit.utils.files import atomic_write, ensure_writable, writing
from retrofit.utils.json_text import json_text

FORMATS: dict[str, Callable[[ExportReport], str]] = {
    ".html": report_page,
    ".json": lambda report: json_text(report.to_dict()) + "\n",
}


def check_report(path: str | Path, output: str | Path, force: bool = False) -> None:
    """Check, before any long work, that a report may be written at `path`.

    Args:
        path: The report to come.
        output: The exported file.
        force: Whether existing files may be replaced.

    Raises:
        UsageError: If the name's ending is of no format, or it is the exported file's.
        RetrofitError: As `ensure_writable`.
    """
    if Path(path).suffix not in FORMATS:
        raise UsageError(f"{path} says no format of a report; give `report` a name that ends in {' or '.join(FORMATS)}")
    if ensure_writable(path, force) == ensure_writable(output, force):
        raise UsageError(f"{path} is the exported file itself; give `report` another name")


@contextmanager
def report_beside(path: str | Path | None, force: bool = False) -> Iterator[Callable[[ExportReport], None]]:
    """Give what writes the report aside; it gets its name when the body ends, and is gone if the body fails.

    The exported file is written aside and named within the body. So a report that cannot be written stops the file too,
    and there is no report of a file that is not there.

    Args:
        path: The report; None for none.
        force: Whether an existing one may be replaced.
    """
    if path is None:
        yield lambda _: None
        return
    with atomic_write(path, force) as aside:

        def keep(report: ExportReport) -> None:
            with writing(path):
                aside.write_text(FORMATS[Path(path).suffix](report), encoding="utf-8")

        yield keep
