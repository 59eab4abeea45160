"""The network of a run: opened, fitted to the images' size and the data's classes, and copied as its
own teacher.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timm.utils import random_seed
from torch import Tensor, nn

from retrofit import surgery
from retrofit.errors import RetrofitError, UsageError
from retrofit.evaluation import class_scores
from retrofit.finetune import run_state
from retrofit.finetune.divergence import not_finite
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_images import UNLABELLED, Images
from retrofit.networks import artifact
from retrofit.networks.identify import identify
from retrofit.networks.model_sources import build, with_options
from retrofit.networks.open_model import Network, open_model
from retrofit.networks.state_tensors import state_tensors, versioned
from retrofit.networks.training_settings import set_training_settings, training_settings
from retrofit.record import set_record
from retrofit.utils.forward_pass import evaluating
from retrofit.utils.text import one_line, plural, shortlist

# Weights and biases of a head, or of two with a distillation token.
_MOST_NEW_TENSORS = 4


def recipe_network(recipe: Recipe, network: str | None = None) -> Network:
    """Open the network that a recipe names; random weights come from its seed.

    Args:
        recipe: The settings of the run.
        network: As for `open_model`: what builds it, if an artifact holds the user's own.

    Raises:
        UsageError: If the recipe names none.
        RetrofitError: If it cannot be opened.
    """
    if recipe.model is None:
        raise UsageError(
            "there is no network to train; give MODEL, an artifact or a network's name"
        )
    random_seed(recipe.seed)
    options: dict[str, Any] = {}
    # Without a checkpoint, the run replaces the classifier.
    if recipe.checkpoint:
        options["num_classes"] = recipe.num_classes
    if artifact.artifact_path(recipe.model) is None:
        options["img_size"] = recipe.img_size
    return open_model(
        recipe.model,
        pretrained=recipe.pretrained,
        checkpoint=recipe.checkpoint,
        match=recipe.match,
        network=network,
        **options,
    )


def resume_network(folder: Path, network: str | None = None) -> Network:
    """Open the network that a run in `folder` began with; `network` as for `open_model`.

    Raises:
        RetrofitError: If no run began there.
    """
    if not (folder / run_state.START).is_file():
        raise RetrofitError(
            f"no run to resume in {folder}; give the folder of one, or start one without `resume`"
        )
    return open_model(str(folder / run_state.START), network=network)


def fit_network(
    network: Network, images: Images, recipe: Recipe, note: Callable[[str], None]
) -> tuple[Network, tuple[str, ...]]:
    """Give a network the recipe's image size and the data's outputs and labels.

    Args:
        network: The network, whose record is changed.
        images: The images of the run.
        recipe: The settings of the run.
        note: Called with a sentence for each change.

    Returns:
        The network, and the names of its new tensors.

    Raises:
        UsageError: If the recipe's outputs are fewer than the data has classes.
        RetrofitError: If the network cannot be trained on these images: it holds NaN or infinity,
            it does not take them, its classifier cannot be replaced, or it has to teach and its
            outputs or their names differ from the data's.
    """
    name = not_finite(network.model)
    if name is not None:
        raise RetrofitError(
            f"{name} of {network.source} holds NaN or infinity before the first step; "
            "train from other weights"
        )
    _set_image_size(network, recipe)
    present = scores_of(network)
    class_names = images.names
    outputs = recipe.num_classes or len(class_names or ()) or present
    _refuse_too_few(outputs, images, recipe)
    new_tensors: tuple[str, ...] = ()
    if outputs != present:
        if recipe.teacher == "source":
            raise RetrofitError(
                f"the source network has {plural(present, 'output')} and cannot teach "
                f"{plural(outputs, 'class')}; give `class_map`, or {UNLABELLED}"
            )
        network, new_tensors = with_classes(network, outputs)
        named = ""
        if class_names is not None and len(class_names) == outputs:
            named = f" ({shortlist(class_names)})"
        tensors = state_tensors(network.model)
        is_zero = not any(tensors[name].any() for name in new_tensors)
        start = "to zero" if is_zero else "at random"
        note(f"new classifier: {outputs} outputs{named} in place of {present}, initialized {start}")
    elif recipe.labelled:
        doubt = images.train.doubt(outputs, network.labels)
        _say_doubt(doubt, recipe, note)
    if class_names is not None:
        # Other outputs than the data has classes stay without names.
        labels = list(class_names) if len(class_names) == outputs else None
        set_record(network.model, labels=labels)
    return network, new_tensors


def _refuse_too_few(outputs: int, images: Images, recipe: Recipe) -> None:
    """Refuse fewer outputs than the data has classes."""
    needed = images.train.outputs or 0
    if recipe.labelled and needed > outputs:
        raise UsageError(
            f"the data needs {plural(needed, 'output')}, one for each class; "
            f"give `num_classes={needed}` or leave it out"
        )


def _say_doubt(doubt: str, recipe: Recipe, note: Callable[[str], None]) -> None:
    """Note that the data's classes may not be the network's outputs; refuse it of a teacher."""
    if not doubt:
        return
    if recipe.teacher == "source":
        raise RetrofitError(
            f"{doubt}, so that its teacher may contradict the labels; "
            f"give `class_map`, or {UNLABELLED}"
        )
    note(f"{doubt}; if that is wrong, give `class_map`")


def _set_image_size(network: Network, recipe: Recipe) -> None:
    preprocess = network.preprocess
    channels, height, width = preprocess.input_size
    size = (channels, recipe.img_size or height, recipe.img_size or width)
    crop_pct = recipe.crop_pct or preprocess.crop_pct
    set_record(network.model, preprocess=replace(preprocess, input_size=size, crop_pct=crop_pct))


def scores_of(network: Network) -> int:
    """Return how many class scores a network gives in training for an image of its record's size.

    Raises:
        RetrofitError: If it gives no class scores, or does not take the image.
    """
    channels, height, width = network.preprocess.input_size
    with evaluating(network.model):
        # Only this module's mode: networks with several heads choose by it.
        network.model.training = True
        try:
            answer = network.model(torch.zeros(1, channels, height, width))
        except Exception as error:
            raise RetrofitError(
                f"{network.source} does not take images of {height} x {width} pixels "
                f"({one_line(error)}); give another `img_size`, or build it for this size before "
                f"it is converted (`retrofit convert --img-size {width}`)"
            ) from error
    return class_scores(answer).shape[1]


def with_classes(network: Network, classes: int) -> tuple[Network, tuple[str, ...]]:
    """Return the network with a new classifier, all else kept, and the names of the tensors that
    are new.

    The library builds it again with that many outputs, which have no names, and the conversion is
    repeated, so that its artifact can be loaded. The new classifier starts at zero if it can: a random one
    would first send noise into the trained layers, and the features of a network trained at another
    scale can make its first loss several times that of guessing.

    Raises:
        RetrofitError: If the library cannot build it, or does not build the network as it stands.
    """
    plans = surgery.plans_of(network.model)
    source = with_options(network.source, num_classes=classes)
    model = surgery.replay(build(source), plans)
    old = state_tensors(network.model)
    new = state_tensors(model)
    fresh = tuple(name for name in new if name not in old or old[name].shape != new[name].shape)
    lost = old.keys() - new.keys()
    is_classifier = 0 < len(fresh) <= _MOST_NEW_TENSORS
    if lost or not is_classifier:
        raise RetrofitError(
            f"cannot tell the classifier of {network.source} from the rest; "
            "convert it anew with as many outputs, "
            f"`retrofit convert --num-classes {classes}`"
        )
    # It refuses a network that was changed by hand, which would be lost.
    identify(network.model, network.source)
    set_training_settings(model, training_settings(network.model))
    kept = {name: old[name] for name in new if name not in fresh}
    for name, tensor in kept.items():
        new[name].data = tensor.data
    # Layers may react to loading.
    model.load_state_dict(versioned(model, kept), strict=False)
    image = torch.ones(1, *network.preprocess.input_size)
    _zero_classifier(model, fresh, image)
    model.train(network.model.training)
    set_record(model, preprocess=network.preprocess, weights=network.weights)
    return replace(network, model=model), fresh


def _zero_classifier(model: Any, fresh: tuple[str, ...], image: Tensor) -> None:
    """Start a new classifier at zero, unless an image's scores give zeros no gradient: SqueezeNet
    has a ReLU behind its own.
    """
    parameters = [
        parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and f"{name}.weight" in fresh
        for parameter in module.parameters(recurse=False)
    ]
    drawn = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        nn.init.zeros_(parameter)
    with evaluating(model), torch.enable_grad():
        total = class_scores(model(image)).sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    if any(gradient is not None and gradient.any() for gradient in gradients):
        return
    for parameter, values in zip(parameters, drawn, strict=True):
        parameter.data = values


def source_network(network: Network, resumed: bool = False) -> nn.Module:
    """Return a converted network's source, to teach it: a frozen copy at strength 0.

    Args:
        network: The converted network.
        resumed: Whether its run is resumed. Then it was checked when the run began, before the
            first strength was set.

    Raises:
        RetrofitError: If no layer has a strength, or the network was trained since its conversion,
            as steps or strength tell: it is no longer its source.
    """
    layers = surgery.strength_layers(network.model)
    if not layers:
        raise RetrofitError(
            "`teacher='source'` needs layers that have a strength; convert first, or drop `teacher`"
        )
    trained = network.weights.get("steps") or any(layer.strength for layer in layers)
    if trained and not resumed:
        raise RetrofitError(
            "`teacher='source'` is the network at strength 0, but this was trained, or raised, "
            "since its conversion; convert the source anew and train that, or drop `teacher`"
        )
    source = copy.deepcopy(network.model)
    surgery.set_strength(source, 0.0)
    return source.eval().requires_grad_(False)
