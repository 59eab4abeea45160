"""Synchronized statistics: several gloo processes with shares of a batch against one process with the whole batch."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from retrofit.layers import BatchNormalNorm2d, SyncBatchNormalNorm, kernels

SHARES = {"equal": [4, 4], "unequal": [5, 3], "one empty": [8, 0]}
FORMATS = (torch.contiguous_format, torch.channels_last)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 5, 4, generator=generator).exp() + 3
    return x, torch.randn(x.shape, generator=generator)


def layer(cls: type[nn.Module], noise: float = 0.0) -> nn.Module:
    module = cls(3, noise=noise)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
        module.bias.copy_(torch.tensor([1.0, 0.0, 0.3]))
    return module


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    every = product(SHARES, FORMATS)
    found = {(name, str(how)): of_a_share(rank, SHARES[name], how) for name, how in every}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def of_a_share(rank: int, shares: list[int], memory_format: torch.memory_format) -> dict[str, Any]:
    x, g = (part.split(shares)[rank].clone() for part in batch())
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    module = layer(SyncBatchNormalNorm)
    out = module(x)
    out.backward(g)
    noisy = copy.deepcopy(module)
    noisy.noise = 0.5
    torch.manual_seed(rank)
    found = {"noise": (noisy(x) - out).detach() / module.weight.detach().view(1, -1, 1, 1)}
    found |= {"out": out.detach(), "x": x.grad, "weight": module.weight.grad, "bias": module.bias.grad}
    return found | {"buffers": dict(module.named_buffers()), "eval": module.eval()(x).detach()}


KERNELS = [  # slow: two processes take long to start; by default those of tests/finetune/test_batch_statistics.py do
    pytest.param("eager", marks=pytest.mark.slow),
    pytest.param("cpp", marks=[pytest.mark.compiler, pytest.mark.slow]),
]


@pytest.fixture(scope="module", params=KERNELS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    """Return what each of two processes computed of its share, by the names of shares and memory format."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as environment:  # of the processes
        environment.setenv(kernels.VARIABLE, request.param)
        mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize("shares", SHARES)
def test_shares_of_a_batch_are_one_batch(
    shares: str, memory_format: torch.memory_format, found: list[dict[Any, dict[str, Any]]]
) -> None:
    ranks = [of_rank[shares, str(memory_format)] for of_rank in found]
    x, g = batch()
    x.requires_grad_()
    whole = layer(BatchNormalNorm2d)
    out = whole(x)
    out.backward(g)

    evaluated = copy.deepcopy(whole).eval()(x)
    for name, wanted in (("out", out), ("x", x.grad), ("eval", evaluated)):
        torch.testing.assert_close(torch.cat([r[name] for r in ranks]), wanted.detach(), rtol=1e-5, atol=1e-5)
    for name in ("weight", "bias"):
        total = sum(r[name] for r in ranks)
        torch.testing.assert_close(total, whole.get_parameter(name).grad, rtol=1e-5, atol=1e-5)
    for r in ranks:
        for name, buffer in whole.named_buffers():
            if name != "num_batches_tracked":
                torch.testing.assert_close(r["buffers"][name], buffer, rtol=1e-5, atol=1e-6)
    # the noise is scaled by the whole batch's spread, on every rank
    noise = torch.cat([r["noise"] for r in ranks])
    weight, bias = (p.detach().view(1, -1, 1, 1) for p in whole.parameters())
    quiet = (out.detach() - bias) / weight
    scale = 0.5 * (quiet - quiet.mean((0, 2, 3), True)).abs().mean((0, 2, 3), True)
    assert (noise / scale).std().item() == pytest.approx(1.0, abs=0.15)


def test_alone_it_is_the_plain_layer() -> None:
    x, _ = batch()
    assert torch.equal(layer(SyncBatchNormalNorm)(x), layer(BatchNormalNorm2d)(x))
