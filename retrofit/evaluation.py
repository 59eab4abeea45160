"""Top-1 and top-5 accuracy of a classifier on labelled images, with its own preprocessing; under
attack too.

It may be an exported file, run by ONNX Runtime or OpenVINO, whose images are prepared as its own
metadata say.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

import torch
from timm.data import create_loader
from torch import Tensor, nn
from torch.nn import functional

from retrofit.attack import Attack
from retrofit.errors import RetrofitError
from retrofit.images.dataset import ImageData
from retrofit.images.workers import heed_the_main_process
from retrofit.layers.strength import partial_state
from retrofit.record import Preprocess
from retrofit.utils.forward_pass import autocast, evaluating, memory_advice
from retrofit.utils.onnx_runtimes import RUNTIMES, Run, Runtime, metadata, open_onnx
from retrofit.utils.output_tensors import shape_or_class
from retrofit.utils.snapshot import left_as_it_was
from retrofit.utils.text import plural, printable, shortlist, shown, with_class

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Accuracy:
    """How many images a classifier got right."""

    # Number of images evaluated, without unreadable ones.
    images: int
    # Images whose class had the highest score.
    correct1: int
    # Images whose class was among the five highest scores.
    correct5: int
    # Class scores that the model gives.
    outputs: int
    # Unreadable images, by name.
    skipped: tuple[str, ...] = ()
    # Images whose scores held NaN or infinity; they count as wrong.
    not_finite: int = 0
    # Mean cross-entropy of the images whose scores are finite; NaN if there are none.
    loss: float = math.nan
    # Images whose class has the highest score under attack too.
    attacked1: int | None = None
    # Images of each output's class.
    class_counts: tuple[int, ...] = ()

    @property
    def top1(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * self.correct1 / self.images

    @property
    def top5(self) -> float:
        """Top-5 accuracy in percent."""
        return 100 * self.correct5 / self.images

    @property
    def attacked_top1(self) -> float | None:
        """Top-1 accuracy under attack in percent; None without one."""
        if self.attacked1 is None:
            return None
        return 100 * self.attacked1 / self.images

    @property
    def majority_top1(self) -> float:
        """Top-1 accuracy, in percent, of always answering the most frequent class."""
        return 100 * max(self.class_counts, default=0) / self.images

    def no_better_than_one_answer(self, names: Sequence[str] | None) -> str:
        """Say so if always answering the most frequent class is as accurate; else empty.

        Top-1 says nothing then, however high it is. Outputs are called by `names` if they have any.
        """
        most = max(self.class_counts, default=0)
        if self.correct1 > most:
            return ""
        answer = self.class_counts.index(most)
        name = f"class {answer}"
        if names is not None and answer < len(names):
            name = shown(names[answer])
        if most == self.images:
            return f"top-1 is of images of {name} alone: it says nothing of other classes"
        return (
            f"top-1 is no better than always answering {name}, which is right for {most} of "
            f"{self.images} images"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "images": self.images,
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss,
            "correct1": self.correct1,
            "correct5": self.correct5,
            "majority_top1": self.majority_top1,
            "skipped": list(self.skipped),
        }


def evaluate(
    model: nn.Module,
    data: ImageData,
    preprocess: Preprocess,
    *,
    batch_size: int = 64,
    workers: int = 2,
    device: torch.device | str = "cpu",
    amp: torch.dtype | None = None,
    channels_last: bool = False,
    attack: Attack | None = None,
    progress: Progress | None = None,
) -> Accuracy:
    """Evaluate a classifier, which is moved to the device and put in eval mode.

    Images that cannot be read are left out and listed, and the figures are those of the others: one
    damaged file among fifty thousand is worth a line, not the run. It warns of layers that differ
    in strength because part of a state was loaded.

    Args:
        model: The classifier.
        data: The images, and what is known about their classes.
        preprocess: How the classifier takes its images.
        batch_size: Images in a batch.
        workers: Processes that decode images.
        device: Where to run.
        amp: The data type of mixed precision; None for none.
        channels_last: Whether to use the channels-last memory format.
        attack: A change of the images that were right, to count how many stay so.
        progress: Called after every batch with the images done and those in all.

    Raises:
        RetrofitError: If no image can be read, the model gives no class scores, (N, classes), or
            fewer than the data has classes, or the images of a batch do not fit into the memory.
    """
    total = None
    if hasattr(data.images, "__len__"):
        total = len(data.images)
    largest = min(batch_size, total or batch_size)
    pixels_of_batch = largest * math.prod(preprocess.input_size)
    advice = memory_advice(largest, least=4 * pixels_of_batch)
    doubt = partial_state(model)
    if doubt:
        warnings.warn(doubt, stacklevel=2)
    device = torch.device(device)
    layout = layout_of(channels_last)
    model = model.to(device).to(memory_format=layout).eval()
    loader = create_loader(
        data.images,
        **preprocess.to_dict(),
        batch_size=batch_size,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        device=device,
        persistent_workers=False,
        worker_seeding=heed_the_main_process,
    )
    done = 0
    resisted = None
    skipped: list[str] = []
    # Whether an image's class has the highest score, the second, ...: (N, 5) a batch.
    ranks: list[Tensor] = []
    # Of images whose scores are finite, (N,) a batch.
    losses: list[Tensor] = []
    # (N,) a batch.
    seen: list[Tensor] = []
    inference = torch.inference_mode(attack is None)
    with advice, left_as_it_was(model), inference, torch.no_grad(), autocast(device, amp):
        for pixels, targets in loader:
            readable = targets >= 0
            skipped += [data.images.unreadable(target) for target in targets[~readable].tolist()]
            if readable.any():
                inputs = pixels[readable].contiguous(memory_format=layout)
                labels = targets[readable]
                seen.append(labels)
                scores = class_scores(model(inputs), data.outputs)
                finite = scores.isfinite().all(dim=1)
                best = scores.topk(min(5, scores.shape[1]), dim=1).indices
                ranks.append(best.eq(labels[:, None]) & finite[:, None])
                loss = functional.cross_entropy(scores[finite], labels[finite], reduction="none")
                losses.append(loss)
                if attack is not None:
                    right = ranks[-1][:, 0]
                    under_attack = attack.resisted(model, inputs[right], labels[right])
                    resisted = under_attack + (resisted or 0)
            done += len(targets)
            if progress is not None:
                progress(done, total)
    if not ranks:
        raise RetrofitError(
            f"none of the {len(skipped)} images can be read ({shortlist(skipped)}); check the files"
        )
    all_ranks = torch.cat(ranks)
    all_losses = torch.cat(losses).cpu().double()
    outputs = scores.shape[1]
    class_counts = torch.cat(seen).cpu().bincount(minlength=outputs)
    return Accuracy(
        images=len(all_ranks),
        correct1=int(all_ranks[:, 0].sum()),
        correct5=int(all_ranks.sum()),
        outputs=outputs,
        skipped=tuple(skipped),
        not_finite=len(all_ranks) - len(all_losses),
        loss=float(all_losses.mean()),
        attacked1=resisted,
        class_counts=tuple(class_counts.tolist()),
    )


def layout_of(channels_last: bool) -> torch.memory_format:
    """Return torch's memory format for images (N, C, H, W)."""
    if channels_last:
        return torch.channels_last
    return torch.contiguous_format


def predictions(model: nn.Module, batches: Iterable[Tensor]) -> list[int]:
    """Return each image's class of highest score, from batches (N, C, H, W).

    Raises:
        RetrofitError: If the model gives no class scores.
    """
    predicted: list[int] = []
    with evaluating(model):
        for batch in batches:
            predicted += class_scores(model(batch)).argmax(dim=1).tolist()
    return predicted


def are_scores(output: Any) -> TypeGuard[Tensor]:
    """Whether a model's output is class scores, (N, classes)."""
    return isinstance(output, Tensor) and output.ndim == 2


def class_scores(output: Any, outputs_needed: int | None = None) -> Tensor:
    """Return the class scores (N, classes) in a model's output, in float32.

    Raises:
        RetrofitError: If the output holds none, or fewer than `outputs_needed`.
    """
    if not are_scores(output):
        raise RetrofitError(
            f"the model gives no class scores (its output: {shape_or_class(output)}); use an image "
            "classifier with a single output"
        )
    outputs = output.shape[1]
    if outputs_needed is not None and outputs_needed > outputs:
        raise RetrofitError(
            f"the data has class {outputs_needed - 1} (from 0) but the model gives "
            f"{plural(outputs, 'score')}; use the model's own data, a `class_map`, "
            "or `num_classes` with a matching checkpoint"
        )
    return output.float()


class ExportedNetwork(nn.Module):
    """A file as a module, for code that takes one; there are no parameters in it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the output; of several, a list."""
        outputs = [torch.from_numpy(values) for values in self._run(x.float().numpy())]
        if len(outputs) == 1:
            return outputs[0]
        return outputs


@dataclass(frozen=True)
class ExportedFile:
    """A file that export wrote, ready to run."""

    model: ExportedNetwork
    preprocess: Preprocess
    # Names of its outputs.
    labels: list[str] | None
    # JSON values: `model`, `target`, `strength`, `weights`, `fold` and `runtime`.
    facts: dict[str, Any]

    def __str__(self) -> str:
        """Say which network it is, and what runs it."""
        facts = self.facts
        parts = [f"{facts['weights']['from']}: {facts['model'] or 'a network'}"]
        if facts["target"]:
            parts.append(f"converted to {facts['target']}")
        if facts["strength"] is not None:
            parts.append(f"strength {facts['strength']:.3g}")
        parts.append(f"fold {facts['fold'] or 'unknown'}")
        parts.append(f"run by {RUNTIMES[facts['runtime']]}")
        return ", ".join(parts)


def open_exported(path: Path, runtime: Runtime = "onnxruntime") -> ExportedFile:
    """Open a file that `retrofit export` wrote; its metadata, which may come from anyone, are
    checked.

    Raises:
        UsageError: If the runtime is not installed.
        RetrofitError: If the file cannot be read or run, or does not say how its images are
            prepared.
    """
    known = metadata(path)
    labels = known.get("labels")
    strength = known.get("strength")
    try:
        prepared = {field.name: known[field.name] for field in fields(Preprocess)}
        preprocess = Preprocess.from_dict(prepared)
        if labels is not None and not _are_names(labels):
            raise ValueError(f"labels {shown(labels)}")
        if strength is not None:
            strength = float(strength)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        fault = with_class(error)
        raise RetrofitError(
            f"{path} lacks what `retrofit export` writes of a network whose preprocessing is known "
            f"({fault}); give `retrofit.save` the preprocessing, and export its file"
        ) from error
    facts: dict[str, Any] = {}
    for key in ("model", "target", "fold"):
        fact = known.get(key)
        if fact:
            fact = printable(fact, 200)
        facts[key] = fact
    facts["strength"] = strength
    facts["runtime"] = runtime
    facts["weights"] = {"kind": "onnx", "from": str(path)}
    run = open_onnx(path, runtime, advice="export it again")
    network = ExportedNetwork(run)
    return ExportedFile(network, preprocess, labels, facts)


def _are_names(labels: Any) -> bool:
    return isinstance(labels, list) and all(isinstance(label, str) for label in labels)
