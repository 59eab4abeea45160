"""Capture what a network computes in evaluation: its layers as inference forms, traced once by
torch.export.

The power transform is one node of the captured graph, `retrofit::power` (a `Transform`), in whose
place folding and approximations put a `Fit`; all else is plain ATen.
"""

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from retrofit.errors import RetrofitError
from retrofit.inputs import Call, answers_with_boxes
from retrofit.layers import ProxyNorm, forms
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.frozen_batch_norm import PlainAffine
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.surgery.families import find_norms
from retrofit.utils.running import copied, device_of, silence
from retrofit.utils.snapshot import left_as_it_was
from retrofit.utils.text import cause_of

ATEN = torch.ops.aten
INF = float("inf")
_KINDS = {
    forms.EstimatedTransform: "estimated",
    forms.MigratedForm: "group",
    forms.TwoBranch: "two branches",
    forms.GroupConvolution: "group convolution",
}


@torch.library.custom_op("retrofit::power", mutates_args=())
def power(h: Tensor, lmbda: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return gamma * psi(h; lambda) + beta of standardized values (N, C, *), with (C,) constants."""
    return forms.TwoBranch(lmbda, gamma, beta)(h).contiguous()


power.register_fake(lambda h, *_: torch.empty_like(h, memory_format=torch.contiguous_format))
POWER = torch.ops.retrofit.power.default


@dataclass
class Program:
    """What a network computes in evaluation, in float32 and without gradients."""

    # of ATen operations; if it could not be captured, a copy whose layers compute by their forms
    module: Any
    call: Call
    # the dimensions of `call` that may vary
    shapes: torch.export.ShapesCollection
    # those that are no layers of ours
    batch_norms: frozenset[str]
    layers: dict[str, str] = field(
        default_factory=dict
    )  # what each that is called has become: see `FoldedLayer`
    # why the network was not captured
    note: str = ""

    def exported(self) -> torch.export.ExportedProgram:
        """Capture the module again, as it is now, without the checks of its input."""
        graph = copy.deepcopy(self.module.graph)
        for node in graph.find_nodes(op="call_module", target="_guards_fn"):
            graph.erase_node(node)
        return _exported(fx.GraphModule(self.module, graph), self.call, self.shapes)


def capture(
    model: nn.Module,
    call: Call,
    *,
    batch: int | None = None,
    dynamic_size: bool = False,
    lambdas: Mapping[str, float] | None = None,
) -> Program:
    """Capture a network with an example call; it is not changed.

    The number of samples may vary unless `batch` fixes it; with `dynamic_size` what lies behind the
    channels may too. `lambdas`, by layer and strength included, take the place of estimates.
    """
    net = copied(model).float().eval().requires_grad_(False)
    call = call.resized(batch or max(2, call.batch)).to(device_of(net), torch.float32)
    batch_norms = frozenset(
        norm.name for norm in find_norms(net) if norm.family in ("bn", "frozen-bn")
    )
    # Before the forms are put in, which note that they are called.
    detects = answers_with_boxes(net, call)
    shapes = torch.export.ShapesCollection()
    for x in call.tensors:
        dims = [0] if batch is None and x.ndim and len(x) == call.batch else []
        dims += range(2, x.ndim) if dynamic_size else []
        shapes[x] = dict.fromkeys(dims, torch.export.Dim.DYNAMIC)
    program, powers = Program(net, call, shapes, batch_norms), []
    for name, layer in [
        (name, layer) for name, layer in net.named_modules() if isinstance(layer, ConvertedLayer)
    ]:
        form = layer.inference_form()
        parts = list(form.modules())
        default = "normalization" if layer.affine_map() is None else "affine"
        kind = next(
            (kind for cls, kind in _KINDS.items() if any(type(part) is cls for part in parts)),
            default,
        )
        for part in parts:
            if (
                lambdas is not None
                and name in lambdas
                and isinstance(part, forms.EstimatedTransform)
            ):
                part.freeze(lambdas[name])
                kind = "frozen"
        if isinstance(layer, ProxyNorm | WeightStandardization | PlainAffine):
            # it is no normalization
            kind = ""
        # somebody's own
        if "forward" in vars(layer):
            program.layers[name] = "kept"
        else:
            vars(layer)["forward"] = partial(_by_form, form, program.layers, name, kind)
            powers += [part for part in form.modules() if isinstance(part, forms.TwoBranch)]
    if detects:
        program.note = "detectors sort and suppress boxes, which torch.export cannot capture"
        return program
    for part in powers:
        vars(part)["forward"] = lambda h, part=part: POWER(h, *part.constants)
    try:
        program.module = _exported(net, call, shapes).module()
    except RetrofitError as error:
        program.note = str(error)
        return program
    finally:
        for part in powers:
            del vars(part)["forward"]
    # they refuse, but the mode of a captured module does not matter
    for name in ("train", "eval"):
        vars(program.module).pop(name, None)
    for owner in program.module.modules():
        for name, value in list(vars(owner).items()):
            # a form's constant: as a buffer it moves with the module
            if isinstance(value, Tensor):
                delattr(owner, name)
                owner.register_buffer(name, value)
    program.module.eval()
    return program


def _by_form(form: nn.Module, layers: dict[str, str], name: str, kind: str, x: Tensor) -> Any:
    """A layer's forward by its form, which notes that the layer is called, and what it has become
    so far.
    """
    if kind:
        layers[name] = kind
    return form.forward(x)


def _exported(
    net: nn.Module, call: Call, shapes: torch.export.ShapesCollection
) -> torch.export.ExportedProgram:
    """Run torch.export; a RetrofitError says why it cannot capture the network."""
    try:
        with silence(), torch.no_grad(), left_as_it_was(net):
            exported = torch.export.export(
                net, call.args, dict(call.kwargs), dynamic_shapes=shapes, strict=False
            )
            return exported.run_decompositions({})
    # torch.export raises anything that the network's code does
    except Exception as error:
        raise RetrofitError(
            f"torch.export cannot capture the network ({cause_of(error)})"
        ) from error


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call of an ATen operator by name, in their order, defaults
    included.
    """
    expected = node.target._schema.arguments  # type: ignore[union-attr]
    values = (
        dict(zip((argument.name for argument in expected), node.args, strict=False)) | node.kwargs
    )
    return {
        argument.name: values.get(argument.name, argument.default_value) for argument in expected
    }


def users_of(node: Node) -> list[Node]:
    """Return the nodes that use a value; what only checks its type does not."""
    return [user for user in node.users if user.target is not ATEN._assert_tensor_metadata.default]


def shape_of(node: Node) -> tuple[Any, ...]:
    """Return the shape of a node's value."""
    return tuple(node.meta["val"].shape)


def layer_of(node: Node) -> str:
    """Return the name of the innermost module that a node comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def value_of(module: fx.GraphModule, node: Node) -> Any:
    """Return the value of a `get_attr` node."""
    return operator.attrgetter(str(node.target))(module)


@dataclass(frozen=True)
class Transform:
    """A power transform of a graph: gamma * psi(sign * h; lambda) + beta, (C,) each in float64,
    with gamma >= 0, since gamma * psi(h; lambda) = -gamma * psi(-h; 2 - lambda).
    """

    node: Node
    sign: Tensor
    lmbda: Tensor
    gamma: Tensor
    beta: Tensor
    # the ReLU or ReLU6 that alone takes the output
    relu: Node | None
    # its upper limit, inf or 6
    high: float | None

    @classmethod
    def of(cls, module: fx.GraphModule, node: Node) -> "Transform":
        """Return the transform of a `retrofit::power` node."""
        lmbda, gamma, beta = (value_of(module, arg).double() for arg in node.args[1:])  # type: ignore[arg-type]
        sign = torch.where(gamma < 0, -1.0, 1.0).to(gamma)
        users = users_of(node)
        high = _upper_limit(users[0]) if len(users) == 1 else None
        relu = None if high is None else users[0]
        return cls(
            node, sign, torch.where(gamma < 0, 2 - lmbda, lmbda), gamma.abs(), beta, relu, high
        )

    def exact_form(self) -> "Fit":
        """Return the transform itself: of one branch, with the ReLU, if the ReLU makes the negative
        branch dead.
        """
        sign, lmbda, gamma, beta, high = (
            getattr(self, name) for name in ("sign", "lmbda", "gamma", "beta", "high")
        )
        if high is None or bool((beta > 0).any()) or lmbda.numel() == 1:
            return Fit(
                "two branches",
                0,
                torch.ones_like(sign),
                0 * sign,
                [forms.TwoBranch(lmbda, gamma, beta)],
            )
        ratio = -beta / torch.where(gamma > 0, gamma, 1.0)
        root = torch.where(
            lmbda == 0, ratio, torch.log1p(lmbda * ratio) / torch.where(lmbda == 0, 1.0, lmbda)
        )
        live = (
            (gamma > 0) & root.isfinite() & root.exp().isfinite()
        )  # root is log(1 + h0), h0 the function's zero
        to_u = torch.where(live, torch.exp(-root), 0.0)
        near_0 = bool((lmbda.abs() < forms.SMALL_POWER).any())
        scale, after = (
            torch.where(live, gamma - lmbda * beta, 0.0) / (1.0 if near_0 else lmbda),
            None,
        )
        parts = [limits(1.0), OneBranch(lmbda, scale, near_0), limits(None, high)]
        if high == INF:
            parts, after = [limits(1.0), OneBranch(lmbda, None, near_0)], scale
        return Fit(
            "one branch",
            0,
            to_u,
            torch.where(live, to_u, 1.0),
            parts,
            has_activation=True,
            after=after,
        )


def _upper_limit(node: Node) -> float | None:
    """Return the limit above of a function that is 0 below 0 and else the identity up to it; None
    for others.
    """
    if node.target is ATEN.relu.default:
        return INF
    if node.target not in (ATEN.hardtanh.default, ATEN.clamp.default):
        return None
    _, low, high = arguments(node).values()
    return None if low != 0 or isinstance(high, Node) else INF if high is None else high


@dataclass(frozen=True)
class Fit:
    """What takes the place of a transform, as a function of sign * h: scale * h + shift, the parts
    that follow, and the scale of what they give; (C,) in float64. Errors are shares of the standard
    deviation of the layer's output.
    """

    # "affine", "polynomial", "lines", "one branch" or "two branches"
    form: str
    # the degree, or the number of lines
    size: int
    scale: Tensor
    shift: Tensor
    parts: list[nn.Module]
    # whether a ReLU behind the layer is included; else it stays
    has_activation: bool = False
    # on what was seen
    max_error: float = 0.0
    # root mean square, on guessed values too
    rms_error: float = 0.0
    after: Tensor | None = None

    def __call__(self, h: Tensor) -> Tensor:
        """Evaluate for h, (C, S), in the precision of a folded network."""
        y = torch.addcmul(self.shift[:, None], h, self.scale[:, None]).T.float()
        for part in self.parts:
            y = part(y)
        return y.T.to(h)


class OneBranch(nn.Module):
    """max(0, gamma * psi(h; lambda) + beta), (N, C, *), where this is 0 for all h <= 0.

    It takes u = (1 + h) / (1 + h0), at least 1, where h0 >= 0 is the zero of the function, and
    gives scale * (u^lambda - 1), or scale * (u^lambda - 1) / lambda if lambda is near 0; what
    surrounds it can do the rest.
    """

    lmbda: Tensor
    scale: Tensor | None

    def __init__(self, lmbda: Tensor, scale: Tensor | None, near_0: bool) -> None:
        super().__init__()
        self.near_0 = near_0
        self.register_buffer("lmbda", lmbda.float())
        self.register_buffer("scale", None if scale is None else scale.float())

    def forward(self, u: Tensor) -> Tensor:
        """Transform (N, C, *)."""
        log = torch.log(u)
        power = log * forms.channel_view(self.lmbda, u)
        y = forms.relative_growth(power) * log if self.near_0 else torch.exp(power) - 1.0
        return y if self.scale is None else y * forms.channel_view(self.scale, u)


def limits(low: float | None, high: float | None = None) -> nn.Module:
    """Return limits by constants of the whole layer, which runtimes fuse into the convolution
    before it.
    """
    return forms.FunctionModule(partial(torch.clamp, min=low, max=high))


class Polynomial(nn.Module):
    """p * (c1 + p * (c2 + ...)) per channel of (N, C, *), for a degree of 2 or more. Each
    multiplication by constants with the addition that follows is a batch normalization, in
    evaluation: one operation, which ONNX Runtime keeps in the layout of its convolutions.
    """

    def __init__(self, coefficients: Tensor) -> None:
        """Keep (degree, C) coefficients of p, p^2, ..."""
        super().__init__()
        *lower, scale = coefficients.unbind(0)
        self.steps = nn.ModuleList()
        for shift in reversed(lower):
            self.steps.append(forms.ConstantNorm(torch.zeros_like(scale), scale, shift))
            scale = torch.ones_like(scale)

    def to_convolutions(self) -> None:
        """Make a depthwise convolution of each batch normalization, for which ONNX Runtime has
        integer kernels in INT8. Degrees above 3 stay: of the 8 bits of each step little is left in
        the end.
        """
        norms: list[Any] = list(self.steps)
        if len(norms) <= 2:
            self.steps = nn.ModuleList(
                forms.GroupConvolution(norm.scale.view(-1, 1, 1), norm.shift) for norm in norms
            )

    def forward(self, p: Tensor) -> Tensor:
        """Evaluate."""
        y = p
        for step in self.steps:
            y = step(y) * p
        return y
