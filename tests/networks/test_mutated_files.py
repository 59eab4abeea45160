"""Files that were damaged or made to do harm: refused in one short line, soon, or read as what they are."""

import io
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import retrofit
from retrofit.errors import RetrofitError
from retrofit.networks.artifact import load, read_manifest
from retrofit.networks.checkpoint import load_into, read_checkpoint
from retrofit.networks.contents import checksum
from tests.networks.conftest import built

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


def _bytes(rng: random.Random, data: bytes) -> bytes:
    """Damage a file as disks, networks and people do."""
    place = rng.randrange(len(data))
    flipped = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    overwritten = data[:place] + rng.randbytes(rng.randrange(1, 64)) + data[place + 64 :]
    return rng.choice([data[:place], flipped, overwritten, data[place:] + data[:place], data + data[:place]])


_RAW = ("1e400", "-1e400", "NaN", "9" * 4000, "[" * 3000 + "]" * 3000, '{"a":' * 900)  # JSON as it is
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 0.5, 10_000, 5_000_000, 2**63, -(2**70), "", "x" * 5000, "a\nb\x1b[2J", [], {}, [[1]]),
    *([1_000_000, 1, 1, 1], {"a": {"b": 1}}, [None] * 50_000, "../../etc/passwd", "hf-hub:timm/x", "py:os:system"),
    *(f"raw: {text}" for text in _RAW),
    *("eva02_enormous_patch14_clip_224", "vit_giant_patch14_clip_224", "torchvision", "own", "regnet_y_128gf"),
)


def _manifest(rng: random.Random, manifest: dict[str, Any]) -> str:
    """Damage a manifest in one place or a few; deep places are as likely as the many that lie at the top."""
    for _ in range(rng.randrange(1, 4)):
        holder: Any = manifest
        key: Any = rng.choice(list(manifest))
        while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            key = rng.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
        value = holder[key]
        near = [value + 1, -value, value * 1000, value + 0.25] if isinstance(value, (int, float)) else [[value]]
        if (kind := rng.randrange(5)) == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(["extra", "x" * 5000, "a\nb", "pretrained"])] = rng.choice(_ODD_VALUES)
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
    names = ["x" * 5000, "a\nb", name + ".x", "module." + name, "\x1b[2J", *([3] if pickled else [])]
    types = [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
    odd: list[Any] = [tensor.to(rng.choice(types)), tensor[None].clone(), torch.zeros(5_000_000), torch.zeros(0)]
    if pickled:
        odd += [tensor.to_sparse(), tensor.to("meta"), tensor.reshape(-1)[:1].expand(10**9), None, [tensor], _Harm()]
    kind = rng.randrange(4)
    others = {key: value for key, value in tensors.items() if key != name or kind == 1}
    if kind == 0:
        return others
    return {**others, rng.choice(names): tensor.clone()} if kind < 3 else {**others, name: rng.choice(odd)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("test_byobnet", "bnn"), ("test_resnet", "gn-pn"), ("test_vit", "lnn")])
def test_mutated_artifacts(name: str, to: str, tmp_path: Path) -> None:
    whole, path, read = tmp_path / "whole.safetensors", tmp_path / "a.safetensors", 0
    retrofit.save(built(name, to, num_classes=3), whole)
    for number in range(170):
        rng = random.Random(f"{name} {number}")
        kind, manifest, tensors = rng.randrange(8), read_manifest(whole), load_file(whole)
        if kind < 2:
            path.write_bytes(_bytes(rng, whole.read_bytes()))
        else:
            if kind == 2:
                tensors = _tensors(rng, tensors, pickled=False)
                manifest["checksum"] = checksum(tensors)
            text = json.dumps(manifest) if kind == 2 else _manifest(rng, manifest)
            save_file(tensors, path, {"format": "pt", "retrofit": text})
        read += _reads(lambda: load(path))
    assert 0 < read < 170


@pytest.mark.slow
def test_mutated_checkpoints(tmp_path: Path) -> None:
    path, model, read = tmp_path / "a.pth", built("test_byobnet"), 0
    state = model.state_dict()
    for number in range(300):
        rng = random.Random(number)
        out = io.BytesIO()
        changed = _tensors(rng, dict(state)) if rng.random() < 0.6 else state
        nested = rng.choice([changed, {"model": changed}, {"a": {"b": {"c": {"d": changed}}}}, [changed]])
        torch.save(nested, out, _use_new_zipfile_serialization=rng.random() < 0.8)
        path.write_bytes(out.getvalue() if changed is not state else _bytes(rng, out.getvalue()))
        read += _reads(lambda: load_into(model, read_checkpoint(path).tensors))
    assert 0 < read < 300
