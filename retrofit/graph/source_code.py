"""The source of the code that makes a call, and what a function does step by step."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from retrofit.errors import RetrofitError

# Instructions that do nothing.
_NO_STEPS = ("CACHE", "EXTENDED_ARG", "NOT_TAKEN", "NOP", "RESUME")


class RewriteError(RetrofitError):
    """A block's code cannot be rewritten; the message is the reason."""


def file_tree(code: CodeType) -> ast.Module:
    """Parse the file that holds a function, on whose imports, classes and closures the function's
    code depends. A `RewriteError` says that there is no source, or that compiling it does not give
    the very code that runs.
    """
    name = code.co_qualname
    try:
        lines, _ = inspect.findsource(code)
        source = "".join(lines)
        flags = future_flags(code)
        file = _compiled(source, code.co_filename, flags)
        compiled = code_in(file, code)
    except (OSError, TypeError, SyntaxError):
        raise RewriteError(f"the source of {name} is not at hand") from None
    positions = list(code.co_positions())
    if compiled != code or list(compiled.co_positions()) != positions:
        raise RewriteError(
            f"the source of {name} is not what runs: the file, or the code, was changed"
        )
    return ast.parse(source)


def future_flags(code: CodeType) -> int:
    """The flag of `from __future__ import annotations` that a function was compiled with: the import
    may stand in an earlier cell of a notebook, and not in the function's source.
    """
    return code.co_flags & annotations.compiler_flag


@functools.lru_cache(maxsize=8)
def _compiled(source: str, filename: str, flags: int) -> CodeType:
    return compile(source, filename, "exec", flags, dont_inherit=True)


def code_in(outer: CodeType, code: CodeType) -> CodeType | None:
    """The code in `outer`, of a file or function, of the function that begins where `code` does."""
    for const in outer.co_consts:
        if isinstance(const, CodeType):
            if (const.co_name, const.co_firstlineno) == (code.co_name, code.co_firstlineno):
                return const
            if (inner := code_in(const, code)) is not None:
                return inner
    return None


def instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """What a function does, step by step, with the functions and comprehensions inside it."""
    for step in dis.get_instructions(code):
        yield step
        if isinstance(step.argval, CodeType):
            yield from instructions(step.argval)


def methods_of(cls: type) -> Iterator[FunctionType]:
    """The methods and properties of a class and its parents, but for torch's and ours."""
    for base in cls.__mro__:
        if not base.__module__.startswith(("torch.", "retrofit.")):
            for value in vars(base).values():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, FunctionType):
                    yield function


def callee(code: CodeType, end: tuple[int, int]) -> str:
    """The expression that is called where a call in a function ends; empty if it has effects, or
    there is no source.
    """
    with contextlib.suppress(RewriteError):
        for node in ast.walk(file_tree(code)):
            if not isinstance(node, ast.Call) or (node.end_lineno, node.end_col_offset) != end:
                continue
            if _is_harmless(node.func):
                return ast.unparse(node.func)
    return ""


def _is_harmless(expression: ast.expr) -> bool:
    harmless = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Load)
    return all(isinstance(node, harmless) for node in ast.walk(expression))


@functools.lru_cache(maxsize=4096)
def _raising_steps(code: CodeType) -> tuple[dict[int, dis.Instruction], set[int]]:
    """Return a function's steps, by offset, and the offsets from which each way ends in a `raise`."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]
    raising: set[int] = set()
    leads_to_raise = False
    for step in reversed(steps):
        if step.opname == "RAISE_VARARGS":
            leads_to_raise = True
        elif not _goes_straight_on(step):
            leads_to_raise = False
        if leads_to_raise:
            raising.add(step.offset)
    by_offset = {step.offset: step for step in steps}
    return by_offset, raising


def _goes_straight_on(step: dis.Instruction) -> bool:
    name = step.opname
    return "JUMP" not in name and not name.startswith(("RETURN", "FOR_", "SEND"))


def raising_outcomes(code: CodeType, offset: int) -> set[bool]:
    """Return the outcomes of a condition, at an offset of a function, that lead to a `raise`."""
    steps, raising = _raising_steps(code)
    # Between the test and its jump, Python may make a bool of the result.
    following = sorted(at for at in steps if at >= offset)[:3]
    jump = next((steps[at] for at in following if steps[at].opname.startswith("POP_JUMP")), None)
    if jump is None or not jump.opname.endswith(("_TRUE", "_FALSE")):
        return set()
    after = next((at for at in following if at > jump.offset), -1)
    jumps_if = jump.opname.endswith("_TRUE")
    next_step = {jumps_if: jump.argval, not jumps_if: after}
    return {outcome for outcome, at in next_step.items() if at in raising}
