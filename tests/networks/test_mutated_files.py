"""Files that were damaged or made to do harm: refused in one short line, soon, or read as what they are."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import retrofit
from retrofit.errors import RetrofitError
from retrofit.networks.artifact import load
from retrofit.networks.checkpoint import read_checkpoint
from retrofit.networks.load_weights import load_into
from retrofit.networks.manifest import read_manifest

_SECONDS = 5  # of the process itself: other work on the machine is not the file's fault


def _judged(read: Callable[[], object]) -> bool:
    """Whether a file was read; if not, it was refused as users should see it."""
    start = time.process_time()
    try:
        read()
    except RetrofitError as error:
        said = str(error)
        assert said.isprintable(), said[:500]
        assert len(said) <= 700, said  # some 600 and the path
        read_it = False
    else:
        read_it = True
    assert time.process_time() - start < _SECONDS
    return read_it


def _bytes(rng: random.Random, data: bytes) -> bytes:
    """Damage a file as disks, networks and people do."""
    kind, place = rng.randrange(5), rng.randrange(len(data))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + rng.randbytes(rng.randrange(1, 64)) + data[place + 64 :]
    if kind == 3:
        return data[place:] + data[:place]
    return data + data[: rng.randrange(1, len(data))]


class _Harm:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, ("raise SystemExit('a file ran code')",)


def _odd_tensor(rng: random.Random, tensor: torch.Tensor) -> object:
    return rng.choice(
        [
            lambda: tensor.to(rng.choice([torch.int8, torch.int64, torch.bool, torch.complex64, torch.bfloat16])),
            lambda: tensor.reshape(-1),
            lambda: tensor[None],
            tensor.to_sparse,
            lambda: tensor.to("meta"),
            lambda: tensor.reshape(-1)[:1].expand(10**9),
            lambda: tensor * float("nan"),
            lambda: torch.zeros([1] * 60),
            lambda: rng.choice([None, 3, "x" * 5000, [tensor], _Harm()]),
        ]
    )()


def _saved(rng: random.Random, state: dict[str, Any]) -> bytes:
    state = dict(state)
    for _ in range(rng.randrange(1, 3)):
        name = rng.choice(list(state))
        kind = rng.randrange(5)
        if kind == 0:
            del state[name]
        elif kind == 1:
            state[rng.choice(["x" * 5000, "a\nb", 3, (1, 2), name + ".x", "module." + name])] = state.pop(name)
        elif kind == 2:
            state[rng.choice(["extra", "y" * 3000, "\x1b[2J", 7])] = torch.zeros(2)
        else:
            state[name] = _odd_tensor(rng, state[name]) if isinstance(state[name], torch.Tensor) else _Harm()
    wrapped: Any = rng.choice(
        [
            lambda: state,
            lambda: {"model": state, "model_ema": dict(state)},
            lambda: {"a": {"b": {"c": {"d": state}}}},
            lambda: {f"net.{name}": value for name, value in state.items()},
            lambda: [state],
        ]
    )()
    out = io.BytesIO()
    torch.save(wrapped, out, _use_new_zipfile_serialization=rng.random() < 0.8)
    return out.getvalue()


def _zipped(rng: random.Random, data: bytes) -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(out, "w", rng.choice([0, zipfile.ZIP_DEFLATED])) as new,
    ):
        for entry in old.infolist():
            content = old.read(entry)
            kind = rng.randrange(12)
            if kind == 0:
                continue
            if kind == 1:
                content = bytes(50_000_000)
            elif kind == 2:
                content = _bytes(rng, content) if content else b"x"
            elif kind == 3:
                content = pickle.dumps(_Harm())
            new.writestr(f"../{entry.filename}" if kind == 4 else entry.filename, content)
    return out.getvalue()


_RAW = "raw: "  # what stands behind it goes into the JSON as it is
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 0.5, 10_000, 5_000_000, 2**63, -(2**70), "", "x" * 5000, "a\nb\x1b[2J", [], {}, [[1]]),
    *([1_000_000, 1, 1, 1], {"a": {"b": 1}}, [None] * 50_000, "../../etc/passwd", "hf-hub:timm/x", "py:os:system"),
    *(_RAW + text for text in ("1e400", "-1e400", "NaN", "9" * 4000, "[" * 3000 + "]" * 3000, '{"a":' * 900)),
    *("eva02_enormous_patch14_clip_224", "vit_giant_patch14_clip_224", "torchvision", "own", "regnet_y_128gf"),
)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value holds values; of long lists, the first and the last."""
    if isinstance(value, dict):
        keys: Any = value
    elif isinstance(value, list):
        keys = sorted({0, len(value) - 1}) if value else ()
    else:
        return
    for key in keys:
        yield (*place, key)
        yield from _places(value[key], (*place, key))


def _manifest(rng: random.Random, manifest: dict[str, Any]) -> str:
    """Damage a manifest in one place or a few; deep places are as likely as the many that lie at the top."""
    for _ in range(rng.randrange(1, 4)):
        places = list(_places(manifest))
        section = rng.choice([place for place in places if len(place) == 1])
        *above, key = rng.choice([place for place in places if place[0] == section[0]])
        holder: Any = manifest
        for step in above:
            holder = holder[step]
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(["extra", "x" * 5000, "a\nb", "pretrained"])] = rng.choice(_ODD_VALUES)
        elif kind == 2 and isinstance(holder[key], (int, float)):
            holder[key] = rng.choice([holder[key] + 1, -holder[key], holder[key] * 1000, float(holder[key]) + 0.25])
        elif kind == 3:
            holder[key] = [holder[key]]
        elif kind == 4 and isinstance(holder[key], list):
            holder[key] = holder[key] * rng.choice([2, 100])
        else:
            holder[key] = rng.choice(_ODD_VALUES)
    text = json.dumps(manifest)
    for value in _ODD_VALUES:
        if isinstance(value, str) and value.startswith(_RAW):
            text = text.replace(json.dumps(value), value.removeprefix(_RAW))
    return _bytes(rng, text.encode()).decode(errors="replace") if rng.random() < 0.1 else text


def _tensors(rng: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = rng.choice(list(tensors))
    tensor = tensors.pop(name)
    changed: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "gone": dict,
        "renamed": lambda: {rng.choice(["x" * 5000, "a\nb", name + ".x", "module." + name]): tensor},
        "more": lambda: {name: tensor, rng.choice(["extra", "y" * 3000, "\x1b[2J"]): torch.zeros(2)},
        "type": lambda: {
            name: tensor.to(rng.choice([torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]))
        },
        "shape": lambda: {name: tensor[None].repeat(2, *[1] * tensor.ndim)},
        "large": lambda: {name: torch.zeros(5_000_000)},
        "empty": lambda: {name: torch.zeros(0)},
        "not a number": lambda: {
            name: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else -tensor
        },
        "moved": lambda: {name: tensor + 1},
    }
    return {**tensors, **changed[rng.choice(list(changed))]()}


def _header(rng: random.Random, data: bytes) -> bytes:
    """Damage what safetensors itself reads: the length of its header, and each tensor's type, shape and place."""
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    kind = rng.randrange(5)
    if kind == 0:
        length = rng.choice([0, 1, length - 1, length + 1, 2**40, 2**64 - 1])
        return struct.pack("<Q", length) + data[8:]
    if kind == 1:
        entry["dtype"] = rng.choice(["F32", "F16", "I64", "BOOL", "F99", "F8_E4M3", 3])
    elif kind == 2:
        entry["shape"] = rng.choice([[], [-1], [2**40, 2**40], entry["shape"] * 2, [1] * 70, "x"])
    elif kind == 3:
        start, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice([[end, start], [0, end], [start + 4, end + 4], [start, 2**63], [start]])
    else:
        header["__metadata__"] = rng.choice([{"retrofit": "{}"}, {}, {"retrofit": 1}, {"a": "b" * 100_000}])
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + rest


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("test_byobnet", "bnn"), ("test_resnet", "gn-pn"), ("test_vit", "lnn")])
def test_mutated_artifacts(name: str, to: str, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.safetensors", tmp_path / "a.safetensors"
    model, _ = retrofit.convert(timm.create_model(name, num_classes=3), to, check=False)
    retrofit.save(model, whole)
    taken = 0
    for number in range(170):
        rng = random.Random(f"{name} {number}")
        kind = rng.randrange(8)
        if kind == 0:
            path.write_bytes(_bytes(rng, whole.read_bytes()))
        elif kind == 1:
            path.write_bytes(_header(rng, whole.read_bytes()))
        elif kind == 2:
            manifest = json.dumps(read_manifest(whole))
            save_file(_tensors(rng, load_file(whole)), path, {"format": "pt", "retrofit": manifest})
        else:
            save_file(load_file(whole), path, {"format": "pt", "retrofit": _manifest(rng, read_manifest(whole))})
        taken += _judged(lambda: load(path))
    assert 0 < taken < 170


@pytest.mark.slow
def test_mutated_checkpoints(tmp_path: Path) -> None:
    path, model = tmp_path / "a.pth", timm.create_model("test_byobnet")
    state = model.state_dict()
    plain = io.BytesIO()
    torch.save(state, plain)
    taken = 0
    for number in range(300):
        rng = random.Random(number)
        make = rng.choice(
            [lambda r: _saved(r, state), lambda r: _bytes(r, plain.getvalue()), lambda r: _zipped(r, plain.getvalue())]
        )
        path.write_bytes(make(rng))
        taken += _judged(lambda: load_into(model, read_checkpoint(path).tensors))
    assert 0 < taken < 300
