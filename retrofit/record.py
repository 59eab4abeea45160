"""What is known about a network beside its tensors: one record, which travels with the network.

`build`, `open_model` and `load` write where a network comes from, a conversion adds its plan, and
`save` writes the record into the artifact. Copies and pickles of a network carry it along.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import nn

from retrofit.errors import UsageError
from retrofit.utils.text import shown

# of what builds a network of one's own: `py:package.module:callable`
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
_LARGEST_SIDE = 16_384
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True)
class ModelSource:
    """Where a network comes from: all that is needed to build its structure again.

    torchvision builds some networks differently when weights are asked for. There `kwargs` names
    the weights as `weights`, and says of detection and segmentation networks by `trained_backbone`
    that their backbone has some; what is built then has that structure, and nothing is fetched. A
    UsageError says which argument would fetch or read any.
    """

    # "own": a network of the user's own
    library: Literal["timm", "torchvision", "own"]
    # the library's ("resnet50.a1_in1k"); for "own" what builds it ("package.module:callable"), or
    # its class
    name: str
    # of the builder, JSON values
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the name as the command line takes it."""
        return {"torchvision": "tv:", "own": PREFIX}.get(self.library, "") + self.name

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelSource":
        """Rebuild from `asdict`'s values, which may come from anyone: only registered names, no
        weights to fetch.
        """
        source = cls(str(values["library"]), str(values["name"]), dict(values["kwargs"]))  # type: ignore[arg-type]
        if source.library != "own" and (
            source.library not in ("timm", "torchvision") or ":" in source.name
        ):
            raise ValueError(f"{source.name!r} of {source.library!r} is not a registered network")
        return source

    def __post_init__(self) -> None:
        if refused := sorted(RESERVED_KWARGS & self.kwargs.keys()):
            raise UsageError(
                f"{refused[0]!r} is not a model argument; use `pretrained=True` or `checkpoint=FILE`"
            )


@dataclass(frozen=True)
class Preprocess:
    """What a network expects of its images, as `timm.data.create_transform` takes it; mean and std
    are per channel.

    Raises:
        UsageError: If no images have such sizes and numbers; TypeError or OverflowError for what is
            none.
    """

    # (C, H, W)
    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        check_size(self.input_size)
        right = {
            "interpolation": self.interpolation in _INTERPOLATIONS,
            "crop_mode": self.crop_mode in _CROP_MODES,
        }
        for name, numbers in (
            ("mean", self.mean),
            ("std", self.std),
            ("crop_pct", (self.crop_pct,)),
        ):
            # A file's text may stand where numbers belong, or none
            is_filled = isinstance(numbers, tuple) and bool(numbers)
            # As numpy's float64
            real = all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers)
            right[name] = (
                is_filled
                and real
                and all(math.isfinite(x) and (name == "mean" or x > 0) for x in numbers)
            )
        for name in (name for name in right if not right[name]):
            raise UsageError(
                f"no images have {name} {shown(getattr(self, name))}; mend the preprocessing"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocess":
        """Rebuild from `to_dict`'s values, which may come from anyone; raise TypeError also for
        other names.
        """
        plain: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in values.items()
        }
        return cls(**plain)


def check_size(sizes: Sequence[Any]) -> None:
    """Raise UsageError for what is no (C, H, W) or (N, C, H, W) of images."""
    if len(sizes) not in (3, 4) or not all(
        type(size) is int and 0 < size <= _LARGEST_SIDE for size in sizes
    ):
        raise UsageError(f"no images have size {shown(sizes)}; mend the preprocessing")


@dataclass(frozen=True)
class Record:
    """What is known about a network; None where nobody said.

    `weights` is {"kind": "random" | "pretrained" | "checkpoint" | "unknown", "from": str | None};
    of a checkpoint also, where there is something to say, "key" (which of its weights were taken),
    "others" (which were not), "left_random" (tensors of the network that it did not give) and
    "left_out" (its own that were not taken).
    """

    source: ModelSource | None = None
    weights: Mapping[str, Any] | None = None
    preprocess: Preprocess | None = None
    # of its outputs; ImageNet's are WordNet ids ("n01440764")
    labels: list[str] | None = None
    plans: tuple[
        Any, ...
        # the conversions that it went through, in order (`retrofit.surgery.Plan`)
    ] = ()
    # The shape of one sample, (C, H, W) for images, that its user last converted it with
    input_size: tuple[int, ...] | None = None


def record_of(model: nn.Module) -> Record:
    """Return the record of a network, or of the one in a wrapper; an empty one if it has none."""
    found = vars(unwrapped(model)).get(_ATTRIBUTE)
    return found if isinstance(found, Record) else Record()


def set_record(model: nn.Module, **changes: Any) -> None:
    """Change fields of a network's record; the others stay as they are."""
    vars(unwrapped(model))[_ATTRIBUTE] = replace(record_of(model), **changes)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network in wrappers of torch.compile, DataParallel and DistributedDataParallel."""
    kind = (
        "module"
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        else "_orig_mod"
    )
    inner = vars(model).get("_modules", {}).get(kind)
    return model if inner is None else unwrapped(inner)
