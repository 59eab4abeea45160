"""torchvision's networks: built with the structure that weights have, but without fetching any."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageNetInfo
from torch import nn
from torchvision.models import WeightsEnum, get_model, get_model_builder, get_model_weights

from retrofit.record import ModelSource, Preprocess
from retrofit.utils.forward_pass import replaced

# The sides of images that are resized and then cropped, where weights say nothing.
_RESIZED = 256
_CROPPED = 224


def build(source: ModelSource, pretrained: bool) -> tuple[nn.Module, ModelSource]:
    """Build a network, and return its source with the name of the weights that shaped it.

    Args:
        source: The builder's name and arguments.
        pretrained: Whether to fetch the weights; else only the structure is theirs.
    """
    name = source.name
    kwargs = dict(source.kwargs)
    usual_weights = None
    if pretrained:
        usual_weights = "DEFAULT"
    weights_name = kwargs.pop("weights", usual_weights)
    weights = None
    if weights_name is not None:
        weights = get_model_weights(name)[weights_name]
    builder = get_model_builder(name)
    parameters = signature(builder).parameters
    trained_backbone = False
    if "weights_backbone" in parameters:
        trained_backbone = kwargs.pop("trained_backbone", False)
        kwargs["weights_backbone"] = "DEFAULT" if trained_backbone else None
    loading: AbstractContextManager[None] = nullcontext()
    if not pretrained and (weights is not None or trained_backbone):
        loading = _nothing_loaded(weights, kwargs.get("num_classes"))
    with loading:
        model = get_model(name, weights=weights, **kwargs)
    if weights is not None:
        source = replace(source, kwargs={**source.kwargs, "weights": weights.name})
    return model, source


@contextmanager
def _nothing_loaded(weights: WeightsEnum | None, classes: int | None) -> Iterator[None]:
    """Let torchvision's builders make the structure for `weights`, and fetch and load nothing.

    A builder decides in its own body what weights change (frozen norms, no auxiliary heads, another
    transform of the input), and loads them before it returns. Neither can be had without the other,
    so loading does nothing meanwhile. Builders also compare a number of `classes` with the names in
    the weights' record.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(WeightsEnum, "get_state_dict", lambda *_, **__: {}))
        stack.enter_context(replaced(nn.Module, "load_state_dict", lambda *_, **__: None))
        if weights is not None and classes and "categories" in weights.meta:
            names = weights.meta["categories"]
            weights.meta["categories"] = range(classes)
            stack.callback(weights.meta.update, categories=names)
        yield


def preprocess_of(source: ModelSource) -> Preprocess:
    """Return the preprocessing of a network's weights; the usual one where it has none."""
    transforms = _transforms_of(source)
    crop = getattr(transforms, "crop_size", None)
    resize = getattr(transforms, "resize_size", None) or [_RESIZED]
    if not crop:
        # What is only resized is not cropped.
        crop = [_CROPPED]
        if hasattr(transforms, "resize_size"):
            crop = resize
    interpolation = getattr(transforms, "interpolation", None)
    return Preprocess(
        input_size=(3, crop[0], crop[-1]),
        mean=tuple(getattr(transforms, "mean", IMAGENET_DEFAULT_MEAN)),
        std=tuple(getattr(transforms, "std", IMAGENET_DEFAULT_STD)),
        interpolation=getattr(interpolation, "value", "bilinear"),
        crop_pct=crop[0] / resize[0],
    )


def _transforms_of(source: ModelSource) -> Any:
    """Return what torchvision prepares images with; None for a network without weights, which the
    user registered.
    """
    try:
        weights = get_model_weights(source.name)
        return weights[source.kwargs.get("weights", "DEFAULT")].transforms()
    except (ValueError, KeyError):
        return None


def labels_of(source: ModelSource) -> list[str] | None:
    """Name the outputs of a network's weights, ImageNet's by WordNet id; None where it has none."""
    weights = source.kwargs.get("weights")
    names = None
    if weights:
        names = get_model_weights(source.name)[weights].meta.get("categories")
    if not names:
        return None
    return list(ImageNetInfo().label_names() if len(names) == 1000 else names)
