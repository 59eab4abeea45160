"""What a command refuses: one line that says what to do in its flags, an exit code, and nothing written or changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run, complaint
from tests.cli.test_console import FLAG, flags_of
from tests.pictures import write_folder

NET, DATA = "net.safetensors", "--data-dir pictures"


@pytest.mark.parametrize(
    ("words", "code", "pattern"),
    [
        (f"bake {NET}", 2, "--calibrate"),
        (f"bake {NET} --calibrate absent", 1, "absent"),
        (f"bake {NET} --calibrate pictures -o {NET}", 1, "--force"),
        ("bench test_resnet", 2, "--against"),
        ("bench test_resnet --against test_resnet", 2, "against itself"),
        ("bench test_resnet --against net.onnx", 2, "compare two of a kind"),
        ("bench test_resnet --against test_vit --amp-dtype bfloat16", 2, "give --amp too"),
        ("bench test_resnet --against test_vit --runtime openvino", 2, "--runtime runs exported files"),
        ("bench test_resnet --device abacus", 2, "cannot use --device abacus"),
        ("bench a.onnx", 2, "name it with --against"),
        ("bench a.onnx --against b.onnx --amp --checkpoint w.pth", 2, "drop --amp, --checkpoint"),
        ("bench absent.onnx --against text.onnx", 1, "there is no file absent.onnx"),
        ("bench text.onnx --against absent.onnx", 1, "is not an ONNX file"),
        ("convert test_vit --to bnn", 1, "BatchNorm.* LayerNorm.*--to lnn"),
        ("convert test_resnet --to bnn", 1, "exists; pass --force"),
        ("convert test_resnet --to dbn --groups 2", 2, "--groups means nothing to .* takes --group-size"),
        ("convert test_resnet --to bnn -o b.safetensors --model-kwargs depht=3", 2, "depht"),
        ("convert no_model --to bnn -o no/a.safetensors", 1, "no does not exist"),  # said before it is opened
        ("convert test_resnet --to bnn -o a.pth", 2, "ends in .safetensors"),
        ("diagnose test_resnet", 2, "--data-dir"),
        (f"diagnose test_resnet {DATA} --device quantum", 2, "cannot use --device quantum"),
        (f"diagnose test_resnet {DATA} --checkpoint-key model", 2, "--checkpoint-key says .* give --checkpoint FILE"),
        (f"diagnose test_resnet {DATA} -o no/where", 1, "no does not exist; create it"),
        ("evaluate test_resnet", 2, "give --data-dir or --dataset"),
        (f"evaluate test_resnet {DATA} --pretrained --checkpoint w.pth", 2, "--pretrained and --checkpoint are two"),
        (f"evaluate test_resnet {DATA} --runtime openvino", 2, "--runtime runs exported files"),
        (f"evaluate net.onnx {DATA} --amp", 2, "drop --amp"),
        (f"evaluate net.onnx {DATA} --device cuda", 2, "drop --device"),
        (f"evaluate net.onnx {DATA} --checkpoint w.pth --num-classes 3", 2, "drop --checkpoint, --num-classes"),
        (f"evaluate net.onnx {DATA} --attack pgd", 2, "gives no gradients; drop --attack"),
        (f"evaluate absent.onnx {DATA}", 1, "there is no file absent.onnx"),
        (f"evaluate text.onnx {DATA}", 1, "text.onnx is not an ONNX file"),
        ("inspect weights.pth", 2, "no artifact; give the name, and this file as its checkpoint"),
        (f"export {NET} --report net.html", 2, "a report is a .json file, not net.html; give --report a name that"),
        (f"export {NET} -o mine.onnx", 1, "mine.onnx exists; pass --force"),
        (f"export {NET} -o {NET} --force", 2, "ends in .onnx"),  # would have replaced the network
        (f"export {NET} --half --int8", 2, "choose one"),
        (f"export {NET} --for openvino", 2, "--for matters .* use --fold poly"),
        ("finetune", 2, "there is no network to train"),
        (f"finetune {NET}", 2, "nothing to read images from; give --data-dir or --dataset"),
        (f"finetune {NET} {DATA} -o pictures", 1, "pictures exists; give another --output, .* by --resume"),
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
    ],
)
def test_a_refusal_is_a_line_and_a_code(
    run: Run, here: Path, artifact: str, words: str, code: int, pattern: str
) -> None:
    write_folder(here / "pictures", wrong=0, each=2)
    for name in ("there.txt", "text.onnx", "mine.onnx", "test_resnet-bnn.safetensors"):
        Path(name).write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in here.rglob("*")}
    result = run(*words.split())
    assert result.exit_code == code, result.stderr
    line = complaint(result)
    assert re.search(pattern, line)
    assert set(FLAG.findall(line)) <= {"--help", *flags_of(words.partition(" ")[0])}
    assert all(quoted.startswith("retrofit") for quoted in re.findall("`(.*?)`", line))  # and no Python argument
    assert {path: path.is_file() and path.read_bytes() for path in here.rglob("*")} == before
