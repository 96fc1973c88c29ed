"""The documentation as programs: the fenced blocks of a page, and a reader who follows them in order.

A comment on a line of its own before a block says what the page's words say to a person:

    <!-- file: shop.py -->     save the block under this name
    <!-- prints -->            the block is what the Python block before it prints
    <!-- needs: postgres -->   the block needs this server; its url is in the variable POSTGRES_URL
    <!-- skip: why -->         the block is not run, nor read as settings
    <!-- exits: 1 -->          its commands fail with this exit code; others must succeed

Python blocks of a page share one namespace. Console blocks show commands after `$` and what they print, where
`…` stands for any text and a line of it for any lines. Times are not compared. An id must be an id, and the
same one wherever the page shows the same.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from tests.acceptance.launcher import Launcher
from tests.servers import ROOT, ServerName, server_url

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
LANGUAGES = ("python", "console", "toml", "sh", "sql", "text")
DATABASES = ("postgres", "pgbouncer", "mariadb", "mysql")
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}

_FENCE = re.compile(r"\s*```(.*)")
_MARKER = re.compile(r"<!-- (file|prints|needs|skip|exits)(?:: (.+))? -->")
_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_TIME = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|\+00:00)?"
_WILD = re.compile(rf"({_ID})|({_TIME})|(…)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its fence."""

    page: Path
    line: int
    language: str
    text: str
    markers: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def read_blocks(page: Path) -> tuple[Block, ...]:
    """The blocks of a page, in order."""
    blocks: list[Block] = []
    markers: dict[str, str] = {}
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if marker := _MARKER.fullmatch(line):
            markers[marker[1]] = marker[2] or ""
        elif fence := _FENCE.fullmatch(line):
            text = []
            for _, inner in lines:
                if _FENCE.fullmatch(inner):
                    break
                text.append(inner)
            blocks.append(Block(page, number, fence[1], "\n".join(text) + "\n", markers))
            markers = {}
        elif line.strip():
            markers = {}
    return tuple(blocks)


def read_sections(page: Path) -> dict[str, str]:
    """The text under each heading of a page, by the heading without its marks."""
    sections: dict[str, str] = {}
    heading = ""
    in_block = False
    for line in page.read_text().splitlines():
        in_block ^= line.startswith("```")
        if line.startswith("#") and not in_block:
            heading = line.lstrip("#").strip().replace("`", "")
            sections[heading] = ""
        elif heading:
            sections[heading] += line + "\n"
    return sections


# -- following a page --------------------------------------------------------------------------------------


def type_command(launcher: Launcher, command: str, *, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """Run a command line until it ends; its exit code and what it prints, on standard output and standard error."""
    program, *args = shlex.split(command)
    if program != "pillarbox" and program != "python":
        raise AssertionError(f"expected pillarbox or python, got {command!r}")
    printed = cwd / ".printed"
    printed.unlink(missing_ok=True)
    code = launcher.run(*args, program=program, cwd=cwd, out=printed, err=printed, env=env)
    return code, printed.read_text()


@dataclass
class Reader:
    """Follows one page in a folder of its own, as a reader at a terminal would."""

    folder: Path
    launcher: Launcher
    urls: dict[str, str] = field(default_factory=dict)
    _ids: dict[str, str] = field(default_factory=dict)
    _module: ModuleType = field(default_factory=lambda: ModuleType(f"page_{uuid4().hex}"))
    _printed: str = ""

    def follow(self, blocks: tuple[Block, ...]) -> None:
        # Where a relay that is started from here finds the urls: beside the settings file.
        (self.folder / ".env").write_text("".join(f"{name}={url}\n" for name, url in self.urls.items()))
        sys.modules[self._module.__name__] = self._module
        try:
            for block in blocks:
                self._take(block)
        finally:
            del sys.modules[self._module.__name__]
            for value in vars(self._module).values():
                if isinstance(value, sa.Engine):
                    value.dispose()

    def _take(self, block: Block) -> None:
        if "file" in block.markers:
            (self.folder / block.markers["file"]).write_text(block.text)
        elif "skip" in block.markers:
            return
        elif "prints" in block.markers:
            self._compare(block.text, self._printed, block.place)
        elif block.language == "python":
            self._printed = self._execute(block)
        elif block.language == "console":
            for line, command, expected in split_commands(block):
                place = f"{block.place}+{line}: {command}"
                code, printed = type_command(self.launcher, self._with_ids(command), cwd=self.folder, env=self.urls)
                self._compare(expected, printed, place)
                assert code == int(block.markers.get("exits", "0")), f"{place}\n-- exit code {code}:\n{printed}"

    def _execute(self, block: Block) -> str:
        # So many empty lines that a traceback shows the line of the page.
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, vars(self._module))
        return printed.getvalue()

    def _with_ids(self, command: str) -> str:
        return re.sub(_ID, lambda match: self._ids.get(match[0], match[0]), command)

    def _compare(self, expected: str, found: str, place: str) -> None:
        pattern, ids = compile_expected(expected)
        match = re.fullmatch(pattern, normalize(found))
        if match is None:
            pytest.fail(f"{place}\n-- the page says:\n{expected}\n-- it is:\n{found}", pytrace=False)
        for shown, actual in zip(ids, match.groups(), strict=True):
            assert self._ids.setdefault(shown, actual) == actual, f"{place}: {shown} is shown for two ids"


def split_commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """The commands of a console block with their line and what they print."""
    lines = block.text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    assert starts[:1] == [0], f"{block.place}: expected a command after '$ ' first"
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield start + 1, lines[start].removeprefix("$ "), "\n".join(lines[start + 1 : end])


def normalize(text: str) -> str:
    """Text without what does not count: how wide blanks are, and blank lines."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def compile_expected(expected: str) -> tuple[str, list[str]]:
    """A pattern for what a page shows, with a group for each id, and these ids."""
    pattern = ""
    ids: list[str] = []
    for line in normalize(expected).splitlines():
        if line == "…":
            pattern += r"(?:.*\n)*?"
            continue
        end = 0
        for wild in _WILD.finditer(line):
            pattern += re.escape(line[end : wild.start()])
            pattern += f"({_ID})" if wild[1] else _TIME if wild[2] else ".*?"
            ids += [wild[1]] if wild[1] else []
            end = wild.end()
        pattern += re.escape(line[end:]) + r"\n"
    return pattern, ids


# -- servers -----------------------------------------------------------------------------------------------


@contextmanager
def own_database(server: ServerName) -> Iterator[str]:
    """The url of a new database on a test server, dropped afterwards; of a broker, its own url."""
    if server not in DATABASES:
        yield server_url(server)
        return
    url = sa.make_url(server_url(server))
    name = f"docs_{uuid4().hex[:12]}"
    # Through a pooler a database is only used: it is made on the server itself.
    direct = sa.make_url(server_url("postgres")) if server == "pgbouncer" else url
    drivername = DRIVERS[url.get_backend_name()]
    engine = sa.create_engine(direct.set(drivername=drivername), isolation_level="AUTOCOMMIT")
    force = " WITH (FORCE)" if url.get_backend_name() == "postgresql" else ""
    with engine.connect() as db:
        db.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as db:
            db.exec_driver_sql(f"DROP DATABASE {name}{force}")
        engine.dispose()


def list_servers(blocks: tuple[Block, ...]) -> list[Any]:
    """The servers that a page's blocks need."""
    return sorted({block.markers["needs"] for block in blocks if "needs" in block.markers})
