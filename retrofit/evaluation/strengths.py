"""Strengths that nobody set: those of an average of the weights."""

from __future__ import annotations

from torch import nn

from retrofit.surgery import strength_layers

_DIGITS = 4  # of a strength that someone has set


def odd_strengths(model: nn.Module) -> str | None:
    """Say that layers stand at a strength that looks like no one's choice; None if none does.

    torch's averages of weights average every buffer, if asked to, and so the strength: after 50 steps of a ramp to 1
    with decay 0.98 it stands at 0.36, and the average would evaluate as other layers than its model's.
    """
    found = {layer.stored_strength for layer in strength_layers(model)}
    odd = sorted(t for t in found if abs(t - round(t, _DIGITS)) > 1e-6)
    if not odd:
        return None
    where = f"{odd[0]:.4f}" if len(odd) == 1 else f"{odd[0]:.4f} to {odd[-1]:.4f}"
    return (
        f"layers stand at strength {where}, as an average of weights or a walk that was stopped leaves them; if it is "
        "an average, give it its network's strength (retrofit.set_strength) and save it again"
    )
