"""Run the forward of anyone's network: device and types of its input, hooks on its layers, and
everything left as it was.
"""

import copy
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from io import StringIO
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.output_tensors import shape_or_class
from retrofit.utils.snapshot import left_as_it_was
from retrofit.utils.text import shortlist, with_class

_WITHOUT_GRADIENTS = (
    "make pruning permanent by torch.nn.utils.prune.remove, compute other tensors again under "
    "torch.no_grad()"
)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's first tensor; the CPU for a network without any."""
    return next(
        (tensor.device for tensor in chain(model.parameters(), model.buffers())),
        torch.device("cpu"),
    )


def placement_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype that a network's input should have:
    `batch.to(*placement_of(model))`.
    """
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return device_of(model), next(dtypes, torch.float32)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Run what follows in mixed precision; as it is if `dtype` is None."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


@contextmanager
def memory_advice(batch_size: int, least: int = 0) -> Iterator[None]:
    """Say what to do where batches of so many images do not fit into the memory.

    Args:
        batch_size: Images in a batch.
        least: Bytes that are needed in the machine's memory in any case. A machine that has fewer
            would stop the process before anything is raised.

    Raises:
        RetrofitError: If they do not fit.
    """
    advice = f"batches of {batch_size:,} images do not fit into the memory; lower `batch_size`"
    if least > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise RetrofitError(advice)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch's allocator on a CPU raises a plain RuntimeError.
        no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not no_memory and "allocate memory" not in str(error):
            raise
        raise RetrofitError(advice) from error


@contextmanager
def training_advice(batch_size: int) -> Iterator[None]:
    """Say what to do where a network cannot be trained on batches of so many images.

    Raises:
        RetrofitError: If they do not fit into the memory, or leave a norm a single value.
    """
    try:
        with memory_advice(batch_size):
            yield
    except ValueError as error:
        # The words of torch's norms, and of ours.
        if "more than 1 value per channel" not in str(error):
            raise
        raise RetrofitError(
            f"a batch of {batch_size:,} leaves a norm a single value per channel, which has no "
            "variance; raise `batch_size` or `img_size`, or convert to frozen"
        ) from error


def input_of(batch: Any) -> Any:
    """Return what a network takes of a loader's batch: its first entry, or all of it."""
    if isinstance(batch, list | tuple) and batch:
        return batch[0]
    return batch


def images_of(batches: Iterable[Any], name: str = "calibrate") -> Iterator[Tensor]:
    """Yield the images of each batch: a tensor (N, C, H, W), or the first entry of a list or tuple,
    as loaders give it.

    A single tensor is one batch. `name` is the argument, for messages.

    Raises:
        UsageError: If something else is given.
        RetrofitError: If a batch holds NaN or infinity, of which a fit would be wrong without a
            word.
    """
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        batches = [batches]
    for number, batch in enumerate(batches, 1):
        images = input_of(batch)
        if not isinstance(images, Tensor) or images.ndim < 2:
            kind = shape_or_class(images)
            raise UsageError(
                f"`{name}` takes batches of images, tensors (N, C, H, W); batch {number} is {kind}"
            )
        if not images.isfinite().all():
            raise RetrofitError(
                f"batch {number} of `{name}` holds NaN or infinity; mend how its images are "
                "prepared"
            )
        yield images


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Register hooks, `layer.register_forward_hook(look) for layer in layers`, and remove them when
    the body ends. Meanwhile, compiled modules run uncompiled.
    """
    with ExitStack() as stack, uncompiled():
        for handle in handles:
            stack.enter_context(handle)
        yield


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules as they are written: what torch.compile made of them calls no hooks that
    were added later.
    """
    # Loaded with the first compiled module; to load it takes seconds.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def silence() -> Iterator[None]:
    """Hide warnings, log lines and prints: an exporter that fails prints the whole network."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        ignored = warnings.catch_warnings(action="ignore")
        with ignored, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give a class or module of a library another attribute, and its former one afterwards."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put a network in evaluation mode without gradients, and leave it as it was.

    Yields:
        What puts it back meanwhile, to be evaluated anew.
    """
    with left_as_it_was(model) as snapshot, torch.no_grad():

        def start_again() -> None:
            snapshot.restore()
            snapshot.empty_caches()
            model.eval()

        model.eval()
        yield start_again


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Evaluate a network, uncompiled, and leave it and the random states as they were; see
    `evaluating`.
    """
    states_kept = random_states_kept(device_of(model))
    with uncompiled(), _no_fused_transformers(), states_kept, evaluating(model) as start_again:
        yield start_again


@contextmanager
def _no_fused_transformers() -> Iterator[None]:
    """Have torch's transformer layers call their parts, on all tokens.

    Otherwise they call no norm in evaluation, and an encoder packs the tokens that a mask leaves,
    which its layers do not take while their parts have hooks.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Put the random states of torch, for the CPU and a device, of Python and of NumPy back
    afterwards.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with forked_random_state(device):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def forked_random_state(device: torch.device) -> AbstractContextManager[Any]:
    """Put torch's random states, the CPU's and a device's, back afterwards."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def standard_normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random numbers in float32 on the CPU, the same ones whatever torch's defaults are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def copied(model: nn.Module, computed: Mapping[int, Tensor] | None = None) -> nn.Module:
    """Return a deep copy of a network.

    Args:
        model: The network.
        computed: For computed tensors of the network, by `id`, the tensors in the copy.

    Raises:
        RetrofitError: If it holds other computed tensors, as pruned layers do, or cannot be copied
            for another reason.
    """
    memo = dict(computed or {})
    try:
        return copy.deepcopy(model, {**memo})
    # A network's own code may copy its parts, and raise anything.
    except Exception as error:
        names = [name for name, value in _computed_tensors(model) if id(value) not in memo]
        problem = f"{with_class(error)}; copy.deepcopy fails too"
        if names:
            problem = (
                f"it holds {shortlist(names)}, computed with gradients; {_WITHOUT_GRADIENTS} "
                f"({with_class(error, 100)})"
            )
        raise RetrofitError(f"the network cannot be copied: {problem}") from error


def _computed_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a network that were computed with gradients, which torch does not copy,
    and their names.
    """
    for name, module in model.named_modules():
        for key, value in (*vars(module).items(), *module._buffers.items()):
            if isinstance(value, Tensor) and not value.is_leaf:
                yield f"{name}.{key}".strip("."), value


def copied_for_inference(model: nn.Module) -> nn.Module:
    """Return a deep copy in evaluation mode and float32, without trainable parameters.

    What hooks compute before each call, a pruned layer's weight say, is held as a constant until
    the next call.

    Raises:
        RetrofitError: If the network cannot be copied.
    """
    computed = {id(value): value.detach().clone() for _, value in _computed_tensors(model)}
    # torch would compute the parameters of a scripted copy from the original's
    with torch.no_grad():
        network = copied(model, computed)
    return network.float().eval().requires_grad_(False)
