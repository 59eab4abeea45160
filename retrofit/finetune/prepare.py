"""A network made ready for a run: its image size and classes, its layers' momentum and noise, what
is trained; what a step minimizes, and by which optimizer and schedule of timm's.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from retrofit import surgery
from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.data import UNLABELLED, Images
from retrofit.finetune.divergence import not_finite
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.statistics import estimated_layers
from retrofit.layers import FrozenBatchNorm, NormalityMixin, ProxyNorm, StrengthMixin
from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.frozen_batch_norm import TrainedAffine
from retrofit.layers.strength import odd_strengths
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.networks.contents import set_training_settings, tensors_of, training_settings
from retrofit.networks.library import build, with_options
from retrofit.networks.models import Network
from retrofit.networks.rebuild import identify
from retrofit.record import set_record
from retrofit.utils.running import evaluating
from retrofit.utils.text import one_line, plural, shortlist

_FUSED = (
    "adam",
    "adamw",
    "momentum",
    "nesterov",
    "sgd",
)  # torch's: one pass over the weights, and a flag to skip it
# share of the source's running statistics at the end of a run, above which the user is warned
_OLD = 0.05


def fit_network(
    network: Network, images: Images, recipe: Recipe, note: Callable[[str], None]
) -> tuple[Network, tuple[str, ...]]:
    """Give a network the recipe's image size and the data's outputs and labels; return it and the
    names of new tensors.

    `note` is called with a sentence for each change. A RetrofitError says why the network cannot be
    trained on these images: it holds NaN or infinity, it does not take them, its classifier cannot
    be replaced, or it has to teach and its outputs or their names differ from the data's.
    """
    if (name := not_finite(network.model)) is not None:
        what = f"{name} of {network.source} holds NaN or infinity before the first step"
        raise RetrofitError(f"{what}; train from other weights")
    former = network.preprocess
    channels, height, width = former.input_size
    size = (channels, recipe.img_size or height, recipe.img_size or width)
    set_record(
        network.model,
        preprocess=replace(former, input_size=size, crop_pct=recipe.crop_pct or former.crop_pct),
    )
    present = scores_of(network, former.input_size)
    outputs = recipe.num_classes or len(images.names or ()) or present
    new_tensors: tuple[str, ...] = ()
    if outputs != present:
        if recipe.teacher == "source":
            teaches = f"the source network has {plural(present, 'output')} and cannot teach {plural(outputs, 'class')}"
            raise RetrofitError(f"{teaches}; give `class_map`, or {UNLABELLED}")
        network, new_tensors = with_classes(network, outputs)
        note(f"new classifier: {outputs} outputs in place of {present}, initialized to zero")
    if recipe.labelled and images.train.contradicts(
        network.labels
    ):  # a new classifier has no labels
        classes, labels = shortlist(images.train.names or ()), shortlist(network.labels or ())
        what = (
            f"the data's classes ({classes}) are not what the network calls its outputs ({labels})"
        )
        if recipe.teacher == "source":
            may = "so that its teacher may contradict the labels"
            raise RetrofitError(f"{what}, {may}; give `class_map`, or {UNLABELLED}")
        note(
            f"{what}: they were taken for its outputs in their order; if that is wrong, give `class_map`"
        )
    if (
        images.names is not None
    ):  # where outputs are left over, the network's own names are none of theirs
        set_record(
            network.model, labels=list(images.names) if len(images.names) == outputs else None
        )
    return network, new_tensors


def scores_of(network: Network, built_for: tuple[int, int, int] | None = None) -> int:
    """Return how many class scores a network gives for an image of its record's size.

    A RetrofitError says that it gives none, or does not take the image: that it is `built_for`
    others, (C, H, W).
    """
    size = network.preprocess.input_size
    with evaluating(network.model):
        network.model.training = (
            # of this module alone: networks with several heads ask it which to use
            True
        )
        try:
            answer = network.model(torch.zeros(1, *size))
        except Exception as error:
            what = f"{network.source} does not take images of {size[1]} x {size[2]} pixels ({one_line(error)})"
            advice = "give another `img_size`"
            if built_for is not None and size != built_for:
                build = f"build it for this size before it is converted (`retrofit convert --img-size {size[-1]}`)"
                advice = f"give `img_size={built_for[-1]}`, or {build}"
            raise RetrofitError(f"{what}; {advice}") from error
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        what = (
            f"a tensor of shape {tuple(answer.shape)}"
            if isinstance(answer, Tensor)
            else type(answer).__name__
        )
        raise RetrofitError(
            f"{network.source} gives {what} in training, not class scores; use an image classifier"
        )
    return answer.shape[1]


def with_classes(network: Network, classes: int) -> tuple[Network, tuple[str, ...]]:
    """Return the network with a new classifier, all else kept, and the names of the tensors that
    are new.

    The library builds it again with that many outputs, which have no names, and the conversion is
    repeated, so that its artifact can be loaded. A RetrofitError says if the library cannot, or
    does not build the network as it stands. The new classifier starts at zero: a random one would
    first send noise into the trained layers, and the features of a network trained at another scale
    can make its first loss several times that of guessing.
    """
    plans = surgery.plans_of(network.model)
    model = surgery.replay(build(with_options(network.source, num_classes=classes)), plans)
    old, new = tensors_of(network.model), tensors_of(model)
    fresh = tuple(name for name in new if name not in old or old[name].shape != new[name].shape)
    if not old.keys() <= new.keys() or not 0 < len(fresh) <= 4:
        what = f"cannot tell the classifier of {network.source} from the rest"
        raise RetrofitError(
            f"{what}; convert it anew with as many outputs, `retrofit convert --num-classes {classes}`"
        )
    # nothing was set by hand
    identify(network.model, network.source)
    set_training_settings(model, training_settings(network.model))
    for name, tensor in new.items():
        if name not in fresh:
            tensor.data = old[name].data
    model.load_state_dict(
        {name: old[name] for name in new if name not in fresh}, strict=False
    )  # layers may look at it
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and f"{name}.weight" in fresh:
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)
    model.train(network.model.training)
    set_record(model, preprocess=network.preprocess, weights=network.weights)
    return replace(network, model=model), fresh


def adjust_layers(
    model: nn.Module, recipe: Recipe, batches: int, note: Callable[[str], None]
) -> None:
    """Set the layers' momentum and kind of noise as a recipe says, and note which of its settings
    do nothing.
    """
    for module in model.modules():
        if recipe.bn_momentum is not None and isinstance(module, _NormBase):
            module.momentum = recipe.bn_momentum
        if recipe.noise_kind is not None and isinstance(module, NormalityMixin):
            module.noise_kind = recipe.noise_kind
    if recipe.precise_bn is None:
        momenta = [
            m.momentum
            for m in model.modules()
            if isinstance(m, RunningNormality) and m.momentum is not None
        ]
        if momenta and (old := (1 - min(momenta)) ** batches) > _OLD:
            note(
                f"warning: running statistics move by {min(momenta):g} a batch, so after {batches} batches {old:.0%} "
                "of them are those from before; raise `bn_momentum`"
            )
    elif not estimated_layers(model):
        note("no layer of the network tracks batch statistics: `precise_bn` does nothing")
    if not surgery.strength_layers(model):
        note("no layer of the network has a strength: this is plain training")
    elif (recipe.noise or recipe.noise_kind) and not draws_noise(model):
        note(
            "no layer of the network draws noise: `noise` and `noise_kind` of the recipe do nothing"
        )
    if recipe.strength_sched == "off" and (odd := odd_strengths(model)):
        note(f"warning: {odd}")


def draws_noise(model: nn.Module) -> bool:
    """Whether a layer of the network draws noise in training."""
    return any(isinstance(module, NormalityMixin) for module in model.modules())


def freeze_all_but_norm(
    model: nn.Module, also: Collection[str], note: Callable[[str], None]
) -> list[nn.Module]:
    """Freeze all but converted normalization layers and the parameters named in `also`.

    Return the layers with running statistics that are not converted, whose mode is left to the
    caller; a RetrofitError if nothing is left to train.
    """
    converted = [m for m in model.modules() if isinstance(m, StrengthMixin | FrozenBatchNorm)]
    norms = [module for module in converted if not isinstance(module, WeightStandardization)]
    theirs = {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) in theirs or name in also)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not trained:
        raise RetrofitError(
            "freezing all but the converted layers leaves nothing to train; drop `freeze`"
        )
    note(f"training {trained:,} parameters, those of the converted normalization layers")
    return [
        m for m in model.modules() if isinstance(m, _NormBase) and not isinstance(m, StrengthMixin)
    ]


class Objective:
    """The loss of a run, that of the labels and that of a teacher, by the recipe's weights.

    A teacher in evaluation gives the Kullback-Leibler divergence of the class probabilities. The
    temperature divides both networks' scores, and its square multiplies the loss, so that gradients
    keep their size (Hinton et al. 2015). Mixup has to know how many outputs (`classes`) there are.
    """

    def __init__(self, recipe: Recipe, classes: int, teacher: nn.Module | None) -> None:
        self._recipe, self._teacher = recipe, teacher
        self._mixup: Any = None
        self._task: nn.Module = LabelSmoothingCrossEntropy(recipe.smoothing)
        if recipe.mixup or recipe.cutmix:
            self._mixup = Mixup(
                recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=classes
            )
            self._task = SoftTargetCrossEntropy()

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch, (N, C, H, W) and (N,), with itself, if the recipe says so; the targets
        become (N, classes).
        """
        return (images, targets) if self._mixup is None else self._mixup(images, targets)

    def loss(self, scores: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of `scores`, (N, classes), on what `mix` gave."""
        recipe, total = self._recipe, scores.new_zeros(())
        if recipe.task_loss_weight:
            total = total + recipe.task_loss_weight * self._task(scores.float(), targets)
        if self._teacher is not None and recipe.distill_loss_weight:
            temperature = recipe.kd_temperature
            with torch.no_grad():
                taught = functional.log_softmax(self._teacher(images).float() / temperature, dim=1)
            learned = functional.log_softmax(scores.float() / temperature, dim=1)
            divergence = functional.kl_div(learned, taught, reduction="batchmean", log_target=True)
            total = total + recipe.distill_loss_weight * (temperature**2 * divergence)
        return total


def source_network(network: Network, resumed: bool = False) -> nn.Module:
    """Return a converted network's source, to teach it: a frozen copy at strength 0.

    A RetrofitError says that no layer has a strength, or that the network was trained since its
    conversion, as steps or strength tell: it is no longer its source. That of a `resumed` run was
    asked before the run set its first strength.
    """
    layers = surgery.strength_layers(network.model)
    if not layers:
        raise RetrofitError(
            "`teacher='source'` needs layers that have a strength; convert first, or drop `teacher`"
        )
    trained = network.weights.get("steps") or any(layer.strength for layer in layers)
    if trained and not resumed:
        what = "`teacher='source'` is the network at strength 0, but this was trained, or raised, since its conversion"
        raise RetrofitError(f"{what}; convert the source anew and train that, or drop `teacher`")
    source = copy.deepcopy(network.model)
    surgery.set_strength(source, 0.0)
    return source.eval().requires_grad_(False)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    layer_decay: float | None = None,
    decay_norms: bool = False,
) -> list[dict[str, Any]]:
    """Return timm's parameter groups, but with weight decay on ProxyNorm; for torch's and timm's
    optimizers.

    timm does not decay one-dimensional parameters, such as ProxyNorm's; the ProxyNorm paper does
    (Labatie et al. 2021, appendix A.1).

    Args:
        model: The network; parameters that do not require gradients are left out.
        weight_decay: Weight decay of all parameters except biases and those of norms.
        layer_decay: Factor on the learning rate from each layer to the one before it; None for the
            same rate in all.
        decay_norms: Whether to decay all parameters, as both papers do for ResNets.
    """
    affines = {
        id(module.weight) for module in model.modules() if isinstance(module, TrainedAffine)
    }  # (C, 1, 1) each
    undecayed = {name for name, parameter in model.named_parameters() if id(parameter) in affines}
    undecayed |= {*getattr(model, "no_weight_decay", lambda: ())()}
    if layer_decay is None:
        groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=undecayed)
    else:
        groups = param_groups_layer_decay(
            model, weight_decay, no_weight_decay_list=undecayed, layer_decay=layer_decay
        )
    proxy_norms = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    proxies = [
        parameter for module in proxy_norms for parameter in (module.proxy_bias, module.proxy_scale)
    ]
    decayed = {id(parameter) for parameter in (model.parameters() if decay_norms else proxies)}
    split: list[dict[str, Any]] = []
    for group in groups:
        for ours, own in ((False, {}), (True, {"weight_decay": weight_decay})):
            params = [
                parameter for parameter in group["params"] if (id(parameter) in decayed) is ours
            ]
            split += [{**group, "params": params, **own}] if params else []
    return split


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Build the recipe's optimizer over what is trained; a UsageError if timm cannot, or if it has
    no eps to set.
    """
    groups = parameter_groups(model, recipe.weight_decay, recipe.layer_decay, recipe.decay_norms)
    given: dict[str, Any] = {"fused": True} if recipe.opt.lower() in _FUSED else {}
    if recipe.opt_eps is not None:
        given["eps"] = recipe.opt_eps
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            groups, recipe.opt, recipe.lr, recipe.weight_decay, recipe.momentum, **given
        )
    # optimizers assert, or miss a package
    except Exception as error:
        raise UsageError(
            f"cannot build the optimizer {recipe.opt} ({one_line(error)}); take another `opt`"
        ) from error
    if recipe.opt_eps is not None and "eps" not in optimizer.defaults:
        raise UsageError(f"the optimizer {recipe.opt} has no eps; leave `opt_eps` out")
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> Any:
    """Build the recipe's schedule of the learning rate; `step_update(steps done)` moves it. None: a
    constant rate.
    """
    resolved = {
        "warmup_epochs": recipe.warmup,
        "warmup_lr": min(recipe.warmup_lr, recipe.lr),
        "step_on_epochs": False,
    }
    kwargs = {
        **scheduler_kwargs(recipe),
        **resolved,
    }  # timm's reader of its own settings, whose names a recipe has
    return create_scheduler_v2(optimizer, **kwargs, updates_per_epoch=steps_per_epoch)[0]
