"""Files that were damaged or made to do harm: refused in one short line, soon, or read as what they are."""

from __future__ import annotations

import io
import pickle
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from retrofit.errors import RetrofitError
from retrofit.finetune.catalogue import recipe_summaries, recipe_text
from retrofit.finetune.recipe import load_recipe
from retrofit.networks.checkpoint import read_checkpoint
from retrofit.networks.load_weights import load_into

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


def _recipe(rng: random.Random, text: str) -> bytes:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(lines))
        name = lines[place].partition(":")[0]
        odd = rng.choice(
            [
                *(
                    "1e400",
                    ".nan",
                    "-.inf",
                    "-1",
                    "9" * 5000,
                    "0x" + "f" * 5000,
                    "x" * 9000,
                    "[1, 2, 3]",
                    "{a: {b: {c: 1}}}",
                ),
                *(
                    "&a [1]",
                    "*a",
                    "!!python/object/apply:os.system [ls]",
                    "2001-99-99",
                    '"\\ud800"',
                    "[" * 900,
                    "'",
                    "~",
                    "yes",
                ),
            ]
        )
        lines[place] = rng.choice(
            [f"{name}: {odd}", f"{odd}: 1", f"{name}x: 1", f"{name}: 1\n{name}: 2", "\t" + name, ""]
        )
        if rng.random() < 0.05:
            lines += [f"k{i}: {i}" for i in range(rng.choice([300, 100_000]))]
    data = "\n".join(lines).encode()
    return _bytes(rng, data) if rng.random() < 0.2 else data


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


@pytest.mark.slow
def test_mutated_recipes(tmp_path: Path) -> None:
    path, names = tmp_path / "a.yaml", list(recipe_summaries())
    taken = 0
    for number in range(200):
        rng = random.Random(number)
        path.write_bytes(_recipe(rng, recipe_text(rng.choice(names))))

        def read() -> None:
            recipe = load_recipe(path, {"data_dir": "x"})
            recipe.save(tmp_path / "again.yaml")
            assert load_recipe(tmp_path / "again.yaml", {}) == recipe

        taken += _judged(read)
    assert 0 < taken < 200
