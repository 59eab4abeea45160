"""What a layer of every kind owes: types, memory formats, torch.compile, torch.func, traces,
torch's defaults.
"""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from retrofit import layers, set_strength
from retrofit.errors import RetrofitError
from retrofit.layers.strength import StrengthMixin
from tests.layers.cases import LAYERS, assert_same_gradient, build, on, statistics

# torch's own rules of forward mode are scripts, and it calls scripts and traces deprecated
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning"
)
ALL = pytest.mark.parametrize("name", LAYERS)


def test_no_module_hides_a_public_name() -> None:
    assert [name for name in layers.__all__ if not callable(getattr(layers, name))] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", [name for name in LAYERS if name not in ("standardized weights", "proxy prelu")]
)
def test_half_precision_in_and_out_float32_inside(name: str, dtype: torch.dtype) -> None:
    layer, x = build(name, 1.0)
    low, wide = (x.to(dtype).to(kind).requires_grad_() for kind in (dtype, torch.float32))
    # One rounding, at the end; the two may come from different kernels. An activation rounds by
    # itself.
    rounded = name.startswith("proxy")
    rtol, atol = (0.01, 0.02) if rounded else (torch.finfo(dtype).eps, 1e-6)
    for training in (True, False):
        layer.train(training)
        out, expected = copy.deepcopy(layer)(low), copy.deepcopy(layer)(wide)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected.to(dtype), rtol=rtol, atol=atol)
    with torch.autocast("cpu", dtype):
        assert layer(low).dtype == dtype
        assert layer(wide).dtype == torch.float32
    assert copy.deepcopy(layer).to(dtype)(low).dtype == dtype
    upstream = torch.randn(out.shape).to(dtype)
    (layer(low) * upstream).sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}
    if not rounded:
        expected, *own = torch.autograd.grad(
            layer(wide), [wide, *layer.parameters()], upstream.float()
        )
        torch.testing.assert_close(low.grad, expected.to(dtype), rtol=0.02, atol=1e-3)
        torch.testing.assert_close(
            [parameter.grad for parameter in layer.parameters()], own, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("name", [name for name, (_, shape) in LAYERS.items() if len(shape) == 4])
def test_channels_last_is_kept(name: str) -> None:
    layer, x = build(name, 1.0)
    last = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    for training in (True, False):
        layer.train(training)
        out = copy.deepcopy(layer)(last)
        assert out.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(out, copy.deepcopy(layer)(x), rtol=1e-4, atol=1e-5)
    out.sin().sum().backward()
    assert last.grad.is_contiguous(memory_format=torch.channels_last)


QUICK = (
    "batch2d",
    "migrated",
    "proxy prelu",
    "proxy in place",
    "standardized weights",
    "decorrelated normal",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in LAYERS]
)
def test_compiles_whole_and_strength_recompiles_nothing(name: str) -> None:
    layer, x = build(name)
    if isinstance(layer, layers.NormalityMixin):
        layer.noise, layer.noise_kind = 0.3, "gaussian-dropout"
    reference = copy.deepcopy(layer)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for training in (True, False):
        for strength in (0.0, 0.3):
            results = []
            for module, run in ((layer, compiled), (reference, reference)):
                set_strength(module.train(training), strength)
                leaf = x.clone().requires_grad_()
                torch.manual_seed(3)
                with torch.compiler.set_stance("fail_on_recompile" if strength else "default"):
                    results += [run(leaf), leaf]
            torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-5)
            assert_same_gradient(*results, 1e-4, 1e-4)
    torch.testing.assert_close(
        *([p.grad for p in module.parameters()] for module in (layer, reference)),
        rtol=1e-4,
        atol=1e-4,
    )
    torch.compiler.reset()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in LAYERS]
)
def test_an_exported_layer_trains_as_it_does(name: str, strict: bool) -> None:
    layer, x = build(name, training=True)
    # Of a root whose buffers are None in part, torch.export loses count
    layer = nn.Sequential(layer)
    exported = torch.export.export(copy.deepcopy(layer), (x,), strict=strict)
    if not name.startswith("decorrelated"):
        # torch cannot save the program of what turns autocast off
        torch.export.save(exported, io.BytesIO())
    program = exported.module()
    results = []
    for module in (program, layer):
        leaf = x.clone().requires_grad_()
        results += [module(leaf), leaf]
    assert_same_gradient(*results, 1e-4, 1e-4)
    gradients, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (program, layer))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(statistics(program), statistics(layer))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in LAYERS]
)
def test_an_export_that_sees_the_buffer_and_not_the_property(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does that of torch 2.7 with strict=True: the strength is in the buffer in other units."""
    layer, x = build(name, training=training)
    expected = copy.deepcopy(layer)(x)
    monkeypatch.delattr(StrengthMixin, "strength")
    # Of a root whose buffers are None in part, torch.export loses count
    program = torch.export.export(nn.Sequential(layer), (x,), strict=False).module()
    torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)


@ALL
def test_a_layer_is_one_call_to_a_trace(name: str) -> None:
    layer, x = build(name)
    model = nn.Sequential(nn.Identity(), layer).eval()
    traced = fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op != "placeholder"][:-1]
    assert all(str(target).startswith(("0", "1")) for target in calls)
    steps = list(layer) if isinstance(layer, nn.Sequential) else [layer]
    assert {traced.get_submodule(str(target)) for target in calls} >= set(steps)
    torch.testing.assert_close(traced(x), model(x))


def test_script_is_refused_in_one_line() -> None:
    with pytest.raises(
        RetrofitError, match=r"torch.jit.script cannot compile FrozenBatchNorm; use torch.jit.trace"
    ):
        torch.jit.script(nn.Sequential(layers.FrozenBatchNorm(8)))


def power(layer: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """A loss of a layer's parameters and input."""
    return lambda parameters, x: functional_call(layer, parameters, (x,)).square().sum()


def parameters_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in layer.named_parameters()}


def by_backward(layer: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    return {name: value.grad for name, value in layer.named_parameters()}, x.grad


@pytest.mark.parametrize("strength", [0.0, 0.6])
@ALL
def test_gradients_are_those_of_backward(name: str, strength: float) -> None:
    layer, x = build(name, strength)
    found = grad(power(layer), argnums=(0, 1))(parameters_of(layer), x)
    torch.testing.assert_close(found, by_backward(layer, x), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "batch1d"])
def test_per_sample_gradients_are_a_loops(name: str) -> None:
    layer, x = build(name)
    found = vmap(grad(power(layer)), (None, 0))(parameters_of(layer), x.unsqueeze(1))
    for i, sample in enumerate(x):
        wanted, _ = by_backward(layer, sample.unsqueeze(0))
        torch.testing.assert_close(
            {key: value[i] for key, value in found.items()}, wanted, rtol=1e-4, atol=1e-5
        )


@ALL
def test_forward_mode_and_jacobians(name: str) -> None:
    layer, x = build(name)
    tangent = torch.randn_like(x)
    out, moved = jvp(layer, (x,), (tangent,))
    torch.testing.assert_close(out, layer(x), rtol=1e-4, atol=1e-5)
    jacobian = jacrev(layer)(x)
    torch.testing.assert_close(
        moved, torch.tensordot(jacobian, tangent, dims=x.ndim), rtol=1e-3, atol=1e-4
    )
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(dual, moved)


@pytest.mark.parametrize("name", ["layer", "group", "migrated", "decorrelated"])
def test_torch_func_has_second_derivatives(name: str) -> None:
    layer, x = (made.double() for made in build(name))
    small = x[:1]

    def along(step: Tensor) -> Tensor:
        return layer(small * (1 + step)).pow(3).sum()

    step, h = torch.zeros((), dtype=torch.float64), 1e-4
    numeric = (along(step + h) - 2 * along(step) + along(step - h)) / h**2
    torch.testing.assert_close(hessian(along)(step), numeric.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["layer", "group", "instance2d", "migrated", "decorrelated"])
def test_a_gradient_penalty_is_refused_rather_than_dropped(name: str) -> None:
    layer, x = build(name, training=True)
    x.requires_grad_()
    out = layer(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (out + gradient.square().sum()).backward()


@ALL
def test_ensembles_of_layers(name: str) -> None:
    members = [build(name, strength)[0] for strength in (0.0, 0.6)]
    _, x = build(name)
    state = stack_module_state(members)
    blank = copy.deepcopy(members[0])
    if name.startswith("proxy"):  # which holds its norm by a reference: the copy's
        blank[1].follow(blank[0])
    found = vmap(lambda *tensors: functional_call(blank, tensors, (x,)))(*state)
    torch.testing.assert_close(
        found, torch.stack([member(x) for member in members]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "name", [name for name in LAYERS if name != "proxy prelu"]
)  # a trace has names of its own
def test_traces_hold_the_strength(name: str, tmp_path: Any) -> None:
    layer, x = build(name, 0.0)
    if name.startswith("batch"):
        layer.running_lambda.fill_(1.0)  # where the layer's answer is torch's
    with torch.no_grad():
        traced = torch.jit.trace(layer, (x,), check_trace=False)
        traced.save(tmp_path / "traced.pt")
        traced = torch.jit.load(tmp_path / "traced.pt")
    other = LAYERS[name][0]()
    other.load_state_dict(layer.state_dict())
    if name.startswith("batch"):
        other.running_lambda.fill_(0.3)
    set_strength(other.eval(), 1.0)
    traced.load_state_dict(other.state_dict())
    torch.testing.assert_close(traced(x), other(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "other", "setting"),
    [
        (layers.GroupNormalNorm(2, 8, alpha=0.5), layers.GroupNormalNorm(2, 8), "alpha"),
        (layers.MigratedGroupNorm(4, 8), layers.MigratedGroupNorm(2, 8), "num_groups"),
        (layers.ProxyNorm(nn.SiLU(), 8), layers.ProxyNorm(nn.SiLU(), 8, scale=False), "scale"),
    ],
    ids=["alpha", "groups", "scale"],
)
def test_the_state_of_a_trace_holds_the_settings(
    layer: nn.Module, other: nn.Module, setting: str
) -> None:
    """A trace keeps the buffers, and none of the methods that fill them in when a layer is
    saved.
    """
    with torch.no_grad():
        traced = torch.jit.trace(layer.eval(), (torch.randn(3, 8, 4, 5),), check_trace=False)
    other.load_state_dict(traced.state_dict())
    assert getattr(other, setting) == getattr(layer, setting)


NAN = float("nan")
OUT_OF_RANGE = {
    partial(layers.BatchNormalNorm2d, 6): [
        *({"noise": -0.1}, {"noise": NAN}, {"noise_kind": "none"}, {"noise_kind": ""}),
        *({"strength": 1.5}, {"alpha": 1.5}, {"alpha": NAN}, {"alpha": -0.1}),
    ],
    partial(layers.DecorrelatedBatchNorm2d, 12): [{"group_size": 0}, {"strength": 2.0}],
    partial(layers.MigratedGroupNorm, num_channels=6): [{"num_groups": 0}, {"num_groups": 4}],
    partial(layers.MigratedGroupNorm, 2, 6): [{"strength": -0.1}],
    partial(layers.ProxyNorm, torch.relu, 5): [
        *({"strength": 1.5}, {"eps": -1.0}, {"samples": 0}, {"channel_dim": 2}),
        *({"norm": nn.BatchNorm1d(4)}, {"norm": nn.LayerNorm((5, 2))}),
    ],
    partial(layers.WeightStandardizedConv2d, 4, 4, 3): [{"strength": 2.0}, {"eps": -1.0}],
}


@pytest.mark.parametrize(
    ("make", "options"),
    [(make, options) for make, refused in OUT_OF_RANGE.items() for options in refused],
)
def test_options_out_of_range_are_named(
    make: Callable[..., nn.Module], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make(**options)


def trained(name: str) -> dict[str, Tensor]:
    """Train two steps and evaluate; the outputs, the gradients and the state afterwards."""
    make, shape = LAYERS[name]
    x = (
        0.7
        * torch.randn(
            shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32, device="cpu"
        )
    ).exp()
    torch.manual_seed(5)
    layer = make(dtype=torch.float32, device="cpu")
    if isinstance(layer, layers.NormalityMixin):
        layer.noise = 0.5
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(
                torch.randn(parameter.shape, dtype=torch.float32, device="cpu"), alpha=0.3
            )
    found = {}
    for step in range(2):
        x.requires_grad_().grad = None
        out = layer(x)
        out.backward(torch.randn(out.shape, dtype=torch.float32, device="cpu"))
        found |= {f"out {step}": out.detach(), f"grad {step}": x.grad}
    found |= {
        f"gradient of {n}": p.grad.clone()
        for n, p in layer.named_parameters()
        if p.grad is not None
    }
    with torch.no_grad():
        return (
            found
            | {"evaluated": layer.eval()(x)}
            | {f"state {n}": v.clone() for n, v in layer.state_dict().items()}
        )


@on("eager", "cpp")
@ALL
def test_layers_do_not_follow_torchs_defaults(name: str) -> None:
    wanted, before = trained(name), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # which rounds whatever follows it
    try:
        with torch.device("meta"):  # which has no values
            got = trained(name)
    finally:
        torch.set_default_dtype(before)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key


def test_groups_of_one_value_are_refused_as_by_the_source() -> None:
    x = torch.randn(1, 4)
    for layer in (nn.GroupNorm(4, 4), layers.GroupNormalNorm(4, 4)):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(x)


def test_an_instance_norm_that_tracks_without_statistics_says_so() -> None:
    layer = layers.InstanceNormalNorm2d(3).eval()
    layer.track_running_stats = True
    with pytest.raises(ValueError, match="running statistics are needed"):
        layer(torch.zeros(2, 3, 4, 4))
