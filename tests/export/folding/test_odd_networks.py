"""Folding keeps the function of networks that do odd things to their layers: hooks, shared weights, calls from afar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils._pytree import tree_leaves

from retrofit.export.folding.network import fold_network
from retrofit.layers import DecorrelatedBatchNormalNorm2d, GroupNormalNorm, MigratedGroupNorm, ProxyNorm
from tests.export.networks import norm

SIZE = (3, 9, 9)


def batch_norm() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(8)
    for tensor in (layer.weight, layer.bias, layer.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(layer.running_var, 0.5, 2.0)
    return layer


def of_samples(layer: Any) -> nn.Module:
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def proxied() -> nn.Module:
    before = batch_norm()
    layer = ProxyNorm(nn.Tanh(), 8, norm=before)
    nn.init.normal_(layer.proxy_bias, std=0.3)
    return nn.Sequential(before, layer)


def whitened() -> nn.Module:
    layer = DecorrelatedBatchNormalNorm2d(8, group_size=4)
    with torch.no_grad():
        layer(torch.randn(32, 8, 3, 3))
    return of_samples(layer)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "folded": lambda: norm(8, running_lambda=torch.ones(8)),
    "one branch": lambda: norm(8, bias=-torch.rand(8)),
    "two branches": lambda: norm(8),
    "batch norm": batch_norm,
    "estimated": lambda: of_samples(GroupNormalNorm(2, 8)),
    "group": lambda: of_samples(MigratedGroupNorm(2, 8, strength=0.7)),
    "proxied": proxied,
    "whitened": whitened,
}


class Odd(nn.Module):
    """A convolution, a norm, an activation and what takes it, as `run` calls them."""

    def __init__(self, layer: nn.Module, run: Callable[..., Any], consumer: nn.Module) -> None:
        super().__init__()
        self.feeder, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), layer, nn.ReLU(inplace=True)
        self.consumer, self.run = consumer, run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def straight(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.relu(net.norm(net.feeder(x))))


def bare(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.norm(net.feeder(x)))


def feeder_weight_read(net: Any, x: Tensor) -> Tensor:
    return straight(net, x) + F.conv2d(x, net.feeder.weight, padding=1).mean()


def consumer_weight_read(net: Any, x: Tensor) -> Tensor:
    y = net.feeder(x)
    return net.consumer(net.relu(net.norm(y))) + F.conv2d(y, net.consumer.weight)


def norm_weight_read(net: Any, x: Tensor) -> Tensor:
    layer = net.norm[0] if isinstance(net.norm, nn.Sequential) else net.norm
    return straight(net, x) * layer.weight.mean()


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


def padded_by_hand(net: Any, x: Tensor) -> Tensor:
    return net.consumer(F.pad(net.relu(net.norm(net.feeder(x))), (1, 1, 1, 1)))


def every_step_returned(net: Any, x: Tensor) -> dict[str, Any]:
    y = net.norm(net.feeder(x))
    z = F.relu(y)
    return {"norm": y, "rest": [z, net.consumer(z)]}


def other_path_for_single_images(net: Any, x: Tensor) -> Tensor:
    return straight(net, x) if x.shape[0] == 1 else net.consumer(torch.tanh(net.norm(net.feeder(x))))


def norm_twice(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.norm(net.norm(net.feeder(x))))


def limited(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.norm(net.feeder(x)).clamp(0, 0.7))


def flattened(net: Any, x: Tensor) -> Tensor:
    return net.consumer(net.relu(net.norm(net.feeder(x))).flatten(1))


def channels_last(net: Any, x: Tensor) -> Tensor:
    return straight(net, x.contiguous(memory_format=torch.channels_last))


def point() -> nn.Module:
    return nn.Conv2d(8, 4, 1)


RUNS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "feeder's weight read": (feeder_weight_read, point),
    "consumer's weight read": (consumer_weight_read, point),
    "norm's weight read": (norm_weight_read, point),
    "feeder used twice": (feeder_used_twice, point),
    "changed in place": (changed_in_place, point),
    "norm used after an activation in place": (norm_used_after_activation_in_place, point),
    "padded by hand": (padded_by_hand, lambda: nn.Conv2d(8, 4, 3)),
    "every step returned": (every_step_returned, point),
    "another path for single images": (other_path_for_single_images, point),
    "norm twice": (norm_twice, point),
    "limited": (limited, point),
    "flattened": (flattened, lambda: nn.Linear(8 * 81, 4)),
    "channels last, dilated groups": (channels_last, lambda: nn.Conv2d(8, 4, 3, groups=4, dilation=2)),
    "linear on the last dimension": (straight, lambda: nn.Linear(9, 4)),
    "circular padding": (straight, lambda: nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular")),
    "padding by the input's size": (bare, lambda: Conv2dSame(8, 4, 3, stride=2)),
    "padding to the same size": (bare, lambda: nn.Conv2d(8, 4, 3, padding="same")),
    "transposed": (bare, lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2, output_padding=1)),
    "transposed after an activation": (straight, lambda: nn.ConvTranspose2d(8, 4, 3, stride=2)),
}


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
REMADE: dict[str, Callable[[nn.Module], Any]] = {
    "pruned": lambda module: prune.random_unstructured(module, "weight", 0.5),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
}


def check(model: nn.Module) -> None:
    """Compare a network with its folded copy, which leaves it as it was."""
    model.eval()
    dtype = next(p.dtype for p in model.parameters())
    batches = [torch.randn(n, *SIZE, dtype=dtype) for n in (4, 1)]
    with torch.no_grad():
        expected = tree_leaves([model(batch) for batch in batches])
        folded = fold_network(model, SIZE).model
        found = tree_leaves([folded(batch.float()) for batch in batches])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.to(theirs), theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
        assert all(map(torch.equal, tree_leaves([model(batch) for batch in batches]), expected))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", NORMS)
def test_odd_calls(kind: str, run: str) -> None:
    code, consumer = RUNS[run]
    check(Odd(NORMS[kind](), code, consumer()))


@pytest.mark.parametrize("where", ["feeder", "norm", "relu", "consumer"])
@pytest.mark.parametrize("alteration", ALTERATIONS)
@pytest.mark.parametrize("kind", NORMS)
def test_altered_layers(kind: str, alteration: str, where: str) -> None:
    model = Odd(NORMS[kind](), straight, point())
    ALTERATIONS[alteration](getattr(model, where))
    check(model)


@pytest.mark.parametrize("where", ["feeder", "consumer"])
@pytest.mark.parametrize("how", REMADE)
@pytest.mark.parametrize("kind", NORMS)
def test_weights_that_every_call_makes_anew(kind: str, how: str, where: str) -> None:
    model = Odd(NORMS[kind](), straight, point())
    REMADE[how](getattr(model, where))
    check(model)


@pytest.mark.parametrize("kind", NORMS)
def test_altered_blocks(kind: str) -> None:
    """What a hook on a block sees and changes is what it saw and changed before."""
    block = nn.Sequential(nn.Conv2d(3, 8, 3), NORMS[kind](), nn.ReLU())
    block.register_forward_hook(double)
    check(nn.Sequential(block, point()))


@pytest.mark.parametrize("kind", NORMS)
def test_double_precision(kind: str) -> None:
    check(Odd(NORMS[kind](), straight, point()).double())


@pytest.mark.parametrize("where", ["", "drop", "act"])
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_altered_parts_of_fused_layers(alteration: str, where: str) -> None:
    layer = BatchNormAct2d(8, drop_layer=nn.Dropout)
    layer.load_state_dict(batch_norm().state_dict())
    ALTERATIONS[alteration](layer.get_submodule(where))
    check(nn.Sequential(nn.Conv2d(3, 8, 3), layer, point()))


def test_what_stays_is_reported() -> None:
    model = Odd(norm(8), straight, point()).eval()
    model.norm.register_forward_hook(lambda *_: None)
    (layer,) = fold_network(model, SIZE).layers
    assert layer.form == "kept"
