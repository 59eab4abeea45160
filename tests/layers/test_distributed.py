"""Synchronized statistics: several gloo processes with shares of a batch against one process with the whole batch."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from retrofit.layers import BatchNormalNorm2d, SyncBatchNormalNorm, kernels

SHARES = {"equal": [4, 4], "unequal": [5, 3], "one empty": [8, 0]}


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


def work(rank: int, shares: list[int], folder: str, memory_format: torch.memory_format) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(shares))
    x, g = (part.split(shares)[rank].clone() for part in batch())
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    module = layer(SyncBatchNormalNorm)
    out = module(x)
    out.backward(g)
    noisy = copy.deepcopy(module)
    noisy.noise = 0.5
    torch.manual_seed(rank)
    noise = (noisy(x) - out).detach() / module.weight.detach().view(1, -1, 1, 1)
    module.eval()
    torch.save(
        {
            "out": out.detach(),
            "x": x.grad,
            "weight": module.weight.grad,
            "bias": module.bias.grad,
            "buffers": dict(module.named_buffers()),
            "noise": noise,
            "eval": module(x).detach(),
        },
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


KERNELS = [
    "eager",
    pytest.param("cpp", marks=pytest.mark.compiler),
    pytest.param("triton", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("choice", KERNELS)
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES.keys())
def test_shares_of_a_batch_are_one_batch(
    shares: list[int],
    choice: str,
    memory_format: torch.memory_format,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as environment:  # of the processes
        environment.setenv(kernels.VARIABLE, choice)
        environment.setenv("TRITON_INTERPRET", "1")
        mp.spawn(work, args=(shares, str(tmp_path), memory_format), nprocs=len(shares))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(len(shares))]

    x, g = batch()
    x.requires_grad_()
    whole = layer(BatchNormalNorm2d)
    out = whole(x)
    out.backward(g)

    torch.testing.assert_close(torch.cat([r["out"] for r in ranks]), out.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([r["x"] for r in ranks]), x.grad, rtol=1e-5, atol=1e-5)
    for name in ("weight", "bias"):
        total = sum(r[name] for r in ranks)
        torch.testing.assert_close(total, whole.get_parameter(name).grad, rtol=1e-5, atol=1e-5)
    for r in ranks:
        for name, buffer in whole.named_buffers():
            if name != "num_batches_tracked":
                torch.testing.assert_close(r["buffers"][name], buffer, rtol=1e-5, atol=1e-6)
    whole.eval()
    torch.testing.assert_close(torch.cat([r["eval"] for r in ranks]), whole(x).detach(), rtol=1e-5, atol=1e-5)
    # the noise is scaled by the whole batch's spread, on every rank
    noise = torch.cat([r["noise"] for r in ranks])
    quiet = (out.detach() - whole.bias.detach().view(1, -1, 1, 1)) / whole.weight.detach().view(1, -1, 1, 1)
    scale = 0.5 * (quiet - quiet.mean((0, 2, 3), True)).abs().mean((0, 2, 3), True)
    assert (noise / scale).std().item() == pytest.approx(1.0, abs=0.15)


def test_alone_it_is_the_plain_layer() -> None:
    x, _ = batch()
    assert torch.equal(layer(SyncBatchNormalNorm)(x), layer(BatchNormalNorm2d)(x))
