"""Lightning's and transformers' trainers raise the strength, are killed, and go on at the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrofit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EPOCHS, BATCH, ACCUMULATE = 4, 32, 2


class Digits(torch.utils.data.Dataset[Any]):
    """Scikit-learn's digits, the first 512."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[:512], dtype=torch.float32).unsqueeze(1) / 8 - 1
        self.labels = torch.tensor(digits.target[:512])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.images[i], "labels": self.labels[i]}


STEPS = EPOCHS * 512 // BATCH // ACCUMULATE


def network(to: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        layer
        for i, o in ((1, 16), (16, 32))
        for layer in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 10))
    with torch.no_grad():
        for _ in range(20):
            model(Digits().images)
    return retrofit.convert(model, to)[0]


def accuracy(model: nn.Module) -> float:
    data = Digits()
    with torch.no_grad():
        return float((model.eval()(data.images).argmax(1) == data.labels).float().mean())


def expected(step: int) -> float:
    return min(1.0, step / STEPS / 0.5)


class Module(lightning.LightningModule):
    """A module like any, which knows nothing of strengths but records them."""

    def __init__(self, to: str, stop: int | None = None) -> None:
        super().__init__()
        self.net = network(to)
        self.stop = stop
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: dict[str, Tensor], i: int) -> Tensor:
        if self.global_step == self.stop:
            raise KeyError("killed")
        self.seen.append((self.global_step, retrofit.strength_of(self.net)))
        return cross_entropy(self.net(batch["x"]), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], i: int) -> None:
        self.seen.append((self.global_step, retrofit.strength_of(self.net.eval())))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(module: Module, folder: Path, *callbacks: Any, resume: Path | None = None, last: bool = False) -> Any:
    """Train with the strength's callback before the others, or after them."""
    strength = retrofit.callbacks.LightningStrength(ramp=0.5)
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([] if last else [strength]), *callbacks, *([strength] if last else []), checkpoint],
    )
    loader = torch.utils.data.DataLoader(Digits(), BATCH, shuffle=True)
    trainer.fit(module, loader, torch.utils.data.DataLoader(Digits(), 256), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_lightning_goes_on_where_it_was_killed(to: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="killed"):
        fit(Module(to, stop=12), tmp_path)
    (saved,) = tmp_path.glob("*step=10.ckpt")
    state = torch.load(saved, weights_only=False)["state_dict"]
    other = network(to)
    other.load_state_dict({key.removeprefix("net."): value for key, value in state.items()})
    assert retrofit.strength_of(other) == pytest.approx(expected(10))  # of the step it was made at

    module = Module(to)
    trainer = fit(module, tmp_path, resume=saved)
    assert trainer.global_step == STEPS
    assert module.seen[0][0] >= 10
    assert module.seen == [(step, pytest.approx(expected(step))) for step, _ in module.seen]
    assert retrofit.strength_of(module.net) == trainer.logged_metrics["strength"] == 1.0
    assert accuracy(module.net) > 0.9


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("buffers", [True, False])
def test_lightnings_weight_averaging(last: bool, buffers: bool, tmp_path: Path) -> None:
    module = Module("bnn")
    averaging = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.95, use_buffers=buffers)
    fit(module, tmp_path, averaging, last=last)
    assert module.seen == [(step, pytest.approx(expected(step))) for step, _ in module.seen]
    assert retrofit.strength_of(module.net.eval()) == 1.0
    assert accuracy(module.net) > 0.8


class WithLoss(nn.Module):
    """What transformers' trainer takes."""

    def __init__(self, to: str, stop: int | None = None) -> None:
        super().__init__()
        self.net = network(to)
        self.stop = stop
        self.seen: list[float] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if len(self.seen) == self.stop:
            raise KeyError("killed")
        self.seen.append(retrofit.strength_of(self.net))
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def train(model: WithLoss, folder: Path, resume: bool = False) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=0.01,
        save_steps=5,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [retrofit.callbacks.TransformersStrength(ramp=0.5)]
    trainer = transformers.Trainer(model, arguments, train_dataset=Digits(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_transformers_goes_on_where_it_was_killed(to: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="killed"):
        train(WithLoss(to, stop=12 * ACCUMULATE), tmp_path)
    model = WithLoss(to)
    trainer = train(model, tmp_path, resume=True)
    assert trainer.state.global_step == STEPS
    assert model.seen == [pytest.approx(expected(10 + i // ACCUMULATE)) for i in range(len(model.seen))]
    assert len(model.seen) == (STEPS - 10) * ACCUMULATE
    assert retrofit.strength_of(model.net) == 1.0
    logged = {row["step"]: row["strength"] for row in trainer.state.log_history if "strength" in row}
    assert logged[15] == pytest.approx(expected(15))
    assert accuracy(model.net) > 0.9
