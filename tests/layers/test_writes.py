"""In evaluation a layer computes with what its parameters and buffers hold now, however it came to be written there."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from tests.layers.test_forms import built, inputs

NAMES = ["bnn2d", "inn tracked", "dbnn", "gn", "frozen", "proxy"]


def data(tensor: Tensor) -> None:
    tensor.data = tensor.data * 1.3


def swap(tensor: Tensor) -> None:
    new = (tensor.detach() * 1.3).requires_grad_(tensor.requires_grad)
    torch.utils.swap_tensors(tensor, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)


def memory(tensor: Tensor) -> None:
    """As a foreign library writes: torch knows nothing of it."""
    tensor.detach().numpy()[:] *= 1.3


@pytest.mark.parametrize("write", [data, swap, memory])
@pytest.mark.parametrize("name", NAMES)
def test_a_write_is_seen(name: str, write: object) -> None:
    layer, x = built(name), inputs(name).float()
    with torch.inference_mode():
        before = layer(x)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.ndim and tensor.is_floating_point():
            write(tensor)  # type: ignore[operator]
    fresh = built(name)
    fresh.load_state_dict(layer.state_dict())
    with torch.inference_mode():
        assert not torch.allclose(layer(x), before, atol=1e-4)
        assert torch.equal(layer(x), fresh(x))


@pytest.mark.parametrize("name", NAMES)
def test_threads_that_share_a_layer_agree(name: str) -> None:
    layer, batches = built(name), [inputs(name, 1 + n).float() for n in range(8)]
    found: dict[int, list[Tensor]] = {}

    def answer(number: int) -> None:
        with torch.no_grad():
            found[number] = [layer(batches[number]) for _ in range(5)]

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        assert all(torch.equal(got, layer(batches[number])) for number in range(8) for got in found[number])
