"""Weights in a network: by name and in order, and what is said where they do not fit."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks.checkpoint import read_checkpoint
from retrofit.networks.load_weights import Loaded, load_into
from tests.networks.conftest import refused, same_tensors, small_net, small_state, under

# --- loading by name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda s: dict(list(s.items())[:-1]),
            ["1 missing (3.bias)", "pass `checkpoint_partial=True`"],
        ),
        (
            lambda s: {**s, "extra": torch.zeros(1)},
            ["1 unexpected (extra)", "pass `checkpoint_partial=True`"],
        ),
        (
            lambda s: small_state(classes=7),
            ["2 of another shape or type (3.weight [7, 16] float32 for [3", "its `num_classes`"],
        ),
        (
            lambda s: small_state(channels=1),
            ["1 of another shape or type (0.weight [4, 1, 3, 3]", "`in_chans`"],
        ),
        (
            lambda s: small_state(width=8),
            ["7 of another shape", " and 4 more)", "check which network"],
        ),
        (lambda s: under("n", s), ["`match='order'`"]),
        (
            lambda s: {**s, "0.bias": s["0.bias"].to(torch.int8)},
            ["1 of another shape or type (0.bias [4] int8 for [4] float32)"],
        ),
        (lambda s: {**s, "3.weight": s["3.weight"].to_sparse()}, ["3.weight", "sparse"]),
        (lambda s: {**s, "3.weight": s["3.weight"].to("meta")}, ["3.weight", "meta tensor"]),
        (lambda s: {**s, "a\nb" * 9999: torch.zeros(1)}, [r"1 unexpected (a\nba\nb", "..."]),
    ],
)
def test_says_what_does_not_fit(
    change: Callable[[dict[str, Tensor]], Any], expected: list[str]
) -> None:
    with refused(".*".join(map(re.escape, expected))):
        load_into(small_net(), change(small_state()))


def test_timms_own_converter_is_asked() -> None:
    small = timm.create_model("test_vit", img_size=64)
    large = timm.create_model("test_vit", img_size=96)
    assert load_into(large, small.state_dict()) == Loaded()  # its position embedding is resampled
    assert torch.equal(large.blocks[0].attn.qkv.weight, small.blocks[0].attn.qkv.weight)


def test_torchs_hooks_for_old_names_are_asked() -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
    model = torchvision.models.VisionTransformer(image_size=32, patch_size=16, **sizes)
    old = model.state_dict()
    for ours, theirs in {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}.items():
        old = {name.replace(ours, theirs): value for name, value in old.items()}
    assert old.keys() != model.state_dict().keys()
    assert load_into(model, old) == Loaded()


def test_a_network_that_asks_for_the_version_of_its_weights_is_told() -> None:
    state = dict(torchvision.models.mnasnet0_5().state_dict())  # without it, as in a file
    model = torchvision.models.mnasnet0_5()
    assert load_into(model, state) == Loaded()
    assert same_tensors(model.state_dict(), state)
    with pytest.raises(RetrofitError, match="does not fit this MNASNet: version should be"):
        load_into(model, {**state, "other": torch.ones(1)}, partial=True)


@pytest.mark.parametrize("match", ["name", "order"])
def test_warns_of_weights_that_are_not_finite(match: Any) -> None:
    state = small_state()
    state["3.weight"][0, 0], state["1.running_var"][1] = float("nan"), float("-inf")
    (said,) = load_into(small_net(), state, match).warnings
    assert re.search("2 tensors.*1.running_var, 3.weight", said)


def test_in_order_nothing_is_left() -> None:
    with pytest.raises(UsageError, match="drop it or `checkp"):
        load_into(small_net(), small_state(), "order", partial=True)


# --- names with something before them, and parts


def _average(state: dict[str, Tensor]) -> dict[str, Tensor]:
    source = small_net()
    source.load_state_dict(state)
    return dict(torch.optim.swa_utils.AveragedModel(source, use_buffers=True).state_dict())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: under("model.", s),
        lambda s: under("encoder.module.", s),
        _average,
        lambda s: {name: value for name, value in s.items() if "num_batches" not in name},
        lambda s: {**s, "3.num_batches_tracked": torch.tensor(1)},
    ],
    ids=["prefix", "two parts", "average", "no counter", "another counter"],
)
def test_one_prefix_and_counters_make_no_difference(
    wrap: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    model = small_net()
    assert load_into(model, wrap(small_state())) == Loaded()
    assert same_tensors(model.state_dict(), small_state())


def test_what_a_wrapper_put_before_foreign_names_is_taken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def translate(state: dict[str, Tensor], _model: nn.Module) -> dict[str, Tensor]:
        return {name.removeprefix("layer"): value for name, value in state.items()}

    monkeypatch.setattr(
        sys.modules[nn.Sequential.__module__], "checkpoint_filter_fn", translate, raising=False
    )
    model, state = small_net(), small_state()
    assert load_into(model, under("module.layer", state)) == Loaded()
    assert same_tensors(model.state_dict(), state)


def test_a_tensor_beside_a_prefix_is_not_dropped_silently() -> None:
    state = {**under("model.", small_state()), "criterion.weight": torch.ones(3)}
    with pytest.raises(
        RetrofitError, match=r"1 unexpected \(criterion.weight\); .* pass `checkpoint_partial=True`"
    ):
        load_into(small_net(), state)
    model = small_net()
    loaded = load_into(model, state, partial=True)
    assert (loaded.left_out, loaded.left_random) == (["criterion.weight"], [])
    assert loaded.warnings == [
        "PARTIAL: 1 tensors of the checkpoint are left out (criterion.weight)"
    ]
    assert same_tensors(model.state_dict(), small_state())


def test_two_prefixes_that_fit_alike_are_a_question() -> None:
    state = {**under("student.", small_state()), **under("teacher.", small_state())}
    for partial in (False, True):
        with pytest.raises(
            RetrofitError, match=r"under student., teacher.; choose with `checkpoint_key=.student.`"
        ):
            load_into(small_net(), state, partial=partial)


@pytest.mark.parametrize("prefix", ["", "module._orig_mod.", "module.module."])
@pytest.mark.parametrize("part", ["classifier", "backbone"])
def test_a_part_leaves_the_rest_as_it_was(prefix: str, part: str) -> None:
    """Also behind what a wrapper puts before its names, which may be a few of the network's."""
    model = small_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {
        name: value
        for name, value in small_state().items()
        if name.startswith("3.") is (part == "classifier")
    }
    loaded = load_into(model, under(prefix, given), partial=True)
    random = [name for name in before if name not in given and "num_batches" not in name]
    assert (loaded.left_random, loaded.left_out) == (random, [])
    assert (
        f"PARTIAL: {len(random)} of the network's 8 tensors are left RANDOM (" in loaded.warnings[0]
    )
    assert same_tensors(model.state_dict(), before | given)


def test_a_part_leaves_other_shapes_on_both_sides_and_is_more_than_nothing() -> None:
    loaded = load_into(small_net(), small_state(classes=7), partial=True)
    assert loaded.left_random == loaded.left_out == ["3.weight", "3.bias"]
    with pytest.raises(RetrofitError, match="missing"):
        load_into(small_net(), {"x": torch.zeros(1)}, partial=True)


# --- loading in order


def _foreign(state: dict[str, Tensor], counters: bool) -> dict[str, Tensor]:
    return {
        f"x{i}.{k.split('.')[1]}": v
        for i, (k, v) in enumerate(state.items())
        if counters or "num_" not in k
    }


@pytest.mark.parametrize("counters", [True, False])
def test_loads_in_order(counters: bool) -> None:
    model, state = small_net(), small_state()
    state["1.num_batches_tracked"] += 5
    assert load_into(model, _foreign(state, counters), "order") == Loaded()
    for name, value in model.state_dict().items():
        if counters or "num_batches" not in name:
            assert torch.equal(value, state[name]), name
    assert model[1].num_batches_tracked.item() == (5 if counters else 0)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (
            small_net(),
            small_net(classes=5),
            r"tensor 7 is 3.weight \[3, 16\] float32 in .*, 3.weight \[5, 16\]",
        ),
        (
            small_net()[:1],
            small_net()[:2],
            r"tensor 3 is nothing in the network, 1.weight \[4\] float32 in the checkp",
        ),
        (
            small_net()[:2],
            small_net()[:1],
            r"tensor 3 is 1.weight \[4\] float32 in the network, nothing in the checkp",
        ),
    ],
    ids=["shape", "too many", "too few"],
)
def test_in_order_the_first_that_differs_is_named(
    ours: nn.Module, theirs: nn.Module, message: str
) -> None:
    with pytest.raises(RetrofitError, match=message):
        load_into(ours, theirs.state_dict(), "order")


def test_in_order_pairs_against_the_names_are_told() -> None:
    state = small_state()
    state = {
        "1.bias" if k == "1.weight" else "1.weight" if k == "1.bias" else k: v
        for k, v in state.items()
    }
    (said,) = load_into(small_net(), state, "order").warnings
    assert "2 tensors were paired against their names: 1.bias as 1.weight" in said


@pytest.mark.slow
def test_a_real_checkpoint(real_weights: Path) -> None:
    state, model = read_checkpoint(real_weights).tensors, timm.create_model("tf_efficientnet_lite0")
    with pytest.raises(RetrofitError, match="pass `match='order'`"):
        load_into(model, state)
    assert load_into(model, state, "order") == Loaded()
    theirs = [value for name, value in state.items() if "num_batches" not in name]
    ours = [value for name, value in model.state_dict().items() if "num_batches" not in name]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
