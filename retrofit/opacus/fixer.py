"""What `ModuleValidator.fix` puts in the place of BatchNorm: plain layers that keep what was
learned.
"""

from typing import Any

import torch
from opacus.validators import batch_norm
from opacus.validators.utils import register_module_fixer
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.graph.recognition import is_altered
from retrofit.surgery import convert, set_strength
from retrofit.surgery.plain import plain_counterpart
from retrofit.surgery.targets.batch_independent import GN

_TARGETS = ("frozen", "ln", "gn")
_BATCH_NORMS = [
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    BatchNormAct2d,
    SyncBatchNormAct,
]


@register_module_fixer(_BATCH_NORMS)
def fix_batch_norm(module: Any, **kwargs: Any) -> nn.Module:
    """Return plain layers that replace a torch or timm BatchNorm, with its statistics as constants.

    Those of `to` end in a copy, so that a ResNet may add to it in place (`out += identity`).

    Args:
        module: The BatchNorm.
        **kwargs: Arguments passed to `ModuleValidator.fix(model, ...)`. `to`: "frozen" keeps the
            function exactly, as a constant affine map with trainable gamma and beta; "ln" and "gn"
            normalize each sample, and stay close to the trained function. Default: "frozen" for a
            trained layer, "ln" for an untrained one. `num_groups`: groups for "gn", which becomes
            the default. `replace_bn_with_in`: use Opacus's own fixer.

    Raises:
        UsageError: If `to` is a target that Opacus cannot train, or the arguments contradict each
            other or the layer.
        RetrofitError: If hooks or a forward of its own change what the layer computes.
    """
    groups = kwargs.get("num_groups")
    to = kwargs.get("to")
    has_statistics = module.running_mean is not None
    if to is not None:
        _refuse_contradictions(to, groups, has_statistics)
    if "groups" in kwargs:
        raise UsageError("Opacus's fixer has no `groups`; pass `num_groups`")
    if kwargs.get("replace_bn_with_in") or not has_statistics:
        return _fixed_by_opacus(module, kwargs)
    if is_altered(module):
        raise RetrofitError(
            f"a {type(module).__name__} has hooks, or a forward of its own, which its replacement "
            "would not call; remove them first"
        )
    if to is None:
        to = _default_target(module, groups)
    options: dict[str, Any] = {}
    if to == "gn":
        _refuse_single_values(module, groups)
        options["groups"] = groups
    holder, _ = convert(nn.Sequential(module), to, check=False, **options)
    if to != "frozen":
        set_strength(holder, 1.0)
    new = plain_counterpart(holder.get_submodule("0"))
    assert new is not None
    # Without gamma and beta it is a lone ConstantAffine, which gets no hooks.
    if isinstance(new, nn.Sequential):
        new.add_module("new_tensor", NewTensor())
    return new.train(module.training)


class NewTensor(nn.Module):
    """Copies its input wherever gradients are computed, so that code may add to the copy in place.

    torch refuses changes in place of what a module with full backward hooks returns. Opacus puts
    these hooks on modules with trained parameters; this one has none.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of `x`, of any shape; without gradients, `x` itself."""
        return x.clone() if torch.is_grad_enabled() else x


def _fixed_by_opacus(module: Any, options: dict[str, Any]) -> nn.Module:
    new: nn.Module = batch_norm.fix(module, **options)
    if not hasattr(module, "act"):
        return new
    return nn.Sequential(new, module.drop, module.act)


def _refuse_contradictions(to: str, groups: Any, has_statistics: bool) -> None:
    if to not in _TARGETS:
        raise UsageError(f"`to={to!r}` is nothing that Opacus trains here; choose frozen, ln or gn")
    if groups and to != "gn":
        raise UsageError(f"`num_groups` is for `to='gn'`, not for {to}; drop one of them")
    if not has_statistics:
        raise UsageError(
            f"a BatchNorm without running statistics has nothing to keep in {to}; leave `to` out, "
            "and it becomes Opacus's own GroupNorm"
        )


def _refuse_single_values(module: Any, groups: Any) -> None:
    """Refuse as many groups as channels for a layer whose inputs may have a value a channel."""
    channels = module.num_features
    if isinstance(module, nn.BatchNorm1d) and channels <= (groups or GN.groups):
        raise UsageError(
            f"a BatchNorm1d of {channels} channels, in as many groups, would have one value in "
            "each on inputs (N, C); pass a smaller `num_groups`, or `to='ln'`"
        )


def _default_target(module: Any, groups: int | None) -> str:
    if groups:
        return "gn"
    var = module.running_var
    is_trained = bool(module.running_mean.any()) or not torch.equal(var, torch.ones_like(var))
    if is_trained:
        return "frozen"
    return "ln"
