"""Model sources: names of timm's, torchvision's and one's own networks, and how these are built."""

import difflib
import json
import warnings
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from torch import nn
from torchvision.models import list_models

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import own_networks, torchvision_networks
from retrofit.networks.hub_connection import no_waiting_for_the_hub
from retrofit.record import PREFIX, RESERVED_KWARGS, ModelSource, set_record
from retrofit.utils.files import read_text
from retrofit.utils.text import one_line

_FOLDER = "local-dir:"


def parse(text: str) -> ModelSource:
    """Find the network that a name means.

    It may be a timm name with optional tag, `tv:NAME`, a name that only torchvision has,
    `hf-hub:ID`, `local-dir:FOLDER`, or `py:package.module:callable`, which is imported.

    Raises:
        UsageError: If there is no such network, the message shows the closest names; or what `py:`
            names cannot be imported.
    """
    if text.startswith(PREFIX):
        name = text.removeprefix(PREFIX)
        own_networks.named_builders[name] = own_networks.imported(name)
        return ModelSource("own", name)
    torchvision_names = list_models()
    prefix, rest = split_prefix(text)
    if prefix in ("hf-hub", "local-dir"):
        return ModelSource("timm", f"{prefix}:{rest}")
    if prefix in ("tv", "torchvision") and rest in torchvision_names:
        return ModelSource("torchvision", rest)
    deprecated = timm.models.get_deprecated_models()
    name = deprecated.get(text) or text
    base = name.partition(".")[0]
    tagged = timm.models.get_arch_pretrained_cfgs(base)
    # A name that timm means to keep.
    is_current = timm.is_model(base) and base not in deprecated
    if name in tagged or (name == base and is_current):
        return ModelSource("timm", name)
    if text in torchvision_names:
        return ModelSource("torchvision", text)
    raise _unknown(text, tagged)


def split_prefix(text: str) -> tuple[str, str]:
    """Split "hf_hub:NAME" into "hf-hub" and the name; the prefix is empty if there is none, or
    nothing follows it.
    """
    prefix, _, rest = text.partition(":")
    if not rest:
        return "", text
    return prefix.replace("_", "-").lower(), rest


def _unknown(text: str, tagged: Collection[str]) -> UsageError:
    """Return the error for a name that means no network; `tagged` are a network's names with tags
    where only the tag is unknown.
    """
    if text and Path(text).exists():
        return UsageError(
            f"{text} is no network's name and no artifact; give an artifact (*.safetensors), or a "
            "network's name and a file of weights as its checkpoint"
        )
    names = [*tagged] or [*timm.list_models(), *(f"tv:{name}" for name in list_models())]
    close = difflib.get_close_matches(text.lower(), names, n=5, cutoff=0.5)
    advice = f"did you mean {', '.join(close)}?"
    if not close:
        advice = (
            "give a name of timm, tv:NAME, hf-hub:OWNER/NAME, local-dir:FOLDER, "
            "py:MODULE:CALLABLE or an artifact (*.safetensors)"
        )
    return UsageError(f"unknown model {text!r}; {advice}")


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
        UsageError: If `model_kwargs` are given for a network of one's own.
    """
    if model_kwargs and source.library == "own":
        raise UsageError(
            f"`model_kwargs` means nothing to {source}; write a function that passes them, and "
            "name that"
        )
    sizes = {"num_classes": num_classes, "in_chans": in_chans, _size_argument(source): img_size}
    kwargs = {
        name: value for name, value in sizes.items() if name is not None and value is not None
    }
    return replace(source, kwargs={**source.kwargs, **(model_kwargs or {}), **kwargs})


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
    if source.name.startswith(_FOLDER):
        _check_folder(source.name.removeprefix(_FOLDER))
    fetches = pretrained or source.name.startswith("hf-hub:")
    waiting = no_waiting_for_the_hub() if fetches else nullcontext()
    try:
        # What the libraries say about defaults that will change is not for the user.
        with warnings.catch_warnings(action="ignore"), waiting:
            model, source = _built(source, pretrained)
    except RetrofitError:
        raise
    # The builders raise anything: TypeError, AssertionError, KeyError, OSError, ...
    except Exception as error:
        raise _build_error(source, error) from error
    set_record(model, source=source)
    return model


def _check_folder(folder: str) -> None:
    """Make sure that a folder holds the description of a network, as timm writes it.

    Raises:
        RetrofitError: If it does not.
    """
    advice = "give a folder that `retrofit.save_for_hub` or timm wrote"
    text = read_text(Path(folder, "config.json"), "description of a network", advice=advice)
    try:
        described = isinstance(json.loads(text), dict)
    # Endless nesting is a RecursionError.
    except (ValueError, RecursionError):
        described = False
    if not described:
        raise RetrofitError(f"{folder}/config.json describes no network; {advice}")


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


def _build_error(source: ModelSource, error: Exception) -> RetrofitError:
    # What stands in backticks is read as an argument of ours.
    message = one_line(error).replace("`", "'")
    if isinstance(error, OSError):
        return RetrofitError(
            f"cannot download {source} ({message}); check the network or the path, or pass "
            "`checkpoint=FILE` with a plain name"
        )
    arguments = ", ".join(f"{name}={value!r}" for name, value in source.kwargs.items())
    return UsageError(
        f"cannot build {source} with {arguments or 'no options'}: {message}; change these options, "
        "or choose another network"
    )


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
    """Return the name in a pretrained_cfg, with its tag unless only the hub's file knows that."""
    architecture = str(cfg["architecture"])
    name = f"{architecture}.{cfg.get('tag')}"
    if name in timm.models.get_arch_pretrained_cfgs(architecture):
        return name
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
