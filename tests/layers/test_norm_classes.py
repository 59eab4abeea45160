"""`retrofit.NORMS` finds the parameters of normalization layers, whatever these have become."""

import pytest
from torch import nn

import retrofit

SIZE = (3, 8, 8)


def network(norm: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8), nn.ReLU()
    )


def affine_parameters(model: nn.Module) -> set[str]:
    """Return the names of all parameters that layers of `retrofit.NORMS` hold themselves."""
    return {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, retrofit.NORMS)
        for key, _ in module.named_parameters(recurse=False)
    }


AFFINE = {"1.weight", "1.bias", "4.weight", "4.bias"}


@pytest.mark.parametrize("to", ["frozen", "bnn", "dbn", "dbnn", "ln", "gn", "gnn", "inn"])
def test_gamma_and_beta_of_converted_layers_are_found(to: str) -> None:
    norm = {"gnn": lambda c: nn.GroupNorm(2, c), "inn": lambda c: nn.InstanceNorm2d(c, affine=True)}
    model, _ = retrofit.convert(network(norm.get(to, nn.BatchNorm2d)), to, input_size=SIZE)
    assert affine_parameters(model) == AFFINE


def test_those_of_the_proxy_are_found_too() -> None:
    model, _ = retrofit.convert(network(nn.BatchNorm2d), "ln-pn", input_size=SIZE)
    assert affine_parameters(model) == {
        name for name, _ in model.named_parameters() if not name.startswith(("0.", "3."))
    }
    assert affine_parameters(model) > AFFINE


def test_those_that_no_convolution_takes_in_are_found_in_a_plain_network() -> None:
    model, _ = retrofit.convert(
        nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), "frozen", input_size=SIZE
    )
    assert len(affine_parameters(retrofit.plain(model, SIZE))) == 2
