"""A network for another number of classes, or other images, than the one at hand."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from retrofit import surgery
from retrofit.errors import RetrofitError
from retrofit.networks.identify import identify
from retrofit.networks.library import build, with_options
from retrofit.networks.models import Network
from retrofit.networks.tensors import tensors_of
from retrofit.networks.training_settings import set_training_settings, training_settings
from retrofit.record import set_record


def with_classes(network: Network, classes: int) -> tuple[Network, tuple[str, ...]]:
    """Return the network with a new classifier for `classes` classes; everything else is kept.

    The library builds it again with that many outputs and the conversion is repeated, so that its artifact can be
    loaded. The new classifier starts at zero: a random one would first send noise into the trained layers, and the
    features of a network trained at another scale can make its first loss several times that of guessing.

    Args:
        network: A network of a library or an artifact.
        classes: Outputs.

    Returns:
        The network, its outputs without names, and the names of the tensors that are new.

    Raises:
        RetrofitError: If the library cannot build it so, or does not build the network as it stands.
    """
    model = build(with_options(network.source, num_classes=classes))
    plans = surgery.plans_of(network.model)
    model = surgery.replay(model, plans)
    old, new = tensors_of(network.model), tensors_of(model)
    fresh = tuple(name for name in new if name not in old or old[name].shape != new[name].shape)
    gone = [name for name in old if name not in new]
    if gone or len(fresh) > 4 or not fresh:
        raise RetrofitError(
            f"cannot tell the classifier of {network.source} from the rest; build it with {classes} outputs before "
            f"it is converted (`retrofit convert --num-classes {classes}`)"
        )
    identify(network.model, network.source, lambda built: surgery.replay(built, plans))  # nothing was set by hand
    set_training_settings(model, training_settings(network.model))
    for name, tensor in new.items():
        if name not in fresh:
            tensor.data = old[name].data
    model.load_state_dict({name: old[name] for name in new if name not in fresh}, strict=False)  # layers may look at it
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and f"{name}.weight" in fresh:
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)
    model.train(network.model.training)
    set_record(model, preprocess=network.preprocess, weights=network.weights)
    return replace(network, model=model), fresh


def outputs_of(model: nn.Module) -> int | None:
    """Return how many class scores a network gives, as its last linear layer or convolution has them."""
    if isinstance(classes := getattr(model, "num_classes", None), int):
        return classes
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not layers:
        return None
    return layers[-1].out_features if isinstance(layers[-1], nn.Linear) else layers[-1].out_channels


def with_images(network: Network, img_size: int | None, crop_pct: float | None) -> Network:
    """Return the network with another size of its images, or crop, for validation and for its artifact."""
    preprocess = network.preprocess
    if img_size is not None:
        preprocess = replace(preprocess, input_size=(preprocess.input_size[0], img_size, img_size))
    if crop_pct is not None:
        preprocess = replace(preprocess, crop_pct=crop_pct)
    set_record(network.model, preprocess=preprocess)
    return network
