"""Folding keeps the function, whatever stands around a norm, whatever calls it, and whatever its constants are."""

from __future__ import annotations

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
from retrofit.export.fold_constants import fold
from retrofit.inputs import Call
from retrofit.layers import BatchNormalNormAct2d, DecorrelatedBatchNorm2d, DecorrelatedBatchNormalNorm2d
from tests.export.networks import norm


class Side(nn.Module):
    """Networks side by side, which are captured at once: capturing takes a second whatever the network."""

    def __init__(self, networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.names = list(networks)
        self.networks = nn.ModuleList(networks.values())

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: network(x.clone()) for name, network in zip(self.names, self.networks, strict=True)}


def folded(model: nn.Module, x: Tensor) -> Program:
    """Fold a network."""
    program = capture(model.eval(), Call((x,)))
    assert not program.note
    fold(program, {})
    return program


def check(networks: dict[str, nn.Module], size: tuple[int, ...] = (4, 9, 9), tolerance: float = 2e-5) -> dict[str, str]:
    """Compare networks with their folded copies, in float64 and on far values; return what became of their norms."""
    model = Side(networks).eval()
    x = 2 * torch.randn(3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(x)  # from here on pruned weights can be copied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    program = folded(model, x)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    with torch.no_grad():
        for batch in (x, x[:1]):
            found, expected = program.module(batch), model.double()(batch.double())
            model.float()
            for name in networks:
                for ours, theirs in zip(tree_leaves(found[name]), tree_leaves(expected[name]), strict=True):
                    gap = float((ours - theirs).abs().max()) / float(theirs.abs().max())
                    assert gap < tolerance, (name, gap)
    names = {f"networks.{number}": name for number, name in enumerate(networks)}
    found = {tuple(name.split(".")): form for name, form in program.layers.items()}
    return {".".join([names[".".join(path[:2])], *path[2:]]): form for path, form in found.items()}


def layer_counts(program: Program) -> dict[str, int]:
    """Count the operations of a folded network."""
    kinds: dict[str, int] = {}
    for node in program.module.graph.nodes:
        if node.op == "call_function":
            kind = node.target.__name__.split(".")[0]
        elif node.op == "call_module" and node.target != "_guards_fn":
            kind = type(program.module.get_submodule(node.target)).__name__
        else:
            continue
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


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
    "standardised": lambda: layers.WeightStandardizedConv2d(4, 8, 3, strength=0.7),
    "standardised by timm": lambda: timm.layers.StdConv2d(4, 8, 3),
    "pruned": lambda: prune.random_unstructured(nn.Conv2d(4, 8, 3), "weight", 0.5),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(4, 8, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(4, 8, 3)),
}


def batch_norm() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(8)
    for tensor in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer


def frozen_batch_norm() -> FrozenBatchNorm2d:
    layer = FrozenBatchNorm2d(8)
    layer.load_state_dict(batch_norm().state_dict())
    return layer


def whitened(to: type[Any] = DecorrelatedBatchNormalNorm2d, size: int = 4, strength: float = 1.0) -> Any:
    layer = to(8, group_size=size, strength=strength, momentum=1.0)
    with torch.no_grad():
        layer.train()(torch.randn(64, 8, 3, 3).exp())
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def of_samples(layer: Any) -> nn.Module:
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.uniform_(layer.bias, -1.0, 1.0)
    return layer


def proxied() -> nn.Module:
    before = batch_norm()
    layer = layers.ProxyNorm(nn.Tanh(), 8, norm=before)
    nn.init.normal_(layer.proxy_bias, std=0.3)
    return nn.Sequential(before, layer)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "affine": lambda: norm(8, running_lambda=torch.ones(8)),
    "one branch": lambda: norm(8, bias=-torch.rand(8)),
    "two branches": lambda: norm(8),
    "batch norm": batch_norm,
    "frozen": frozen_batch_norm,
    "group": lambda: of_samples(layers.MigratedGroupNorm(2, 8, strength=0.7)),
    "estimated": lambda: of_samples(layers.GroupNormalNorm(2, 8)),
    "proxied": proxied,
    "whitened": whitened,
}


def test_every_feeder_takes_an_affine_map() -> None:
    kinds = {"affine": "folded", "two branches": "two branches", "batch norm": "folded", "frozen": "folded"}
    networks = {f"{f}, {n}": nn.Sequential(FEEDERS[f](), NORMS[n]()) for f in FEEDERS for n in kinds}
    assert check(networks) == {f"{f}, {n}.1": kinds[n] for f in FEEDERS for n in kinds}
    for feeder in ("weight norm", "standardised"):
        program = folded(nn.Sequential(FEEDERS[feeder](), norm(8)), torch.randn(2, 4, 9, 9))
        assert layer_counts(program) == {"conv2d": 1, "TwoBranch": 1}  # what made the weight is gone


def test_a_whitening_folds_where_its_groups_come_from_the_same_channels() -> None:
    per_group = {"depthwise": 2, "grouped": 4, "transposed grouped": 4}
    cases = [(f, size, t) for f in FEEDERS for size, t in ((4, 1.0), (8, 0.5), (4, 0.0))]
    forms = check({str(c): nn.Sequential(FEEDERS[c[0]](), whitened(DecorrelatedBatchNorm2d, *c[1:])) for c in cases})
    for feeder, size, t in cases:
        folds = t == 0 or per_group.get(feeder, 8) % size == 0
        assert forms[f"{feeder, size, t}.1"] == ("folded" if folds else "group convolution")
    check({feeder: nn.Sequential(FEEDERS[feeder](), whitened(size=4)) for feeder in FEEDERS})


class Odd(nn.Module):
    """A convolution, a norm, an activation and what takes it, as `run` calls them."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any], consumer: nn.Module) -> None:
        super().__init__()
        self.feeder, self.norm, self.relu = nn.Conv2d(4, 8, 3, padding=1), layer, nn.ReLU(inplace=True)
        self.consumer, self.run = consumer, run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def straight(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.relu(net.norm(net.feeder(x))))


def bare(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.norm(net.feeder(x)))


def feeder_used_twice(net: Any, x: Tensor) -> Tensor:
    y = net.feeder(x)
    out = net.norm(y)
    return net.consumer(net.relu(out)) + y.mul_(0.5).mean()


def changed_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.feeder(x)
    y.add_(1.0)
    return net.consumer(net.relu(net.norm(y)))


def norm_used_after_activation_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.feeder(x))
    return net.consumer(net.relu(y)) + y.mean()


def every_step_returned(net: Any, x: Tensor) -> dict[str, Any]:
    y = net.norm(net.feeder(x))
    z = F.relu(y)
    return {"norm": y, "rest": [z, net.consumer(z)]}


def norm_weight_read(net: Any, x: Tensor) -> Tensor:
    layer = net.norm[0] if isinstance(net.norm, nn.Sequential) else net.norm
    return straight(net, x) * layer.weight.mean()


def norm_by_hand(net: Any, x: Tensor) -> Tensor:
    """Calls the norm, and computes it from its tensors besides."""
    layer = net.norm[0] if isinstance(net.norm, nn.Sequential) else net.norm
    mean, var = (getattr(layer, f"running_{name}", torch.ones(8)).to(x) for name in ("mean", "var"))
    return net.consumer(net.norm(net.feeder(x)) + F.batch_norm(net.feeder(x), mean, var, layer.weight, layer.bias))


def point() -> nn.Module:
    return nn.Conv2d(8, 4, 1)


RUNS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "feeder's weight read": (lambda net, x: straight(net, x) + F.conv2d(x, net.feeder.weight, padding=1).mean(), point),
    "consumer's weight read": (
        lambda net, x: straight(net, x) + F.conv2d(net.feeder(x), net.consumer.weight),
        point,
    ),
    "norm's weight read": (norm_weight_read, point),
    "norm by hand": (norm_by_hand, point),
    "feeder used twice": (feeder_used_twice, point),
    "changed in place": (changed_in_place, point),
    "norm used after an activation in place": (norm_used_after_activation_in_place, point),
    "padded by hand": (lambda net, x: net.consumer(F.pad(net.norm(net.feeder(x)), (1, 1, 1, 1))), point),
    "padded by ones": (lambda net, x: net.consumer(F.pad(net.norm(net.feeder(x)), (1, 1), value=1.0)), point),
    "channels padded": (
        lambda net, x: net.consumer(F.pad(net.norm(net.feeder(x)), (0, 0, 0, 0, 0, 2))),
        lambda: nn.Conv2d(10, 4, 1),
    ),
    "every step returned": (every_step_returned, point),
    "norm twice": (lambda net, x: net.consumer(net.norm(net.norm(net.feeder(x)))), point),
    "limited": (lambda net, x: net.consumer(net.norm(net.feeder(x)).clamp(0, 0.7)), point),
    "one half of the channels": (
        lambda net, x: net.consumer(net.norm(net.feeder(x))[:, :4]),
        lambda: nn.Conv2d(4, 4, 1),
    ),
    "flattened": (lambda net, x: net.consumer(net.relu(net.norm(net.feeder(x))).flatten(1)), lambda: nn.Linear(648, 4)),
    "channels last": (lambda net, x: straight(net, x.to(memory_format=torch.channels_last)), point),
    "dilated groups": (straight, lambda: nn.Conv2d(8, 4, 3, groups=4, dilation=2)),
    "linear on the last dimension": (straight, lambda: nn.Linear(9, 4)),
    "zero padding": (bare, lambda: nn.Conv2d(8, 4, 3, padding=1)),
    "circular padding": (bare, lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular")),
    "reflected padding": (bare, lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect")),
    "padding by the input's size": (bare, lambda: timm.layers.Conv2dSame(8, 4, 3, stride=2)),
    "padding to the same size": (bare, lambda: nn.Conv2d(8, 4, 3, padding="same")),
    "transposed": (bare, lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2, output_padding=1)),
}


@pytest.mark.parametrize(
    "kind",
    [
        "one branch",
        "batch norm",
        "whitened",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("two branches", "estimated")),
    ],
)
def test_odd_calls(kind: str) -> None:
    check({run.replace(".", ""): Odd(NORMS[kind](), code, consumer()) for run, (code, consumer) in RUNS.items()})


def double(*args: Any) -> Any:
    """A hook that changes what passes: the input before a call, the output after it."""
    passing = args[-1]
    return (passing[0] * 2 + 1,) if isinstance(passing, tuple) else passing * 2 + 1


def patched(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) * 2 + 1


ALTERATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "hook": lambda module: module.register_forward_hook(double),
    "hook before": lambda module: module.register_forward_pre_hook(double),
    "forward of its own": patched,
}


@pytest.mark.parametrize(
    "alteration", ["hook", "forward of its own", pytest.param("hook before", marks=pytest.mark.slow)]
)
def test_altered_layers(alteration: str) -> None:
    networks = {}
    for kind in ("one branch", "batch norm", "group", "proxied", "whitened"):
        build = NORMS[kind]
        places = ("feeder", "relu", "consumer") if alteration == "forward of its own" else ("feeder", "norm", "relu")
        for where in places:
            networks[f"{kind}, {where}"] = Odd(build(), straight, point())
            ALTERATIONS[alteration](getattr(networks[f"{kind}, {where}"], where))
        if alteration != "forward of its own":
            networks[f"{kind}, block"] = nn.Sequential(nn.Sequential(nn.Conv2d(4, 8, 3), build()), point())
            ALTERATIONS[alteration](networks[f"{kind}, block"][0])
    for where in ("drop", "act") if alteration == "forward of its own" else ("", "act"):
        layer = BatchNormalNormAct2d(8)
        layer.load_state_dict(norm(8).state_dict())
        layer.drop, layer.act = nn.Dropout(), nn.ReLU()
        ALTERATIONS[alteration](layer.get_submodule(where))
        networks[f"fused, {where}"] = nn.Sequential(nn.Conv2d(4, 8, 3), layer, point())
    networks["norm"] = Odd(norm(8), straight, point())
    ALTERATIONS[alteration](networks["norm"].norm)
    assert (check(networks)["norm.norm"] == "kept") == (alteration == "forward of its own")


class Shared(nn.Module):
    """One convolution called twice, each time with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(4, 4, 3), nn.ModuleList([norm(4), norm(4, running_lambda=torch.ones(4))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.norms:
            x = layer(self.conv(x))
        return x


class SharedWeights(nn.Module):
    """Two convolutions with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.two.weight = self.one.weight
        self.norm, self.last = norm(4), norm(4, running_lambda=torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(torch.relu(self.norm(self.one(x)))))


class CalledTwice(nn.Module):
    """One norm after two convolutions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(torch.relu(self.norm(self.one(x)))))


def test_layers_that_serve_several_places() -> None:
    forms = check({"conv": Shared(), "weight": SharedWeights(), **{kind: CalledTwice(NORMS[kind]()) for kind in NORMS}})
    assert forms["conv.norms.1"] == forms["weight.last"] == "affine"
    assert forms["batch norm.norm"] == "folded"  # into either convolution


class Scaled(nn.Module):
    """A product by a number for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def scaled_beside(net: Any, x: Tensor) -> Tensor:
    y = net.feeder(x)
    return net.consumer(net.relu(net.norm(y) * net.feeder.bias.view(8, 1, 1)) + y)


def test_a_batch_norm_that_nothing_before_it_takes_merges_with_a_scale_behind_it() -> None:
    forms = check({"first": nn.Sequential(batch_norm(), Scaled(), nn.ReLU(), point())}, size=(8, 9, 9))
    assert forms == {"first.0": "affine"}
    assert check({"beside": Odd(batch_norm(), scaled_beside, point())}) == {"beside.norm": "affine"}


ACTIVATIONS = [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.Hardtanh(-1, 1), nn.LeakyReLU(0.1)]


def test_a_branch_that_a_relu_makes_dead_is_left_out() -> None:
    cases = [(act, beta, padding) for act in ACTIVATIONS for beta in (-0.4, 0.0, 0.4, 5.0) for padding in (0, 1)]
    networks = {}
    for act, beta, padding in cases:
        layer = norm(8, bias=torch.full((8,), beta))
        name = str((act, beta, padding)).replace(".", ",")
        networks[name] = nn.Sequential(nn.Conv2d(4, 8, 3), layer, act, nn.Conv2d(8, 5, 3, padding=padding))
    forms = check(networks)
    for act, beta, padding in cases:
        one_sided = isinstance(act, nn.ReLU | nn.ReLU6) and beta <= 0
        name = str((act, beta, padding)).replace(".", ",")
        assert forms[f"{name}.1"] == ("one branch" if one_sided else "two branches")
    model = nn.Sequential(nn.Conv2d(4, 8, 3), NORMS["one branch"](), nn.ReLU(), point())
    program = folded(model, torch.randn(2, 4, 9, 9))
    assert layer_counts(program) == {"conv2d": 2, "FunctionModule": 1, "OneBranch": 1}


CONSTANTS = {
    "negative gamma": {"weight": -torch.rand(8) - 0.1},
    "zero gamma": {"weight": torch.tensor([0.0, 1.0] * 4)},
    "all zero": {"weight": torch.zeros(8)},
    "dead channels": {"running_var": torch.tensor([0.0, 1.0] * 4), "running_mean": torch.zeros(8)},
    "large lambda": {"running_lambda": torch.linspace(-3, 4, 8)},
    "lambda at the limits": {"running_lambda": torch.tensor([0.0, 2.0, 1e-4, 2 - 1e-4, 1e-3, -1e-3, 1.0, 1 + 1e-6])},
    "lambda near 0": {"running_lambda": torch.tensor([1e-9, -1e-9, 1e-6, -1e-6, 3e-4, -3e-4, 4e-2, -4e-2])},
    "lambda near 2": {"running_lambda": 2 + torch.tensor([1e-7, -1e-7, 1e-6, -1e-6, 3e-4, -3e-4, 4e-2, -4e-2])},
    "never alive": {"bias": torch.full((8,), -3.0), "running_lambda": torch.full((8,), -1.0)},
}


def test_constants() -> None:
    networks = {}
    for case, constants in CONSTANTS.items():
        for beta in (-0.2, 0.3):
            layer = norm(8, **{"bias": torch.full((8,), beta), **constants})
            networks[f"{case}, {beta > 0}"] = nn.Sequential(nn.Conv2d(4, 8, 3), layer, nn.ReLU(), nn.Conv2d(8, 3, 1))
    exact = {name: network for name, network in networks.items() if not name.startswith("large")}
    check(exact)
    # psi has a power of 1 + |h|: where lambda is -3 or 4, rounding of h counts several times
    check({name: network for name, network in networks.items() if name not in exact}, tolerance=2e-4)


@pytest.mark.parametrize("strength", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
@pytest.mark.parametrize("kind", ["group", "layer"])
def test_affine_of_layers_that_estimate(kind: str, strength: float) -> None:
    """It goes into the layer after the norm, never into the one after an activation."""
    networks = {}
    for act in (None, nn.ReLU(), nn.SiLU()):
        for padding in (0, 1):
            layer: Any = of_samples(layers.LayerNormalNorm(8) if kind == "layer" else layers.GroupNormalNorm(2, 8))
            layer.set_strength(strength)
            consumer = nn.Linear(8, 5) if kind == "layer" else nn.Conv2d(8, 5, 3, padding=padding)
            networks[f"{act}, {padding}"] = nn.Sequential(nn.Tanh(), layer, *([act] if act else []), consumer)
    forms = check(networks, (9, 9, 8) if kind == "layer" else (8, 9, 9))
    assert set(forms.values()) == {"estimated" if strength else "normalization"}


def test_gamma_and_beta_of_an_estimate_go_into_the_linear_layer_behind_it() -> None:
    layer = of_samples(layers.LayerNormalNorm(8))
    alone, before = (nn.Sequential(layer, *rest) for rest in ([nn.ReLU(), nn.Linear(8, 5)], [nn.Linear(8, 5)]))
    counts = [layer_counts(folded(model, torch.randn(2, 3, 8))) for model in (alone, before)]
    assert counts[0]["ChannelAffine"] == 1
    assert "ChannelAffine" not in counts[1]


def one_d(**options: Any) -> nn.Module:
    layer = layers.BatchNormalNorm1d(6, **options).eval()
    layer.running_lambda.uniform_(0.3, 1.7)
    return layer


def test_linear_layers() -> None:
    whitening = layers.DecorrelatedBatchNormalNorm1d(6, group_size=3, momentum=1.0)
    whitening.train()(torch.randn(64, 6).exp())
    check({"in": nn.Sequential(nn.Linear(5, 6), one_d(), nn.ReLU(), nn.Linear(6, 2)), "last": nn.Linear(5, 2)}, (5,))
    check({"whitening": nn.Sequential(nn.Linear(5, 6), whitening), "alone": nn.Sequential(nn.Linear(5, 6))}, (5,))
    # nn.Linear works on the last dimension, the norm on the second
    forms = check({"channels": nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))}, (6, 5))
    assert forms["channels.1"] == "affine"


def test_the_norm_is_the_model() -> None:
    model, x = norm(4, running_lambda=torch.ones(4)).eval(), torch.randn(2, 4, 5, 5)
    program = folded(model, x)
    assert program.layers == {"": "affine"}
    assert layer_counts(program) == {"ConstantNorm": 1}
    torch.testing.assert_close(program.module(x), model(x), rtol=1e-5, atol=1e-5)
