"""--sync-norm: two gloo processes with half the batch each against one process with the whole batch."""

from __future__ import annotations

import copy
import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import retrofit
from retrofit.finetune.batch_statistics import local_norms, sync_norms
from retrofit.layers import BatchNormalNorm2d, BatchNormalNormAct2d, SyncBatchNormalNorm, SyncBatchNormalNormAct
from retrofit.layers.decorrelated_batch_norm import DecorrelatedBatchNorm2d

MODELS = {"BatchNorm2d": "test_resnet", "BatchNormAct2d": "test_byobnet"}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model, _ = retrofit.convert(timm.create_model(name, num_classes=5), "bnn", check=False)
    retrofit.set_strength(model, 0.7)
    for module in model.modules():
        if hasattr(module, "noise"):
            module.noise = 0.0
    return model.double().train()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 24, 24, generator=generator).double(), torch.arange(8) % 5


def work(rank: int, folder: str) -> None:
    """Train one step of each network with half the batch."""
    torch.set_num_threads(1)
    store, patience = f"file://{folder}/store", timedelta(minutes=5)  # where the other process fails
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    for name in MODELS.values():
        model = network(name)
        assert sync_norms(model) > 0
        wrapped = DistributedDataParallel(model)
        images, targets = (part.split(4)[rank] for part in batch())
        nn.functional.cross_entropy(wrapped(images), targets).backward()
        grads = {key: parameter.grad for key, parameter in model.named_parameters()}
        torch.save({"grads": grads, "buffers": dict(model.named_buffers())}, f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what two processes computed, this one and a fork of it, which imports nothing again."""
    folder = tmp_path_factory.mktemp("shares")
    other = multiprocessing.get_context("fork").Process(target=work, args=(1, str(folder)))
    other.start()
    work(0, str(folder))
    other.join()
    return folder


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12's, of threads
@pytest.mark.parametrize("name", MODELS.values(), ids=MODELS.keys())
def test_two_processes_are_one(name: str, shares: Path) -> None:
    whole = network(name)
    images, targets = batch()
    nn.functional.cross_entropy(whole(images), targets).backward()
    for rank in range(2):
        found = torch.load(shares / f"{name}-{rank}.pt", weights_only=True)
        for key, parameter in whole.named_parameters():
            torch.testing.assert_close(found["grads"][key], parameter.grad, rtol=1e-5, atol=1e-5, msg=key)
        for key, buffer in whole.named_buffers():
            torch.testing.assert_close(found["buffers"][key], buffer, rtol=1e-5, atol=1e-5, msg=key)


def test_whitening_is_not_synchronized_in_silence() -> None:
    with pytest.raises(retrofit.RetrofitError, match="not synchronized"):
        sync_norms(DecorrelatedBatchNorm2d(4))


def test_only_the_class_changes_and_comes_back() -> None:
    model = nn.Sequential(BatchNormalNorm2d(3), BatchNormalNormAct2d(3), nn.BatchNorm2d(3))
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    assert sync_norms(model, "cpu") == 2
    assert [type(layer) for layer in model] == [SyncBatchNormalNorm, SyncBatchNormalNormAct, nn.BatchNorm2d]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    x = torch.randn(4, 3, 2, 2)
    copy.deepcopy(model)(x)  # without a process group, and as a copy, they go on as they are
    with local_norms(model):
        assert [type(layer) for layer in model] == [BatchNormalNorm2d, BatchNormalNormAct2d, nn.BatchNorm2d]
    assert type(model[0]) is SyncBatchNormalNorm
    assert model.state_dict().keys() == before.keys()
