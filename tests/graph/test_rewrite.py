"""Replacing single calls: the same function bit for bit, and a model that works as before."""

import copy
import inspect
import io
import linecache
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models.feature_extraction import create_feature_extractor

from retrofit.graph.find_sites import find_sites
from retrofit.graph.rewrite import check_call, replace_call, replace_module
from retrofit.graph.site import Activation
from retrofit.graph.source import RewriteError
from retrofit.surgery.restore import unchanged_on_failure
from tests.graph import blocks

tv = torchvision.models


def direct(model: nn.Module) -> Iterator[tuple[str, Activation]]:
    found = find_sites(model, lambda module: isinstance(module, _BatchNorm))
    for site in found.sites:
        if site.activation is not None:
            yield f"{site.norm.removeprefix(site.owner + '.')}_{site.place}".replace(".", "_"), site.activation


def wrap(model: nn.Module) -> int:
    """Replace every activation that directly follows a norm by itself, wrapped."""
    count = 0
    for name, act in list(direct(model)):
        wrapped = blocks.Wrapped(act.module)
        if act.kind == "fused":
            model.get_submodule(act.owner).act = wrapped
        elif act.kind == "module":
            replace_module(model, act.name, wrapped)
        else:
            assert act.call is not None
            check_call(model, act.call)
            replace_call(model, act.call, wrapped, f"{name}_act")
        count += 1
    return count


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [tensor for value in values if value is not None for tensor in tensors(value)]


def run(model: nn.Module, x: Tensor, training: bool) -> list[Tensor]:
    """Outputs, input gradient and parameter gradients, with the same random numbers on every call."""
    torch.manual_seed(1)
    model.train(training)
    x = x.clone().requires_grad_()
    outputs = tensors(model(x))
    wanted = [x, *model.parameters()]
    gradients = torch.autograd.grad(sum(o.square().sum() for o in outputs), wanted, allow_unused=True)  # type: ignore[arg-type]
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]


def assert_same(source: nn.Module, model: nn.Module, x: Tensor) -> None:
    for training in (False, True):
        for expected, got in zip(run(source, x, training), run(model, x, training), strict=True):
            assert torch.equal(expected, got)


MODELS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "mobilenetv3_small": (lambda: timm.create_model("mobilenetv3_small_100"), 23, (2, 3, 32, 32)),
    "dla34": (lambda: timm.create_model("dla34"), 21, (2, 3, 32, 32)),
    "res2net50": (lambda: timm.create_model("res2net50_48w_2s"), 33, (2, 3, 32, 32)),
    "tv:resnet18": (tv.resnet18, 9, (2, 3, 32, 32)),
    "tv:regnet_y_400mf": (tv.regnet_y_400mf, 33, (2, 3, 32, 32)),
    "shared": (blocks.Shared, 2, (2, 4, 5, 5)),
    "functional": (blocks.Functional, 2, (2, 4, 5, 5)),
    "behind dropout": (blocks.BehindDropout, 2, (2, 4, 5, 5)),
    "norm twice": (blocks.NormTwice, 2, (2, 4, 5, 5)),
    "loop": (blocks.Loop, 2, (2, 4, 5, 5)),
    "train only": (blocks.TrainOnly, 2, (2, 4, 5, 5)),
    "helper twice": (blocks.HelperTwice, 2, (2, 4, 5, 5)),
    "branching": (blocks.Branching, 3, (2, 4, 5, 5)),
    "rates": (blocks.Rates, 4, (2, 4, 5, 5)),
    "same padding": (blocks.SamePad, 1, (2, 4, 6, 5)),
    "constant": (blocks.Constant, 1, (2, 4, 5, 5)),
    "remembers": (blocks.Remembers, 1, (2, 4, 5, 5)),
    "custom": (lambda: blocks.Custom(blocks.Swish()), 2, (2, 4, 5, 5)),
    "indexed": (blocks.Indexed, 2, (2, 4, 5, 5)),
    "sequences": (blocks.Sequences, 3, (2, 4, 5, 5)),
}
SMALL = ["shared", "functional", "loop", "helper twice", "norm twice", "behind dropout", "indexed", "sequences"]


@pytest.mark.parametrize("name", MODELS)
def test_the_same_function_in_eval_and_in_train(name: str) -> None:
    make, count, shape = MODELS[name]
    source = make()
    model = copy.deepcopy(source)
    assert wrap(model) == count
    wrapped = [key for key in model.state_dict() if key.endswith(".seen") or key == "seen"]
    assert len(wrapped) == count
    extra = [key for key in model.state_dict() if key not in source.state_dict()]
    assert sorted(extra) == sorted(wrapped)
    assert type(model).__name__ == type(source).__name__
    assert isinstance(model, type(source))
    assert_same(source, model, torch.randn(shape))


@pytest.mark.parametrize("name", [*SMALL, "tv:resnet18"])
def test_copies_and_pickles(name: str) -> None:
    make, _, shape = MODELS[name]
    source = make()
    model = copy.deepcopy(source)
    wrap(model)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    x = torch.randn(shape)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        assert_same(copy.deepcopy(source), other, x)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "eager") for name in SMALL]
    + [("behind dropout", "aot_eager"), pytest.param("tv:resnet18", "aot_eager", marks=pytest.mark.slow)],
)
def test_compiles_whole(name: str, backend: str) -> None:
    make, _, shape = MODELS[name]
    model = make()
    wrap(model)
    x = torch.randn(shape)
    for training in (False, True):
        model.train(training)
        other = copy.deepcopy(model)
        torch._dynamo.reset()
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        got = torch.compile(other, fullgraph=True, backend=backend)(x)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("again", [False, True], ids=["from one search", "searching again"])
def test_calls_of_one_block_one_after_the_other(again: bool) -> None:
    source = blocks.Shared()
    model = copy.deepcopy(source)
    calls = {name: act.call for name, act in direct(model)}
    replace_call(model, calls["bn2_0"], blocks.Wrapped(nn.ReLU()), "second")  # type: ignore[arg-type]
    if again:
        calls = {name: act.call for name, act in direct(model) if act.call is not None}
        assert set(calls) == {"bn1_0"}
    replace_call(model, calls["bn1_0"], blocks.Wrapped(nn.Tanh()), "first")  # type: ignore[arg-type]
    x = torch.randn(2, 4, 5, 5)
    model.eval()
    out = F.relu(model.bn2(model.conv2(torch.tanh(model.bn1(model.conv1(x))))))
    assert torch.equal(model(x), F.relu(model.conv1(out) + x))
    with pytest.raises(RewriteError, match="replaced already"):
        replace_call(model, find_first_call(source), blocks.Wrapped(nn.ReLU()), "third")


def find_first_call(model: nn.Module) -> Any:
    return next(act.call for _, act in direct(model))


def test_equal_blocks_share_one_class() -> None:
    model = tv.resnet18()
    wrap(model)
    assert type(model.layer1[0]) is type(model.layer1[1])
    assert type(copy.deepcopy(model).layer1[0]) is type(model.layer1[0])
    assert isinstance(model.layer1[0], tv.resnet.BasicBlock)


def test_a_method_that_makes_the_call_stays_the_one_to_call() -> None:
    source = blocks.Helper().eval()
    model = copy.deepcopy(source)
    wrap(model)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(model.forward_features(x), source.forward_features(x))
    replacement = model.bn1_0_act
    replacement.inner = nn.Tanh()
    assert not torch.equal(model.forward_features(x), source.forward_features(x))


def test_attributes_count_as_they_are_when_the_block_runs() -> None:
    model, source = blocks.Flag().eval(), blocks.Flag().eval()
    source.load_state_dict(model.state_dict())
    wrap(model)
    x = torch.randn(2, 4, 5, 5)
    changes: list[tuple[str, Any]] = [("double", True), ("extra", nn.Tanh()), ("scales", (2.0, 3.0, 4.0))]
    for name, value in changes:
        for block in (model, source):
            setattr(block, name, value)
        assert torch.equal(model(x), source(x))
    held = blocks.Held().eval()
    call, slope = (act.call for _, act in direct(held))
    assert call is not None
    replace_call(held, call, nn.Tanh(), "new")
    x = torch.randn(2, 4, 5, 5)
    rest = lambda y: F.leaky_relu(held.bn2(held.conv2(y)), 0.1)  # noqa: E731
    assert torch.equal(held(x), rest(torch.tanh(held.bn1(held.conv1(x)))))
    assert torch.equal(pickle.loads(pickle.dumps(held))(x), held(x))
    held.act = F.silu
    assert torch.equal(held(x), rest(F.silu(held.bn1(held.conv1(x)))))
    with pytest.raises(RewriteError, match="takes constants that may change"):
        check_call(held, slope)  # type: ignore[arg-type]


def test_a_loop_in_another_order_keeps_norms_and_activations_together() -> None:
    model = blocks.Indexed().eval()
    for name, act in list(direct(model)):
        assert act.call is not None
        replace_call(model, act.call, nn.Tanh() if name == "bn1_0" else nn.Sigmoid(), f"{name}_act")
    model.norms = nn.ModuleList([model.bn2, model.bn1])
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(model(x), torch.tanh(model.bn1(model.conv2(model.bn2(model.conv1(x)).sigmoid()))))
    model.norms[0] = nn.Identity()  # no norm that is known: as the code has it
    assert torch.equal(model(x), torch.tanh(model.bn1(model.conv2(F.leaky_relu(model.conv1(x), 0.2)))))


def test_optional_arguments_may_be_given_or_not() -> None:
    source = blocks.Optional().eval()
    model = copy.deepcopy(source)
    wrap(model)
    assert list(inspect.signature(model.forward).parameters) == ["x", "shortcut", "rest", "scale"]
    x = torch.randn(2, 4, 5, 5)
    for call in (lambda m: m(x), lambda m: m(x, x * 2), lambda m: m(x, None, x), lambda m: m(x, scale=2.0)):
        assert torch.equal(call(model), call(source))


def test_what_cannot_be_rewritten() -> None:
    model = blocks.Elsewhere()
    for call, message in zip(
        (act.call for _, act in direct(model)), ("activated, which is no method", "decorated"), strict=True
    ):
        with pytest.raises(RewriteError, match=message):
            check_call(model, call)  # type: ignore[arg-type]
        with pytest.raises(RewriteError, match=message):
            replace_call(model, call, nn.ReLU(), "new")  # type: ignore[arg-type]
    assert type(model) is blocks.Elsewhere
    assert not hasattr(model, "new")


SOURCE = """
import torch.nn.functional as F
from tests.graph.blocks import Block
class Written(Block):
    def forward(self, x):
        return F.relu(self.bn1(self.conv1(x)))
"""


def test_the_source_must_be_what_runs(tmp_path: Path) -> None:
    file, names = tmp_path / "written.py", {"__name__": "written"}
    exec(compile(SOURCE, str(file), "exec"), names)
    model: Any = names["Written"]()
    with pytest.raises(RewriteError, match="is not at hand"):
        check_call(model, find_first_call(model))
    file.write_text(SOURCE.replace("F.relu", "F.silu"))
    linecache.clearcache()
    with pytest.raises(RewriteError, match="is not what runs"):
        check_call(model, find_first_call(model))
    file.write_text(SOURCE)
    linecache.clearcache()
    check_call(model, find_first_call(model))


class PicklesItself(blocks.Functional):
    def __reduce__(self) -> Any:
        return PicklesItself, ()


def test_refusals_before_any_trace() -> None:
    model = blocks.Functional()
    call = find_first_call(model)
    with pytest.raises(RewriteError, match="already has an attribute bn1"):
        replace_call(model, call, nn.ReLU(), "bn1")
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(RewriteError, match="set on the instance"):
        check_call(model, call)
    pickling = PicklesItself()
    with pytest.raises(RewriteError, match="its own pickling"):
        check_call(pickling, find_first_call(pickling))


GRAPHS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "shared": (lambda: torch.fx.symbolic_trace(blocks.Shared()), 2),
    "functional": (lambda: torch.fx.symbolic_trace(blocks.Functional()), 2),
    "in a network": (lambda: nn.Sequential(torch.fx.symbolic_trace(blocks.Loop()), blocks.Shared()), 4),
    "a graph for each mode": (lambda: create_feature_extractor(blocks.BehindDropout(), ["silu"]), 2),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_modules(name: str) -> None:
    make, count = GRAPHS[name]
    torch.manual_seed(0)
    source = make()
    torch.manual_seed(0)
    model = make()
    assert wrap(model) == count
    assert sum(key.endswith("seen") for key in model.state_dict()) == count
    x = torch.randn(2, 4, 5, 5)
    assert_same(source, model, x)
    for again in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        assert_same(again(source), again(model), x)


@pytest.mark.parametrize("name", GRAPHS)
def test_what_fails_later_leaves_the_graph(name: str) -> None:
    model, x = GRAPHS[name][0](), torch.randn(2, 4, 5, 5)
    before = run(model, x, training=False)
    model.eval()

    def fail() -> None:
        with unchanged_on_failure(model):
            wrap(model)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    model(x)
    assert not [key for key in model.state_dict() if key.endswith("seen")]
    for expected, got in zip(before, run(model, x, training=False), strict=True):
        assert torch.equal(expected, got)


def test_replace_module_takes_every_name() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Sequential(act), act, nn.ReLU())
    new = nn.Tanh()
    assert replace_module(model, "1", new) is model
    assert model[0][0] is new
    assert model[1] is new
    assert isinstance(model[2], nn.ReLU)
    assert replace_module(model, "", new) is new
    with pytest.raises(AttributeError):
        replace_module(model, "missing", new)


def test_hooks_parameters_and_heads_stay() -> None:
    model = tv.densenet121().eval()  # its last activation is functional, in the model's own forward
    seen: list[str] = []
    model.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    model.features.norm5.register_forward_hook(lambda *_: seen.append("norm5"))
    parameters = list(model.parameters())
    wrap(model)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
    model.classifier = nn.Linear(1024, 5)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
    assert seen == ["norm5", "DenseNet"]


def test_reset_classifier_and_features_work() -> None:
    model = timm.create_model("dla34").eval()
    wrap(model)
    model.reset_classifier(7)
    x = torch.randn(1, 3, 64, 64)
    assert model(x).shape == (1, 7)
    assert torch.equal(model.forward_head(model.forward_features(x)), model(x))


def test_a_detector() -> None:
    backbone = tv.detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    source = tv.detection.FasterRCNN(backbone, 3, min_size=64, max_size=64).eval()
    model = copy.deepcopy(source)
    assert wrap(model) == 9
    x = [torch.rand(3, 64, 64)]
    for expected, got in zip(source.backbone(x[0][None]).values(), model.backbone(x[0][None]).values(), strict=True):
        assert torch.equal(expected, got)
    assert model(x)[0].keys() == {"boxes", "labels", "scores"}


def test_meta_models_are_rewritten_too() -> None:
    with torch.device("meta"):
        model = tv.resnet18()
        wrap(model)
        assert model(torch.randn(1, 3, 64, 64)).shape == (1, 1000)


def test_distributed_data_parallel(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = blocks.Shared()
        wrap(model)
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(torch.randn(2, 4, 5, 5)).sum().backward()
        assert model.conv1.weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()
