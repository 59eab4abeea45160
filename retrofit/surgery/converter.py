"""The registry of targets: what `to=` may name, and the converter behind each name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import UsageError
from retrofit.graph.sites import Site, Sites
from retrofit.surgery.families import NormLayer
from retrofit.surgery.plan_and_report import EditRow, LayerRow, Plan


@dataclass(frozen=True)
class Decisions:
    """What a converter decides."""

    layers: Sequence[LayerRow]  # one for each layer that it was asked about
    edits: Sequence[EditRow] = ()  # the activations and convolutions around them
    sites: Sites | None = None  # where those are, for `apply`


class Converter(ABC):
    """Takes normalization layers of some families to their counterparts under one or more targets.

    It holds no state of a conversion: `plan` decides, `build` makes the layers, maybe in another network of the same
    structure, and `finish` edits what lies around them.
    """

    sources: frozenset[str]  # the families it converts when the caller names none
    identity: bool = True  # the converted network is its source's function in evaluation, at strength 0 if it has one
    has_strength: bool = True
    changes_sets: bool = False  # its layers normalize each sample by itself, and their sources do not
    takes_activations: bool = False  # it also converts the activations behind the layers, and is pointless without

    def plan(self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions) -> Decisions:
        """Decide the fate of the layers that the caller's rules let through. Changes nothing; may raise errors."""
        return Decisions([self.decide(layer, options) for layer in layers])

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        """Decide the fate of one layer, if the rest of the network does not matter."""
        raise NotImplementedError

    @abstractmethod
    def build(self, module: nn.Module, row: LayerRow, device: torch.device) -> nn.Module:
        """Return the counterpart of `module`, holding its tensors (moved, not copied), as `row` says."""

    def finish(self, model: nn.Module, plan: Plan, sites: Mapping[tuple[str, int], Site]) -> Sequence[str]:
        """Edit what lies around the layers, which are converted by now; return notes for the report.

        The sites are those of the planned activations before, by norm and place as in `EditRow`.
        """
        return ()


_OWN = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
_OPTIONS = {"alpha", "group_size", "noise", "noise_kind", "strength"}  # of our layers, which the plan settles

TARGETS: dict[str, Converter] = {}  # the converter of every target


def converter_for(to: str) -> Converter:
    """Return the converter of target `to`; a UsageError says that there is none."""
    if to not in TARGETS:
        raise UsageError(f"unknown target {to!r}; choose one of {', '.join(TARGETS)}")
    return TARGETS[to]


def adopt(new: nn.Module, old: Any) -> Any:
    """Move parameters, buffers, children, hooks, training flag and all other attributes of `old` into `new`.

    The parameters are the same objects, so that an optimizer that holds them keeps working. What `new` has and `old`
    lacks stays as built, and so do the options of `new`; where `new` has a parameter and `old` a buffer, as frozen
    layers do, it becomes a parameter.
    """
    for store in ("_parameters", "_buffers", "_modules"):
        getattr(new, store).update(getattr(old, store))
    for name in new._parameters.keys() & new._buffers.keys():  # a frozen layer's constants
        value = new._buffers.pop(name)
        new._parameters[name] = None if value is None else nn.Parameter(value)
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set
    for key, value in vars(old).items():
        if key not in _OWN and key not in new._buffers and not (key in _OPTIONS and hasattr(new, key)):
            object.__setattr__(new, key, value)
    return new
