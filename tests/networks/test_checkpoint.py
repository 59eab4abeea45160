"""Checkpoints: what is read of a file, which of its weights, how they get into a network, and what
is said if not.
"""

import argparse
import datetime
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.networks.checkpoint import read_checkpoint
from retrofit.networks.load_weights import Loaded, load_into
from tests.networks.conftest import refused, same_tensors


def small_net(width: int = 4, classes: int = 3, channels: int = 3) -> nn.Sequential:
    layers = (
        nn.Conv2d(channels, width, 3),
        nn.BatchNorm2d(width),
        nn.Flatten(),
        nn.Linear(width * 4, classes),
    )
    return nn.Sequential(*layers)


def small_state(**options: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(small_net(**options).state_dict())


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


# --- reading


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth.tar", "old.pth"])
def test_reads_every_kind_of_file(tmp_path: Path, name: str) -> None:
    state, path = small_state(), tmp_path / name
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=not name.startswith("old"))
    assert same_tensors(read_checkpoint(path).tensors, state)


@pytest.mark.parametrize(
    ("wrap", "key", "nest", "others"),
    [
        (lambda s, o: s, None, "", ()),
        (lambda s, o: {"epoch": 3, "net": s}, None, "net", ()),
        (
            lambda s, o: {"model": "resnet18", "state_dict": s, "args": argparse.Namespace(lr=0)},
            None,
            "state_dict",
            (),
        ),
        (
            lambda s, o: {"state_dict": o, "state_dict_ema": s},
            None,
            "state_dict_ema",
            ("state_dict",),
        ),
        (lambda s, o: {"model": o, "model_ema": s}, None, "model_ema", ("model",)),
        (lambda s, o: {"model": s, "model_ema": o}, "model", "model", ("model_ema",)),
        (lambda s, o: {"a": o, "b": s, "optimizer": {"state": {0: o}}}, "b", "b", ("a",)),
        (
            lambda s, o: {"ema": {"state_dict": s}, "model": o},
            "ema.state_dict",
            "ema.state_dict",
            ("model",),
        ),
        (lambda s, o: {"state_dict": under("a.", s) | under("b.", o)}, "a", "state_dict.a", ()),
        (
            lambda s, o: {"state_dict": under("net.", s), "model": o},
            "state_dict.net",
            "state_dict.net",
            ("model",),
        ),
    ],
)
def test_what_of_a_file_is_taken(
    tmp_path: Path, wrap: Any, key: str, nest: str, others: tuple[str, ...]
) -> None:
    wrong = {name: value + 1 for name, value in small_state().items()}
    torch.save(wrap(small_state(), wrong), tmp_path / "a.pth")
    checkpoint = read_checkpoint(tmp_path / "a.pth", key)
    assert same_tensors(checkpoint.tensors, small_state())
    assert (checkpoint.key, checkpoint.others) == (nest, others)
    assert bool(checkpoint.left_out) == (nest == "state_dict.a")
    with pytest.raises(
        RetrofitError, match=r"no weights under 'e' \(it holds .*\); give `checkpoint_key`"
    ):
        read_checkpoint(tmp_path / "a.pth", "e")


BESIDE: list[Any] = [
    argparse.Namespace(lr=0.1),
    np.float64(0.7),
    np.int64(3),
    np.bool_(True),
    np.arange(6.0).reshape(2, 3),
    np.array(["a", None], dtype=object),
    np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
    np.dtype("f8"),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    datetime.date(2026, 1, 2),
    datetime.timedelta(hours=1),
    Path("runs/1"),
    PureWindowsPath("runs"),
]


@pytest.mark.parametrize("zipped", [True, False])
def test_what_training_scripts_save_beside_the_weights_is_left_out(
    tmp_path: Path, zipped: bool
) -> None:
    content = {"state_dict": small_state(), "best": BESIDE[1], "args": {"more": BESIDE}}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    checkpoint = read_checkpoint(tmp_path / "a.pth")
    assert same_tensors(checkpoint.tensors, small_state())
    assert (checkpoint.key, checkpoint.others) == ("state_dict", ())


def _cut(path: Path) -> None:
    (save_file if path.suffix == ".safetensors" else torch.save)(small_state(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _bomb(path: Path) -> None:
    torch.save({"a": torch.zeros(5_000_000)}, path)
    with zipfile.ZipFile(path) as plain:
        content = [(entry.filename, plain.read(entry)) for entry in plain.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in content:
            packed.writestr(name, data)


WIDE: dict[str, Any] = {}
WIDE.update({f"k{i}": WIDE for i in range(2000)})


def _saves(content: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path, **options)


class Opens:  # a class of somebody's own
    def __setstate__(self, state: object) -> None:
        raise AssertionError("it was made")


OLD = {"_use_new_zipfile_serialization": False}
UNREADABLE: list[tuple[str, Callable[[Path], object], str]] = [
    ("a.pth", lambda path: None, "there is no checkpoint file"),
    ("a.pth", Path.mkdir, "is a folder"),
    ("a.pth", os.mkfifo, "is a pipe or a device"),
    ("a.safetensors", os.mkfifo, "is a pipe or a device"),
    ("a.pth", _cut, "not a whole checkpoint"),
    ("a.safetensors", _cut, "not a whole safetensors"),
    ("a.pth", lambda path: path.write_text("hello"), "not a whole checkpoint"),
    ("a.npz", lambda path: np.savez(path, a=np.zeros(2)), "save weights as .safetensors or .pth"),
    ("a.pth", _saves(nn.Linear(2, 2)), r"Python objects \(torch.nn.modules.linear.Linear\)"),
    ("a.pth", _saves({"a": nn.ReLU()}, **OLD), r"Python objects \(torch.nn"),
    ("a.pth", _saves({"a": Opens(), "b": Path("x")}), r"Python objects \(.*Opens\)"),
    ("a.pth", _saves({"a": np.ones(2), "b": np.float64(1)}), "no tensors"),
    (
        "a.pth",
        lambda path: torch.jit.save(torch.jit.script(nn.ReLU()), path),
        "TorchScript.*save the model's state_d",
    ),
    ("a.pth", _saves([torch.zeros(2)]), "no tensors"),
    (
        "a.pth",
        _saves({"g": small_state(), "d": small_state()}),
        r"several sets of weights \(g, d\)",
    ),
    ("a.pth", _saves({"a": torch.eye(3).to_sparse()}), r"sparse, .*\(a\); save them dense"),
    ("a.pth", _saves({"a": torch.empty(3, device="meta")}), "without data"),
    ("a.pth", _saves({"a": torch.zeros(1).expand(10**9)}), "unpacks to 4,000,000,000"),
    ("a.pth", _bomb, "unpacks to "),
    ("a.pth", _saves(WIDE), "no tensors"),
]


@pytest.mark.parametrize(("name", "write", "message"), UNREADABLE)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_says_why_a_file_is_not_read(
    tmp_path: Path, name: str, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / name)
    with refused(message):
        read_checkpoint(tmp_path / name)


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
            ["2 of another shape (3.weight [7, 16] f", "`num_classes=7`"],
        ),
        (
            lambda s: small_state(channels=1),
            ["1 of another shape (0.weight [4, 1, 3, 3]", "`in_chans=1`"],
        ),
        (
            lambda s: small_state(width=8),
            ["7 of another shape", " and 4 more)", "check which network"],
        ),
        (lambda s: under("n", s), ["`match='order'`"]),
        (
            lambda s: {**s, "0.bias": s["0.bias"].to(torch.int8)},
            ["1 of another type (0.bias int8 for float32)"],
        ),
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


@pytest.mark.parametrize("match", ["name", "order"])
def test_warns_of_weights_that_are_not_finite(match: Any) -> None:
    state = small_state()
    state["3.weight"][0, 0], state["1.running_var"][1] = float("nan"), float("-inf")
    (said,) = load_into(small_net(), state, match).warnings
    assert re.search("2 tensors.*1.running_var, 3.weight", said)


@pytest.mark.parametrize(
    ("match", "message"), [("shape", "choose name or order"), ("order", "drop it or `checkp")]
)
def test_wrong_usage(match: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_into(small_net(), small_state(), match, partial=True)


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
        RetrofitError, match=r"1 unexpected \(criterion.weight\); pass `checkpoint_key=.model.`"
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
