"""Replacing single calls: the same function bit for bit, and a model that works as before."""

import __future__

import copy
import inspect
import linecache
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers.activations_me import SwishMe
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.feature_extraction import create_feature_extractor

from retrofit.graph.norm_sites import find_sites
from retrofit.graph.rewrite import replace_activation, replace_module, rewrite_problem
from retrofit.graph.source_code import RewriteError
from retrofit.surgery.execute import unchanged_on_failure
from retrofit.surgery.norm_layers import find_norms
from retrofit.utils.output_tensors import tensors_in
from tests.graph import blocks

tv = torchvision.models
X = torch.randn(2, 4, 5, 5)


def direct(model: nn.Module) -> list[Any]:  # the sites with an activation
    found = find_sites(model, lambda module: isinstance(module, _BatchNorm))
    return [site for site in found.sites if site.activation is not None]


def wrap(
    model: nn.Module,
) -> int:  # replace every activation that directly follows a norm by itself, wrapped
    sites = direct(model)
    for site in sites:
        assert not rewrite_problem(model, site.activation)
        replace_activation(model, site, blocks.Wrapped(site.activation.module), "act")
    return len(sites)


def run(model: nn.Module, x: Tensor, training: bool) -> list[Tensor]:
    """Outputs, input gradient and parameter gradients, with the same random numbers on every
    call.
    """
    torch.manual_seed(1)
    model.train(training)
    x = x.clone().requires_grad_()
    outputs = list(tensors_in(model(x)))
    loss = torch.stack([output.square().sum() for output in outputs]).sum()
    gradients = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]


def assert_same(source: nn.Module, model: nn.Module, x: Tensor = X) -> None:
    for training in (False, True):
        pairs = zip(run(source, x, training), run(model, x, training), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


SMALL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "shared": (blocks.Shared, 2), "functional": (blocks.Functional, 2), "sequences": (blocks.Sequences, 3),
    "indexed": (blocks.Indexed, 2), "norm twice": (blocks.NormTwice, 2), "behind dropout": (blocks.BehindDropout, 2),
}  # fmt: skip
GRAPHS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "a graph": (lambda: torch.fx.symbolic_trace(blocks.Functional()), 2),
    "a graph in a network": (
        lambda: nn.Sequential(torch.fx.symbolic_trace(blocks.Indexed()), blocks.Shared()),
        4,
    ),
    "a graph for each mode": (
        lambda: create_feature_extractor(blocks.BehindDropout(), ["silu"]),
        2,
    ),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **SMALL,
    **GRAPHS,
    "mobilenetv3_small": (lambda: timm.create_model("mobilenetv3_small_100", in_chans=4), 23),
    "res2net50": (lambda: timm.create_model("res2net50_48w_2s", in_chans=4), 33),
    "train only": (blocks.TrainOnly, 2),
    "branching": (blocks.Branching, 3),
    "custom": (lambda: blocks.Custom(SwishMe()), 2),
}


def pair(name: str) -> tuple[nn.Module, nn.Module]:  # the same network twice
    torch.manual_seed(0)
    source = MODELS[name][0]()
    torch.manual_seed(0)
    return source, MODELS[name][0]()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_function_in_eval_and_in_train(name: str) -> None:
    source, model = pair(name)
    count = MODELS[name][1]
    assert wrap(model) == count
    extra = [key for key in model.state_dict() if key not in source.state_dict()]
    assert len(extra) == count
    assert all(key.endswith("seen") for key in extra)
    assert type(model).__qualname__ == type(source).__qualname__
    assert_same(
        source, model, torch.randn(2, 4, 32, 32) if "net" in name and name not in GRAPHS else X
    )


def negated(_module: nn.Module, _args: Any, output: Any) -> Any:  # a hook that changes what passes
    return {key: -value for key, value in output.items()} if isinstance(output, dict) else -output


@pytest.mark.parametrize("name", [*SMALL, *GRAPHS])
def test_copies_and_pickles(name: str, tmp_path: Path) -> None:
    source, model = pair(name)
    wrap(model)
    for each in (source, model):
        each.register_forward_hook(negated)
    torch.save((source, model), tmp_path / "saved.bin")
    assert_same(*torch.load(tmp_path / "saved.bin", weights_only=False))
    assert_same(copy.deepcopy(source), copy.deepcopy(model))


@pytest.mark.parametrize("name", SMALL)
def test_compiles_whole(name: str) -> None:
    source, model = pair(name)
    wrap(model)
    torch._dynamo.reset()
    assert_same(
        source,
        torch.compile(model, fullgraph=True, backend="aot_eager" if name == "shared" else "eager"),
    )


@pytest.mark.parametrize("again", [False, True], ids=["from one search", "searching again"])
def test_calls_of_one_block_one_after_the_other(again: bool) -> None:
    model = blocks.Shared().eval()
    first, second = direct(model)
    replace_activation(model, second, nn.Sigmoid(), "new")
    replace_activation(model, direct(model)[0] if again else first, nn.Tanh(), "new")
    out = model.bn2(model.conv2(torch.tanh(model.bn1(model.conv1(X))))).sigmoid()
    assert torch.equal(model(X), F.relu(model.conv1(out) + X))


def test_equal_blocks_share_one_class() -> None:
    model = tv.resnet18()
    wrap(model)
    assert type(model.layer1[0]) is type(model.layer1[1]) is type(copy.deepcopy(model).layer1[0])
    assert isinstance(model.layer1[0], tv.resnet.BasicBlock)


def test_a_function_in_an_attribute_may_change_and_a_constant_there_is_left() -> None:
    model = blocks.Held().eval()
    act, slope = direct(model)
    replace_activation(model, act, nn.Tanh(), "new")
    for expected in (torch.tanh, F.silu):
        got = F.leaky_relu(model.bn2(model.conv2(expected(model.bn1(model.conv1(X))))), 0.1)
        assert torch.equal(model(X), got)
        assert torch.equal(pickle.loads(pickle.dumps(model))(X), got)
        model.act = F.silu
    assert "takes constants that may change" in rewrite_problem(model, slope.activation)


def test_a_loop_in_another_order_keeps_norms_and_activations_together() -> None:
    model = blocks.Indexed().eval()
    for site, act in zip(direct(model), (nn.Tanh(), nn.Sigmoid()), strict=True):
        replace_activation(model, site, act, "act")
    model.norms = nn.ModuleList([model.bn2, model.bn1])
    assert torch.equal(
        model(X), torch.tanh(model.bn1(model.conv2(model.bn2(model.conv1(X)).sigmoid())))
    )
    model.norms[0] = nn.Identity()  # no norm that is known: as the code has it
    assert torch.equal(
        model(X), torch.tanh(model.bn1(model.conv2(F.leaky_relu(model.conv1(X), 0.2))))
    )


def test_optional_arguments_may_be_given_or_not() -> None:
    source = blocks.Optional().eval()
    model = copy.deepcopy(source)
    wrap(model)
    assert inspect.signature(model.forward) == inspect.signature(source.forward)
    for call in (
        lambda m: m(X),
        lambda m: m(X, X * 2),
        lambda m: m(X, None, X),
        lambda m: m(X, scale=2.0),
    ):
        assert torch.equal(call(model), call(source))


class PicklesItself(blocks.Functional):
    def __reduce__(self) -> Any:
        return PicklesItself, ()


class Chosen(blocks.Block):  # an activation that is chosen where it is called
    def __init__(self) -> None:
        super().__init__()
        self.acts = nn.ModuleList([self.relu, nn.SiLU()])

    def forward(self, x: Tensor) -> Tensor:
        return self.acts[0](self.bn2(self.conv2(self.acts[0](self.bn1(self.conv1(x))))))


class Again(nn.Sequential):  # calls one of its entries once more
    def forward(self, x: Tensor) -> Tensor:
        return self[2](super().forward(x) - x)


def test_what_cannot_be_rewritten_is_left_as_it_was() -> None:
    own = blocks.Functional()
    own.forward = own.forward  # type: ignore[method-assign]
    cases = [
        (blocks.Elsewhere(), ["activated, which is no method", "decorated"]),
        (own, ["set on the instance"] * 2),
        (PicklesItself(), ["its own pickling"] * 2),
        (Chosen(), ["does not name what it calls"] * 2),
        (Again(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), ["which is no method of Again"]),
    ]
    for model, messages in cases:
        before = dict(vars(model)), type(model), list(model.state_dict())
        for site, message in zip(direct(model), messages, strict=True):
            assert message in rewrite_problem(model, site.activation)
            with pytest.raises(RewriteError, match=message):
                replace_activation(model, site, nn.PReLU(), "new")
        assert (dict(vars(model)), type(model), list(model.state_dict())) == before
    taken = blocks.Functional()
    taken.bn1_new = nn.Identity()
    with pytest.raises(RewriteError, match="already has an attribute bn1_new"):
        replace_activation(taken, direct(taken)[0], nn.ReLU(), "new")


SOURCE = """
import torch.nn.functional as F
from tests.graph.blocks import Block
class Written(Block):
    def forward(self, x):
        return F.relu(self.bn1(self.conv1(x)))
"""


# a notebook compiles a cell with the `from __future__` imports of earlier cells
@pytest.mark.parametrize("flags", [0, __future__.annotations.compiler_flag])
def test_the_source_must_be_what_runs(flags: int, tmp_path: Path) -> None:
    file, names = tmp_path / "written.py", {"__name__": "written"}
    exec(compile(SOURCE, str(file), "exec", flags, dont_inherit=True), names)
    model: Any = names["Written"]().eval()
    (site,) = direct(model)
    assert "is not at hand" in rewrite_problem(model, site.activation)
    for changed in (SOURCE.replace("F.relu", "F.silu"), SOURCE.replace("(self.bn1", "( self.bn1")):
        file.write_text(changed)
        linecache.clearcache()
        assert "is not what runs" in rewrite_problem(model, site.activation)
    file.write_text(SOURCE)
    linecache.clearcache()
    replace_activation(model, site, nn.Tanh(), "new")
    assert torch.equal(model(X), torch.tanh(model.bn1(model.conv1(X))))


def test_annotations_that_were_postponed_stay_so(tmp_path: Path) -> None:
    file, names = tmp_path / "annotated.py", {"__name__": "annotated"}
    source = SOURCE.replace("        return", "        def inner(y: Unknown): ...\n        return")
    file.write_text(source)
    exec(compile(source, str(file), "exec", __future__.annotations.compiler_flag), names)
    model: Any = names["Written"]().eval()
    replace_activation(model, direct(model)[0], nn.Tanh(), "new")
    assert torch.equal(model(X), torch.tanh(model.bn1(model.conv1(X))))


@pytest.mark.parametrize("name", GRAPHS)
def test_what_fails_later_leaves_the_graph(name: str) -> None:
    source, model = pair(name)

    def fail() -> None:
        wrap(model)
        raise KeyError

    with pytest.raises(KeyError), unchanged_on_failure(model, find_norms(model)):
        fail()
    assert model.state_dict().keys() == source.state_dict().keys()
    assert_same(source, model)


def test_replace_module_takes_every_name() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Sequential(act), act, nn.ReLU())
    new = nn.Tanh()
    assert replace_module(model, "1", new) is model
    assert model[0][0] is model[1] is new
    assert isinstance(model[2], nn.ReLU)
    assert replace_module(model, "", new) is new
