"""Errors as the command line shows them: one line that says what to do."""

from pydantic import ValidationError

# Not meant for users by whoever raised them, so their text alone may say little ("'role'").
_UNEXPECTED = (AssertionError, AttributeError, LookupError, NameError, TypeError)


class CommandError(Exception):
    """What keeps a command from going on and is the user's to mend; its text is the whole message."""


def one_line(error: Exception) -> str:
    """The message of ``error`` without line breaks, and without the values pydantic appends to it."""
    if isinstance(error, ValidationError):
        text = "; ".join(
            ": ".join([*(str(part) for part in detail["loc"][:1]), detail["msg"].removeprefix("Value error, ")])
            for detail in error.errors()
        )
    else:
        text = str(error)
    text = " ".join(text.split())
    if not text or isinstance(error, _UNEXPECTED):
        return f"{type(error).__name__}: {text} (dllm --traceback … shows where)"
    return text
