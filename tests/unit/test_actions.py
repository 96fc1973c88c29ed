"""The parts of an action log that need no database: names, conflicts, what an event says of itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from pillarbox import Constant, Event, Handlers, InvalidEvent
from pillarbox.actions import Action, ActionLog, DatabaseConflict
from pillarbox.actions.conflicts import DEFAULT, Policies, Tries, find_kind, merge_policies
from pillarbox.errors import ConfigError, InvalidAction

# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shop", "shop.orders", "_a.B9._", "Com.example_2.wallet", "x" * 255])
def test_namespace_of_identifiers_is_taken(name: str) -> None:
    assert ActionLog(sa.MetaData(), namespace=name).namespace == name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            " ",
            "shop-orders",
            "shop.",
            ".shop",
            "shop..orders",
            "shop.9",
            "9shop",
            "shop orders",
            "shop.ord\u00e9r",
        ),
        *("shop\n", "x" * 256, None, 7),
    ],
    ids=repr,
)
def test_other_namespace_is_refused_at_construction(name: Any) -> None:
    with pytest.raises(ConfigError, match="Action log namespace: expected identifiers"):
        ActionLog(sa.MetaData(), namespace=name)


def test_namespace_with_hyphens_is_not_rewritten_but_hinted_at() -> None:
    with pytest.raises(ConfigError, match=r"got 'shop-orders'\. Write 'shop_orders'\?"):
        ActionLog(sa.MetaData(), namespace="shop-orders")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 256, None])
def test_action_name_that_does_not_fit_is_refused(name: Any) -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.names")
    with pytest.raises(InvalidAction, match="Action name: "):
        log.action(name)
    with pytest.raises(InvalidAction, match="Action name: "):
        log.run_as(name)


def test_layout_that_is_no_action_log_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 'actions' or 'ekbatan', got 'pillarbox'"):
        ActionLog(sa.MetaData(), namespace="shop", layout="pillarbox")


def test_engine_and_sessions_together_are_refused() -> None:
    engine = sa.create_engine("sqlite://")
    with pytest.raises(ConfigError, match="give engine= or sessions=, not both"):
        ActionLog(sa.MetaData(), namespace="shop", engine=engine, sessions=lambda: Session(engine))


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["action_event_notifications", "action_events", "action_events_actions"]),
        ({"handled": False}, ["action_events", "action_events_actions", "action_events_state"]),
        ({"table": "log", "schema": "audit"}, ["audit.log", "audit.log_actions", "audit.log_notifications"]),
        ({"layout": "ekbatan"}, ["eventlog.event_notifications", "eventlog.events", "eventlog.events_actions"]),
    ],
    ids=["own", "not handled", "named", "ekbatan"],
)
def test_tables_are_declared_and_not_created(options: Any, names: list[str]) -> None:
    metadata = sa.MetaData()
    log = ActionLog(metadata, namespace="shop", **options)
    assert sorted(metadata.tables) == names
    assert log.table is log.tables["events"]
    again = ActionLog(metadata, namespace="shop.other", **options)
    assert again.tables == log.tables


# -- event classes -----------------------------------------------------------------------------------------------------


def make_class(module: str, name: str = "Deposited") -> type:
    return type(name, (), {"__module__": module})


def test_two_classes_cannot_share_a_name() -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.clash")
    first = log.event(make_class("shop.wallets"))
    with pytest.raises(InvalidAction, match=r"'Deposited'.*shop\.wallets\.Deposited has it.*bank\.wallets\.Deposited"):
        log.event(make_class("bank.wallets"))
    other = ActionLog(sa.MetaData(), namespace="unit.clash")
    with pytest.raises(InvalidAction, match="has it already"):
        other.event(make_class("bank.wallets"))
    assert first.__name__ == "Deposited"


def test_name_is_free_in_another_namespace_and_under_another_name() -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.free")
    first = log.event(make_class("shop.wallets"))
    second = log.event(name="BankDeposited")(make_class("bank.wallets"))
    third = ActionLog(sa.MetaData(), namespace="unit.free2").event(make_class("bank.wallets"))
    assert {first.__module__, second.__module__, third.__module__} == {"shop.wallets", "bank.wallets"}


def test_class_defined_anew_is_the_same_class() -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.anew")
    kept = [log.event(make_class("notebook")), log.event(make_class("notebook"))]
    assert kept[0] is not kept[1]


@pytest.mark.parametrize("how", ["declared", "in the class", "own name"])
def test_class_is_emitted_under_the_type_that_handlers_know_it_by(how: str) -> None:
    log = ActionLog(sa.MetaData(), namespace=f"unit.same.{how.replace(' ', '_')}")
    kind = make_class("shop.wallets")
    expected = {"declared": "money.in", "in the class": "money.in", "own name": "Deposited"}[how]
    if how == "declared":
        log.event(name="money.in")(kind)
    elif how == "in the class":
        kind.event_type = "money.in"  # type: ignore[attr-defined]
        log.event(kind)
    handlers = Handlers()

    @handlers.on(kind)
    async def handle() -> None: ...

    assert list(handlers.types) == [expected]
    assert log._names.find(kind) == expected


def test_second_name_for_a_class_is_refused() -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.second")
    kind = log.event(name="one")(make_class("shop.wallets"))
    with pytest.raises(InvalidAction, match="its event_type is 'one', so it cannot be named 'two'"):
        log.event(name="two")(kind)


@pytest.mark.parametrize("how", ["declared", "in the class"])
def test_subclass_of_a_named_class_may_have_a_name_of_its_own(how: str) -> None:
    log = ActionLog(sa.MetaData(), namespace=f"unit.subclass.{how.replace(' ', '_')}")
    parent = log.event(name="money.in")(make_class("shop.wallets"))
    own = {} if how == "declared" else {"event_type": "gift.in"}
    child = type("Gift", (parent,), {"__module__": "shop.wallets", **own})
    log.event(name="gift.in")(child)
    handlers = Handlers()

    @handlers.on(child)
    async def handle() -> None: ...

    assert list(handlers.types) == ["gift.in"]
    assert (log._names.find(parent), log._names.find(child)) == ("money.in", "gift.in")


def test_subclass_that_inherits_a_name_is_refused_with_what_mends_it() -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.inherits")
    parent = log.event(name="money.in")(make_class("shop.wallets"))
    child = type("Gift", (parent,), {"__module__": "shop.wallets"})
    with pytest.raises(
        InvalidAction, match=r"It inherits its event_type; give it one of its own: @log\.event\(name=…\)"
    ):
        log.event(child)
    assert log._names.find(log.event(name="gift.in")(child)) == "gift.in"


def test_class_whose_own_event_type_is_taken_is_told_to_change_it() -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.taken")
    kept = log.event(name="money.in")(make_class("shop.wallets"))
    other = type("Gift", (), {"__module__": "shop.wallets", "event_type": "money.in"})
    with pytest.raises(InvalidAction, match=r"has it already.*Change the event_type of one of them"):
        log.event(other)
    assert kept.__name__ == "Deposited"


# -- functions ---------------------------------------------------------------------------------------------------------


def yield_one(act: Action[Session], params: Any) -> Any:
    yield 1


async def yield_later(act: Action[Session], params: Any) -> Any:
    yield 1


class Yielding:
    def __call__(self, act: Action[Session], params: Any) -> Any:
        yield 1


@pytest.mark.parametrize("function", [yield_one, yield_later, Yielding()], ids=["plain", "async", "object"])
def test_generator_function_cannot_be_an_action(function: Any) -> None:
    log = ActionLog(sa.MetaData(), namespace="unit.functions")
    with pytest.raises(TypeError, match=r"Action 'wallet\.list': expected a function .* got a generator function"):
        log.run_as("wallet.list")(function)


def test_function_that_returns_something_to_await_is_undone() -> None:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    log = ActionLog(sa.MetaData(), namespace="unit.functions", engine=engine)
    log.table.metadata.create_all(engine)

    async def later() -> None: ...

    done: Any = log.run_as("wallet.open")(lambda act, params: later())
    with pytest.raises(TypeError, match=r"'wallet\.open': its function returned something to await"):
        done({})
    with engine.connect() as db:
        assert db.execute(sa.select(log.table)).all() == []
    engine.dispose()


# -- emitting ----------------------------------------------------------------------------------------------------------


class Base(DeclarativeBase):
    pass


class Wallet(Base):
    __tablename__ = "wallets"
    id: Mapped[int] = mapped_column(primary_key=True)


@dataclass
class Opened:
    amount: float = 1


@pytest.fixture
def act() -> Any:
    engine = sa.create_engine("sqlite://")
    log = ActionLog(Base.metadata, namespace="unit.emit", engine=engine)
    Base.metadata.create_all(engine)
    with log.action("wallet.open") as act:
        yield act
    engine.dispose()


@pytest.mark.parametrize("given", [{}, {"model_type": "Wallet"}, {"model_id": 1}, {"subject": None}], ids=repr)
def test_event_about_nothing_is_refused(act: Action[Session], given: Any) -> None:
    with pytest.raises(InvalidAction, match="give subject=, or model_type= and model_id="):
        act.emit(Opened(), **given)


@pytest.mark.parametrize("subject", [Opened(), Wallet, "w-1", 7], ids=repr)
def test_subject_that_is_not_mapped_is_refused(act: Action[Session], subject: Any) -> None:
    with pytest.raises(InvalidAction, match="expected as subject an object of a mapped class"):
        act.emit(Opened(), subject=subject)


def test_second_use_of_a_name_by_another_class_is_refused(act: Action[Session]) -> None:
    twin = make_class(__name__, "Opened")
    twin.__qualname__ = "elsewhere.Opened"
    act.emit(Opened(), model_type="Wallet", model_id=1)
    with pytest.raises(InvalidAction, match=r"Event name 'Opened' of namespace 'unit.emit'"):
        act.emit(twin(), model_type="Wallet", model_id=1)


def test_payload_is_read_when_it_is_emitted(act: Action[Session]) -> None:
    event = Opened(1)
    act.emit(event, model_type="Wallet", model_id=1)
    event.amount = 2
    assert [each.payload for each in act.events] == [{"amount": 1}]


def test_payload_with_nan_is_refused(act: Action[Session]) -> None:
    with pytest.raises(InvalidEvent, match="Event 'Opened', payload: NaN"):
        act.emit(Opened(float("nan")), model_type="Wallet", model_id=1)


@pytest.mark.parametrize("number", ["12345678901234567.125", "0.1000000000000000001", "36893488147419103233"])
def test_number_that_would_be_rounded_is_refused(act: Action[Session], number: str) -> None:
    event = Event("Opened", f'{{"a": [{number}]}}'.encode(), content_type="application/json")
    with pytest.raises(InvalidEvent, match=f"Event 'Opened', payload: the number {number} would be rounded to"):
        act.emit(event, model_type="Wallet", model_id=1)


def test_number_that_is_kept_is_taken(act: Action[Session]) -> None:
    text = b'{"a": [0.1, 1.10, -2e3, 1e22, -0.0, 18446744073709551615, -9223372036854775808]}'
    act.emit(Event("Opened", text, content_type="application/json"), model_type="Wallet", model_id=1)
    assert [each.payload for each in act.events] == [
        {"a": [0.1, 1.1, -2000.0, 1e22, -0.0, 18446744073709551615, -9223372036854775808]}
    ]


@pytest.mark.parametrize("value", ["\0", ["a\0b"], {"\0": 1}], ids=repr)
def test_null_character_is_refused(act: Action[Session], value: Any) -> None:
    reason = "it has the character U\\+0000 in a text, which PostgreSQL cannot hold"
    with pytest.raises(InvalidEvent, match=f"Event 'Opened', payload: {reason}"):
        act.emit(Opened(value), model_type="Wallet", model_id=1)
    with pytest.raises(InvalidEvent, match=f"Event 'Closed', payload: {reason}"):
        act.emit(Event("Closed", {"a": value}), model_type="Wallet", model_id=1)
    with pytest.raises(InvalidAction, match=f"Action 'wallet.open', params: {reason}"):
        ActionLog(sa.MetaData(), namespace="unit.null").action("wallet.open", {"a": value})


def test_backslash_before_what_looks_like_a_null_character_is_kept(act: Action[Session]) -> None:
    act.emit(Event("Closed", {"a": r"\u0000"}), model_type="Wallet", model_id=1)
    assert [each.payload for each in act.events] == [{"a": r"\u0000"}]


def test_event_keeps_its_id_and_cannot_come_twice(act: Action[Session]) -> None:
    event = Event("Opened", {}, key="w-1", aggregate_type="Wallet", source="unit.emit")
    assert act.emit(event) == event.id
    with pytest.raises(InvalidEvent, match=f"id {event.id} was emitted twice"):
        act.emit(event)
    assert [(each.model_type, each.model_id) for each in act.events] == [("Wallet", "w-1")]


def test_event_whose_key_is_not_its_subjects_is_refused() -> None:
    engine = sa.create_engine("sqlite://")
    log = ActionLog(Base.metadata, namespace="unit.keys", engine=engine)
    Base.metadata.create_all(engine)

    @log.run_as("wallet.open")
    def open_wallet(act: Action[Session], params: dict[str, str]) -> None:
        wallet = Wallet(id=7)
        act.session.add(wallet)
        act.emit(Event("Opened", {}, key=params["key"]), subject=wallet)

    with pytest.raises(InvalidEvent, match="says that its key is 'w-1', its subject's is '7'"):
        open_wallet({"key": "w-1"})
    open_wallet({"key": "7"})
    engine.dispose()


# -- conflicts ---------------------------------------------------------------------------------------------------------


class Lost(Exception):
    pass


class VeryLost(Lost):
    pass


SOON = timedelta(milliseconds=1)
ONCE = Constant(SOON, max_attempts=2)


def chain(*errors: BaseException) -> BaseException:
    """Errors that were each raised from the next."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def test_exception_is_found_wrapped_and_nested() -> None:
    policies: Policies = {Lost: ONCE}
    assert find_kind(Lost(), policies) is Lost
    assert find_kind(chain(ValueError(), Lost()), policies) is Lost
    assert find_kind(chain(ValueError(), KeyError(), Lost()), policies) is Lost


def test_subclass_counts_as_the_class_that_is_named_and_a_superclass_does_not() -> None:
    assert find_kind(VeryLost(), {Lost: ONCE}) is Lost
    assert find_kind(VeryLost(), {Lost: ONCE, VeryLost: ONCE}) is VeryLost
    assert find_kind(Lost(), {VeryLost: ONCE}) is None
    assert find_kind(Exception(), {Lost: ONCE}) is None


def test_exception_that_was_only_being_handled_or_suppressed_is_not_found() -> None:
    def fail(*, suppressed: bool) -> None:
        try:
            raise Lost
        except Lost:
            if suppressed:
                raise ValueError from None
            raise ValueError  # noqa: B904 - without a cause is what is tested

    for suppressed in (False, True):
        with pytest.raises(ValueError, match=r"^$") as caught:
            fail(suppressed=suppressed)
        assert isinstance(caught.value.__context__, Lost)
        assert find_kind(caught.value, {Lost: ONCE}) is None


def test_unrelated_wrapper_and_group_are_not_found() -> None:
    assert find_kind(chain(ValueError(), KeyError()), {Lost: ONCE}) is None
    assert find_kind(ExceptionGroup("several", [Lost()]), {Lost: ONCE}) is None


def test_causes_in_a_circle_come_to_an_end() -> None:
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert find_kind(one, {Lost: ONCE}) is None
    three = Lost()
    two.__cause__, three.__cause__ = three, one
    assert find_kind(one, {Lost: ONCE}) is Lost


class DriverError(Exception):
    sqlstate = "40P01"


def test_conflict_of_the_database_is_found_by_its_code() -> None:
    deadlock = OperationalError("UPDATE", {}, DriverError("deadlock detected"))
    assert find_kind(chain(ValueError(), deadlock), DEFAULT) is DatabaseConflict
    assert find_kind(OperationalError("UPDATE", {}, Exception("gone away")), DEFAULT) is None
    assert find_kind(deadlock, {OperationalError: ONCE}) is OperationalError


def test_conflicts_are_counted_by_class() -> None:
    tries = Tries({Lost: ONCE, KeyError: ONCE})
    assert tries.next_delay(Lost()) == SOON
    assert tries.next_delay(KeyError()) == SOON
    assert tries.next_delay(KeyError()) is None
    assert tries.next_delay(VeryLost()) is None
    assert tries.next_delay(ValueError()) is None


def test_policies_are_merged_class_by_class() -> None:
    merged = merge_policies(DEFAULT, {Lost: ONCE})
    assert set(merged) == {StaleDataError, DatabaseConflict, Lost}
    assert merge_policies(merged, None) == {}
    assert set(merge_policies({}, 3)) == {StaleDataError, DatabaseConflict}
    assert merge_policies(DEFAULT, 3)[StaleDataError].max_attempts == 4


@pytest.mark.parametrize("retry", [-1, "twice", True, {Lost: "x"}, {"Lost": ONCE}, {KeyboardInterrupt: ONCE}], ids=repr)
def test_retry_that_is_no_policy_is_refused(retry: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        ActionLog(sa.MetaData(), namespace="shop", retry=retry)


# -- without what is optional ------------------------------------------------------------------------------------------


def test_action_does_not_need_opentelemetry() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
import sqlalchemy as sa
from pillarbox.actions.log import ActionLog
engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
log = ActionLog(sa.MetaData(), namespace="shop", engine=engine)
log.table.metadata.create_all(engine)
with log.action("nightly.cleanup"):
    pass
with engine.connect() as db:
    print(db.execute(sa.select(sa.func.count()).select_from(log.table)).scalar_one())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")
