"""Networks of timm and torchvision: found by name, and built."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import socket
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from torch import nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import own
from retrofit.record import PREFIX, RESERVED_KWARGS, ModelSource, set_record
from retrofit.utils.text import one_line


def parse(text: str) -> ModelSource:
    """Find the network that a name means; a UsageError shows the closest names.

    It may be a timm name with optional tag, `tv:NAME`, a name that only torchvision has, `hf-hub:ID`,
    `local-dir:FOLDER`, or `py:package.module:callable`, which is imported: a RetrofitError says why it cannot be.
    """
    import timm
    from torchvision.models import list_models as list_torchvision

    if text.startswith(PREFIX):
        own.resolve(text.removeprefix(PREFIX))
        return ModelSource("own", text.removeprefix(PREFIX))
    prefix, colon, rest = text.partition(":")
    prefix = prefix.replace("_", "-").lower()
    if colon and prefix == "hf-hub" and rest:
        return ModelSource("timm", f"hf-hub:{rest}")
    if colon and prefix == "local-dir" and rest:
        if not (Path(rest) / "config.json").is_file():
            raise UsageError(f"no folder with timm's config.json at {rest!r}; check the path after local-dir:")
        return ModelSource("timm", f"local-dir:{rest}")
    torchvision_names = list_torchvision()
    if colon:
        if prefix in {"tv", "torchvision"} and rest in torchvision_names:
            return ModelSource("torchvision", rest)
        raise _unknown(text, text, [f"tv:{name}" for name in torchvision_names])

    deprecated = timm.models.get_deprecated_models()
    name = deprecated.get(text, text)
    if name is None:
        raise UsageError(f"timm has removed {text!r} without a replacement; choose another network")
    base = name.partition(".")[0]
    if timm.is_model(base) and base not in deprecated:
        tagged = timm.models.get_arch_pretrained_cfgs(base)
        if name == base or name in tagged:
            return ModelSource("timm", name)
        raise _unknown(text, text, [*tagged] or [base], cutoff=0.0)
    if text in torchvision_names:
        return ModelSource("torchvision", text)
    if text and Path(text).exists():
        kind = "folder" if Path(text).is_dir() else "file"
        raise UsageError(f"{text} is a {kind} and no network; give an artifact (*.safetensors) or a network's name")
    raise _unknown(text, base, [*timm.list_models(), *(f"tv:{name}" for name in torchvision_names)])


def _unknown(text: str, sought: str, names: list[str], cutoff: float = 0.5) -> UsageError:
    close = difflib.get_close_matches(sought.lower(), names, n=5, cutoff=cutoff)
    close.sort(key=lambda name: not name.startswith(sought.lower()))
    forms = "a name of timm, tv:NAME, hf-hub:OWNER/NAME, local-dir:FOLDER, py:MODULE:CALLABLE or an artifact"
    hint = f"did you mean {', '.join(close)}?" if close else f"give {forms} (*.safetensors)"
    return UsageError(f"unknown model {text!r}; {hint}")


def with_options(
    source: ModelSource,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Add the command line's options to a source, under the names that its builder knows them by.

    A network that takes images of any size has no argument for it: there `img_size` changes nothing here, and the
    caller records it in the preprocessing. A UsageError says which option is out of range, unknown to the library's
    builder, or asks for weights.
    """
    for size, value, least in (("num_classes", num_classes, 0), ("in_chans", in_chans, 1), ("img_size", img_size, 1)):
        if value is not None and value < least:
            raise UsageError(f"`{size}={value}` is out of range; it must be at least {least}")
    if model_kwargs and source.library == "own":
        raise UsageError(f"`model_kwargs` means nothing to {source}; write a function that passes them, and name that")
    if in_chans is not None and source.library == "torchvision":
        raise UsageError(f"torchvision's {source.name} has no `in_chans`; take timm's network instead")
    sizes = {"num_classes": num_classes, "in_chans": in_chans}
    if img_size is not None and (name := _size_argument(source)):
        sizes[name] = img_size
    kwargs = {name: value for name, value in sizes.items() if value is not None}
    changed = replace(source, kwargs={**source.kwargs, **(model_kwargs or {}), **kwargs})
    changed.refuse_reserved()
    return changed


def _size_argument(source: ModelSource) -> str | None:
    """Name the builder's argument for the image's side; None where the network takes any size."""
    if source.library == "own":
        return "img_size" if own.takes(source.name, "img_size") else None
    if source.library == "torchvision":
        return "image_size" if source.name.startswith("vit_") else None
    if ":" in source.name:
        return None
    import timm

    cfg = timm.models.get_pretrained_cfg(source.name)
    return "img_size" if cfg is not None and cfg.fixed_input_size else None


def build(source: ModelSource, pretrained: bool = False) -> nn.Module:
    """Build a network, with random weights or the library's trained ones; its record says where it came from.

    A UsageError says that the library does not know the name or an argument, a RetrofitError that the weights do not
    exist or cannot be fetched.
    """
    source.refuse_reserved()
    if ":" not in source.name:
        parse(str(source))
    try:
        with _quiet(), no_waiting_for_the_hub() if pretrained or source.name.startswith("hf-hub:") else nullcontext():
            if source.library == "own":
                model = own.build(source.name, source.kwargs)
            elif source.library == "torchvision":
                model, source = _build_torchvision(source, pretrained)
            else:
                import timm

                model = timm.create_model(source.name, pretrained=pretrained, **source.kwargs)
                if ":" in source.name:  # so that the hub or the folder is not needed again
                    source = timm_source(model) or source
    except RetrofitError:
        raise
    except Exception as error:  # the builders raise anything: TypeError, AssertionError, KeyError, OSError, ...
        raise _build_error(source, pretrained, error) from error
    set_record(model, source=source)
    return model


def _build_torchvision(source: ModelSource, pretrained: bool) -> tuple[nn.Module, ModelSource]:
    from torchvision.models import get_model, get_model_builder, get_model_weights

    kwargs = dict(source.kwargs)
    name = kwargs.pop("weights", "DEFAULT" if pretrained else None)
    weights = None if name is None else get_model_weights(source.name)[name]
    structure_only = weights is not None and not pretrained
    if "weights_backbone" in inspect.signature(get_model_builder(source.name)).parameters:
        kwargs["weights_backbone"] = "DEFAULT" if kwargs.pop("trained_backbone", False) else None
        structure_only |= kwargs["weights_backbone"] is not None
    with _structure_only(weights, kwargs.get("num_classes")) if structure_only else nullcontext():
        model = get_model(source.name, weights=weights, **kwargs)
    if weights is not None:
        source = replace(source, kwargs={**source.kwargs, "weights": weights.name})
    return model, source


@contextmanager
def _structure_only(weights: Any, classes: int | None) -> Iterator[None]:
    """Let torchvision build what it builds for weights (frozen norms, no auxiliary heads, ...) without any weights.

    Its builders compare another number of classes with the names in the weights' record.
    """
    from torchvision.models import WeightsEnum

    fetch = mock.patch.object(WeightsEnum, "get_state_dict", return_value={})
    load = mock.patch.object(nn.Module, "load_state_dict", return_value=None)
    named = classes is not None and weights is not None and "categories" in weights.meta
    with fetch, load, mock.patch.dict(weights.meta, categories=range(classes or 0)) if named else nullcontext():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the libraries say about defaults that will change and about requests that will be repeated."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        hub.setLevel(level)


@contextmanager
def no_waiting_for_the_hub() -> Iterator[None]:
    """Without a network use only what is cached: the hub's client would try for 20 seconds a file."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname or "", 443)
        except OSError:
            offline = True
    with mock.patch.object(constants, "HF_HUB_OFFLINE", offline):
        yield


def _build_error(source: ModelSource, pretrained: bool, error: Exception) -> RetrofitError:
    from huggingface_hub.errors import LocalEntryNotFoundError

    said = one_line(error)
    if isinstance(error, LocalEntryNotFoundError):  # its message is three sentences long
        said = "it is not in the cache, and the hub cannot be reached"
    on_hub = source.name.startswith("hf-hub:")
    if isinstance(error, OSError) and (pretrained or on_hub):
        instead = "pass `checkpoint=FILE`" + (" with a plain timm name" if on_hub else "")
        return RetrofitError(f"cannot download {source} ({said}); check the network, or {instead}")
    if pretrained and ("No pretrained weights" in said or isinstance(error, KeyError | AttributeError)):
        return RetrofitError(
            f"there are no pretrained weights for {source}; pass `checkpoint=FILE` or drop `pretrained`"
        )
    given = ", ".join(f"{name}={value!r}" for name, value in source.kwargs.items())
    if given:
        return UsageError(f"cannot build {source} with {given}: {said}; change or drop these options")
    return RetrofitError(f"cannot build {source}: {said}; choose another network")


def timm_source(model: nn.Module) -> ModelSource | None:
    """Read the source from what timm writes on its networks; None for others."""
    import timm

    cfg = getattr(model, "pretrained_cfg", None)
    if not isinstance(cfg, dict) or not cfg.get("architecture"):
        return None
    name = f"{cfg['architecture']}.{cfg['tag']}" if cfg.get("tag") else cfg["architecture"]
    try:
        name = parse(name).name
    except UsageError:
        name = cfg["architecture"]  # a tag that only the hub's file knows
    registered = timm.models.get_pretrained_cfg(name)
    defaults = _builder_arguments(registered.to_dict()) if registered is not None else {}
    arguments = {**_builder_arguments(cfg), **getattr(model, "_model_args", {})}
    if isinstance(classes := getattr(model, "num_classes", None), int):
        arguments["num_classes"] = classes
    try:
        arguments = json.loads(json.dumps(arguments))
    except TypeError as error:
        raise RetrofitError(
            f"{name} was built with an argument that a file cannot hold ({error}); build it from names and numbers, or "
            "save it with `save(source='own')`"
        ) from error
    changed = {key: value for key, value in arguments.items() if defaults.get(key) != value}
    return ModelSource("timm", name, {key: value for key, value in changed.items() if key not in RESERVED_KWARGS})


def _builder_arguments(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the builder's arguments that timm takes from a pretrained_cfg."""
    arguments = {name: cfg[name] for name in ("num_classes", "global_pool") if cfg.get(name) is not None}
    if cfg.get("input_size"):
        arguments["in_chans"] = cfg["input_size"][0]
        if cfg.get("fixed_input_size"):
            arguments["img_size"] = list(cfg["input_size"][1:])
    return arguments
