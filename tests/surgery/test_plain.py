"""Plain networks: the same function, of layers that the libraries have, to train on."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import retrofit
from retrofit import layers
from retrofit.errors import RetrofitError
from tests.surgery.networks import trained

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
ALLOWED = {"ConstantAffine", "TrainedAffine"}


def network(name: str) -> nn.Module:
    if name.startswith("tv:"):
        return trained(getattr(torchvision.models, name[3:])(num_classes=5))
    return trained(timm.create_model(name, num_classes=5))


def ours(model: nn.Module) -> set[str]:
    return {
        type(module).__name__
        for module in model.modules()
        if type(module).__module__.startswith("retrofit")
    }


def close(one: nn.Module, other: nn.Module, *x: torch.Tensor) -> None:
    with torch.no_grad():
        a, b = one.eval()(*(x or (X,))), other.eval()(*(x or (X,)))
    assert (a - b).abs().max() <= 1e-5 * a.abs().max()


@pytest.mark.parametrize(
    ("name", "to", "strength"),
    [
        *(
            ("test_efficientnet", "gn", 1.0),
            ("tv:resnet18", "gn-pn", 1.0),
            ("test_efficientnet", "ln-pn", 1.0),
        ),
        *(
            ("test_resnet", "ln-pn", 0.0),
            ("tv:resnet18", "ln", 0.0),
            ("test_resnet", "frozen", None),
        ),
    ],
)
def test_batch_independent_targets(name: str, to: str, strength: float | None) -> None:
    model, _ = retrofit.convert(network(name), to, strength=strength)
    before = copy.deepcopy(model.state_dict())
    plain = retrofit.plain(model)
    close(model, plain)
    assert ours(plain) <= ALLOWED
    assert not [
        key
        for key in plain.state_dict()
        if "running" in key or "strength" in key or "setting" in key
    ]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    optimizer = torch.optim.SGD(plain.parameters(), 1e-4)
    first = plain.train()(X).square().mean()
    first.backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())
    optimizer.step()
    assert plain(X).square().mean() < first


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        *((nn.SyncBatchNorm(6), "bnn", (4, 6, 5, 5)), (nn.LayerNorm(6), "lnn", (4, 6))),
        (timm.layers.LayerNormAct2d(6), "lnn", (4, 6, 5, 5)),
        (timm.layers.GroupNormAct(6, 2), "gnn", (4, 6, 5, 5)),
        (timm.layers.BatchNormAct2d(6), "dbn", (4, 6, 5, 5)),
        (nn.BatchNorm2d(6), "dbnn", (4, 6, 5, 5)),
        (nn.InstanceNorm1d(6, track_running_stats=True), "inn", (4, 6, 5)),
        *(
            (nn.BatchNorm1d(6), to, shape)
            for to in ("gn", "frozen")
            for shape in ((4, 6), (4, 6, 5))
        ),
        *((nn.BatchNorm3d(6, affine=False), to, (4, 6, 2, 3, 2)) for to in ("gn", "frozen")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_layers_alone(source: nn.Module, target: str, shape: tuple[int, ...]) -> None:
    x = 0.5 + 2 * torch.randn(shape)
    model = nn.Sequential(nn.Identity(), copy.deepcopy(source)).train()
    model(x + 1)
    retrofit.convert(model, target, inputs=x, groups=2 if target == "gn" else None)
    plain = retrofit.plain(model, inputs=x)
    close(model, plain, x)
    if target in ("gn", "frozen"):
        assert ours(plain) <= ALLOWED
    else:
        assert type(plain[1]) is type(source)
        source.load_state_dict(plain[1].state_dict())
        close(source, plain, x)


def test_a_network_that_was_written_with_group_norm_takes_the_state_dict() -> None:
    model, _ = retrofit.convert(network("tv:resnet18"), "gn", groups=8, strength=1.0)
    written = torchvision.models.resnet18(
        num_classes=5, norm_layer=lambda channels: nn.GroupNorm(8, channels)
    )
    missing, unexpected = written.load_state_dict(retrofit.plain(model).state_dict(), strict=False)
    assert not missing
    assert all(
        key.endswith(".bias") for key in unexpected
    )  # of convolutions: the constants that went into them


def test_what_has_no_plain_form_is_refused() -> None:
    model, _ = retrofit.convert(network("test_resnet"), "bnn", strength=0.5)
    with pytest.raises(
        RetrofitError, match=r": no layer of torch or timm computes what this .* power tr"
    ):
        retrofit.plain(model)
    retrofit.set_strength(model, 0.0)
    model.conv1[1].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(RetrofitError, match=r"conv1.1 has hooks, or a forward of its own"):
        retrofit.plain(model)


def test_a_network_that_holds_nothing_of_ours_is_copied() -> None:
    model = network("test_resnet")
    close(model, retrofit.plain(model))
    root, _ = retrofit.convert(nn.BatchNorm2d(6), "ln")
    assert isinstance(root, layers.MigratedGroupNorm)
    x = torch.randn(2, 6, 4, 4)
    close(root, retrofit.plain(root, inputs=x), x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU()


class RequiresMask(Block):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.conv(x)
        return self.act(self.bn(h if mask is None else h * mask))


class Masked(RequiresMask):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask)


class Renamed(Block):  # where the calls are made, the argument's name is that of a tensor
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        given, mask = mask, x
        h = self.conv(mask)
        return self.act(self.bn(h if given is None else h * given))


class MaskedInside(nn.Module):  # the argument is required, and given as None
    def __init__(self) -> None:
        super().__init__()
        self.inner = RequiresMask()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x, mask)


class Sized(Block):  # a size decides, as a number
    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return self.act(self.bn(h if int(x.shape[-1]) > 40 else 2 * h))


class Called(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class OtherMethod(Called):
    def embed(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Split(Block):  # one method calls the convolution, another the norm
    def embed(self, x: Tensor) -> Tensor:
        return self.conv(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.embed(x)))


class Entries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU())


class OtherEntry(
    Entries
):  # the convolution is an entry of a sequence, which another method takes apart
    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def embed(self, x: Tensor) -> Tensor:
        return next(iter(self.encoder))(x)


class OuterCall(nn.Module):  # what holds the block calls its convolution, with an optional argument
    def __init__(self) -> None:
        super().__init__()
        self.block = OtherMethod()

    def forward(self, x: Tensor, raw: bool = False) -> Tensor:
        return self.block.conv(x) if raw else self.block(x)


class Untraced(
    Entries
):  # calls what it holds by a reference that names nothing, in code that cannot be traced
    def __init__(self) -> None:
        super().__init__()
        self.first = [self.encoder[0]]

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first[0](sample) for sample in x]) + self.encoder(x)


class Uncalled(Block):  # a norm of the block that no trace shows may come before or after the other
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.BatchNorm1d(8)
        self.use_spare = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        return self.act(self.bn(self.spare(h) if self.use_spare else h))


MASK = torch.arange(14.0) % 3
USES: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "graph": (lambda: torch.fx.symbolic_trace(OtherMethod()), [lambda m, x: m(x)]),
    "mask": (Masked, [lambda m, x: m(x), lambda m, x: m(x, MASK)]),
    "mask renamed": (Renamed, [lambda m, x: m(x), lambda m, x: m(x, MASK)]),
    "mask inside": (MaskedInside, [lambda m, x: m(x), lambda m, x: m(x, MASK)]),
    "size": (Sized, [lambda m, x: m(x), lambda m, x: m(x.repeat(1, 1, 4))]),
    "split": (Split, [lambda m, x: m(x), lambda m, x: m.embed(x)]),
    "other entry": (OtherEntry, [lambda m, x: m(x), lambda m, x: m.embed(x)]),
    "outer call": (OuterCall, [lambda m, x: m(x), lambda m, x: m(x, raw=True)]),
    "untraced": (Untraced, [lambda m, x: m(x)]),
    "uncalled": (
        Uncalled,
        [lambda m, x: m(x), lambda m, x: vars(m).update(use_spare=True) or m(x)],
    ),
}


def small(make: Callable[[], nn.Module], to: str) -> nn.Module:
    return retrofit.convert(
        trained(make()), to, input_size=(3, 16), strength=None if to == "frozen" else 1.0
    )[0]


@pytest.mark.parametrize("to", ["ln", "frozen"])
@pytest.mark.parametrize("use", USES)
def test_every_call_is_the_same_function(use: str, to: str) -> None:
    make, calls = USES[use]
    x = torch.randn(2, 3, 16)
    model = small(make, to)
    plain = retrofit.plain(model, (3, 16))
    assert {"ConstantAffine"} <= ours(plain) <= ALLOWED
    for call in calls:
        torch.testing.assert_close(call(plain, x), call(model, x), rtol=1e-4, atol=1e-5)


def test_what_is_proved_goes_into_the_convolution() -> None:
    class Override(Called):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def sequence() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Identity(), nn.BatchNorm1d(8), nn.ReLU())

    for make in (Called, Override, sequence):
        for to in ("ln", "frozen"):
            assert not ours(retrofit.plain(small(make, to), (3, 16)))


class Reads(Block):  # computes what the norm does from its tensors
    def forward(self, x: Tensor) -> Tensor:
        norm, x = self.bn, self.conv(x)
        if self.training:
            return norm(x)
        return F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )


class ReadsUntraced(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(ReadsUntraced, self).forward(sample[None])[0] for sample in x])


def test_tensors_that_other_code_reads_are_missed_in_one_line() -> None:
    for make, message in (
        (Reads, "reads the tensors of bn"),
        (ReadsUntraced, "does not take what it took before"),
    ):
        model, _ = retrofit.convert(make(), "frozen", input_size=(3, 16))
        with pytest.raises(RetrofitError, match=message):
            retrofit.plain(model, (3, 16))


class TwoInputs(Block):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.bn(self.conv(x) + self.conv(y))


class Answers(Block):  # returns nothing that can be compared
    def forward(self, x: Tensor) -> str:
        return str(self.bn(self.conv(x)).shape)


def test_nothing_compared_is_said() -> None:
    model, _ = retrofit.convert(TwoInputs(), "frozen")
    x = torch.randn(2, 3, 9)
    with pytest.warns(UserWarning, match="^not checked: .*`inputs`"):
        retrofit.plain(model)
    close(model, retrofit.plain(model, inputs=(x, x)).eval(), x, x)
    model, _ = retrofit.convert(Answers(), "frozen", inputs=x)
    with pytest.warns(UserWarning, match="^not checked: "):
        retrofit.plain(model, inputs=x)


def test_frozen_statistics_stay_frozen() -> None:
    model, _ = retrofit.convert(network("test_resnet"), "dbn")
    retrofit.freeze_norms(model)
    plain = retrofit.plain(model)
    close(model, plain)
    torch.testing.assert_close(plain.train()(X), model.train()(X), rtol=1e-4, atol=1e-5)


def test_a_frozen_bias_that_takes_statistics_in_stays_frozen() -> None:
    model = network("tv:vgg11_bn")
    first, _, _, _, second, *_ = model.features
    first.bias.requires_grad_(False)
    second.weight.requires_grad_(False)
    model, _ = retrofit.convert(model, "ln", strength=1.0)
    plain: Any = retrofit.plain(model)
    close(model, plain)
    assert not torch.equal(plain.features[0].bias, first.bias)
    trained_biases = [plain.features[place].bias.requires_grad for place in (0, 4)]
    assert trained_biases == [False, True]
