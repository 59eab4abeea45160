"""The comparison passes what is the same function and nothing else, and says where nothing was
compared.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from retrofit.compare import Reference
from retrofit.comparison import Comparison
from retrofit.errors import RetrofitError
from retrofit.inputs import Call, example_calls, own_input_size
from retrofit.surgery.norm_layers import find_norms
from retrofit.utils.output_tensors import tensors_in


def reference(model: nn.Module, size: tuple[int, ...] | None = None) -> Reference:
    return Reference(
        model, example_calls(model, None, size), layers=[norm.name for norm in find_norms(model)]
    )


class Small(nn.Module):
    """A network with a branch that a fresh initialisation multiplies by zero, as residual networks
    have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.scale * self.act(self.norm(x))).mean((2, 3)))


SIZE = (3, 12, 12)


@pytest.mark.parametrize(
    ("before", "after", "passes"),
    [
        *((0.0, after, after < 1e-5) for after in (0.0, 1e-6, 1e-2, math.nan, math.inf)),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
    ],
)
def test_a_changed_output_fails_beyond_the_tolerance(
    before: float, after: float, passes: bool
) -> None:
    model = Small()
    model.head.bias.data[1] = before
    check = reference(model, SIZE)
    model.head.bias.data[1] = after
    result = check.compare(model)
    assert (result.passed, result.differs, result.where, result.scale > 0) == (
        passes,
        not passes,
        "",
        True,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_what_proves_nothing_is_not_checked(value: float) -> None:
    model = nn.Linear(5, 3)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    result = reference(model, (5,)).compare(model)
    assert (result.passed, result.differs) == (False, False)
    assert re.match(
        r"not checked: .*(NaN or infinity alone|every output is zero).*weights", str(result)
    )


def test_a_difference_in_a_branch_multiplied_by_zero_is_found() -> None:
    model = Small()
    model.scale.data.zero_()
    check = reference(model, SIZE)
    model.norm.eps = 1.0
    result = check.compare(model)
    assert (result.passed, result.where) == (False, "norm")
    assert check.compare(model, layers=False).passed


def test_a_zero_output_is_judged_by_the_layers() -> None:
    model = Small()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    result = reference(model, SIZE).compare(model)
    assert (result.passed, result.where, result.scale > 0) == (True, "norm", True)


@pytest.mark.parametrize("broken", [False, True])
def test_an_output_of_rounding_errors_is_judged_by_the_layers(broken: bool) -> None:
    """The mean of what was normalized over the same places is zero, whatever the network."""
    norm = nn.InstanceNorm2d(8)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4, bias=False)
    )
    check = reference(model, SIZE)
    norm.eps *= 1 + 1e-6  # other rounding
    if broken:
        norm.eps = 0.1
    result = check.compare(model)
    assert (result.passed, result.where, result.scale > 1) == (not broken, "1", True)
    if broken:  # and what is no rounding error counts
        norm.eps = 1e-5
        model[4].register_parameter("bias", nn.Parameter(torch.full((4,), 1e-3)))
        assert not check.compare(model).passed


def test_the_network_and_the_random_state_stay_as_they_were() -> None:
    model = Small().train()
    model.norm.eval()
    before, random = model.norm.running_mean.clone(), torch.get_rng_state()
    first, second = reference(model, SIZE), reference(model, SIZE)
    first.compare(model)
    assert [module.training for module in (model, model.act, model.norm)] == [True, True, False]
    assert torch.equal(model.norm.running_mean, before)
    assert not model.norm._forward_hooks
    assert torch.equal(torch.get_rng_state(), random)
    assert all(
        torch.equal(a.args[0], b.args[0]) for a, b in zip(first.calls, second.calls, strict=True)
    )


def only(*batches: int) -> nn.Module:  # a network that takes batches of some sizes alone
    def check(_: nn.Module, args: tuple[Tensor]) -> None:
        assert len(args[0]) in batches

    model = Small()
    model.register_forward_pre_hook(check)
    return model


@pytest.mark.parametrize(
    ("build", "batches"),
    [
        (Small, (1, 2)),
        (
            lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(432, 4), nn.BatchNorm1d(4, track_running_stats=False)
            ),
            (2, 3),
        ),
        (lambda: only(1), (1,)),
        (lambda: only(2), (2,)),
    ],
)
def test_batches_that_the_network_takes(
    build: Callable[[], nn.Module], batches: tuple[int, ...]
) -> None:
    """One sample has no variance over the batch; other networks fix the batch that they take."""
    model = build()
    result = reference(model, SIZE).compare(model)
    assert (result.passed, result.batches) == (True, batches)


@dataclasses.dataclass(slots=True)
class Answer:
    boxes: list[Tensor]
    more: object


class Result:  # an object as detection libraries return it
    def __init__(self, scores: Tensor) -> None:
        self.scores, self.itself, self.names = scores, self, {0: "cat"}


PACK: dict[str, Callable[[Tensor], object]] = {
    "dataclass": lambda x: Answer([x], None),
    "nested": lambda x: ({"a": [x]}, Answer([], {"b": (x + 1,)})),
    "namedtuple": lambda x: x.max(1),
    "object": lambda x: [Result(x)],
    "complex": torch.fft.fft,
    "truth values": lambda x: x > 0,
}


class Packing(nn.Module):
    def __init__(self, pack: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.pack = nn.Linear(5, 3), pack

    def forward(self, x: Tensor) -> object:
        return self.pack(self.inner(x))


@pytest.mark.parametrize("pack", PACK.values(), ids=PACK)
def test_tensors_anywhere_in_the_answer_count(pack: Callable[[Tensor], object]) -> None:
    model = Packing(pack)
    check = reference(model, (5,))
    assert check.compare(model).passed
    model.inner.bias.data += 1
    assert check.compare(model).differs
    assert not check.compare(Packing(lambda x: None)).passed


@pytest.mark.parametrize(
    "inputs",
    [
        torch.ones(2, 5),
        (torch.ones(2, 5),),
        [torch.ones(2, 5), None],
        {"x": torch.ones(2, 5), "mask": None},
    ],
)
def test_inputs_are_taken_as_they_are_and_survive_networks_that_overwrite_them(inputs: Any) -> None:
    class Overwriting(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x.mul_(2) + 1

    (call,) = example_calls(Overwriting(), inputs)
    check = Reference(Overwriting(), [call])
    result = check.compare(lambda x, mask=None: x * 2 + 1)
    assert (result.passed, result.batches, result.compared, result.scale) == (True, (2,), 10, 3)
    assert all(torch.equal(t, torch.ones(2, 5)) for t in tensors_in(inputs))
    with pytest.raises(RetrofitError, match="leave one out"):
        example_calls(Overwriting(), inputs, (5,))
    with pytest.raises(
        RetrofitError, match=r"did not take the example inputs \(TypeError: .*`inputs`"
    ):
        Reference(Overwriting(), [Call(kwargs={"y": torch.ones(1)})])


def test_agreement_of_scores() -> None:
    def scores(*best: int) -> Callable[[Tensor], Tensor]:
        return lambda x: nn.functional.one_hot(torch.tensor(best), 4).float()[: len(x)]

    check = Reference(Packing(scores(0, 1, 2)), [Call((torch.ones(3, 5),))])
    assert check.classifies
    assert check.compare(scores(0, 1, 3)).top1_agreement == pytest.approx(2 / 3)
    check = Reference(Packing(lambda x: (x, x)), [Call((torch.ones(3, 5),))])
    assert not check.classifies
    assert check.compare(lambda x: (x, x)).top1_agreement is None


@pytest.mark.parametrize(
    ("dtype", "change", "passes"), [(torch.bfloat16, 2e-3, True), (torch.float64, 2e-3, False)]
)
def test_the_tolerance_follows_the_precision(
    dtype: torch.dtype, change: float, passes: bool
) -> None:
    model = Small().to(dtype)
    check = reference(model, SIZE)
    scale = check.compare(model).scale
    model.head.bias.data += change * scale
    assert check.compare(model, layers=False).passed is passes


def test_each_output_is_set_against_its_own_scale() -> None:
    offset = torch.zeros(())
    model = Packing(lambda x: {"out": 1e6 * x, "more": [x + offset, "a word"]})
    check = reference(model, (5,))
    offset += 0.1
    result = check.compare(model)
    assert (result.passed, result.scale < 10) == (False, True)


def test_each_output_has_the_rounding_of_its_own_type() -> None:
    offset = torch.zeros(())
    model = Packing(lambda x: (x.bfloat16(), x + offset))
    check = reference(model, (5,))
    offset += 1e-3
    result = check.compare(model)
    assert (result.differs, result.tolerance) == (True, 1e-4)


@pytest.mark.parametrize(
    ("pack", "alike"),
    [
        (lambda x: 3 + 1e-6 * x, True),
        (lambda x: (x.exp(), torch.ones(2)), False),
        (lambda x: torch.sigmoid(x + 90) > 0.5, True),
    ],
)
def test_outputs_that_are_the_same_for_every_sample_prove_little(
    pack: Callable[[Tensor], object], alike: bool
) -> None:
    model = Packing(pack)
    result = reference(model, (5,)).compare(model)
    assert (result.passed, result.alike) == (True, alike)
    assert ("proves little" in str(result)) == alike
    one = Reference(model, [Call((torch.ones(3, 5),))])
    assert not one.compare(model).alike


def test_nothing_compared_is_no_pass() -> None:
    model = Packing(lambda x: "nothing")
    assert str(reference(model, (5,)).compare(model)).startswith(
        "not checked: the network's answer holds no tensor"
    )
    assert not Comparison().passed
    assert not Comparison(1e-30, 0.0, compared=7).passed


def test_the_size_of_random_inputs() -> None:
    assert own_input_size(timm.create_model("test_efficientnet")) == (3, 160, 160)
    assert own_input_size(nn.ReLU()) == (3, 224, 224)
    with pytest.raises(RetrofitError, match=r"random input of size 7x12x12 .*; give .*`inputs`"):
        reference(Small(), (7, 12, 12))


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (torchvision.models.optical_flow.raft_small, (3, 128, 128)),
        pytest.param(torchvision.models.video.mc3_18, (3, 32, 32), marks=pytest.mark.slow),
        (lambda: timm.create_model("test_vit"), None),
        pytest.param(
            lambda: timm.create_model("naflexvit_base_patch16_gap"), None, marks=pytest.mark.slow
        ),
    ],
)
def test_networks_of_every_kind_of_input(
    make: Callable[[], nn.Module], size: tuple[int, ...] | None
) -> None:
    model = make()
    check = reference(model, size)
    assert check.compare(model).passed
    next(find_norms(model)).module.eps = 10.0
    assert not check.compare(model).passed


def test_a_detectors_backbone_and_heads_are_compared() -> None:
    small = {"min_size": 96, "max_size": 96, "rpn_post_nms_top_n_test": 8}
    model = torchvision.models.detection.maskrcnn_resnet50_fpn_v2(
        weights=None, weights_backbone=None, **small
    )
    check = reference(model, (3, 96, 96))
    assert {"backbone", "rpn.head", "roi_heads.box_head", "roi_heads.mask_head"} <= {
        call.stage for call in check.parts
    }
    assert check.compare(model).passed
    norms = [
        module
        for module in model.roi_heads.mask_head.modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    norms[0].running_mean += 1
    assert not check.compare(model).passed


class Mapped(nn.Module):
    """Calls its norm for one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.vmap(self.norm)(x)
        return y


def test_a_norm_within_vmap_is_compared_by_the_outputs() -> None:
    model = Mapped()
    check = reference(model, (8,))
    assert check.compare(model).passed
    model.norm.eps = 10.0
    assert not check.compare(model).passed
