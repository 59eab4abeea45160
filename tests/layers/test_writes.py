"""In evaluation a layer computes with what its parameters and buffers hold now, however it came to be written there."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from retrofit import layers

Network = nn.Sequential


def _network(*modules: nn.Module) -> Network:
    """A network in evaluation, none of whose numbers is the first it had."""
    net = nn.Sequential(*modules).eval()
    torch.manual_seed(1)
    for value in net.state_dict().values():
        if value.is_floating_point() and value.ndim:
            value.copy_(torch.rand(value.shape) + 0.4)
    return net


def _proxy(activation: nn.Module, restore: bool = False) -> Network:
    norm = nn.GroupNorm(2, 6)
    return _network(norm, layers.ProxyNorm(activation, 6, norm=norm, restore=restore))


NETWORKS: dict[str, tuple[Callable[[], Network], tuple[int, ...]]] = {
    "batch1d": (lambda: _network(layers.BatchNormalNorm1d(6)), (5, 6)),
    "batch2d": (lambda: _network(layers.BatchNormalNorm2d(6)), (3, 6, 5, 4)),
    "batch3d": (lambda: _network(layers.BatchNormalNorm3d(6)), (3, 6, 5, 4, 2)),
    "sync": (lambda: _network(layers.SyncBatchNormalNorm(6)), (3, 6, 5, 4)),
    "instance": (
        lambda: _network(layers.InstanceNormalNorm2d(6, affine=True, track_running_stats=True)),
        (3, 6, 5, 4),
    ),
    "migrated": (lambda: _network(layers.MigratedGroupNorm(2, 6)), (3, 6, 5, 4)),
    "proxy relu": (lambda: _proxy(nn.ReLU()), (3, 6, 5, 4)),
    "proxy tanh": (lambda: _proxy(nn.Tanh(), restore=True), (3, 6, 5, 4)),
    "proxy prelu": (lambda: _proxy(nn.PReLU(6)), (3, 6, 5, 4)),
    "decorrelated": (lambda: _network(layers.DecorrelatedBatchNormalNorm2d(6, group_size=3)), (3, 6, 5, 4)),
}


def _other(net: Network) -> dict[str, Tensor]:
    """Another state of the same network."""
    return {
        name: torch.rand(value.shape) + 0.4 if value.is_floating_point() and value.ndim else value
        for name, value in net.state_dict().items()
    }


def _data(net: Network) -> Network:
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.ndim and tensor.is_floating_point():
            tensor.data.mul_(1.3)
    return net


def _data_swapped(net: Network) -> Network:
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.ndim and tensor.is_floating_point():
            tensor.data = tensor.data * 1.3
    return net


def _vector(net: Network) -> Network:
    with torch.no_grad():
        vector_to_parameters(1.3 * parameters_to_vector(net.parameters()), net.parameters())
    return net


def _swapped(net: Network) -> Network:
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.ndim and tensor.is_floating_point():
            new = (tensor.detach() * 1.3).requires_grad_(tensor.requires_grad)
            torch.utils.swap_tensors(tensor, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)
    return net


def _loaded(net: Network, assign: bool) -> Network:
    net.load_state_dict(_other(net), assign=assign)
    return net


def _averaged(net: Network) -> Network:
    """As moving averages do it: through the state dict, in place."""
    for value in net.state_dict().values():
        if value.is_floating_point() and value.ndim:
            value.lerp_(torch.zeros(()), 0.3)
    return net


def _optimized(net: Network) -> Network:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(2)
    shape = next(shape for build, shape in NETWORKS.values() if repr(build()) == repr(net))
    net(torch.randn(shape)).square().sum().backward()
    optimizer.step()
    return net


def _replaced(net: Network) -> Network:
    for module in net.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(value.detach() * 1.3))
    return net


def _strength(net: Network) -> Network:
    for module in net.modules():
        if hasattr(module, "set_strength"):
            module.set_strength(0.4)
    return net


def _raw_memory(net: Network) -> Network:
    """As a foreign library writes: torch knows nothing of it."""
    for parameter in net.parameters():
        parameter.detach().numpy()[:] *= 1.3
    return net


def _of_a_copy(net: Network) -> Network:
    return _data(copy.deepcopy(net))


def _of_a_pickle(net: Network) -> Network:
    return _data(pickle.loads(pickle.dumps(net)))


def _cast(net: Network) -> Network:
    return _data(net.double().float())


WRITES = {
    **{f.__name__.strip("_"): f for f in (_data, _data_swapped, _vector, _swapped, _averaged, _optimized, _replaced)},
    **{f.__name__.strip("_"): f for f in (_strength, _raw_memory, _of_a_copy, _of_a_pickle, _cast)},
    "load_state_dict": lambda net: _loaded(net, False),
    "load_state_dict, assigned": lambda net: _loaded(net, True),
}


def _fresh(name: str, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """What a network answers that never held anything else."""
    net = NETWORKS[name][0]()
    net.load_state_dict({key: value.clone() for key, value in state.items()})
    with torch.no_grad():
        return net(x)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_write_is_seen(name: str, write: Callable[[Network], Network], guard: Callable[[], torch.no_grad]) -> None:
    build, shape = NETWORKS[name]
    net, x = build(), torch.randn(shape)
    with guard():
        before = net(x)
        net(x)
    net = write(net)
    with guard():
        after = net(x)
    assert not torch.allclose(after, before, atol=1e-4)
    assert torch.equal(after, _fresh(name, net.state_dict(), x))


@pytest.mark.parametrize("name", NETWORKS)
def test_functional_call_computes_with_what_it_is_given(name: str) -> None:
    build, shape = NETWORKS[name]
    net, other, x = build(), build(), torch.randn(shape)
    other.load_state_dict(_other(net))
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        own = net(x)
        assert torch.equal(torch.func.functional_call(net, tensors, (x,)), other(x))
        assert torch.equal(net(x), own)


@pytest.mark.parametrize("name", NETWORKS)
def test_threads_that_share_a_network_agree(name: str) -> None:
    build, shape = NETWORKS[name]
    net, inputs, found = build(), torch.randn(8, *shape), {}

    def answer(number: int) -> None:
        with torch.no_grad():
            found[number] = [net(inputs[number]) for _ in range(5)]

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answers in found.items():
        assert all(torch.equal(got, _fresh(name, net.state_dict(), inputs[number])) for got in answers)
    assert len(found) == len(inputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_answering_leaves_nothing_behind(name: str) -> None:
    build, shape = NETWORKS[name]
    net = build()
    size = len(pickle.dumps(net))
    with torch.no_grad():
        net(torch.randn(shape))
    assert len(pickle.dumps(net)) == size
