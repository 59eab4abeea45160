"""Per-sample gradients that depend on the rest of the batch, measured on networks as they train."""

from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrofit
import retrofit.opacus
from retrofit.errors import RetrofitError, UsageError
from retrofit.opacus.batch_dependence import BatchDependence

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Secure RNG turned off")]

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        norm,
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def with_frozen_parameters(norm: nn.Module) -> nn.Module:
    model = network(norm)
    norm.requires_grad_(False)
    model(X)
    return model.train()


def test_a_batch_norm_without_trained_parameters_is_found() -> None:
    """Opacus's own validator, which looks at trained layers, finds nothing here."""
    model = with_frozen_parameters(nn.BatchNorm2d(8))
    assert retrofit.opacus.opacus_validators.opacus_validate(model) == []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    result = retrofit.opacus.check(model, X)
    assert not result.passed
    assert list(result.modules) == ["1"]
    assert result.change > 0.1
    assert "1 (BatchNorm2d, output by" in str(result)
    with pytest.raises(RetrofitError, match=r"changes by up to \S+% with its companions"):
        retrofit.opacus.check(model, X, strict=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_small_change_is_not_said_to_be_none() -> None:
    finding = str(BatchDependence(0.0042, {"1": 0.0017}, {"1": "Mixer"}))
    assert "changes by up to 0.42% with" in finding
    assert "output by 0.17%" in finding


def gradient_of_the_first(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)[0]
    loss = (y + y.square() / 2).sum()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])


def test_the_change_is_that_of_a_gradient_by_autograd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    change = max(
        float((own - other).norm() / own.norm())
        for i in range(4)
        for own, other in [
            (
                gradient_of_the_first(model, X[[i, *(j for j in range(6) if j != i)]]),
                gradient_of_the_first(model, X[[i, *[i + 1] * 5]]),
            )
        ]
    )
    assert retrofit.opacus.check(model, X).change == pytest.approx(change, rel=1e-3)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.Identity()])
def test_what_normalizes_each_sample_passes(norm: nn.Module) -> None:
    result = retrofit.opacus.check(with_frozen_parameters(norm), X, strict=True)
    assert result.passed
    assert result.modules == {}
    assert "each sample's gradient is its own" in str(result)


@pytest.mark.parametrize("to", ["frozen", "ln"])
def test_converted_and_fixed_networks_pass(to: str) -> None:
    model = network(nn.BatchNorm2d(8))
    model(X)
    fixed = ModuleValidator.fix(model, to=to).train()
    assert retrofit.opacus.check(fixed, X).passed
    converted, _ = retrofit.convert(model, to, inputs=X)
    assert retrofit.opacus.check(converted.train(), X).passed


def test_batch_norm_in_evaluation_mode_inside_a_training_network_passes() -> None:
    model = with_frozen_parameters(nn.BatchNorm2d(8))
    model[1].eval()
    assert retrofit.opacus.check(model, X).passed


class Centred(nn.Module):
    """Mixes the samples in code of its own, between two layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        return self.last(h - h.mean(0))


def test_code_of_ones_own_is_named_by_the_module_that_holds_it() -> None:
    model = nn.Sequential(nn.Identity(), Centred())
    assert list(retrofit.opacus.check(model, X).modules) == ["1"]


class Pair(nn.Module):
    """Takes keyword arguments, an index among them, and answers with a mapping."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.norm = norm
        self.head = nn.Linear(8, 2)

    def forward(self, *, ids: Tensor, values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.norm(torch.cat([self.words(ids), values], 1)))}


@pytest.mark.parametrize(("norm", "passed"), [(nn.LayerNorm(8), True), (nn.BatchNorm1d(8), False)])
def test_mappings_of_inputs_and_outputs(norm: nn.Module, passed: bool) -> None:
    inputs = {"ids": torch.arange(5), "values": torch.randn(5, 4)}
    result = retrofit.opacus.check(Pair(norm), inputs)
    assert result.passed == passed
    assert list(result.modules) == ([] if passed else ["norm"])


class AllButTheFirst(nn.Module):
    """Mixes all samples but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 2)

    def forward(self, x: Tensor) -> Tensor:
        first, others = x.flatten(1).split([1, len(x) - 1])
        return self.layer(torch.cat([first, others - others.mean(0) / 2]))


def test_gradients_that_overflow_pass_nothing() -> None:
    """The difference of infinities is NaN, which comes after the first sample's 0 here."""
    torch.manual_seed(0)
    inputs = X.clone()
    inputs[1:] *= 3000
    result = retrofit.opacus.check(AllButTheFirst().half(), inputs.half())
    assert not result.passed
    assert "a sample's gradient is not finite" in str(result)


def test_the_module_is_named_by_a_later_sample() -> None:
    class Late(Centred):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x.flatten(1))
            return self.last(torch.cat([h[:3], h[3:] - h[3:].mean(0)]))

    assert list(retrofit.opacus.check(nn.Sequential(Late()), X).modules) == ["0"]


class Branching(nn.Module):
    """The batch's mean chooses one of two layers, which compute the same."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(192, 2), nn.Sequential(nn.Linear(192, 2), last)
        self.other[0].load_state_dict(self.layer.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.layer if x.mean() > 0 else self.other
        y: Tensor = chosen(x.flatten(1))
        return y


@pytest.mark.parametrize("last", [nn.Identity(), nn.Linear(2, 2)])
def test_a_branch_that_the_batch_chooses_is_found(last: nn.Module) -> None:
    """Parameters that one of the runs does not use have a gradient of 0 there."""
    inputs = X.clone()
    inputs[0] += 3
    assert not retrofit.opacus.check(Branching(last), inputs).passed


class Checkpointed(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def test_reentrant_checkpointing_is_measured() -> None:
    result = retrofit.opacus.check(nn.Sequential(Checkpointed()), X)
    assert list(result.modules) == ["0"]


class Sometimes(Centred):
    """Mixes the samples in four of ten batches."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.4:
            return super().forward(x)
        return self.last(self.first(x.flatten(1)))


def test_what_mixes_at_times_is_found_though_the_first_seed_spares_it() -> None:
    result = retrofit.opacus.check(nn.Sequential(Sometimes()), X)
    assert not result.passed
    assert list(result.modules) == ["0"]


def zeroed(norm: nn.Module) -> nn.Module:
    last = nn.Linear(4, 2).requires_grad_(False)
    nn.init.zeros_(last.weight)
    return nn.Sequential(with_frozen_parameters(norm), last)


def unused() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).requires_grad_(False)
    model.register_parameter("spare", nn.Parameter(torch.ones(())))
    return model


class Unseeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(192, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x.flatten(1)) * self.calls


class Remembering(Centred):
    """Subtracts the mean of the batch before."""

    mean: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        centred = h - self.mean
        self.mean = h.mean(0).detach()
        return self.last(centred)


@pytest.mark.parametrize(
    ("model", "inputs", "error", "words"),
    [
        (network(nn.Identity()).eval(), X, UsageError, "in evaluation mode"),
        (network(nn.Identity()), X[:2], UsageError, "give 3 or more"),
        (network(nn.Identity()), X[:1].repeat(4, 1, 1, 1), UsageError, "not all equal"),
        (nn.Sequential(nn.Flatten()), X, UsageError, "no parameter of the network is trained"),
        (nn.Conv2d(4, 2, 1), X, RetrofitError, "did not take the `inputs`"),
        (zeroed(nn.BatchNorm2d(8)), X, RetrofitError, "every gradient is 0"),
        (unused(), X, RetrofitError, "use no trained parameter"),
        (Unseeded(), X, RetrofitError, "another gradient each time"),
        (Remembering(), X, RetrofitError, "another gradient each time"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: nn.Module, inputs: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        retrofit.opacus.check(model, inputs)


def test_a_network_that_opacus_wraps_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=3)
    private, *_ = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for network in (private, model):
        with pytest.raises(UsageError, match="check it before `make_private`"):
            retrofit.opacus.check(network, X)
