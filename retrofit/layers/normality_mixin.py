"""The options of normality normalization, and what its layers have in common.

A converted layer's state dict holds all that its function depends on: two networks of one target
with the same tensors are the same function, whatever they were converted from. Noise and momentum,
which only training uses, stay with the layer, as the p of a dropout does.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from retrofit.layers.converted_layer import hold_settings, library_class, no_plain_layer
from retrofit.layers.gaussianization import estimate
from retrofit.layers.inference_forms import EstimatedTransform, constant_copy, standardize
from retrofit.layers.kernels.kernel_options import Running
from retrofit.layers.noise import NoiseKind, check_noise, check_noise_kind
from retrofit.layers.normality_norm import Normalization, normalize
from retrofit.layers.normalized_sets import Sets
from retrofit.layers.strength import StrengthMixin, within_one
from retrofit.utils.forward_pass import hooked


class NormalityMixin(StrengthMixin):
    """The options of a normality-normalized layer (Eftekhari & Papyan 2025).

    Attributes:
        noise: xi, the factor of the Gaussian noise in training (section 4.2); by default, the
            paper's 0.4 (LayerNorm: 1.0); 0 for no noise.
        noise_kind: "scaled" is the paper's additive noise; "unscaled" is noise of the same size for
            every set; "gaussian-dropout" multiplies by noise. The paper compares with these two
            (section 5.6, figure 7).
        alpha: Degree of gaussianization in [0, 1] (eq. 6): lambda = 1 + strength * alpha *
            (estimate - 1). 1 is the paper's value; 0 leaves only the plain normalization and its
            noise.
    """

    paper_noise: ClassVar[float] = 0.4
    # Whether gamma and beta, (C,), belong to dimension 1 of the input.
    per_channel: ClassVar[bool] = True

    def _register_options(
        self,
        device: Any = None,
        *,
        noise: float | None = None,
        strength: Tensor | float = 1.0,
        noise_kind: NoiseKind = "scaled",
        alpha: float = 1.0,
    ) -> None:
        self.noise = self.paper_noise if noise is None else check_noise(noise)
        self.noise_kind = check_noise_kind(noise_kind)
        self.alpha = check_alpha(alpha)
        super()._register_options(device, strength=float(strength))
        hold_settings(self, {"alpha": check_alpha}, device)

    def _sets(self) -> Sets:
        raise NotImplementedError

    def _by_own_statistics(
        self, x: Tensor, group: ProcessGroup | None = None, running: Running | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return `x` normalized by statistics of its own sets, which ranks of `group` may share,
        and the numbers of each set; see `normalize`.
        """
        layer: Any = self
        spec = self._normalization(group, running)
        return normalize(x, layer.weight, layer.bias, self._strength, spec)

    def _normalization(
        self, group: ProcessGroup | None = None, running: Running | None = None
    ) -> Normalization:
        """Return what the layer asks of `normalize`."""
        return Normalization(
            sets=self._sets(),
            per_channel=self.per_channel,
            eps=self.plain_eps,
            xi=self.noise if self.training else 0.0,
            noise_kind=self.noise_kind,
            alpha=self.alpha,
            group=group,
            running=running,
        )

    def _form(self) -> list[nn.Module]:
        """Return the operations of the layer in evaluation: by its running statistics, or an
        estimate of lambda.
        """
        if self.channel_map() is not None:
            return super()._form()
        alpha = float(self.effective_alpha)
        if alpha == 0:
            return [self._source_form()]
        layer: Any = self
        affine = layer.weight, layer.bias
        transform = EstimatedTransform(
            self._sets(),
            eps=self.plain_eps,
            effective_alpha=alpha,
            affine=affine,
            per_channel=self.per_channel,
        )
        return [transform]

    def _source_form(self) -> nn.Module:
        return constant_copy(self._as_source(library_class(self.source_name)))

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return the source's layer, at strength 0.

        Raises:
            RetrofitError: If the strength is above 0: no library has the power transform.
        """
        if float(self.strength) > 0:
            raise no_plain_layer(
                "it has a power transform; set_strength(model, 0) leaves its source, export_onnx takes it as it is"
            )
        return super().plain_layer()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the source layer's checkpoint: with no `strength` in it, lambda restarts at 1 and
        t stays as it is.
        """
        lmbda = getattr(self, "running_lambda", None)
        if prefix + "strength" not in state_dict and lmbda is not None:
            state_dict.setdefault(prefix + "running_lambda", torch.ones_like(lmbda))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def effective_alpha(self) -> Tensor:
        """Strength times alpha: the layer uses lambda = 1 + effective_alpha * (estimate - 1)."""
        return self._t if self.alpha == 1 else self._t * self.alpha

    def extra_repr(self) -> str:
        usual = {"noise_kind": "scaled", "alpha": 1.0}
        extra = [
            f"{name}={getattr(self, name)}"
            for name, value in usual.items()
            if getattr(self, name) != value
        ]
        return ", ".join([super().extra_repr(), f"noise={self.noise:g}", *extra])


def lambda_values(model: nn.Module, images: Tensor | None = None) -> dict[str, Tensor]:
    """Return the lambda of each normality-normalized layer, whatever its strength.

    Args:
        model: A network in evaluation mode.
        images: What the network is run on, (N, C, H, W), for layers that keep no running average;
            without images they are left out.

    Returns:
        By layer name, in the order of registration, one value for each normalized set: the running
        average, or the estimates on the images.
    """
    estimates: dict[str, list[Tensor]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if not isinstance(layer, NormalityMixin):
            continue
        values: list[Tensor] = []
        estimates[name] = values
        running_lambda = getattr(layer, "running_lambda", None)
        if running_lambda is None:
            collect = partial(_collect_estimate, values)
            hook = layer.register_forward_pre_hook(collect)
            hooks.append(hook)
        else:
            average = running_lambda.detach().float()
            values.append(average.cpu())
    with hooked(hooks), torch.no_grad():
        if hooks and images is not None:
            model(images)
    lambdas = {}
    for name, values in estimates.items():
        if values:
            lambdas[name] = torch.cat(values)
    return lambdas


def _collect_estimate(
    estimates: list[Tensor], layer: NormalityMixin, inputs: tuple[Tensor, ...]
) -> None:
    sets, dim = layer._sets()(inputs[0].float())
    h, *_ = standardize(sets, dim, layer.plain_eps)
    estimates.append(estimate(h, dim).flatten().cpu())


check_alpha = partial(within_one, "alpha", "0 is no transform, 1 the paper's")
