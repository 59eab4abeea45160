"""Measure, on a network as it is trained, whether the gradient of a sample is its own.

DP-SGD clips the gradient of each sample, which bounds what a sample can change only if no other
sample's gradient depends on it. Opacus's validator judges trained layers by their class; here the
network is run, so frozen parameters and code of one's own count too.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.inputs import Call, Inputs, example_calls
from retrofit.utils.forward_pass import copied, hooked
from retrofit.utils.output_tensors import tensors_in
from retrofit.utils.text import ROOT, shortlist, with_class

# Largest share of a gradient, or of an output, that float32 rounding explains.
TOLERANCE = 1e-3
# Samples whose gradients are compared.
_SAMPLES = 4


@dataclass(frozen=True)
class BatchDependence:
    """How much a sample's gradient depends on its companions, the other samples in its batch.

    Attributes:
        change: Largest change of a sample's gradient with other companions, as a share of its norm.
        modules: Modules that mix the samples, innermost ones alone: by name, the largest change of
            the output for a sample whose input stays the same, as a share of its norm.
        classes: The classes of these modules, by name.
    """

    change: float
    modules: Mapping[str, float]
    classes: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether each gradient is its sample's own, up to rounding."""
        return self.change <= TOLERANCE

    def __str__(self) -> str:
        """The finding, in a sentence."""
        if self.passed:
            return (
                "each sample's gradient is its own (largest change with other companions: "
                f"{self.change:.1g})"
            )
        if math.isnan(self.change):
            return (
                "a sample's gradient is not finite, and shows nothing of what mixes the samples; "
                "check the network with other inputs or in float32"
            )
        finding = (
            f"a sample's gradient changes by up to {_percent(self.change)} with its companions "
            "in the batch"
        )
        if not self.modules:
            return f"{finding}; no module shows it when it is run by itself"
        named = [
            f"{name} ({self.classes[name]}, output by {_percent(c)})"
            for name, c in self.modules.items()
        ]
        return f"{finding}; what mixes the samples: {shortlist(named)}"


def check(model: nn.Module, inputs: Inputs, *, strict: bool = False) -> BatchDependence:
    """Measure whether a sample's gradient depends on the other samples in its batch.

        print(retrofit.opacus.check(model.train(), images))

    Each of the first samples is run in its batch, and again among other companions. If no sample
    mixes with others, the gradient of its loss stays the same. Otherwise Opacus's privacy guarantee
    does not hold, whether or not the layer that mixes them is trained. A network that passes may
    still be trained without the guarantee: nothing is measured of sampling, noise or clipping, nor
    of buffers that carry something of a batch to later ones, and four seeds may miss what mixes the
    samples seldom.

    Args:
        model: The network as your loop trains it, before `make_private`: in training mode, and with
            BatchNorm in evaluation mode where your loop puts it there. It is copied, not changed.
        inputs: A batch of 3 or more different samples: a tensor (N, *), a tuple of positional
            arguments, or a mapping of keyword arguments. The network's outputs have N rows too.
        strict: Whether to raise an error if the check fails.

    Returns:
        What was measured: `passed` is true if no gradient changes by more than 0.1% of its norm,
        which rounding explains. Printed, it is a sentence.

    Raises:
        UsageError: If the network is in evaluation mode or wrapped by Opacus, trains no parameter,
            or the batch holds fewer than 3 samples or only equal ones.
        RetrofitError: If the network does not take the inputs, gives no output per sample, has
            only gradients of 0, or is random beyond torch's seed; with `strict`, if a gradient
            depends on companions.
    """
    calls = example_calls(model, inputs)
    call = calls[0]
    _refuse_what_cannot_be_measured(model, call)
    network = copied(model)
    count = min(_SAMPLES, call.batch)
    gradient_changes = [_gradient_change(network, call, sample) for sample in range(count)]
    # NaN among them is the largest here; Python's max may pass over it.
    largest = int(np.argmax(gradient_changes))
    change = gradient_changes[largest]
    is_zero = change == 0
    if is_zero and not any(_gradient(network, call, sample).any() for sample in range(count)):
        raise RetrofitError(
            "every gradient is 0 and shows nothing of what mixes the samples; check the network "
            "once it has learned something, or with random weights where they are 0"
        )
    changes = {}
    # A change that is NaN is none within the tolerance.
    if not change <= TOLERANCE:
        changes = _mixing_modules(network, replace(call, seed=largest), largest)
    modules: dict[str, float] = {}
    classes: dict[str, str] = {}
    for name, module_change in changes.items():
        label = name or ROOT
        modules[label] = module_change
        classes[label] = type(network.get_submodule(name)).__name__
    result = BatchDependence(change, modules, classes)
    if strict and not result.passed:
        raise RetrofitError(
            f"{result}; call retrofit.freeze_norms(model) if that is BatchNorm, or "
            "ModuleValidator.fix(model)"
        )
    return result


def _refuse_what_cannot_be_measured(model: nn.Module, call: Call) -> None:
    # Inside the wrapper, too, the network's parameters have what Opacus's hooks count by.
    has_hooks = any(hasattr(parameter, "grad_sample") for parameter in model.parameters())
    if has_hooks or isinstance(model, AbstractGradSampleModule):
        raise UsageError("Opacus wraps this network already; check it before `make_private`")
    if not model.training:
        raise UsageError(
            "the network is in evaluation mode; check it as your loop trains it, after "
            "model.train()"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            "no parameter of the network is trained; set requires_grad as your loop does"
        )
    if call.batch < 3 or _holds_equal_samples(call):
        raise UsageError(
            "companions are exchanged for others; give 3 or more samples in `inputs`, not all equal"
        )


def _holds_equal_samples(call: Call) -> bool:
    exchanged = _with_other_companions(call, 0)
    return all(map(torch.equal, call.tensors, exchanged.tensors))


def _with_other_companions(call: Call, sample: int) -> Call:
    """Return the batch with one sample in its place and the next one in all other places."""
    rows = torch.full((call.batch,), (sample + 1) % call.batch, device="cpu")
    rows[sample] = sample
    return call.select(rows)


def _gradient_change(network: nn.Module, call: Call, sample: int) -> float:
    """Return how far the gradient of a sample's loss moves with its companions, as a share."""
    gradient = _gradient(network, call, sample)
    if sample == 0 and _share(gradient, _gradient(network, call, sample)) > TOLERANCE:
        raise RetrofitError(
            "the network gives another gradient each time for the same inputs and seed; make it "
            "deterministic"
        )
    return _share(gradient, _gradient(network, _with_other_companions(call, sample), sample))


def _gradient(network: nn.Module, call: Call, sample: int) -> Tensor:
    """Return the gradient of a loss of one sample by all trained parameters, flat.

    The loss is the sum of y + y^2 / 2 over the sample's outputs y, whose derivative differs for
    every output, as that of any usual loss does.
    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    # What mixes the samples at times must not pass because one seed's numbers spare them.
    seeded = replace(call, seed=sample)
    with torch.enable_grad():
        try:
            outputs = _rows(network, network, seeded, sample)
        # Anything may come out of a network's own code.
        except Exception as error:
            raise RetrofitError(
                f"the network did not take the `inputs` ({with_class(error)})"
            ) from error
        if not outputs:
            raise RetrofitError(
                f"the network's answer holds no tensor with a row for each of the {call.batch} "
                "samples; give it inputs for which it answers with outputs, not with a loss"
            )
        losses = [(y + y.square() / 2).sum() for y in outputs if y.requires_grad]
        if not losses:
            raise RetrofitError(
                "the network's outputs use no trained parameter; set requires_grad as your loop "
                "does"
            )
        # Not torch.autograd.grad, which reentrant activation checkpointing refuses.
        network.zero_grad()
        torch.stack(losses).sum().backward()
    # A branch that the batch chooses uses other parameters for other companions.
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in parameters
    ]
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def _rows(module: nn.Module, run: Callable[..., Any], call: Call, sample: int) -> list[Tensor]:
    """Return a sample's row of each tensor in an answer that has a row for each sample; complex
    ones as real. The buffers of the module stay as they were.
    """
    with _buffers_kept(module):
        answer = list(tensors_in(call.on(run)))
    rows = [y[sample] for y in answer if y.ndim and len(y) == call.batch]
    return [torch.view_as_real(y) if y.is_complex() else y for y in rows]


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Give a module's buffers their values back where a run writes to them; autograd does not let
    others be written to.
    """
    before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, values in before:
                if buffer._version != version:
                    buffer.copy_(values)


def _share(value: Tensor, other: Tensor) -> float:
    """Return |value - other| / |value|, 0 for two zeros."""
    distance = float((value - other).norm())
    if distance:
        return distance / max(float(value.norm()), 1e-30)
    return 0.0


def _mixing_modules(network: nn.Module, call: Call, sample: int) -> dict[str, float]:
    """Return, by name, the innermost modules whose output for the sample depends on the others.

    Each is run by itself on what it gets, and again with the rows of other samples exchanged.
    """
    changes: dict[str, float] = {}
    is_probing = False

    def probe(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a module, before its call, on what it is about to get."""
        nonlocal is_probing
        given = Call(args, kwargs, seed=call.seed)
        # What the hooks of its children see in a probe is not what the network gives them.
        if is_probing or given.batch != call.batch:
            return
        is_probing = True
        # A module that does not take the other rows, for reasons of its own, is not named.
        with suppress(Exception):
            change = _output_change(module, given, sample)
            largest = changes.get(name, 0.0)
            changes[name] = max(change, largest)
        is_probing = False

    hooks = (
        module.register_forward_pre_hook(partial(probe, name), with_kwargs=True)
        for name, module in network.named_modules()
    )
    with torch.no_grad(), hooked(hooks):
        call.on(network)
    mixing = {name: change for name, change in changes.items() if change > TOLERANCE}
    return {name: change for name, change in mixing.items() if not _holds_any(name, mixing)}


def _holds_any(name: str, others: Collection[str]) -> bool:
    """Whether any of the other modules lies inside the one of this name."""
    prefix = f"{name}."
    if not name:
        prefix = ""
    return any(other != name and other.startswith(prefix) for other in others)


def _output_change(module: nn.Module, call: Call, sample: int) -> float:
    """Return how far a module's output for a sample moves with the others, as a share."""
    outputs = _rows(module, module.forward, call, sample)
    exchanged = _rows(module, module.forward, _with_other_companions(call, sample), sample)
    shares = [
        _share(y.double(), other.double()) for y, other in zip(outputs, exchanged, strict=True)
    ]
    return max(shares, default=0.0)


def _percent(share: float) -> str:
    """Return a share with two digits, however small it is."""
    return f"{100 * float(f'{share:.2g}'):g}%"
