"""Layers of batch statistics: what torch's and timm's functions that walk through networks do with
them, and several gloo processes with shares of a batch against one process with the whole batch.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timm.layers import (
    convert_splitbn_model,
    convert_sync_batchnorm,
    freeze_batch_norm_2d,
    unfreeze_batch_norm_2d,
)
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval
from torch.optim.swa_utils import update_bn

import retrofit
from retrofit.layers import (
    BatchNormalNorm2d,
    BatchNormalNormAct2d,
    DecorrelatedBatchNormalNorm2d,
    SyncBatchNormalNorm,
)
from tests.layers.cases import statistics

LAYERS = {
    "bnn": lambda: BatchNormalNorm2d(8, noise=0.0),
    "act": lambda: BatchNormalNormAct2d(8, noise=0.0),
    "sync": lambda: SyncBatchNormalNorm(8, noise=0.0),
    "dbnn": lambda: DecorrelatedBatchNormalNorm2d(8, group_size=4, noise=0.0),
}
BATCHES = [torch.randn(16, 8, 4, 4).exp() for _ in range(3)]


def model(name: str) -> nn.Sequential:
    return nn.Sequential(LAYERS[name](), nn.BatchNorm2d(8)).train()


@pytest.mark.parametrize("name", LAYERS)
def test_torchs_update_bn_does_what_ours_does(name: str) -> None:
    one, other = model(name), model(name)
    other.load_state_dict(one.state_dict())
    update_bn(BATCHES, one)
    retrofit.update_bn(BATCHES, other)
    assert not torch.equal(one[0].running_lambda, torch.ones(8))
    torch.testing.assert_close(statistics(one), statistics(other))
    assert one[0].momentum == 0.1


@pytest.mark.parametrize("estimate", [update_bn, retrofit.update_bn])
def test_frozen_statistics_are_not_estimated_anew(estimate: Callable[..., object]) -> None:
    network = nn.Sequential(model("bnn")[0], nn.Linear(4, 4))
    network(BATCHES[0])
    retrofit.freeze_norms(network)
    before = statistics(network)
    estimate(BATCHES, network)
    torch.testing.assert_close(statistics(network), before, rtol=0, atol=0)


SYNC = "call retrofit.sync_norms"
REPLACE = {
    nn.SyncBatchNorm.convert_sync_batchnorm: SYNC,
    convert_sync_batchnorm: SYNC,
    convert_splitbn_model: "leave it",
}


@pytest.mark.parametrize(("replace", "advice"), REPLACE.items())
@pytest.mark.parametrize("name", LAYERS)
def test_what_replaces_a_layer_is_refused(
    name: str, replace: Callable[[nn.Module], nn.Module], advice: str
) -> None:
    network = model(name)
    with pytest.raises(
        retrofit.RetrofitError,
        match=f"{type(network[0]).__name__}, without its transform; {advice}",
    ):
        replace(network)
    assert type(network[0]) is type(LAYERS[name]())


def by_numpy(
    conv: nn.Conv2d, norm: nn.BatchNorm2d
) -> nn.Module:  # as converters to other frameworks do
    scale = norm.weight.detach().numpy() / np.sqrt(norm.running_var.numpy() + norm.eps)
    fused = copy.deepcopy(conv)
    fused.weight.data *= torch.from_numpy(scale).view(-1, 1, 1, 1)
    fused.bias.data = (fused.bias.data - norm.running_mean) * torch.from_numpy(
        scale
    ) + norm.bias.data
    return fused


@pytest.mark.parametrize("fuse", [fuse_conv_bn_eval, by_numpy])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "act"])
def test_what_fuses_a_batch_norm_is_right_at_strength_0_and_refused_above(
    name: str, fuse: Callable[[nn.Module, nn.Module], nn.Module]
) -> None:
    conv, layer = nn.Conv2d(3, 8, 3).eval(), LAYERS[name]().train()
    layer(BATCHES[0])
    x = torch.randn(2, 3, 6, 6)
    layer.eval().set_strength(0.0)
    torch.testing.assert_close(fuse(conv, layer)(x), layer(conv(x)), rtol=1e-4, atol=1e-5)
    layer.set_strength(0.4)
    assert layer.eps == 1e-5  # to look at
    refusal = f"takes {type(layer).__name__} for a BatchNorm"
    with pytest.raises(retrofit.RetrofitError, match=refusal):
        fuse(conv, layer)
    with pytest.raises(retrofit.RetrofitError, match=refusal):
        nn.functional.batch_norm(
            layer(conv(x)), layer.running_mean, layer.running_var, eps=layer.eps
        )


@pytest.mark.parametrize("name", LAYERS)
def test_timm_freezes_and_thaws(name: str) -> None:
    network = model(name)
    network(BATCHES[0])
    frozen = freeze_batch_norm_2d(network)
    assert frozen[0] is network[0]
    assert not frozen[0].training
    before = statistics(frozen)
    frozen.train()(BATCHES[1])
    torch.testing.assert_close(statistics(frozen), before, rtol=0, atol=0)
    unfreeze_batch_norm_2d(frozen).train()(BATCHES[1])
    assert not torch.equal(frozen[0].running_lambda, before["0.running_lambda"])


@pytest.mark.parametrize(("dim", "shape"), [(1, (2, 4, 3, 3)), (2, (2, 4)), (3, (2, 4, 3))])
def test_input_of_other_dimensions_is_refused_as_by_torch(dim: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected .*D"):
        getattr(retrofit.layers, f"BatchNormalNorm{dim}d")(4)(torch.ones(shape))


SHARES = {"equal": [4, 4], "unequal": [5, 3], "one empty": [8, 0]}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 5, 4, generator=generator).exp() + 3
    return x, torch.randn(x.shape, generator=generator)


def layer(cls: type[nn.Module]) -> nn.Module:
    module = cls(3, noise=0.0)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
        module.bias.copy_(torch.tensor([1.0, 0.0, 0.3]))
    return module


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {name: of_a_share(rank, shares) for name, shares in SHARES.items()}
    found |= {f"averages, {name}": averages(rank, shares) for name, shares in EMPTY.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def of_a_share(rank: int, shares: list[int]) -> dict[str, Any]:
    x, g = (part.split(shares)[rank].clone() for part in batch())
    x.requires_grad_()
    module = layer(SyncBatchNormalNorm)
    out = module(x)
    out.backward(g)
    noisy = copy.deepcopy(module)
    noisy.noise = 0.5
    torch.manual_seed(rank)
    found = {"noise": (noisy(x) - out).detach() / module.weight.detach().view(1, -1, 1, 1)}
    found |= {
        "out": out.detach(),
        "x": x.grad,
        "weight": module.weight.grad,
        "bias": module.bias.grad,
    }
    return found | {"buffers": dict(module.named_buffers()), "eval": module.eval()(x).detach()}


EMPTY = {"on one rank": [0, 8], "on every rank": [0, 0]}


def averages(rank: int, shares: list[int]) -> dict[str, Tensor]:
    """Return the buffers after batches of which a rank has a share, averaged over all of them."""
    module = SyncBatchNormalNorm(3, momentum=None, noise=0.0)
    x = batch()[0][: sum(shares)]
    for values in (x, x + x**2):
        module(values.split(shares)[rank])
    return dict(module.named_buffers())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Return what each of two processes computed of its share."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


# slow: two processes take long to start; by default those of tests/test_running_statistics.py do
@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
def test_shares_of_a_batch_are_one_batch(
    shares: str, found: list[dict[str, dict[str, Any]]]
) -> None:
    ranks = [of_rank[shares] for of_rank in found]
    x, g = batch()
    x.requires_grad_()
    whole = layer(BatchNormalNorm2d)
    out = whole(x)
    out.backward(g)

    evaluated = copy.deepcopy(whole).eval()(x)
    for name, wanted in (("out", out), ("x", x.grad), ("eval", evaluated)):
        torch.testing.assert_close(
            torch.cat([r[name] for r in ranks]), wanted.detach(), rtol=1e-5, atol=1e-5
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("shares", EMPTY)
def test_ranks_without_values_keep_the_statistics_of_the_others(
    shares: str, found: list[dict[str, dict[str, Any]]]
) -> None:
    ranks = [of_rank[f"averages, {shares}"] for of_rank in found]
    whole = BatchNormalNorm2d(3, momentum=None, noise=0.0)
    x = batch()[0][: sum(EMPTY[shares])]
    for values in (x, x + x**2):
        whole(values)
    for buffers in ranks:
        torch.testing.assert_close(buffers, dict(whole.named_buffers()), rtol=1e-5, atol=1e-6)
