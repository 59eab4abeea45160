"""A checkpoint's tensors in a network: what fits, what is taken in part, and what is said when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks.checkpoint import read_checkpoint
from retrofit.networks.load_weights import Loaded, load_into
from tests.networks.small_states import same_tensors, small_net, small_state

# --- loading by name


def test_loads_by_name() -> None:
    model, state = small_net(), small_state()
    assert load_into(model, state) == Loaded()
    assert same_tensors(dict(model.state_dict()), state)


def test_the_batch_counter_may_be_absent_or_extra() -> None:
    state = {name: value for name, value in small_state().items() if "num_batches" not in name}
    assert load_into(small_net(), state) == Loaded()
    assert load_into(small_net(), {**small_state(), "3.num_batches_tracked": torch.tensor(1)}) == Loaded()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.pop("3.bias"), ["1 missing (3.bias)", "pass `checkpoint_partial=True`"]),
        (lambda s: s.update(extra=torch.zeros(1)), ["1 unexpected (extra)", "pass `checkpoint_partial=True`"]),
        (
            lambda s: s.update(small_state(classes=7)),
            ["2 of another shape (3.weight [7, 16] for [3, 16]", "`num_classes=7`"],
        ),
        (lambda s: s.update(small_state(channels=1)), ["1 of another shape (0.weight [4, 1, 3, 3]", "`in_chans=1`"]),
        (lambda s: s.update(small_state(width=8)), ["7 of another shape", " and 4 more)", "check which network"]),
        (
            lambda s: (s.update({f"n{k}": v for k, v in s.items()}), [s.pop(k) for k in small_state()]),
            ["`match='order'`"],
        ),
        (lambda s: s.update({"0.bias": s["0.bias"].to(torch.int8)}), ["1 of another type (0.bias int8 for float32)"]),
        (lambda s: s.update({"0.bias": s["0.bias"] + 0j}), ["1 of another type (0.bias complex64 for float32)"]),
        (lambda s: s.update({"a\nb" * 9999: torch.zeros(1)}), [r"1 unexpected (a\nba\nb", "..."]),
    ],
)
def test_says_what_does_not_fit(change: Callable[[dict[str, Tensor]], object], expected: list[str]) -> None:
    state = small_state()
    change(state)
    with pytest.raises(RetrofitError) as caught:
        load_into(small_net(), state)
    for words in expected:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_timms_own_converter_is_asked() -> None:
    small = timm.create_model("test_vit", img_size=64)
    large = timm.create_model("test_vit", img_size=96)
    assert load_into(large, small.state_dict()) == Loaded()  # its position embedding is resampled
    assert torch.equal(large.blocks[0].attn.qkv.weight, small.blocks[0].attn.qkv.weight)
    assert large.pos_embed.shape[1] == 1 + (96 // 16) ** 2


def test_torchs_hooks_for_old_names_are_asked() -> None:
    from torchvision.models import vit_b_16

    model = vit_b_16(num_classes=2, image_size=32)
    old = {
        k.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): v
        for k, v in model.state_dict().items()
    }
    assert old.keys() != model.state_dict().keys()
    assert load_into(model, old) == Loaded()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("match", ["name", "order"])
def test_warns_of_weights_that_are_not_finite(value: float, match: Any) -> None:
    state = small_state()
    state["3.weight"][0, 0] = value
    state["1.running_var"][1] = value
    (said,) = load_into(small_net(), state, match).warnings
    assert "2 tensors" in said
    assert "1.running_var, 3.weight" in said


def test_unknown_way_of_matching() -> None:
    with pytest.raises(UsageError, match="choose name or order"):
        load_into(small_net(), small_state(), "shape")  # type: ignore[arg-type]


# --- names with something before them, and parts


def _under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("prefix", ["model.", "net.", "model.backbone.", "encoder.module."])
def test_one_prefix_of_all_names_is_taken_off(prefix: str) -> None:
    model, state = small_net(), small_state()
    assert load_into(model, _under(prefix, state)) == Loaded()
    assert same_tensors(dict(model.state_dict()), state)


def test_an_average_of_torch_is_loaded() -> None:
    source = small_net()
    source.load_state_dict(small_state())
    average = torch.optim.swa_utils.AveragedModel(source, use_buffers=True)
    model = small_net()
    assert load_into(model, average.state_dict()) == Loaded()
    assert same_tensors(dict(model.state_dict()), small_state())


def test_a_tensor_beside_a_prefix_is_not_dropped_silently() -> None:
    state = {**_under("model.", small_state()), "criterion.weight": torch.ones(3)}
    with pytest.raises(
        RetrofitError, match=r"1 unexpected \(criterion.weight\); pass `checkpoint_key=.model.` to take"
    ):
        load_into(small_net(), state)
    model = small_net()
    loaded = load_into(model, state, partial=True)
    assert (loaded.left_out, loaded.left_random) == (["criterion.weight"], [])
    assert loaded.warnings == ["PARTIAL: 1 tensors of the checkpoint are left out (criterion.weight)"]
    assert same_tensors(dict(model.state_dict()), small_state())


def test_two_prefixes_that_fit_alike_are_a_question() -> None:
    state = {**_under("student.", small_state()), **_under("teacher.", small_state())}
    for partial in (False, True):
        with pytest.raises(RetrofitError, match=r"under student., teacher.; choose with `checkpoint_key=.student.`"):
            load_into(small_net(), state, partial=partial)


def test_a_backbone_without_classifier() -> None:
    model, fresh = small_net(), small_net()
    fresh.load_state_dict(model.state_dict())
    backbone = {name: value for name, value in small_state().items() if not name.startswith("3.")}
    with pytest.raises(RetrofitError, match=r"2 missing \(3.weight, 3.bias\); pass `checkpoint_partial=True`"):
        load_into(fresh, backbone)
    loaded = load_into(fresh, backbone, partial=True)
    assert (loaded.left_random, loaded.left_out) == (["3.weight", "3.bias"], [])
    assert loaded.warnings == ["PARTIAL: 2 of the network's 8 tensors are left RANDOM (3.weight, 3.bias)"]
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, model.state_dict()[name] if name.startswith("3.") else small_state()[name]), name


def test_a_part_leaves_tensors_of_another_shape_on_both_sides() -> None:
    loaded = load_into(small_net(), small_state(classes=7), partial=True)
    assert loaded.left_random == loaded.left_out == ["3.weight", "3.bias"]


def test_a_part_that_is_nothing_is_no_part() -> None:
    with pytest.raises(RetrofitError, match="8 missing"):
        load_into(small_net(), {"x": torch.zeros(1)}, partial=True)
    with pytest.raises(UsageError, match="drop it or `checkpoint_partial`"):
        load_into(small_net(), small_state(), "order", partial=True)


# --- loading in order


def _foreign(state: dict[str, Tensor], counters: bool) -> dict[str, Tensor]:
    return {f"x{i}.{k.split('.')[1]}": v for i, (k, v) in enumerate(state.items()) if counters or "num_" not in k}


@pytest.mark.parametrize("counters", [True, False])
def test_loads_in_order(counters: bool) -> None:
    model, state = small_net(), small_state()
    state["1.num_batches_tracked"] += 5
    assert load_into(model, _foreign(state, counters), "order") == Loaded()
    for name, value in model.state_dict().items():
        if counters or "num_batches" not in name:
            assert torch.equal(value, state[name]), name
    assert model[1].num_batches_tracked.item() == (5 if counters else 0)


def test_in_order_a_wrong_shape_names_both() -> None:
    with pytest.raises(RetrofitError, match=r"tensor 7 is 3.weight \[3, 16\] in the network, x7.weight \[5, 16\]"):
        load_into(small_net(), _foreign(small_state(classes=5), True), "order")


@pytest.mark.parametrize(
    ("ours", "theirs", "side"),
    [(0, 1, "checkpoint"), (1, 0, "network")],
)
def test_in_order_a_tensor_too_many(ours: int, theirs: int, side: str) -> None:
    nets = [nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2 + extra))) for extra in (ours, theirs)]
    with pytest.raises(
        RetrofitError, match=rf"{2 + ours} tensors, the checkpoint {2 + theirs} .*2.weight of the {side}"
    ):
        load_into(nets[0], nets[1].state_dict(), "order")


def test_in_order_pairs_against_the_names_are_told() -> None:
    state = small_state()
    state = {"1.bias" if k == "1.weight" else "1.weight" if k == "1.bias" else k: v for k, v in state.items()}
    (said,) = load_into(small_net(), state, "order").warnings
    assert "2 tensors were paired against their names (1.bias as 1.weight" in said.replace(": ", " (")


@pytest.mark.slow
def test_a_real_checkpoint(real_weights: Path) -> None:
    state, model = read_checkpoint(real_weights).tensors, timm.create_model("tf_efficientnet_lite0")
    with pytest.raises(RetrofitError, match="pass `match='order'`"):
        load_into(model, state)
    assert load_into(model, state, "order") == Loaded()
    theirs = [value for name, value in state.items() if "num_batches" not in name]
    ours = [value for name, value in model.state_dict().items() if "num_batches" not in name]
    assert len(ours) == len(theirs) > 200
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
