"""Weight-standardized convolutions against timm's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import ScaledStdConv2d, StdConv2d
from torch import nn

from retrofit import layers
from retrofit.layers import WeightStandardizedConv2d


@pytest.mark.parametrize(
    ("timms", "options", "scale"),
    [
        *(
            (StdConv2d, options, 1.0)
            for options in ({}, {"groups": 2, "stride": 2}, {"dilation": 2, "bias": False})
        ),
        (partial(ScaledStdConv2d, gamma=1.7), {"bias": True}, 1.7 * (4 * 9) ** -0.5),
    ],
)
def test_at_strength_1_it_is_timms(
    timms: Callable[..., nn.Module], options: dict[str, Any], scale: float
) -> None:
    reference = timms(4, 6, 3, padding=1, **options).double()
    conv = WeightStandardizedConv2d(4, 6, 3, padding=1, **{"bias": False} | options).double()
    conv.load_state_dict(reference.state_dict(), strict=False)
    conv.restore_scale.fill_(scale)
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(conv(x), reference(x))
    upstream = torch.randn_like(reference(x))
    got, wanted = (torch.autograd.grad(c(x), [x, c.weight], upstream) for c in (conv, reference))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", ["Conv1d", "Conv2d", "Conv3d"])
def test_seeded_it_starts_as_the_convolution(kind: str, strength: float) -> None:
    options: dict[str, Any] = {"padding": 1, "padding_mode": "circular", "groups": 2}
    source = getattr(nn, kind)(4, 6, 3, **options)
    conv = getattr(layers, f"WeightStandardized{kind}")(4, 6, 3, **options, strength=strength)
    assert not conv.load_state_dict(source.state_dict(), strict=False).unexpected_keys
    conv.seed_restore()
    x = torch.randn(2, 4, *(5,) * (conv.weight.ndim - 2))
    torch.testing.assert_close(conv(x), source(x), atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        conv.weight.mul_(3).add_(1)
    if strength == 1:  # neither scale nor mean of the weight matter any more
        torch.testing.assert_close(conv(x), source(x), atol=1e-4, rtol=1e-4)
    if strength == 0:
        source.load_state_dict(
            {key: value for key, value in conv.state_dict().items() if key in ("weight", "bias")}
        )
        assert torch.equal(conv(x), source(x))


def test_names_and_types() -> None:
    conv = WeightStandardizedConv2d(4, 6, 3)
    assert set(conv.state_dict()) == {
        "weight",
        "bias",
        "restore_scale",
        "restore_shift",
        "strength",
    }
    assert [name for name, _ in conv.named_parameters()] == ["weight", "bias"]
    x = torch.randn(1, 4, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x).dtype == torch.bfloat16
    assert conv.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert (
        WeightStandardizedConv2d(4, 6, 3, dtype=torch.bfloat16).restore_scale.dtype == torch.float32
    )
    with pytest.raises(ValueError, match="single weight"):
        WeightStandardizedConv2d(4, 4, 1, groups=4)
