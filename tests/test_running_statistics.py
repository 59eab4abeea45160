"""Running statistics estimated again, recentred, frozen, and taken over two processes by
`sync_norms`.
"""

import copy
import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn as torchs

import retrofit
from retrofit.errors import RetrofitError
from retrofit.layers import (
    BatchNormalNorm2d,
    BatchNormalNormAct2d,
    SyncBatchNormalNorm,
    SyncBatchNormalNormAct,
)
from retrofit.layers.migrated_norm import MigratedGroupNorm
from retrofit.running_statistics import local_norms, sync_norms
from retrofit.surgery.targets.dbn import DecorrelatedBatchNorm2d
from tests.finetune.conftest import assert_same
from tests.layers.cases import statistics

LOADER = [
    torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i)) * 2 + 1 for i in range(4)
]


def network(to: str | None, strength: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=4).train()
    model(torch.randn(8, 3, 32, 32))
    if to is not None:
        retrofit.convert(model, to, check=False)
        retrofit.set_strength(model, strength)
    return model


@pytest.mark.parametrize("to", [None, "bnn", "dbn"])
def test_at_strength_0_it_is_torchs(to: str | None) -> None:
    model, source = network(to, 0.0).eval(), network(None)
    torchs(LOADER, source)
    assert retrofit.update_bn(LOADER, model) == 15
    found = statistics(model)
    for name, wanted in statistics(source).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-4)
    assert not any(module.training for module in model.modules())
    assert {module.momentum for module in model.modules() if hasattr(module, "running_mean")} == {
        0.1
    }


@pytest.mark.parametrize(("to", "layers"), [("bnn", 15), ("dbnn", 15), ("gn", 0)])
def test_lambda_and_whitening_are_estimated_too_and_migrated_statistics_stay(
    to: str, layers: int
) -> None:
    model = network(to, 1.0)
    before = statistics(model)
    assert retrofit.update_bn([(images, None) for images in LOADER], model) == layers
    for name, value in statistics(model).items():
        assert torch.equal(value, before[name]) is not bool(layers), name


@pytest.mark.parametrize("to", [None, "bnn", "dbnn"])
def test_frozen_layers_evaluate_in_training(to: str | None) -> None:
    model = network(to)
    with torch.no_grad():
        wanted = model.eval()(LOADER[0])
    before = statistics(model)
    assert retrofit.freeze_norms(model) == 15
    model = copy.deepcopy(model).train()
    out = model(LOADER[0])
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert_same(statistics(model), before)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("to", "wrong", "said"),
    [
        ("bnn", [], "no batch"),
        ("dbn", [LOADER[0], LOADER[0] * float("nan")], "statistics are not finite"),
        ("bnn", [LOADER[0], LOADER[0] * 1e30], "statistics are not finite"),
        ("dbn", [LOADER[0], LOADER[0][:, :1]], "channels"),  # torch's own error
    ],
    ids=["empty", "nan", "large", "shape"],
)
def test_what_cannot_be_estimated_leaves_the_statistics_as_they_were(
    to: str, wrong: list[Tensor], said: str
) -> None:
    model = network(to)
    retrofit.update_bn(LOADER, model)
    model.bn1.frozen = True
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((RetrofitError, RuntimeError), match=said):
        retrofit.update_bn(wrong, model)
    assert_same(model.state_dict(), before)
    assert all(
        layer.momentum is not None for layer in model.modules() if isinstance(layer, _BatchNorm)
    )


@pytest.mark.parametrize("listed", [False, True])
def test_a_batch_without_samples_counts_for_nothing(listed: bool) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    before = copy.deepcopy(model.state_dict())
    empty = LOADER[0][:0]
    loader = [LOADER[0], empty, LOADER[1]]
    if listed:
        empty, loader = [empty, None], [[batch, None] for batch in loader]
    with pytest.raises(RetrofitError, match="the loader held no batch"):
        retrofit.update_bn([empty, empty], model)
    assert_same(model.state_dict(), before)
    assert retrofit.update_bn(loader, model) == 1
    moments = [torch.var_mean(batch.double(), (0, 2, 3)) for batch in LOADER[:2]]
    var, mean = (torch.stack(each).mean(0) for each in zip(*moments, strict=True))
    torch.testing.assert_close(model[0].running_mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model[0].running_var.double(), var, rtol=1e-6, atol=1e-6)


def test_a_layer_that_no_batch_reaches_keeps_its_statistics() -> (
    None
):  # as the head for training alone of Inception
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[1].head = nn.BatchNorm2d(4)
    model[1].head.running_mean.fill_(5)
    assert retrofit.update_bn(LOADER, model) == 1
    assert model[1].head.running_mean.tolist() == [5] * 4
    assert model[1].running_mean.abs().sum() > 0


def migrated(groups: int) -> nn.Module:  # two migrated norms whose moments are far from 0 and 1
    torch.manual_seed(0)
    norms = [MigratedGroupNorm(groups, 8, eps=0.01, group_eps=1e-5, strength=1.0) for _ in range(2)]
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.2, 0.6)
        norm.gain.uniform_(0.7, 1.4)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norms[0], nn.ReLU(), nn.Conv2d(8, 8, 3), norms[1]
    ).double()


BATCHES = list(
    (1 + 2 * torch.randn(12, 3, 12, 12, generator=torch.Generator().manual_seed(1)).double()).split(
        4
    )
)


@pytest.mark.parametrize("groups", [1, 2])
def test_recentred_is_the_same_at_strength_1_and_nearer_at_strength_0(groups: int) -> None:
    model, x = migrated(groups), torch.cat(BATCHES)
    before = model(x)
    retrofit.set_strength(model, 0.0)
    far = (model(x) - before).square().mean()
    retrofit.set_strength(model, 1.0)
    assert retrofit.recentre(BATCHES, model) == 2
    assert model.training
    after = model(x)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 if groups == 1 else 1e-3)
    scale, shift = model[1].input_affine()
    grouped = (model[0](x) * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)).reshape(12, groups, -1)
    k = torch.rsqrt(
        grouped.var(2, correction=0) + model[1].group_eps
    )  # the moments are those of torch's group norm
    torch.testing.assert_close(k.mean(0), torch.ones(groups).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        (grouped.mean(2) * k).mean(0), torch.zeros(groups).double(), rtol=0, atol=1e-6
    )
    retrofit.set_strength(model, 0.0)
    assert (model(x) - after).square().mean() < 0.2 * far


def test_a_compiled_part_is_recentred_with_the_rest() -> None:
    """Compiled code calls no hooks that were added after its trace."""
    model, reference = (nn.Sequential(net[:3], net[3:]) for net in (migrated(2), migrated(2)))
    model[1].compile(backend="eager")
    with torch.no_grad():
        model.eval()(BATCHES[0])
    assert retrofit.recentre(BATCHES, model) == retrofit.recentre(BATCHES, reference) == 2
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=1e-12)
    torch.compiler.reset()


def test_a_network_without_migrated_norms_needs_no_data() -> None:
    assert retrofit.recentre([], nn.Linear(2, 2)) == 0
    with pytest.raises(RetrofitError, match="the loader held no batch"):
        retrofit.recentre([], migrated(1))


@pytest.mark.parametrize("value", [float("nan"), 1.7e308])
def test_images_that_are_not_finite_change_nothing(value: float) -> None:
    model = migrated(2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RetrofitError, match="the moments of 1 are not finite"):
        retrofit.recentre([*BATCHES, torch.full((1, 3, 12, 12), value, dtype=torch.float64)], model)
    assert_same(model.state_dict(), before)


BATCH = (
    torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1)).double(),
    torch.arange(8) % 5,
)


def synchronizable() -> nn.Module:
    torch.manual_seed(0)
    first, second = (
        (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        (nn.Conv2d(8, 8, 3), BatchNormAct2d(8)),
    )
    model = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(512, 5))
    return retrofit.convert(model, "bnn", check=False, strength=0.7)[0].double().train()


def work(rank: int, folder: Path) -> None:  # train one step with half the batch
    torch.set_num_threads(1)
    store, patience = (
        f"file://{folder}/store",
        timedelta(minutes=5),
    )  # where the other process fails
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=patience)
    model = synchronizable()
    assert sync_norms(model) == 2
    wrapped = DistributedDataParallel(model)
    images, targets = (part.split(4)[rank] for part in BATCH)
    nn.functional.cross_entropy(wrapped(images), targets).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    torch.save((grads, dict(model.named_buffers())), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """This one and another, no fork of it: autograd's threads, which an earlier test may have
    started, forbid that.
    """
    other = multiprocessing.get_context("spawn").Process(target=work, args=(1, tmp_path))
    other.start()
    work(0, tmp_path)
    other.join()
    whole = synchronizable()
    nn.functional.cross_entropy(whole(BATCH[0]), BATCH[1]).backward()
    expected = [parameter.grad for parameter in whole.parameters()], dict(whole.named_buffers())
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_whitening_is_not_synchronized_in_silence() -> None:
    with pytest.raises(retrofit.RetrofitError, match="not synchronized"):
        sync_norms(DecorrelatedBatchNorm2d(4))


def test_only_the_class_changes_and_comes_back() -> None:
    model = nn.Sequential(BatchNormalNorm2d(3), BatchNormalNormAct2d(3), nn.BatchNorm2d(3))
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    assert sync_norms(model, "cpu") == 2
    assert [type(layer) for layer in model] == [
        SyncBatchNormalNorm,
        SyncBatchNormalNormAct,
        nn.BatchNorm2d,
    ]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    copy.deepcopy(model)(
        torch.randn(4, 3, 2, 2)
    )  # without a process group, and as a copy, they go on as they are
    with local_norms(model):
        assert [type(layer) for layer in model] == [
            BatchNormalNorm2d,
            BatchNormalNormAct2d,
            nn.BatchNorm2d,
        ]
    assert type(model[0]) is SyncBatchNormalNorm
    assert model.state_dict().keys() == before.keys()
