"""Layers of foreign classes are taken for a known one where they compute the same, and only
there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrofit
from retrofit import surgery
from retrofit.errors import RetrofitError
from retrofit.surgery.norm_layers import classify

X = torch.randn(2, 3, 5, 5)


class FrozenBatchNorm2d(nn.Module):  # as in DETR: buffers, and an eps that no attribute names
    eps_inside = 1e-5

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, var = (value.reshape(1, -1, 1, 1) for value in self._buffers.values())
        scale = weight * (var + self.eps_inside).rsqrt()
        return x * scale + (bias - mean * scale)


class OtherFrozenNorm(FrozenBatchNorm2d):
    eps_inside = 0.7


class ChannelsFirst(nn.LayerNorm):  # as in SAM, ConvNeXt V2, DINOv3 and Segformer decoders
    def __init__(self, channels: int, data_format: str = "channels_first") -> None:
        super().__init__(channels, eps=1e-6)
        self.data_format = data_format

    def forward(self, x: Tensor) -> Tensor:
        if self.data_format == "channels_last":
            return super().forward(x)
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class WrittenNorm(nn.Module):  # a LayerNorm that is derived from nothing, as in the first ConvNeXt
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        x = centred / (centred.square().mean(1, keepdim=True) + self.variance_epsilon).sqrt()
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Activated(nn.GroupNorm):  # as in BiT
    def __init__(self, channels: int, act: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__(4, channels)
        self.activation = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


def derived(
    base: type[nn.Module], forward: Callable[[Any, Tensor], Tensor], *args: Any, **own: Any
) -> nn.Module:
    module = type("Derived", (base,), {"forward": forward})(*args)
    for name, value in own.items():
        setattr(module, name, value)
    return module


def in_float32(self: Any, x: Tensor) -> Tensor:
    return nn.LayerNorm.forward(self, x.float()).type(x.dtype)


def gated(self: Any, x: Tensor) -> Tensor:
    return self.gate(nn.BatchNorm2d.forward(self, x))


SAME: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "frozen": (lambda: FrozenBatchNorm2d(8), "FrozenBatchNorm2d"),
    "channels first": (lambda: ChannelsFirst(8), "LayerNorm2d"),
    "channels last": (lambda: ChannelsFirst(8, "channels_last"), "LayerNorm"),
    "written anew": (lambda: WrittenNorm(8), "LayerNorm2d"),
    "in float32": (lambda: derived(nn.LayerNorm, in_float32, 8), "LayerNorm"),
    "activated": (lambda: Activated(8), "GroupNormAct"),
    "renamed": (lambda: Renamed(8), "BatchNorm2d"),
    "untracked": (lambda: Renamed(8, affine=False, track_running_stats=False), "BatchNorm2d"),
    "on meta": (lambda: Renamed(8).to("meta"), "BatchNorm2d"),
    "half": (lambda: ChannelsFirst(8).half(), "LayerNorm2d"),
    "activated BatchNorm": (
        lambda: derived(nn.BatchNorm2d, gated, 8, gate=nn.SiLU()),
        "BatchNormAct2d",
    ),
}


@pytest.mark.parametrize(("build", "known"), SAME.values(), ids=SAME)
def test_the_same_formula_by_another_name(build: Callable[[], nn.Module], known: str) -> None:
    module = build()
    before = {
        name: (id(value), value.clone())
        for name, value in module.state_dict(keep_vars=True).items()
    }
    norm: Any = classify("", module)
    assert (norm.status, norm.known_class, type(norm.layer).__name__) == ("known", known, known)
    for name, value in module.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0]
        assert value.is_meta or torch.equal(value, before[name][1])


class Renamed(nn.BatchNorm2d):
    pass


class AlwaysEvaluating(nn.BatchNorm2d):  # a frozen BatchNorm as detection libraries write it
    def train(self, mode: bool = True) -> AlwaysEvaluating:
        return super().train(False)


def scaled(self: Any, x: Tensor) -> Tensor:
    return nn.LayerNorm.forward(self, x) * self.scale


def distributed(self: Any, x: Tensor) -> Tensor:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return nn.BatchNorm2d.forward(self, x)


def momentum(self: Any, x: Tensor) -> Tensor:
    given = self.running_mean, self.running_var, self.weight, self.bias
    return F.batch_norm(x, *given, self.training, 2 * self.momentum, self.eps)


class AnyRank(nn.modules.batchnorm._BatchNorm):  # as in asteroid
    def _check_input_dim(self, x: Tensor) -> None:
        if not 2 <= x.ndim <= 4:
            raise ValueError("expected 2D to 4D input")


class Volumes(nn.modules.instancenorm._InstanceNorm):
    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim != 5:
            raise ValueError("expected 5D input")

    def _get_no_batch_dim(self) -> int:
        return 4


class NoRank(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, x: Tensor) -> None:
        raise ValueError("expected other input")


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "twice": lambda: derived(
        nn.BatchNorm2d, lambda self, x: 2 * nn.BatchNorm2d.forward(self, x), 8
    ),
    "other statistics in training": lambda: derived(nn.BatchNorm2d, momentum, 8),
    "a parameter that starts as nothing": lambda: derived(
        nn.LayerNorm, scaled, 8, scale=nn.Parameter(torch.ones(()))
    ),
    "other gradient": lambda: derived(
        nn.LayerNorm, lambda self, x: nn.LayerNorm.forward(self, x.detach()), 8
    ),
    "other eps": lambda: derived(
        nn.LayerNorm, lambda self, x: F.layer_norm(x, (8,), self.weight, self.bias, 1e-2), 8
    ),
    "maps alone": lambda: derived(
        nn.LayerNorm, lambda self, x: x + 1 if x.ndim == 4 else F.layer_norm(x, (8,)), 8
    ),
    "statistics of all processes": lambda: derived(nn.BatchNorm2d, distributed, 8),
    "an activation with weights": lambda: Activated(8, nn.PReLU),
    "frozen with an eps that nobody has": lambda: OtherFrozenNorm(8),
    "no batch": lambda: derived(
        nn.GroupNorm, lambda self, x: nn.GroupNorm.forward(self, x.transpose(0, 1)), 4, 8
    ),
    "stays in evaluation": lambda: AlwaysEvaluating(8),
}
REASONS = {
    "statistics of all processes": "may exchange values with other processes",
    "stays in evaluation": "a `train` of its own",
    "an activation with weights": "another function on random inputs",
    "frozen with an eps that nobody has": "no converter knows",
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_another_formula_stays_unsupported(case: str) -> None:
    norm: Any = classify("", DIFFERENT[case]())
    assert norm.status == "unsupported"
    assert REASONS.get(case, "another function on random inputs") in norm.reason


class ByOptions(nn.LayerNorm):
    def __init__(self, options: dict[str, bool]) -> None:
        super().__init__(8)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return 2 * y if self.options["doubled"] else y


def test_layers_of_a_class_whose_dictionaries_differ_are_proved_one_by_one() -> None:
    norms: list[Any] = [classify("", ByOptions({"doubled": value})) for value in (False, True)]
    assert [norm.status for norm in norms] == ["known", "unsupported"]


class Capped(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.clamp(max=7), self.bias)


def test_parameters_for_which_a_layer_is_another_function_are_found() -> None:
    layers = Capped(8), Capped(8)
    nn.init.constant_(layers[1].weight, 9.0)
    norms: list[Any] = [classify("", layer) for layer in layers]
    assert [norm.status for norm in norms] == ["known", "unsupported"]


class HiddenEpsNorm(nn.Module):  # a LayerNorm whose eps no attribute names
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-6)


def test_a_single_sample_shows_the_eps() -> None:
    for channels in range(8, 40):
        model, _ = retrofit.convert(
            nn.Sequential(HiddenEpsNorm(channels)), "lnn", inputs=torch.randn(1, 7, channels)
        )
        assert model[0].eps == 1e-6


def test_a_foreign_class_with_the_name_of_our_layer_is_converted() -> None:
    namesake = type("FrozenBatchNorm", (FrozenBatchNorm2d,), {})
    model, _ = retrofit.convert(nn.Sequential(nn.Conv2d(3, 4, 1), namesake(4)), "frozen", inputs=X)
    assert type(model[1]) is retrofit.layers.FrozenBatchNorm


def test_a_class_that_takes_no_inputs_may_be_any_function() -> None:
    norm: Any = classify("", NoRank(8))
    assert norm.status == "unsupported"
    assert norm.reason.endswith("another function on random inputs, of which it may take none")


@pytest.mark.parametrize(
    ("layer", "to", "size", "becomes"),
    [
        (AnyRank(8), "bnn", (8, 6, 5), "BatchNormalNorm2d"),
        (AnyRank(8), "ln", (8, 6), "MigratedGroupNorm"),
        (AnyRank(8), "dbn", (8, 6), "DecorrelatedBatchNorm1d"),
        (Volumes(8), "inn", (8, 4, 3, 2), "InstanceNormalNorm3d"),
    ],
    ids=["maps", "any", "sequences", "volumes"],
)
def test_a_class_derived_from_a_private_base_becomes_what_its_inputs_say(
    layer: nn.Module, to: str, size: tuple[int, ...], becomes: str
) -> None:
    source = nn.Sequential(copy.deepcopy(layer), nn.Flatten()).eval()
    x = torch.randn(2, *size)
    model, report = retrofit.convert(copy.deepcopy(source), to, inputs=x)
    assert (type(model[0]).__name__, report.plan.layers[0].target) == (becomes, becomes)
    torch.testing.assert_close(model(x), source(x))
    again = copy.deepcopy(source)
    surgery.replay(again, [report.plan])
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), source(x))


@pytest.mark.parametrize(
    ("case", "to"),
    [("frozen", "gn-pn"), ("channels first", "lnn"), ("activated", "gnn"), ("renamed", "dbn")],
)
def test_conversions_keep_the_function_and_the_keys(case: str, to: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), SAME[case][0](), nn.ReLU(), nn.Conv2d(8, 4, 1)
        ).eval()

    source, x = net(), torch.randn(2, 3, 9, 9)
    model, report = retrofit.convert(net(), to, input_size=(3, 9, 9))
    assert report.check.passed
    assert report.plan.layers[0].source == type(source[1]).__name__
    torch.testing.assert_close(model(x), source(x))
    assert source.state_dict().keys() <= model.state_dict().keys()
    model.train()(x).sum().backward()
    if to != "dbn":
        retrofit.set_strength(model, 1.0)
        assert (model.eval()(x) - source(x)).abs().max() > 1e-3


def test_the_shapes_that_the_network_gives_count() -> None:
    wide = derived(
        nn.GroupNorm, lambda self, x: nn.GroupNorm.forward(self, x) + (x.shape[-1] > 20), 4, 8
    )
    retrofit.convert(
        nn.Sequential(nn.Conv2d(3, 8, 3), copy.deepcopy(wide)),
        "gnn",
        input_size=(3, 9, 9),
        check=False,
    )
    with pytest.raises(
        RetrofitError, match="it is GroupNorm on random inputs, but not on those of the shape"
    ):
        retrofit.convert(
            nn.Sequential(nn.Conv2d(3, 8, 3), wide), "gnn", input_size=(3, 32, 32), check=False
        )
