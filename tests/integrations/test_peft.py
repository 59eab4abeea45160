"""PEFT's LoRA on a converted network: only the adapters train, and what comes back is ours
again.
"""

import copy
from pathlib import Path

import peft
import pytest
import timm
import torch
from torch import nn

import retrofit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_lora_trains_the_adapters_of_a_converted_vit(strength: float) -> None:
    torch.manual_seed(0)
    model, _ = retrofit.convert(timm.create_model("test_vit", num_classes=3), "lnn")
    retrofit.set_strength(model, strength)
    source = copy.deepcopy(model).eval()
    images, labels = torch.randn(6, 3, 160, 160), torch.tensor([0, 1, 2, 0, 1, 2])
    config = peft.LoraConfig(r=4, target_modules=["qkv"], modules_to_save=["head"])
    adapted = peft.get_peft_model(model, config)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert all("lora_" in name or ".head." in name for name in trained)
    torch.testing.assert_close(adapted.eval()(images), source(images))

    adapted.train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(adapted(images), labels)
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]

    with torch.no_grad():
        expected = adapted.eval()(images)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(images), expected, atol=1e-4, rtol=1e-4)
    assert retrofit.strength_of(merged) == strength


def test_a_merged_network_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, _ = retrofit.convert(timm.create_model("test_vit", num_classes=3), "lnn")
    retrofit.set_strength(model, 1.0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["qkv"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero as PEFT begins, so that merging would change nothing
            nn.init.normal_(parameter, std=0.1)
    images = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        before = adapted.eval()(images)
    merged = adapted.merge_and_unload()
    retrofit.save(merged, tmp_path / "lora.safetensors")
    loaded = retrofit.load(tmp_path / "lora.safetensors").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), before, atol=1e-4, rtol=1e-4)
    report = retrofit.export_onnx(loaded, tmp_path / "lora.onnx")
    assert report.parity.passed
