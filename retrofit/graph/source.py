"""The source of a function that runs, as a syntax tree, and the calls in it."""

from __future__ import annotations

import ast
import functools
import inspect
from types import CodeType

from retrofit.errors import RetrofitError

_ANNOTATIONS = annotations.compiler_flag  # `from __future__ import annotations` in an earlier cell of a notebook


class RewriteError(RetrofitError):
    """A block's code cannot be rewritten; the message is the reason."""


def file_tree(code: CodeType) -> ast.Module:
    """Parse the file that holds a function, on whose imports, classes and closures the function's code depends. A
    `RewriteError` says that there is no source, or that compiling it does not give the very code that runs.
    """
    try:
        source = "".join(inspect.findsource(code)[0])
        compiled = code_in(_compiled(source, code.co_filename, code.co_flags & _ANNOTATIONS), code)
    except (OSError, TypeError, SyntaxError):
        raise RewriteError(f"the source of {code.co_qualname} is not at hand") from None
    if compiled != code or list(compiled.co_positions()) != list(code.co_positions()):
        raise RewriteError(f"the source of {code.co_qualname} is not what runs: the file, or the code, was changed")
    return ast.parse(source)


@functools.lru_cache(maxsize=8)
def _compiled(source: str, filename: str, flags: int) -> CodeType:
    return compile(source, filename, "exec", flags, dont_inherit=True)


def code_in(outer: CodeType, code: CodeType) -> CodeType | None:
    """The code in `outer`, a file's or a function's, of the function that begins where `code` does."""
    for const in outer.co_consts:
        if isinstance(const, CodeType):
            if (const.co_name, const.co_firstlineno) == (code.co_name, code.co_firstlineno):
                return const
            if (inner := code_in(const, code)) is not None:
                return inner
    return None


def callee(code: CodeType, end: tuple[int, int]) -> str:
    """The expression that is called where a call in a function ends; empty if it has effects, or there is no source."""
    try:
        tree = file_tree(code)
    except RewriteError:
        return ""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    function = next((call.func for call in calls if (call.end_lineno, call.end_col_offset) == end), None)
    harmless = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Load)
    pure = function is not None and all(isinstance(node, harmless) for node in ast.walk(function))
    return ast.unparse(function) if function is not None and pure else ""
