"""Files that import packages of the dependency group `clients` are collected by runs of the slow
mark alone.

There they import plainly: a run that misses a package fails.
"""

from pathlib import Path

import pytest

CLIENTS = {
    "test_callbacks.py",
    "test_clients.py",
    "test_batch_dependence.py",
    "test_opacus.py",
    "test_peft.py",
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these files out, unimported, where their tests would be deselected."""
    return (
        True if collection_path.name in CLIENTS and "not slow" in config.option.markexpr else None
    )
