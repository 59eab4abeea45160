"""Lightning's and transformers' trainers around a network, which note its strength at each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import retrofit


class Module(lightning.LightningModule):
    """A module like any, which knows nothing of strengths but records them, and is killed before step `stop`."""

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


def by_lightning(module: Module, *loaders: Any, resume: Path | None = None, **options: Any) -> lightning.Trainer:
    """Train on the first loader and validate on the second, if there is one."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", **quiet, **options)
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer


class WithLoss(nn.Module):
    """What transformers' trainer takes; it is killed before call `stop`."""

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
    model: WithLoss, folder: Path, data: Any, callbacks: list[Any], resume: bool = False, **options: Any
) -> transformers.Trainer:
    quiet: Any = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder), **quiet, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer
