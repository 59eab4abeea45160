"""Steps that are not finite change nothing, and the host does not wait for a step."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrofit.finetune.optimization import build_optimizer
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_report import RunCallback, Step
from retrofit.finetune.step_gate import StepGate
from tests.finetune.conftest import Train

FUSED = ["adam", "adamw", "momentum", "nesterov", "sgd"]


def gate_of(
    opt: str, clip: float | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, StepGate]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = build_optimizer(model, Recipe(opt=opt, lr=0.1, weight_decay=0.1))
    return model, optimizer, StepGate(Accelerator(cpu=True), model, optimizer, clip)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gate: StepGate,
    name: int,
    factor: float = 1.0,
) -> None:
    images = torch.randn(5, 3)
    loss = model(images).square().mean()
    (loss * factor).backward()
    gate.add(loss, len(images))
    gate.close()
    optimizer.step()
    optimizer.zero_grad()
    gate.send(name, images)


@pytest.mark.parametrize("opt", [*FUSED, "lamb", "rmsproptf"])
@pytest.mark.parametrize(("fault", "clip"), [(math.nan, 1.0), (math.inf, None)])
def test_weights_stay_as_they_are(opt: str, fault: float, clip: float | None) -> None:
    model, optimizer, gate = gate_of(opt, clip)
    step(model, optimizer, gate, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    step(model, optimizer, gate, 2, fault)
    step(model, optimizer, gate, 3)  # until the host knows, nothing moves any more
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert opt not in FUSED or torch.equal(parameter, old)
    assert [verdict.fault for verdict in gate.verdicts()] == [None, "gradient", "gradient"]


def test_a_loss_that_is_not_finite_is_a_fault_of_its_own() -> None:
    model, optimizer, gate = gate_of("sgd")
    before = [parameter.clone() for parameter in model.parameters()]
    gate.add(torch.tensor(math.inf), 5)  # as a batch of an accumulated step
    step(model, optimizer, gate, 1)
    assert [(verdict.fault, verdict.description) for verdict in gate.verdicts()] == [
        ("loss", "the loss")
    ]
    assert all(map(torch.equal, model.parameters(), before))


def test_the_sum_of_losses_and_the_clipped_gradient() -> None:
    model, _, gate = gate_of("sgd", clip=0.5)
    expected = list(copy.deepcopy(model).parameters())
    for number, pair in enumerate(zip(model.parameters(), expected, strict=True), 1):
        for parameter in pair:
            parameter.grad = torch.full_like(parameter, number)
    norm = nn.utils.clip_grad_norm_(expected, 0.5)  # torch's
    gate.start(10.0)
    gate.add(torch.tensor(2.0), 3)
    gate.close()
    gate.send("step", torch.zeros(1))
    (verdict,) = gate.verdicts()
    assert (verdict.loss_sum, verdict.fault) == (16.0, None)
    torch.testing.assert_close(verdict.norms.norm(), norm)
    torch.testing.assert_close(
        [one.grad for one in model.parameters()], [one.grad for one in expected]
    )


@pytest.mark.parametrize(
    ("value", "broken", "named"),
    [
        (math.nan, ("0.weight", "1.weight"), "1.weight"),  # what is before it has it from there
        (math.inf, ("0.weight",), "0.weight"),
        (1e30, ("1.weight",), "1.weight"),  # finite, but its square is not
    ],
)
def test_the_gradient_that_went_first(value: float, broken: tuple[str, ...], named: str) -> None:
    model, _, gate = gate_of("sgd")
    model(torch.randn(5, 3)).square().sum().backward()
    for name in broken:
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        gradient[0] = value
    gate.close()
    gate.send("step", torch.zeros(1))
    (verdict,) = gate.verdicts()
    assert (verdict.fault, verdict.description) == ("gradient", f"the gradient of {named}")


def test_an_accelerator_s_verdicts_come_a_step_later() -> None:
    model, optimizer, gate = gate_of("sgd")
    gate._lag = 1
    heard: list[Any] = []
    for number, factor in enumerate((1.0, math.nan, 1.0), 1):
        step(model, optimizer, gate, number, factor)
        heard += [
            (number, verdict.step, verdict.fault, len(verdict.images))
            for verdict in gate.verdicts()
        ]
    assert heard == [(2, 1, None, 5), (3, 2, "gradient", 5)]
    assert [verdict.step for verdict in gate.verdicts(all_of_them=True)] == [3]


class Reads(TorchDispatchMode):  # counts what makes the host wait for a value of the device
    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique")
    found: ClassVar[Counter[str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        self.found.update({name} & set(self.WAITING))
        return func(*args, **(kwargs or {}))

    def counted(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)
        return lambda *args: (self.found.update([name]), method(*args))[1]


def test_the_host_reads_nothing_of_a_step(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the targets, which lie on the host, and the verdict, which is copied there and read a
    step later.
    """
    reads, per_step = Reads(), []
    for name in ("tolist", "cpu", "numpy", "item"):
        monkeypatch.setattr(Tensor, name, reads.counted(name))

    class Watch(RunCallback):
        def step(self, step: Step) -> None:
            per_step.append(dict(reads.found))
            reads.found.clear()

    settings = {
        "clip_grad": 1.0,
        "model_ema": True,
        "grad_accum_steps": 2,
        "mixup": 0.5,
        "batch_size": 2,
    }
    with reads:
        train("run", val_split=0.0, epochs=1, callback=Watch(), workers=1, **settings)
    # A step reads two batches, one of them ahead for the next step.
    assert per_step[1:-1] == [{"tolist": 2 + 1}] * 4
    assert per_step[-1] == {"tolist": 1 + 1}
