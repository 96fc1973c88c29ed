"""MQTT 5: each event a message of QoS 1 or 2, as many under way at once as the server takes.

The protocol is our own (`mqtt_wire`, `mqtt_connection`), because the clients of the field hide what a sink must know.
aiomqtt drops the reason codes of acknowledgements: a message that the server refused looks delivered. paho does so for
QoS 2, sends more at once than the server's receive maximum allows (Mosquitto closes the connection over it), sends
what was under way again when it connects again, and tells of no answer to a ping.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Literal
from uuid import uuid4

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.sinks import Sink
from pillarbox.sinks import mqtt_wire as wire
from pillarbox.sinks.forms import FORM_OPTIONS, FormName, form_options, make_form
from pillarbox.sinks.message import DEFAULT_SOURCE
from pillarbox.sinks.mqtt_connection import Connection, Flight, Lost
from pillarbox.sinks.options import read_login, read_options, read_path, read_servers
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.templates import Template
from pillarbox.sinks.tls import TLS_OPTIONS, make_tls_context
from pillarbox.sinks.url import SinkUrl
from pillarbox.values import Given, Read, as_number, read_pause, read_switch, read_text


def _read_qos(given: Given) -> object:
    return as_number(given.value) if given.is_text else given.value


_OPTIONS: Final[dict[str, Read]] = {
    "topic": read_text,
    "qos": _read_qos,
    "retain": read_switch,
    "client_id": read_text,
    "message_expiry": read_pause,
    "require_subscribers": read_switch,
    "keepalive": read_pause,
    "timeout": read_pause,
    **FORM_OPTIONS,
}
_VAIN_TRIES: Final = 3
_LONGEST_EXPIRY: Final = timedelta(seconds=0xFFFF_FFFE)
_LONGEST_KEEPALIVE: Final = timedelta(seconds=0xFFFF)


class MqttSink(Sink):
    """Publishes each event to a topic. Url: `mqtt://user:password@host:port`, `mqtts://` with TLS.

    `topic` is the template of the topic's name. The message's headers are its user properties. `message_expiry` lets
    the server forget a message that a subscriber did not fetch in that time; `require_subscribers` makes an event dead
    that nobody is subscribed to. Without `client_id` every sink has one of its own; with it a second relay would throw
    the first one out. The server is `timeout` late when it has acknowledged nothing at all for so long.
    """

    is_quick: bool = True

    def __init__(
        self,
        host: str = "localhost",
        port: int | None = None,
        *,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        name: str = "mqtt:",
        topic: str = "{topic}",
        qos: Literal[1, 2] = 1,
        retain: bool = False,
        client_id: str | None = None,
        message_expiry: timedelta | None = None,
        require_subscribers: bool = False,
        keepalive: timedelta = timedelta(seconds=60),
        timeout: timedelta = timedelta(seconds=4),
        message: FormName | None = None,
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        self.name = name
        self._check_options(qos, message_expiry, keepalive, require_subscribers=require_subscribers)
        self._host = host
        self._port = port or (1883 if tls is None else 8883)
        self._tls = tls
        self._topic = Template(topic, what=f"Sink {name!r} topic")
        self._qos = qos
        self._retains = retain
        self._flags = qos << 1 | retain
        self._keepalive = keepalive.total_seconds()
        self._timeout = timeout.total_seconds()
        self._requires_subscribers = require_subscribers
        expiry = None if message_expiry is None else max(1, round(message_expiry.total_seconds()))
        self._expiry = b"" if expiry is None else wire.encode_expiry(expiry)
        self._render = make_form(
            message,
            broker="mqtt",
            sink=name,
            cloudevents=cloudevents,
            cloudevents_source=cloudevents_source,
            ce_prefix="",
            has_content_type_header=False,
        )
        # 23 letters and digits: what every server must accept.
        self._connect_packet = self._encode_connect(client_id or f"pillarbox{uuid4().hex[:14]}", user, password)
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._alone = asyncio.Lock()

    @classmethod
    def from_url(cls, url: SinkUrl) -> MqttSink:
        is_secure = url.scheme == "mqtts"
        options = read_options(url, {**_OPTIONS, **(TLS_OPTIONS if is_secure else {})})
        (host, port), *others = read_servers(url, port=8883 if is_secure else 1883)
        if others or read_path(url):
            raise ConfigError(f"Sink {url.name!r}: expected one server and nothing after it: {url.scheme}://host:port")
        user, password = read_login(url)
        tls = make_tls_context(options, sink=url.name) if is_secure else None
        chosen = {name: value for name, value in options.items() if name in _OPTIONS and name not in FORM_OPTIONS}
        chosen |= form_options(options)
        return cls(host, port, user=user, password=password, tls=tls, name=url.name, **chosen)

    async def open(self) -> None:
        await self._connected()

    async def check(self) -> None:
        connection = await self._connected()
        try:
            async with asyncio.timeout(self._timeout):
                await connection.ping()
        except Lost:
            # It may have ended since it was last used: a new one tells how things are now.
            await self._connected()
        except TimeoutError:
            connection.drop("the server does not answer")
            raise self._unavailable(f"no answer to a ping within {self._timeout:g} s") from None

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        flight = Flight(len(claims), self._judge)
        try:
            await self._fly(flight, claims)
        except SinkUnavailable as outage:
            outage.outcomes = release_successors(claims, flight.outcomes)
            raise
        return release_successors(claims, flight.outcomes) if flight.stopped else flight.outcomes

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(self._timeout)

    # -- a batch ---------------------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight, claims: Sequence[Claim]) -> None:
        """Send until every message has its answer.

        Servers may end the connection over a message that they refuse: with DISCONNECT, or as Mosquitto 2.0.11 does,
        whose answer may be lost with what came after it. So what has no answer goes again at once, one by one until
        the culprit is found. Meanwhile no other delivery begins: a culprit among its messages would end the connection
        for this one as well. One that began just before may still share it.
        """
        async with self._alone:  # waits for those that are
            connection = await self._connected()
        error = await self._try(connection, flight, claims)
        if error is not None and connection.was_cut:
            async with self._alone:
                vain = 0
                while error is not None and connection.was_cut and vain < _VAIN_TRIES:
                    is_careful = not connection.was_last_refused
                    before = flight.answered
                    connection = await self._connected()
                    error = await self._try(connection, flight, claims, is_careful=is_careful)
                    vain = 0 if flight.answered > before else vain + 1
        if error is not None:
            raise self._unavailable(error) from error

    async def _try(
        self, connection: Connection, flight: Flight, claims: Sequence[Claim], *, is_careful: bool = False
    ) -> Lost | None:
        """Send what has no answer yet; returns why the connection was lost, if it was."""
        try:
            await self._send(connection, flight, claims, is_careful=is_careful)
            return None
        except Lost as error:
            return error
        finally:
            if not flight.is_done:
                # What is on its way must not arrive after these claims were given back.
                connection.drop("a delivery was given up")

    async def _send(self, connection: Connection, flight: Flight, claims: Sequence[Claim], *, is_careful: bool) -> None:
        flight.begin(is_careful=is_careful)
        stopped, outcomes, largest = flight.stopped, flight.outcomes, connection.maximum_packet
        for position, claim in enumerate(claims):
            event = claim.event
            if outcomes[position] is not RELEASED or (stopped and event.key in stopped):
                continue
            try:
                packet = self._encode(event, largest)
            except Refused as error:
                flight.refuse(position, event.key, Dead(str(error)))
                continue
            connection.send(flight, position, event.key, packet)
            if is_careful:
                connection.flush()
                await self._wait(connection, flight)
        connection.flush()
        await self._wait(connection, flight)

    def _encode(self, event: Event, largest: int) -> tuple[bytes, bytes]:
        topic = wire.encode_topic(self._topic.fill(event))
        headers, content_type, body = self._render(event)
        parts = [self._expiry, wire.encode_content_type(content_type)]
        parts += [wire.encode_user_property(name, value) for name, value in headers.items()]
        head, tail = wire.encode_publish(self._flags, topic, b"".join(parts), body)
        size = len(head) + 2 + len(tail)
        if size > largest:
            raise Refused(f"Message of {size} bytes is too large: the server takes {largest} bytes at most")
        return head, tail

    async def _wait(self, connection: Connection, flight: Flight) -> None:
        while not flight.is_done:
            if connection.lost is not None:
                raise connection.lost
            before = connection.answered
            await flight.wait(self._timeout)
            if connection.answered == before and not flight.is_done:
                connection.drop(f"no acknowledgement within {self._timeout:g} s")

    def _judge(self, answer: wire.Answer) -> Outcome:
        if answer.code == wire.NO_SUBSCRIBERS and self._requires_subscribers:
            return Dead(f"The server refused the message: {answer}")
        if answer.code < 0x80:
            return DELIVERED
        text = f"The server refused the message: {answer}"
        return Dead(text) if answer.code in wire.MESSAGE_FAULTS else Retry(text)

    # -- the connection --------------------------------------------------------------------------------------------

    async def _connected(self) -> Connection:
        connection = self._connection
        if connection is not None and connection.lost is None:
            return connection
        async with self._connecting:
            if self._connection is None or self._connection.lost is not None:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self._connect_packet, keepalive=self._keepalive)
        try:
            async with asyncio.timeout(self._timeout):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
                answer = await connection.accepted
        except TimeoutError:
            connection.drop("connecting took too long")
            raise self._unavailable(f"no connection within {self._timeout:g} s") from None
        except (Lost, OSError) as error:
            raise self._unavailable(error) from error
        except BaseException:
            connection.drop("connecting was given up")
            raise
        refusal = self._find_refusal(answer)
        if refusal is not None:
            await connection.close(self._timeout)
            raise self._unavailable(refusal)
        return connection

    def _find_refusal(self, answer: wire.Answer) -> str | None:
        if answer.code >= 0x80:
            return f"the server refused the connection: {answer}"
        if answer.code:
            # Servers without MQTT 5 refuse it with the codes of MQTT 3.
            return f"the server does not speak MQTT 5 (it answered with code {answer.code})"
        if answer.numbers.get(wire.MAXIMUM_QOS, 2) < self._qos:
            return (
                f"the server takes messages up to QoS {answer.numbers[wire.MAXIMUM_QOS]}, the option qos is {self._qos}"
            )
        if self._retains and not answer.numbers.get(wire.RETAIN_AVAILABLE, 1):
            return "the server retains no messages, the option retain asks for it"
        return None

    def _unavailable(self, reason: BaseException | str) -> SinkUnavailable:
        text = str(reason) if isinstance(reason, Lost | str) else describe_error(reason)
        return SinkUnavailable(f"Sink {self.name}: {text}")

    # -- options ---------------------------------------------------------------------------------------------------

    def _check_options(
        self, qos: object, message_expiry: timedelta | None, keepalive: timedelta, *, require_subscribers: bool
    ) -> None:
        if qos not in (1, 2) or isinstance(qos, bool):
            raise ConfigError(f"Sink {self.name!r} qos: expected 1 or 2, which are acknowledged, got {qos!r}")
        if require_subscribers and qos == 2:
            raise ConfigError(f"Sink {self.name!r} require_subscribers: a server knows that with QoS 1 only, got qos 2")
        if message_expiry is not None and not timedelta(seconds=1) <= message_expiry <= _LONGEST_EXPIRY:
            raise ConfigError(
                f"Sink {self.name!r} message_expiry: expected 1 second to {_LONGEST_EXPIRY}, got {message_expiry}"
            )
        if not timedelta(seconds=1) <= keepalive <= _LONGEST_KEEPALIVE:
            raise ConfigError(f"Sink {self.name!r} keepalive: expected 1 to 65535 seconds, got {keepalive}")

    def _encode_connect(self, client_id: str, user: str | None, password: str | None) -> bytes:
        try:
            return wire.encode_connect(client_id, user, password, keepalive=round(self._keepalive))
        except Refused:
            # The text itself would show the password.
            raise ConfigError(
                f"Sink {self.name!r}: client_id, user or password is too long or has a control character"
            ) from None
