"""Whatever a sink or a function says of its event can be settled, and spoils nothing but that event."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import NoRetry, Relay
from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.retry import Constant, Failure
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Mode, Settlement, Store
from tests.contract.layouts import LayoutKit
from tests.contract.layouts import claim as claim_layout
from tests.contract.stores import EVERYTHING, Kit, SqlKit, claim, event, events, states

ODD: dict[str, Any] = {
    "a zero": "bad \0 byte",
    "half a pair": "bad \ud83d text",
    "the other half": "\udc00",
    "every plane": "東京 🚀 \u2028 \ufffe \x1b[31m",
    "long": "ä" * 100_000,
    "nothing": "",
    "a number": 5,
    "none": None,
    "bytes": b"\xff\x00",
    "an exception": ValueError("bad \0 value"),
    "an object without a text": type("Mute", (), {"__str__": lambda self: 1 / 0})(),
    "quotes": "' \" \\ % :name {x} $1 ?",
}


class Pickle(str):
    """A text of another class, as frameworks make them."""


def generate(count: int) -> list[str]:
    """Texts of characters that databases and encoders treat each in their own way."""
    chance = random.Random(20261118)
    letters = "\0\x01\x1b'\"\\%:{}$\n\r\t a\x7f\x80ä\u2028\ud800\udbff\udc00\udfff\ufeff\ufffe\uffff🚀\U0010ffff"
    return ["".join(chance.choices(letters, k=chance.randint(0, 12))) for _ in range(count)]


@pytest.mark.parametrize("error", ODD.values(), ids=ODD)
async def test_any_error_is_settled(kit: Kit, store: Store, mode: Mode, error: Any) -> None:
    kit.put(*events("good bad worse"))
    batch = await claim(store, mode=mode)
    outcomes: list[Outcome] = [DELIVERED, Retry(error), Dead(error)]
    assert await batch.settle(outcomes) == Settlement(delivered=1, retried=1, dead=1)
    assert await states(store) == {"bad": "waiting", "worse": "dead"}


async def test_generated_errors_are_settled(kit: Kit, store: Store, mode: Mode) -> None:
    errors = [*generate(100), Pickle("sour")]
    kit.put(*(event(f"e{number}") for number in range(2 * len(errors))))
    batch = await claim(store, 1000, mode=mode)
    outcomes = [kind(error) for error in errors for kind in (Retry, Dead)]
    assert await batch.settle(outcomes) == Settlement(retried=len(errors), dead=len(errors))
    records = await store.events(EVERYTHING, limit=1000)
    assert all(record.error is not None and "\0" not in record.error for record in records)
    for error in errors:
        plain = "".join(letter for letter in error if letter != "\0" and not "\ud800" <= letter <= "\udfff")
        assert any(_is_within(plain, record.error or "") for record in records)


def _is_within(letters: str, text: str) -> bool:
    left = iter(text)
    return all(letter in left for letter in letters)


@pytest.mark.parametrize(
    "after",
    [timedelta.max, timedelta.min, 5, 5.0, 10**400, -1.0, float("inf"), timedelta(days=3650)],
    ids=["max", "min", "5", "5.0", "huge", "-1.0", "inf", "ten years"],
)
async def test_any_delay_is_settled(kit: Kit, store: Store, mode: Mode, after: Any) -> None:
    kit.put(event("late"))
    batch = await claim(store, mode=mode)
    assert await batch.settle([Retry("busy", after)]) == Settlement(retried=1)
    [record] = await store.events(EVERYTHING)
    assert (record.state, record.error) == ("waiting", "busy")


LAYOUT_ERRORS = ("a zero", "half a pair", "long", "every plane")


@pytest.mark.parametrize("which", LAYOUT_ERRORS)
async def test_any_outcome_is_settled_in_every_layout(layout_kit: LayoutKit, mode: Mode, which: str) -> None:
    layout_kit.add("late")
    layout_kit.add("never")
    store = await layout_kit.open()
    batch = await claim_layout(store, mode=mode)
    outcomes: list[Outcome] = [Retry(ODD[which], timedelta.max), Dead(ODD[which])]
    assert await batch.settle(outcomes) == Settlement(retried=1, dead=1)


# -- by way of a relay -----------------------------------------------------------------------------------------------


def odd_outcomes() -> list[Any]:
    texts = [*ODD.values(), *generate(20)]
    return [*map(Dead, texts), *map(Retry, texts), "ok", 5, Dead, object(), False]


async def test_good_events_beside_bad_ones_are_delivered_once(kit: Kit, store: Store) -> None:
    seen: Counter[str] = Counter()
    odd = odd_outcomes()

    def handle(placed: Event) -> Any:
        seen[placed.type] += 1
        number = int(placed.type[1:])
        if placed.type.startswith("x"):
            raise RuntimeError(generate(50)[number])
        return None if placed.type.startswith("g") else odd[number]

    bad = [f"b{number}" for number in range(len(odd))]
    raising = [f"x{number}" for number in range(50)]
    kit.put(*events(" ".join([f"g{n}" for n in range(99)] + bad + raising)))
    relay = Relay(store, CallableSink(handle), retry=NoRetry(), batch_size=500)
    await relay.drain()
    assert (relay.total.delivered, relay.total.dead, relay.total.lost) == (99, len(bad) + 50, 0)
    assert seen == Counter(dict.fromkeys([*(f"g{n}" for n in range(99)), *bad, *raising], 1))
    await relay.close()


class Odd(MemorySink):
    """Answers with what is no outcome."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._given = answer

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if isinstance(self._given, Exception):
            raise self._given
        answer: Sequence[Outcome] = self._given
        return answer


@pytest.mark.parametrize(
    "answer",
    [None, 5, [], ["ok"], [None], [Dead], {"a": 1}, [DELIVERED, DELIVERED]],
    ids=["None", "5", "none", "text", "list of None", "class", "dict", "too many"],
)
async def test_answer_that_is_no_outcome_is_the_events_failure(kit: Kit, store: Store, answer: Any) -> None:
    kit.put(event("placed"))
    relay = Relay(store, Odd(answer), retry=NoRetry())
    await relay.drain()
    assert (await store.counts()).dead == 1
    await relay.close()


@pytest.mark.parametrize("after", [5.0, "soon", timedelta.max, object()], ids=["5.0", "soon", "max", "object"])
async def test_odd_pause_of_a_destination_ends_no_relay(kit: Kit, store: Store, after: Any) -> None:
    kit.put(event("placed"))
    relay = Relay(store, Odd(SinkUnavailable("down", after=after)))
    assert await relay.run_once() == Settlement(released=1)
    await relay.close()


class Broken(Constant):
    def next_delay(self, failure: Failure) -> Any:
        return "soon" if failure.attempt == 1 else 1 / 0


async def test_broken_policy_ends_no_relay(kit: Kit, store: Store) -> None:
    kit.put(event("placed"))
    relay = Relay(store, CallableSink(lambda event: Retry("busy")), retry=Broken())
    assert await relay.run_once() == Settlement(retried=1)
    await kit.pass_time(timedelta(hours=1))
    assert await relay.run_once() == Settlement(retried=1)
    await relay.close()


# -- what the database refuses ---------------------------------------------------------------------------------------

REFUSE = {
    "postgresql": (
        "CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.error LIKE 'poison%' THEN RAISE EXCEPTION 'never that'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER {name} BEFORE {when} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()",
    ),
    "mysql": (
        "CREATE TRIGGER {name} BEFORE {when} ON {table} FOR EACH ROW BEGIN IF NEW.error LIKE 'poison%' THEN "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'never that'; END IF; END",
    ),
    "sqlite": (
        "CREATE TRIGGER {name} BEFORE {when} ON {table} WHEN NEW.error LIKE 'poison%' BEGIN "
        "SELECT RAISE(ABORT, 'never that'); END",
    ),
}


@contextmanager
def refusing(kit: SqlKit) -> Iterator[None]:
    """Let the database refuse some error texts, as a trigger, a check or a character set may."""
    tables = {role: kit.database.outbox.tables[role].name for role in ("outbox", "dead")}
    backend = kit.database.backend
    for role, when in (("outbox", "UPDATE"), ("dead", "INSERT")):
        for statement in REFUSE[backend]:
            with kit.database.engine.begin() as db:
                db.exec_driver_sql(
                    statement.format(name=f"{tables[role]}_no", when=when, table=tables[role]).replace("%", "%%")
                    if backend != "sqlite"
                    else statement.format(name=f"{tables[role]}_no", when=when, table=tables[role])
                )
    yield
    for table in tables.values():
        with kit.database.engine.begin() as db:
            db.exec_driver_sql(f"DROP TRIGGER {table}_no" + (f" ON {table}" if backend == "postgresql" else ""))


@pytest.mark.needs("sql")
async def test_outcome_that_the_database_refuses_is_dead_alone(kit: SqlKit, store: Store, mode: Mode) -> None:
    kit.put(*(event(f"e{number}", f"k{number % 7}") for number in range(40)))
    with refusing(kit):
        batch = await claim(store, mode=mode)
        outcomes: list[Outcome] = [DELIVERED] * 40
        outcomes[3], outcomes[20], outcomes[39] = Retry("poison"), Dead("poison"), Retry("busy")
        outcomes[10] = RELEASED
        settlement = await batch.settle(outcomes)
    assert settlement == Settlement(delivered=36, retried=1, dead=2, released=1)
    found = {record.event.type: record for record in await store.events(EVERYTHING, limit=100)}
    assert {name: record.state for name, record in found.items() if name in ("e3", "e20", "e39")} == {
        "e3": "dead",
        "e20": "dead",
        "e39": "waiting",
    }
    assert "refused to settle this event as Retry" in (found["e3"].error or "")
    assert "never that" in (found["e20"].error or "")


@pytest.mark.needs("sql")
async def test_errors_that_are_long_together_are_settled(kit: SqlKit, store: Store, mode: Mode) -> None:
    """More than a server takes in one statement: MariaDB hangs up at 16 MB."""
    kit.put(*(event(f"e{number}") for number in range(60)))
    batch = await claim(store, mode=mode)
    long = "\n" * 200_000
    assert await batch.settle([Retry(long, timedelta(seconds=5)), Dead(long)] * 30) == Settlement(retried=30, dead=30)


@pytest.mark.needs("direct connection")
@pytest.mark.parametrize(
    "prepare",
    [
        "CREATE INDEX {name} ON {table} (error)",
        "CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.error <> '' THEN "
        "RAISE EXCEPTION 'never that' USING ERRCODE = 'SH042'; END IF; RETURN NEW; END $$; "
        "CREATE TRIGGER {name} BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()",
    ],
    ids=["index", "own code"],
)
async def test_refusal_of_any_class_is_no_outage(kit: SqlKit, store: Store, mode: Mode, prepare: str) -> None:
    kit.put(*events("good bad"))
    table = kit.database.outbox.table.name
    batch = await claim(store, mode=mode)
    unlike = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=50_000))
    with kit.database.engine.begin() as db:
        db.exec_driver_sql(prepare.format(name=f"{table}_no", table=table))
    try:
        assert await batch.settle([DELIVERED, Retry(unlike)]) == Settlement(delivered=1, dead=1)
    finally:
        with kit.database.engine.begin() as db:
            db.exec_driver_sql(f"DROP INDEX IF EXISTS {table}_no; DROP FUNCTION IF EXISTS {table}_no CASCADE")


@pytest.mark.needs("sql")
async def test_relay_delivers_on_beside_an_outcome_that_is_refused(kit: SqlKit, store: Store) -> None:
    seen: Counter[str] = Counter()

    def handle(placed: Event) -> Any:
        seen[placed.type] += 1
        return Dead("poison") if placed.type == "e50" else None

    kit.put(*(event(f"e{number}") for number in range(100)))
    relay = Relay(store, CallableSink(handle))
    with refusing(kit):
        await relay.drain()
    assert (relay.total.delivered, relay.total.dead) == (99, 1)
    assert set(seen.values()) == {1}
    await relay.close()
