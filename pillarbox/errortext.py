"""Error texts as any database can store them."""

from __future__ import annotations

import asyncio
import os
import traceback
from concurrent import futures
from pathlib import Path
from typing import Final

ERROR_LENGTH: Final = 2000
FRAMES: Final = 6
LONGEST: Final = 200_000
"""An outcome may say more than an exception: an answer of a destination is kept whole."""
_BETWEEN: Final = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, asyncio.__file__, futures.__file__))
"""Folders of code that stands between the relay and a function it calls."""
_CALL: Final = '\n  File "'


def clean_error(error: object) -> str:
    """The text of an error without what no database can store, cut to what fits; an exception is told with its type."""
    if isinstance(error, BaseException):
        return describe_error(error)
    return _clean(str.__str__(error) if isinstance(error, str) else _read(error), LONGEST)


def describe_error(error: BaseException) -> str:
    """Make the text kept for a failure: "TypeName: message", cut to what any database can store."""
    message, name = _read(error), type(error).__name__
    return _clean(f"{name}: {message}" if message else name, ERROR_LENGTH)


def describe_failure(error: BaseException) -> str:
    """Make the text kept for a failure of somebody's function: as `describe_error`, then the calls that led there.

    Of those the last few, in the manner of a traceback, and none of our own.
    """
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_BETWEEN)]
    where = "".join(traceback.format_list(frames[-FRAMES:])).rstrip()
    return _clean(f"{describe_error(error)}\n{where}" if where else describe_error(error), 2 * ERROR_LENGTH)


def without_calls(error: str) -> str:
    """What failed, without where."""
    return error.partition(_CALL)[0]


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
