"""Folding keeps the function, whatever stands around a norm, whatever calls it, and whatever its
constants are.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._pytree import tree_leaves
from torchvision.ops import FrozenBatchNorm2d

from retrofit import layers
from retrofit.export.capture import Program, capture
from retrofit.export.graph_passes import fold_program
from retrofit.inputs import Call
from retrofit.layers import (
    BatchNormalNormAct2d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNormalNorm2d,
)
from retrofit.layers.inference_forms import ChannelAffine
from tests.export.networks import batch_norm, norm, slow


class Side(nn.ModuleList):
    """Networks side by side, which are captured at once: capturing takes a second whatever the
    network.
    """

    def forward(self, x: Tensor) -> list[Any]:
        return [network(x.clone()) for network in self]


def folded(model: nn.Module, x: Tensor) -> Program:
    program = capture(model.eval(), Call((x,)))
    assert not program.not_captured
    fold_program(program, {})
    return program


def check(
    networks: dict[str, nn.Module], size: tuple[int, ...] = (4, 9, 9), tolerance: float = 2e-5
) -> dict[str, str]:
    """Compare networks with their folded copies, in float64 and on far values; return what became
    of their norms.
    """
    model = Side(networks.values()).eval()
    x = 2 * torch.randn(3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(x)  # from here on pruned weights can be copied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = folded(model, x)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    channels_last = x.transpose(1, -1).contiguous().transpose(1, -1)
    with torch.no_grad():
        for batch in (x, x[:1], channels_last):
            found, expected = program.module(batch), model.double()(batch.double())
            model.float()
            for name, *answers in zip(networks, found, expected, strict=True):
                for ours, theirs in zip(*map(tree_leaves, answers), strict=True):
                    gap = float((ours - theirs).abs().max()) / float(theirs.abs().max())
                    assert gap < tolerance, (name, gap)
    names, forms = (
        list(networks),
        {tuple(layer.split(".", 1)): form for layer, form in program.layers.items()},
    )
    return {f"{names[int(number)]}.{layer}": form for (number, layer), form in forms.items()}


def layer_counts(program: Program) -> Counter[str]:  # count the operations of a folded network
    nodes = list(program.module.graph.nodes)
    functions = [node.target.__name__.split(".")[0] for node in nodes if node.op == "call_function"]
    modules = [
        node.target for node in nodes if node.op == "call_module" and node.target != "_guards_fn"
    ]
    return Counter(functions) + Counter(
        type(program.module.get_submodule(name)).__name__ for name in modules
    )


FEEDERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(4, 8, 3, padding=1),
    "no bias": lambda: nn.Conv2d(4, 8, 3, stride=2, bias=False),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 3, stride=2),
    "transposed grouped": lambda: nn.ConvTranspose2d(4, 8, 2, groups=2, bias=False),
    "reflecting": lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
    "same": lambda: timm.layers.Conv2dSame(4, 8, 3, stride=2),
    "padding to the same size": lambda: nn.Conv2d(4, 8, 3, padding="same"),
    "standardized": lambda: layers.WeightStandardizedConv2d(4, 8, 3, strength=0.7),
    "standardized by timm": lambda: timm.layers.StdConv2d(4, 8, 3),
    "pruned": lambda: prune.random_unstructured(nn.Conv2d(4, 8, 3), "weight", 0.5),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(4, 8, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 8, 3)),
}


def trained() -> nn.Module:
    return batch_norm(nn.BatchNorm2d(8))


def whitened(
    to: type[Any] = DecorrelatedBatchNormalNorm2d, size: int = 4, strength: float = 1.0
) -> Any:
    layer = to(8, group_size=size, strength=strength, momentum=1.0)
    with torch.no_grad():
        layer.train()(torch.randn(64, 8, 3, 3).exp())
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def of_samples(layer: Any) -> Any:
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.uniform_(layer.bias, -1.0, 1.0)
    return layer


def proxied() -> nn.Module:
    before = trained()
    layer = layers.ProxyNorm(nn.Tanh(), 8, norm=before)
    nn.init.normal_(layer.proxy_bias, std=0.3)
    return nn.Sequential(before, layer)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "affine": lambda: norm(8, running_lambda=torch.ones(8)),
    "two branches": lambda: norm(8),
    "batch norm": trained,
    "frozen": lambda: batch_norm(FrozenBatchNorm2d(8)),
    "group": lambda: of_samples(layers.MigratedGroupNorm(2, 8, strength=0.7)),
    "estimated": lambda: of_samples(layers.GroupNormalNorm(2, 8)),
    "proxied": proxied,
    "whitened": whitened,
}


def test_every_feeder_takes_an_affine_map() -> None:
    kinds = {
        "affine": "folded",
        "two branches": "two branches",
        "batch norm": "folded",
        "frozen": "folded",
    }
    networks = {
        f"{f}, {n}": nn.Sequential(FEEDERS[f](), NORMS[n]())
        for f in FEEDERS
        for n in kinds
        if n != "frozen" or f == "plain"  # which folds as a BatchNorm does
    }
    assert check(networks) == {f"{name}.1": kinds[name.split(", ")[1]] for name in networks}
    program = folded(nn.Sequential(FEEDERS["weight norm"](), norm(8)), torch.randn(2, 4, 9, 9))
    assert layer_counts(program) == {"conv2d": 1, "TwoBranch": 1}  # what made the weight is gone


def test_a_whitening_folds_where_its_groups_come_from_the_same_channels() -> None:
    per_group = {"depthwise": 2, "grouped": 4, "transposed grouped": 4}
    cases = [(f, size, t) for f in FEEDERS for size, t in ((4, 1.0), (8, 0.5))]
    cases += [("plain", 4, 0.0), ("depthwise", 4, 0.0)]
    forms = check(
        {
            str(c): nn.Sequential(FEEDERS[c[0]](), whitened(DecorrelatedBatchNorm2d, *c[1:]))
            for c in cases
        }
    )
    for feeder, size, t in cases:
        folds = t == 0 or per_group.get(feeder, 8) % size == 0
        assert forms[f"{feeder, size, t}.1"] == ("folded" if folds else "group convolution")
    check({feeder: nn.Sequential(FEEDERS[feeder](), whitened(size=4)) for feeder in FEEDERS})


class Odd(nn.Module):  # a convolution, a norm, an activation and what takes it, as `run` calls them
    def __init__(self, layer: nn.Module, run: Callable[..., Any], consumer: nn.Module) -> None:
        super().__init__()
        self.feeder, self.norm, self.relu = (
            nn.Conv2d(4, 8, 3, padding=1),
            layer,
            nn.ReLU(inplace=True),
        )
        self.consumer, self.run = consumer, run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def normed(net: Any, x: Tensor) -> Tensor:
    return net.norm(net.feeder(x))


def straight(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.relu(normed(net, x)))


def bare(net: Any, x: Tensor) -> Tensor:
    return net.consumer(normed(net, x))


def feeder_used_twice(net: Any, x: Tensor) -> Tensor:
    y = net.feeder(x)
    out = net.norm(y)
    return net.consumer(net.relu(out)) + y.mul_(0.5).mean()


def every_step_returned(net: Any, x: Tensor) -> dict[str, Any]:
    y = net.norm(net.feeder(x))
    z = F.relu(y)
    return {"norm": y, "rest": [z, net.consumer(z)]}


def point(channels: int = 8) -> nn.Module:
    return nn.Conv2d(channels, 4, 1)


RUNS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "feeder's weight read": (
        lambda net, x: straight(net, x) + F.conv2d(x, net.feeder.weight, padding=1).mean(),
        point,
    ),
    "consumer's weight": (
        lambda net, x: straight(net, x) + F.conv2d(net.feeder(x), net.consumer.weight),
        point,
    ),
    "feeder used twice": (feeder_used_twice, point),
    "padded by hand": (lambda net, x: net.consumer(F.pad(normed(net, x), (1, 1, 1, 1))), point),
    "every step returned": (every_step_returned, point),
    "norm twice": (lambda net, x: net.consumer(net.norm(normed(net, x))), point),
    "limited": (lambda net, x: net.consumer(normed(net, x).clamp(0, 0.7)), point),
    "one half of the channels": (
        lambda net, x: net.consumer(normed(net, x)[:, :4]),
        lambda: point(4),
    ),
    "flattened": (
        lambda net, x: net.consumer(net.relu(normed(net, x)).flatten(1)),
        lambda: nn.Linear(648, 4),
    ),
    "dilated groups": (straight, lambda: nn.Conv2d(8, 4, 3, groups=4, dilation=2)),
    "linear on the last dimension": (straight, lambda: nn.Linear(9, 4)),
    "zero padding": (bare, lambda: nn.Conv2d(8, 4, 3, padding=1)),
    "circular padding": (bare, lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular")),
    "padding by the input's size": (bare, lambda: timm.layers.Conv2dSame(8, 4, 3, stride=2)),
    "reflected padding": (bare, lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect")),
    "padding to the same size": (bare, lambda: nn.Conv2d(8, 4, 3, padding="same")),
    "transposed": (bare, lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2, output_padding=1)),
}


@pytest.mark.parametrize("kind", ["batch norm", *slow("whitened", "two branches", "estimated")])
def test_odd_calls(kind: str) -> None:
    check({run: Odd(NORMS[kind](), code, consumer()) for run, (code, consumer) in RUNS.items()})


def patched(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) * 2 + 1


ALTERATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "hook": lambda module: module.register_forward_hook(lambda _layer, _args, out: out * 2 + 1),
    "hook before": lambda module: module.register_forward_pre_hook(
        lambda _layer, args: (args[0] * 2 + 1,)
    ),
    "forward of its own": patched,
}


@pytest.mark.parametrize("alteration", ["hook", "forward of its own", *slow("hook before")])
def test_altered_layers(alteration: str) -> None:
    own = alteration == "forward of its own"
    kinds = ["two branches"]
    if not own:
        kinds += ["batch norm", "group", "proxied", "whitened"]
    networks: dict[str, Any] = {kind: Odd(NORMS[kind](), straight, point()) for kind in kinds}
    for network in networks.values():
        ALTERATIONS[alteration](network.norm)
    for where in ("drop", "act") if own else ("", "act"):
        layer = BatchNormalNormAct2d(8)
        layer.load_state_dict(norm(8).state_dict())
        layer.drop, layer.act = nn.Dropout(), nn.ReLU()
        ALTERATIONS[alteration](layer.get_submodule(where))
        networks[f"fused, {where}"] = nn.Sequential(nn.Conv2d(4, 8, 3), layer, point())
    assert (check(networks)["two branches.norm"] == "kept") == own


def test_what_is_no_norm_is_in_no_report_with_a_forward_of_its_own_too() -> None:
    layer = proxied()
    patched(layer[1])
    assert check({"proxied": nn.Sequential(nn.Conv2d(4, 8, 3), layer)}) == {"proxied.1.0": "folded"}


def test_layers_that_serve_several_places() -> None:
    conv, one, two, last = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), torch.ones(4)
    two.weight = one.weight
    networks: dict[str, nn.Module] = {
        "conv": nn.Sequential(conv, norm(4), conv, norm(4, running_lambda=last)),
        "weight": nn.Sequential(one, norm(4), nn.ReLU(), two, norm(4, running_lambda=last)),
    }
    for kind, build in NORMS.items():
        layer = build()
        networks[kind] = nn.Sequential(
            nn.Conv2d(4, 8, 1), layer, nn.ReLU(), nn.Conv2d(8, 8, 3), layer
        )
    forms = check(networks)
    assert forms["conv.3"] == forms["weight.4"] == "affine"
    assert forms["batch norm.1"] == "folded"  # into either convolution


class ComputedKernel(nn.Module):
    """A convolution whose kernel another convolution and its norm compute from a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(8, 8, 3, 3))
        self.mix = nn.Conv2d(8, 8, 1)
        self.norm = trained()
        self.last = trained()

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.norm(self.mix(self.base))
        return self.last(nn.functional.conv2d(x, kernel))


def test_a_view_of_images_in_another_layout() -> None:
    check({"flat": nn.Sequential(nn.Conv2d(4, 8, 3), norm(8), nn.Flatten())})


def test_a_kernel_that_a_norm_computes_from_constants() -> None:
    check({"computed": ComputedKernel()}, (8, 9, 9))


def test_a_batch_norm_that_nothing_before_it_takes_merges_with_a_scale_behind_it() -> None:
    scaled = ChannelAffine(torch.randn(8), torch.zeros(8))
    assert check({"first": nn.Sequential(trained(), scaled, nn.ReLU(), point())}, (8, 9, 9)) == {
        "first.0": "affine"
    }
    program = folded(nn.Sequential(trained(), scaled, nn.ReLU()), torch.randn(2, 8, 9, 9))
    assert layer_counts(program) == {"ConstantNorm": 1, "relu": 1}


def test_a_map_before_zero_padding_is_one_operation() -> None:
    scaled = ChannelAffine(torch.rand(8) + 0.1, torch.randn(8))
    model = nn.Sequential(nn.ReLU(), scaled, nn.Conv2d(8, 4, 3, padding=1))
    x = torch.randn(2, 8, 9, 9)
    program = folded(model, x)
    torch.testing.assert_close(program.module(x), model(x), rtol=1e-5, atol=1e-5)
    assert layer_counts(program) == {"relu": 1, "ConstantNorm": 1, "conv2d": 1}


CONSTANTS = {
    "negative gamma": {"weight": -torch.rand(8) - 0.1},
    "zero gamma": {"weight": torch.tensor([0.0, 1.0] * 4)},
    "all zero": {"weight": torch.zeros(8)},
    "dead channels": {"running_var": torch.tensor([0.0, 1.0] * 4), "running_mean": torch.zeros(8)},
    "large lambda": {"running_lambda": torch.linspace(-3, 4, 8)},
    "lambda at the limits": {
        "running_lambda": torch.tensor([0.0, 2.0, 1e-4, 2 - 1e-4, 1e-3, -1e-3, 1.0, 1 + 1e-6])
    },
    "lambda near 0": {
        "running_lambda": torch.tensor([1e-9, -1e-9, 1e-6, -1e-6, 3e-4, -3e-4, 4e-2, -4e-2])
    },
    "lambda near 2": {
        "running_lambda": 2 + torch.tensor([1e-7, -1e-7, 1e-6, -1e-6, 3e-4, -3e-4, 4e-2, -4e-2])
    },
    "never alive": {"bias": torch.full((8,), -3.0), "running_lambda": torch.full((8,), -1.0)},
}


def test_constants() -> None:
    networks = {}
    for case, constants in CONSTANTS.items():
        for beta in (-0.2, 0.3):
            layer = norm(8, **{"bias": torch.full((8,), beta), **constants})
            networks[f"{case}, {beta > 0}"] = nn.Sequential(
                nn.Conv2d(4, 8, 3), layer, nn.ReLU(), nn.Conv2d(8, 3, 1)
            )
    exact = {name: network for name, network in networks.items() if not name.startswith("large")}
    check(exact)
    # psi has a power of 1 + |h|: where lambda is -3 or 4, rounding of h counts several times
    check(
        {name: network for name, network in networks.items() if name not in exact}, tolerance=2e-4
    )


@pytest.mark.parametrize("strength", [0.6, *slow(0.0)])
@pytest.mark.parametrize("kind", ["group", "layer"])
def test_affine_of_layers_that_estimate(kind: str, strength: float) -> None:
    """It goes into the layer after the norm, never into the one after an activation."""
    networks = {}
    for act in (None, nn.ReLU()):
        for padding in (0,) if kind == "layer" else (0, 1):
            layer: Any = of_samples(
                layers.LayerNormalNorm(8) if kind == "layer" else layers.GroupNormalNorm(2, 8)
            )
            layer.set_strength(strength)
            consumer = nn.Linear(8, 5) if kind == "layer" else nn.Conv2d(8, 5, 3, padding=padding)
            networks[f"{act}, {padding}"] = nn.Sequential(
                nn.Tanh(), layer, *([act] if act else []), consumer
            )
    forms = check(networks, (9, 9, 8) if kind == "layer" else (8, 9, 9))
    assert set(forms.values()) == {"estimated" if strength else "normalization"}


def test_gamma_and_beta_of_an_estimate_go_into_the_linear_layer_behind_it() -> None:
    layer = of_samples(layers.LayerNormalNorm(8))
    for between, left in ([nn.ReLU()], 1), ([], 0):
        program = folded(nn.Sequential(layer, *between, nn.Linear(8, 5)), torch.randn(2, 3, 8))
        assert layer_counts(program)["ChannelAffine"] == left


def test_linear_layers() -> None:
    whitening = layers.DecorrelatedBatchNormalNorm1d(6, group_size=3, momentum=1.0)
    whitening.train()(torch.randn(64, 6).exp())
    layer = layers.BatchNormalNorm1d(6)
    layer.running_lambda.uniform_(0.3, 1.7)
    between = nn.Sequential(nn.Linear(5, 6), layer, nn.ReLU(), nn.Linear(6, 2))
    check({"between": between, "whitening": nn.Sequential(nn.Linear(5, 6), whitening)}, (5,))
    # nn.Linear works on the last dimension, the norm on the second
    forms = check(
        {"channels": nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))}, (6, 5)
    )
    assert forms["channels.1"] == "affine"


def test_the_norm_is_the_model() -> None:
    assert folded(norm(4, running_lambda=torch.ones(4)), torch.randn(2, 4, 5, 5)).layers == {
        "": "affine"
    }


def test_a_folded_network_is_folded_again() -> None:
    kinds = (nn.ReLU, nn.GELU)
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 1), norm(4), kind()) for kind in kinds]
    model = nn.Sequential(*blocks, batch_norm(nn.BatchNorm2d(4)), nn.MaxPool2d(2)).eval()
    x = torch.randn(3, 4, 6, 6)
    once = folded(model, x).module
    twice = folded(once, x).module
    expected = model.double()(x.double()).float().detach()
    torch.testing.assert_close(twice(x), expected, atol=2e-5, rtol=1e-4)
