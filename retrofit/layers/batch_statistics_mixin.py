"""What the functions of torch and timm that walk through a network do with our layers of batch statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from retrofit.errors import RetrofitError
from retrofit.layers.base import EpsOfNoBatchNorm, StrengthMixin
from retrofit.layers.constant_affine import trained_affine
from retrofit.layers.converted_layer import library_class

_INSTEAD = {
    "convert_sync_batchnorm": "call retrofit.sync_norms(model) in its place",
    "convert_splitbn_model": "leave it out",
}


class BatchStatisticsMixin(StrengthMixin, _BatchNorm):
    """A layer that normalizes by the batch in training and keeps running statistics: to torch, a `_BatchNorm`.

    That is what `torch.optim.swa_utils.update_bn`, Lightning's weight averaging and others look for in order to
    estimate the statistics anew. Those that put a BatchNorm of their own in a layer's place would drop what ours adds
    to one. All of them ask each layer for its children, and nothing else tells a layer that they came by. Those that
    fuse a BatchNorm into a convolution add its eps to its variance: see `EpsOfNoBatchNorm`.
    """

    _eps: float

    @property
    def eps(self) -> Any:
        """Added to the variance; of use to others at strength 0 alone, where the layer is a BatchNorm."""
        return self._eps if float(self.strength) == 0 else EpsOfNoBatchNorm(self._eps, self)

    @eps.setter
    def eps(self, value: float) -> None:
        vars(self).update(eps=value, _eps=value)  # torch's `extra_repr` reads the first, our layers the second

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return the source's layer; for a frozen one, which that would thaw, its constants and gamma and beta."""
        plain = super().plain_layer()
        return (None, trained_affine(self)) if self.frozen and self.running_mean is not None else plain

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the children. Timm's `freeze_batch_norm_2d` and its opposite, when they ask, do to this layer as said.

        Raises:
            RetrofitError: If a function asks that replaces every BatchNorm by one of its own.
        """
        caller = sys._getframe(1).f_code.co_name
        if caller in _INSTEAD:
            raise RetrofitError(
                f"{caller} would put a plain BatchNorm in the place of {type(self).__name__}, without its transform; "
                f"{_INSTEAD[caller]}"
            )
        if caller in ("freeze_batch_norm_2d", "unfreeze_batch_norm_2d"):
            self.frozen = caller == "freeze_batch_norm_2d"
            self.training = not self.frozen
        return super().named_children()

    def _check_input_dim(self, x: Tensor) -> None:
        library_class(self.source_name)._check_input_dim(self, x)
