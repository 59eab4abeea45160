"""What is known about a network beside its tensors: one record, which travels with the network.

`build`, `open_model` and `load` write where a network comes from, a conversion adds its plan, and
`save` writes the record into the artifact. Copies and pickles of a network carry it along.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.text import shortlist, shown

# Begins the name of what builds a network of one's own: `py:package.module:callable`.
PREFIX = "py:"
# Arguments of the builders that fetch or read weights: that is the business of `pretrained` and
# `checkpoint`, and an artifact must not be able to ask for it.
RESERVED_KWARGS = frozenset(
    {
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "checkpoint_path",
        "cache_dir",
        "weights_backbone",
    }
)
_ATTRIBUTE = "_retrofit_record"
# FSDP's wrapper, and the parameters of `fully_shard`
_SHARDED = ("FullyShardedDataParallel", "DTensor")
_LARGEST_SIDE = 16_384
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True)
class ModelSource:
    """Where a network comes from: all that is needed to build its structure again.

    torchvision builds some networks differently when weights are asked for. There `kwargs` names
    the weights as `weights`, and says of detection and segmentation networks by `trained_backbone`
    that their backbone has some; what is built then has that structure, and nothing is fetched.

    Attributes:
        library: What builds it; "own" for a network of the user's own.
        name: The library's ("resnet50.a1_in1k"); for "own" what builds it
            ("package.module:callable"), or its class.
        kwargs: Arguments of the builder, JSON values.

    Raises:
        UsageError: If an argument would fetch or read weights.
    """

    library: Literal["timm", "torchvision", "own"]
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the name as the command line takes it."""
        return {"torchvision": "tv:", "own": PREFIX}.get(self.library, "") + self.name

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelSource":
        """Rebuild from `asdict`'s values, which may come from anyone.

        Raises:
            ValueError: If the name is not a library's own: no weights to fetch, nothing to import.
        """
        source = cls(str(values["library"]), str(values["name"]), dict(values["kwargs"]))  # type: ignore[arg-type]
        registered = source.library in ("timm", "torchvision") and ":" not in source.name
        if source.library != "own" and not registered:
            raise ValueError(f"{source.name!r} of {source.library!r} is not a registered network")
        return source

    def __post_init__(self) -> None:
        refused = sorted(RESERVED_KWARGS & self.kwargs.keys())
        if refused:
            raise UsageError(
                f"{refused[0]!r} is not a model argument; use `pretrained=True` or "
                "`checkpoint=FILE`"
            )


@dataclass(frozen=True)
class Preprocess:
    """What a network expects of its images, as `timm.data.create_transform` takes it.

    Attributes:
        input_size: (C, H, W).
        mean: Per channel.
        std: Per channel.
        interpolation: How images are resized.
        crop_pct: Share of the resized image that is left.
        crop_mode: How it is cut out.

    Raises:
        UsageError: If no images have such sizes and numbers. Values of other types may raise
            TypeError or OverflowError.
    """

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        check_size(self.input_size)
        are_deviations = _are_numbers(self.std) and min(self.std) > 0
        is_share = _is_number(self.crop_pct) and self.crop_pct > 0
        valid = {
            "mean": _are_numbers(self.mean),
            "std": are_deviations,
            "crop_pct": is_share,
            "interpolation": self.interpolation in _INTERPOLATIONS,
            "crop_mode": self.crop_mode in _CROP_MODES,
        }
        for name, is_valid in valid.items():
            if not is_valid:
                value = getattr(self, name)
                words = shown(value)
                raise UsageError(f"no images have {name} {words}; mend the preprocessing")

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, as JSON has them: sequences are lists."""
        values = asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocess":
        """Rebuild from `to_dict`'s values, which may come from anyone; raise TypeError also for
        other names.
        """
        plain: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
        }
        return cls(**plain)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number, numpy's float64 among them, and no truth value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value)


def _are_numbers(values: Any) -> bool:
    """Whether a value is a tuple of numbers; a file's text, or nothing, may stand there."""
    return isinstance(values, tuple) and bool(values) and all(map(_is_number, values))


def is_size_of_images(sizes: Sequence[Any]) -> bool:
    """Whether sizes are a (C, H, W) or (N, C, H, W) that images may have."""
    possible = all(type(size) is int and 0 < size <= _LARGEST_SIDE for size in sizes)
    return len(sizes) in (3, 4) and possible


def check_size(sizes: Sequence[Any]) -> None:
    """Check the size of images.

    Raises:
        UsageError: If it is no (C, H, W) or (N, C, H, W).
    """
    if not is_size_of_images(sizes):
        raise UsageError(f"no images have size {shown(sizes)}; mend the preprocessing")


@dataclass(frozen=True)
class Record:
    """What is known about a network; None where nobody said.

    Attributes:
        source: Where it comes from.
        weights: {"kind": "random" | "pretrained" | "checkpoint" | "unknown", "from": str | None};
            of a checkpoint also, where there is something to say, "key" (which of its weights were
            taken), "others" (which were not), "left_random" (tensors of the network that it did not
            give) and "left_out" (its own that were not taken).
        preprocess: What it expects of its images.
        labels: Names of its outputs; ImageNet's are WordNet ids ("n01440764").
        plans: The conversions that it went through, in order (`retrofit.surgery.Plan`).
        input_size: The shape of one sample, (C, H, W) for images, that its user last converted it
            with, as `input_size` or as `inputs` of one tensor.
    """

    source: ModelSource | None = None
    weights: Mapping[str, Any] | None = None
    preprocess: Preprocess | None = None
    labels: list[str] | None = None
    plans: tuple[Any, ...] = ()
    input_size: tuple[int, ...] | None = None


def record_of(model: nn.Module) -> Record:
    """Return the record of a network, or of the one in a wrapper; an empty one if it has none."""
    record = vars(unwrapped(model)).get(_ATTRIBUTE)
    if isinstance(record, Record):
        return record
    return Record()


def set_record(model: nn.Module, **changes: Any) -> None:
    """Change fields of a network's record; the others stay as they are."""
    vars(unwrapped(model))[_ATTRIBUTE] = replace(record_of(model), **changes)


def plans_of(model: nn.Module) -> list[Any]:
    """Return the conversions that a network went through, in order, those of its parts included.

    A part that was converted by itself, `net.encoder, _ = convert(net.encoder, "ln")`, has a record
    of its own. When the network around it is converted, that record is copied into the network's;
    so a part's plan that is in no record around it came last.
    """
    plans: list[Any] = []
    # A wrapper of torch.compile inside has the record of the module in it.
    seen: set[nn.Module] = set()
    modules = unwrapped(model).named_modules()
    for name, module in modules:
        network = unwrapped(module)
        if network in seen:
            continue
        seen.add(network)
        for plan in record_of(network).plans:
            names = filter(None, (name, plan.part))
            part = ".".join(names)
            moved = replace(plan, part=part)
            if moved not in plans:
                plans.append(moved)
    return plans


def forget_plans(model: nn.Module) -> None:
    """Remove the conversions from the records of a network and of its parts."""
    for module in model.modules():
        if record_of(module).plans:
            set_record(module, plans=())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network in wrappers of torch.compile, DataParallel and DistributedDataParallel."""
    parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    name = "_orig_mod"
    if parallel:
        name = "module"
    inner = vars(model).get("_modules", {}).get(name)
    if inner is None:
        return model
    return unwrapped(inner)


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a network of whose parameters this process holds a share alone.

    Raises:
        RetrofitError: If it is one.
    """
    for part in (*model.modules(), *model.parameters()):
        if type(part).__name__.startswith(_SHARDED):
            raise RetrofitError(
                "the network is sharded, so that no process holds it whole; gather its state "
                "(get_model_state_dict of torch.distributed.checkpoint.state_dict, with "
                "full_state_dict=True) and load that into a converted copy that is not sharded"
            )


def network_in(model: nn.Module) -> nn.Module:
    """Return the network inside wrappers of torch.compile and DataParallel, which call it as it is.

    Raises:
        UsageError: If it is no network.
        RetrofitError: If it is or holds what keeps its parameters or its code elsewhere, or
            parameters without a shape.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a torch.nn.Module is converted, not {shown(model)}; build the network first, as "
            "timm.create_model does"
        )
    keepers = ("DistributedDataParallel", *_SHARDED)
    for part in (*model.modules(), *model.parameters()):
        if type(part).__name__.startswith(keepers) or isinstance(part, ScriptModule):
            raise RetrofitError(
                f"{type(part).__name__} holds parameters or code that no conversion reaches; "
                "convert the network first, then wrap, shard or script it"
            )
    lazy = [
        name
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if is_lazy(tensor)
    ]
    if lazy:
        raise RetrofitError(
            f"{shortlist(lazy)} have no shape until the network is called; run one forward pass "
            "and convert again"
        )
    return unwrapped(model)
