"""Each pass of folding has its work, and leaves a graph that computes what it did before."""

import pytest
import torch
from torch import Tensor, nn

from retrofit.export.capture import capture
from retrofit.export.captured_graph import CapturedGraph
from retrofit.export.graph_passes import PASSES, replace_power_transforms
from retrofit.inputs import Call
from retrofit.layers import DecorrelatedBatchNorm2d
from retrofit.layers.inference_forms import ChannelAffine
from tests.export.networks import batch_norm, norm


def whitened() -> nn.Module:
    layer = DecorrelatedBatchNorm2d(8, group_size=4, momentum=1.0)
    layer.train()(torch.randn(64, 8, 3, 3).exp())
    return layer


class Everything(nn.Module):
    """A network in which each pass has something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.feeder = nn.Conv2d(4, 8, 3)
        self.whitening = whitened()
        self.between = nn.Conv2d(8, 8, 1)
        self.power = norm(8)
        self.scaled = ChannelAffine(torch.rand(8) + 0.5, torch.randn(8))
        self.after = nn.Conv2d(8, 8, 3, padding=1)
        self.shared = batch_norm(nn.BatchNorm2d(8))
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.whitening(self.feeder(x))
        y = self.scaled(self.power(self.between(y)).relu())
        y = self.after(y)
        return self.head(self.shared(y.tanh())) + y.mean()


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    program = capture(Everything().eval(), Call((torch.randn(2, 4, 9, 9),)))
    assert not program.not_captured
    return CapturedGraph(program)


def test_each_pass_keeps_the_computation(graph: CapturedGraph) -> None:
    x = torch.randn(3, 4, 9, 9)
    expected = graph.module(x)
    code = ""
    for fold_pass in (lambda graph: replace_power_transforms(graph, {}), *PASSES):
        fold_pass(graph)
        graph.module.recompile()
        torch.testing.assert_close(graph.module(x), expected, atol=1e-5, rtol=1e-4)
        state = str(graph.module)
        assert state != code, fold_pass
        code = state
    assert graph.layers == {"whitening": "folded", "power": "two branches", "shared": "folded"}
    assert not graph.affine_maps()
