"""Which convolution feeds a norm, and nothing else, whatever the network's code does: proved without
running it, from its traces and the bytecode of the methods around.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from dis import Instruction
from types import CodeType

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from retrofit.graph import recognition
from retrofit.graph.dataflow import Flow, Flows
from retrofit.graph.source_code import instructions, methods_of
from retrofit.graph.trace import VARIADIC

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Words in the names of methods that compute nothing.
_SETTING_UP = ("init", "reset_parameters", "extra_repr")
_ALL_CHILDREN = {"children", "named_children", "_modules", "get_submodule"}


def sole_feeders(
    model: nn.Module, is_norm: Callable[[nn.Module], bool]
) -> tuple[dict[nn.Module, nn.Module], set[nn.Module]]:
    """Return, by norm, the convolution that provably feeds it alone, and the norms whose tensors
    other code reads.

    It is proved if all of this holds:

    - All code above both was traced, on every path.
    - One method calls both. It takes no optional arguments and, in all traces, no constants.
    - Nothing else takes the convolution's output, reads its parameters or shares them.
    - Every norm of the same block is called.
    - No other method of the modules that hold them mentions the convolution.
    """
    flows = Flows(model, is_norm)
    norms = list(filter(is_norm, flows.names))
    uncalled = {norm for norm in norms if norm not in flows.calls}
    holders = Counter(
        parameter for module in model.modules() for parameter in set(module._parameters.values())
    )
    feeders = {}
    for norm in filter(flows.calls.get, norms):
        conv = _only_feeder(flows, norm)
        if conv is None or any(holders[parameter] > 1 for parameter in conv.parameters()):
            continue
        if _is_called_with(flows, conv, norm, uncalled):
            feeders[norm] = conv
    return feeders, flows.read.intersection(norms)


def _only_feeder(flows: Flows, norm: nn.Module) -> nn.Module | None:
    """The convolution that feeds every call of a norm, and whose parameters no other code reads."""
    feeders = {_feeder(*call) for call in flows.calls[norm]}
    conv = feeders.pop()
    if conv is None or feeders or conv in flows.read:
        return None
    if len(flows.calls[conv]) != len(flows.calls[norm]):
        return None
    return conv


def _is_called_with(
    flows: Flows, conv: nn.Module, norm: nn.Module, uncalled: set[nn.Module]
) -> bool:
    """Whether one method calls a convolution and its norm, on every path, with all code above it
    traced, and no other method mentions the convolution.
    """
    calls = (*flows.calls[norm], *flows.calls[conv])
    places = [flow.places[node] for flow, node in calls]
    methods = {(place.owner, place.code) for place in places}
    owner, code = methods.pop()
    if methods or code is None or uncalled & set(owner.modules()):
        return False
    both = {norm, conv}
    above = {module for module, inside in flows.inside.items() if inside & both} - both
    if above & flows.failures.keys():
        return False
    return not _mentioned(conv, code, above)


def _feeder(flow: Flow, norm: fx.Node) -> nn.Module | None:
    """The convolution whose output goes to a norm's call alone, through nothing but identities,
    on every path; None if there is none.
    """
    node = flow.producer(norm)
    while node is not None and len(flow.consumers(node)) == 1:
        module = flow.modules.get(node)
        if not isinstance(module, nn.Identity):
            if not isinstance(module, _ConvNd):
                return None
            if not recognition.is_plain_affine(module):
                return None
            if _has_other_paths(flow, norm) or _has_other_paths(flow, node):
                return None
            return module
        node = flow.producer(node)
    return None


def _has_other_paths(flow: Flow, node: fx.Node) -> bool:
    """Whether the method that makes a call may take a path that was not traced.

    It may if it, or an override that calls it, takes an optional argument or one that is no value
    under trace, or if the trace turned a value into a number.
    """
    place = flow.places[node]
    _, constants = flow.variables[node]
    # Code that fx generated from a graph has no source to read.
    if place.code is None or flow.size is not None:
        return True
    arguments = _arguments_down_to(place.code, type(place.owner))
    if arguments is None:
        return True
    return any(_is_optional(argument) or argument.name in constants for argument in arguments)


def _arguments_down_to(code: CodeType, cls: type) -> list[inspect.Parameter] | None:
    """Return the arguments of the method that has a code, and of its overrides in a class; None if
    that is not known.
    """
    arguments: list[inspect.Parameter] = []
    for method in [vars(base).get(code.co_name) for base in cls.__mro__]:
        if method is None:
            continue
        function = inspect.unwrap(method)
        if not inspect.isfunction(function):
            return None
        parameters = list(inspect.signature(method).parameters.values())
        arguments += parameters[1:]
        if function.__code__ is code:
            return arguments
    return None


def _is_optional(argument: inspect.Parameter) -> bool:
    optional_kinds = (*VARIADIC, inspect.Parameter.KEYWORD_ONLY)
    return argument.default is not argument.empty or argument.kind in optional_kinds


def _mentioned(conv: nn.Module, method: CodeType, above: set[nn.Module]) -> bool:
    """Whether a method besides `method` mentions a convolution by name, or its container other than
    to call it.
    """
    named = _names_of(conv, above)
    for owner in above:
        for function in methods_of(type(owner)):
            code = function.__code__
            is_setup = any(word in function.__name__ for word in _SETTING_UP)
            if is_setup or code == method:
                continue
            for name, module in named:
                if _uses(code, name, owner, module, calls=module is not conv):
                    return True
    return False


def _names_of(conv: nn.Module, above: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the names that modules above a convolution have for it, or for a container of it."""
    containers = {holder for holder in above if type(holder) in _CONTAINERS}
    mentions = [conv]
    for module in mentions:
        mentions += [holder for holder in containers if module in holder.children()]
    return [
        (name, module)
        for holder in above - containers
        for name, module in holder._modules.items()
        if module in mentions
    ]


def _uses(code: CodeType, name: str, owner: nn.Module, module: nn.Module, calls: bool) -> bool:
    """Whether the code of a method of `owner` uses a module by its name, or all children.

    It does not if `self.name` is another module, or if the code only tests for the module or, with
    `calls`, calls it.
    """
    steps = list(instructions(code))
    around = zip([steps[0], *steps], steps, [*steps[1:], steps[-1]], strict=False)
    for before, step, after in around:
        if (step.opname, step.argval) == ("LOAD_CONST", name):
            return True
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD") or _only_asks(after):
            continue
        if step.argval in _ALL_CHILDREN:
            return True
        if step.argval != name or (calls and _is_method(step)):
            continue
        if not _is_self(before) or getattr(owner, name, None) is module:
            return True
    return False


def _is_method(step: Instruction) -> bool:
    """Whether a step loads an attribute to call it."""
    return step.opname == "LOAD_METHOD" or "NULL" in step.argrepr


def _is_self(step: Instruction) -> bool:
    """Whether a step loads `self`; Python 3.13 loads two at once."""
    names = step.argrepr.split(", ")
    return step.opname.startswith("LOAD_FAST") and names[-1] == "self"


def _only_asks(after: Instruction) -> bool:
    """Whether a step that follows a module's mention tests it."""
    return "JUMP" in after.opname or after.opname == "TO_BOOL" or after.argrepr == "None"
