"""The arms of the evidence: what is done to a trained BatchNorm network before and while it is
fine-tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import timm
import torch
from retention import plain_swap
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import retrofit
from retrofit.finetune import StrengthSchedule
from retrofit.finetune.strength_schedule import Shape
from retrofit.surgery import strength_layers


@dataclass(frozen=True)
class Arm:
    """One way to fine-tune.

    Attributes:
        label: What the table calls it.
        ours: Whether retrofit makes its layers; the others are baselines.
        to: Target of the conversion; None leaves BatchNorm.
        options: Arguments of the conversion.
        end: Strength at the end of the ramp.
        back: Whether the strength goes to 1 and returns to `end`.
        baked: Whether layers are baked after the training, on the training pictures.
        noise: xi from the first step on; None where the layers have no noise.
        frozen: Whether BatchNorm keeps its running statistics in training too.
        fixed: Whether it does so in the second half of the training, as in FixBN (Zhong et al.
            2024).
        trained: "all"; "not the norms", the rest; "head", the classifier; "norms and head".
        swap: Whether the converted layers forget the statistics: what a converter that copies gamma
            and beta gives.
        recalibrated: Whether the running statistics are first taken anew from the training
            pictures, before anything else is done.
        precise: Whether the running statistics are taken anew after the training.
        standardized: Whether each picture first gets the mean and the standard deviation of usual
            ones.
    """

    label: str
    ours: bool = False
    to: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    end: float = 1.0
    back: bool = False
    baked: bool = False
    noise: float | None = None
    frozen: bool = False
    fixed: bool = False
    trained: str = "all"
    swap: bool = False
    recalibrated: bool = False
    precise: bool = False
    standardized: bool = False


class Standardized(nn.Module):
    """A network behind the simplest remedy for contrast: each picture at mean 0 and standard
    deviation 0.5.

    Args:
        network: Takes (N, 3, H, W), as does this.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Standardize, and pass on."""
        std, mean = torch.std_mean(x, (1, 2, 3), keepdim=True)
        return self.network((x - mean) * (0.5 / (std + 1e-3)))


def _precise(arm: Arm) -> Arm:
    return replace(arm, label=f"{arm.label}, then PreciseBN", precise=True)


def _noisy(label: str, noise: float, ours: bool = True, to: str = "bnn", **options: Any) -> Arm:
    return Arm(label, ours=ours, to=to, noise=noise, options={"noise": noise, **options})


ARMS = {
    "bn": Arm("BatchNorm, batch statistics"),
    "bn-precise": Arm("BatchNorm, then PreciseBN", precise=True),
    "bn-fixed": Arm("BatchNorm, FixBN", fixed=True),
    "bn-norms": Arm(
        "BatchNorm, batch statistics, norms and last layer trained", trained="norms and head"
    ),
    "bn-norms-precise": _precise(
        Arm("BatchNorm, norms and last layer trained", trained="norms and head")
    ),
    "bn-norms-fixed": Arm(
        "BatchNorm, FixBN, norms and last layer trained", fixed=True, trained="norms and head"
    ),
    "bn-frozen": Arm("BatchNorm, frozen statistics, affine trained", frozen=True),
    "bn-frozen-std": Arm(
        "BatchNorm, frozen statistics, each picture standardized", frozen=True, standardized=True
    ),
    "bn-whole": Arm("BatchNorm, frozen whole", frozen=True, trained="not the norms"),
    "bn-recal": Arm(
        "BatchNorm, statistics of the new pictures, then frozen", frozen=True, recalibrated=True
    ),
    "gn-swap": Arm("GroupNorm, plain swap", to="gn", end=1.0, swap=True),
    "probe": Arm("linear probe", frozen=True, trained="head"),
    "bn-noise-0.1": _noisy("BatchNorm with noise 0.1", 0.1, ours=False, alpha=0.0),
    "bn-noise-0.1-precise": _precise(
        _noisy("BatchNorm with noise 0.1", 0.1, ours=False, alpha=0.0)
    ),
    "bn-noise-0.2": _noisy("BatchNorm with noise 0.2", 0.2, ours=False, alpha=0.0),
    "frozen": Arm("frozen", ours=True, to="frozen"),
    "frozen-norms": Arm(
        "frozen, norms and last layer trained", ours=True, to="frozen", trained="norms and head"
    ),
    "ln": Arm("ln, t to 1", ours=True, to="ln"),
    "ln-std": Arm("ln, t to 1, each picture standardized", ours=True, to="ln", standardized=True),
    "ln-0.75": Arm("ln, t to 0.75", ours=True, to="ln", end=0.75),
    "ln-0.5": Arm("ln, t to 0.5", ours=True, to="ln", end=0.5),
    "ln-0.25": Arm("ln, t to 0.25", ours=True, to="ln", end=0.25),
    "ln-back": Arm("ln, t to 1 and back to 0", ours=True, to="ln", end=0.0, back=True),
    "ln-baked": Arm("ln, t to 1, then baked", ours=True, to="ln", baked=True),
    "ln-pn": Arm("ln-pn, t to 1", ours=True, to="ln-pn"),
    "ln-pn-back": Arm("ln-pn, t to 1 and back to 0", ours=True, to="ln-pn", end=0.0, back=True),
    "ln-pn-baked": Arm("ln-pn, t to 1, then baked", ours=True, to="ln-pn", baked=True),
    "ln-pn-0.5": Arm("ln-pn, t to 0.5", ours=True, to="ln-pn", end=0.5),
    "gn-pn": Arm("gn-pn (8 groups), t to 1", ours=True, to="gn-pn"),
    "ln-recal-0.5": Arm(
        "ln on statistics of the new pictures, t to 0.5",
        ours=True,
        to="ln",
        end=0.5,
        recalibrated=True,
    ),
    "bnn": _noisy("bnn, no noise", 0.0),
    "bnn-0.1": _noisy("bnn, noise 0.1", 0.1),
    "bnn-0.1-precise": _precise(_noisy("bnn, noise 0.1", 0.1)),
    "bnn-0.2": _noisy("bnn, noise 0.2", 0.2),
    # from scratch
    "layer-norm-noise-1": _noisy("LayerNorm with noise 1", 1.0, ours=False, to="lnn", alpha=0.0),
    "lnn-1": _noisy("lnn, noise 1", 1.0, to="lnn"),
    "gn-8": Arm("gn (8 groups)", to="gn"),
    "gn-pn-8": Arm(
        "gn-pn (8 groups), nothing to restore", ours=True, to="gn-pn", options={"pn_restore": False}
    ),
    "ln-pn-1": Arm(
        "ln-pn, nothing to restore", ours=True, to="ln-pn", options={"pn_restore": False}
    ),
    "evonorm-s0": Arm("evonorm-s0", to="evonorm-s0"),
    "frn-tlu": Arm("frn-tlu", to="frn-tlu"),
}


def trained_network(name: str, checkpoint: str, classes: int, seed: int) -> nn.Module:
    """Build a network with the tensors of a checkpoint and a new classifier."""
    model = timm.create_model(name)
    load_in_order(model, checkpoint)
    torch.manual_seed(seed)
    model.reset_classifier(classes)
    return model


def load_in_order(model: nn.Module, checkpoint: str) -> None:
    """Load the tensors of a checkpoint, paired by order and shape; those of the classifier, the
    last two, may be missing.
    """
    tensors = list(torch.load(checkpoint, map_location="cpu", weights_only=True).values())
    state = model.state_dict()
    names = list(state)[: len(tensors)]
    shapes = [state[name].shape for name in names]
    if len(state) - len(names) not in (0, 2) or shapes != [tensor.shape for tensor in tensors]:
        raise SystemExit(f"the tensors of {checkpoint} are not those of the network")
    model.load_state_dict(dict(zip(names, tensors, strict=True)), strict=False)


def convert(model: nn.Module, arm: Arm) -> nn.Module:
    """Turn the source network into the arm's."""
    if arm.to is not None:
        model, _ = retrofit.convert(model, to=arm.to, **arm.options)
    if arm.swap:
        retrofit.set_strength(plain_swap(model), arm.end)
    if arm.trained in ("head", "norms and head"):
        model.requires_grad_(False)
        model.get_classifier().requires_grad_(True)
    if arm.trained == "norms and head":
        for module in model.modules():
            if isinstance(module, retrofit.NORMS):
                module.requires_grad_(True)
    if arm.trained == "not the norms":
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.requires_grad_(False)
    model = model.to(memory_format=torch.channels_last)
    return Standardized(model) if arm.standardized else model


def training_mode(model: nn.Module, arm: Arm, done: float) -> None:
    """Put the network in training mode, without the BatchNorm layers where the arm keeps their
    statistics. `done` is the share of the training that is over.
    """
    model.train()
    fixed_by_now = arm.fixed and done >= 0.5
    if arm.frozen or fixed_by_now:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def strength_schedule(
    model: nn.Module, arm: Arm, steps: int, ramp: float = 0.5
) -> StrengthSchedule | None:
    """Return the arm's course of strength and noise: t rises over the first part of the training,
    `ramp` of it.
    """
    if arm.swap or not strength_layers(model):
        return None
    shape: Shape = "there-and-back" if arm.back else "linear"
    return StrengthSchedule(
        model,
        steps,
        shape=shape,
        ramp=ramp,
        end=arm.end,
        noise=arm.noise,
        noise_start=0.0,
        noise_ramp=0.0,
    )
