"""plan -> apply -> report: the conversion of a network's normalization layers."""

from retrofit.layers.strength import set_strength, strength_layers, strength_of
from retrofit.record import forget_plans, plans_of
from retrofit.registry import FAMILIES, TARGETS
from retrofit.surgery.conversion import CheckError, convert
from retrofit.surgery.converter import Converter, converter_for
from retrofit.surgery.execute import apply, replay, unrepeated
from retrofit.surgery.plan_and_report import LayerRow, Plan, Report
from retrofit.surgery.planning import plan

__all__ = [
    "FAMILIES", "TARGETS", "CheckError", "Converter", "LayerRow", "Plan", "Report", "apply",
    "convert", "converter_for", "forget_plans", "plan", "plans_of", "replay", "set_strength",
    "strength_layers", "strength_of", "unrepeated",
]  # fmt: skip
