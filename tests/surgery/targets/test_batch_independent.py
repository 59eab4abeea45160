"""BatchNorm to GroupNorm and LayerNorm with migrated statistics, and ProxyNorm on the activations
that follow.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrofit
from retrofit import RetrofitError, UsageError
from retrofit.layers import ProxyNorm
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery import plan
from retrofit.surgery.plan_and_report import EditRow
from tests.graph.blocks import ChannelsLast, Loop, TwoConsumers
from tests.surgery.networks import Shared, trained


def proxies(model: nn.Module) -> list[ProxyNorm]:
    return [module for module in model.modules() if isinstance(module, ProxyNorm)]


@pytest.mark.parametrize(
    ("build", "count"), [(lambda: timm.create_model("efficientnet_lite0"), 33), (Shared, 3)]
)
def test_identical_at_zero_and_trains(build: Callable[[], nn.Module], count: int) -> None:
    model = trained(build())
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    model, report = retrofit.convert(model, "gn-pn")
    assert report.plan.counts["converted"] == len(report.plan.layers)
    assert (
        sum(row.status == "converted" for row in report.plan.edits) == len(proxies(model)) == count
    )
    assert all(row.reason for row in report.plan.edits if row.status == "left")
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    retrofit.set_strength(model, 1.0)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    model.train()(x).square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_only_the_last_activation_before_pooling_keeps_its_scale() -> None:
    model, report = retrofit.convert(timm.create_model("test_efficientnet"), "ln-pn", check=False)
    unscaled = [row.name for row in report.plan.edits if row.options.get("scale") is False]
    assert unscaled == ["bn2.act"]
    assert not model.bn2.act.scale


@pytest.mark.parametrize("to", ["ln", "ln-pn"])
def test_strength_one_is_group_norm_of_the_standardized_input(to: str) -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU())).double()
    with torch.no_grad():
        model[1].running_var[:3] *= 1e-6  # nearly dead channels, where eps counts
    conv, bn = copy.deepcopy(model[:2])
    retrofit.convert(model, to, strength=1.0)
    x = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    standardized = F.batch_norm(
        conv(x), bn.running_mean, bn.running_var, None, None, False, 0.0, bn.eps
    )
    gain = model[1].gain  # how much each channel counts in the moments
    eps = (gain.square() * bn.eps / (bn.running_var + bn.eps)).mean().item()
    expected = F.silu(
        F.group_norm(standardized * gain.view(-1, 1, 1), 1, bn.weight / gain, bn.bias, eps)
    )
    torch.testing.assert_close(
        model(x), expected, rtol=1e-9, atol=1e-9
    )  # restored, so PN changes nothing yet


def test_groups_are_the_largest_divisor_and_adjustments_are_reported() -> None:
    model = nn.Sequential(nn.BatchNorm2d(24), nn.BatchNorm2d(7), nn.BatchNorm2d(12))

    def groups(to: str, **options: Any) -> list[int | None]:
        return [row.options.get("num_groups") for row in plan(model, to, **options).layers]

    assert groups("gn") == [8, 7, 6]
    assert [row.reason for row in plan(model, "gn").layers][::2] == [
        "",
        "6 groups: 8 do not divide 12 channels",
    ]
    assert groups("gn", groups=4) == [4, 1, 4]
    assert groups("ln") == [1, 1, 1]
    assert groups("gn", group_channels=12, skip="1") == [2, None, 1]
    with pytest.raises(
        UsageError, match="`group_channels=12` does not divide the 7 channels of 1; name a divisor"
    ):
        plan(model, "gn", group_channels=12)


def test_auto_groups_follow_the_data() -> None:
    model = nn.Sequential(nn.BatchNorm2d(16)).eval()
    alike = torch.randn(64, 16, 40, 40)
    (settled,) = plan(model, "gn", groups="auto", calibrate=[alike[:32], alike[32:]]).layers
    assert settled.options["num_groups"] == 16
    rough = alike * torch.rand(64, 16, 1, 1) * 3
    settled = plan(model, "gn", groups="auto", calibrate=[rough]).layers[0]
    assert settled.options["num_groups"] < 16
    assert re.fullmatch(r"with 1 group its output changes by \d+%", settled.reason)


def test_paper_mode_for_training_from_scratch() -> None:
    model, report = retrofit.convert(
        timm.create_model("test_efficientnet"), "gn-pn", pn_restore=False
    )
    assert all(p.restore_shift is None and p.proxy_bias is not None for p in proxies(model))
    last = [row.name for row in report.plan.layers if row.options.get("bias") is False]
    assert last == ["blocks.1.0.bn2", "blocks.2.0.bn2", "blocks.3.0.bn3", "blocks.4.0.bn3"]
    assert all(model.get_submodule(name).bias is None for name in last)
    x = torch.randn(2, 3, 64, 64)
    source = timm.create_model("test_efficientnet").eval()
    source.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model.eval()(x), source(x), rtol=1e-4, atol=1e-5)
    nn.init.ones_(source.blocks[1][0].bn2.bias)  # trained: no shift to leave out
    model, report = retrofit.convert(source, "gn-pn", pn_restore=False)
    assert [row.name for row in report.plan.layers if row.options.get("bias") is False] == last[1:]


def test_parameters_are_counted_and_may_be_left_out() -> None:
    _, report = retrofit.convert(Shared(), "gn-pn", pn_params=False)
    assert report.params_after == report.params_before
    _, report = retrofit.convert(Shared(), "gn-pn")
    assert report.params_after == report.params_before + 48
    assert any(note.startswith("ProxyNorm adds 48 parameters") for note in report.notes)


@pytest.mark.parametrize(
    ("build", "proxied", "kept"),
    [
        (lambda: timm.create_model("test_efficientnet_gn", num_classes=4), 9, 4),
        (
            lambda: timm.models.resnetv2.ResNetV2(
                [1, 1], [128, 128], num_classes=4, stem_type="fixed"
            ),
            7,
            0,
        ),
    ],
)
def test_group_norm_that_is_there_stays(
    build: Callable[[], nn.Module], proxied: int, kept: int
) -> None:
    model = trained(build())
    norms = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.GroupNorm)
    }
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    model, report = retrofit.convert(model, "gn-pn", input_size=(3, 32, 32))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert report.plan.counts == {"converted": proxied, "kept": kept, "unsupported": 0}
    assert len(proxies(model)) == proxied
    assert {
        name: module for name, module in model.named_modules() if isinstance(module, nn.GroupNorm)
    } == norms


def test_proxy_norm_follows_a_norm_that_is_converted_again() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    retrofit.convert(model, "gn-pn", input_size=(3, 8, 8))
    _, report = retrofit.convert(model, "gnn", input_size=(3, 8, 8))
    assert model[2].norm is model[1]
    assert any(note.startswith("1 layer converted before: their") for note in report.notes)


def test_groups_of_a_group_norm_are_not_asked_for() -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU())
    for options in ({"groups": 2}, {"group_channels": 4}, {"groups": "auto", "calibrate": []}):
        with pytest.raises(UsageError, match="whose groups stay"):
            plan(grouped, "gn-pn", **options)
    both = nn.Sequential(grouped, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    assert plan(both, "gn-pn", groups=2).counts["converted"] == 2


def test_group_norm_of_one_group_alone_suits_ln_pn() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 8, affine=False), nn.ReLU())
    steps = nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
    model[0]._parameters = {
        "steps": steps,
        **model[0]._parameters,
    }  # which says nothing of the proxy's type
    report: Any = retrofit.convert(model, "ln-pn", input_size=(3, 8, 8))[1]
    assert report.check.passed
    assert isinstance(model[2], ProxyNorm)
    with pytest.raises(RetrofitError, match="its 2 groups stay as they are; use `to='gn-pn'`"):
        plan(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()), "ln-pn")


class DataDependent(
    nn.Module
):  # a loop over the data, and functional activations: no trace shows what follows a norm
    def __init__(self, *block: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.block = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Sequential(*block),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.stack(list(F.relu(self.bn(self.conv(x))))))


def test_a_proxy_has_the_type_of_its_norm_even_without_gamma() -> None:
    class Mixed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                dtype = torch.float64 if isinstance(layer, nn.Conv2d) else torch.float32
                x = layer(x.to(dtype))
            return x

    source = Mixed(nn.Conv2d(3, 8, 3).double(), nn.BatchNorm2d(8, affine=False), nn.ReLU())
    model, _ = retrofit.convert(source.eval(), "gn-pn", inputs=torch.randn(2, 3, 8, 8))
    (proxy,) = (layer for layer in model.modules() if isinstance(layer, ProxyNorm))
    assert {tensor.dtype for tensor in proxy.parameters()} == {torch.float32}


def test_proxying_nothing_is_refused() -> None:
    for model, message in (
        (
            DataDependent(),
            "ln-pn would convert no activation.*what follows its norm is unknown.*; use gn or ln, ",
        ),
        (nn.Sequential(nn.BatchNorm2d(8)), "none follows a norm"),
        (TwoConsumers(), "output used 2 times"),
    ):
        with pytest.raises(RetrofitError, match=message):
            plan(model, "ln-pn")


class ManyInputs(nn.Sequential):
    """Takes any number of inputs, as torchrl's MLP does."""

    def forward(self, *inputs: Tensor) -> Tensor:
        if len(inputs) > 1:
            inputs = (torch.cat(inputs, -1),)
        return super().forward(*inputs)


class Untraceable(nn.Module):
    """Applies a function to what an untraceable loop makes of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.relu(row) for row in self.norm(x)])


def test_the_cause_is_said_where_nothing_could_be_traced() -> None:
    model = nn.Sequential(*(Untraceable() for _ in range(5)))
    with pytest.raises(RetrofitError) as refusal:
        plan(model, "ln-pn")
    said = "Sequential, Untraceable 0, Untraceable 1 and 3 more cannot be traced (TraceError: "
    assert said in str(refusal.value)
    assert "none follows" not in str(refusal.value)


def test_a_method_of_inputs_alone_is_traced_with_one() -> None:
    model = ManyInputs(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    assert [row.status for row in plan(model, "ln-pn").edits] == ["converted"]


@pytest.mark.parametrize("moves", ["permute", "reshape"])
def test_a_step_that_may_move_channels_is_named(moves: str) -> None:
    norm = ChannelsLast(6, moves)
    with pytest.raises(RetrofitError, match=r"behind a norm, past steps that"):
        plan(nn.Sequential(norm, nn.ReLU()), "gn-pn")
    with pytest.raises(RetrofitError, match=r"no norm before it: fed by Conv1d 0\)"):
        plan(nn.Sequential(nn.Conv1d(4, 6, 1), nn.Flatten(), nn.ReLU(), norm), "gn-pn")


def test_a_loop_over_sequences_that_end_in_a_norm() -> None:
    torch.manual_seed(0)
    model, x = Loop().eval(), torch.randn(2, 4, 9)
    _, report = retrofit.convert(model, "ln-pn", inputs=x)
    assert report.check is not None
    assert [(row.norm, row.status) for row in report.plan.edits] == [
        ("convolutions.0.1", "converted"),
        ("convolutions.1.1", "converted"),
    ]
    retrofit.set_strength(model, 1.0)
    proxies = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    with torch.no_grad():
        expected = x
        for sequence, proxy in zip(model.convolutions, [*proxies, nn.Identity()], strict=True):
            expected = proxy(sequence(expected))
        torch.testing.assert_close(model(x), expected)


def test_what_is_left_is_said_first() -> None:
    model = DataDependent(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
    _, report = retrofit.convert(model, "gn-pn")
    said = "1 of 2 activations are converted, 1 are left (1: what follows its norm is unknown"
    assert report.notes[0].startswith(said)
    assert [(row.norm, row.name) for row in report.plan.edits if row.status == "left"] == [
        ("bn", "after bn")
    ]
    assert report.to_dict()["activations"]


def test_auto_groups_measure_only_what_is_to_be_converted() -> None:
    class WithHead(nn.Sequential):  # its second norm is called in training alone
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    model = WithHead(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    options: dict[str, Any] = {"groups": "auto", "calibrate": [torch.randn(4, 8, 9, 9)]}
    with pytest.raises(RetrofitError, match="never calls 1"):
        plan(model, "gn", **options)
    assert [row.status for row in plan(model, "gn", **options, skip="1").layers] == [
        "converted",
        "kept",
    ]


def convolutions(name: str, **options: object) -> dict[str, EditRow]:
    with torch.device("meta"):
        model = timm.create_model(name)
    return {
        row.name: row
        for row in plan(model, "gn", ws=True, **options).edits
        if row.kind == "convolution"
    }


def test_all_of_resnet_50_v2_and_a_scale_at_the_end_of_every_block() -> None:
    rows = convolutions("resnetv2_50")
    assert {name for name, row in rows.items() if row.status == "left"} == {"head.fc"}
    assert sum(row.status == "converted" for row in rows.values()) == 53
    ends = {name for name in rows if re.fullmatch(r"stages\.\d\.blocks\.\d\.conv3", name)}
    assert {name for name, row in rows.items() if row.options.get("scale")} == ends
    assert len(ends) == 16


def test_squeeze_excites_are_left_and_norms_make_a_scale_needless() -> None:
    rows = convolutions("seresnet50")
    left = {name: row.reason for name, row in rows.items() if row.status == "left"}
    assert left == {name: "inside a squeeze-excite" for name in rows if ".se." in name}
    assert not any(row.options.get("scale") for row in rows.values())


class Residual(nn.Module):
    """Two branches, the second with as many convolutions as `shortcut` says, and a convolution that
    is read.
    """

    def __init__(self, shortcut: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.past = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(shortcut)))
        self.read = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).relu()
        z = self.two(self.one(y)) + self.past(y)
        return nn.functional.conv2d(self.read(z), self.read.weight)


def test_the_longer_branch_ends_a_block_and_equal_ones_are_listed() -> None:
    for shortcut, ends, unknown in (
        (0, {"two"}, set()),
        (1, {"two"}, set()),
        (2, set(), {"two", "past.1"}),
    ):
        model, report = retrofit.convert(
            Residual(shortcut), "gn", ws=True, input_size=(4, 8, 8), groups=2
        )
        rows = {row.name: row for row in report.plan.edits}
        assert {name for name, row in rows.items() if row.options.get("scale")} == ends
        assert {
            name for name, row in rows.items() if "unknown whether it ends a block" in row.reason
        } == unknown
        assert rows["read"].reason == "its parameters are read elsewhere too"
        assert type(model.read) is nn.Conv2d
        assert any("convolutions are standardized" in note for note in report.notes)


def test_whether_what_comes_last_ends_a_block_is_unknown() -> None:
    (row,) = plan(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)), "gn", ws=True).edits
    assert "unknown whether it ends a block" in row.reason


def test_convolutions_that_cannot_be_standardized() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(4), timm.layers.Conv2dSame(4, 4, 3), nn.Conv2d(4, 4, 1, groups=4), nn.Tanh()
    )
    model[3].never_called = nn.Conv2d(4, 4, 3)
    reasons = {row.name: row.reason for row in plan(model, "gn", ws=True).edits}
    assert reasons == {
        "1": "not one of torch's own convolutions",
        "2": "each output channel has a single weight",
        "3.never_called": "no trace shows where it is called",
    }


def test_only_the_blocks_whose_norms_are_converted() -> None:
    rows = convolutions("resnet18", only="layer4")
    done = [name for name, row in rows.items() if row.status == "converted"]
    assert done == [name for name in rows if re.fullmatch(r"layer4.*(conv\d|downsample.0)", name)]
    assert len(done) == 5
    assert convolutions("resnet18", only="^bn1$")["conv1"].status == "converted"


@pytest.mark.parametrize("restore", [True, False])
def test_it_starts_as_the_source_and_its_scale_trains(restore: bool) -> None:
    model = Residual(0)
    expected_std = model.two.weight.detach().flatten(1).std(1, correction=0)
    x = torch.randn(2, 4, 8, 8)
    source = model.eval()(x)
    retrofit.convert(
        model, "gn", ws=True, groups=2, pn_restore=None if restore else False, check=False
    )
    torch.testing.assert_close(model(x), source, rtol=1e-4, atol=1e-5)
    retrofit.set_strength(model, 1.0)
    scale = model.two.scale
    torch.testing.assert_close(
        scale.data, torch.ones(4) if restore else expected_std, rtol=1e-3, atol=1e-5
    )
    model(x).square().sum().backward()
    assert scale.grad.abs().min() > 0
    plain = retrofit.plain(model, inputs=x)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, WeightStandardization) for module in plain.modules())
