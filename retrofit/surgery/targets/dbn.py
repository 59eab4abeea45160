"""Target dbn: BatchNorm to decorrelated batch normalization (Huang et al. 2018).

ZCA whitening multiplies centered values by the inverse square root of their covariance. Strength 0
is BatchNorm, in training too.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import RetrofitError
from retrofit.layers import batch_norm
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.converted_layer import ThenActivate, no_plain_layer
from retrofit.layers.function_transforms import differentiable_once, transformed
from retrofit.layers.inference_forms import GroupConvolution, channel_form
from retrofit.layers.kernels.eager import affine, compute_dtype
from retrofit.layers.normality_norm import Statistics, memory_format_of
from retrofit.registry import layer_named
from retrofit.surgery.norm_layers import NormLayer
from retrofit.surgery.plan_and_report import LayerRow
from retrofit.surgery.targets.normality import NormalityConverter
from retrofit.utils.divisors import largest_divisor

GROUP_SIZE = 16


def inverse_square_root(matrix: Tensor, floor: float) -> Tensor:
    """Return S^(-1/2) of symmetric positive definite matrices S, (*, g, g); NaN for a matrix that
    is not finite.

    The gradient is the closed form for functions of a symmetric matrix (Daleckii & Krein), with the
    divided differences -1 / (sqrt(a) sqrt(b) (sqrt(a) + sqrt(b))): finite for equal eigenvalues, at
    which differentiating the eigenvectors divides by zero. Eigenvalues below `floor`, or too small
    beside the largest to be more than rounding, are raised to that bound: a direction in which
    nothing but rounding errors vary is not blown up.
    """
    out: Tensor = _InverseSquareRoot.apply(matrix, floor)[0]
    return out


class _InverseSquareRoot(torch.autograd.Function):
    """S -> S^(-1/2); the eigenvectors and the roots of the eigenvalues are kept, and returned for
    torch.func.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
        vectors, roots = _eigen(matrix, floor)
        return (vectors / roots.unsqueeze(-2)) @ vectors.mT, vectors, roots

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        matrix, ctx.floor = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(matrix, *output[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        matrix, vectors, roots = ctx.saved_tensors
        # functorch may differentiate this backward too, through the eigenvectors.
        if transformed():
            vectors, roots = _eigen(matrix, ctx.floor)
        a = roots.unsqueeze(-1)
        b = roots.unsqueeze(-2)
        inner = vectors.mT @ ((grads[0] + grads[0].mT) / 2) @ vectors
        return vectors @ (inner / (-a * b * (a + b))) @ vectors.mT, None


def _eigen(matrix: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors of `matrix` and the roots of its eigenvalues, NaN if it is not
    finite.
    """
    finite = matrix.isfinite().all(-1).all(-1)[..., None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    values, vectors = torch.linalg.eigh(torch.where(finite[..., None], matrix, identity))
    resolved = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * values[..., -1:]
    return vectors, torch.where(
        finite, torch.maximum(values.clamp_min(floor), resolved).sqrt(), torch.nan
    )


class DecorrelatedNorm(batch_norm.BatchStatisticsMixin, batch_norm.RunningStatistics):
    """Mixin: groups of channels are whitened where BatchNorm divides each by its standard
    deviation.

    With S the covariance of a group over (N, *), the matrix that multiplies the centered values is

        (1 - t) * diag(S + eps)^(-1/2) + t * (S + eps)^(-1/2)

    with t the strength: BatchNorm at 0, ZCA whitening at 1. Computed in float32 (float64 for
    float64 input).

    Attributes:
        group_size: Channels that are whitened together: the largest divisor of the channels up to
            the requested number.
        running_covariance: Running average of S, unbiased as `running_var` is, (groups, group_size,
            group_size); None where no statistics are tracked.
        running_whitening: Its root (running_covariance + eps)^(-1/2), regardless of the strength.
            The paper averages the roots of the batches instead. Where a group's covariance is
            singular, as after a convolution with fewer inputs than outputs, its null space rotates
            from step to step and that average magnifies what lies in it.
    """

    unsynchronized = (
        "whitening is not synchronized between processes; leave dbn and dbnn unsynchronized"
    )
    running_covariance: Tensor | None
    running_whitening: Tensor | None

    def __init__(
        self, num_features: int, *args: Any, group_size: int = GROUP_SIZE, **kwargs: Any
    ) -> None:
        super().__init__(num_features, *args, **kwargs)
        if group_size < 1:
            raise ValueError(
                f"group_size must be at least 1, not {group_size}; the paper's is {GROUP_SIZE}"
            )
        self.group_size = largest_divisor(num_features, int(group_size))
        self.register_buffer("running_covariance", None)
        self.register_buffer("running_whitening", None)
        self.reset_running_whitening()

    def reset_running_stats(self) -> None:
        """Reset the running statistics to mean 0, variance 1 and no correlation, unless the layer
        is frozen.
        """
        super().reset_running_stats()
        if not self.frozen and "running_whitening" in self._buffers:
            self.reset_running_whitening()

    def reset_running_whitening(self) -> None:
        """Forget correlations: the running matrix becomes BatchNorm's, diag(running_var +
        eps)^(-1/2).
        """
        if self.running_var is not None:
            self.running_covariance, self.running_whitening = self._uncorrelated(self.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Center, multiply by the matrices of the batch or the running ones, apply gamma and beta.

        Raises:
            ValueError: If a batch to estimate on has one value per channel.
        """
        self._check_input_dim(x)
        samples, channels, *sizes = x.shape
        by_batch = self.training or self.running_mean is None
        if by_batch and x.numel() == channels:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.size()}"
            )
        if x.numel() == 0:
            return affine(x * 1.0, *self._gamma_and_beta(-1, *(1,) * len(sizes)))
        with torch.autocast(x.device.type, enabled=False):
            by_channel = x.to(compute_dtype(x)).movedim(1, 0)
            rows = by_channel.reshape(-1, self.group_size, x.numel() // channels)
            y = self._by_batch(rows) if by_batch else self._by_running_statistics(rows)
            out = affine(y, *self._gamma_and_beta(len(y), -1, 1)).to(x.dtype)
        out = out.view(channels, samples, *sizes).movedim(0, 1)
        return out.contiguous(memory_format=memory_format_of(x))

    def _gamma_and_beta(self, *shape: int) -> list[Tensor | None]:
        return [None if p is None else p.view(shape) for p in (self.weight, self.bias)]

    def _by_batch(self, rows: Tensor) -> Tensor:
        """Whiten (groups, g, N * positions) by their own covariance; track it in training."""
        mean = rows.mean(-1, True)
        centred = rows - mean
        covariance = centred @ centred.mT / rows.shape[-1]
        var = covariance.diagonal(dim1=-2, dim2=-1)
        matrix = self._mixed(var, self._root(covariance))
        y, lmbda = self._transform(matrix @ centred, batch=True)
        if self.training and self.track_running_stats:
            self._track(Statistics(mean, var, lmbda, rows.shape[-1]), covariance)
        return y

    def _by_running_statistics(self, rows: Tensor) -> Tensor:
        """Multiply (groups, g, N * positions) by the running matrices."""
        assert self.running_mean is not None
        mean = self.running_mean.to(rows.dtype).view(-1, self.group_size, 1)
        y, _ = self._transform(self.running_matrix(rows.dtype) @ (rows - mean), batch=False)
        return y

    def running_matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices, (groups, g, g), that multiply centered values in evaluation."""
        assert self.running_var is not None
        assert self.running_whitening is not None
        return self._mixed(self.running_var.to(dtype), self.running_whitening.to(dtype))

    def channel_map(self) -> ChannelMap | None:
        """Return the map by the running statistics, where the whitening matrices are diagonal."""
        if self.running_mean is None:
            return None
        matrix = self.running_matrix(torch.float64)
        scale = matrix.diagonal(dim1=-2, dim2=-1)
        diagonal = torch.diag_embed(scale)
        if not torch.equal(matrix, diagonal):
            return None
        scale = scale.flatten()
        return replace(
            self._behind_whitening(), scale=scale, shift=-self.running_mean.double() * scale
        )

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return BatchNorm, which the layer is at strength 0.

        Raises:
            RetrofitError: If the strength is above 0.
        """
        if float(self.strength) > 0:
            raise no_plain_layer(
                "it whitens; set_strength(model, 0) leaves BatchNorm, export_onnx takes it as it is"
            )
        return super().plain_layer()

    def _form(self) -> list[nn.Module]:
        if self.running_mean is None:
            raise RetrofitError(
                "without running statistics its whitening is no constant; skip it in the conversion"
            )
        if self.channel_map() is not None:
            return super()._form()
        matrix = self.running_matrix(torch.float64)
        column = *matrix.shape[:2], 1
        mean = self.running_mean.double().view(column)
        constant = self._behind_whitening()
        if not constant.is_affine:
            convolution = GroupConvolution(matrix, -(matrix @ mean).flatten())
            return [convolution, *channel_form(constant)[1:]]
        gamma, beta = constant.affine()
        matrix = matrix * gamma.view(column)
        return [GroupConvolution(matrix, beta - (matrix @ mean).flatten())]

    def _behind_whitening(self) -> ChannelMap:
        assert self.running_mean is not None
        zeros = torch.zeros_like(self.running_mean, dtype=torch.float64)
        return ChannelMap.of(zeros, zeros + 1, 0.0, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"

    def _transform(self, h: Tensor, batch: bool) -> tuple[Tensor, Tensor]:
        """Return what becomes of whitened values, and their lambda: the batch's estimate or the
        running one.
        """
        return h, h.new_ones(())

    @torch.no_grad()
    def _track(self, statistics: Statistics, covariance: Tensor) -> None:
        momentum = self._momentum(1)
        running = self.running_covariance
        self._update(statistics, momentum)
        if running is not None and self.running_whitening is not None:
            unbiased = covariance * (statistics.size / (statistics.size - 1))
            running.mul_(1 - momentum).add_(unbiased.to(running.dtype) * momentum)
            self.running_whitening.copy_(self._root(running.to(covariance.dtype)))

    def _root(self, covariance: Tensor) -> Tensor:
        regular = covariance + self._eps * torch.eye(
            self.group_size, dtype=covariance.dtype, device=covariance.device
        )
        return inverse_square_root(regular, self._eps)

    def _mixed(self, var: Tensor, whitening: Tensor) -> Tensor:
        """Return the matrices, (groups, g, g), that the strength makes of BatchNorm's and of the
        root.
        """
        return (1 - self._t) * self._uncorrelated(var)[1] + self._t * whitening

    def _uncorrelated(self, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return covariances and roots, (groups, g, g) each, of channels of the given variance."""
        var = var.view(-1, self.group_size)
        return torch.diag_embed(var), torch.diag_embed(torch.rsqrt(var + self._eps))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Accept the source layer's checkpoint: with no whitening in it, that starts as BatchNorm's
        again.
        """
        if self.running_var is not None and prefix + "running_whitening" not in state_dict:
            var = state_dict.get(prefix + "running_var", self.running_var).to(self.running_var)
            covariance, whitening = self._uncorrelated(var)
            state_dict[prefix + "running_covariance"] = covariance
            state_dict[prefix + "running_whitening"] = whitening
        super()._load_from_state_dict(state_dict, prefix, *args)


class DecorrelatedBatchNorm1d(DecorrelatedNorm):
    """Decorrelated batch normalization over (N, C) or (N, C, L) input.

    The arguments are those of `torch.nn.BatchNorm1d`, `group_size` (largest number of channels
    whitened together, by default, the paper's 16) and `strength` (t, by default 1).
    """

    source_name: ClassVar[str] = "BatchNorm1d"


class DecorrelatedBatchNorm2d(DecorrelatedNorm):
    """Decorrelated batch normalization over (N, C, H, W) input; its arguments are
    `DecorrelatedBatchNorm1d`'s.
    """

    source_name: ClassVar[str] = "BatchNorm2d"


class DecorrelatedBatchNorm3d(DecorrelatedNorm):
    """Decorrelated batch normalization over (N, C, D, H, W) input; its arguments are
    `DecorrelatedBatchNorm1d`'s.
    """

    source_name: ClassVar[str] = "BatchNorm3d"


class DecorrelatedBatchNormAct2d(ThenActivate, DecorrelatedBatchNorm2d):
    """Decorrelated batch normalization, then `drop` and `act`: another counterpart of timm's
    BatchNormAct2d.
    """


class DecorrelatedConverter(NormalityConverter):
    """Swaps BatchNorm for a decorrelated form: the source's tensors, its own scaling as whitening,
    strength 0.
    """

    # What stands in a class's name where BatchNorm's has "BatchNorm".
    replacement = "DecorrelatedBatchNorm"

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        cls = layer.known_class.replace("BatchNorm", self.replacement)
        # Every BatchNorm has a registered counterpart but torch's and timm's synchronized ones.
        if layer_named(cls) is None:
            return layer.row(
                "unsupported",
                "whitening matrices are not synchronized between processes; convert it to "
                "BatchNorm first",
            )
        if layer.layer.running_mean is None:
            return layer.row(
                "unsupported",
                "it tracks no running statistics, so there would be no whitening matrix at test "
                "time",
            )
        channels = layer.layer.num_features
        most = options.group_size or GROUP_SIZE
        size = largest_divisor(channels, most)
        remark = ""
        if size != most:
            remark = f"whitened {size} channels at a time: {most} do not divide {channels} channels"
        return layer.row("converted", remark, cls, **self.layer_options(options), group_size=size)

    def layer_options(self, options: ConversionOptions) -> dict[str, Any]:
        return {}

    def build(self, module: Any, row: LayerRow, device: torch.device) -> Any:
        new = super().build(module, row, device)
        # The source's running variance is adopted only now.
        new.reset_running_whitening()
        return new


DBN = DecorrelatedConverter()
