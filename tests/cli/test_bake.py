"""`retrofit bake`: its refusals."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run, complaint, done
from tests.half_resnet import FLAGS


def test_refusals(run: Run, pictures: Path) -> None:
    words = ["test_resnet", *FLAGS, "--img-size", "32", "--to", "ln", "--strength", "1", "-o", "net.safetensors"]
    done(run("convert", *words))
    for words, code, said in (
        (["--calibrate", "absent"], 1, "absent"),
        (["--calibrate", str(pictures), "--tolerance", "-1"], 2, "--tolerance must be more than 0"),
        (["--calibrate", str(pictures), "-o", "net.safetensors"], 1, "--force"),
        ([], 2, "--calibrate"),
    ):
        result = run("bake", "net.safetensors", *words)
        assert (result.exit_code, said in complaint(result)) == (code, True)
        assert not Path("net-baked.safetensors").exists()
