"""What a training step launches on a GPU, counted without one.

    python benchmarks/count.py [layers] [networks] [calls]

Tensors are fake CUDA tensors (`FakeTensorMode`), in whose presence torch takes its CUDA paths,
autocast included. Triton's launches are recorded in place of made, and the autograd graph is walked
by hand, for its engine wants a device.

An aten operation counts as one launch unless it is a view, an allocation or a question; a few are
two or three. Reads and writes are bytes of distinct tensors that an operation is given and gives
back, in passes over the layer's input; a Triton launch reads what its source says. The host waits
where it asks for a number or copies from pageable memory.
"""

from __future__ import annotations

import collections
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrofit import convert, layers, set_strength
from retrofit.layers import kernels
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.frozen_batch_norm import FrozenBatchNorm
from retrofit.layers.kernels import triton as triton_kernels
from retrofit.layers.kernels.triton import launcher, proxy
from retrofit.layers.migrated_norm import MigratedGroupNorm

# Operations without a launch, beside views
_FREE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"),
    *("detach", "alias", "view", "_unsafe_view", "_reshape_alias", "lift_fresh"),
    *("sym_size", "sym_stride", "set_", "resize_", "record_stream"),
    "_has_compatible_shallow_copy_type",
}
# Operations of several launches
_SEVERAL = {
    **dict.fromkeys(("convolution_backward", "native_batch_norm"), 2),
    **dict.fromkeys(("native_batch_norm_backward", "native_layer_norm_backward"), 2),
    **dict.fromkeys(("native_group_norm",), 2),
    "native_group_norm_backward": 4,
    "_scaled_dot_product_flash_attention_backward": 3,
}
# Reads and writes of our kernels, in tensors as large as the input; those of a kernel whose sets
# fit a tile, which it then reads once
_PASSES = {
    **dict.fromkeys(("statistics_kernel", "step_kernel", "noise_kernel"), (1, 0)),
    "moments_kernel": (1, 0),
    **dict.fromkeys(("result_kernel", "map_kernel"), (1, 1)),
    **dict.fromkeys(("gradient_sums_kernel", "products_kernel"), (2, 0)),
    **dict.fromkeys(("gradient_kernel", "map_backward_kernel", "combine_kernel"), (2, 1)),
    "forward_kernel": (3, 1),
    "backward_kernel": (4, 1),
}
_ONCE = {"forward_kernel": (1, 1), "backward_kernel": (2, 1)}
_WAITS = {"_local_scalar_dense", "nonzero", "equal"}
# Channels and shape of the layers that are counted: a stage of resnet50
CHANNELS = 256
SHAPE = (128, CHANNELS, 56, 56)
TOKENS = (128, 197, 384)
# Whose calls are counted: programs share its sets
CALLED = (32, CHANNELS, 14, 14)


class Launch(NamedTuple):
    """An operation: what it belongs to, how often it launches, and the bytes that it moves."""

    scope: str
    name: str
    launches: int
    read: int
    write: int
    waits: bool


class Recorder(TorchDispatchMode):
    """Records operations on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scope = ""
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        out = _without_meta(name, args)
        out = func(*args, **kwargs) if out is None else out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        on_gpu = any(t.device.type == "cuda" for t in inputs + outputs)
        if func.namespace == "prim" or not on_gpu or func.is_view or name in _FREE:
            return out
        read = sum(_bytes(t) for t in {id(t): t for t in inputs}.values())
        write = sum(map(_bytes, outputs))
        copies = name in ("_to_copy", "copy_") and not kwargs.get("non_blocking")
        from_host = any(t.device.type == "cpu" and t.numel() for t in inputs)
        waits = name in _WAITS or (copies and from_host)
        self.launches.append(Launch(self.scope, name, _SEVERAL.get(name, 1), read, write, waits))
        return out

    def triton(self, kernel: Any, plan: Any, *arguments: Any, **options: Any) -> None:
        """Record a launch of ours, in place of making it."""
        name = kernel.__name__
        once = plan.tile.single and name in _ONCE
        reads, writes = _ONCE[name] if once else _PASSES[name]
        size = max(_bytes(t) for t in arguments if isinstance(t, Tensor) and t.ndim > 1)
        label = f"triton {name} {plan.grid}"
        self.launches.append(Launch(self.scope, label, 1, reads * size, writes * size, False))

    def small(self, kernel: Any, grid: Any, *arguments: Any) -> None:
        """Record a launch of ours that goes over no tensor of elements."""
        self.launches.append(Launch(self.scope, f"triton {kernel.__name__}", 1, 0, 0, False))


def _without_meta(name: str, args: Any) -> Any:
    """Return the outputs of operations that have no meta kernel."""
    if name == "batch_norm_backward_reduce":
        channels = args[2].shape
        return tuple(torch.empty(channels, dtype=torch.float32, device="cuda") for _ in range(4))
    return torch.empty_like(args[0]) if name == "batch_norm_elemt" else None


def _bytes(t: Tensor) -> int:
    # An expanded tensor has less than its elements
    return min(t.untyped_storage().nbytes(), t.numel() * t.element_size())


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Turn autocast on, or off, for a GPU that is not here, where `torch.autocast` refuses to."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", dtype is not None)
        torch.set_autocast_dtype("cuda", dtype or before[1])
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


@contextmanager
def recorded(recorder: Recorder, amp: torch.dtype | None) -> Iterator[None]:
    """Make the layers believe in a GPU, an H100, whose launches are recorded."""
    fits = {"fits": lambda x: x.numel() > 0}
    with (
        warnings.catch_warnings(),
        mock.patch.multiple(kernels, choose=mock.Mock(return_value=triton_kernels), **fits),
        mock.patch.multiple(
            launcher,
            launch=recorder.triton,
            launch_on=recorder.small,
            processors=lambda device: 132,
        ),
        mock.patch.object(proxy, "quantiles_on", lambda n, device: torch.empty(n, device=device)),
        autocast(amp),
    ):
        warnings.simplefilter("ignore")
        yield


def backward(out: Tensor, recorder: Recorder, scopes: dict[Any, str]) -> None:
    """Walk the graph as the engine does, calling each node once with the sums of its gradients."""
    root = out.grad_fn
    gradients: Any = collections.defaultdict(dict)
    gradients[root][out.output_nr] = torch.empty_like(out)
    for node in _in_order(root):
        given = gradients.pop(node, None)
        if given is None:
            continue
        recorder.scope = f"{scopes.get(node, 'other')} backward"
        if type(node).__name__ == "AccumulateGrad":
            _accumulate(node.variable, given[0])
            continue
        results = _called(node, given)
        for (after, number), result in zip(node.next_functions, results, strict=False):
            if after is None or result is None:
                continue
            expected = after._input_metadata[number]
            gradient = result.sum_to_size(tuple(expected.shape)).to(expected.dtype)
            before = gradients[after].get(number)
            gradients[after][number] = gradient if before is None else before + gradient


def _in_order(root: Any) -> list[Any]:
    """Return the nodes of a graph, each before those that it passes gradients to."""
    order, seen, stack = [], set(), [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None]
    return order[::-1]


def _accumulate(parameter: Any, gradient: Tensor) -> None:
    gradient = gradient.sum_to_size(parameter.shape).to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _called(node: Any, given: dict[int, Tensor]) -> tuple[Any, ...]:
    metadata = node._input_metadata
    gradients = [given.get(number) for number in range(len(metadata))]
    with torch.no_grad():
        results = node.apply(*gradients) if hasattr(node, "saved_tensors") else node(*gradients)
    return results if isinstance(results, tuple) else (results,)


def to_fake(model: nn.Module, channels_last: bool) -> None:
    """Put fake tensors in the place of a network's own."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = _fake(tensor, channels_last)  # type: ignore[assignment]


def _fake(tensor: Tensor, channels_last: bool) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    if channels_last and tensor.ndim == 4:
        fake = fake.contiguous(memory_format=torch.channels_last)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def scoped(model: nn.Module, recorder: Recorder, chosen: Callable[[nn.Module], bool]) -> Any:
    """Name the scope of chosen modules' operations; return the scope of each node of the graph."""
    scopes: dict[Any, str] = {}

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            recorder.scope = f"{name} forward"

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            recorder.scope = "other forward"
            ends = {a.grad_fn for a in args if isinstance(a, Tensor)}
            stack = [out.grad_fn]
            while stack:
                node = stack.pop()
                leaf = type(node).__name__ == "AccumulateGrad"
                if node is None or node in ends or node in scopes or leaf:
                    continue
                scopes[node] = name
                stack += [n for n, _ in node.next_functions]

        return hook

    for name, module in model.named_modules():
        if chosen(module):
            module.register_forward_pre_hook(enter(name or "layer"))
            module.register_forward_hook(leave(name or "layer"))
    return scopes


class Report(NamedTuple):
    """Launches forward and backward, passes over the input (reads and writes), waits of the host,
    and whether the output is a view.
    """

    forward: int
    backward: int
    passes: float
    waits: int
    view: bool


def layer(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    channels_last: bool = True,
) -> Report:
    """Count a training step of a layer, under autocast where `dtype` is a half type."""
    recorder, module = Recorder(), build().train()
    beside = getattr(module, "norm", None)
    amp = None if dtype == torch.float32 else dtype
    with FakeTensorMode(allow_non_fake_inputs=True):
        for each in (module, beside):
            if isinstance(each, nn.Module):
                to_fake(each, channels_last)
        x = torch.empty(shape, dtype=dtype, device="cuda")
        if channels_last and len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        scopes = scoped(module, recorder, lambda each: each is module)
        with recorded(recorder, amp), recorder:
            out = module(x * 1)
            view = out._is_view()
            with autocast(None):
                backward(out, recorder, scopes)
    own = [launch for launch in recorder.launches if launch.scope.startswith("layer ")]
    sizes = sum(launch.read + launch.write for launch in own) / _bytes(x)
    ways = [
        sum(launch.launches for launch in own if launch.scope.endswith(way))
        for way in ("forward", "backward")
    ]
    return Report(*ways, round(sizes, 2), sum(launch.waits for launch in own), view)


def network(name: str, target: str | None, batch: int = 128) -> dict[str, tuple[int, int]]:
    """Count a training step of a timm network, channels_last in bfloat16: launches forward and
    backward of its normalization layers, and of the rest.
    """
    import timm

    recorder = Recorder()
    model = timm.create_model(name)
    size = model.pretrained_cfg["input_size"]
    if target is not None:
        model, _ = convert(model, target, check=False)
        if target != "frozen":
            set_strength(model, 1.0)
    model.train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        to_fake(model, channels_last=True)
        images = torch.empty((batch, *size), device="cuda")
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.empty(batch, dtype=torch.long, device="cuda")
        scopes = scoped(model, recorder, _is_norm)
        recorder.scope = "other forward"
        with recorded(recorder, torch.bfloat16), recorder:
            loss = nn.functional.cross_entropy(model(images), labels)
            with autocast(None):
                backward(loss, recorder, scopes)
    counts = collections.Counter[tuple[str, str]]()
    for launch in recorder.launches:
        scope, way = launch.scope.rsplit(" ", 1)
        counts["rest" if scope == "other" else "norms", way] += launch.launches
    return {part: (counts[part, "forward"], counts[part, "backward"]) for part in ("norms", "rest")}


def _is_norm(module: nn.Module) -> bool:
    inner = any(isinstance(each, ConvertedLayer) for each in list(module.modules())[1:])
    kinds = ConvertedLayer, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm
    return isinstance(module, kinds) and not inner


def calls(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Count calls of Python and C functions, forward and backward, with launches left out: `x` is
    on the CPU.
    """
    seen = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        launches = frame.f_code is launch.__code__
        seen += event in ("call", "c_call") and not launches

    def launch(*_: Any, **options: Any) -> None:
        pass

    counts = (0, 0)
    with (
        mock.patch.multiple(launcher, launch=launch, processors=cache(lambda device: 132)),
        mock.patch.object(kernels, "_fastest", new=cache(lambda *_: triton_kernels)),
    ):
        # Plans are made by the first run
        for _ in range(2):
            seen = 0
            sys.setprofile(profile)
            out = module(x)
            sys.setprofile(None)
            before, seen = seen, 0
            node: Any = out.grad_fn
            grad = torch.empty_like(out)
            # As the engine calls it
            with torch.no_grad():
                sys.setprofile(profile)
                node.apply(grad, None) if hasattr(node, "saved_tensors") else node(grad)
                sys.setprofile(None)
            counts = before, seen
    return counts


def proxied(activation: nn.Module) -> nn.Module:
    """Return a ProxyNorm behind a norm."""
    return layers.ProxyNorm(activation, CHANNELS, norm=nn.BatchNorm2d(CHANNELS))


def proxied_norm(fused: bool) -> nn.Module:
    """Return a norm and its ProxyNorm, in one module or two."""
    norm = (layers.MigratedGroupNormAct if fused else MigratedGroupNorm)(1, CHANNELS)
    proxy = layers.ProxyNorm(nn.SiLU(), CHANNELS, norm=norm)
    if not fused:
        return nn.Sequential(norm, proxy)
    norm.act = proxy
    return norm


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "torch BatchNorm2d": lambda: nn.BatchNorm2d(CHANNELS),
    "FrozenBatchNorm": lambda: FrozenBatchNorm(CHANNELS),
    "BatchNormalNorm2d": lambda: layers.BatchNormalNorm2d(CHANNELS, noise=0.0),
    "BatchNormalNorm2d, noise 0.4": lambda: layers.BatchNormalNorm2d(CHANNELS),
    "GroupNormalNorm 32": lambda: layers.GroupNormalNorm(32, CHANNELS, noise=0.0),
    "GroupNormalNorm 2": lambda: layers.GroupNormalNorm(2, CHANNELS, noise=0.0),
    "InstanceNormalNorm2d": lambda: layers.InstanceNormalNorm2d(CHANNELS, affine=True, noise=0.0),
    "LayerNormalNorm2d": lambda: layers.LayerNormalNorm2d(CHANNELS, noise=0.0),
    "MigratedGroupNorm 1": lambda: MigratedGroupNorm(1, CHANNELS),
    "MigratedGroupNorm 32, t 0.5": lambda: MigratedGroupNorm(32, CHANNELS, strength=0.5),
    "MigratedGroupNorm, ProxyNorm": lambda: proxied_norm(fused=False),
    "MigratedGroupNormAct with ProxyNorm": lambda: proxied_norm(fused=True),
    "ProxyNorm ReLU": lambda: proxied(nn.ReLU()),
    "ProxyNorm SiLU": lambda: proxied(nn.SiLU()),
}
TOKEN_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "torch LayerNorm": lambda: nn.LayerNorm(384),
    "LayerNormalNorm": lambda: layers.LayerNormalNorm(384, noise=0.0),
}


def _print_layers() -> None:
    print("layer | launches forward + backward | passes | host waits | view")
    for channels_last in (True, False):
        for dtype in (torch.bfloat16, torch.float32):
            kind = f"{str(dtype)[6:]}, {'channels_last' if channels_last else 'contiguous'}"
            for name, build in LAYERS.items():
                report = layer(build, SHAPE, dtype, channels_last)
                print(f"{name}, {kind} | {_shown(report)}", flush=True)
    for name, build in TOKEN_LAYERS.items():
        print(f"{name}, bfloat16 | {_shown(layer(build, TOKENS))}", flush=True)


def _shown(report: Report) -> str:
    launches = f"{report.forward} + {report.backward}"
    return f"{launches} | {report.passes} | {report.waits} | {report.view}"


def _print_networks() -> None:
    networks = {
        "resnet50": (None, "frozen", "ln", "gn-pn", "bnn"),
        "vit_small_patch16_224": (None, "lnn"),
    }
    for name, targets in networks.items():
        for target in targets:
            print(name, target or "source", network(name, target), flush=True)


def _print_calls() -> None:
    x = torch.randn(CALLED).to(memory_format=torch.channels_last).requires_grad_()
    for name in ("torch BatchNorm2d", "BatchNormalNorm2d", "GroupNormalNorm 32"):
        print(name, "calls", calls(LAYERS[name](), x))


def main() -> None:
    parts = {"layers": _print_layers, "networks": _print_networks, "calls": _print_calls}
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
