"""Networks of timm, of torchvision and of one's own: found by name, built, and what they expect of
their images.

One's own is `py:package.module:callable`, imported because the user typed it, and for no other
reason. An artifact of such a network holds that name for people to read: what builds the network is
said anew each time.
"""

import difflib
import importlib
import json
import logging
import os
import socket
import sys
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import timm
import timm.data
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ImageNetInfo,
    infer_imagenet_subset,
)
from torch import nn
from torchvision.models import (
    WeightsEnum,
    get_model,
    get_model_builder,
    get_model_weights,
    list_models,
)

from retrofit.errors import RetrofitError, UsageError
from retrofit.record import (
    PREFIX,
    RESERVED_KWARGS,
    ModelSource,
    Preprocess,
    record_of,
    set_record,
)
from retrofit.utils.files import ensure_readable
from retrofit.utils.text import one_line, printable, with_class

_CHECKPOINTS = (".pth", ".pt", ".bin", ".tar", ".ckpt", ".npz")
typed: dict[
    str, Callable[..., Any]
    # what builds networks of one's own, by the names typed in this process
] = {}


def parse(text: str) -> ModelSource:
    """Find the network that a name means; a UsageError shows the closest names.

    It may be a timm name with optional tag, `tv:NAME`, a name that only torchvision has,
    `hf-hub:ID`, `local-dir:FOLDER`, or `py:package.module:callable`, which is imported: a
    RetrofitError says why it cannot be.
    """
    if text.startswith(PREFIX):
        name = text.removeprefix(PREFIX)
        typed[name] = _imported(name)
        return ModelSource("own", name)
    torchvision_names = list_models()
    match split_prefix(text):
        case "hf-hub", name:
            return ModelSource("timm", f"hf-hub:{name}")
        case "local-dir", folder:
            if not (Path(folder) / "config.json").is_file():
                raise UsageError(
                    f"no folder with timm's config.json at {folder!r}; check the path after local-dir:"
                )
            return ModelSource("timm", f"local-dir:{folder}")
        case "tv" | "torchvision", name if name in torchvision_names:
            return ModelSource("torchvision", name)
    deprecated = timm.models.get_deprecated_models()
    name = deprecated.get(text) or text
    base = name.partition(".")[0]
    if timm.is_model(base) and base not in deprecated:
        tagged = timm.models.get_arch_pretrained_cfgs(base)
        if name == base or name in tagged:
            return ModelSource("timm", name)
        raise _unknown(text, text, [*tagged] or [base], cutoff=0.0)
    if text in torchvision_names:
        return ModelSource("torchvision", text)
    raise _unknown(text, base, [*timm.list_models(), *(f"tv:{name}" for name in torchvision_names)])


def split_prefix(text: str) -> tuple[str, str]:
    """Split "hf_hub:NAME" into "hf-hub" and the name; the prefix is empty if there is none, or
    nothing follows it.
    """
    prefix, _, rest = text.partition(":")
    return (prefix.replace("_", "-").lower(), rest) if rest else ("", text)


def _unknown(text: str, sought: str, names: list[str], cutoff: float = 0.5) -> UsageError:
    if Path(text).suffix == ".onnx":
        return UsageError(
            f"{text} is an exported file, for evaluate and bench alone; give the artifact it was made of"
        )
    if Path(text).suffix in _CHECKPOINTS:
        return UsageError(
            f"{text} is no network's name and no artifact; give a name, and this file as its checkpoint"
        )
    if text and Path(text).exists():
        return UsageError(
            f"{text} is no network's name; give an artifact (*.safetensors) or the name of a network"
        )
    close = difflib.get_close_matches(sought.lower(), names, n=5, cutoff=cutoff)
    close.sort(key=lambda name: not name.startswith(sought.lower()))
    forms = "a name of timm, tv:NAME, hf-hub:OWNER/NAME, local-dir:FOLDER, py:MODULE:CALLABLE or an artifact"
    hint = f"did you mean {', '.join(close)}?" if close else f"give {forms} (*.safetensors)"
    return UsageError(f"unknown model {text!r}; {hint}")


def _imported(name: str) -> Callable[..., Any]:
    """Import the callable that a user typed, "package.module:callable", also from the working
    folder.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise UsageError(
            f"{PREFIX}{printable(name, 100)} names no callable; write py:package.module:callable"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    # anything may come out of the user's own module
    except Exception as error:
        what = f"cannot import {module_name} ({with_class(error)})"
        raise RetrofitError(f"{what}; run this in its folder, or set PYTHONPATH") from error
    for part in path.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target) if not name.startswith("_")]
            close = difflib.get_close_matches(part, names, n=3) or names[:5] or ["nothing"]
            raise UsageError(f"{module_name} has no {path}; it has {', '.join(close)}")
        target = getattr(target, part)
    if not callable(target):
        raise UsageError(
            f"{path} of {module_name} is a {type(target).__name__}; name a function or class that builds"
        )
    return target


def class_source(model: nn.Module) -> ModelSource:
    """Return the source of a network that no name was typed for: its class."""
    return ModelSource("own", f"{type(model).__module__}:{type(model).__qualname__}")


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
    """
    for size, value, least in (
        ("num_classes", num_classes, 0),
        ("in_chans", in_chans, 1),
        ("img_size", img_size, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"`{size}={value}` is out of range; it must be at least {least}")
    if model_kwargs and source.library == "own":
        raise UsageError(
            f"`model_kwargs` means nothing to {source}; write a function that passes them, and name that"
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


def _size_argument(source: ModelSource) -> str | None:
    """Name the builder's argument for the image's side; None where the network takes any size."""
    if source.library == "torchvision":
        return "image_size" if source.name.startswith("vit_") else None
    if source.library == "own":
        return "img_size" if _takes(source.name, "img_size") else None
    cfg = timm.models.get_pretrained_cfg(source.name)
    return "img_size" if cfg is not None and cfg.fixed_input_size else None


def build(source: ModelSource, pretrained: bool = False) -> nn.Module:
    """Build a network, with random weights or the library's trained ones; its record says where it
    came from.
    """
    if ":" not in source.name:
        parse(str(source))
    prefix, folder = split_prefix(source.name)
    if pretrained and prefix == "local-dir":
        # timm opens one of them, and would wait for a pipe.
        for file in Path(folder).iterdir():
            if not file.is_dir():
                ensure_readable(file, "file")
    fetches = pretrained or prefix == "hf-hub"
    try:
        # what the libraries say about defaults that will change is not for the user
        with (
            warnings.catch_warnings(action="ignore"),
            no_waiting_for_the_hub() if fetches else nullcontext(),
        ):
            if source.library == "own":
                model = _build_own(source.name, source.kwargs)
            elif source.library == "torchvision":
                model, source = _build_torchvision(source, pretrained)
            else:
                model = timm.create_model(source.name, pretrained=pretrained, **source.kwargs)
                # so that the hub or the folder is not needed again
                if ":" in source.name:
                    source = timm_source(model) or source
    except RetrofitError:
        raise
    except (
        Exception
        # the builders raise anything: TypeError, AssertionError, KeyError, OSError, ...
    ) as error:
        raise _build_error(source, pretrained, error) from error
    set_record(model, source=source)
    return model


def _build_own(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    if name not in typed:
        raise RetrofitError(
            f"{PREFIX}{printable(name, 100)} is a network of one's own, which nobody named here"
        )
    if missing := [key for key in kwargs if not _takes(name, key)]:
        raise UsageError(
            f"{name} takes no {missing[0]}; give it that argument, or leave out `{missing[0]}`"
        )
    try:
        model = typed[name](**kwargs)
    # anything may come out of the user's own code
    except Exception as error:
        raise RetrofitError(f"{name} builds no network ({with_class(error)}); mend it") from error
    if not isinstance(model, nn.Module):
        raise RetrofitError(
            f"{name} returns a {type(model).__name__}; let it return a torch.nn.Module"
        )
    return model


def _takes(name: str, argument: str) -> bool:
    """Whether a builder that was typed has an argument of this name."""
    return any(
        argument == p.name or p.kind is p.VAR_KEYWORD
        for p in signature(typed[name]).parameters.values()
    )


def _build_torchvision(source: ModelSource, pretrained: bool) -> tuple[nn.Module, ModelSource]:
    kwargs = dict(source.kwargs)
    name = kwargs.pop("weights", "DEFAULT" if pretrained else None)
    weights = None if name is None else get_model_weights(source.name)[name]
    structure_only = weights is not None and not pretrained
    if "weights_backbone" in signature(get_model_builder(source.name)).parameters:
        kwargs["weights_backbone"] = "DEFAULT" if kwargs.pop("trained_backbone", False) else None
        structure_only |= kwargs["weights_backbone"] is not None
    with ExitStack() as patches:
        if (
            structure_only
        ):  # what torchvision builds for weights (frozen norms, no auxiliary heads), without any
            patches.enter_context(mock.patch.object(WeightsEnum, "get_state_dict", return_value={}))
            patches.enter_context(
                mock.patch.object(nn.Module, "load_state_dict", return_value=None)
            )
            if (
                weights is not None
                and "categories" in weights.meta
                and (classes := kwargs.get("num_classes"))
            ):
                # builders compare another number of classes with the names in the weights' record
                patches.enter_context(mock.patch.dict(weights.meta, categories=range(classes)))
        model = get_model(source.name, weights=weights, **kwargs)
    if weights is not None:
        source = replace(source, kwargs={**source.kwargs, "weights": weights.name})
    return model, source


@contextmanager
def no_waiting_for_the_hub() -> Iterator[None]:
    """Without a network use only what is cached: the hub's client would try, and say so, for 20
    seconds a file.
    """
    offline, log = constants.HF_HUB_OFFLINE, logging.getLogger("huggingface_hub")
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname or "", 443)
        except OSError:
            offline = True
    with mock.patch.object(constants, "HF_HUB_OFFLINE", offline), ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        yield


def _build_error(source: ModelSource, pretrained: bool, error: Exception) -> RetrofitError:
    said = one_line(error)
    # its message is three sentences long
    if isinstance(error, LocalEntryNotFoundError):
        said = "it is not in the cache, and the hub cannot be reached"
    on_hub = source.name.startswith("hf-hub:")
    if isinstance(error, OSError) and (pretrained or on_hub):
        instead = "pass `checkpoint=FILE`" + (" with a plain timm name" if on_hub else "")
        return RetrofitError(f"cannot download {source} ({said}); check the network, or {instead}")
    if pretrained and (
        "No pretrained weights" in said or isinstance(error, KeyError | AttributeError)
    ):
        return RetrofitError(
            f"no pretrained weights for {source}; pass `checkpoint=FILE` or drop `pretrained`"
        )
    if source.kwargs:
        given = ", ".join(f"{name}={value!r}" for name, value in source.kwargs.items())
        return UsageError(
            f"cannot build {source} with {given}: {said}; change or drop these options"
        )
    return RetrofitError(f"cannot build {source}: {said}; choose another network")


def timm_source(model: nn.Module) -> ModelSource | None:
    """Read the source from what timm writes on its networks; None for others."""
    cfg = getattr(model, "pretrained_cfg", None)
    if not isinstance(cfg, dict) or not cfg.get("architecture"):
        return None
    name = f"{cfg['architecture']}.{cfg['tag']}" if cfg.get("tag") else cfg["architecture"]
    try:
        name = parse(name).name
    except UsageError:
        # a tag that only the hub's file knows
        name = cfg["architecture"]
    registered = timm.models.get_pretrained_cfg(name)
    defaults = _builder_arguments(registered.to_dict()) if registered is not None else {}
    arguments = {**_builder_arguments(cfg), **getattr(model, "_model_args", {})}
    if isinstance(classes := getattr(model, "num_classes", None), int):
        arguments["num_classes"] = classes
    try:
        arguments = json.loads(json.dumps(arguments))
    except TypeError as error:
        what = f"{name} was built with an argument that a file cannot hold ({error})"
        raise RetrofitError(
            f"{what}; build it from names and numbers, or `save(source='own')`"
        ) from error
    changed = {key: value for key, value in arguments.items() if defaults.get(key) != value}
    return ModelSource(
        "timm", name, {key: value for key, value in changed.items() if key not in RESERVED_KWARGS}
    )


def _builder_arguments(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the builder's arguments that timm takes from a pretrained_cfg."""
    arguments = {
        name: cfg[name] for name in ("num_classes", "global_pool") if cfg.get(name) is not None
    }
    if cfg.get("input_size"):
        arguments["in_chans"] = cfg["input_size"][0]
        if cfg.get("fixed_input_size"):
            arguments["img_size"] = list(cfg["input_size"][1:])
    return arguments


def preprocess_of(model: nn.Module, source: ModelSource) -> Preprocess:
    """Return the preprocessing that the library prescribes for a network's weights, fitted to its
    input.

    A network of one's own may say what it expects as timm's do, in a dict `pretrained_cfg`; else it
    gets timm's usual one, images of 224 pixels with ImageNet's mean and standard deviation.
    """
    if source.library == "torchvision":
        usual = _torchvision_preprocess(source)
    else:
        first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        cfg = {"input_size": (3 if first is None else first.in_channels, 224, 224)}
        cfg |= getattr(model, "pretrained_cfg", None) or {}
        given = record_of(model).input_size
        # of a network that a library builds, the library's size counts
        if source.library == "own" and given is not None and len(given) == 3:
            cfg["input_size"] = given
        try:
            usual = Preprocess.from_dict(timm.data.resolve_data_config(pretrained_cfg=cfg))
        except (TypeError, ValueError, OverflowError) as error:
            raise RetrofitError(
                f"the network's `pretrained_cfg` is wrong ({one_line(error)}); mend it"
            ) from error
    size = source.kwargs.get("img_size", source.kwargs.get("image_size"))
    height, width = (size, size) if isinstance(size, int) else size or usual.input_size[1:]
    channels = source.kwargs.get("in_chans", usual.input_size[0])

    def each_channel(values: tuple[float, ...]) -> tuple[float, ...]:
        return values if len(values) == channels else (sum(values) / len(values),) * channels

    mean, std = each_channel(usual.mean), each_channel(usual.std)
    return replace(usual, input_size=(channels, height, width), mean=mean, std=std)


def _torchvision_preprocess(source: ModelSource) -> Preprocess:
    try:
        transforms = get_model_weights(source.name)[
            source.kwargs.get("weights", "DEFAULT")
        ].transforms()
    # a network that the user registered, without weights
    except (ValueError, KeyError):
        transforms = None
    resize = getattr(transforms, "resize_size", None) or [224 * 8 // 7]
    crop = getattr(transforms, "crop_size", None) or (
        resize if hasattr(transforms, "resize_size") else [224]
    )
    return Preprocess(
        input_size=(3, crop[0], crop[-1]),
        mean=tuple(getattr(transforms, "mean", IMAGENET_DEFAULT_MEAN)),
        std=tuple(getattr(transforms, "std", IMAGENET_DEFAULT_STD)),
        interpolation=getattr(getattr(transforms, "interpolation", None), "value", "bilinear"),
        crop_pct=crop[0] / resize[0],
    )


def labels_of(model: nn.Module, source: ModelSource) -> list[str] | None:
    """Name a pretrained network's outputs, ImageNet's by WordNet id; None where the library does
    not tell.
    """
    if source.library == "torchvision":
        weights = source.kwargs.get("weights")
        names = get_model_weights(source.name)[weights].meta.get("categories") if weights else None
        return (
            list(ImageNetInfo().label_names() if len(names) == 1000 else names) if names else None
        )
    if names := getattr(model, "pretrained_cfg", {}).get("label_names"):
        return list(names) if len(names) == getattr(model, "num_classes", None) else None
    subset = infer_imagenet_subset(model)
    return list(ImageNetInfo(subset).label_names()) if subset else None


def weights_name(model: nn.Module, source: ModelSource) -> str:
    """Name the library's trained weights that a network was built with."""
    if source.library == "torchvision":
        return f"{source}, {source.kwargs['weights']}"
    cfg = getattr(model, "pretrained_cfg", {})
    return ".".join(filter(None, (cfg.get("architecture", source.name), cfg.get("tag"))))
