"""Code that would compute a converted layer's source without calling it."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import group_norm as in_groups
from torch.nn.utils import fuse_conv_bn_eval, parametrizations, parametrize, prune

import retrofit
from retrofit.errors import RetrofitError
from retrofit.surgery import apply

SIZE = (3, 16, 16)


class Transformer(nn.Module):  # patches through torch's own encoder
    def __init__(self, norm_first: bool = False, activation: str = "relu") -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, 0.0, activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = self.patches(x).flatten(2).mT
        return self.head(self.encoder(tokens, src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("norm_first", "activation", "masked"),
    [(False, "relu", True), (False, "gelu", False), (True, "gelu", True)],
)
def test_transformers_call_their_converted_norms_in_evaluation(
    norm_first: bool, activation: str, masked: bool
) -> None:
    source, x = Transformer(norm_first, activation).eval(), torch.randn(3, *SIZE)
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[0, 12:] = True
    given = mask if masked else None
    model, report = retrofit.convert(copy.deepcopy(source), "lnn", input_size=SIZE)
    assert any("masked tokens" in note for note in report.notes) != norm_first
    expected = source(
        x, given
    ).detach()  # with gradients torch takes no fast path, and packs no tokens
    with torch.no_grad():
        torch.testing.assert_close(model(x, given), expected)
    retrofit.set_strength(model, 1.0)
    followed = model(x, given).detach()
    with torch.inference_mode():
        torch.testing.assert_close(model(x, given), followed)
    assert (expected - followed).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
def test_a_masked_transformer_is_converted_on_masked_inputs() -> None:
    source = Transformer().eval()
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[0, 12:] = True
    _, report = retrofit.convert(source, "lnn", inputs=(torch.randn(3, *SIZE), mask))
    assert report.check is not None
    assert report.check.passed
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_a_network_with_lazy_layers_is_told_to_run_first(to: str) -> None:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(3)]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), *head)
    with pytest.raises(
        RetrofitError, match=r"5\.weight, 5\.bias have no shape .* one forward pass"
    ):
        retrofit.convert(model, to, inputs=torch.randn(2, *SIZE))
    model(torch.randn(2, *SIZE))
    retrofit.convert(model, to, inputs=torch.randn(2, *SIZE))


class Hidden(nn.Module):  # calls its norm by another reference
    def __init__(self) -> None:
        super().__init__()
        self.bn = self.same = nn.BatchNorm2d(3)
        self.hidden = [self.bn]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


def test_a_network_that_calls_the_source_by_another_reference_is_refused() -> None:
    model = Hidden().eval()
    with pytest.raises(RetrofitError, match="calls the source of bn, which is converted"):
        retrofit.convert(model, "bnn", skip="same", input_size=SIZE)
    assert model.bn is model.hidden[0]


def test_a_forward_or_a_compiled_call_of_the_source_is_not_taken_over() -> None:
    norm = nn.BatchNorm2d(8)
    norm.compile()
    assert apply(retrofit.plan(norm, "bnn"), norm)[0]._compiled_call_impl is None
    wrapped = torch.compile(nn.Sequential(nn.BatchNorm2d(8)))
    assert apply(retrofit.plan(wrapped, "bnn"), wrapped)[0] is wrapped
    with pytest.raises(RetrofitError, match="its forward was replaced"):
        retrofit.plan(norm, "bnn")


class Pair(nn.Module):  # a network of two inputs
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.linear, self.bn, self.spare = (
            nn.Linear(4, channels),
            nn.BatchNorm1d(channels),
            nn.BatchNorm1d(64),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bn(self.linear(x + y))


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Flatten()
    ).eval()


ROWS = torch.ones(2, 4), torch.ones(2, 4)


@pytest.mark.parametrize(
    ("build", "arguments", "layer"),
    [
        (pooled, {"to": "gn", "input_size": SIZE}, "2"),
        (pooled, {"to": "gn", "groups": 4, "input_size": SIZE}, None),
        (pooled, {"to": "frn-tlu", "input_size": SIZE}, "2"),
        (pooled, {"to": "evonorm-s0", "input_size": SIZE}, "2"),
        (Pair, {"to": "gn"}, "bn"),
        (Pair, {"to": "gn", "inputs": {"x": ROWS[0], "y": ROWS[1]}}, "bn"),
        (Pair, {"to": "gn", "inputs": ROWS, "only": "spare", "groups": 64}, "spare"),
        (Pair, {"to": "ln"}, None),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(8)),
            {"to": "gn", "inputs": torch.ones(2, 8, 4)},
            None,
        ),
    ],
)
def test_sets_of_one_are_refused(
    build: Callable[[], nn.Module], arguments: dict[str, Any], layer: str | None
) -> None:
    if layer is None:
        retrofit.convert(build(), **arguments, check=False)
        return
    model = build()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(
        RetrofitError, match=rf"every group of {layer} would hold a single value.*`skip`"
    ):
        retrofit.convert(model, **arguments, check=False)
    assert [type(module) for module in model.modules()] == classes


def test_what_is_never_called_is_noted_without_a_check() -> None:
    _, report = retrofit.convert(Pair(), "bnn", inputs=ROWS, check=False)
    assert any(
        "not called when the network was run: 1 converted layer (spare)" in note
        for note in report.notes
    )
    assert any("training or other inputs may call such layers" in note for note in report.notes)
    assert not any(note.startswith("not checked") for note in report.notes)


def test_tensors_that_are_computed_are_named_with_what_makes_them_permanent() -> None:
    pruned = prune.random_unstructured(BatchNormAct2d(8), "weight", 0.5)
    parametrized = parametrize.register_parametrization(nn.BatchNorm2d(8), "bias", nn.Softplus())
    *rows, other = retrofit.plan(
        nn.Sequential(pruned, parametrized, nn.BatchNorm2d(8)), "frozen"
    ).layers
    assert [row.status for row in (*rows, other)] == ["unsupported", "unsupported", "converted"]
    for row, name in zip(rows, ("weight", "bias"), strict=True):
        assert re.search(rf"{name} is computed .*prune.remove.*remove_parametrizations", row.reason)


class UnitNorm(nn.Module):  # a parametrization with a buffer, named as a layer might be
    def __init__(self, size: float) -> None:
        super().__init__()
        self.register_buffer("size", torch.tensor(size))

    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm() * self.size


def test_what_computes_a_weight_is_no_normalization_layer() -> None:
    spectral = parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))
    unit = nn.Conv2d(8, 8, 3)
    parametrize.register_parametrization(unit, "weight", UnitNorm(2.0))
    model = nn.Sequential(spectral, nn.BatchNorm2d(8), nn.ReLU(), unit).eval()
    plan = retrofit.plan(model, "ln", ws=True)
    assert [(row.name, row.status) for row in plan.layers] == [("1", "converted")]
    with pytest.raises(RetrofitError, match="no normalization layer at all"):
        retrofit.plan(nn.Sequential(spectral), "ln")


@pytest.mark.parametrize("place", ["wrapper", "inside", "in place"])
def test_compiled_networks_follow_the_conversion(place: str) -> None:
    net: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    given, x = net, torch.randn(2, *SIZE)
    if place == "in place":
        net.compile(backend="eager")
    else:
        given = torch.compile(net, backend="eager")
    given(x)
    model, report = retrofit.convert(
        given if place == "wrapper" else nn.Sequential(given), "gn", input_size=SIZE
    )
    assert report.check.passed
    retrofit.set_strength(model, 1.0)
    torch.testing.assert_close(model(x), nn.Sequential(*net)(x))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize(
    "wrap",
    [type(nn.parallel.DistributedDataParallel.__name__, (nn.Sequential,), {}), torch.jit.script],
)
def test_what_keeps_parameters_or_code_elsewhere_is_refused(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    made = retrofit.plan(nn.Sequential(net), "gn")
    for function in (retrofit.plan, retrofit.convert, lambda model, _: apply(made, model)):
        with pytest.raises(RetrofitError, match="convert the network first"):
            function(nn.Sequential(wrap(net)), "ln-pn")
    assert type(net[1]) is nn.BatchNorm2d


class Fusing(nn.Module):  # a block that can fuse its norm, as ultralytics' and timm's can
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) if hasattr(self, "bn") else self.conv(x)

    def fuse(self) -> None:
        self.conv = fuse_conv_bn_eval(self.conv.eval(), self.bn.eval())
        del self.bn

    reparameterize = switch_to_deploy = fuse_model = fuse


@pytest.mark.parametrize("to", ["frozen", "bnn"])
def test_only_what_is_no_affine_map_refuses_to_fuse(to: str) -> None:
    model, report = retrofit.convert(nn.Sequential(Fusing()).eval(), to, input_size=SIZE)
    x = torch.randn(2, *SIZE)
    expected = model(x)
    assert any("re-parameterise" in note for note in report.notes) is (to != "frozen")
    if to != "frozen":
        block = copy.deepcopy(model[0])
        for fuse in (
            model[0].fuse,
            block.fuse,
            block.reparameterize,
            block.switch_to_deploy,
            block.fuse_model,
        ):
            with pytest.raises(RetrofitError, match="re-parameterise before converting"):
                fuse()
        model = retrofit.plain(model, SIZE)
    model[0].fuse()
    torch.testing.assert_close(model(x), expected)


class Bypassing(nn.Module):
    """Calls its norm in training alone; in evaluation it computes BatchNorm by itself."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.bn = nn.BatchNorm2d(8)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        x, bn = self.first(x), self.bn
        if self.training:
            return bn(x)
        if not self.by_hand:
            statistics = bn.running_mean, bn.running_var
            return functional.batch_norm(x, *statistics, bn.weight, bn.bias, eps=bn.eps)
        scale = bn.weight * (bn.running_var + bn.eps).rsqrt()
        shift = bn.bias - bn.running_mean * scale
        return x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("to", ["bnn", "dbn", "ln", "evonorm-s0"])
def test_a_network_that_evaluates_without_calling_its_norm_is_refused(
    to: str, by_hand: bool
) -> None:
    model = Bypassing(by_hand)
    with pytest.raises(
        RetrofitError, match=r"tensors of bn and .* this code takes \w+ for a Batch"
    ):
        retrofit.convert(model, to, input_size=SIZE, check=False)
    assert type(model.bn) is nn.BatchNorm2d
    retrofit.convert(model, to, skip="^bn", input_size=SIZE)


class Reading(nn.Module):
    """Multiplies by the parameters of a norm that it does not call, and asks another for a type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.read = nn.BatchNorm2d(8)
        self.asked = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.asked.weight.dtype))
        gamma, beta = self.read.parameters()
        return x * gamma.view(-1, 1, 1) + beta.view(-1, 1, 1)


def test_a_norm_whose_parameters_are_read_in_place_of_a_call_is_found_however_they_are_read() -> (
    None
):
    with pytest.raises(RetrofitError, match="with the tensors of read and does not call it"):
        retrofit.convert(Reading(), "bnn", input_size=SIZE)
    retrofit.convert(Reading(), "bnn", skip="^read", input_size=SIZE)


@pytest.mark.parametrize("by_hand", [False, True])
def test_constants_may_be_read_in_place_of_calling_their_layer(by_hand: bool) -> None:
    model, _ = retrofit.convert(Bypassing(by_hand), "frozen", input_size=SIZE)
    x = torch.randn(2, *SIZE)
    torch.testing.assert_close(model.eval()(x), model.train()(x))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("to", ["frozen", "ln", "bnn", "evonorm-s0"])
def test_numbers_in_which_torch_computes_nothing_are_named(to: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).to(dtype), nn.ReLU())
    with pytest.raises(RetrofitError, match=f"its weight is {dtype}, in which torch computes"):
        retrofit.convert(model, to, input_size=SIZE)


class Functional(nn.Module):  # normalization without layers
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.layer_norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.batch_norm(
            self.weight.view(1, 8, -1), None, None, training=True
        ).view_as(self.weight)
        x = functional.conv2d(x, weight)
        return self.layer_norm(self.normalize(x).flatten(2).mT)

    def normalize(self, x: Tensor) -> Tensor:  # call no F.layer_norm(x)
        return sum((torch.nn.functional.instance_norm(x) for _ in range(2)), in_groups(x, 2))


def test_normalization_that_is_called_as_a_function_is_named() -> None:
    _, report = retrofit.convert(nn.Sequential(Functional()), "lnn", input_size=SIZE)
    said = [note for note in report.notes if "as a function" in note]
    assert sorted(note.split()[0] for note in said) == ["group_norm", "instance_norm"]
    assert all("in Functional (0)" in note for note in said)
    model = Functional()
    del model.layer_norm
    with pytest.raises(
        RetrofitError, match=r"no normalization layer at all; .*group_norm is called as a function"
    ):
        retrofit.plan(model, "bnn")
