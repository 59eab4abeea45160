"""What Opacus puts in the place of BatchNorm: a layer with the same trained function, or close to it."""

from __future__ import annotations

from typing import Any

import torch
from opacus.validators import batch_norm
from opacus.validators.utils import register_module_fixer
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import nn

from retrofit.errors import UsageError
from retrofit.surgery import convert, set_strength
from retrofit.surgery.plain import plain_layer

_BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d, SyncBatchNormAct]


@register_module_fixer(_BATCH_NORMS)
def fix_batch_norm(module: Any, **kwargs: Any) -> nn.Module:
    """Return what takes the place of torch's or timm's BatchNorm: plain layers, with its statistics as constants.

    Args:
        module: The BatchNorm.
        **kwargs: What `ModuleValidator.fix(model, ...)` is given. `to`: "frozen" keeps the function exactly, as a
            constant affine with gamma and beta to be trained; "ln" and "gn" normalize each sample, close to the trained
            function. Without it, "frozen" for a layer that has been trained and "ln" for one that has not.
            `num_groups`: groups for "gn", which it implies. `replace_bn_with_in`: Opacus's own fixer.

    Raises:
        UsageError: If `to` names nothing that Opacus can train.
    """
    if kwargs.get("replace_bn_with_in") or module.running_mean is None:
        own: nn.Module = batch_norm.fix(module, **kwargs)
        return nn.Sequential(own, module.drop, module.act) if hasattr(module, "act") else own
    groups = kwargs.get("num_groups")
    to = kwargs.get("to") or ("gn" if groups else "frozen" if _trained(module) else "ln")
    if to not in ("frozen", "ln", "gn"):
        raise UsageError(f"`to={to!r}` is nothing that Opacus trains here; choose frozen, ln or gn")
    options: dict[str, Any] = {"groups": groups} if to == "gn" else {}
    holder, _ = convert(nn.Sequential(module), to, check=False, **options)
    if to != "frozen":
        set_strength(holder, 1.0)
    new = plain_layer(holder.get_submodule("0"))
    assert new is not None
    return new.train(module.training)


def _trained(module: Any) -> bool:
    """Whether running statistics have left their first values."""
    return bool(module.running_mean.any()) or not torch.equal(module.running_var, torch.ones_like(module.running_var))
