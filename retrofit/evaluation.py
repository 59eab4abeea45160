"""Top-1 and top-5 accuracy of a classifier on labelled images, with its own preprocessing; under
attack too.

It may be an exported file, run by ONNX Runtime or OpenVINO, whose images are prepared as its own
metadata say. Attacks stay within eps of each pixel: FGSM (Goodfellow et al. 2015) and PGD (Madry et
al. 2018).
"""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from timm.data import create_loader
from torch import Tensor, nn
from torch.nn import functional

from retrofit.errors import RetrofitError, UsageError
from retrofit.images.dataset import ImageData, heed_no_signals
from retrofit.layers.strength import partial_state
from retrofit.record import Preprocess
from retrofit.utils.onnx_runtimes import RUNTIMES, Run, Runtime, metadata, open_onnx
from retrofit.utils.running import autocast, evaluating
from retrofit.utils.text import plural, printable, shortlist, shown, with_class

Progress = Callable[[int, int | None], None]
Kind = Literal["fgsm", "pgd"]
_STEPS: dict[Kind, int] = {"fgsm": 1, "pgd": 10}


@dataclass(frozen=True)
class Attack:
    """A change of an image that raises the loss of its label.

    FGSM takes one step of eps along the sign of the gradient; PGD ten of eps / 4, from the image
    itself. Both are lower bounds of what an attacker can do: they say which of two networks gives
    way sooner, not that one is safe.
    """

    kind: Kind
    # largest change of a pixel, in units of the image from 0 to 1, before normalization
    eps: float
    # the preprocessing's, one a channel, as is `std`
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return normalized images (N, C, H, W) of classes (N,), changed to mislead a model in
        evaluation mode.
        """
        mean, std = (
            torch.tensor(one, device=pixels.device).view(-1, 1, 1) for one in (self.mean, self.std)
        )
        reach = self.eps / std
        low = torch.maximum(pixels - reach, -mean / std)
        high = torch.minimum(pixels + reach, (1 - mean) / std)
        stride = reach if self.kind == "fgsm" else reach / 4
        for _ in range(_STEPS[self.kind]):
            with torch.enable_grad():
                pixels = pixels.detach().requires_grad_()
                loss = functional.cross_entropy(model(pixels).float(), labels, reduction="sum")
                (gradient,) = torch.autograd.grad(loss, pixels)
            pixels = torch.minimum(
                torch.maximum(pixels + gradient.sign() * stride, low), high
            ).detach()
        return pixels

    def __str__(self) -> str:
        """Its kind and size."""
        return f"{self.kind} within {255 * self.eps:g}/255"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON keys `kind`, `eps` and `steps`."""
        return {"kind": self.kind, "eps": self.eps, "steps": _STEPS[self.kind]}


def attack_on(preprocess: Preprocess, kind: Kind | None, eps: float | None = None) -> Attack | None:
    """Return an attack on images that `preprocess` normalizes, by default of 4/255; None for none.

    A UsageError says that `eps` is out of range, or given without `kind`.
    """
    if kind is None:
        if eps is not None:
            raise UsageError("`eps` is the size of an attack; name one with `attack`")
        return None
    if eps is not None and not 0 < eps <= 1:
        raise UsageError(f"`eps` must lie above 0 and be at most 1, not {eps:g}; 4/255 is usual")
    return Attack(
        kind, 4 / 255 if eps is None else eps, tuple(preprocess.mean), tuple(preprocess.std)
    )


@dataclass(frozen=True)
class Accuracy:
    """How many images a classifier got right."""

    # evaluated; unreadable ones are not among them
    images: int
    # images whose class had the highest score
    correct1: int
    # images whose class was among the five highest scores
    correct5: int
    # class scores that the model gives
    outputs: int
    # unreadable images, by name
    skipped: tuple[str, ...] = ()
    # images whose scores held NaN or infinity; they count as wrong
    not_finite: int = 0
    loss: float = (
        math.nan
    )  # mean cross-entropy of the images whose scores are finite; NaN if there are none
    # images whose class has the highest score under attack too
    attacked1: int | None = None

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
        return None if self.attacked1 is None else 100 * self.attacked1 / self.images

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        shares = {"images": self.images, "top1": self.top1, "top5": self.top5, "loss": self.loss}
        return {
            **shares,
            "correct1": self.correct1,
            "correct5": self.correct5,
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
    damaged file among fifty thousand is worth a line, not the run. `amp` is the data type of mixed
    precision. `attack` changes the images that were right, to count how many stay so. After every
    batch, `progress` gets the images done and those in all. It warns of layers that differ in
    strength because part of a state was loaded.

    A RetrofitError says that no image can be read, or that the model gives no class scores, (N,
    classes), or fewer than the data has classes.
    """
    if doubt := partial_state(model):
        warnings.warn(doubt, stacklevel=2)
    device = torch.device(device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(device).to(memory_format=layout).eval()
    loader = create_loader(
        data.images,
        **preprocess.to_dict(),
        batch_size=batch_size,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        device=device,
        persistent_workers=False,
        worker_seeding=heed_no_signals,
    )
    total = len(data.images) if hasattr(data.images, "__len__") else None
    done = outputs = attacked = 0
    skipped: list[str] = []
    # whether an image's class has the highest score, the second, ...
    rights: list[Tensor] = []
    # of images whose scores are finite
    losses: list[Tensor] = []
    with torch.inference_mode(attack is None), torch.no_grad(), autocast(device, amp):
        for pixels, targets in loader:
            readable = targets >= 0
            skipped += [data.images.unreadable(target) for target in targets[~readable].tolist()]
            labels = targets[readable]
            if len(labels):
                inputs = pixels[readable].contiguous(memory_format=layout)
                scores = _scores(model(inputs), data.outputs)
                outputs = scores.shape[1]
                finite = scores.isfinite().all(dim=1)
                right = (
                    scores.topk(min(5, outputs), dim=1).indices.eq(labels[:, None])
                    & finite[:, None]
                )
                rights.append(right)
                losses.append(
                    functional.cross_entropy(scores[finite], labels[finite], reduction="none")
                )
                hit = right[:, 0]
                if attack is not None and hit.any():
                    changed = attack(model, inputs[hit], labels[hit])
                    attacked += int((model(changed).argmax(1) == labels[hit]).sum())
            done += len(targets)
            if progress is not None:
                progress(done, total)
    if not rights:
        raise RetrofitError(
            f"none of the {len(skipped)} images can be read ({shortlist(skipped)}); check the files"
        )
    right, loss = torch.cat(rights).cpu(), torch.cat(losses).cpu().double()
    return Accuracy(
        images=len(right),
        correct1=int(right[:, 0].sum()),
        correct5=int(right.sum()),
        outputs=outputs,
        skipped=tuple(skipped),
        not_finite=len(right) - len(loss),
        loss=float(loss.mean()),
        attacked1=None if attack is None else attacked,
    )


def predictions(model: nn.Module, batches: Iterable[Tensor]) -> list[int]:
    """Return each image's class of highest score, from batches (N, C, H, W); a RetrofitError if
    there are no scores.
    """
    with evaluating(model):
        return [
            best for batch in batches for best in _scores(model(batch), None).argmax(dim=1).tolist()
        ]


def _scores(answer: Any, outputs_needed: int | None) -> Tensor:
    """Return the class scores (N, classes) in float32, or say why the answer holds none."""
    if not isinstance(answer, Tensor) or answer.ndim != 2:
        shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise RetrofitError(
            f"the model gives no class scores (its output: {shape}); use an image classifier"
        )
    if outputs_needed is not None and outputs_needed > answer.shape[1]:
        scores = plural(answer.shape[1], "score")
        what = f"the data has class {outputs_needed - 1} (from 0) but the model gives {scores}"
        advice = (
            "use the model's own data, a `class_map`, or `num_classes` with a matching checkpoint"
        )
        raise RetrofitError(f"{what}; {advice}")
    return answer.float()


class ExportedNetwork(nn.Module):
    """A file as a module, for code that takes one; there are no parameters in it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return the output; of several, a list."""
        outputs = [torch.from_numpy(values) for values in self._run(x.float().numpy())]
        return outputs[0] if len(outputs) == 1 else outputs


@dataclass(frozen=True)
class ExportedFile:
    """A file that export wrote, ready to run."""

    model: ExportedNetwork
    preprocess: Preprocess
    # of its outputs
    labels: list[str] | None
    facts: dict[
        str, Any
    ]  # JSON values: `model`, `target`, `strength`, `weights`, `fold` and `runtime`

    def __str__(self) -> str:
        """Say which network it is, and what runs it."""
        facts = self.facts
        target = f", converted to {facts['target']}" if facts["target"] else ""
        strength = "" if facts["strength"] is None else f", strength {facts['strength']:.3g}"
        run = f"fold {facts['fold'] or 'unknown'}, run by {RUNTIMES[facts['runtime']]}"
        return (
            f"{facts['weights']['from']}: {facts['model'] or 'a network'}{target}{strength}, {run}"
        )


def open_exported(path: Path, runtime: Runtime = "onnxruntime") -> ExportedFile:
    """Open a file that `retrofit export` wrote; its metadata, which may come from anyone, are
    checked.

    A UsageError says that the runtime is not installed; a RetrofitError, that the file cannot be
    read or run, or does not say how its images are prepared.
    """
    known = metadata(path)
    labels, strength = known.get("labels"), known.get("strength")
    try:
        preprocess = Preprocess.from_dict(
            {field.name: known[field.name] for field in fields(Preprocess)}
        )
        if labels is not None and (
            not isinstance(labels, list) or not all(isinstance(one, str) for one in labels)
        ):
            raise ValueError(f"labels {shown(labels)}")
        strength = None if strength is None else float(strength)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"{path} lacks the metadata that `retrofit export` writes ({with_class(error)})"
        raise RetrofitError(f"{what}; export it again") from error
    facts: dict[str, Any] = {
        key: known.get(key) and printable(known[key], 200) for key in ("model", "target", "fold")
    }
    facts |= {
        "strength": strength,
        "runtime": runtime,
        "weights": {"kind": "onnx", "from": str(path)},
    }
    run = open_onnx(path, runtime, advice="export it again")
    return ExportedFile(ExportedNetwork(run), preprocess, labels, facts)
