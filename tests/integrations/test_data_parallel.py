"""Two processes that train a converted network by DDP and by FSDP2, against one process with the
whole batch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timm.utils import distribute_bn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import retrofit

pytestmark = pytest.mark.slow

STEPS = 3
Batch = tuple[Tensor, Tensor]


def converted(to: str) -> nn.Module:  # a small network whose statistics have moved
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    with torch.no_grad():
        model(torch.randn(16, 3, 10, 10))
    return retrofit.convert(model, to)[0].train()


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, 8, 3, 10, 10, generator=generator)
    return [(x, torch.randint(4, (8,), generator=generator)) for x in images]


def train(
    model: nn.Module, share: slice
) -> None:  # take a step a batch while the strength goes to 1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (x, y) in enumerate(batches(), 1):
        retrofit.set_strength(model, step / STEPS)
        optimizer.zero_grad()
        cross_entropy(model(x[share]), y[share]).backward()
        optimizer.step()


def by_fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": by_fsdp,
}
TARGETS = ("bnn", "ln", "ln-pn", "gn-pn")
IN_BFLOAT16 = ("frozen", "ln", "bnn", "lnn")


def with_one_kind_of_norm(to: str) -> nn.Module:
    """Convert a network without noise, at strength 0: LayerNorms for lnn, BatchNorms for the
    others.
    """
    if to != "lnn":
        return converted(to)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.LayerNorm(64), nn.Flatten(), nn.Linear(512, 4)
    )
    return retrofit.convert(model, to, input_size=(3, 10, 10))[0].train()


def in_bfloat16(to: str) -> nn.Module:
    """Shard a network whose parameters, and they alone, are cast for the computation."""
    model = with_one_kind_of_norm(to)
    mesh = init_device_mesh("cpu", (2,))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def work(rank: int, folder: str) -> None:
    """Train every network by every wrapper, as one of two; a norm sharded without its ProxyNorm is
    refused, and so is a sharded network where a whole one is needed.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        for to in TARGETS:
            for name, wrap in WRAPPERS.items():
                model = converted(to)
                if to == "bnn":
                    retrofit.sync_norms(model)
                model = wrap(model)
                train(model, slice(4 * rank, 4 * rank + 4))
                state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                saved = (retrofit.strength_of(model), state, dict(model.named_buffers()))
                torch.save(saved, f"{folder}/{to} {name} {rank}.pt")
        for reduce in (False, True):
            model = converted("bnn")
            model(batches()[rank][0])  # each has seen images of its own
            distribute_bn(model, 2, reduce)
            torch.save(dict(model.named_buffers()), f"{folder}/{reduce} {rank}.pt")
        for to in IN_BFLOAT16:
            model = in_bfloat16(to)
            outputs = [model(batches()[rank][0]).float()]
            outputs[0].sum().backward()
            with torch.no_grad():
                outputs.append(model.eval()(batches()[rank][0]).float())
            torch.save(outputs, f"{folder}/bfloat16 {to} {rank}.pt")
        sharded = by_fsdp(converted("ln"))
        for take in (retrofit.fold, retrofit.plain, partial(retrofit.save, path=f"{folder}/a")):
            with pytest.raises(retrofit.RetrofitError, match="the network is sharded, so that"):
                take(sharded)
        model = converted("ln-pn")
        fully_shard(model.get_submodule("0.1"), mesh=init_device_mesh("cpu", (2,)))
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2,))
        )  # else the norm is the root, which stays whole
        with pytest.raises(
            retrofit.RetrofitError, match="call fully_shard on the block that holds both"
        ):
            model(batches()[0][0])
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both processes end with, of every target and wrapper."""
    made = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(made),), nprocs=2)
    return made


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("to", TARGETS)
def test_two_processes_are_one_with_the_whole_batch(to: str, wrapper: str, folder: Path) -> None:
    """That of bnn with its statistics, and lambda, over both, by `sync_norms`."""
    whole = converted(to)
    train(whole, slice(None))
    ranks = [
        torch.load(folder / f"{to} {wrapper} {rank}.pt", weights_only=True) for rank in range(2)
    ]
    assert [strength for strength, _, _ in ranks] == [1.0, 1.0]
    state = ranks[0][1]  # of FSDP2 rank 0 alone holds what the shards are together
    assert set(state) == set(whole.state_dict())
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-4, atol=1e-5, msg=lambda t, name=name: f"{name}: {t}"
        )
    torch.testing.assert_close(ranks[0][2], ranks[1][2], rtol=0, atol=0)


@pytest.mark.parametrize("reduce", [False, True])
def test_timm_shares_mean_and_variance_by_their_names_but_not_lambda(
    reduce: bool, folder: Path
) -> None:
    one, other = (
        torch.load(folder / f"{reduce} {rank}.pt", weights_only=True) for rank in range(2)
    )
    assert {name.split(".")[-1] for name in one if not torch.equal(one[name], other[name])} == {
        "running_lambda"
    }


@pytest.mark.parametrize("to", IN_BFLOAT16)
def test_parameters_in_bfloat16_beside_constants_in_float32(to: str, folder: Path) -> None:
    """In training and in evaluation, the answers of the network in float32 to its precision."""
    for rank in range(2):
        whole = with_one_kind_of_norm(to)
        expected = [whole(batches()[rank][0]), whole.eval()(batches()[rank][0])]
        outputs = torch.load(folder / f"bfloat16 {to} {rank}.pt", weights_only=True)
        torch.testing.assert_close(outputs, expected, rtol=0.05, atol=0.05)
