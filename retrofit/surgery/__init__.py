"""plan -> apply -> report: the conversion of a network's normalization layers."""

from retrofit.surgery.census import FAMILIES, census
from retrofit.surgery.converters import TARGETS, converter_for
from retrofit.surgery.execute import apply, convert, set_strength, strength_of
from retrofit.surgery.planning import plan
from retrofit.surgery.records import LayerRow, Plan, Report

__all__ = [
    "FAMILIES",
    "TARGETS",
    "LayerRow",
    "Plan",
    "Report",
    "apply",
    "census",
    "convert",
    "converter_for",
    "plan",
    "set_strength",
    "strength_of",
]
