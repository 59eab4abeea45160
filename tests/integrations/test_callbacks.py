"""Lightning's and transformers' trainers raise the strength, are killed, and go on at the right
one.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import retrofit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EPOCHS, BATCH, ACCUMULATE = 4, 32, 2
STEPS = EPOCHS * 512 // BATCH // ACCUMULATE
DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.images[:512], dtype=torch.float32).unsqueeze(1) / 8 - 1
LABELS = torch.tensor(DIGITS.target[:512])
DATA: Any = [{"x": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]


class Module(lightning.LightningModule):
    """A module like any, which knows nothing of strengths but records them, and is killed before
    step `stop`.
    """

    def __init__(self, net: nn.Module, stop: int | None = None, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.stop, self.lr = net, stop, lr
        self.seen: list[tuple[int, float | None]] = []

    def training_step(self, batch: dict[str, Tensor], i: int) -> Tensor:
        if self.global_step == self.stop:
            raise KeyError("killed")
        self.seen.append((self.global_step, retrofit.strength_of(self.net)))
        return cross_entropy(self.net(batch["x"]), batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], i: int) -> None:
        self.seen.append((self.global_step, retrofit.strength_of(self.net.eval())))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


def by_lightning(
    module: Module, *loaders: Any, resume: Path | None = None, **options: Any
) -> lightning.Trainer:
    """Train on the first loader and validate on the second, if there is one."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", **quiet, **options)
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer


class WithLoss(nn.Module):  # what transformers' trainer takes; it is killed before call `stop`
    def __init__(self, net: nn.Module, stop: int | None = None) -> None:
        super().__init__()
        self.net, self.stop = net, stop
        self.seen: list[float | None] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if len(self.seen) == self.stop:
            raise KeyError("killed")
        self.seen.append(retrofit.strength_of(self.net))
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def by_transformers(
    model: WithLoss,
    folder: Path,
    data: Any,
    callbacks: list[Any],
    resume: bool = False,
    **options: Any,
) -> transformers.Trainer:
    quiet: Any = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder), **quiet, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


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
            model(IMAGES)
    return retrofit.convert(model, to)[0]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    return float((model.eval()(IMAGES).argmax(1) == LABELS).float().mean())


def expected(step: int) -> float:
    return pytest.approx(min(1.0, step / STEPS / 0.5))


def fit(
    module: Module, folder: Path, *callbacks: Any, resume: Path | None = None, last: bool = False
) -> Any:
    """Train with the strength's callback before the others, or after them."""
    strength = retrofit.callbacks.LightningStrength(ramp=0.5)
    several = [*callbacks, strength] if last else [strength, *callbacks]
    several.append(ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1))
    options = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATE,
        "callbacks": several,
        "resume": resume,
    }
    return by_lightning(
        module, DataLoader(DATA, BATCH, shuffle=True), DataLoader(DATA, 256), **options
    )


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_lightning_goes_on_where_it_was_killed(to: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="killed"):
        fit(Module(network(to), stop=12), tmp_path)
    (saved,) = tmp_path.glob("*step=10.ckpt")
    state = torch.load(saved, weights_only=False)["state_dict"]
    other = network(to)
    other.load_state_dict({key.removeprefix("net."): value for key, value in state.items()})
    assert retrofit.strength_of(other) == expected(10)  # of the step it was made at

    module = Module(network(to))
    trainer = fit(module, tmp_path, resume=saved)
    assert trainer.global_step == STEPS
    assert module.seen[0][0] >= 10
    assert module.seen == [(step, expected(step)) for step, _ in module.seen]
    assert retrofit.strength_of(module.net) == trainer.logged_metrics["strength"] == 1.0
    assert accuracy(module.net) > 0.9


class ManualModule(lightning.LightningModule):
    """A module that steps some optimizers after every few batches, and is killed before batch
    `stop`.
    """

    def __init__(self, optimizers: int, every: int, stop: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.count, self.every, self.stop = network("ln"), optimizers, every, stop
        self.seen: list[float | None] = []

    def training_step(self, batch: dict[str, Tensor], i: int) -> None:
        if len(self.seen) == self.stop:
            raise KeyError("killed")
        self.seen.append(retrofit.strength_of(self.net))
        self.manual_backward(cross_entropy(self.net(batch["x"]), batch["labels"]))
        if (i + 1) % self.every == 0:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers if self.count > 1 else [optimizers]:
                optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = [self.net[0], self.net[4]]
        return [torch.optim.SGD(part.parameters(), 0.01) for part in parts[: self.count]]


def fit_manually(
    module: ManualModule, folder: Path, resume: Path | None = None, **walk: Any
) -> None:
    callbacks = [
        retrofit.callbacks.LightningStrength(**walk),
        ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1),
    ]
    loader = DataLoader(DATA, 64)
    by_lightning(module, loader, resume=resume, max_epochs=2, callbacks=callbacks)


@pytest.mark.parametrize(("optimizers", "every"), [(2, 1), (1, 4)])
def test_with_manual_optimization_the_walk_follows_the_batches(
    optimizers: int, every: int, tmp_path: Path
) -> None:
    walk = [pytest.approx(batch / 16) for batch in range(16)]
    killed = ManualModule(optimizers, every, stop=11)
    with pytest.raises(KeyError, match="killed"):
        fit_manually(killed, tmp_path, ramp=1.0)
    assert killed.seen == walk[:11]
    (saved,) = tmp_path.glob("epoch=0*.ckpt")
    resumed = ManualModule(optimizers, every)
    fit_manually(resumed, tmp_path, saved, ramp=1.0)
    assert resumed.seen == walk[8:]
    assert retrofit.strength_of(resumed.net) == 1.0


def test_with_manual_optimization_given_steps_are_those_of_all_optimizers(tmp_path: Path) -> None:
    module = ManualModule(2, 1)
    fit_manually(module, tmp_path, ramp=1.0, total_steps=64)
    assert module.seen == [pytest.approx(2 * batch / 64) for batch in range(16)]


def test_manual_optimization_with_max_steps_needs_total_steps(tmp_path: Path) -> None:
    options: Any = {"callbacks": [retrofit.callbacks.LightningStrength()], "max_steps": 8}
    options["default_root_dir"] = tmp_path
    with pytest.raises(retrofit.UsageError, match="pass `total_steps`"):
        by_lightning(ManualModule(2, 1), DataLoader(DATA, 64), **options)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("buffers", [True, False])
def test_lightnings_weight_averaging(last: bool, buffers: bool, tmp_path: Path) -> None:
    module = Module(network("bnn"))
    fit(module, tmp_path, EMAWeightAveraging(decay=0.95, use_buffers=buffers), last=last)
    assert module.seen == [(step, expected(step)) for step, _ in module.seen]
    assert retrofit.strength_of(module.net.eval()) == 1.0
    assert accuracy(module.net) > 0.8


def train(model: WithLoss, folder: Path, resume: bool = False) -> Any:
    options = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.01,
    }
    options |= {
        "gradient_accumulation_steps": ACCUMULATE,
        "save_steps": 5,
        "logging_steps": 5,
        "resume": resume,
    }
    return by_transformers(
        model, folder, DATA, [retrofit.callbacks.TransformersStrength(ramp=0.5)], **options
    )


@pytest.mark.parametrize("to", ["bnn", "ln-pn"])
def test_transformers_goes_on_where_it_was_killed(to: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="killed"):
        train(WithLoss(network(to), stop=12 * ACCUMULATE), tmp_path)
    model = WithLoss(network(to))
    trainer = train(model, tmp_path, resume=True)
    assert trainer.state.global_step == STEPS
    assert model.seen == [expected(10 + i // ACCUMULATE) for i in range(len(model.seen))]
    assert len(model.seen) == (STEPS - 10) * ACCUMULATE
    assert retrofit.strength_of(model.net) == 1.0
    logged = {
        row["step"]: row["strength"] for row in trainer.state.log_history if "strength" in row
    }
    assert logged[15] == expected(15)
    assert accuracy(model.net) > 0.9


@pytest.mark.parametrize("name", ["LightningStrength", "TransformersStrength"])
def test_a_way_back_is_refused_before_the_training(name: str) -> None:
    with pytest.raises(retrofit.UsageError, match=r"cannot go there-and-back.*retrofit finetune"):
        getattr(retrofit.callbacks, name)(shape="there-and-back")


def test_lightning_trains_with_loaders_whose_workers_are_spawned(tmp_path: Path) -> None:
    # In a process of its own: what is spawned takes over the pipes that pytest-xdist talks through.
    program = tmp_path / "program.py"
    program.write_text(f"""
from pathlib import Path
from tests.integrations.test_callbacks import train_with_spawned_workers

if __name__ == "__main__":
    train_with_spawned_workers(Path({str(tmp_path)!r}))
""")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, program], cwd=root, env=environment, check=True)


def train_with_spawned_workers(folder: Path) -> None:
    torch.manual_seed(0)
    module = Module(network("bnn"))
    spawned: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    strength = retrofit.callbacks.LightningStrength(ramp=0.5)
    options = {"max_epochs": 1, "callbacks": [strength], "default_root_dir": folder}
    by_lightning(
        module, DataLoader(DATA, 128, **spawned), DataLoader(DATA, 256, **spawned), **options
    )
    assert module.seen[-1][1] == pytest.approx(1.0)
