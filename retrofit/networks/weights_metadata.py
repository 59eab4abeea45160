"""What a library says of its weights beside their values: how their images are prepared, what their
outputs are called, and their own name.
"""

from dataclasses import replace

import timm.data
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from retrofit.errors import RetrofitError
from retrofit.networks import torchvision_networks
from retrofit.record import ModelSource, Preprocess, is_size_of_images, record_of
from retrofit.utils.text import one_line


def preprocess_of(model: nn.Module, source: ModelSource) -> Preprocess:
    """Return the preprocessing that the library prescribes for a network's weights, fitted to its
    input.

    A network of one's own may say what it expects as timm's do, in a dict `pretrained_cfg`; else it
    gets timm's usual one, images of 224 pixels with ImageNet's mean and standard deviation.

    Raises:
        RetrofitError: If that `pretrained_cfg` describes no images.
    """
    if source.library == "torchvision":
        usual = torchvision_networks.preprocess_of(source)
    else:
        usual = _timms_preprocess(model, source)
    kwargs = source.kwargs
    channels = kwargs.get("in_chans", usual.input_size[0])
    sides = kwargs.get("img_size", kwargs.get("image_size")) or usual.input_size[1:]
    if isinstance(sides, int):
        sides = (sides, sides)
    height, width = sides
    return replace(
        usual,
        input_size=(channels, height, width),
        mean=_per_channel(usual.mean, channels),
        std=_per_channel(usual.std, channels),
    )


def _timms_preprocess(model: nn.Module, source: ModelSource) -> Preprocess:
    """Return what timm makes of a network's `pretrained_cfg`."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = getattr(first, "in_channels", 3)
    cfg = {"input_size": (channels, 224, 224), **(getattr(model, "pretrained_cfg", None) or {})}
    converted_size = record_of(model).input_size or ()
    is_one_image = len(converted_size) == 3 and is_size_of_images(converted_size)
    # A network that a library builds has the library's size.
    if source.library == "own" and is_one_image:
        cfg["input_size"] = converted_size
    try:
        return Preprocess.from_dict(timm.data.resolve_data_config(pretrained_cfg=cfg))
    except (TypeError, ValueError, OverflowError) as error:
        raise RetrofitError(
            f"the network's `pretrained_cfg` is wrong ({one_line(error)}); mend it"
        ) from error


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return a value for each channel: these, or their mean where there are more or fewer."""
    if len(values) == channels:
        return values
    return (sum(values) / len(values),) * channels


def labels_of(model: nn.Module, source: ModelSource) -> list[str] | None:
    """Name a pretrained network's outputs, ImageNet's by WordNet id; None where the library does
    not tell.
    """
    if source.library == "torchvision":
        return torchvision_networks.labels_of(source)
    names = getattr(model, "pretrained_cfg", {}).get("label_names")
    if names:
        named = len(names) == getattr(model, "num_classes", None)
        if named:
            return list(names)
        return None
    subset = infer_imagenet_subset(model)
    if not subset:
        return None
    return list(ImageNetInfo(subset).label_names())


def weights_name(model: nn.Module, source: ModelSource) -> str:
    """Name the library's trained weights that a network was built with."""
    if source.library == "torchvision":
        return f"{source}, {source.kwargs['weights']}"
    cfg = getattr(model, "pretrained_cfg", {})
    return ".".join(filter(None, (cfg.get("architecture", source.name), cfg.get("tag"))))
