"""A server that speaks Hrana 2 and 3 on a SQLite file, over HTTP and WebSocket, and fails when it is told to.

It answers as sqld does where the two were compared: the codes, a batch refused as a whole when one of its statements
cannot be parsed, blobs without padding. As a program: `python -m tests.hrana_server FILE PORT`, which prints its port.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sqlite3
import ssl
import sys
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from aiohttp import WSMsgType, web

_COMMENTS = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_UNPARSED = ("syntax error", "unrecognized token", "incomplete input")


class HranaError(Exception):
    """A statement or a request failed; the stream lives on."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.form = {"message": message, "code": code}


class ProtocolError(Exception):
    """The client broke the rules: the whole HTTP request is refused."""


@dataclass(frozen=True)
class Fault:
    """What happens to one request instead of its answer: `status` and `body` are sent, or the connection `drops`.

    With `is_done` the request is carried out before that; with `until` nothing is answered before the event is set.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    drops: bool = False
    is_done: bool = False
    until: asyncio.Event | None = None


# -- one stream ------------------------------------------------------------------------------------------------------


class SqlStream:
    """One connection to the file. Everything here blocks, so it runs in threads, one request at a time."""

    def __init__(self, path: Path, *, busy: float, texts: dict[int, str] | None = None) -> None:
        self.lock = asyncio.Lock()
        self.texts = {} if texts is None else texts
        self.expiry: asyncio.TimerHandle | None = None
        self._db = sqlite3.connect(path, timeout=busy, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA foreign_keys = ON")

    def close(self) -> None:
        self._db.close()

    def answer(self, request: dict[str, Any], *, version: int) -> dict[str, Any]:
        kind = request.get("type")
        match kind:
            case "execute":
                return {"type": kind, "result": self.execute(request["stmt"])}
            case "batch":
                return {"type": kind, "result": self.run_batch(request["batch"], version=version)}
            case "sequence":
                self._run_script(self._text_of(request))
                return {"type": kind}
            case "describe":
                return {"type": kind, "result": self._describe(self._text_of(request))}
            case "store_sql":
                if request["sql_id"] in self.texts:
                    raise ProtocolError(f"SQL text {request['sql_id']} is stored already")
                self.texts[request["sql_id"]] = request["sql"]
                return {"type": kind}
            case "close_sql":
                self.texts.pop(request["sql_id"], None)
                return {"type": kind}
            case "get_autocommit":
                return {"type": kind, "is_autocommit": not self._db.in_transaction}
        raise ProtocolError(f"unknown variant {kind!r}")

    def execute(self, statement: dict[str, Any]) -> dict[str, Any]:
        sql = self._text_of(statement)
        self._parse(sql)
        named = {each["name"].lstrip(":@$"): decode(each["value"]) for each in statement.get("named_args") or []}
        values = named or [decode(each) for each in statement.get("args") or []]
        before = self._db.total_changes
        try:
            cursor = self._db.execute(sql, values)
            names = [column[0] for column in cursor.description or ()]
            rows = [[encode(value) for value in row] for row in cursor.fetchall()]
        except sqlite3.Error as error:
            raise _as_hrana(error) from error
        affected = self._db.execute("SELECT changes()").fetchone()[0] if self._db.total_changes > before else 0
        return {
            "cols": [{"name": name, "decltype": None} for name in names],
            "rows": rows if statement.get("want_rows", True) else [],
            "affected_row_count": affected,
            "last_insert_rowid": None if cursor.lastrowid is None else str(cursor.lastrowid),
        }

    def run_batch(self, batch: dict[str, Any], *, version: int) -> dict[str, Any]:
        for step in batch["steps"]:
            # A batch with a statement that cannot be parsed is refused before anything runs.
            self._parse(self._text_of(step["stmt"]))
        results: list[dict[str, Any] | None] = []
        errors: list[dict[str, Any] | None] = []
        for step in batch["steps"]:
            result = error = None
            condition = step.get("condition")
            if condition is None or self._holds(condition, results, errors, version=version):
                try:
                    result = self.execute(step["stmt"])
                except HranaError as failure:
                    error = failure.form
            results.append(result)
            errors.append(error)
        return {"step_results": results, "step_errors": errors}

    def _holds(self, condition: dict[str, Any], results: list[Any], errors: list[Any], *, version: int) -> bool:
        def holds(each: dict[str, Any]) -> bool:
            return self._holds(each, results, errors, version=version)

        match condition:
            case {"type": "ok" | "error" as kind, "step": int(step)}:
                if not 0 <= step < len(results):
                    raise ProtocolError("a condition names a step that is not before it")
                return (results if kind == "ok" else errors)[step] is not None
            case {"type": "not", "cond": inner}:
                return not holds(inner)
            case {"type": "and", "conds": inner}:
                return all(map(holds, inner))
            case {"type": "or", "conds": inner}:
                return any(map(holds, inner))
            case {"type": "is_autocommit"} if version >= 3:
                return not self._db.in_transaction
        raise ProtocolError(f"BatchCond {condition.get('type')!r} is not supported in protocol version hrana{version}")

    def _text_of(self, holder: dict[str, Any]) -> str:
        sql, number = holder.get("sql"), holder.get("sql_id")
        if (sql is None) == (number is None):
            raise ProtocolError("expected either sql or sql_id")
        if sql is not None:
            return str(sql)
        if number not in self.texts:
            raise ProtocolError(f"SQL text {number} not found")
        return self.texts[number]

    def _parse(self, sql: str) -> None:
        if not _COMMENTS.sub("", sql).strip(" \t\r\n;"):
            raise HranaError("SQL string does not contain any statement", "SQL_NO_STATEMENT")
        if _COMMENTS.sub("", sql).split(maxsplit=1)[0].upper() == "EXPLAIN":
            return
        try:
            self._db.execute(f"EXPLAIN {sql}").close()
        except (sqlite3.Error, sqlite3.Warning) as error:
            if "one statement at a time" in str(error):
                raise HranaError("SQL string contains more than one statement", "SQL_MANY_STATEMENTS") from error
            if any(each in str(error) for each in _UNPARSED):
                raise HranaError(f"SQL string could not be parsed: {error}", "SQL_PARSE_ERROR") from error

    def _run_script(self, script: str) -> None:
        part = ""
        for piece in re.split(r"(?<=;)", script):
            part += piece
            if sqlite3.complete_statement(part):
                if part.strip(" \t\r\n;"):
                    self.execute({"sql": part})
                part = ""
        if part.strip(" \t\r\n;"):
            self.execute({"sql": part})

    def _describe(self, sql: str) -> dict[str, Any]:
        self._parse(sql)
        is_query = sql.split(maxsplit=1)[0].upper() in ("SELECT", "VALUES", "WITH")
        names: list[str] = []
        try:
            self._db.execute(f"EXPLAIN {sql}").close()
            wanted = 0
        except sqlite3.ProgrammingError as error:
            wanted = int(re.findall(r"uses (\d+)", str(error))[0])
        if is_query:
            cursor = self._db.execute(f"SELECT * FROM ({sql}) LIMIT 0", [None] * wanted)
            names = [column[0] for column in cursor.description]
        return {
            "params": [{"name": None}] * wanted,
            "cols": [{"name": name, "decltype": None} for name in names],
            "is_explain": False,
            "is_readonly": is_query,
        }


def encode(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer", "value": str(value)}
        case float():
            return {"type": "float", "value": value if math.isfinite(value) else None}
        case str():
            return {"type": "text", "value": value}
    return {"type": "blob", "base64": b64encode(value).decode().rstrip("=")}


def decode(value: Any) -> Any:
    match value:
        case {"type": "null"}:
            return None
        case {"type": "integer", "value": str(digits)} if -(2**63) <= int(digits) < 2**63:
            return int(digits)
        case {"type": "float", "value": int() | float() as number}:
            return float(number)
        case {"type": "text", "value": str(text)}:
            return text
        case {"type": "blob", "base64": str(digits)}:
            return b64decode(digits + "=" * (-len(digits) % 4))
    raise ProtocolError(f"Cannot deserialize client message from JSON: {value!r} is not a Value")


def _as_hrana(error: sqlite3.Error) -> HranaError:
    name = getattr(error, "sqlite_errorname", None)
    if name is None:
        return HranaError(f"Arguments do not match SQL parameters: {error}", "ARGS_INVALID")
    # The first part of the code alone, and SQLITE_ERROR under another name, as sqld has it.
    short = "_".join(name.split("_")[:2])
    return HranaError(f"SQLite error: {error}", "SQLITE_UNKNOWN" if short == "SQLITE_ERROR" else short)


# -- the server ------------------------------------------------------------------------------------------------------


class HranaServer:
    """Serves one file. `faults` are what befalls the next pipelines, in order; `bodies` are those that arrived.

    `most_at_once` is how many of them were under way together. A stream that waits `idle` seconds for its next request
    is closed; a statement waits `busy` seconds for a lock.
    """

    def __init__(
        self,
        path: Path,
        *,
        token: str | None = None,
        idle: float = 10.0,
        busy: float = 0.1,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.path = path
        self.token = token
        self.faults: deque[Fault] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.logins: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.port = 0
        self._idle, self._busy, self._tls = idle, busy, tls
        self._streams: dict[str, SqlStream] = {}
        self._runner: web.AppRunner | None = None
        with suppress(sqlite3.OperationalError):
            db = sqlite3.connect(path)
            db.execute("PRAGMA journal_mode = WAL")
            db.close()

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def open_streams(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [
                web.get("/", self._talk),
                web.get("/v{version:[23]}", self._greet),
                web.post("/v{version:[23]}/pipeline", self._take_pipeline),
                web.post("/v1/{kind:execute|batch}", self._take_single),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for baton in list(self._streams):
            self._drop(baton)

    # -- over HTTP -----------------------------------------------------------------------------------------------

    async def _greet(self, request: web.Request) -> web.Response:
        return web.Response(text="Hrana over HTTP")

    async def _take_pipeline(self, request: web.Request) -> web.Response:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._take_or_fail(request, await request.read())
        finally:
            self.at_once -= 1

    async def _take_or_fail(self, request: web.Request, body: bytes) -> web.Response:
        fault = self.faults.popleft() if self.faults else None
        answer = web.Response()
        if fault is None or fault.is_done:
            answer = await self._answer(request, body)
        if fault is None:
            return answer
        if fault.until is not None:
            await fault.until.wait()
        if fault.drops and request.transport is not None:
            request.transport.abort()
        return web.Response(status=fault.status, headers=fault.headers, body=fault.body) if fault.status else answer

    async def _answer(self, request: web.Request, body: bytes) -> web.Response:
        if not self._is_welcome(request):
            return web.json_response({"message": "Unauthorized", "code": "AUTH_FAILED"}, status=401)
        try:
            sent = json.loads(body)
            self.bodies.append(sent)
            return web.json_response(await self._run_pipeline(sent, version=int(request.match_info["version"])))
        except (KeyError, TypeError, ValueError) as error:
            return web.Response(status=400, text=f"Cannot deserialize client message from JSON: {error}")
        except ProtocolError as error:
            return web.Response(status=400, text=str(error))
        except HranaError as error:
            return web.json_response(error.form, status=400)

    def _is_welcome(self, request: web.Request) -> bool:
        login = request.headers.get("authorization")
        self.logins.append(login)
        return self.token is None or login == f"Bearer {self.token}"

    async def _run_pipeline(self, sent: dict[str, Any], *, version: int) -> dict[str, Any]:
        stream, is_open = self._take_stream(sent.get("baton")), True
        results: list[dict[str, Any]] = []
        try:
            for request in sent["requests"]:
                if not is_open:
                    raise ProtocolError("Stream for this baton was closed")
                if request["type"] == "close":
                    is_open = False
                    results.append({"type": "ok", "response": {"type": "close"}})
                    continue
                results.append(await self._answer_one(stream, request, version=version))
        except BaseException:
            is_open = False
            raise
        finally:
            if not is_open:
                stream.close()
        return {"baton": self._keep(stream) if is_open else None, "base_url": None, "results": results}

    async def _answer_one(self, stream: SqlStream, request: dict[str, Any], *, version: int) -> dict[str, Any]:
        try:
            async with stream.lock:
                # Carried out to its end even if the client goes away.
                work = asyncio.ensure_future(asyncio.to_thread(stream.answer, request, version=version))
                return {"type": "ok", "response": await asyncio.shield(work)}
        except HranaError as error:
            return {"type": "error", "error": error.form}

    async def _take_single(self, request: web.Request) -> web.Response:
        """The two requests of the first version, which has no streams."""
        if not self._is_welcome(request):
            return web.json_response({"message": "Unauthorized", "code": "AUTH_FAILED"}, status=401)
        kind = request.match_info["kind"]
        stream = SqlStream(self.path, busy=self._busy)
        try:
            result = await self._answer_one(stream, {**await request.json(), "type": kind}, version=1)
        except ProtocolError as error:
            return web.Response(status=400, text=str(error))
        finally:
            stream.close()
        if result["type"] == "error":
            return web.json_response(result["error"], status=400)
        return web.json_response({"result": result["response"]["result"]})

    # -- streams between requests --------------------------------------------------------------------------------

    def _take_stream(self, baton: str | None) -> SqlStream:
        if baton is None:
            return SqlStream(self.path, busy=self._busy)
        stream = self._streams.pop(baton, None)
        if stream is None:
            raise HranaError("The stream has expired due to inactivity", "STREAM_EXPIRED")
        if stream.expiry is not None:
            stream.expiry.cancel()
        return stream

    def _keep(self, stream: SqlStream) -> str:
        # A baton is good for one request.
        baton = token_hex()
        self._streams[baton] = stream
        stream.expiry = asyncio.get_running_loop().call_later(self._idle, self._drop, baton)
        return baton

    def _drop(self, baton: str) -> None:
        stream = self._streams.pop(baton, None)
        if stream is not None:
            if stream.expiry is not None:
                stream.expiry.cancel()
            stream.close()

    # -- over WebSocket --------------------------------------------------------------------------------------------

    async def _talk(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("hrana3", "hrana2"))
        await socket.prepare(request)
        version = 3 if socket.ws_protocol == "hrana3" else 2
        streams: dict[int, SqlStream] = {}
        texts: dict[int, str] = {}
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                sent = json.loads(message.data)
                if sent["type"] == "hello":
                    if self.token not in (None, sent.get("jwt")):
                        error = {"message": "Unauthorized", "code": "AUTH_FAILED"}
                        await socket.send_json({"type": "hello_error", "error": error})
                        break
                    await socket.send_json({"type": "hello_ok"})
                    continue
                answer = await self._answer_message(sent["request"], streams, texts, version=version)
                await socket.send_json({**answer, "request_id": sent["request_id"]})
        finally:
            for stream in streams.values():
                stream.close()
        return socket

    async def _answer_message(
        self, request: dict[str, Any], streams: dict[int, SqlStream], texts: dict[int, str], *, version: int
    ) -> dict[str, Any]:
        kind, number = request["type"], request.get("stream_id", 0)
        if kind == "open_stream":
            streams[number] = SqlStream(self.path, busy=self._busy, texts=texts)
        elif kind == "close_stream":
            if number in streams:
                streams.pop(number).close()
        elif number not in streams:
            error = {"message": f"Stream {number} was not opened", "code": "STREAM_NOT_FOUND"}
            return {"type": "response_error", "error": error}
        else:
            result = await self._answer_one(streams[number], request, version=version)
            if result["type"] == "error":
                return {"type": "response_error", "error": result["error"]}
            return {"type": "response_ok", "response": result["response"]}
        return {"type": "response_ok", "response": {"type": kind}}


@asynccontextmanager
async def serve_hrana(path: Path, **options: Any) -> AsyncIterator[HranaServer]:
    """Serve a file on a free port of this machine."""
    server = HranaServer(path, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def _run(path: str, port: str) -> None:
    server = HranaServer(Path(path), busy=5.0)
    server.port = int(port)
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], sys.argv[2]))
