"""What a network expects of its images, and what its outputs are called."""

from __future__ import annotations

from dataclasses import replace

import timm.data
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageNetInfo, infer_imagenet_subset
from torch import nn
from torchvision.models import get_model_weights

from retrofit.errors import RetrofitError
from retrofit.record import ModelSource, Preprocess
from retrofit.utils.text import one_line


def preprocess_of(model: nn.Module, source: ModelSource) -> Preprocess:
    """Return the preprocessing that the library prescribes for a network's weights, fitted to its input.

    A network of one's own may say what it expects as timm's do, in a dict `pretrained_cfg`; else it gets timm's usual
    one, images of 224 pixels with ImageNet's mean and standard deviation. A RetrofitError says that `pretrained_cfg`
    names sizes or numbers that no images have.
    """
    if source.library == "torchvision":
        usual = _torchvision_preprocess(source)
    else:
        if source.library == "timm":
            config = timm.data.resolve_model_data_config(model)
        else:
            first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
            cfg = {"input_size": (3 if first is None else first.in_channels, 224, 224)}
            cfg |= getattr(model, "pretrained_cfg", None) or {}
            config = timm.data.resolve_data_config(pretrained_cfg=cfg)
        try:
            usual = Preprocess.from_dict(config)
        except (TypeError, ValueError, OverflowError) as error:
            what = f"the network's `pretrained_cfg` is none that images can have ({one_line(error)})"
            raise RetrofitError(f"{what}; mend it") from error
    size = source.kwargs.get("img_size", source.kwargs.get("image_size"))
    height, width = (size, size) if isinstance(size, int) else size or usual.input_size[1:]
    channels = source.kwargs.get("in_chans", usual.input_size[0])

    def each_channel(values: tuple[float, ...]) -> tuple[float, ...]:
        return values if len(values) == channels else (sum(values) / len(values),) * channels

    mean, std = each_channel(usual.mean), each_channel(usual.std)
    return replace(usual, input_size=(channels, height, width), mean=mean, std=std)


def _torchvision_preprocess(source: ModelSource) -> Preprocess:
    try:
        transforms = get_model_weights(source.name)[source.kwargs.get("weights", "DEFAULT")].transforms()
    except (ValueError, KeyError):  # a network that the user registered, without weights
        transforms = None
    resize = getattr(transforms, "resize_size", None) or [224 * 8 // 7]
    crop = getattr(transforms, "crop_size", None) or (resize if hasattr(transforms, "resize_size") else [224])
    return Preprocess(
        input_size=(3, crop[0], crop[-1]),
        mean=tuple(getattr(transforms, "mean", IMAGENET_DEFAULT_MEAN)),
        std=tuple(getattr(transforms, "std", IMAGENET_DEFAULT_STD)),
        interpolation=getattr(getattr(transforms, "interpolation", None), "value", "bilinear"),
        crop_pct=crop[0] / resize[0],
    )


def labels_of(model: nn.Module, source: ModelSource) -> list[str] | None:
    """Name a pretrained network's outputs, ImageNet's by WordNet id; None where the library does not tell."""
    if source.library == "torchvision":
        weights = source.kwargs.get("weights")
        names = get_model_weights(source.name)[weights].meta.get("categories") if weights else None
        return list(ImageNetInfo().label_names() if len(names) == 1000 else names) if names else None
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
