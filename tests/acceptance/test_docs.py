"""The documentation is true: its examples run and print what is shown, and nothing public is missing."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import pillarbox
import pillarbox.errors
import pillarbox.testing
from benchmarks.__main__ import BENCHMARKS
from pillarbox.cli.commands import app
from pillarbox.cli.demo import _print_report as print_report
from pillarbox.config import (
    VARIABLES,
    HandlersConfig,
    OutboxConfig,
    RelayConfig,
    SinkConfig,
    SourceConfig,
    StoreConfig,
    load_config,
)
from pillarbox.demo.run import Report
from tests.acceptance.docs_pages import (
    LANGUAGES,
    PAGES,
    Block,
    Reader,
    compile_expected,
    list_servers,
    normalize,
    own_database,
    read_blocks,
    read_sections,
    type_command,
)
from tests.acceptance.launcher import Launcher
from tests.servers import ROOT

DOCS = ROOT / "docs"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUNNABLE = [page for page in PAGES if {"python", "console"} & {block.language for block in read_blocks(page)}]
BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def blocks_of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def name_page(page: Any) -> str:
    return str(page.relative_to(ROOT))


# -- examples run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", RUNNABLE, ids=name_page)
def test_page_does_what_it_says(
    page: Path, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = read_blocks(page)
    with ExitStack() as stack:
        needed = list_servers(blocks)
        urls = {f"{server.upper()}_URL": stack.enter_context(own_database(server)) for server in needed}
        monkeypatch.chdir(tmp_path)
        for name, url in urls.items():
            monkeypatch.setenv(name, url)
        Reader(tmp_path, launcher, urls).follow(blocks)


def test_the_whole_of_it_runs_when_it_is_copied_alone(launcher: Launcher, tmp_path: Path) -> None:
    (block,) = [each for each in read_blocks(ROOT / "README.md") if "asyncio.run(main())" in each.text]
    (tmp_path / "whole.py").write_text(block.text)
    done = type_command(launcher, "python whole.py", cwd=tmp_path, env={})
    assert done == (0, "order.placed ann b'{\"total\":990}'\n")


@pytest.mark.parametrize("script", EXAMPLES, ids=name_page)
def test_example_prints_what_its_docstring_shows(script: Path, launcher: Launcher, tmp_path: Path) -> None:
    docstring, _, shown = inspect.cleandoc(_docstring_of(script)).partition("\nPrints:\n")
    with ExitStack() as stack:
        urls = {}
        if "POSTGRES_URL" in docstring:
            urls["POSTGRES_URL"] = stack.enter_context(own_database("postgres"))
        code, printed = type_command(launcher, f"python {script}", cwd=tmp_path, env=urls)
    pattern, _ = compile_expected(shown)
    assert code == 0, f"{script.name} fails:\n{printed}"
    assert re.fullmatch(pattern, normalize(printed)), f"{script.name} prints:\n{printed}"


def _docstring_of(script: Path) -> str:
    code = compile(script.read_text(), str(script), "exec")
    assert isinstance(code.co_consts[0], str)
    return code.co_consts[0]


@pytest.mark.parametrize("block", blocks_of("toml"), ids=lambda each: each.place)
def test_settings_are_understood(block: Block, tmp_path: Path) -> None:
    if "skip" in block.markers:
        tomllib.loads(block.text)
        return
    path = tmp_path / "pillarbox.toml"
    path.write_text(block.text)
    names = re.findall(r"\$\{(\w+)\}", block.text)
    load_config(path, env=dict.fromkeys(names, "text"))


@pytest.mark.parametrize("block", blocks_of("sh"), ids=lambda each: each.place)
def test_commands_that_are_not_run_are_understood(block: Block) -> None:
    for line in block.text.splitlines():
        words = line.partition("  #")[0].split()
        # Variables of the environment may stand before the command.
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words[:1] == ["pillarbox"]:
            parse_command(words[1:])


def parse_command(args: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = None
    while True:
        context = command.make_context(command.name, args, parent=context)
        if not isinstance(command, click.Group) and not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        _, command, args = command.resolve_command(context, rest)


def test_every_block_says_what_it_is() -> None:
    assert [each.place for each in BLOCKS if each.language not in LANGUAGES] == []
    unexplained = [each.place for each in BLOCKS if each.markers.get("skip") == ""]
    assert unexplained == [], "a block that is skipped says why"


# -- nothing public is missing -----------------------------------------------------------------------------

REFERENCE = read_sections(DOCS / "reference.md") if (DOCS / "reference.md").exists() else {}


@pytest.mark.parametrize("name", [*pillarbox.__all__, *pillarbox.testing.__all__])
def test_public_name_is_in_the_reference(name: str) -> None:
    found = getattr(pillarbox, name, None) or getattr(pillarbox.testing, name)
    if inspect.isclass(found) and issubclass(found, Exception):
        assert name in read_sections(DOCS / "errors.md")
        return
    assert name in REFERENCE
    words = {word for span in re.findall(r"`([^`]+)`", REFERENCE[name]) for word in re.findall(r"\w+", span)}
    missing = [each for each in _list_parts(found) if each not in words]
    assert missing == [], f"{name}: its section says nothing of these"


def _list_parts(found: Any) -> Iterator[str]:
    """Parameters, and for a class its public methods and attributes."""
    if callable(found) and not getattr(found, "_is_protocol", False):
        given = inspect.signature(found).parameters.values()
        yield from (each.name for each in given if not each.name.startswith("_"))
    if inspect.isclass(found):
        names = {**inspect.get_annotations(found), **vars(found)}
        yield from (name for name in names if not name.startswith("_"))


def test_every_exception_has_its_section() -> None:
    sections = read_sections(DOCS / "errors.md")
    raised = [
        name
        for name, each in vars(pillarbox.errors).items()
        if inspect.isclass(each) and issubclass(each, pillarbox.errors.PillarboxError)
    ]
    assert len(raised) > 10
    assert [name for name in raised if not sections.get(name, "").strip()] == []


def list_commands(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, each in command.commands.items():
        yield from list_commands(each, *path, name)


COMMANDS = dict(list_commands(typer.main.get_command(app), "pillarbox"))


@pytest.mark.parametrize("name", COMMANDS)
def test_command_and_its_options_are_in_the_reference(name: str) -> None:
    assert name in REFERENCE
    text = REFERENCE[name]
    for shared in re.findall(r"\(#([a-z-]+-options)\)", text):
        text += next(body for heading, body in REFERENCE.items() if slug(heading) == shared)
    options = {
        option
        for param in COMMANDS[name].params
        if isinstance(param, click.Option) or param.param_type_name == "option"
        for option in param.opts
    }
    documented = set(re.findall(r"`(--?[a-z][a-z-]*)", text))
    assert options - documented - {"-h", "--help"} == set(), "options that the reference does not have"
    assert documented - options == set(), "options that the command does not have"


def test_every_setting_is_documented() -> None:
    page = (DOCS / "configure.md").read_text()
    sections = read_sections(DOCS / "configure.md")
    for name, kind in {
        "store": StoreConfig,
        "sink": SinkConfig,
        "relay": RelayConfig,
        "outbox": OutboxConfig,
        "source": SourceConfig,
        "handlers": HandlersConfig,
    }.items():
        keys = [each.name for each in dataclasses.fields(kind) if "read" in each.metadata]
        assert [key for key in keys if f"`{key}`" not in sections[f"[{name}]"]] == []
    assert [variable for variable in (*VARIABLES, "PILLARBOX_CONFIG") if f"`{variable}`" not in page] == []
    retry = sections["[retry]"]
    for policy in (pillarbox.Exponential, pillarbox.Linear, pillarbox.Constant):
        options = [each.name for each in dataclasses.fields(policy) if each.name not in ("random", "_")]
        assert [option for option in options if f"`{option}`" not in retry] == []


def test_every_benchmark_is_explained() -> None:
    page = (DOCS / "performance.md").read_text()
    assert [name for name in BENCHMARKS if f"`{name}`" not in page] == []


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text()
    pages = [page.name for page in PAGES if page.parent == DOCS and page.name != "index.md"]
    assert [page for page in pages if f"({page})" not in index] == []


# -- links and the first screen ----------------------------------------------------------------------------


def slug(heading: str) -> str:
    """A heading's anchor, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def list_links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_page)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in list_links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in map(slug, read_sections(target))):
            broken.append(link)
    assert broken == []


def test_first_screen_is_one_screen() -> None:
    before, _, _ = (ROOT / "README.md").read_text().partition("\n## ")
    assert len(before.splitlines()) <= 45


def test_demo_in_the_readme_is_what_the_demo_prints_today(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(
        committed=9,
        rolled_back=1,
        delivered=9,
        delivered_twice=0,
        waiting=0,
        lost=0,
        rolled_back_delivered=0,
        out_of_order=0,
        relay_kills=2,
        seconds=1.5,
        latency_p50=1.5,
        latency_p99=1.5,
    )
    print_report(report)
    (shown,) = [block for block in read_blocks(ROOT / "README.md") if "relay killed" in block.text]
    assert _without_numbers(capsys.readouterr().out) in _without_numbers(shown.text)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d[\d,.]*( ms| s)?", "#", normalize(text))


# -- this can fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("```python\nassert 1 == 2, 'wrong'\n```\n", "wrong"),
        ("```python\nprint('one')\n```\n\n<!-- prints -->\n```text\ntwo\n```\n", "it is:\none"),
        ("```console\n$ pillarbox --version\npillarbox 0.0.0\n```\n", "it is:\npillarbox"),
        ("```console\n$ pillarbox stauts\n```\n", "No such command"),
        ("```console\n$ rm -r .\n```\n", "expected pillarbox or python"),
    ],
    ids=["snippet", "printed", "output", "command", "program"],
)
def test_wrong_page_fails(page: str, reason: str, launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(page)
    blocks = tuple(dataclasses.replace(each, page=ROOT / "page.md") for each in read_blocks(path))
    with pytest.raises((AssertionError, pytest.fail.Exception), match=re.escape(reason)):
        Reader(tmp_path, launcher).follow(blocks)


def test_shown_output_is_compared_but_for_times_ids_and_gaps() -> None:
    shown = "2026-01-31 12:00:00,123 INFO  Done …\n…\nid  01a1e115-f0c5-76c2-926d-204b6e3d11d7"
    pattern, ids = compile_expected(shown)
    assert ids == ["01a1e115-f0c5-76c2-926d-204b6e3d11d7"]
    other = "00000000-0000-4000-8000-000000000000"
    assert re.fullmatch(pattern, normalize(f"2027-02-01 01:02:03,4 INFO Done 5\nmore\nid {other}"))
    assert not re.fullmatch(pattern, normalize(f"2027-02-01 01:02:03,4 INFO Gone 5\nmore\nid {other}"))
    assert not re.fullmatch(pattern, normalize("2027-02-01 01:02:03,4 INFO Done 5\nmore\nid none"))
