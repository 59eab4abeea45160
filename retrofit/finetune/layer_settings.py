"""What a recipe sets in the layers of a network: momentum, kind of noise, and which are trained."""

from collections.abc import Callable, Collection

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit import surgery
from retrofit.errors import RetrofitError
from retrofit.finetune.recipe import Recipe
from retrofit.layers import FrozenBatchNorm, NormalityMixin, StrengthMixin
from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.strength import odd_strengths
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.running_statistics import estimated_layers

# Share of the running statistics, or of the average of the weights, at the end of a run that is
# from its beginning, above which the user is warned.
_OLD = 0.05


def adjust_layers(
    model: nn.Module, recipe: Recipe, batches: int, note: Callable[[str], None]
) -> None:
    """Set the layers' momentum and kind of noise by a recipe, and note its settings that have no
    effect.

    Args:
        model: The network.
        recipe: The settings of the run.
        batches: The training batches of the whole run.
        note: Called with a sentence for each setting.
    """
    _set_options(model, recipe)
    if recipe.precise_bn is None:
        _warn_of_old_statistics(model, batches, note)
    elif not estimated_layers(model):
        note("no layer of the network tracks batch statistics: `precise_bn` does nothing")
    if recipe.model_ema:
        _warn_of_old_average(recipe, batches // recipe.grad_accum_steps, note)
    if not surgery.strength_layers(model):
        note("no layer of the network has a strength: this is plain training")
    elif (recipe.noise or recipe.noise_kind) and not draws_noise(model):
        note(
            "no layer of the network draws noise: `noise` and `noise_kind` of the recipe do nothing"
        )
    if recipe.strength_sched == "off":
        odd = odd_strengths(model)
        if odd:
            note(f"warning: {odd}")


def _set_options(model: nn.Module, recipe: Recipe) -> None:
    for module in model.modules():
        if recipe.bn_momentum is not None and isinstance(module, _NormBase):
            module.momentum = recipe.bn_momentum
        if recipe.noise_kind is not None and isinstance(module, NormalityMixin):
            module.noise_kind = recipe.noise_kind


def _warn_of_old_statistics(model: nn.Module, batches: int, note: Callable[[str], None]) -> None:
    momenta = [
        module.momentum
        for module in model.modules()
        if isinstance(module, RunningNormality) and module.momentum is not None
    ]
    slowest = min(momenta, default=1.0)
    old_share = (1 - slowest) ** batches
    if old_share > _OLD:
        note(
            f"warning: running statistics move by {slowest:g} a batch, so after {batches} batches "
            f"{old_share:.0%} of them are those from before; raise `bn_momentum`"
        )


def _warn_of_old_average(recipe: Recipe, steps: int, note: Callable[[str], None]) -> None:
    """Warn of an average in which the weights after the first step, its first, still count."""
    decay = recipe.model_ema_decay
    old_share = decay ** (steps - 1)
    if old_share > _OLD:
        note(
            f"warning: the average of the weights moves by {1 - decay:.2g} a step, so after "
            f"{steps} steps {old_share:.0%} of it are those of the first; lower `model_ema_decay`"
        )


def draws_noise(model: nn.Module) -> bool:
    """Whether a layer of the network draws noise in training."""
    return any(isinstance(module, NormalityMixin) for module in model.modules())


def freeze_all_but_norm(
    model: nn.Module, also: Collection[str], note: Callable[[str], None]
) -> list[nn.Module]:
    """Freeze all but converted normalization layers and the parameters named in `also`.

    Returns:
        The layers with running statistics that are not converted, whose mode is left to the caller.

    Raises:
        RetrofitError: If nothing is left to train.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in also)
    for module in filter(_is_converted_norm, model.modules()):
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not trained:
        raise RetrofitError(
            "freezing all but the converted layers leaves nothing to train; drop `freeze`"
        )
    note(f"training {trained:,} parameters, those of the converted normalization layers")
    return [
        module
        for module in model.modules()
        if isinstance(module, _NormBase) and not isinstance(module, StrengthMixin)
    ]


def _is_converted_norm(module: nn.Module) -> bool:
    is_converted = isinstance(module, StrengthMixin | FrozenBatchNorm)
    return is_converted and not isinstance(module, WeightStandardization)
