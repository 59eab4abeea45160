"""Some images of a dataset, spread evenly."""

from pathlib import Path

import pytest

from retrofit.errors import RetrofitError
from retrofit.evaluation import predictions
from retrofit.images.samples import sample_batches
from tests.pictures import PLAIN, Colours


def test_samples_spread_over_the_classes(folder: Path) -> None:
    batches = sample_batches(folder, PLAIN, images=6, batch_size=4)
    assert [tuple(batch.shape) for batch in batches] == [(4, 3, 16, 16), (2, 3, 16, 16)]
    assert predictions(Colours(), batches) == [
        0,
        0,
        0,
        1,
        2,
        2,
    ]  # the first two bees look like ants
    assert sum(map(len, sample_batches(folder, PLAIN))) == 12
    assert (
        sum(map(len, sample_batches(folder.parent, PLAIN))) == 12
    )  # parts and classes do not matter


def test_an_unreadable_sample_is_an_error(folder: Path) -> None:
    (folder / "ant" / "0.png").write_bytes(b"")
    with pytest.raises(RetrofitError, match=r"cannot read ant/0.png"):
        sample_batches(folder, PLAIN)
