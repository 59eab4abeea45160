"""What works from the wheel alone, without extras: run in an environment that holds nothing else.

python bare.py             convert, save, load, fold, strength, Opacus's fixer; the extra that a
                           command needs
python bare.py README.md   the Python blocks of the page (with the extras)
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import timm
import torch
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader, TensorDataset

import retrofit
import retrofit.opacus
from retrofit.utils.extras import EXTRAS


def without_extras() -> None:
    """Convert, save, load, fold and fix without the packages of any extra."""
    for module in EXTRAS:
        assert subprocess.run(
            [sys.executable, "-c", f"import {module}"], check=False, stderr=subprocess.DEVNULL
        ).returncode, module
    source = timm.create_model("resnet18", num_classes=10).eval()
    images = torch.randn(2, 3, 64, 64)
    expected = source(images)
    model, _ = retrofit.convert(source, to="ln")
    retrofit.save(model, "ln.safetensors")
    assert "# resnet18" in retrofit.save_for_hub(model, "hub").joinpath("README.md").read_text()
    model = retrofit.load("ln.safetensors").eval()
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    retrofit.set_strength(model, 0.5)
    folded = retrofit.fold(model, input_size=(3, 64, 64))
    torch.testing.assert_close(folded(images), model(images), rtol=1e-3, atol=1e-3)
    private = ModuleValidator.fix(timm.create_model("resnet18", num_classes=10), to="frozen")
    assert ModuleValidator.is_valid(private)
    retrofit_command = str(Path(sys.executable).with_name("retrofit"))
    export = subprocess.run(
        [retrofit_command, "export", "ln.safetensors"], check=False, capture_output=True, text=True
    )
    assert export.returncode == 1
    assert "pip install 'retrofit-norm[export]'" in export.stderr, export.stderr


def page(path: Path) -> None:
    """Run the Python blocks of a page one after the other."""
    create = timm.create_model
    timm.create_model = lambda name, pretrained, **options: create(name, **options)  # no download
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    images = TensorDataset(torch.randn(4, 3, 64, 64), torch.zeros(4).long())
    names = {"total_steps": 2, "data_loader": DataLoader(images, 2)}
    exec(compile("".join(blocks), path.name, "exec"), names)


if __name__ == "__main__":
    readme = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        page(readme) if readme else without_extras()
    print("ok")
