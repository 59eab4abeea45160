"""What counts as an activation call, and the module that stands for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm import layers
from timm.layers.activations import hard_mish
from timm.layers.activations_me import HardSwishMe, swish_me
from timm.layers.std_conv import StdConv2d
from timm.models.metaformer import SquaredReLU, StarReLU
from torch import Tensor, fx, nn
from torchvision import ops

from retrofit.graph import recognition

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.relu": torch.relu, "logsigmoid": F.logsigmoid, "sigmoid": torch.sigmoid,
    "timm's swish": swish_me, "timm's hard mish": hard_mish, "in-place method": lambda x: x.relu_(),
    "F.relu in place": lambda x: F.relu(x, True), "F.relu keyword": lambda x: F.relu(input=x, inplace=True),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "leaky": lambda x: F.leaky_relu(x, 0.3, True),
    "celu": lambda x: F.celu(x, 0.7), "softplus": lambda x: F.softplus(x, 2.0, threshold=15.0),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 6.0), "threshold": lambda x: F.threshold(x, 0.1, -1.0),
}  # fmt: skip
NOT_ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.glu,
    lambda x: F.softmax(x, -1),
    lambda x: F.prelu(x, x.mean()),
    lambda x: x + 1,
]


def nodes(call: Callable[[Tensor], Tensor]) -> list[fx.Node]:
    def calling(x: Tensor) -> Tensor:
        return call(x)

    graph = fx.Tracer(autowrap_functions=recognition.wrapped_functions()).trace(calling)
    if call in recognition.wrapped_functions():  # fx wraps names in a module's globals, not others
        graph = fx.Graph()
        graph.output(graph.call_function(call, (graph.placeholder("x"),)))
    return [node for node in graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("name", CALLS)
def test_the_module_of_a_call_does_the_same(name: str) -> None:
    (node,) = nodes(CALLS[name])
    module: Any = recognition.function_module(node)
    assert recognition.is_activation(module)
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    torch.testing.assert_close(module(x), CALLS[name](x.clone()), rtol=0, atol=1e-12)
    assert not getattr(module, "inplace", False)


def test_other_calls_are_no_activations() -> None:
    for call in NOT_ACTIVATIONS:
        assert all(recognition.function_module(node) is None for node in nodes(call))


class Calls(nn.Module):  # answers as a function of itself does; may hold another activation
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.relu6, self.calls = function, nn.ReLU6(inplace=True), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Pooled(nn.ReLU):  # a subclass that does more than its parent
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).mean((2, 3), keepdim=True)


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x.relu()


@pytest.mark.parametrize(
    "module",
    [
        *(
            nn.ReLU(inplace=True),
            nn.PReLU(3),
            nn.Softplus(),
            nn.Hardtanh(),
            SquaredReLU(),
            StarReLU(),
            HardSwishMe(),
        ),
        Calls(lambda self, x: x * self.relu6(x + 3) / 6),
    ],
    ids=lambda module: type(module).__name__,
)
def test_activations_of_whatever_class(module: nn.Module) -> None:
    state, seed = dict(vars(module)), torch.get_rng_state()
    assert recognition.is_activation(module)
    assert recognition.is_activation(module.to("meta"))
    assert vars(module).keys() == state.keys()
    assert torch.equal(torch.get_rng_state(), seed)


@pytest.mark.parametrize(
    "module",
    [
        nn.Softmax(-1), nn.GLU(), nn.Identity(), nn.RReLU(), nn.Dropout(), nn.LocalResponseNorm(2), nn.LayerNorm(5),
        nn.Sequential(nn.ReLU()), nn.AdaptiveAvgPool2d(1), Pooled(), Calls(counting),
        Calls(lambda _, x: x.relu() + torch.rand_like(x)),
        Calls(lambda self, x: x.relu() - x.relu().mean() if self.training else x.relu()),
        Calls(lambda _, x: 2 * x + 1),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_other_modules_are_no_activations(module: nn.Module) -> None:
    assert not recognition.is_activation(module)


def test_weights_that_are_changed_in_forward_take_no_fold() -> None:
    halved = nn.Conv2d(2, 2, 1)
    nn.utils.parametrize.register_parametrization(halved, "bias", nn.Identity())
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1))
    assert all(
        map(
            recognition.is_plain_affine,
            (nn.Conv2d(2, 2, 1), type("Simple", (nn.Conv3d,), {})(2, 2, 1)),
        )
    )
    assert not any(
        map(recognition.is_plain_affine, (StdConv2d(2, 2, 1), normed, halved, nn.BatchNorm2d(2)))
    )


def test_norms_and_drops_of_every_library() -> None:
    norms = (
        nn.BatchNorm1d(2),
        nn.InstanceNorm2d(2),
        nn.LayerNorm(2),
        layers.LayerNorm2d(2),
        layers.BatchNormAct2d(2),
    )
    others = (
        layers.EvoNorm2dS0(32),
        layers.FilterResponseNormTlu2d(2),
        layers.InplaceAbn(2),
        ops.FrozenBatchNorm2d(2),
    )
    assert all(map(recognition.is_norm, (*norms, *others)))
    drops = (
        nn.Dropout2d(),
        nn.AlphaDropout(),
        layers.DropPath(),
        layers.DropBlock2d(),
        ops.DropBlock2d(0.1, 3),
    )
    assert all(map(recognition.is_drop, (*drops, ops.StochasticDepth(0.1, "row"))))
    assert not any(map(recognition.is_norm, drops))
    assert not any(map(recognition.is_drop, norms))
