"""Model sources: names of timm's, torchvision's and one's own networks, and how these are built."""

import difflib
import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from torchvision.models import list_models

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import own_networks, torchvision_networks
from retrofit.networks.hub_connection import no_waiting_for_the_hub
from retrofit.record import PREFIX, RESERVED_KWARGS, ModelSource, set_record
from retrofit.utils.files import ensure_readable
from retrofit.utils.text import one_line

_CHECKPOINTS = (".pth", ".pt", ".bin", ".tar", ".ckpt", ".npz")


def parse(text: str) -> ModelSource:
    """Find the network that a name means.

    It may be a timm name with optional tag, `tv:NAME`, a name that only torchvision has,
    `hf-hub:ID`, `local-dir:FOLDER`, or `py:package.module:callable`, which is imported.

    Raises:
        UsageError: If there is no such network; the message shows the closest names.
        RetrofitError: If the module of `py:` cannot be imported.
    """
    if text.startswith(PREFIX):
        name = text.removeprefix(PREFIX)
        builder = own_networks.imported(name)
        own_networks.named_builders[name] = builder
        return ModelSource("own", name)
    torchvision_names = list_models()
    prefix, rest = split_prefix(text)
    if prefix == "hf-hub":
        return ModelSource("timm", f"hf-hub:{rest}")
    if prefix == "local-dir":
        return _local_source(rest)
    if prefix in ("tv", "torchvision") and rest in torchvision_names:
        return ModelSource("torchvision", rest)
    source = _timm_name(text)
    if source is not None:
        return source
    if text in torchvision_names:
        return ModelSource("torchvision", text)
    prefixed_names = [f"tv:{name}" for name in torchvision_names]
    base = text.partition(".")[0]
    names = timm.list_models() + prefixed_names
    raise _unknown(text, base, names)


def _local_source(folder: str) -> ModelSource:
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(
            f"no folder with timm's config.json at {folder!r}; check the path after local-dir:"
        )
    return ModelSource("timm", f"local-dir:{folder}")


def _timm_name(text: str) -> ModelSource | None:
    """Return timm's network of a name, with its tag, if timm has such an architecture."""
    deprecated = timm.models.get_deprecated_models()
    name = deprecated.get(text) or text
    base = name.partition(".")[0]
    if not timm.is_model(base) or base in deprecated:
        return None
    tagged = timm.models.get_arch_pretrained_cfgs(base)
    if name != base and name not in tagged:
        raise _unknown(text, text, [*tagged] or [base], cutoff=0.0)
    return ModelSource("timm", name)


def split_prefix(text: str) -> tuple[str, str]:
    """Split "hf_hub:NAME" into "hf-hub" and the name; the prefix is empty if there is none, or
    nothing follows it.
    """
    prefix, _, rest = text.partition(":")
    if not rest:
        return "", text
    return prefix.replace("_", "-").lower(), rest


def _unknown(text: str, sought: str, names: list[str], cutoff: float = 0.5) -> UsageError:
    if Path(text).suffix == ".onnx":
        return UsageError(
            f"{text} is an exported file, for evaluate and bench alone; give the artifact it was "
            "made of"
        )
    if Path(text).suffix in _CHECKPOINTS:
        return UsageError(
            f"{text} is no network's name and no artifact; give a name, and this file as its "
            "checkpoint"
        )
    if text and Path(text).exists():
        return UsageError(
            f"{text} is no network's name; give an artifact (*.safetensors) or the name of a "
            "network"
        )
    close = difflib.get_close_matches(sought.lower(), names, n=5, cutoff=cutoff)
    close.sort(key=lambda name: not name.startswith(sought.lower()))
    forms = (
        "a name of timm, tv:NAME, hf-hub:OWNER/NAME, local-dir:FOLDER, py:MODULE:CALLABLE or "
        "an artifact"
    )
    if close:
        return UsageError(f"unknown model {text!r}; did you mean {', '.join(close)}?")
    return UsageError(f"unknown model {text!r}; give {forms} (*.safetensors)")


def with_options(
    source: ModelSource,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Add the command line's options to a source, under the names that its builder knows them by.

    A network that takes images of any size has no argument for it: there `img_size` changes nothing
    here, and the caller records it in the preprocessing.

    Raises:
        UsageError: If an option is out of range, or means nothing to the builder.
    """
    _check_least("num_classes", num_classes, 0)
    _check_least("in_chans", in_chans, 1)
    _check_least("img_size", img_size, 1)
    if model_kwargs and source.library == "own":
        raise UsageError(
            f"`model_kwargs` means nothing to {source}; write a function that passes them, and "
            "name that"
        )
    if in_chans is not None and source.library == "torchvision":
        raise UsageError(
            f"torchvision's {source.name} has no `in_chans`; take timm's network instead"
        )
    sizes = {"num_classes": num_classes, "in_chans": in_chans, _size_argument(source): img_size}
    kwargs = {
        name: value for name, value in sizes.items() if name is not None and value is not None
    }
    return replace(source, kwargs={**source.kwargs, **(model_kwargs or {}), **kwargs})


def _check_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UsageError(f"`{name}={value}` is out of range; it must be at least {least}")


def _size_argument(source: ModelSource) -> str | None:
    """Name the builder's argument for the image's side; None where the network takes any size."""
    if source.library == "torchvision":
        if source.name.startswith("vit_"):
            return "image_size"
        return None
    if source.library == "own":
        if own_networks.takes(source.name, "img_size"):
            return "img_size"
        return None
    cfg = timm.models.get_pretrained_cfg(source.name)
    if cfg is not None and cfg.fixed_input_size:
        return "img_size"
    return None


def build(source: ModelSource, pretrained: bool = False) -> nn.Module:
    """Build a network, with random weights or the library's trained ones; its record says where it
    came from.

    Raises:
        RetrofitError: If there is no such network, or its weights cannot be had.
        UsageError: If its builder does not take the source's arguments.
    """
    if ":" not in source.name:
        parse(str(source))
    prefix, folder = split_prefix(source.name)
    if pretrained and prefix == "local-dir":
        _check_folder(Path(folder))
    fetches = pretrained or prefix == "hf-hub"
    waiting = no_waiting_for_the_hub() if fetches else nullcontext()
    try:
        # What the libraries say about defaults that will change is not for the user.
        with warnings.catch_warnings(action="ignore"), waiting:
            model, source = _built(source, pretrained)
    except RetrofitError:
        raise
    # The builders raise anything: TypeError, AssertionError, KeyError, OSError, ...
    except Exception as error:
        raise _build_error(source, pretrained, error) from error
    set_record(model, source=source)
    return model


def _check_folder(folder: Path) -> None:
    """Refuse a folder with a pipe in it: timm opens one of the files, and would wait."""
    for file in folder.iterdir():
        if not file.is_dir():
            ensure_readable(file)


def _built(source: ModelSource, pretrained: bool) -> tuple[nn.Module, ModelSource]:
    """Build a network by its library, and return its source with what is known by then."""
    if source.library == "own":
        return own_networks.build(source.name, source.kwargs), source
    if source.library == "torchvision":
        return torchvision_networks.build(source, pretrained)
    model = timm.create_model(source.name, pretrained=pretrained, **source.kwargs)
    if ":" in source.name:
        # So that the hub or the folder is not needed again.
        source = timm_source(model) or source
    return model, source


def _build_error(source: ModelSource, pretrained: bool, error: Exception) -> RetrofitError:
    message = one_line(error)
    # The hub's message is three sentences long.
    if isinstance(error, LocalEntryNotFoundError):
        message = "it is not in the cache, and the hub cannot be reached"
    on_hub = source.name.startswith("hf-hub:")
    if isinstance(error, OSError) and (pretrained or on_hub):
        instead = "pass `checkpoint=FILE`"
        if on_hub:
            instead += " with a plain timm name"
        return RetrofitError(
            f"cannot download {source} ({message}); check the network, or {instead}"
        )
    if pretrained and (
        "No pretrained weights" in message or isinstance(error, KeyError | AttributeError)
    ):
        return RetrofitError(
            f"no pretrained weights for {source}; pass `checkpoint=FILE` or drop `pretrained`"
        )
    if source.kwargs:
        arguments = ", ".join(f"{name}={value!r}" for name, value in source.kwargs.items())
        return UsageError(
            f"cannot build {source} with {arguments}: {message}; change or drop these options"
        )
    return RetrofitError(f"cannot build {source}: {message}; choose another network")


def timm_source(model: nn.Module) -> ModelSource | None:
    """Read the source from what timm writes on its networks; None for others.

    Raises:
        RetrofitError: If the network was built with an argument that is no JSON value.
    """
    cfg = getattr(model, "pretrained_cfg", None)
    if not isinstance(cfg, dict) or not cfg.get("architecture"):
        return None
    name = _tagged_name(cfg)
    arguments = {**_builder_arguments(cfg), **getattr(model, "_model_args", {})}
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int):
        arguments["num_classes"] = classes
    try:
        arguments = json.loads(json.dumps(arguments))
    except TypeError as error:
        raise RetrofitError(
            f"{name} was built with an argument that a file cannot hold ({error}); build it from "
            "names and numbers, or `save(source='own')`"
        ) from error
    registered = timm.models.get_pretrained_cfg(name)
    defaults = {}
    if registered is not None:
        defaults = _builder_arguments(registered.to_dict())
    changed = {
        key: value
        for key, value in arguments.items()
        if defaults.get(key) != value and key not in RESERVED_KWARGS
    }
    return ModelSource("timm", name, changed)


def _tagged_name(cfg: Mapping[str, Any]) -> str:
    """Return the name in a pretrained_cfg, with its tag if timm knows it."""
    architecture = str(cfg["architecture"])
    name = architecture
    if cfg.get("tag"):
        name = f"{architecture}.{cfg['tag']}"
    try:
        return parse(name).name
    except UsageError:
        # A tag that only the hub's file knows.
        return architecture


def _builder_arguments(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the builder's arguments that timm takes from a pretrained_cfg."""
    arguments = {
        name: cfg[name] for name in ("num_classes", "global_pool") if cfg.get(name) is not None
    }
    input_size = cfg.get("input_size")
    if input_size:
        arguments["in_chans"] = input_size[0]
        if cfg.get("fixed_input_size"):
            arguments["img_size"] = list(input_size[1:])
    return arguments
