"""Error texts as any database can store them."""

from __future__ import annotations

from typing import Final

ERROR_LENGTH: Final = 2000
LONGEST: Final = 200_000
"""An outcome may say more than an exception: an answer of a destination is kept whole."""


def clean_error(error: object) -> str:
    """The text of an error without what no database can store, cut to what fits; an exception is told with its type."""
    if isinstance(error, BaseException):
        return describe_error(error)
    return _clean(str.__str__(error) if isinstance(error, str) else _read(error), LONGEST)


def describe_error(error: BaseException) -> str:
    """Make the text kept for a failure: "TypeName: message", cut to what any database can store."""
    message, name = _read(error), type(error).__name__
    return _clean(f"{name}: {message}" if message else name, ERROR_LENGTH)


def _read(value: object) -> str:
    try:
        return str(value)
    except Exception as broken:
        return f"its message cannot be read ({type(broken).__name__})"


def _clean(text: str, most: int) -> str:
    text = text.replace("\0", "")
    if not text.isascii():
        # Join surrogate halves before the cut and replace a lone one: UTF-8 has no form for it.
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text if len(text) <= most else text[: most - 1] + "…"
