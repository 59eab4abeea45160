"""What `retrofit.convert` does beyond plan and apply: it checks, and it converts whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import retrofit
from retrofit import RetrofitError
from retrofit.surgery import apply, converter_for, execute, plan
from retrofit.surgery.targets import batch_independent


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.SiLU()
    )


def state(model: nn.Module) -> dict[str, Any]:
    """All that can be seen of a network: tensors by identity, version and value, classes, attributes, flags."""
    return {
        "tensors": {name: (id(t), t.clone()) for name, t in (*model.named_parameters(), *model.named_buffers())},
        "modules": {name: (id(m), type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()},
        "hooks": {name: len(m._forward_hooks) for name, m in model.named_modules()},
    }


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["modules"] == two["modules"]
    assert one["hooks"] == two["hooks"]
    assert one["tensors"].keys() == two["tensors"].keys()
    for name, (place, value) in one["tensors"].items():
        assert place == two["tensors"][name][0]
        assert torch.equal(value, two["tensors"][name][1]), name


def test_the_check_is_in_the_report_and_disturbs_nothing() -> None:
    model = net()
    model.train()
    model[3].eval()
    random, flags = torch.get_rng_state(), [module.training for module in model.modules()]
    buffers = {name: (t.clone(), t._version) for name, t in model.named_buffers()}
    model, report = retrofit.convert(model, "ln")
    assert report.check is not None
    assert report.check.passed
    assert report.to_dict()["check"]["passed"]
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    for name, (value, version) in buffers.items():
        assert torch.equal(model.get_buffer(name), value)
        assert model.get_buffer(name)._version == version
    assert not any(module._forward_hooks for module in model.modules())
    assert retrofit.convert(net(), "ln", check=False)[1].check is None


class Counting(nn.Module):
    """A network that counts its calls in a buffer, in evaluation too, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.norm(x) + torch.rand(1)


def test_buffers_that_evaluation_writes_are_put_back() -> None:
    model = Counting()
    random = torch.get_rng_state()
    assert retrofit.convert(model)[1].check is not None
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), "did not take a random input of size 3x224x224"),
        (lambda: net().bfloat16(), "half precision"),
        (lambda: net().to("meta"), "meta device"),
    ],
)
def test_where_it_cannot_run_it_says_so(build: Callable[[], nn.Module], reason: str) -> None:
    model, report = retrofit.convert(build(), "bnn")
    assert report.check is None
    assert any(note.startswith("not checked: ") and reason in note for note in report.notes)
    assert any(isinstance(module, retrofit.layers.StrengthMixin) for module in model.modules())


def test_an_input_size_that_is_given_counts() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    assert retrofit.convert(copy.deepcopy(model), input_size=(5,))[1].check is not None
    before = state(model)
    with pytest.raises(RetrofitError, match="did not take a random input of size 7"):
        retrofit.convert(model, input_size=(7,))
    assert_same(state(model), before)


def test_a_conversion_that_changes_the_function_is_refused_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model("test_resnet").eval()
    before = state(model)
    build = batch_independent.materialize_at_zero

    def shifted(new: Any, device: torch.device) -> nn.Module:
        new.bias.data.add_(0.5)
        return build(new, device)

    monkeypatch.setattr(batch_independent, "materialize_at_zero", shifted)
    with pytest.raises(RetrofitError, match=r"not the function of its source.*largest difference"):
        retrofit.convert(model, "gn")
    assert_same({**state(model), "tensors": {}}, {**before, "tensors": {}})


class Shared(nn.Module):
    """One activation module for two norms, and a functional one: blocks are rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.bn2 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.act = nn.ReLU()

    def forward(me, x: Tensor) -> Tensor:  # noqa: N805
        return functional.silu(me.act(me.bn2(me.act(me.bn(me.conv(x))) * 2)))


ONE_OF_EACH = (
    "bnn",
    "gn",
    "gn-pn",
    "frozen",
    "dbnn",
    "evonorm-s0",
)  # of each file of `targets/`, and the rewriting one


@pytest.mark.parametrize(("to", "error"), [("gn-pn", KeyboardInterrupt), *((t, RuntimeError) for t in ONE_OF_EACH)])
def test_a_failure_anywhere_leaves_the_network_as_it_was(
    to: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("stop")

    made = plan(Shared(), to)
    converter = type(converter_for(to))
    built = converter.build
    for where in ("second", "finish", "after"):
        model = Shared()
        with torch.no_grad():
            model.bn.running_var.uniform_(0.5, 2)
            model.bn.weight.uniform_(0.5, 2)
        before = state(model)
        with monkeypatch.context() as patch:
            if where == "second":
                patch.setattr(
                    converter, "build", lambda self, m, row, d: fail() if row.name == "bn2" else built(self, m, row, d)
                )
            elif where == "finish":
                patch.setattr(converter, "finish", fail)
            else:
                patch.setattr(execute.guards, "refuse_fusing", fail)
            with pytest.raises(error, match="stop"):
                apply(made, model)
        assert_same(state(model), before)
        retrofit.convert(model, to)  # and it still converts


@pytest.mark.parametrize("to", ["gn-pn", "evonorm-s0"])
def test_the_first_argument_of_forward_may_have_any_name(to: str) -> None:
    model = Shared().eval()
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
    model, report = retrofit.convert(model, to)
    assert sum(row.status == "converted" for row in report.plan.edits) == 2
    out = model(x)
    assert out.shape == expected.shape
    if to == "gn-pn":
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(copy.deepcopy(model)(x), out)


class Named(nn.Module):
    """`self` is the name of the input."""

    def __init__(this) -> None:  # noqa: N805
        super().__init__()
        this.bn = nn.BatchNorm2d(3)

    def forward(this, self: Tensor) -> Tensor:  # noqa: N805
        return functional.silu(functional.silu(this.bn(self)) * 2)


def test_self_may_be_the_name_of_an_argument() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Named()).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    model, report = retrofit.convert(model, "gn-pn", groups=1, input_size=(3, 8, 8))
    assert [row.name for row in report.plan.edits if row.status == "converted"] == ["1.silu#0"]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("thing", ["resnet50", None, nn.BatchNorm2d], ids=str)
def test_what_is_no_network_is_refused(thing: Any) -> None:
    with pytest.raises(retrofit.UsageError, match=r"a torch.nn.Module is converted, not .*; build the network first"):
        retrofit.convert(thing)
