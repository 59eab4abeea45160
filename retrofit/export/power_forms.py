"""The power transform as a node of a captured graph, and what folding and approximations put in its place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from retrofit.export.capture import ATEN, arguments, attribute_of, users_of
from retrofit.layers.forms import (
    SMALL_POWER,
    ConstantNorm,
    FunctionModule,
    GroupConvolution,
    TwoBranch,
    channel_view,
    relative_growth,
)

INF = float("inf")


@dataclass(frozen=True)
class Transform:
    """A power transform of a graph: gamma * psi(sign * h; lambda) + beta, (C,) each in float64, with gamma >= 0, since
    gamma * psi(h; lambda) = -gamma * psi(-h; 2 - lambda).
    """

    node: Node
    sign: Tensor
    lmbda: Tensor
    gamma: Tensor
    beta: Tensor
    relu: Node | None  # the ReLU or ReLU6 that alone takes the output
    high: float | None  # its upper limit, inf or 6

    @classmethod
    def of(cls, module: fx.GraphModule, node: Node) -> Transform:
        """Return the transform of a `retrofit::power` node."""
        lmbda, gamma, beta = (attribute_of(module, arg).double() for arg in node.args[1:])  # type: ignore[arg-type]
        sign = torch.where(gamma < 0, -1.0, 1.0).to(gamma)
        users = users_of(node)
        high = _upper_limit(users[0]) if len(users) == 1 else None
        relu = None if high is None else users[0]
        return cls(node, sign, torch.where(gamma < 0, 2 - lmbda, lmbda), gamma.abs(), beta, relu, high)


def _upper_limit(node: Node) -> float | None:
    """Return the limit above of a function that is 0 below 0 and else the identity up to it; None for others."""
    if node.target is ATEN.relu.default:
        return INF
    if node.target not in (ATEN.hardtanh.default, ATEN.clamp.default):
        return None
    _, low, high = arguments(node).values()
    return None if low != 0 or isinstance(high, Node) else INF if high is None else high


@dataclass(frozen=True)
class Fit:
    """What takes the place of a transform, as a function of sign * h: scale * h + shift, the parts that follow, and the
    scale of what they give; (C,) in float64. Errors are shares of the standard deviation of the layer's output.
    """

    form: str  # "affine", "polynomial", "lines", "one branch" or "two branches"
    size: int  # the degree, or the number of lines
    scale: Tensor
    shift: Tensor
    parts: list[nn.Module]
    has_activation: bool = False  # whether a ReLU behind the layer is included; else it stays
    max_error: float = 0.0  # on what was seen
    rms_error: float = 0.0  # root mean square, on guessed values too
    after: Tensor | None = None

    def __call__(self, h: Tensor) -> Tensor:
        """Evaluate for h, (C, S), in the precision of a folded network."""
        y = torch.addcmul(self.shift[:, None], h, self.scale[:, None]).T.float()
        for part in self.parts:
            y = part(y)
        return y.T.to(h)


class OneBranch(nn.Module):
    """max(0, gamma * psi(h; lambda) + beta), (N, C, *), where this is 0 for all h <= 0.

    It takes u = (1 + h) / (1 + h0), at least 1, where h0 >= 0 is the zero of the function, and gives
    scale * (u^lambda - 1), or scale * (u^lambda - 1) / lambda if lambda is near 0; what surrounds it can do the rest.
    """

    lmbda: Tensor
    scale: Tensor | None

    def __init__(self, lmbda: Tensor, scale: Tensor | None, near_0: bool) -> None:
        super().__init__()
        self.near_0 = near_0
        self.register_buffer("lmbda", lmbda.float())
        self.register_buffer("scale", None if scale is None else scale.float())

    def forward(self, u: Tensor) -> Tensor:
        """Transform (N, C, *)."""
        log = torch.log(u)
        power = log * channel_view(self.lmbda, u)
        y = relative_growth(power) * log if self.near_0 else torch.exp(power) - 1.0
        return y if self.scale is None else y * channel_view(self.scale, u)


def exact_form(transform: Transform) -> Fit:
    """Return the transform itself: of one branch, if the ReLU behind it makes the negative one dead, with that ReLU."""
    sign, lmbda, gamma, beta, high = (getattr(transform, name) for name in ("sign", "lmbda", "gamma", "beta", "high"))
    if high is None or bool((beta > 0).any()) or lmbda.numel() == 1:
        return Fit("two branches", 0, torch.ones_like(sign), 0 * sign, [TwoBranch(lmbda, gamma, beta)])
    ratio = -beta / torch.where(gamma > 0, gamma, 1.0)
    root = torch.where(lmbda == 0, ratio, torch.log1p(lmbda * ratio) / torch.where(lmbda == 0, 1.0, lmbda))
    live = (gamma > 0) & root.isfinite() & root.exp().isfinite()  # root is log(1 + h0), where h0 is the function's zero
    to_u = torch.where(live, torch.exp(-root), 0.0)
    near_0 = bool((lmbda.abs() < SMALL_POWER).any())
    scale, after = torch.where(live, gamma - lmbda * beta, 0.0) / (1.0 if near_0 else lmbda), None
    parts = [limits(1.0), OneBranch(lmbda, scale, near_0), limits(None, high)]
    if high == INF:
        parts, after = [limits(1.0), OneBranch(lmbda, None, near_0)], scale
    return Fit("one branch", 0, to_u, torch.where(live, to_u, 1.0), parts, has_activation=True, after=after)


def limits(low: float | None, high: float | None = None) -> nn.Module:
    """Return limits by constants of the whole layer, which runtimes fuse into the convolution before it."""
    return FunctionModule(partial(torch.clamp, min=low, max=high))


class Polynomial(nn.Module):
    """p * (c1 + p * (c2 + ...)) per channel of (N, C, *), for a degree of 2 or more. Each multiplication by constants
    with the addition that follows is a batch normalization, in evaluation: one operation, which ONNX Runtime keeps in
    the layout of its convolutions.
    """

    def __init__(self, coefficients: Tensor) -> None:
        """Keep (degree, C) coefficients of p, p^2, ..."""
        super().__init__()
        *lower, scale = coefficients.unbind(0)
        self.steps = nn.ModuleList()
        for shift in reversed(lower):
            self.steps.append(ConstantNorm(torch.zeros_like(scale), scale, shift))
            scale = torch.ones_like(scale)

    def to_convolutions(self) -> None:
        """Make a depthwise convolution of each batch normalization, for which ONNX Runtime has integer kernels in INT8.
        Degrees above 3 stay: of the 8 bits of each step little is left in the end.
        """
        norms: list[Any] = list(self.steps)
        if len(norms) <= 2:
            self.steps = nn.ModuleList(GroupConvolution(norm.scale.view(-1, 1, 1), norm.shift) for norm in norms)

    def forward(self, p: Tensor) -> Tensor:
        """Evaluate."""
        y = p
        for step in self.steps:
            y = step(y) * p
        return y
