"""What an artifact gives back is the function that was saved, also where no tensor says so; or it
is refused.

So is a file that was damaged or made to do harm: in one short line, soon, or it is read as what it
is.
"""

import io
import json
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch import nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.networks import sampled_outputs
from retrofit.networks.checkpoint import read_checkpoint
from retrofit.networks.load_weights import load_into
from retrofit.networks.manifest import read_manifest, seal
from retrofit.networks.model_sources import build
from retrofit.networks.state_tensors import checksum
from retrofit.record import ModelSource, Preprocess
from tests.networks.conftest import built, refused, same_tensors

Change = Callable[[nn.Module], object]


class Loud(nn.ReLU):  # a subclass with another forward
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x)


@pytest.mark.parametrize(
    ("to", "change", "message"),
    [
        (
            "bnn",
            lambda m: setattr(m.bn1, "eps", 0.3),
            "eps of bn1 is 0.3 here, 1e-05 in test_resnet",
        ),
        (
            "bnn",
            lambda m: setattr(m.conv1[0], "padding", (0, 0)),
            r"padding of conv1.0 is \[0, 0\] h",
        ),
        ("bnn", lambda m: setattr(m, "drop_rate", 0.5), "drop_rate of the network is 0.5 here"),
        ("bnn", lambda m: setattr(m, "act1", Loud()), "class of act1 is Loud here, ReLU in"),
        (
            None,
            lambda m: m.act1.add_module("x", nn.ReLU()),
            "class of act1.x is ReLU here, None in",
        ),
        (
            "bnn",
            lambda m: vars(m.layer1[0]).update(forward=m.layer1[0].forward),
            "replaced forward of layer1.0 is True here, False in test_resnet",
        ),
        (
            "bnn",
            lambda m: m.layer1.register_forward_hook(lambda *args: 2 * args[-1]),
            "built again, test_resnet diff",
        ),
    ],
)
def test_what_a_library_does_not_build_is_refused(
    tmp_path: Path, to: str | None, change: Change, message: str
) -> None:
    model = built("test_resnet", to)
    change(model)
    with refused(rf"{message}.*save\(source='own'\)"):
        retrofit.save(model, tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == []
    retrofit.save(model, tmp_path / "a.safetensors", source="own")
    assert read_manifest(tmp_path / "a.safetensors")["model"]["library"] == "own"


def _notes(model: nn.Module) -> None:
    model.class_to_idx, model.layer1.note = {"cat": 0}, "mine"
    model.scale, model.limits, model.sizes = (
        torch.tensor(2.0),
        np.array(2.0),
        [np.float32(1), torch.ones(2)],
    )
    model.set_grad_checkpointing()
    model.layer1.register_forward_hook(
        lambda *_: None
    )  # as transformers does at a network's first run


@pytest.mark.parametrize(
    ("name", "change"),
    [("test_resnet", _notes), ("efficientvit_m0", lambda m: m.eval()(torch.randn(1, 3, 224, 224)))],
    ids=["notes on it", "a run, after which it keeps the biases of its attention"],
)
def test_what_makes_no_difference(tmp_path: Path, name: str, change: Change) -> None:
    model = built(name)
    with torch.no_grad():
        change(model)
    retrofit.save(model, tmp_path / "a.safetensors")
    assert not hasattr(retrofit.load(tmp_path / "a.safetensors"), "class_to_idx")


def test_a_network_that_accelerate_wrapped(tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    model = built("test_resnet", "bnn")
    wrapped = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "forward" in vars(wrapped)
    retrofit.save(wrapped, tmp_path / "a.safetensors")
    images = torch.randn(2, 3, 64, 64)
    again = retrofit.load(tmp_path / "a.safetensors").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images), type(model).forward(model.eval(), images))


# --- sampled outputs


def test_the_samples_are_a_handful_of_numbers(saved: Path) -> None:
    known = read_manifest(saved)["sampled_outputs"]
    assert (known["size"], known["classes"]) == ([3, 64, 64], 3)  # half of its own, in steps of 32
    assert "" in known["values"]
    assert all(len(value["samples"]) <= 6 for value in known["values"].values())
    assert len(known["values"]) <= 14


FORWARD = timm.models.resnet.BasicBlock.forward


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: 1.01 * FORWARD(self, x), "output of .* differs"),
        (lambda self, x: self.no_such_attribute(x), "it takes no random images of 3x64x64"),
    ],
)
def test_another_function_of_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: Callable[..., object], message: str
) -> None:
    retrofit.save(built("test_resnet", "bnn"), tmp_path / "a.safetensors")
    monkeypatch.setattr(timm.models.resnet.BasicBlock, "forward", forward)
    with refused(rf"does not come back as it was saved, with timm .* \(it was made .* {message}"):
        retrofit.load(tmp_path / "a.safetensors")


def test_one_changed_byte_is_found(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start, end = json.loads(data[8 : 8 + length])["conv1.1.running_lambda"]["data_offsets"]
    data[8 + length + (start + end) // 2] ^= 1
    saved.write_bytes(data)
    with refused(r"were changed after it was saved"):
        retrofit.load(saved)


def test_a_large_network_is_asked_about_smaller_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampled_outputs, "sample_outputs_at", lambda _, size: sampled_outputs.SampledOutputs(size)
    )
    with torch.device("meta"):
        channels, height, width = sampled_outputs.sample_outputs(
            timm.create_model("resnet18"), (3, 4096, 2048)
        ).size
    assert (channels, height) == (3, 2 * width)
    assert 64 <= width < 2048


@pytest.mark.parametrize(
    ("make", "size", "reason"),
    [
        (lambda: nn.Conv2d(3, 6000, 8), (3, 63, 63), "it is large"),  # and takes images of one size
        (
            lambda: nn.Threshold(torch.inf, torch.nan),
            (3, 64, 64),
            "it answers random images with no finite number",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)),
            (3, 64, 64),
            "it takes no random images",
        ),
    ],
)
def test_what_is_not_run_is_said_in_the_file_and_when_it_is_loaded(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    size: tuple[int, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampled_outputs, "_PRODUCTS", 1e9)
    model = retrofit.convert(make(), "bnn", check=False)[0] if "takes" in reason else make()
    retrofit.save(
        model, tmp_path / "a.safetensors", preprocess=Preprocess(size, (0.0,) * 3, (1.0,) * 3)
    )
    assert reason in read_manifest(tmp_path / "a.safetensors")["sampled_outputs"]["not_checked"]
    with pytest.warns(
        UserWarning, match=f"a.safetensors is not checked: {reason}.*names and shapes"
    ):
        again = retrofit.load(tmp_path / "a.safetensors", into=make())
    assert same_tensors(again.state_dict(), model.state_dict())


def test_a_difference_of_rounding_is_none() -> None:
    model = built("test_resnet")
    known = sampled_outputs.sample_outputs(model, (3, 64, 64))
    for change, differs in ((1e-6, False), (1e-2, True)):
        with torch.no_grad():
            model.fc.weight.mul_(1 + change)
            model.fc.bias.mul_(1 + change)
        assert bool(known.difference(model)) is differs


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
@pytest.mark.parametrize(("name", "to"), [("resnet50", "bnn"), ("vit_tiny_patch16_224", "lnn")])
def test_the_samples_hold_on_another_processor(
    tmp_path: Path, capability: str, name: str, to: str
) -> None:
    model = retrofit.convert(build(ModelSource("timm", name)), to, check=False)[0]
    retrofit.set_strength(model, 1.0)
    retrofit.save(model, tmp_path / "a.safetensors")
    code = f"import retrofit; retrofit.load({str(tmp_path / 'a.safetensors')!r})"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "RETROFIT_KERNELS": "eager"}
    subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, cwd=Path(__file__).parents[2]
    )


def test_the_user_may_say_what_the_builder_got(tmp_path: Path) -> None:
    model = built("test_byobnet", in_chans=1, num_classes=4)
    del model.pretrained_cfg, model.__dict__["_retrofit_record"]
    kwargs = {"in_chans": 1, "num_classes": 4}
    retrofit.save(model, tmp_path / "a.safetensors", source="test_byobnet", model_kwargs=kwargs)
    assert read_manifest(tmp_path / "a.safetensors")["model"]["kwargs"] == kwargs
    assert retrofit.load(tmp_path / "a.safetensors")(torch.zeros(2, 1, 64, 64)).shape == (2, 4)
    with pytest.raises(UsageError, match="say which with `source`"):
        retrofit.save(model, tmp_path / "b.safetensors", model_kwargs=kwargs)


# --- damaged files

_SECONDS = 5  # of the process itself: other work on the machine is not the file's fault


def _reads(read: Callable[[], object]) -> bool:
    """Whether a file was read; if not, it was refused as users should see it."""
    start, said = time.process_time(), ""
    try:
        read()
    except RetrofitError as error:
        said = str(error)
        assert said.isprintable(), said[:500]
        assert len(said) <= 700, said  # some 600 and the path
    assert time.process_time() - start < _SECONDS
    return not said


def _bytes(
    rng: random.Random, data: bytes
) -> bytes:  # damage a file as disks, networks and people do
    place = rng.randrange(len(data))
    flipped = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    overwritten = data[:place] + rng.randbytes(rng.randrange(1, 64)) + data[place + 64 :]
    return rng.choice(
        [data[:place], flipped, overwritten, data[place:] + data[:place], data + data[:place]]
    )


_RAW = (
    "1e400",
    "-1e400",
    "NaN",
    "9" * 4000,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 900,
)  # JSON as it is
_ODD_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        7,
        0.5,
        10_000,
        5_000_000,
        2**63,
        -(2**70),
        "",
        "x" * 5000,
        "a\nb\x1b[2J",
        [],
        {},
        [[1]],
    ),
    *(
        [1_000_000, 1, 1, 1],
        {"a": {"b": 1}},
        [None] * 50_000,
        "../../etc/passwd",
        "hf-hub:timm/x",
        "py:os:system",
    ),
    *(f"raw: {text}" for text in _RAW),
    *(
        "eva02_enormous_patch14_clip_224",
        "vit_giant_patch14_clip_224",
        "torchvision",
        "own",
        "regnet_y_128gf",
    ),
)


def _manifest(rng: random.Random, manifest: dict[str, Any]) -> str:
    """Damage a manifest in one place or a few; deep places are as likely as the many that lie at
    the top.
    """
    for _ in range(rng.randrange(1, 4)):
        holder: Any = manifest
        key: Any = rng.choice(list(manifest))
        while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            key = rng.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
        value = holder[key]
        near = (
            [value + 1, -value, value * 1000, value + 0.25]
            if isinstance(value, (int, float))
            else [[value]]
        )
        if (kind := rng.randrange(5)) == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(["extra", "x" * 5000, "a\nb", "pretrained"])] = rng.choice(
                _ODD_VALUES
            )
        else:
            holder[key] = rng.choice([*near, *_ODD_VALUES])
    text = json.dumps(manifest)
    for raw in _RAW:
        text = text.replace(json.dumps(f"raw: {raw}"), raw)
    return text


class _Harm:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, ("raise SystemExit('a file ran code')",)


def _tensors(rng: random.Random, tensors: dict[str, Any], pickled: bool = True) -> dict[str, Any]:
    """Damage one tensor of a state dict, or its name."""
    name = rng.choice(list(tensors))
    tensor = tensors[name]
    names = [
        "x" * 5000,
        "a\nb",
        name + ".x",
        "module." + name,
        "\x1b[2J",
        *([3] if pickled else []),
    ]
    types = [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
    odd: list[Any] = [
        tensor.to(rng.choice(types)),
        tensor[None].clone(),
        torch.zeros(5_000_000),
        torch.zeros(0),
    ]
    if pickled:
        odd += [
            tensor.to_sparse(),
            tensor.to("meta"),
            tensor.reshape(-1)[:1].expand(10**9),
            None,
            [tensor],
            _Harm(),
        ]
    kind = rng.randrange(4)
    others = {key: value for key, value in tensors.items() if key != name or kind == 1}
    if kind == 0:
        return others
    return (
        {**others, rng.choice(names): tensor.clone()}
        if kind < 3
        else {**others, name: rng.choice(odd)}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to"), [("test_byobnet", "bnn"), ("test_resnet", "gn-pn"), ("test_vit", "lnn")]
)
def test_mutated_artifacts(name: str, to: str, tmp_path: Path) -> None:
    whole, path, read = tmp_path / "whole.safetensors", tmp_path / "a.safetensors", 0
    retrofit.save(built(name, to, num_classes=3), whole)
    for number in range(60):
        rng = random.Random(f"{name} {number}")
        kind, manifest, tensors = rng.randrange(8), read_manifest(whole), load_file(whole)
        if kind < 2:
            path.write_bytes(_bytes(rng, whole.read_bytes()))
        else:
            if kind == 2:
                tensors = _tensors(rng, tensors, pickled=False)
                manifest["checksum"] = checksum(tensors)
            text = json.dumps(manifest) if kind == 2 else _manifest(rng, manifest)
            # As a file says it that has no checksum of its manifest, or has the right one.
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                values = json.loads(text)
                values.pop("manifest_checksum", None)
                text = json.dumps(values) if kind % 2 else seal(values)
            save_file(tensors, path, {"format": "pt", "retrofit": text})
        read += _reads(lambda: retrofit.load(path))
    assert 0 < read < 60


@pytest.mark.slow
def test_mutated_checkpoints(tmp_path: Path) -> None:
    path, model, read = tmp_path / "a.pth", built("test_byobnet"), 0
    state = model.state_dict()
    for number in range(300):
        rng = random.Random(number)
        out = io.BytesIO()
        changed = _tensors(rng, dict(state)) if rng.random() < 0.6 else state
        nested = rng.choice(
            [changed, {"model": changed}, {"a": {"b": {"c": {"d": changed}}}}, [changed]]
        )
        torch.save(nested, out, _use_new_zipfile_serialization=rng.random() < 0.8)
        path.write_bytes(out.getvalue() if changed is not state else _bytes(rng, out.getvalue()))
        read += _reads(lambda: load_into(model, read_checkpoint(path).tensors))
    assert 0 < read < 300
