from __future__ import annotations

import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from retrofit.diagnose.plots import Plot


def test_every_word_can_be_read_on_either_background() -> None:
    figures: list[Figure] = []

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        left.set(yscale="log", ylim=(0.02, 0.5), title="a narrow range has labels at its minor ticks")
        right.plot([1, 2], label="a line")
        right.legend()
        figure.supxlabel("below")
        figures.append(figure)

    assert set(Plot("name", "title", "text", draw).pictures) == {"light", "dark"}
    for figure in figures:
        minor = [tick.label1 for tick in figure.axes[0].yaxis.get_minor_ticks()]
        assert any(label.get_text() for label in minor)
        texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
        assert len({to_hex(text.get_color()) for text in texts}) == 1
        for text in texts:
            difference = np.subtract(to_rgb(text.get_color()), to_rgb(figure.get_facecolor()))
            assert abs(difference).min() > 0.5, text.get_text()
