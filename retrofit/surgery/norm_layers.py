"""Which modules of a network are normalization layers, and of which family.

Layers are matched by exact class. Classes are named by module path, so that neither timm nor
torchvision is imported. A class that is not in the table may compute something else: it is taken
for a known one if that is proved (`foreign_norms.py`), and reported otherwise.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from retrofit.layers import StrengthMixin
from retrofit.record import network_in
from retrofit.registry import FAMILIES
from retrofit.surgery.foreign_norms import Formula, full_name, proved_formula
from retrofit.surgery.functional_norms import functional_norms
from retrofit.surgery.plan_and_report import LayerRow, Status

_TORCH = "torch.nn.modules"
_TIMM = "timm.layers"

_CLASSES: dict[str, dict[str, str]] = {
    "bn": {
        f"{_TORCH}.batchnorm": "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm",
        f"{_TIMM}.norm_act": "BatchNormAct2d SyncBatchNormAct",
    },
    "ln": {
        f"{_TORCH}.normalization": "LayerNorm",
        f"{_TIMM}.norm": "LayerNorm LayerNormFp32 LayerNorm2d LayerNorm2dFp32 LayerNormExp2d",
        f"{_TIMM}.norm_act": "LayerNormAct LayerNormActFp32 LayerNormAct2d LayerNormAct2dFp32",
        "timm.models.metaformer": "LayerNormNoBias LayerNorm2dNoBias",
        "torchvision.models.convnext": "LayerNorm2d",
    },
    "gn": {
        f"{_TORCH}.normalization": "GroupNorm",
        f"{_TIMM}.norm": "GroupNorm GroupNorm1",
        f"{_TIMM}.norm_act": "GroupNormAct GroupNorm1Act",
        "timm.models.metaformer": "GroupNorm1NoBias",
    },
    "in": {f"{_TORCH}.instancenorm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d"},
    "frozen-bn": {
        "torchvision.ops.misc": "FrozenBatchNorm2d",
        f"{_TIMM}.norm_act": "FrozenBatchNormAct2d",
        "retrofit.layers.frozen_batch_norm": "FrozenBatchNorm FrozenBatchNormAct",
    },
}
# The family of every class that a converter may take.
KNOWN: dict[str, str] = {
    f"{module}.{name}": family
    for family, modules in _CLASSES.items()
    for module, names in modules.items()
    for name in names.split()
}

_FUSED = "a normalization fused with its activation, which leaves nothing between the two"
# Patterns of class names that no conversion takes, and why.
UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (r"^Lazy(Batch|Instance)Norm", "not initialised yet; run one forward pass and convert again"),
    (
        r"(Rms|RMS|Simple)Norm",
        "RMS normalization subtracts no mean, and the paper defines no counterpart for it",
    ),
    (r"^(InplaceAbn|FilterResponseNorm)", _FUSED),
    (r"ResponseNorm$|^CrossMapLRN", "a response normalization, which standardizes nothing"),
)

_BASES: dict[Any, str] = {
    nn.modules.batchnorm._BatchNorm: "bn",
    nn.modules.instancenorm._InstanceNorm: "in",
    _NormBase: "bn",
    nn.LayerNorm: "ln",
    nn.GroupNorm: "gn",
}
_TENSORS = ("weight", "bias", "running_mean", "running_var")
_NAMED_NORM = re.compile(r"(Norm|BN|EvoNorm\w*)(_?\d?[dD])?(NoBias|Act|Fp32|\d[dD])*$")


@dataclass(frozen=True)
class NormLayer:
    """A normalization layer as found in a network."""

    # Dotted; empty for the root. A module with several names is found under each.
    name: str
    module: nn.Module
    # Full name of its class, or of the known class that it is proved to compute.
    class_path: str
    # A key of `FAMILIES`.
    family: str | None
    # "known": a converter may take it; else none does, for `reason`.
    status: Literal["known", "kept", "unsupported"]
    reason: str = ""
    # The proof that it computes what the class at `class_path` does; None if it is of that class.
    formula: Formula | None = None

    @property
    def label(self) -> str:
        """Class name for people."""
        return type(self.module).__name__

    @property
    def known_class(self) -> str:
        """Name of the class at `class_path`."""
        return self.class_path.rpartition(".")[2]

    @property
    def family_name(self) -> str:
        """What people call the family."""
        return FAMILIES[str(self.family)]

    @cached_property
    def layer(self) -> Any:
        """The layer that a converter looks at: the module, or one of the known class around its
        tensors.
        """
        if self.formula is None:
            return self.module
        return self.formula.layer(self.module)

    def settled(self, formula: Formula | str, otherwise: str) -> "NormLayer":
        """Return the layer as one of the known class that it is proved to compute; for `otherwise`
        as one that no converter takes, if there is no proof.
        """
        if isinstance(formula, str):
            return replace(self, status="unsupported", reason=otherwise)
        path = formula.class_path
        return replace(self, class_path=path, family=KNOWN[path], formula=formula)

    def row(
        self, status: Status, reason: str = "", target: str | None = None, **options: Any
    ) -> LayerRow:
        """Return the row of a plan that says what becomes of the layer."""
        return LayerRow(self.name, self.label, target, status, reason, options)


@dataclass(frozen=True)
class Source:
    """A network that is about to be converted.

    Attributes:
        network: The network, without wrappers.
        norms: Its normalization layers.
        functions: Sentences on normalizations that its code calls as functions.
    """

    network: nn.Module
    norms: Sequence[NormLayer]
    functions: Sequence[str]


def source_of(model: nn.Module) -> Source:
    """Find the normalizations of a network, or of the one that a wrapper holds.

    Raises:
        UsageError: If `model` is not a network.
    """
    return normalizations_in(network_in(model))


def normalizations_in(network: nn.Module) -> Source:
    """Find the normalizations of a network, which is in no wrapper."""
    norms = list(find_norms(network))
    layers = inside_parametrizations(network) | {norm.module for norm in norms}
    return Source(network, norms, functional_norms(network, layers))


def find_norms(model: nn.Module) -> Iterator[NormLayer]:
    """Yield every normalization layer of `model`, under every name it is registered by, in the order
    of `named_modules`, which need not be that of the calls.
    """
    parametrizations = inside_parametrizations(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if module in parametrizations:
            continue
        norm = classify(name, module)
        if norm is not None:
            yield norm


def proved_on_shapes(
    norms: Sequence[NormLayer], shapes: Mapping[str, Sequence[torch.Size]]
) -> list[NormLayer]:
    """Prove the layers of foreign classes again, on inputs of the shapes that the network gives
    them.

    A class that takes inputs of any number of dimensions may be another known class on these. If it
    is proved to be none, it is unsupported.

    Args:
        norms: The layers.
        shapes: The shapes of each layer's inputs, by name.
    """
    return [_proved_on(norm, list(dict.fromkeys(shapes.get(norm.name, ())))) for norm in norms]


def _proved_on(norm: NormLayer, shapes: Sequence[torch.Size]) -> NormLayer:
    if norm.formula is None or not shapes:
        return norm
    return norm.settled(
        proved_formula(norm.module, KNOWN, shapes),
        f"it is {norm.known_class} on random inputs, but not on those of the shape that the "
        "network gives it",
    )


def inside_parametrizations(model: nn.Module) -> set[nn.Module]:
    """Return the modules that compute a layer's tensors, which are no normalization layers:
    `_SpectralNorm` for one.
    """
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    return {module for held in lists for module in held.modules()}


def classify(name: str, module: nn.Module) -> NormLayer | None:
    """Describe `module` as a normalization layer; None if it is none."""
    class_path = full_name(type(module))
    if isinstance(module, StrengthMixin):
        return NormLayer(name, module, class_path, None, "kept", "already converted")
    base = _base_of(module)
    family = KNOWN.get(class_path)
    if family is None:
        family = _BASES.get(base)
    unsupported = _unsupported_class(module)
    is_no_norm = family is None and not _is_norm_of_no_family(module)
    if is_no_norm:
        return None
    reason = unsupported or _why_not_as_its_class(module)
    if reason:
        return NormLayer(name, module, class_path, family, "unsupported", reason)
    norm = NormLayer(name, module, class_path, family, "known")
    if class_path in KNOWN:
        return norm
    formula = proved_formula(module, KNOWN)
    reason = f"no converter knows {class_path}"
    if base is not None:
        base_name = base.__name__.lstrip("_")
        reason = f"derived from {base_name}, and {formula}"
    return norm.settled(formula, reason)


def _base_of(module: nn.Module) -> type[nn.Module] | None:
    """Return torch's class that a module is derived from."""
    return next((base for base in _BASES if isinstance(module, base)), None)


def _unsupported_class(module: nn.Module) -> str:
    """Why no conversion takes a class of this name; empty if one may."""
    for pattern, reason in UNSUPPORTED:
        if re.search(pattern, type(module).__name__):
            return reason
    return ""


def _is_norm_of_no_family(module: nn.Module) -> bool:
    """Whether a module is a normalization that a library has beside those of the families, or has a
    normalization's name and tensors of its own.
    """
    if _unsupported_class(module) and type(module).__module__.startswith((_TORCH, _TIMM)):
        return True
    if not _NAMED_NORM.search(type(module).__name__):
        return False
    if not _tensors_of(module):
        return False
    # A container may be named after the norm that it holds.
    return not any(classify("", child) for child in list(module.modules())[1:])


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers, by name."""
    named = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _why_not_as_its_class(module: nn.Module) -> str:
    """Why a module may not compute what its class does, or not by its own tensors; empty if it
    does.
    """
    if "forward" in vars(module):
        return "its forward was replaced on the instance, so that it may compute something else"
    for name, tensor in _tensors_of(module).items():
        narrow = not tensor.is_floating_point() or tensor.dtype.itemsize == 1
        if name in _TENSORS and narrow:
            return (
                f"its {name} is {tensor.dtype}, in which torch computes nothing; convert in "
                "float32 first"
            )
    computed = [name for name in _TENSORS if isinstance(vars(module).get(name), Tensor)]
    computed += getattr(module, "parametrizations", {})
    if not computed:
        return ""
    return (
        f"its {' and '.join(computed)} is computed from other tensors, as pruning, "
        "parametrizations, weight and spectral normalization do; make it permanent first: "
        "torch.nn.utils.prune.remove, remove_weight_norm, remove_spectral_norm or "
        "parametrize.remove_parametrizations"
    )
