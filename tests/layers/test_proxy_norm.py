"""ProxyNorm against scipy, and what a layer that borrows another layer's parameters has to
survive.
"""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import timm.layers
import torch
import torch.nn.functional as F
from timm.models import metaformer
from torch import Tensor, nn

from retrofit.layers.proxy_norm import ProxyNorm
from tests.oracles import sample_moments

ACTIVATIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "relu": nn.ReLU, "relu6": nn.ReLU6, "silu": nn.SiLU, "gelu": nn.GELU, "hardswish": nn.Hardswish, "elu": nn.ELU,
    "mish": nn.Mish, "prelu": nn.PReLU, "silu_function": lambda: F.silu, "function": lambda: torch.sigmoid,
    "relu_in_place": lambda: nn.ReLU(inplace=True), "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "hardtanh": lambda: nn.Hardtanh(-0.5, 2.0), "leaky_relu": lambda: nn.LeakyReLU(0.2),
}  # fmt: skip
GAMMA = (1.0, 0.3, -2.0, 0.0, 1.5)
BETA = (0.0, 1.0, 0.5, -0.7, -2.0)


def affine(dtype: torch.dtype = torch.float64) -> nn.BatchNorm1d:
    """A norm with five unlike channels: negative, zero and shifted ones among them."""
    norm = nn.BatchNorm1d(5, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(GAMMA, dtype=dtype))
        norm.bias.copy_(torch.tensor(BETA, dtype=dtype))
    return norm


def proxy(
    phi: Callable[[Tensor], Tensor] = F.relu, norm: nn.Module | None = None, **options: object
) -> ProxyNorm:
    """A float64 layer whose own parameters are not zero."""
    layer = ProxyNorm(phi, 5, norm=norm, **options).double()
    if layer.proxy_bias is not None and layer.proxy_scale is not None:
        with torch.no_grad():
            layer.proxy_bias.copy_(torch.linspace(-0.3, 0.3, 5, dtype=torch.float64))
            layer.proxy_scale.copy_(torch.linspace(0.2, -0.2, 5, dtype=torch.float64))
        if layer.restore_shift is not None:
            layer.seed_restore()
    return layer


def proxy_input(layer: ProxyNorm, channel: int) -> tuple[float, float]:
    """Mean and standard deviation of gamma * Y + beta."""
    own = (layer.proxy_bias, layer.proxy_scale, layer.norm.weight, layer.norm.bias)
    bias, scale, gamma, beta = (0.0 if value is None else value[channel].item() for value in own)
    return gamma * bias + beta, gamma * (1 + scale)


def as_numpy(activation: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    module = copy.deepcopy(activation).double() if isinstance(activation, nn.Module) else activation

    def phi(u: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return (
                module(torch.tensor(np.atleast_1d(u), dtype=torch.float64))
                .numpy()
                .reshape(np.shape(u))
            )

    return phi


@pytest.mark.parametrize(("params", "samples"), [(True, 256), (False, 7)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_moments_are_those_of_the_samples(name: str, params: bool, samples: int) -> None:
    activation = ACTIVATIONS[name]()
    layer = proxy(activation, affine(), params=params, samples=samples)
    mean, std = layer.moments(torch.float64)
    for c in range(5):
        expected = sample_moments(as_numpy(activation), *proxy_input(layer, c), samples=samples)
        assert mean[c].item() == pytest.approx(expected[0], abs=1e-9)
        assert std[c].item() ** 2 - 0.03 == pytest.approx(expected[1], abs=1e-9)


@pytest.mark.parametrize(
    ("scale", "restore"), [(True, False), (False, False), (True, True), (False, True)]
)
def test_the_layer_is_equation_7_and_restores_what_it_was_seeded_with(
    scale: bool, restore: bool
) -> None:
    norm, x = affine(), torch.randn(3, 5, 4, dtype=torch.float64)
    layer = proxy(F.silu, norm, scale=scale, restore=restore)
    restored = [(1.0, 0.0)] * 5
    if restore:
        seeded = [sample_moments(as_numpy(F.silu), *proxy_input(layer, c)) for c in range(5)]
        restored = [((v + 0.03) ** 0.5, m) for m, v in seeded]
        with torch.no_grad():
            norm.bias.add_(torch.tensor([2.0, -1.0, 1.0, 0.5, 3.0]))
            norm.weight.mul_(1.5)
    moments = [sample_moments(as_numpy(F.silu), *proxy_input(layer, c)) for c in range(5)]
    centred = [as_numpy(F.silu)(x[:, c].numpy()) - mean for c, (mean, _) in enumerate(moments)]
    expected = [
        values * (std / (var + 0.03) ** 0.5 if scale else 1.0) + shift
        for values, (_, var), (std, shift) in zip(centred, moments, restored, strict=True)
    ]
    torch.testing.assert_close(layer(x).detach(), torch.from_numpy(np.stack(expected, 1)))


def test_parameters_of_the_activation_count_by_channel() -> None:
    prelu = nn.PReLU(5).double()
    with torch.no_grad():
        prelu.weight.copy_(torch.linspace(-0.5, 1.5, 5))
    mean, std = proxy(prelu, affine()).moments(torch.float64)
    for c, slope in enumerate(prelu.weight.tolist()):
        one = proxy(nn.LeakyReLU(slope), affine()).moments(torch.float64)
        torch.testing.assert_close((mean[c], std[c]), (one[0][c], one[1][c]))


class Swish(nn.Module):
    """An activation of a user's own, with a slope a channel that is trained and an offset that is
    not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.5, 1.5, 5).view(5, 1, 1))
        self.register_buffer("offset", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(F.prelu(x, self.slope.flatten())) + self.offset.expand_as(x).lerp(
            x, self.offset
        )


PARAMETRIC: dict[str, Callable[[], nn.Module]] = {
    "prelu": nn.PReLU, "prelu per channel": lambda: nn.PReLU(5), "own": Swish,
    "timm prelu": lambda: timm.layers.activations.PReLU(1),
    "timm prelu per channel": lambda: timm.layers.activations.PReLU(5),
    "star relu": lambda: metaformer.StarReLU(scale_learnable=True, bias_learnable=True),
    "sequence": lambda: nn.Sequential(nn.PReLU(5), nn.Tanh()),
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "of"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("name", PARAMETRIC)
def test_activations_with_parameters_in_any_type(
    name: str, dtype: torch.dtype, of: torch.dtype
) -> None:
    """Their moments are computed in the type asked for, whatever the parameters are in, and
    gradients reach them.
    """
    layer = ProxyNorm(PARAMETRIC[name](), 5, norm=affine(torch.float32))
    expected = copy.deepcopy(layer).double()
    expected.norm.double()
    wanted = expected.moments(torch.float64)
    layer.to(dtype)
    layer.norm.to(dtype)
    tolerance = 1e-3 if dtype == torch.float16 else 1e-2 if dtype == torch.bfloat16 else 1e-5
    found_moments = layer.moments(of)
    assert {found.dtype for found in found_moments} == {of}
    torch.testing.assert_close(
        found_moments, wanted, atol=tolerance, rtol=tolerance, check_dtype=False
    )
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer.moments(of), found_moments, atol=0, rtol=0)
    grads, double = (
        torch.autograd.grad(sum(m.sum() for m in moments), list(of_layer.activation.parameters()))
        for moments, of_layer in ((layer.moments(of), layer), (wanted, expected))
    )
    assert {grad.dtype for grad in grads} == {dtype}
    torch.testing.assert_close(
        grads, double, atol=10 * tolerance, rtol=10 * tolerance, check_dtype=False
    )
    x = torch.randn(3, 5, 2, 2, dtype=dtype)
    out, wide = layer(x), expected(x.double())
    assert out.dtype == dtype
    torch.testing.assert_close(
        out, wide, atol=20 * tolerance, rtol=10 * tolerance, check_dtype=False
    )


class Net(nn.Module):  # a norm and its activation under two names, as most networks hold them
    def __init__(self) -> None:
        super().__init__()
        self.bn1 = affine(torch.float32)
        self.act1 = ProxyNorm(nn.PReLU(5), 5, norm=self.bn1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act1(self.bn1(x))


def test_the_norm_is_borrowed_not_owned() -> None:
    net = Net().eval()
    names = [name for name, _ in net.named_parameters()]
    assert len(names) == len(set(names)) == 5
    assert not any(name.startswith("act1.norm") for name in net.state_dict())
    assert net.act1.norm is net.bn1
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.act1.norm is other.bn1
        assert other.bn1 is not net.bn1
    assert torch.equal(copy.deepcopy(net.act1).norm.weight, net.bn1.weight)
    net.bn1.add_module(
        "act", ProxyNorm(nn.ReLU(), 5, norm=net.bn1)
    )  # a fused layer: the reference is a cycle
    for other in (copy.deepcopy(net.bn1), pickle.loads(pickle.dumps(net.bn1))):
        assert other.act.norm is other
    assert "ReLU" in repr(net.bn1)
    low = ProxyNorm(F.relu, 5, norm=affine(torch.bfloat16), restore=True, dtype=torch.bfloat16)
    assert (low.proxy_bias.dtype, low.restore_shift.dtype) == (torch.bfloat16, torch.float32)


def test_the_activation_keeps_its_names_in_the_state_dict() -> None:
    net = Net()
    with torch.no_grad():
        net.act1.activation.weight.uniform_()
    state = net.state_dict()
    assert set(state) - set(net.bn1.state_dict(prefix="bn1.")) == {
        *(
            "act1.weight",
            "act1.proxy_bias",
            "act1.proxy_scale",
            "act1.strength",
            "act1.setting_scale",
        )
    }
    for other in (Net(), copy.deepcopy(Net())):
        other.load_state_dict(state)
        assert torch.equal(other.act1.activation.weight, net.act1.activation.weight)
    source = nn.Sequential()
    source.add_module("act1", nn.PReLU(5))
    assert not other.load_state_dict(source.state_dict(), strict=False).unexpected_keys
    assert torch.equal(other.act1.activation.weight, source.act1.weight)


def test_functional_call_refuses_names_that_would_do_nothing() -> None:
    net, x = Net(), torch.randn(4, 5)
    state = {
        name: tensor + 1 for name, tensor in net.state_dict().items() if tensor.is_floating_point()
    }
    with pytest.raises(
        AttributeError, match=r"name it activation\.weight, as named_parameters\(\) does"
    ):
        torch.func.functional_call(net, state, (x,))
    parameters = {name: tensor + 1 for name, tensor in net.named_parameters()}
    assert not torch.allclose(torch.func.functional_call(net, parameters, (x,)), net(x))
    assert not hasattr(net.act1, "weight")


def test_misuse() -> None:
    layer = ProxyNorm(F.relu, 5)
    for bad in (torch.zeros(5), torch.zeros(2, 4), torch.zeros(2, 3, 5)):
        with pytest.raises(ValueError, match="5 channels"):
            layer(bad)
    with pytest.raises(ValueError, match="restore=True"):
        layer.seed_restore()
    with pytest.raises(ValueError, match="not elementwise"):
        ProxyNorm(nn.GLU(dim=0), 5)(torch.zeros(2, 5))
