"""The one exception that a user's mistake raises."""


class RetrofitError(Exception):
    """Something the user can mend.

    The message is one line that says what happened and what to do. It names arguments as Python does, in backticks:
    "pass `num_classes=7`". The command line prints it after `error: `, with its flags in their places
    (`retrofit.cli.console`), without a traceback, and exits with `exit_code`.
    """

    exit_code = 1


class UsageError(RetrofitError, ValueError):
    """An argument wrong by itself: an unknown name, a malformed pattern, a number out of range (exit code 2)."""

    exit_code = 2
