"""What a command refuses: one line that says what to do, an exit code, and nothing written or changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run, complaint
from tests.pictures import write_folder

NET, DATA = "net.safetensors", "--data-dir pictures"


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (f"bake {NET}", 2, "--calibrate"),
        (f"bake {NET} --calibrate absent", 1, "absent"),
        (f"bake {NET} --calibrate pictures --tolerance -1", 2, "--tolerance must be more than 0"),
        (f"bake {NET} --calibrate pictures -o {NET}", 1, "--force"),
        ("bench test_resnet", 2, "--against"),
        ("bench test_resnet --against test_resnet", 2, "against itself"),
        ("bench test_resnet --against net.onnx", 2, "compare two of a kind"),
        ("bench test_resnet --against test_vit --amp-dtype bfloat16", 2, "give --amp too"),
        ("bench test_resnet --against test_vit --runtime openvino", 2, "--runtime runs exported files"),
        ("bench test_resnet --device abacus", 2, "cannot use --device abacus"),
        ("convert test_vit --to bnn", 1, "BatchNorm.* LayerNorm.*--to lnn"),
        ("convert test_resnet --to bnn", 1, "exists; pass --force"),
        ("convert test_resnet --to bnn -o b.safetensors --model-kwargs depht=3", 2, "depht"),
        ("convert no_model --to bnn -o no/a.safetensors", 1, "no does not exist"),  # said before it is opened
        ("convert test_resnet --to bnn -o a.pth", 2, "ends in .safetensors"),
        ("diagnose test_resnet", 2, "--data-dir"),
        ("diagnose test_resnet --data-dir absent", 1, "no data at absent"),
        (f"diagnose test_resnet {DATA} --device quantum", 2, "cannot use --device quantum"),
        (f"diagnose test_resnet {DATA} -o no/where", 1, "no does not exist; create it"),
        (f"diagnose test_resnet {DATA} --against resnet99", 2, "resnet99"),
        ("evaluate test_resnet", 2, "give --data-dir or --dataset"),
        (f"evaluate test_resnet {DATA} -j 0 --num-classes 2", 1, "class 2 .* gives 2 scores"),
        ("evaluate test_resnet --data-dir parted", 2, r"but test, train; give --split .* --split \. for all"),
        (f"export {NET} --report net.html", 2, "a report is a .json file, not net.html; give --report a name that"),
        (f"export {NET} -o mine.onnx", 1, "mine.onnx exists; pass --force"),
        (f"export {NET} -o {NET} --force", 2, "ends in .onnx"),  # would have replaced the network
        (f"export {NET} --half --int8", 2, "choose one"),
        (f"export {NET} --opset 9", 2, "18 to 22"),
        ("finetune", 2, "there is no network to train"),
        (f"finetune {NET}", 2, "nothing to read images from; give --data-dir or --dataset"),
        (f"finetune {NET} {DATA} -o pictures", 1, "pictures exists; give another --output, "),
        (f"finetune {NET} --lr -1 --opt sdg --epochs x", 2, "3 mistakes in the settings"),
        (f"finetune {NET} {DATA} --device tpu", 2, "cannot use --device tpu"),
        (f"finetune {NET} {DATA} --log-with nothing", 2, "no tracker of accelerate"),
        ("finetune --resume nowhere", 1, "no run to resume in nowhere"),
        ("finetune --resume pictures --lr 1 --momentum 0", 2, "drop --lr, --momentum"),
        (f"finetune {NET} --resume pictures -o out", 2, "drop MODEL, --output"),
        (f"finetune test_resnet {DATA} --teacher source", 1, "cannot teach"),
        (f"finetune {NET} {DATA} --match order", 2, "set checkpoint too"),
        (f"finetune test_vit {DATA} --img-size 9", 1, "; give another --img-size"),
        ("inspect notes.txt", 2, "unknown model 'notes.txt'; give"),
        ("inspect test_resnet --skip bn1", 2, "--skip belongs to a conversion; give --to"),
        ("inspect test_resnet --from bn", 2, "--from belongs"),
        ("inspect test_resnet --no-pn-params", 2, "--pn-params belongs"),
        ("inspect .", 2, "is a folder and no network; give an artifact"),
        ("inspect there.txt", 2, "is a file and no network; give an artifact"),
        ("inspect weights.pth", 2, "is not a network's name or an artifact; give a name"),
    ],
)
def test_a_refusal_is_a_line_and_a_code(
    run: Run, here: Path, artifact: str, words: str, code: int, pattern: str
) -> None:
    for folder in ("pictures", "parted/test", "parted/train"):
        write_folder(here / folder, wrong=0, each=2)
    for name in ("there.txt", "mine.onnx", "test_resnet-bnn.safetensors"):
        Path(name).write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in here.rglob("*")}
    result = run(*words.split())
    assert result.exit_code == code, result.stderr
    assert re.search(pattern, complaint(result)), result.stderr
    assert {path: path.is_file() and path.read_bytes() for path in here.rglob("*")} == before
