"""plan -> apply -> report: the conversion of a network's normalization layers."""

from retrofit.conversion_options import FAMILIES
from retrofit.surgery import targets
from retrofit.surgery.conversion import CheckError, convert
from retrofit.surgery.converter import TARGETS, converter_for
from retrofit.surgery.execute import apply, plans_of, replay, set_strength, strength_layers, strength_of
from retrofit.surgery.plan_and_report import LayerRow, Plan, Report
from retrofit.surgery.planning import plan

__all__ = [
    "FAMILIES",
    "TARGETS",
    "CheckError",
    "LayerRow",
    "Plan",
    "Report",
    "apply",
    "convert",
    "converter_for",
    "plan",
    "plans_of",
    "replay",
    "set_strength",
    "strength_layers",
    "strength_of",
    "targets",
]
