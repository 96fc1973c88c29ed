"""The layout's tables declared by the application: as mapped classes, and for Alembic's autogenerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    declarative_base,
    mapped_column,
)

from pillarbox import Event, LayoutError, Outbox, Relay
from pillarbox.layouts.openoutbox_tables import OpenOutboxMixin
from pillarbox.layouts.pillarbox import AuditMixin, DeadMixin, LanesMixin, OutboxMixin
from pillarbox.sinks.memory import MemorySink
from tests.servers import ServerName, server_url

SERVERS: tuple[ServerName, ...] = ("postgres", "mariadb", "mysql")
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


@pytest.fixture(params=["sqlite", *SERVERS])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    url = sa.make_url(f"sqlite:///{tmp_path / 'mixins.db'}")
    if request.param != "sqlite":
        url = sa.make_url(server_url(request.param))
        url = url.set(drivername=DRIVERS[url.get_backend_name()])
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()


on_sqlite_and_postgres = pytest.mark.parametrize("engine", ["sqlite", "postgres"], indirect=True)


@contextmanager
def created(engine: sa.Engine, metadata: sa.MetaData) -> Iterator[None]:
    metadata.create_all(engine)
    try:
        yield
    finally:
        metadata.drop_all(engine)


def unique(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex[:8]}"


def make_models(base: Any, name: str, **extra: Any) -> dict[str, Any]:
    """Classes as an application writes them, on a declarative base."""
    mixins = {"": OutboxMixin, "_dead": DeadMixin, "_lanes": LanesMixin, "_audit": AuditMixin}
    made = {}
    for suffix, mixin in mixins.items():
        body = {"__tablename__": f"{name}{suffix}", "__module__": __name__, **(extra if not suffix else {})}
        made[suffix.lstrip("_") or "outbox"] = type(f"{name}{suffix}".title(), (mixin, base), body)
    return made


def make_base(**options: Any) -> Any:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(**options)

    return Base


def inspect_tables(engine: sa.Engine, tables: Iterable[sa.Table], rename: Callable[[str], str]) -> Any:
    """Columns, indexes and constraints as the database has them, with the outbox's name taken out."""
    inspector = sa.inspect(engine)
    found = {}
    for table in tables:
        schema = table.schema
        columns = {
            column["name"]: (str(column["type"]), column["nullable"], rename(str(column["default"])))
            for column in inspector.get_columns(table.name, schema)
            if column["name"] != "note"
        }
        indexes = {
            rename(str(index["name"])): (
                index["column_names"],
                bool(index["unique"]),
                {name: str(option) for name, option in index.get("dialect_options", {}).items()},
            )
            for index in inspector.get_indexes(table.name, schema)
        }
        checks = sorted(
            (rename(str(check["name"])), check["sqltext"])
            for check in inspector.get_check_constraints(table.name, schema)
        )
        keys = inspector.get_pk_constraint(table.name, schema)["constrained_columns"]
        found[rename(table.name)] = (columns, indexes, checks, keys)
    return found


# -- mapped classes ------------------------------------------------------------------------------------------


def test_mapped_classes_make_the_same_tables_as_the_core_declaration(engine: sa.Engine) -> None:
    core, mapped = unique("core"), unique("mapped")
    metadata = sa.MetaData()
    outbox = Outbox(metadata, table=core)
    base = make_base()
    models = make_models(base, mapped, note=mapped_column(sa.String(50)))
    with created(engine, metadata), created(engine, base.metadata):
        expected = inspect_tables(engine, outbox.tables.values(), lambda name: name.replace(core, "outbox"))
        found = inspect_tables(
            engine,
            [model.__table__ for model in models.values()],
            lambda name: name.replace(mapped, "outbox"),
        )
    assert found == expected
    assert set(found["outbox"][1]) >= {
        "outbox_id",
        "outbox_dedup",
        "outbox_ready",
        "outbox_key",
        "outbox_until",
    }


def test_events_are_put_into_mapped_classes(engine: sa.Engine) -> None:
    base = make_base()
    models = make_models(base, unique("billing"), note=mapped_column(sa.String(50), server_default="none"))
    outbox = Outbox.from_models(**models, max_payload=10)
    model = models["outbox"]
    with created(engine, base.metadata), Session(engine) as session:
        event = Event("a", b"payload", key="k", headers={"x": 1})
        again = Event("b", b"payload", id=event.id)
        outbox.put(session, event)
        session.flush()
        outbox.put(session, again)
        session.commit()
        [row] = session.scalars(sa.select(model)).all()
        assert (row.id, row.type, row.key, row.payload, row.headers) == (
            event.id,
            "a",
            "k",
            b"payload",
            {"x": 1},
        )
        assert (row.note, row.state, row.attempts) == ("none", 0, 0)
    assert outbox.max_payload == 10


@pytest.mark.parametrize("naming_convention", [None, CONVENTION], ids=["plain", "convention"])
def test_two_outboxes_share_a_base_and_a_database(engine: sa.Engine, naming_convention: Any) -> None:
    base = make_base(naming_convention=naming_convention)
    mapped = Outbox.from_models(**make_models(base, unique("mapped")))
    core = Outbox(base.metadata, table=unique("core"))
    with created(engine, base.metadata):
        for outbox in (mapped, core):
            with engine.begin() as db:
                outbox.put(db, Event("a", {}))
            with engine.connect() as db:
                assert db.execute(sa.select(outbox.table.c.type)).scalars().all() == ["a"]


@pytest.mark.parametrize("naming_convention", [None, CONVENTION], ids=["plain", "convention"])
def test_names_follow_the_table_under_any_naming_convention(naming_convention: Any) -> None:
    base = make_base(naming_convention=naming_convention)
    mapped = make_models(base, "billing")["outbox"].__table__
    core = Outbox(base.metadata, table="orders").table
    for table in (mapped, core):
        name = table.name
        checks = {str(each.name) for each in table.constraints if isinstance(each, sa.CheckConstraint)}
        assert checks == {f"{name}_lane"}
        assert {str(index.name) for index in table.indexes} == {
            f"{name}_{index}" for index in ("id", "dedup", "ready", "key", "until", "delivered")
        }


@on_sqlite_and_postgres
def test_a_lane_outside_the_table_s_range_is_refused_by_the_database(engine: sa.Engine) -> None:
    base = make_base()
    outbox = Outbox.from_models(**make_models(base, unique("lanes")))
    with created(engine, base.metadata), Session(engine) as session:
        outbox.put(session, Event("a", {}))
        session.commit()
        with pytest.raises(sa.exc.IntegrityError, match="lane"):
            session.execute(sa.update(outbox.table).values(lane=64))


@pytest.mark.parametrize(
    "own",
    [
        {"schema": "billing"},
        (sa.UniqueConstraint("note"), {"schema": "billing"}),
    ],
    ids=["options", "items"],
)
def test_table_args_of_a_class_are_added_to_the_layout_s(own: Any) -> None:
    base = make_base()
    model = make_models(base, "events", note=mapped_column(sa.String(50)), __table_args__=own)["outbox"]
    table = model.__table__
    assert table.schema == "billing"
    assert "events_id" in {index.name for index in table.indexes}
    assert table.dialect_options["sqlite"]["autoincrement"] is True
    has_own = any(isinstance(each, sa.UniqueConstraint) for each in table.constraints)
    assert has_own is isinstance(own, tuple)


def test_table_args_of_the_base_are_added_to_the_layout_s() -> None:
    class Base(DeclarativeBase):
        __table_args__ = {"schema": "billing", "mysql_charset": "utf8mb4"}  # noqa: RUF012 -- SQLAlchemy's own form

    models = make_models(Base, "events")
    outbox = Outbox.from_models(**models)
    assert outbox.table.fullname == "billing.events"
    assert outbox.tables["dead"].fullname == "billing.events_dead"
    assert "events_id" in {index.name for index in outbox.table.indexes}
    assert outbox.table.dialect_options["mysql"]["charset"] == "utf8mb4"


def test_other_kinds_of_bases_take_the_mixins() -> None:
    class AsDataclass(MappedAsDataclass, DeclarativeBase):
        pass

    class Shared(OutboxMixin):
        """An application's own mixin between ours and its tables."""

        note: Mapped[str | None] = mapped_column(sa.String(50))
        __table_args__ = (sa.Index("by_note", "note"),)

    class Events(Shared, make_base()):  # type: ignore[misc]
        __tablename__ = "events"

    names = {index.name for index in Events.__table__.indexes}
    assert {"by_note", "events_id"} <= names
    for base in (AsDataclass, declarative_base()):
        outbox = Outbox.from_models(**make_models(base, "events"))
        assert "events_id" in {index.name for index in outbox.table.indexes}


# -- what from_models refuses --------------------------------------------------------------------------------


def test_a_table_that_relays_would_not_find_is_refused() -> None:
    base = make_base()
    models = make_models(base, "events")
    other = make_models(base, "other")
    with pytest.raises(LayoutError, match=r"expected table 'events_dead', .* got 'other_dead'"):
        Outbox.from_models(**{**models, "dead": other["dead"]})


def test_a_class_that_lost_the_layout_s_indexes_is_refused() -> None:
    base = make_base()
    models = make_models(base, "events")

    class Late(base, OutboxMixin):  # type: ignore[misc, valid-type]
        __tablename__ = "late"
        __table_args__ = {"comment": "ours"}  # noqa: RUF012 -- SQLAlchemy's own form

    with pytest.raises(LayoutError, match=r"'Late': its table lacks .*late_id.*Name the mixin before"):
        Outbox.from_models(Late, dead=models["dead"], lanes=models["lanes"], audit=models["audit"])


@pytest.mark.parametrize(
    "column",
    [mapped_column(sa.String(50), nullable=False), mapped_column(sa.String(50), default="python")],
    ids=["required", "filled by Python"],
)
def test_a_column_that_no_put_would_fill_is_refused(column: Any) -> None:
    models = make_models(make_base(), "events", note=column)
    with pytest.raises(LayoutError, match=r"column 'note': .* give it a server_default"):
        Outbox.from_models(**models)


# -- Alembic -------------------------------------------------------------------------------------------------


def autogenerate(engine: sa.Engine, metadata: sa.MetaData) -> Any:
    """What `alembic revision --autogenerate` would write for these tables."""
    names = {table.name for table in metadata.tables.values()}

    def is_ours(item: Any, name: str | None, kind: str, reflected: bool, compared: Any) -> bool:
        return kind != "table" or name in names

    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": is_ours, "target_metadata": metadata})
        script = produce_migrations(context, metadata).upgrade_ops
        assert script is not None
        operations = Operations(context)
        pending = list(script.ops)
        while pending:
            operation = pending.pop(0)
            if hasattr(operation, "ops"):
                pending = [*operation.ops, *pending]
            else:
                operations.invoke(operation)
        return script.as_diffs()


@pytest.mark.parametrize("convention", [None, CONVENTION], ids=["plain", "convention"])
def test_alembic_sees_everything_once(engine: sa.Engine, convention: Any) -> None:
    metadata = sa.MetaData(naming_convention=convention)
    outbox = Outbox(metadata, table=unique("alembic"))
    try:
        made = autogenerate(engine, metadata)
        assert [item[1].name for item in made if item[0] == "add_table"] == sorted(metadata.tables)
        assert autogenerate(engine, metadata) == []
        with engine.begin() as db:
            event = Event("a", {"n": 1}, dedup_key="k")
            assert outbox.put(db, event, Event("b", {}, dedup_key="k")).new == (event,)
    finally:
        metadata.drop_all(engine)


# -- tables of other systems ---------------------------------------------------------------------------------


async def test_events_put_into_a_mapped_table_of_another_system_are_relayed() -> None:
    name = unique("oo")

    class Own(DeclarativeBase):
        pass

    class Message(OpenOutboxMixin, Own):
        __tablename__ = f"{name}_events"
        tenant: Mapped[str | None]

    outbox = Outbox.from_models(Message, layout="openoutbox")
    engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    Own.metadata.create_all(engine)
    try:
        with Session(engine) as session:
            outbox.put(session, Event("order.placed", {"n": 1}, key="7"))
            session.commit()
            assert session.scalars(sa.select(Message.status)).all() == ["PENDING"]
        sink = MemorySink()
        async with Relay(outbox.store(server_url("postgres")), sink) as relay:
            await relay.drain()
        assert [(event.type, event.key, event.payload) for event in sink.events] == [("order.placed", "7", b'{"n":1}')]
        with Session(engine) as session:
            assert session.scalars(sa.select(Message.status)).all() == ["DELIVERED"]
    finally:
        Own.metadata.drop_all(engine)
        engine.dispose()


def test_models_that_a_layout_does_not_have_are_refused() -> None:
    class Own(DeclarativeBase):
        pass

    class Message(OpenOutboxMixin, Own):
        __tablename__ = "lonely_events"

    with pytest.raises(LayoutError, match="'openoutbox': besides the outbox's, expected the models none; got dead=…"):
        Outbox.from_models(Message, layout="openoutbox", dead=Message)
    with pytest.raises(LayoutError, match=r"'pillarbox': .* expected the models dead=…, lanes=…, audit=…; got none"):
        Outbox.from_models(Message)
