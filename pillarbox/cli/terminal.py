"""Texts on their way to a terminal: what would steer it is shown, not obeyed, and secrets of the settings are hidden.

Events, their errors and answers of servers are written by others. An escape sequence in one could rewrite the
screen, set its title or the clipboard; a bidirectional override could show another text than there is.
"""

from __future__ import annotations

import re
from typing import IO, Any, Final

import typer

from pillarbox.urls import Secrets, mask_url
from pillarbox.wording import STEERING

_LINE: Final = re.compile(f"[{STEERING}]")
_PAGE: Final = re.compile(f"(?![\n\t])[{STEERING}]")
_SUBJECT: Final = re.compile(r"(?:Store|Sink|Source|Writer) ('?)(\S+)\1(?: \([\w.]+\))?")

_secrets: list[Secrets] = []


def show_line(text: str) -> str:
    """A text as part of one line: controls are written as escapes, also ends of lines."""
    return _LINE.sub(_escape, text)


def show_page(text: str) -> str:
    """A text of several lines; ends of lines and tabs stay."""
    return _PAGE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(
        match[0], f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
    )


def keep_secret(*given: object) -> None:
    """Hide the secrets of these urls and options in every error and line of the log from now on."""
    _secrets.append(Secrets(*given))


def forget_secrets() -> None:
    _secrets.clear()


def hide_secrets(text: str) -> str:
    for each in _secrets:
        text = each.hide(text)
    return text


def hide_in_error(text: str) -> str:
    """Hide secrets in an error of ours, but not in what it begins with: a mask of a word of ours would tell them."""
    subject, colon, rest = text.partition(": ")
    match = _SUBJECT.fullmatch(subject)
    is_ours = match is not None and mask_url(match[2]) == match[2]
    return f"{subject}{colon}{hide_secrets(rest)}" if is_ours else hide_secrets(text)


def echo(text: object = "", *, err: bool = False, nl: bool = True, file: IO[Any] | None = None) -> None:
    """Print lines for people."""
    typer.echo(show_page(str(text)), err=err, nl=nl, file=file)
