"""Converted networks under torch.compile with sizes that vary, and quantized by PT2E."""

import copy

import pytest
import torch
from torch import Tensor, nn

import retrofit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def network(to: str) -> nn.Module:
    torch.manual_seed(0)
    features: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    if to == "lnn":
        features[1] = nn.LayerNorm([8, 16, 16])
    net = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    converted, _ = retrofit.convert(net, to, inputs=(IMAGES,))
    if to != "frozen":
        retrofit.set_strength(converted, 0.5)
    return converted


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("to", ["frozen", "ln", "bnn", "lnn", "gn-pn"])
def test_a_compiled_network_takes_three_shapes(to: str, training: bool) -> None:
    eager = network(to).train(training)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(eager), dynamic=True, backend="aot_eager")
    # A LayerNorm over whole maps takes maps of one size.
    sides = [16, 16, 16] if to == "lnn" else [16, 20, 24]
    for batch, side in zip((2, 3, 5), sides, strict=True):
        images = torch.randn(batch, 3, side, side)
        torch.testing.assert_close(compiled(images), eager(images), rtol=1e-5, atol=1e-6)


def quantized(model: nn.Module) -> Tensor:
    """Quantize a network to int8 by PT2E, calibrated on the images, and answer for these."""
    from torchao.quantization.pt2e import quantize_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer

    quantizer = x86_inductor_quantizer.X86InductorQuantizer()
    config = x86_inductor_quantizer.get_default_x86_inductor_quantization_config()
    quantizer.set_global(config)
    captured = torch.export.export(model, (IMAGES,)).module()
    prepared = quantize_pt2e.prepare_pt2e(captured, quantizer)
    prepared(IMAGES)
    answer: Tensor = quantize_pt2e.convert_pt2e(prepared)(IMAGES)
    return answer


@pytest.mark.parametrize("to", ["frozen", "ln", "bnn", "gn-pn"])
def test_pt2e_quantizes_a_network_and_its_fold(to: str) -> None:
    net = network(to)
    with torch.no_grad():
        expected = net(IMAGES)
        folded = retrofit.fold(net, inputs=(IMAGES,), batch=2)
        for model in (net, folded):
            difference = (quantized(model) - expected).abs().max()
            assert 0 < difference < 0.02 * expected.abs().max()
