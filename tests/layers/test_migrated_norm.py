"""MigratedGroupNorm against torch's own layers at both ends of its path, and against the plain
formula between.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrofit
from retrofit.layers.group_migration import group_gain
from retrofit.layers.migrated_norm import MigratedGroupNorm
from tests import oracles as oracle


def layer(
    groups: int = 2, strength: float = 1.0, eps: float = 1e-3, **options: Any
) -> MigratedGroupNorm:
    """A float64 layer with unlike channels."""
    made = MigratedGroupNorm(
        groups, 6, eps, group_eps=0.02, strength=strength, dtype=torch.float64, **options
    )
    with torch.no_grad():
        made.running_mean.normal_()
        made.running_var.uniform_(0.2, 3)
        made.gain.uniform_(0.3, 2)
        for parameter in made.parameters():
            parameter.normal_()
    return made


def expected(norm: MigratedGroupNorm, x: Tensor) -> Tensor:
    stats = norm.running_mean, norm.running_var
    t = norm.strength.double().item()
    absent = torch.ones(6).double(), torch.zeros(6).double()
    affine = [
        other if p is None else p for p, other in zip((norm.weight, norm.bias), absent, strict=True)
    ]
    return oracle.migrated_group_norm(
        x, norm.num_groups, *stats, *affine, t, norm.group_eps, norm.eps, norm.gain
    )


@pytest.mark.parametrize("strength", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    ("shape", "groups", "options"),
    [
        *(((3, 6), 2, {}), ((3, 6, 4), 1, {}), ((3, 6, 4, 2), 6, {}), ((2, 6, 3, 2, 2), 2, {})),
        *(((3, 6, 4), 3, {"affine": False}), ((3, 6, 4), 3, {"bias": False})),
    ],
)
def test_outputs_and_gradients_are_the_formulas(
    shape: tuple[int, ...], groups: int, options: dict[str, bool], strength: float
) -> None:
    norm = layer(groups, strength, **options)
    x = (2 * torch.randn(shape, dtype=torch.float64) + 1).requires_grad_()
    leaves = [x, *norm.parameters()]
    out, reference = norm(x), expected(norm, x)
    torch.testing.assert_close(out, reference)
    upstream = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(reference, leaves, upstream)
    )
    norm.reset_parameters()
    assert f"bias={norm.bias is not None}" in repr(norm)


@pytest.mark.parametrize("shape", [(2, 6, 16, 16), (1, 6, 1, 1), (4, 6)])
def test_no_cancellation_at_large_offsets(shape: tuple[int, ...]) -> None:
    """Channels at 1000 standard deviations from zero: the error stays that of the rounding of x."""
    norm = layer(2, 0.7)
    norm.running_mean.fill_(1000)
    norm.running_var.fill_(1)
    x = (1000 + torch.randn(shape)).double().requires_grad_()
    low = copy.deepcopy(norm).float()
    x32 = x.detach().float().requires_grad_()
    upstream = torch.randn(shape)
    torch.testing.assert_close(low(x32).double(), norm(x), atol=1e-3, rtol=1e-3)
    norm(x).backward(upstream.double())
    low(x32).backward(upstream)
    torch.testing.assert_close(x32.grad.double(), x.grad, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(low.weight.grad.double(), norm.weight.grad, atol=1e-2, rtol=2e-3)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
def test_at_strength_0_what_overflows_does_not_spread(value: float) -> None:
    norm, x = layer(2, 0.0).float(), torch.randn(2, 6, 3)
    x[0, 1, 1] = value
    reference = F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps.item()
    )
    torch.testing.assert_close(norm(x), reference, equal_nan=True)
    norm.set_strength(1.0)
    assert norm(x)[1].isfinite().all()


@pytest.mark.parametrize("affine", [True, False])
def test_a_sources_checkpoint_is_the_same_function_loaded_after_converting_as_before(
    affine: bool,
) -> None:
    """Of another network than the one converted: gain and group_eps follow the gammas and variances
    loaded.
    """
    other, checkpoint = nn.BatchNorm2d(6, affine=affine), nn.BatchNorm2d(6, affine=affine).eval()
    for name, value in checkpoint.state_dict().items():
        if value.is_floating_point():
            nn.init.uniform_(value, 1e-4, 2) if "var" not in name else nn.init.uniform_(
                value, 1e-5, 1e-3
            )
    x = torch.randn(2, 6, 3, 3)
    late, _ = retrofit.convert(nn.Sequential(other.eval()), "gn", groups=2, check=False)
    late[0].load_state_dict(checkpoint.state_dict())
    early, _ = retrofit.convert(
        nn.Sequential(copy.deepcopy(checkpoint)), "gn", groups=2, check=False
    )
    for strength in (0.0, 0.5, 1.0):
        retrofit.set_strength(late, strength)
        retrofit.set_strength(early, strength)
        torch.testing.assert_close(late(x), early(x))
    again, _ = retrofit.convert(
        nn.Sequential(nn.BatchNorm2d(6, affine=affine).eval()), "gn", groups=2, check=False
    )
    early[0].gain.mul_(2)
    again.load_state_dict(early.state_dict())  # which has a gain of its own
    torch.testing.assert_close(again(x), early(x))


@pytest.mark.parametrize("channels", [5, 8])
def test_a_checkpoint_of_other_channels_is_refused_as_by_torch(channels: int) -> None:
    norm = MigratedGroupNorm(2, 6)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        norm.load_state_dict(nn.BatchNorm2d(channels).state_dict())


def test_a_layer_without_values_takes_a_sources_checkpoint() -> None:
    norm = MigratedGroupNorm(2, 6, device="meta")
    source = nn.BatchNorm2d(6)
    norm.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(norm.running_var, source.running_var)


@pytest.mark.parametrize(
    ("groups", "message"),
    [(torch.ones(2), "size mismatch for setting_num_groups"), (2.0, "expected torch.Tensor")],
)
def test_a_setting_that_is_no_number_is_refused_as_by_torch(groups: Any, message: str) -> None:
    norm = MigratedGroupNorm(2, 6)
    with pytest.raises(RuntimeError, match=message):
        norm.load_state_dict({**norm.state_dict(), "setting_num_groups": groups})


@pytest.mark.filterwarnings(
    "ignore:`torch.jit", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize("shape", [(6,), (6, 4, 3)])
def test_a_trace_and_an_exported_program_take_other_batch_sizes(shape: tuple[int, ...]) -> None:
    norm = layer(strength=0.5)
    example = torch.randn(4, *shape, dtype=torch.float64)
    x = torch.randn(7, *shape, dtype=torch.float64)
    trace = torch.jit.trace(norm, example)
    torch.testing.assert_close(trace(x), norm(x))
    batch = torch.export.Dim("batch", min=2, max=9)
    program = torch.export.export(norm, (example,), dynamic_shapes=({0: batch},), strict=False)
    torch.testing.assert_close(program.module()(x), norm(x))


def test_a_state_without_the_layer_leaves_its_gain() -> None:
    norm = layer().float()
    x = torch.randn(2, 6, 3)
    before = norm(x)
    norm.load_state_dict({}, strict=False)
    assert torch.equal(norm(x), before)


def test_what_reads_the_layers_tensors_reads_the_sources_eps() -> None:
    source = nn.BatchNorm1d(6, eps=0.3).eval()
    norm: Any = retrofit.convert(nn.Sequential(source), "ln", check=False)[0][0]
    x = torch.randn(4, 6)
    read = F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
    )
    torch.testing.assert_close(read, norm(x))


@pytest.mark.parametrize("shape", [(2, 5), (6,)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(N, 6, \*\)"):
        layer()(torch.zeros(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 6, 8, 8), (0, 6, 4)])
def test_on_cuda(shape: tuple[int, ...]) -> None:
    norm, x = layer(2, 0.6), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(norm).cuda()(x.cuda()).cpu(), norm(x))


def test_the_gain_weighs_channels_by_gamma_and_leaves_a_group_its_power() -> None:
    weight = torch.tensor([4.0, -1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    gain = group_gain(weight, 2)
    assert gain is not None
    torch.testing.assert_close(gain[:3].square(), 3 / 6 * weight[:3].abs())
    torch.testing.assert_close(
        gain[3:], torch.ones(3, dtype=torch.float64)
    )  # a group that is off as a whole
    off = group_gain(torch.tensor([1.0, 0.0]), 1)
    assert off is not None
    torch.testing.assert_close(off[1].square() / off[0].square(), torch.tensor(0.005))
    assert group_gain(None, 2) is None


def test_the_small_numbers_follow_every_type_but_half_ones() -> None:
    norm = MigratedGroupNorm(2, 4)
    assert norm.double().float().eps.dtype == torch.float32
    assert norm.half().eps.dtype == torch.float32
