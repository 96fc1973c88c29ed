"""Where the variables of `outbox.toml` come from: the environment, else `.env`, else Doppler."""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.secrets import export_variables, fetch_doppler, mask_token, read_env_file, resolve_variables
from pillarbox.sync.toml import load_sync_config

TOKEN = "dp.st.prd.0123456789"


class Doppler(ThreadingHTTPServer):
    """A server that answers as it is told, and remembers what it was asked."""

    daemon_threads = True
    status = 200
    body = b"{}"
    location = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[tuple[str, str | None]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, secrets: Any) -> None:
        self.body = json.dumps(secrets).encode()


class _Answer(BaseHTTPRequestHandler):
    server: Doppler

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.server.may_answer.wait(60)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(self.server.body)))
        # Whoever asked may have gone.
        with suppress(ConnectionError):
            self.end_headers()
            self.wfile.write(self.server.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def doppler() -> Iterator[Doppler]:
    with Doppler() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


def refuse(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.__cause__ is None
    return str(caught.value)


# -- which one counts --------------------------------------------------------------------------------------


def test_the_environment_wins_over_the_file_and_the_file_over_doppler(tmp_path: Path, doppler: Doppler) -> None:
    doppler.answer({"A": "doppler", "B": "doppler", "C": "doppler"})
    (tmp_path / ".env").write_text("A=file\nB=file\nD=file\n")
    env = {"A": "env", "DOPPLER_TOKEN": TOKEN}
    found = resolve_variables(tmp_path, env, doppler=doppler.url)
    assert found == {"A": "env", "B": "file", "C": "doppler", "D": "file", "DOPPLER_TOKEN": TOKEN}
    assert env == {"A": "env", "DOPPLER_TOKEN": TOKEN}


def test_an_empty_variable_of_the_environment_still_wins(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=file\n")
    assert resolve_variables(tmp_path, {"A": ""}) == {"A": ""}


def test_the_token_may_be_in_the_file(tmp_path: Path, doppler: Doppler) -> None:
    doppler.answer({"A": "doppler"})
    (tmp_path / ".env").write_text(f'DOPPLER_TOKEN = "{TOKEN}"\n')
    assert resolve_variables(tmp_path, {}, doppler=doppler.url)["A"] == "doppler"


@pytest.mark.parametrize("env", [{}, {"DOPPLER_TOKEN": ""}, {"DOPPLER_TOKEN": " "}])
def test_without_a_token_doppler_is_not_asked(tmp_path: Path, doppler: Doppler, env: dict[str, str]) -> None:
    assert resolve_variables(tmp_path, env, doppler=doppler.url) == env
    assert doppler.asked == []


def test_the_configuration_is_filled_from_all_three(tmp_path: Path, doppler: Doppler) -> None:
    doppler.answer({"TOKEN": "t-doppler", "HOST": "h-doppler"})
    (tmp_path / ".env").write_text("HOST=h-file\n")
    path = tmp_path / "outbox.toml"
    path.write_text(
        """
        [app.shop]
        db_dir = "${ROOT}"
        [app.shop.db.main]
        tables = ["orders"]
        connection = { url = "libsql://${HOST}", token = "${TOKEN}" }
        """
    )
    env = {"ROOT": "/srv", "DOPPLER_TOKEN": TOKEN}
    config = load_sync_config(path, env, doppler=doppler.url)
    assert config.apps[0].db_dir == Path("/srv")
    assert dict(config.targets[0].connection) == {"url": "libsql://h-file", "token": "t-doppler"}
    # A writer of the user's may look there.
    assert env == {"ROOT": "/srv", "DOPPLER_TOKEN": TOKEN, "HOST": "h-file", "TOKEN": "t-doppler"}
    assert "t-doppler" not in repr(config)


def test_exported_variables_override_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNC_TEST_A", "env")
    monkeypatch.setenv("SYNC_TEST_B", "to be removed again")
    monkeypatch.delenv("SYNC_TEST_B")
    export_variables({"SYNC_TEST_A": "file", "SYNC_TEST_B": "file"}, os.environ)
    assert (os.environ["SYNC_TEST_A"], os.environ["SYNC_TEST_B"]) == ("env", "file")


def test_a_variable_that_no_environment_can_hold_is_told_without_its_value() -> None:
    text = refuse(lambda: export_variables({"SYNC_TEST_C": "hunter\x0022"}, os.environ))
    assert text == "Variable 'SYNC_TEST_C': its name or its value cannot be an environment variable's"


# -- .env --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("A=b", {"A": "b"}),
        ("  A = b  ", {"A": "b"}),
        ("A=", {"A": ""}),
        ("A=b=c", {"A": "b=c"}),
        ("A='b c'", {"A": "b c"}),
        ('A="b c"', {"A": "b c"}),
        ('A="b" # why', {"A": "b"}),
        ("A=b # why", {"A": "b"}),
        ("A=b#c", {"A": "b#c"}),
        ("export A=b", {"A": "b"}),
        # Only sqloutbox reads these.
        ("A='it's'", {"A": "it's"}),
        ('A="say "hi""', {"A": 'say "hi"'}),
        ('A="open', {"A": '"open'}),
        ("A='b'c", {"A": "'b'c"}),
        ("A-1.x=b", {"A-1.x": "b"}),
        ("export A-1=b", {"A-1": "b"}),
        ("# A=b", {}),
        ("", {}),
    ],
)
def test_a_line_of_the_file_is_read(tmp_path: Path, line: str, expected: dict[str, str]) -> None:
    path = tmp_path / ".env"
    path.write_text(f"{line}\nZ=z\n")
    assert read_env_file(path) == {**expected, "Z": "z"}


@pytest.mark.parametrize("line", ["hunter22", "=hunter22"])
def test_a_line_without_a_name_is_passed_over_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    path = tmp_path / ".env"
    path.write_text(f"A=b\n{line}\n")
    with caplog.at_level(logging.WARNING):
        assert read_env_file(path) == {"A": "b"}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}, line 2: expected KEY=value; the line is passed over"
    ]


def test_a_byte_order_mark_belongs_to_no_name(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xef\xbb\xbfA=b\r\nC=d\r\n")
    assert read_env_file(tmp_path / ".env") == {"A": "b", "C": "d"}


def test_no_file_and_a_folder_of_that_name_are_no_variables(tmp_path: Path) -> None:
    assert read_env_file(tmp_path / ".env") == {}
    (tmp_path / ".env").mkdir()
    assert read_env_file(tmp_path / ".env") == {}


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=\xff")
    with pytest.raises(ConfigError, match=r"\.env: cannot be read"):
        read_env_file(tmp_path / ".env")


# -- Doppler -----------------------------------------------------------------------------------------------


def test_doppler_is_asked_once_with_the_token(doppler: Doppler) -> None:
    doppler.answer({"A": "b", "NUMBER": 5, "ON": True})
    assert fetch_doppler(TOKEN, api=doppler.url) == {"A": "b", "NUMBER": "5", "ON": "true"}
    assert doppler.asked == [("/v3/configs/config/secrets/download?format=json", f"Bearer {TOKEN}")]


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_a_refusal_of_doppler_is_told_with_the_token_masked(doppler: Doppler, status: int) -> None:
    doppler.status = status
    doppler.body = f"invalid token {TOKEN}".encode()
    assert refuse(lambda: fetch_doppler(TOKEN, api=doppler.url)) == (
        f"Doppler, token dp.st.pr***: the secrets cannot be fetched: it answered HTTP {status}. Mend it, or unset "
        "DOPPLER_TOKEN to do without Doppler"
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"<html>", "its answer is not JSON"),
        (b"", "its answer is not JSON"),
        (b"\xff\xfe", "its answer is not JSON"),
        (b'["hunter22"]', "its answer is not a table of secrets but list"),
        (b'"hunter22"', "its answer is not a table of secrets but str"),
    ],
)
def test_a_wrong_answer_of_doppler_is_told_but_not_shown(doppler: Doppler, body: bytes, expected: str) -> None:
    doppler.body = body
    text = refuse(lambda: fetch_doppler(TOKEN, api=doppler.url))
    assert f"token dp.st.pr***: the secrets cannot be fetched: {expected}" in text
    assert TOKEN not in text
    assert "hunter22" not in text


def test_a_silent_doppler_is_told_after_the_timeout(doppler: Doppler) -> None:
    doppler.may_answer.clear()
    text = refuse(lambda: fetch_doppler(TOKEN, api=doppler.url, timeout_seconds=0.05))
    assert "it cannot be reached: timed out" in text


def test_an_absent_doppler_is_told() -> None:
    with Doppler() as closed:
        url = closed.url
    assert "it cannot be reached: " in refuse(lambda: fetch_doppler(TOKEN, api=url))


def test_the_token_does_not_follow_a_redirect(doppler: Doppler) -> None:
    doppler.status, doppler.location = 302, f"{doppler.url}/elsewhere"
    assert "it answered HTTP 302" in refuse(lambda: fetch_doppler(TOKEN, api=doppler.url))
    assert len(doppler.asked) == 1


def test_a_failed_fetch_stops_the_start(tmp_path: Path, doppler: Doppler) -> None:
    doppler.status = 500
    path = tmp_path / "outbox.toml"
    path.write_text('[app.a]\ndb_dir="d"\n[app.a.db.b]\nwriter_class="m:C"\ntables=["t"]\n')
    env = {"DOPPLER_TOKEN": TOKEN}
    assert "it answered HTTP 500" in refuse(lambda: load_sync_config(path, env, doppler=doppler.url))
    assert env == {"DOPPLER_TOKEN": TOKEN}


@pytest.mark.parametrize("api", ["http://api.doppler.com", "ftp://127.0.0.1", "http://127.0.0.1.evil.org", ""])
def test_the_token_goes_only_over_https_or_to_this_machine(api: str) -> None:
    assert refuse(lambda: fetch_doppler(TOKEN, api=api)) == f"Doppler: expected an https url, got {api!r}"


@pytest.mark.parametrize("token", [f"{TOKEN}\nX: y", f"{TOKEN}ü"])
def test_a_token_that_is_none_is_told(doppler: Doppler, token: str) -> None:
    text = refuse(lambda: fetch_doppler(token, api=doppler.url))
    assert "the token has characters that no token has" in text
    assert "0123456789" not in text
    assert doppler.asked == []


@pytest.mark.parametrize(("token", "shown"), [("123456789", "12345678***"), ("12345678", "***"), ("", "***")])
def test_a_token_is_shown_by_its_first_eight_characters(token: str, shown: str) -> None:
    assert mask_token(token) == shown
