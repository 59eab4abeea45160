"""plan -> apply -> report: the conversion of a network's normalization layers."""

from importlib import import_module

from retrofit.conversion_options import CONVERTERS, FAMILIES
from retrofit.layers.strength import set_strength, strength_layers, strength_of
from retrofit.surgery.conversion import CheckError, convert
from retrofit.surgery.execute import apply, plans_of, replay
from retrofit.surgery.plan_and_report import LayerRow, Plan, Report
from retrofit.surgery.planning import TARGETS, converter_for, plan

# which registers the targets
for file in dict.fromkeys(CONVERTERS.values()):
    import_module(f"{__name__}.targets.{file}")

__all__ = [
    "FAMILIES", "TARGETS", "CheckError", "LayerRow", "Plan", "Report", "apply", "convert", "converter_for", "plan",
    "plans_of", "replay", "set_strength", "strength_layers", "strength_of",
]  # fmt: skip
