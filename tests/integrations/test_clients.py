"""Every client of the table in docs/integrations.md, with every target, at t = 0, 0.5 and 1: what
it says holds.

The table is what is tested: a row without a client here, or a client without a row, fails. Its
cells say "yes", "refused", or at which strength it is "yes"; below it stands the message of each
refusal.
"""

import copy
import functools
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import schedulefree
import timm
import torch
import torchvision
from opacus.grad_sample.utils import wrap_model
from opacus.validators import ModuleValidator
from timm.layers import convert_sync_batchnorm, freeze_batch_norm_2d
from timm.models import save_for_hf
from timm.models._features_fx import FeatureGraphNet
from timm.utils import CheckpointSaver, ModelEmaV3, distribute_bn, freeze
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor

import retrofit
from tests.integrations.test_callbacks import Module, WithLoss, by_lightning, by_transformers

with warnings.catch_warnings(action="ignore"):  # of its docstrings
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

import retrofit.opacus

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
STRENGTHS = (0.0, 0.5, 1.0)
X, Y = (
    torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
    torch.tensor([0, 1, 2, 3]),
)
# Batches of 8: the last layers see one value an image, and the lambda of two values is a rounding
# error's.
IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
MANY: Any = [{"x": image, "labels": number % 4} for number, image in enumerate(IMAGES)]


@functools.cache
def _trained(name: str) -> nn.Module:  # a small network whose running statistics have moved
    torch.manual_seed(0)
    size = {"img_size": 32} if "vit" in name else {}
    model = timm.create_model(name, num_classes=4, **size).train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 32, 32))
    return model


class _Tokens(nn.Module):
    """What Opacus and forward mode take of a transformer: no parameter outside a layer, no
    attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.block = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patches(x).flatten(2).mT.contiguous()).mean(1))


class Case:  # one target at one strength
    def __init__(self, to: str, strength: float, folder: Path) -> None:
        self.to, self.strength, self.folder = to, strength, folder

        self.name = "test_vit" if to == "lnn" else "test_efficientnet"

    def source(self) -> nn.Module:
        return copy.deepcopy(_trained(self.name))

    def model(self, strength: float | None = None) -> nn.Module:
        return self.converted(self.source(), strength)

    def without_attention(self) -> nn.Module:
        if self.to != "lnn":
            return self.model()
        torch.manual_seed(0)
        return self.converted(_Tokens())

    def of_two_layers(self) -> nn.Module:  # a network that a compiler is soon done with
        if self.to == "lnn":
            return self.without_attention()
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 15), nn.Flatten()
        )
        model.train()(10 * X)
        return self.converted(model)

    def converted(self, model: nn.Module, strength: float | None = None) -> nn.Module:
        model, _ = retrofit.convert(model, self.to, check=False)
        return self.walk(model, self.strength if strength is None else strength)

    def walk(self, model: nn.Module, strength: float) -> nn.Module:
        if self.to != "frozen":
            retrofit.set_strength(model, strength)
        return model

    def holds(self, model: nn.Module, strength: float | None = None) -> bool:
        """Whether a network stands at the case's strength and answers."""
        wanted = self.strength if strength is None else strength
        stands = self.to == "frozen" or retrofit.strength_of(model.eval()) == pytest.approx(
            wanted, abs=1e-6
        )
        with torch.no_grad():
            return stands and bool(model.eval()(X).isfinite().all())


def same(
    model: Any, other: nn.Module, tolerance: float = 1e-4
) -> None:  # compare what two networks answer
    if isinstance(model, nn.Module):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(X), other.eval()(X), rtol=tolerance, atol=tolerance)


CLIENTS: dict[str, Callable[[Case], None]] = {}


def client(*names: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Enter a function under the names of its rows."""

    def enter(function: Callable[[Case], None]) -> Callable[[Case], None]:
        CLIENTS.update(dict.fromkeys(names, function))
        return function

    return enter


def _averaged(make: Callable[..., nn.Module], update: str, case: Case, **options: Any) -> None:
    model = case.model(0.0)
    average = make(model, **options)
    for step in range(1, 6):
        case.walk(model, case.strength * step / 5)
        getattr(average, update)(model)
    assert case.holds(average)


_torch_averaged = functools.partial(_averaged, AveragedModel, "update_parameters")
CLIENTS["timm ModelEmaV3"] = functools.partial(_averaged, ModelEmaV3, "update", decay=0.999)
CLIENTS["torch AveragedModel"] = _torch_averaged
CLIENTS["torch AveragedModel(use_buffers=True)"] = functools.partial(
    _torch_averaged, use_buffers=True
)


def _fit(case: Case, callback: str | None = None, **options: Any) -> None:
    module = Module(case.model(0.0), lr=1e-3)
    callbacks = (
        [] if callback is None else [getattr(lightning.pytorch.callbacks, callback)(**options)]
    )
    if case.to != "frozen":
        callbacks.insert(0, retrofit.callbacks.LightningStrength(ramp=0.5, end=case.strength))
    by_lightning(
        module, DataLoader(MANY, 8), max_epochs=2, callbacks=callbacks, enable_checkpointing=False
    )
    assert case.holds(module.net)


_lightning_swa = {"callback": "StochasticWeightAveraging", "swa_lrs": 1e-3, "swa_epoch_start": 1}
CLIENTS["Lightning Trainer"] = _fit
CLIENTS["Lightning EMAWeightAveraging"] = functools.partial(
    _fit, callback="EMAWeightAveraging", decay=0.9
)
CLIENTS["Lightning StochasticWeightAveraging"] = functools.partial(_fit, **_lightning_swa)


@client("transformers Trainer")
def _transformers(case: Case) -> None:
    model = case.model(0.0)
    callbacks = (
        [retrofit.callbacks.TransformersStrength(ramp=0.5, end=case.strength)]
        if case.to != "frozen"
        else []
    )
    options = {"max_steps": 4, "per_device_train_batch_size": 8, "save_steps": 2}
    by_transformers(WithLoss(model), case.folder, MANY, callbacks, **options)
    assert case.holds(model)


@client("accelerate, one process")
def _accelerate(case: Case) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = case.model(0.0)
    ready, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    case.walk(model, case.strength)
    ready.train()
    accelerator.backward(cross_entropy(ready(X), Y))
    optimizer.step()
    accelerator.save_state(str(case.folder))
    state = {key: value.clone() for key, value in accelerator.get_state_dict(ready).items()}
    case.walk(model, 0.25)
    accelerator.load_state(str(case.folder))
    assert all(
        torch.equal(value, state[key])
        for key, value in accelerator.unwrap_model(ready).state_dict().items()
    )
    assert case.holds(model)


@client("schedulefree")
def _schedulefree(case: Case) -> None:
    model = case.model(0.0)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3)
    optimizer.train()
    for step in range(1, 4):
        case.walk(model, case.strength * step / 3).train()
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
    optimizer.eval()
    assert case.holds(model)


@client("federated averaging of state dicts (flwr's)")
def _federated(case: Case) -> None:
    """What flwr's clients send and its FedAvg does: arrays in order, a weighted mean, loaded
    strictly.
    """
    clients = [case.model(), case.model()]
    with torch.no_grad():
        for parameter in clients[1].parameters():
            parameter.mul_(1.01)
    sent = [[value.cpu().numpy() for value in network.state_dict().values()] for network in clients]
    mean = [sum(3 * one + other for one, other in [pair]) / 4 for pair in zip(*sent, strict=True)]
    network = case.model(0.0)
    state = OrderedDict(
        (key, torch.tensor(value)) for key, value in zip(network.state_dict(), mean, strict=True)
    )
    network.load_state_dict(state, strict=True)
    assert case.holds(network)


@client("torch update_bn")
def _update_bn(case: Case) -> None:
    one, other = case.model(), case.model()
    update_bn([X, X.flip(0)], one)
    retrofit.update_bn([X, X.flip(0)], other)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


CLIENTS["torch convert_sync_batchnorm"] = lambda case: same(
    nn.SyncBatchNorm.convert_sync_batchnorm(case.model()), case.model()
)
CLIENTS["timm convert_sync_batchnorm"] = lambda case: same(
    convert_sync_batchnorm(case.model()), case.model()
)


def _stands_still(case: Case, freeze: Callable[[nn.Module], nn.Module | None]) -> None:
    model = case.model()
    model = freeze(model) or model
    before = copy.deepcopy(dict(model.named_buffers()))
    model.train()(X)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    same(model, case.model())


CLIENTS["timm freeze_batch_norm_2d"] = functools.partial(_stands_still, freeze=freeze_batch_norm_2d)
CLIENTS["timm freeze(include_bn_running_stats=True)"] = functools.partial(
    _stands_still, freeze=freeze
)


@client("timm distribute_bn")
def _distribute(
    case: Case,
) -> None:  # two ranks: what rank 0 broadcasts, another that saw other data receives
    first, second = case.model(), case.model()
    second.train()(X)
    sent: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "broadcast", lambda tensor, rank: sent.append(tensor))
        distribute_bn(first, 2)
        patch.setattr(
            torch.distributed, "broadcast", lambda tensor, rank: tensor.copy_(sent.pop(0))
        )
        distribute_bn(second, 2)
    with torch.no_grad():
        alike = torch.allclose(first.eval()(X), second.eval()(X), atol=1e-5)
    assert alike, "lambda is not shared"


@client("Opacus ModuleValidator.validate")
def _validate(case: Case, fix: Callable[[nn.Module], nn.Module] = nn.Module.train) -> None:
    ModuleValidator.validate(fix(case.model().train()), strict=True)


CLIENTS["Opacus ModuleValidator.fix"] = functools.partial(_validate, fix=ModuleValidator.fix)


def _per_sample(model: nn.Module, mode: str) -> None:
    alone = copy.deepcopy(model)
    torch.set_default_dtype(torch.float64)
    try:
        cross_entropy(wrap_model(model, mode)(X.double()), Y).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    for i in (0, 3):
        alone.zero_grad()
        cross_entropy(alone(X[i : i + 1].double()), Y[i : i + 1]).backward()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad_sample[i], other.grad, rtol=1e-5, atol=1e-8)


@client("Opacus GradSampleModule, hooks")
def _hooks(case: Case) -> None:
    ModuleValidator.validate(model := case.without_attention().double().train(), strict=True)
    _per_sample(model, "hooks")


@client("Opacus GradSampleModule, functorch and ew, of retrofit.plain")
def _functorch(case: Case) -> None:
    for mode in ("functorch", "ew"):
        model = retrofit.plain(case.without_attention()).double().train()
        ModuleValidator.validate(model, strict=True)
        _per_sample(model, mode)


@client("torch.func grad, vmap, jvp")
def _func(case: Case) -> None:
    model = case.without_attention().eval()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))

    found = vmap(grad(loss), (None, 0, 0))(parameters, X, Y)
    cross_entropy(model(X), Y).backward()
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max()) + 1e-6
        torch.testing.assert_close(
            found[name].mean(0), parameter.grad, rtol=1e-3, atol=1e-3 * scale
        )
    _, tangent = jvp(model, (X,), (torch.ones_like(X),))
    assert tangent.isfinite().all()


def _captured(case: Case, capture: Callable[[nn.Module], Any]) -> None:
    model = case.model().eval()
    same(capture(model), model, 1e-3)


for name, capture in {
    "torch.jit.trace": lambda model: torch.jit.trace(model, X),
    "torch.jit.script": torch.jit.script,
    "torch.export": lambda model: torch.export.export(model, (X,)).module().forward,
}.items():
    CLIENTS[name] = functools.partial(_captured, capture=capture)


@client("torch.compile, training steps")
def _compile(case: Case, tolerance: float = 1e-5) -> None:
    """Compare training steps with a network's own, at two strengths, and its answers: one
    compilation sees both.
    """
    torch.compiler.reset()
    model = case.of_two_layers()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    losses = []
    try:
        for strength in (0.25, case.strength):
            for network in (eager, model):
                case.walk(network, strength).train().zero_grad()
            again = strength == case.strength
            with torch.compiler.set_stance("fail_on_recompile" if again else "default"):
                loss = cross_entropy(compiled(X), Y)
            loss.backward()
            losses.append(cross_entropy(eager(X), Y))
            losses[-1].backward()
            torch.testing.assert_close(loss, losses[-1], rtol=tolerance, atol=tolerance)
            for (name, one), other in zip(
                model.named_parameters(), eager.parameters(), strict=True
            ):
                error = (one.grad - other.grad).abs().max()
                assert error <= 10 * tolerance * other.grad.abs().max().clamp_min(1e-3), (
                    name,
                    float(error),
                )
        assert (
            case.to == "frozen" or (losses[0] - losses[1]).abs() > 10 * tolerance
        )  # a strength that stood is seen
        model.eval(), eager.eval()
        for strength in (0.75, case.strength):
            for network in (eager, model):
                case.walk(network, strength)
            same(compiled.forward, eager, tolerance)
    finally:
        torch.compiler.reset()


@client("activation checkpointing")
def _checkpointing(case: Case) -> None:
    one, other = case.model().train(), case.model().train()
    other.set_grad_checkpointing()
    for model in (one, other):
        cross_entropy(model(X), Y).backward()
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-3, atol=1e-5, msg=name)


@client("timm CheckpointSaver")
def _saver(case: Case) -> None:
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    CheckpointSaver(model, optimizer, checkpoint_dir=str(case.folder)).save_checkpoint(0, 1.0)
    other = case.model(0.0)
    timm.models.resume_checkpoint(other, str(case.folder / "last.pth.tar"), optimizer)
    same(other, model, 1e-6)
    assert case.holds(other)


@client("timm features_only, forward_intermediates")
def _features(case: Case) -> None:
    size = {"img_size": 32} if case.to == "lnn" else {}
    _first_extracted(case, timm.create_model(case.name, features_only=True, **size))
    model = case.model().eval()
    torch.testing.assert_close(model.forward_intermediates(X)[0], model.forward_features(X))


def _extracted_after(
    case: Case, model: nn.Module, extractor: nn.Module, names: Iterable[str]
) -> None:
    """Compare what is extracted from a converted network with what its layers give."""
    assert (
        case.to == "frozen" or retrofit.strength_of(extractor) == case.strength
    )  # the layers are there, whole
    expected: list[Tensor] = []
    found = extractor.eval()(X)
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out: expected.append(out)
        )
    model(X)
    found = list(found.values()) if isinstance(found, dict) else found
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@client("timm FeatureGraphNet, of a converted network")
def _graph_after(case: Case) -> None:
    model = case.model().eval()
    extractor = FeatureGraphNet(model, (0, 1))
    _extracted_after(case, model, extractor, extractor.feature_info.module_name())


def _first_extracted(case: Case, extractor: nn.Module) -> None:  # convert what extracts features
    before = extractor.eval()(X)
    extractor = case.converted(extractor)
    found = extractor(X)
    assert all(
        out.isfinite().all() for out in (found.values() if isinstance(found, dict) else found)
    )
    torch.testing.assert_close(case.walk(extractor, 0.0)(X), before, rtol=1e-3, atol=1e-4)


CLIENTS["timm FeatureGraphNet, then converted"] = lambda case: _first_extracted(
    case, FeatureGraphNet(case.source().eval(), (0, 1))
)


def _of_torchvision(
    case: Case,
) -> tuple[nn.Module, dict[str, str]]:  # a network and the names of layers in it
    torch.manual_seed(0)
    if case.to == "lnn":
        return torchvision.models.swin_t().eval(), {"features": "a"}
    return torchvision.models.resnet18().eval(), {"layer1": "a", "layer3": "b"}


@client("torchvision create_feature_extractor, of a converted network")
def _extractor_after(case: Case) -> None:
    model, names = _of_torchvision(case)
    model = case.converted(model)
    _extracted_after(case, model, create_feature_extractor(model, names), names)


def _taken_apart(case: Case, take: Callable[[nn.Module, dict[str, str]], nn.Module]) -> None:
    _first_extracted(case, take(*_of_torchvision(case)))


for name, take in {
    "torchvision create_feature_extractor, then converted": create_feature_extractor,
    "torchvision IntermediateLayerGetter, then converted": IntermediateLayerGetter,
    "nn.Sequential of the children": lambda model, names: nn.Sequential(
        *list(model.children())[:-2]
    ),
}.items():
    CLIENTS[name] = functools.partial(_taken_apart, take=take)


@client("timm save_for_hf, opened again")
def _save_for_hf(case: Case) -> None:
    model = case.model().eval()
    save_for_hf(model, str(case.folder), safe_serialization=True)
    same(timm.create_model(f"local-dir:{case.folder}", pretrained=True), model)


def _pruned(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            prune.l1_unstructured(module, "weight", 0.3)


def _folded(case: Case, change: Callable[[nn.Module], None]) -> None:
    model = case.model().eval()
    change(model)
    same(retrofit.fold(model, input_size=tuple(X.shape[1:])), model, 1e-3)


CLIENTS["torch prune, then retrofit.fold"] = functools.partial(_folded, change=_pruned)
CLIENTS["torchao quantize_, then retrofit.fold"] = functools.partial(
    _folded, change=lambda model: quantize_(model, Int8WeightOnlyConfig())
)


def _table() -> tuple[dict[tuple[str, str], str], dict[str, list[str]]]:
    """The cells of the page's table by client and target, and the messages by client."""
    lines = [line.replace("`", "") for line in PAGE.read_text().splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("| library |"))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]
    )
    cells = {
        (row[0], to): cell for row in rows for to, cell in zip(header[1:], row[1:], strict=True)
    }
    messages: dict[str, list[str]] = {}
    for line in lines[end:]:
        if match := re.fullmatch(r'- (.+): "(.+)"', line):
            for name in match[1].split("; "):
                messages.setdefault(name, []).append(match[2])
    return cells, messages


CELLS, MESSAGES = _table()


def test_the_table_names_every_client() -> None:
    assert {name for name, _ in CELLS} == set(CLIENTS)
    assert {name for (name, _), cell in CELLS.items() if cell != "yes"} == set(MESSAGES)


def cells() -> Iterator[Any]:
    """Each client and target at each strength, but for `frozen`, which has none; where the answer
    is the same at all, 0 and 1 are tried before a release.
    """
    for (name, to), cell in CELLS.items():
        for strength in STRENGTHS if to != "frozen" else STRENGTHS[-1:]:
            swept = cell in ("yes", "refused") and to != "frozen" and strength != 0.5
            yield pytest.param(name, to, strength, marks=[pytest.mark.sweep] if swept else [])


@pytest.mark.parametrize(("name", "to", "strength"), list(cells()))
def test_a_cell(name: str, to: str, strength: float, tmp_path: Path) -> None:
    cell = CELLS[name, to]
    allowed = {
        "yes": STRENGTHS,
        "refused": (),
        "t = 0": (0.0,),
        "t = 1": (1.0,),
        "t = 0, 1": (0.0, 1.0),
    }[cell]
    context: Any = nullcontext()
    if strength not in allowed:
        context = pytest.raises(Exception, match="|".join(map(re.escape, MESSAGES[name])))
    with context:
        CLIENTS[name](Case(to, strength, tmp_path))
