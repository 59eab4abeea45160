"""BatchNorm to GroupNorm and LayerNorm with migrated statistics, and ProxyNorm on the activations that follow."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import retrofit
from retrofit import RetrofitError, UsageError
from retrofit.layers import ProxyNorm
from retrofit.surgery import Plan, apply, plan

TV = torchvision.models


def trained(model: nn.Module) -> nn.Module:
    """Give statistics and affines values that training could have left there."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator) * 0.2)
            module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
            if module.weight is not None:
                module.weight.data.copy_(torch.rand(module.num_features, generator=generator) * 0.5 + 0.5)
                module.bias.data.copy_(torch.randn(module.num_features, generator=generator) * 0.2)
    return model.eval()


def first(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    return first(next(iter(out.values())) if isinstance(out, dict) else out[0])


class Functional(nn.Module):
    """Functional activations, one after the norm and one after an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.bn(self.conv(x)))
        return F.relu(y + self.bn2(self.conv2(y)))


class Shared(nn.Module):
    """One in-place activation for both norms, and for the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.bn2 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        z = self.relu(self.bn2(y * 2 - 1))
        return self.relu(y - z)


class TwoConsumers(nn.Module):
    """The norm's output is used beside its activation: no direct site."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return self.act(y) + y


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int | None]] = {
    # name: how to build it, image side, activations that must be proxied (None: as many as there are direct sites)
    "resnet18": (lambda: timm.create_model("resnet18"), 64, 9),
    "resnet50": (lambda: timm.create_model("resnet50"), 64, 33),
    "tv:vgg11_bn": (TV.vgg11_bn, 64, 8),
    "densenet121": (lambda: timm.create_model("densenet121"), 64, 121),
    "efficientnet_lite0": (lambda: timm.create_model("efficientnet_lite0"), 64, 33),
    "resnetv2_50 with BatchNorm": (
        lambda: timm.models.resnetv2.ResNetV2([1, 1, 1, 1], norm_layer=timm.layers.BatchNormAct2d),
        64,
        None,
    ),
    "tv:inception_v3": (lambda: TV.inception_v3(init_weights=False, aux_logits=False), 96, 94),
    "functional": (Functional, 16, 1),
    "shared": (Shared, 16, 2),
}


def proxied(made: Plan) -> list[str]:
    return [row.name for row in made.edits if row.kind == "activation" and row.status == "converted"]


LARGE = ("resnet50", "tv:vgg11_bn", "densenet121", "tv:inception_v3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in MODELS]
)
def test_identical_at_zero_and_trains(name: str) -> None:
    build, side, count = MODELS[name]
    model = trained(build())
    kind = type(model)
    x = torch.randn(2, 3, side, side)
    expected = first(model(x))
    keys = set(model.state_dict())
    model, report = retrofit.convert(model, "gn-pn")
    assert isinstance(model, kind)
    assert keys <= set(model.state_dict())
    assert report.plan.counts["converted"] == len(report.plan.layers)
    if count is not None:
        assert len(proxied(report.plan)) == count
    assert len(proxied(report.plan)) == sum(isinstance(m, ProxyNorm) for m in model.modules())
    assert all(row.reason for row in report.plan.edits if row.status == "left")
    out = first(model(x))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 * expected.abs().max().item())

    retrofit.set_strength(model, 1.0)
    assert torch.equal(first(copy.deepcopy(model)(x)), first(model(x)))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        first(model(x)).square().mean().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_which_activations_of_a_torchvision_resnet() -> None:
    model = TV.ResNet(TV.resnet.Bottleneck, [1, 1, 1, 1])
    names = {name for name, _ in model.named_modules() if name.endswith(("bn1", "bn2"))}
    _, report = retrofit.convert(model, "gn-pn")
    left = [row for row in report.plan.edits if row.status == "left"]
    assert len(left) == 4
    assert {row.reason for row in left} == {"after a residual addition"}
    assert {row.norm for row in report.plan.edits if row.status == "converted"} == names


def test_only_the_last_activation_before_pooling_keeps_its_scale() -> None:
    model, report = retrofit.convert(timm.create_model("tf_efficientnet_lite0"), "ln-pn")
    unscaled = [row.name for row in report.plan.edits if row.options.get("scale") is False]
    assert unscaled == ["bn2.act"]
    assert not model.bn2.act.scale


@pytest.mark.parametrize("to", ["ln", "ln-pn"])
def test_strength_one_is_group_norm_of_the_standardised_input(to: str) -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU())).double()
    with torch.no_grad():
        model[1].running_var[:3] *= 1e-6  # nearly dead channels, where eps counts
    conv, bn = copy.deepcopy(model[0]), copy.deepcopy(model[1])
    retrofit.convert(model, to)
    retrofit.set_strength(model, 1.0)
    x = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    standardised = F.batch_norm(conv(x), bn.running_mean, bn.running_var, None, None, False, 0.0, bn.eps)
    gain = model[1].gain  # how much each channel counts in the moments
    eps = (gain.square() * bn.eps / (bn.running_var + bn.eps)).mean().item()
    expected = F.silu(F.group_norm(standardised * gain.view(-1, 1, 1), 1, bn.weight / gain, bn.bias, eps))
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)  # restored, so PN changes nothing yet


def test_batch_independence_in_training_and_eval() -> None:
    model = retrofit.convert(trained(timm.create_model("resnet18")), "gn-pn")[0]
    retrofit.set_strength(model, 1.0)
    x = torch.randn(4, 3, 64, 64)
    for training in (True, False):
        model.train(training)
        torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("to", ["gn", "ln", "gn-pn", "ln-pn", "frozen"])
def test_gradients_of_single_images_add_up_to_those_of_the_batch(to: str, strength: float) -> None:
    torch.manual_seed(0)
    model, _ = retrofit.convert(trained(timm.create_model("resnet10t", num_classes=3)).double(), to)
    if to != "frozen":
        retrofit.set_strength(model, strength)
    x, target = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    model.train()
    F.cross_entropy(model(x), target).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for image, label in zip(x.split(1), target.split(1), strict=True):
        (F.cross_entropy(model(image), label) / len(x)).backward()
    torch.testing.assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, whole)


def test_groups_are_the_largest_divisor_and_adjustments_are_reported() -> None:
    model = nn.Sequential(nn.BatchNorm2d(24), nn.BatchNorm2d(7), nn.BatchNorm2d(12))
    rows = {row.name: row for row in plan(model, "gn").layers}
    assert [rows[name].options["num_groups"] for name in "012"] == [8, 7, 6]
    assert not rows["0"].reason
    assert rows["2"].reason == "6 groups: 8 do not divide 12 channels"
    assert [row.options["num_groups"] for row in plan(model, "gn", groups=4).layers] == [4, 1, 4]
    assert [row.options["num_groups"] for row in plan(model, "ln").layers] == [1, 1, 1]


def test_groups_by_their_channels() -> None:
    model = nn.Sequential(nn.BatchNorm2d(32), nn.BatchNorm2d(16), nn.BatchNorm2d(24))
    planned = plan(model, "gn", group_channels=16, skip=["2"])
    assert [row.options.get("num_groups") for row in planned.layers] == [2, 1, None]
    assert planned.options["group_channels"] == 16
    with pytest.raises(UsageError, match="`group_channels=16` does not divide the 24 channels of 2; name a divisor"):
        plan(model, "gn", group_channels=16)


def test_auto_groups_follow_the_data() -> None:
    """Channels that share their moments keep their output with few groups; unlike ones as well with many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(16)).eval()
    alike = torch.randn(64, 16, 40, 40)
    settled = plan(model, "gn", groups="auto", calibrate=[alike[:32], alike[32:]]).layers[0]
    assert settled.options["num_groups"] == 16
    rough = alike * torch.rand(64, 16, 1, 1) * 3
    settled = plan(model, "gn", groups="auto", calibrate=[rough]).layers[0]
    assert settled.options["num_groups"] < 16
    assert re.fullmatch(r"with 1 group its output changes by \d+%", settled.reason)


def test_layers_that_cannot_migrate_are_reported() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8, track_running_stats=False), nn.GroupNorm(2, 8))
    rows = {row.name: row for row in plan(model, "gn", source=["bn", "gn"]).layers}
    assert [rows[name].status for name in "012"] == ["converted", "unsupported", "unsupported"]
    assert "running statistics" in rows["1"].reason


def test_paper_mode_for_training_from_scratch() -> None:
    model, report = retrofit.convert(timm.create_model("efficientnet_b0"), "gn-pn", pn_restore=False)
    proxies = [m for m in model.modules() if isinstance(m, ProxyNorm)]
    assert all(p.restore_shift is None and p.proxy_bias is not None for p in proxies)
    last = [row.name for row in report.plan.layers if row.options.get("bias") is False]
    assert len(last) == 16
    assert all(model.get_submodule(name).bias is None for name in last)
    x = torch.randn(2, 3, 64, 64)
    source = timm.create_model("efficientnet_b0").eval()
    source.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model.eval()(x), source(x), rtol=1e-4, atol=1e-5)


def test_without_parameters_nothing_is_added() -> None:
    model = timm.create_model("resnet18")
    before = sum(p.numel() for p in model.parameters())
    _, report = retrofit.convert(model, "gn-pn", pn_params=False)
    assert report.params_after == before
    _, report = retrofit.convert(timm.create_model("resnet18"), "gn-pn")
    assert report.params_after == before + 2 * (64 * 5 + 128 * 2 + 256 * 2 + 512 * 2) - 2 * 64 * 2
    assert any("optimizer" in note for note in report.notes)


def test_weight_standardization_starts_at_the_identity() -> None:
    model = trained(timm.create_model("resnet18"))
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    model, report = retrofit.convert(model, "gn-pn", ws=True)
    convolutions = [row for row in report.plan.edits if row.kind == "convolution"]
    assert {row.status for row in convolutions} == {"converted"}
    assert len(convolutions) == 20
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert "convolutions" in report.to_dict()


@pytest.mark.parametrize(("name", "proxied_count", "kept"), [("resnet50_gn", 33, 20), ("resnetv2_50x1_bit", 49, 0)])
def test_group_norm_that_is_there_stays(name: str, proxied_count: int, kept: int) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4).eval()
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.GroupNorm)}
    for norm in norms.values():
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.3)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        model, report = retrofit.convert(model, "gn-pn", input_size=(3, 32, 32))
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert report.plan.counts == {"converted": proxied_count, "kept": kept, "unsupported": 0}
    layers = [module for module in model.modules() if isinstance(module, ProxyNorm)]
    assert len(layers) == proxied_count
    assert {name: module for name, module in model.named_modules() if isinstance(module, nn.GroupNorm)} == norms


def test_proxy_norm_behind_a_group_norm_is_the_papers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1))
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    x = torch.randn(2, 3, 6, 6)
    plain = copy.deepcopy(model)
    model, _ = retrofit.convert(model, "gn-pn", pn_restore=False, check=False)
    retrofit.set_strength(model, 1.0)
    levels = torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256)
    proxy = F.silu(levels[:, None] * plain[1].weight.double() + plain[1].bias.double())
    mean, var = proxy.mean(0).view(-1, 1, 1), proxy.var(0, correction=0).view(-1, 1, 1)
    phi = F.silu(plain[1](plain[0](x))).double()
    torch.testing.assert_close(model[:3](x).double(), (phi - mean) / (var + 0.03).sqrt(), rtol=1e-4, atol=1e-5)


def test_proxy_norm_follows_a_norm_that_is_converted_again() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    model, _ = retrofit.convert(model, "gn-pn", input_size=(3, 8, 8))
    model, _ = retrofit.convert(model, "gnn", input_size=(3, 8, 8))
    assert model[2].norm is model[1]


@pytest.mark.parametrize("options", [{"groups": 2}, {"group_channels": 4}, {"groups": "auto", "calibrate": []}])
def test_groups_of_a_group_norm_are_not_asked_for(options: dict[str, Any]) -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU())
    with pytest.raises(UsageError, match="whose groups stay"):
        plan(grouped, "gn-pn", **options)
    both = nn.Sequential(grouped, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    assert plan(both, "gn-pn", groups=2).counts["converted"] == 2


def test_group_norm_of_one_group_alone_suits_ln_pn() -> None:
    one = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 8, affine=False), nn.ReLU())
    model, report = retrofit.convert(one, "ln-pn", input_size=(3, 8, 8))
    assert report.check is not None
    assert report.check.passed
    assert isinstance(model[2], ProxyNorm)
    with pytest.raises(RetrofitError, match="its 2 groups stay as they are; use `to='gn-pn'`"):
        plan(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()), "ln-pn")


def test_plans_replay_on_a_fresh_model() -> None:
    made = plan(TV.resnet18(), "gn-pn", ws=True)
    model, _ = apply(Plan.from_dict(made.to_dict()), TV.resnet18())
    reference, _ = retrofit.convert(TV.resnet18(), "gn-pn", ws=True)
    assert list(model.state_dict()) == list(reference.state_dict())


class DataDependent(nn.Module):
    """A loop over the data, and functional activations: no trace shows what follows a norm."""

    def __init__(self, traced: bool = False) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()) if traced else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.conv(x)))
        return self.block(torch.stack(list(y)))


@pytest.mark.parametrize("to", ["gn-pn", "ln-pn"])
def test_proxying_nothing_is_refused(to: str) -> None:
    model = DataDependent()
    with pytest.raises(RetrofitError, match=rf"{to} would convert no activation.*use `to='{to[:2]}'`, ") as caught:
        retrofit.convert(model, to)
    assert "what follows its norm is unknown" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert retrofit.convert(model, to[:2])[1].plan.counts["converted"] == 1
    with pytest.raises(RetrofitError, match="none follows a norm"):
        plan(nn.Sequential(nn.BatchNorm2d(8)), to)
    with pytest.raises(RetrofitError, match="output used twice"):
        plan(TwoConsumers(), to)


def test_what_is_left_is_said_first() -> None:
    _, report = retrofit.convert(DataDependent(traced=True), "gn-pn")
    assert report.notes[0].startswith(
        "1 of 2 activations are converted, 1 are left (1: what follows its norm is unknown"
    )
    left = [row for row in report.plan.edits if row.status == "left"]
    assert [(row.norm, row.name) for row in left] == [("bn", "after bn")]
    assert report.to_dict()["activations"]
    _, report = retrofit.convert(TV.resnet18(), "gn-pn", check=False)
    assert report.notes[0] == "9 of 17 activations are converted, 8 are left (8: after a residual addition)"
    model, _ = apply(Plan.from_dict(report.plan.to_dict()), TV.resnet18())
    assert sum(isinstance(module, ProxyNorm) for module in model.modules()) == 9


def test_auto_groups_measure_only_what_is_to_be_converted() -> None:
    """A layer that is never called in evaluation, as those of auxiliary heads, can be excluded."""

    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.aux = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x)

    model = WithHead()
    images = [torch.randn(4, 8, 9, 9)]
    with pytest.raises(RetrofitError, match="never calls aux"):
        plan(model, "gn", groups="auto", calibrate=images)
    for rule in ({"skip": "aux"}, {"only": "bn"}):
        rows = {row.name: row.status for row in plan(model, "gn", groups="auto", calibrate=images, **rule).layers}
        assert rows == {"bn": "converted", "aux": "kept"}
