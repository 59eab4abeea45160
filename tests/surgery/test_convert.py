"""What `retrofit.convert` does beyond plan and apply: it checks, converts whole or not at all, and reports."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import retrofit
from retrofit import RetrofitError
from retrofit.surgery import apply, converter_for, execute, plan
from retrofit.surgery.targets.batch_independent import BatchIndependentConverter
from tests.surgery.networks import Shared, mixed, trained


class Net(nn.Sequential):  # it counts its calls in a buffer, in evaluation too, and draws random numbers
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        for layer in self:
            x = layer(x)
        return x + torch.rand(1).to(x)


def state(model: nn.Module) -> list[Any]:
    """All that can be seen of a network: tensors by identity and value, classes, attributes, flags, hooks."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    modules = [(m, type(m), m.training, sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()]
    return [*((name, id(tensor), tensor.tolist()) for name, tensor in tensors), *modules]


def test_the_check_is_in_the_report_and_disturbs_nothing() -> None:
    model = Net().train()
    model[3].eval()
    random, flags = torch.get_rng_state(), [module.training for module in model.modules()]
    buffers = {name: (t.clone(), t._version) for name, t in model.named_buffers()}
    model, report = retrofit.convert(model, "ln")
    assert report.check.passed
    assert report.to_dict()["check"]["passed"]
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    for name, (value, version) in buffers.items():
        assert torch.equal(model.get_buffer(name), value)
        assert name == "calls" or model.get_buffer(name)._version == version  # what nothing wrote to is left alone
    assert not any(module._forward_hooks for module in model.modules())
    assert retrofit.convert(Net(), "ln", check=False)[1].check is None


def test_where_it_cannot_run_it_says_so() -> None:
    for model, reason in (
        (nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), "did not take a random input of size 3x224x224"),
        (Net().bfloat16(), "half precision"),
        (Net().to("meta"), "meta device"),
    ):
        _, report = retrofit.convert(model, "bnn")
        assert report.check is None
        assert any(note.startswith("not checked: ") and reason in note for note in report.notes)
        assert any(isinstance(module, retrofit.layers.StrengthMixin) for module in model.modules())


def test_an_input_size_that_is_given_counts() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    assert retrofit.convert(copy.deepcopy(model), input_size=(5,))[1].check is not None
    before = state(model)
    with pytest.raises(RetrofitError, match="did not take a random input of size 7"):
        retrofit.convert(model, input_size=(7,))
    assert state(model) == before


def test_a_conversion_that_changes_the_function_is_refused_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any) -> nn.Module:
        new: Any = build(*args)
        new.bias = nn.Parameter(new.bias + 0.5)
        return new

    model = timm.create_model("test_resnet").eval()
    before, build = state(model), BatchIndependentConverter.build
    monkeypatch.setattr(BatchIndependentConverter, "build", shifted)
    with pytest.raises(RetrofitError, match=r"not the function of its source.*largest difference"):
        retrofit.convert(model, "gn")
    assert state(model) == before


@pytest.mark.parametrize(("to", "error"), [("gn-pn", KeyboardInterrupt), ("evonorm-s0", RuntimeError)])
def test_a_failure_anywhere_leaves_the_network_as_it_was(
    to: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("stop")

    made = plan(Shared(), to)
    converter = type(converter_for(to))
    built = converter.build

    def second(self: Any, module: Any, row: Any, device: Any) -> nn.Module:
        return fail() if row.name == "bn2" else built(self, module, row, device)  # type: ignore[func-returns-value]

    for holder, name, function in (
        *((converter, "build", second), (converter, "finish", fail)),
        (execute, "_call_the_norms", fail),
    ):
        model = trained(Shared())
        before = state(model)
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, function)
            with pytest.raises(error, match="stop"):
                apply(made, model)
        assert state(model) == before
        retrofit.convert(model, to)  # and it still converts


@pytest.mark.parametrize("thing", ["resnet50", None, nn.BatchNorm2d], ids=str)
def test_what_is_no_network_is_refused(thing: Any) -> None:
    with pytest.raises(retrofit.UsageError, match=r"a torch.nn.Module is converted, not .*; build the network first"):
        retrofit.convert(thing)


@pytest.mark.parametrize(
    ("options", "noises", "others"),
    [
        ({}, [0.0] * 4, ("scaled", 1.0)),
        ({"noise": "paper"}, [0.4, 0.4, 0.4, 1.0], ("scaled", 1.0)),
        ({"noise": 0.2, "noise_kind": "unscaled", "alpha": 0.5}, [0.2] * 4, ("unscaled", 0.5)),
    ],
)
def test_every_layer_gets_the_options_or_the_papers_without_the_noise(
    options: dict[str, Any], noises: list[float], others: tuple[str, float]
) -> None:
    model, report = retrofit.convert(mixed(), "normal", **options)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, retrofit.layers.NormalityMixin)]
    assert [layer.noise for layer in layers] == noises
    assert all((layer.noise_kind, layer.alpha) == others for layer in layers)
    settled = {"noise": 0.0} | {name: value for name, value in options.items() if value != "paper"}
    assert all(row.options == ({} if options == {"noise": "paper"} else settled) for row in report.plan.layers)
    assert report.plan.options.items() >= options.items()


def test_an_attribute_of_the_source_becomes_no_option() -> None:
    for to, expected in (("bnn", (1, 0, 0)), ("frozen", (0.5, 3, 1))):
        source: Any = nn.BatchNorm2d(4)
        source.alpha, source.noise, source.strength = 0.5, 3.0, 1.0  # somebody's own
        layer: Any = retrofit.convert(nn.Sequential(source), to, input_size=(4, 8, 8))[0][0]
        assert (layer.alpha, layer.noise, float(layer.strength)) == expected


def test_a_report_prints_as_a_small_table() -> None:
    _, report = retrofit.convert(timm.create_model("resnet18"), "gn-pn", skip="layer4", check=False)
    lines = str(report).splitlines()
    assert lines[0] == str(report.plan).splitlines()[0] == "to gn-pn: 15 converted, 5 kept, 0 unsupported"
    assert lines[1].split() == ["count", "found", "becomes", "first", "why"]
    assert len(lines) < 16
    assert max(map(len, lines[:-3])) < 170
    assert any(line.split()[:4] == ["15", "BatchNorm2d", "MigratedGroupNorm", "bn1"] for line in lines)
    assert "strength: 0" in lines
    assert any(line.startswith("note: 7 of 17 activations are converted") for line in lines)
    assert "<b>\\x1b" in str(plan(nn.ModuleDict({"<b>\x1b[31m": nn.BatchNorm2d(3)})))
