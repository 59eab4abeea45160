"""In evaluation a layer computes with what its parameters and buffers hold now, however it came to be written there."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from retrofit import layers


def _network(*modules: nn.Module) -> nn.Sequential:
    """A network in evaluation, none of whose numbers is the first it had."""
    net = nn.Sequential(*modules).eval()
    net.load_state_dict(_other(net))
    return net


def _other(net: nn.Module) -> dict[str, Tensor]:
    """Another state of the same network."""
    return {
        name: torch.rand(value.shape) + 0.4 if value.is_floating_point() and value.ndim else value
        for name, value in net.state_dict().items()
    }


def _proxy(activation: nn.Module) -> nn.Sequential:
    norm = nn.GroupNorm(2, 6)
    return _network(norm, layers.ProxyNorm(activation, 6, norm=norm, restore=True))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "batch": lambda: _network(layers.BatchNormalNorm2d(6)),
    "instance": lambda: _network(layers.InstanceNormalNorm2d(6, affine=True, track_running_stats=True)),
    "migrated": lambda: _network(layers.MigratedGroupNorm(2, 6)),
    "proxy relu": lambda: _proxy(nn.ReLU()),
    "proxy prelu": lambda: _proxy(nn.PReLU(6)),
    "decorrelated": lambda: _network(layers.DecorrelatedBatchNormalNorm2d(6, group_size=3)),
}
SHAPE = (3, 6, 5, 4)


def _data(net: nn.Module) -> None:
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.ndim and tensor.is_floating_point():
            tensor.data.mul_(1.3)


def _raw_memory(net: nn.Module) -> None:
    """As a foreign library writes: torch knows nothing of it."""
    for parameter in net.parameters():
        parameter.detach().numpy()[:] *= 1.3


def _assigned(net: nn.Module) -> None:
    net.load_state_dict(_other(net), assign=True)


def _fresh(name: str, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """What a network answers that never held anything else."""
    net = NETWORKS[name]()
    net.load_state_dict({key: value.clone() for key, value in state.items()})
    with torch.no_grad():
        return net(x)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("write", [_data, _raw_memory, _assigned])
def test_a_write_is_seen(name: str, write: Callable[[nn.Module], None]) -> None:
    net, x = NETWORKS[name](), torch.randn(SHAPE)
    with torch.inference_mode():
        before = net(x)
    write(net)
    with torch.inference_mode():
        after = net(x)
    assert not torch.allclose(after, before, atol=1e-4)
    assert torch.equal(after, _fresh(name, net.state_dict(), x))


@pytest.mark.parametrize("name", NETWORKS)
def test_functional_call_computes_with_what_it_is_given(name: str) -> None:
    net, other, x = NETWORKS[name](), NETWORKS[name](), torch.randn(SHAPE)
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        own = net(x)
        assert torch.equal(torch.func.functional_call(net, tensors, (x,)), other(x))
        assert torch.equal(net(x), own)


def test_threads_that_share_a_network_agree() -> None:
    net, inputs, found = nn.Sequential(*(NETWORKS[name]() for name in NETWORKS)), torch.randn(4, *SHAPE), {}

    def answer(number: int) -> None:
        with torch.no_grad():
            found[number] = [net(inputs[number]) for _ in range(5)]

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for number, answers in found.items():
            expected = net(inputs[number])
            assert all(torch.equal(got, expected) for got in answers)
    assert len(found) == len(inputs)
