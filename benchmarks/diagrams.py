"""Drawings of what the layers compute, for README and docs; figures.py writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

import retrofit
from retrofit.finetune import StrengthSchedule
from retrofit.layers import yeo_johnson

OURS = "#2f81f7"
BASELINE = "#8b949e"
TODAY = "#e2701a"
H = torch.linspace(-3, 3, 121)
IMAGES_SHOWN, CHANNELS_SHOWN = range(4), range(6)
# Values that share a mean and a variance, as rectangles: first image, first channel, width, height.
SHARED = {
    "BatchNorm in training": (
        [(0, channel, len(IMAGES_SHOWN), 1) for channel in CHANNELS_SHOWN],
        TODAY,
        "Batch statistics\nmix the images.",
    ),
    "frozen; ln, gn at t = 0": (
        [(image, channel, 1, 1) for image in IMAGES_SHOWN for channel in CHANNELS_SHOWN],
        BASELINE,
        "Constants: BatchNorm's\nrunning statistics",
    ),
    "ln at t = 1": (
        [(image, 0, 1, len(CHANNELS_SHOWN)) for image in IMAGES_SHOWN],
        OURS,
        "Statistics of\neach image",
    ),
    "gn at t = 1": (
        [(image, first, 1, 3) for image in IMAGES_SHOWN for first in (0, 3)],
        "#2da44e",
        "... of groups of its\nchannels",
    ),
}
STEPS = ("convert", "train", "or")


def conversion(figure: Figure) -> None:
    """Which values share a mean and a variance, before a conversion, after it, and trained."""
    figure.get_layout_engine().set(wspace=0.3)  # type: ignore[union-attr]
    every = figure.subplots(1, len(SHARED), sharex=True, sharey=True)
    for axes, (title, (rectangles, colour, words)) in zip(every, SHARED.items(), strict=True):
        for image, channel, width, height in rectangles:
            corner = (image + 0.08, channel + 0.08)
            patch = Rectangle(corner, width - 0.16, height - 0.16, color=colour, linewidth=0)
            axes.add_patch(patch)
        axes.set_title(title)
        axes.set_xlim(0, len(IMAGES_SHOWN))
        axes.set_ylim(len(CHANNELS_SHOWN), 0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(words, fontsize=9)
    every[0].set_ylabel("channels of 4 images", fontsize=9)
    ink = mpl.rcParams["text.color"]
    for axes, step in zip(every, STEPS, strict=False):
        axes.text(1.49, 0.56, step, ha="center", transform=axes.transAxes)
        if step != "or":
            arrow = {"arrowstyle": "->", "color": ink}
            axes.annotate("", (1.83, 0.5), (1.15, 0.5), xycoords="axes fraction", arrowprops=arrow)


def course(figure: Figure) -> None:
    """The strength over a training: raised to 1, and there and back."""
    steps = 200
    axes = figure.subplots()
    for shape, end, colour, label in (
        ("linear", 1.0, OURS, "default"),
        ("there-and-back", 0.0, BASELINE, "there and back"),
    ):
        network, _ = retrofit.convert(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), "ln", check=False
        )
        schedule = StrengthSchedule(network, steps, shape=shape, end=end)
        values = []
        for _ in range(steps):
            values.append(retrofit.strength_of(network))
            schedule.step()
        axes.plot(np.linspace(0, 1, steps), values, color=colour, label=label)
    axes.set_xlabel("part of the training that is done")
    axes.set_ylabel("strength t")
    legend(figure)


def by_strength(figure: Figure, function: Callable[[float], Tensor], title: str) -> None:
    """Draw a function of h at five strengths."""
    axes = figure.subplots()
    axes.set_ylabel("transformed value")
    ends = mpl.colors.to_rgb(BASELINE), mpl.colors.to_rgb(OURS)
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        mix = tuple((1 - t) * a + t * b for a, b in zip(*ends, strict=True))
        axes.plot(H, function(t), color=mix, label=f"t = {t:g}")
    axes.set_title(title)
    axes.set_xlabel("normalized value h")
    axes.legend(fontsize=9, frameon=False, handlelength=1)


def proxy(figure: Figure) -> None:
    """What becomes of a ReLU whose beta moves in training: alone, and with its restored proxy."""
    gamma, trained, moved = 0.5, 1.0, 0.0
    quantiles = torch.erfinv(torch.linspace(-1, 1, 2003)[1:-1]) * 2**0.5

    def restored(beta: float) -> Tensor:
        at_conversion = torch.relu(gamma * quantiles + trained)
        today = torch.relu(gamma * quantiles + beta)
        normalized = (torch.relu(gamma * H + beta) - today.mean()) / today.std()
        return normalized * at_conversion.std() + at_conversion.mean()

    axes = figure.subplots()
    axes.plot(H, restored(trained), color=BASELINE, label="at conversion, β = 1: both")
    axes.plot(H, torch.relu(gamma * H + moved), color=TODAY, label="β moved to 0: ReLU alone")
    axes.plot(H, restored(moved), color=OURS, label="β moved to 0: with its proxy")
    axes.set_title("ReLU of y = 0.5 n + β, t = 1")
    axes.set_ylabel("output")
    axes.set_xlabel("normalized value n")
    axes.legend(fontsize=9, frameon=False, handlelength=1)


def path(figure: Figure) -> None:
    """The power transform of a layer from t = 0 to 1."""
    title = "ψ(h; 1 + t (λ - 1)), λ = 0.3"
    by_strength(
        figure,
        lambda t: yeo_johnson(H, torch.tensor(1 + t * (0.3 - 1))),
        title,
    )


def noise(figure: Figure) -> None:
    """What training adds to a transformed value: one draw, and the standard deviation of all."""
    axes = figure.subplots()
    generator = torch.Generator().manual_seed(0)
    spread = 0.4 * torch.randn(100_000, generator=generator).abs().mean()
    drawn = H + spread * torch.randn(len(H), generator=generator)
    axes.fill_between(H, H - spread, H + spread, color=OURS, alpha=0.25, linewidth=0, label="± ξ s")
    axes.plot(H, drawn, ".", color=OURS, label="with noise")
    axes.plot(H, H, color=BASELINE, label="without")
    axes.set_title("ξ = 0.4, values from a standard normal: s = 0.8")
    axes.set_xlabel("transformed value")
    axes.set_ylabel("value in training")
    axes.legend(fontsize=9, frameon=False, handlelength=1)


def legend(figure: Figure, axes: Any = None) -> None:
    """Explain the lines below the figure."""
    handles, labels = (axes or figure.axes[0]).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
