"""What a module or a call is: a normalization, an elementwise activation, a dropout, or something
fx must not enter.
"""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx, nn

_OURS = "retrofit.layers"

# Of torch's activations, those that may be called as functions or methods.
_ACTIVATIONS = """CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU
Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Threshold"""
_FUNCTIONS: dict[str, Any] = {name.lower(): getattr(nn, name) for name in _ACTIVATIONS.split()}
# Attributes and methods of a tensor that say nothing of its values.
METADATA = (
    "shape",
    "ndim",
    "dtype",
    "device",
    "is_cuda",
    "requires_grad",
    "size",
    "dim",
    "numel",
    "stride",
)
_NORMS = (
    *(f"torch.nn.modules.{file}." for file in ("batchnorm", "instancenorm", "normalization")),
    *(
        f"timm.layers.{file}."
        for file in ("norm", "norm_act", "evo_norm", "filter_response_norm", "inplace_abn")
    ),
    "torchvision.ops.misc.FrozenBatchNorm2d",
)
_DROPS = (
    "torch.nn.modules.dropout.",
    "timm.layers.drop.",
    "torchvision.ops.drop_block.",
    "torchvision.ops.stochastic",
)


@cache
def wrapped_functions() -> tuple[Callable[..., Any], ...]:
    """Functions that stay one call in a graph: timm's register and functional activations,
    torchvision's operators.
    """
    import timm.models  # noqa: F401  importing the models fills the register
    import torchvision.ops
    from timm.layers import get_notrace_functions

    operators = (
        function for name, function in inspect.getmembers(torchvision.ops, inspect.isfunction)
    )
    return (*(f for f in get_notrace_functions() if callable(f)), *_timm_functions(), *operators)


@cache
def _timm_functions() -> dict[Any, Any]:
    """Timm's functional activations, which fx would otherwise enter, each with the module class of
    the same name.
    """
    from timm.layers import activations, activations_me

    named: dict[str, Any] = {**vars(activations), **vars(activations_me)}
    classes = {name.lower(): value for name, value in named.items() if inspect.isclass(value)}
    functions = {name: value for name, value in named.items() if inspect.isfunction(value)}
    pairs = {value: classes.get(name.replace("_", "")) for name, value in functions.items()}
    return {function: cls for function, cls in pairs.items() if cls is not None}


def _comes_from(module: nn.Module, homes: tuple[str, ...]) -> bool:
    return any(
        f"{base.__module__}.{base.__name__}".startswith(homes) for base in type(module).__mro__
    )


def has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called, and does more than hold others."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a normalization layer of torch, timm or torchvision, or of a subclass of
    one.
    """
    return _comes_from(module, _NORMS)


def is_drop(module: nn.Module) -> bool:
    """Whether `module` only drops values in training: dropout, drop path, drop block."""
    return _comes_from(module, _DROPS)


def is_activation(module: nn.Module) -> bool:
    """Whether `module` is an activation: a nonlinear function of each value by itself, in both
    modes and on every call.

    A copy is run, whatever the class. So a module that keeps something from call to call is found
    out. PReLU alone may have a parameter per channel.
    """
    from timm.layers.activations import PReLU

    if type(module) in (nn.PReLU, PReLU):
        return True
    if not _may_be_activation(module) or not all(map(is_activation, module.children())):
        return False
    # A module that takes other inputs may raise anything.
    with (
        contextlib.suppress(Exception),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        warnings.catch_warnings(action="ignore"),
    ):
        probe = _probe(module)
        return all(_is_elementwise(probe.train(mode)) for mode in (True, False))
    return False


def _may_be_activation(module: nn.Module) -> bool:
    is_ours = type(module).__module__.startswith(_OURS)
    if isinstance(module, nn.Sequential) or is_norm(module) or is_ours or is_altered(module):
        return False
    return all(t.numel() == 1 for t in (*module.parameters(), *module.buffers()))


def _probe(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the CPU, in float64; from the meta device with values of 0.5."""
    probe = copy.deepcopy(module)
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        for tensor in probe.to_empty(device="cpu").state_dict().values():
            tensor.fill_(0.5)
    return probe.to("cpu", torch.float64)


def _is_elementwise(act: nn.Module) -> bool:
    """Whether a module is a nonlinear function of each value by itself, and keeps nothing."""
    random = torch.Generator("cpu").manual_seed(0)
    x = 3 * torch.randn(2, 3, 4, 5, generator=random, dtype=torch.float64, device="cpu")
    order = torch.randperm(x.numel(), generator=random, device="cpu")[:30]
    attributes = dict(vars(act))
    y = act(x.clone())
    if y.shape != x.shape:
        return False
    # Some of the values, in another order and shape.
    reordered = act(x.flatten()[order].view(5, 2, 3)).flatten()
    if not torch.allclose(reordered, y.flatten()[order], rtol=1e-9, atol=1e-12):
        return False
    zero = act(0 * x)
    is_odd = torch.allclose(y + act(-x), 2 * zero)
    is_affine = is_odd and torch.allclose(act(2 * x) - zero, 2 * (y - zero))
    keeps_nothing = all(vars(act)[name] is value for name, value in attributes.items())
    return not is_affine and keeps_nothing


def is_altered(module: nn.Module) -> bool:
    """Whether a call of `module` may do something else than its class says: it has hooks, or a
    forward of its own.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def is_plain_affine(module: nn.Module) -> bool:
    """Whether `module` is a convolution or linear layer that uses its weight and bias as they are.

    An affine map of its output then folds into them; a weight-standardized convolution would undo
    it, and so would whatever makes the weight anew at every call (a parametrization, pruning,
    weight normalization). Quantized and sharded weights are tensors of their own kind, which do not
    take new values.
    """
    from timm.layers import Conv2dSame, Linear

    cls: Any = type(module)
    if is_altered(module) or type(module._parameters.get("weight")) is not nn.Parameter:
        return False
    if cls in (Conv2dSame, Linear):
        return True
    if not isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
        return False
    homes = (nn.Conv2d.__module__, nn.Linear.__module__)
    base = next(base for base in cls.__mro__ if base.__module__ in homes)
    # A parametrized layer has its weight as a property of its class.
    return all(
        getattr(cls, name, None) is getattr(base, name, None)
        for name in ("forward", "_conv_forward", "weight", "bias")
    )


def is_leaf(module: nn.Module) -> bool:
    """Whether a trace shows a call of `module` as one node, beyond what fx itself decides for
    torch's modules.
    """
    import timm.models  # noqa: F401  importing the models fills timm's register
    from timm.layers import get_notrace_modules

    home = type(module).__module__
    is_operator = home.startswith("torchvision.ops") and not any(True for _ in module.children())
    # Operators (RoIAlign, DeformConv2d, ...), but not composites such as Conv2dNormActivation.
    if is_operator or home.startswith(_OURS):
        return True
    if is_norm(module) or is_drop(module) or is_plain_affine(module):
        return True
    # Hooks may change what passes.
    return is_altered(module) or isinstance(module, tuple(get_notrace_modules()))


def _module_class(target: Any) -> Any:
    """The class of the activation that a function, or a tensor's method of that name, computes;
    None if it is none.
    """
    name = target
    if not isinstance(target, str):
        name = getattr(target, "__name__", "")
    # torch's builtin functions and the names of methods have no module.
    home = getattr(target, "__module__", None) or "torch"
    if f"{home}.".startswith("torch."):
        return _FUNCTIONS.get(name.replace("_", ""))
    return _timm_functions().get(target)


def function_module(node: fx.Node) -> nn.Module | None:
    """A fresh module that does what a functional or method call of an activation does, never in
    place; None where `node` is no such call, or its other arguments are no constants.
    """
    is_call = node.op in ("call_function", "call_method")
    has_input = bool(node.args) or "input" in node.kwargs
    if not is_call or not has_input:
        return None
    cls = _module_class(node.target)
    if cls is None:
        return None
    signature = inspect.signature(cls)
    # Parameters are in the order of the arguments behind the input.
    options = dict(zip(signature.parameters, node.args[1:], strict=False)) | node.kwargs
    options.pop("input", None)
    options.pop("inplace", None)
    depends_on_values = any(isinstance(option, fx.Node) for option in options.values())
    if depends_on_values:
        return None
    module: nn.Module = cls(**options)
    return module
