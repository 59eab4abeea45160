"""The options of a conversion: the caller's values, their checks, and the signatures that show
them.

The targets carry the options (`retrofit/registry.py`); from those come the keywords of
`retrofit.plan` and `retrofit.convert`, the flags of the command line and the record in a plan.
Importing this imports no torch, so that `--help` answers at once.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

# These register themselves.
import retrofit.builtin_targets  # noqa: F401
from retrofit.errors import UsageError
from retrofit.registry import OPTIONS, Option, Target, register_target, targets_of

__all__ = ["OPTIONS", "ConversionOptions", "register_target", "takes_options"]

Function = TypeVar("Function", bound=Callable[..., Any])


class ConversionOptions(SimpleNamespace):
    """What the caller asks of a conversion, beyond which layers it concerns: a value for each of
    `OPTIONS`, None for the target's default.

    Raises:
        TypeError: If an option is unknown.
    """

    def __init__(self, **values: Any) -> None:
        unknown = sorted(values.keys() - OPTIONS.keys())
        if unknown:
            raise TypeError(
                f"plan() and convert() have no argument {', '.join(unknown)}; see "
                "help(retrofit.plan)"
            )
        super().__init__(**{**dict.fromkeys(OPTIONS), **values})

    def check(self, target: Target) -> None:
        """Check the values that are set.

        Raises:
            UsageError: If one means nothing to the target, or is out of range.
        """
        for name, known in OPTIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if name not in target.options:
                names = ", ".join(f"`{option}`" for option in target.options)
                raise UsageError(
                    f"`{name}` means nothing to this target ({target.name}), which takes "
                    f"{names or 'no options'}; leave it out"
                )
            problem = known.problem(value)
            if problem:
                raise UsageError(
                    f"`{name}` must be {problem}, not {value!r}; leave it out for the default"
                )
        if self.groups is not None and self.group_channels is not None:
            raise UsageError(
                "`groups` and `group_channels` both say how many groups a layer gets; leave one out"
            )

    def record(self) -> dict[str, Any]:
        """Return what the plan keeps of the options, as JSON values."""
        return {
            name: getattr(self, name) for name, known in OPTIONS.items() if known.kind != "batches"
        }


def takes_options(function: Function) -> Function:
    """Show every option in the signature and the docstring of a function that takes them as
    `**options`.
    """
    signature = inspect.signature(function)
    named = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(known)
        )
        for name, known in OPTIONS.items()
    ]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*named, *options]
    )
    lines = [
        f"    {name} ({', '.join(targets_of(name))}): {known.help}"
        for name, known in OPTIONS.items()
    ]
    function.__doc__ = "\n".join(
        [inspect.cleandoc(function.__doc__ or ""), "", "Options, by target:", *lines]
    )
    return function


def _annotation(known: Option) -> str:
    """Return the type of an option's values, as help() shows it."""
    if known.kind == "batches":
        return "Iterable[Any] | None"
    types = []
    if known.kind is not str:
        types = [known.kind.__name__]
    if known.words:
        words = ", ".join(map(repr, known.words))
        types.append(f"Literal[{words}]")
    return " | ".join([*types, "None"])
