"""The one exception that a user's mistake raises."""


class RetrofitError(Exception):
    """An error that the user can fix.

    The message is one line that says what happened and what to do. Arguments are written as in
    Python, in backticks: "pass `num_classes=7`". The command line prints the message after `error:
    `, with flags in place of the arguments (`retrofit.cli.console`) and without a traceback, and
    exits with `exit_code`.
    """

    exit_code = 1


class UsageError(RetrofitError, ValueError):
    """An invalid argument: an unknown name, a malformed pattern, a number out of range (exit code
    2).
    """

    exit_code = 2
