"""The operator `retrofit::power`: the power transform as one node of a captured graph.

A `Transform` describes the node. Folding puts a `Replacement` in its place: the exact form or an
approximation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from retrofit.export.graph_nodes import ATEN, arguments, users_of, value_of
from retrofit.layers import inference_forms

INF = float("inf")


@torch.library.custom_op("retrofit::power", mutates_args=())
def power(h: Tensor, lmbda: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return gamma * psi(h; lambda) + beta of standardized values (N, C, *); constants are (C,)."""
    return inference_forms.TwoBranch(lmbda, gamma, beta)(h).contiguous()


power.register_fake(lambda h, *_: torch.empty_like(h, memory_format=torch.contiguous_format))
POWER = torch.ops.retrofit.power.default


@dataclass(frozen=True)
class Replacement:
    """A function of sign * h that takes the place of a transform: its exact form, or an
    approximation fitted to it.

    It is scale * h + shift, then the modules in `parts`. Constants are (C,) in float64. Errors are
    shares of the standard deviation of the layer's output.
    """

    # "affine", "polynomial" or "two branches"
    form: str
    # 0 for the transform itself
    degree: int
    scale: Tensor
    shift: Tensor
    parts: Sequence[nn.Module]
    # Whether a ReLU behind the layer is included; else it stays
    has_activation: bool = False
    # On the values that were seen
    max_error: float = 0.0
    # Root mean square, on guessed values too
    rms_error: float = 0.0

    def module(self, sign: Tensor | float = 1.0) -> nn.Module:
        """Return it as a function of h, (N, C, *)."""
        scale = sign * self.scale
        norm = inference_forms.ConstantNorm(torch.zeros_like(scale), scale, self.shift)
        return nn.Sequential(norm, *self.parts)


@dataclass(frozen=True)
class Transform:
    """A power transform of a graph: gamma * psi(sign * h; lambda) + beta, (C,) each in float64.

    gamma is never negative: gamma * psi(h; lambda) = -gamma * psi(-h; 2 - lambda).
    """

    node: Node
    sign: Tensor
    lmbda: Tensor
    gamma: Tensor
    beta: Tensor
    # The ReLU or ReLU6 that alone takes the output
    relu: Node | None
    # Its upper limit, inf or 6
    high: float | None

    @classmethod
    def of(cls, module: fx.GraphModule, node: Node) -> "Transform":
        """Return the transform of a `retrofit::power` node."""
        constants = [value_of(module, argument).double() for argument in node.args[1:]]  # type: ignore[arg-type]
        lmbda, gamma, beta = constants
        mirrored = gamma < 0
        users = users_of(node)
        high = None
        if len(users) == 1:
            high = _upper_limit(users[0])
        return cls(
            node=node,
            sign=torch.where(mirrored, -1.0, 1.0).to(gamma),
            lmbda=torch.where(mirrored, 2 - lmbda, lmbda),
            gamma=gamma.abs(),
            beta=beta,
            relu=None if high is None else users[0],
            high=high,
        )

    def exact_form(self) -> Replacement:
        """Return the transform itself."""
        form = inference_forms.TwoBranch(self.lmbda, self.gamma, self.beta)
        return Replacement("two branches", 0, torch.ones_like(self.sign), 0 * self.sign, [form])


def _upper_limit(node: Node) -> float | None:
    """Return the upper limit of a ReLU, or of a clamp from 0 on (inf if it has none); None for
    others.
    """
    if node.target is ATEN.relu.default:
        return INF
    if node.target not in (ATEN.hardtanh.default, ATEN.clamp.default):
        return None
    _, low, high = arguments(node).values()
    if low != 0 or isinstance(high, Node):
        return None
    if high is None:
        return INF
    return high


class Polynomial(nn.Module):
    """p * (c1 + p * (c2 + ...)) per channel of (N, C, *), for a degree of 2 or more. Each
    multiplication by constants with the addition that follows is a batch normalization, in
    evaluation: one operation, which ONNX Runtime keeps in the layout of its convolutions.
    """

    def __init__(self, coefficients: Tensor) -> None:
        """Keep (degree, C) coefficients of p, p^2, ..."""
        super().__init__()
        *lower, scale = coefficients.unbind(0)
        self.steps = nn.ModuleList()
        for shift in reversed(lower):
            step = inference_forms.ConstantNorm(torch.zeros_like(scale), scale, shift)
            self.steps.append(step)
            scale = torch.ones_like(scale)

    def to_convolutions(self) -> None:
        """Replace each batch normalization by a depthwise convolution, for which ONNX Runtime has
        kernels in INT8.

        Polynomials of a degree above 3 stay: each step has 8 bits, and errors add up.
        """
        if len(self.steps) > 2:
            return
        norms = [step for step in self.steps if isinstance(step, inference_forms.ConstantNorm)]
        self.steps = nn.ModuleList(
            inference_forms.GroupConvolution(norm.scale.view(-1, 1, 1), norm.shift)
            for norm in norms
        )

    def forward(self, p: Tensor) -> Tensor:
        """Evaluate."""
        y = p
        for step in self.steps:
            y = step(y) * p
        return y
