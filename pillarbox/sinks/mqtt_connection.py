"""One connection of an MQTT 5 publisher: from CONNECT to its loss, never connected again.

Messages are sent in the order they were handed over, as many at once as the server takes (its receive maximum); the
rest waits here. A message that waits is dropped when an earlier one of its key fails. A lost
connection forgets everything: nothing of it is sent later, neither by us nor by the system's buffers.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from pillarbox.event import DELIVERED, RELEASED, Outcome
from pillarbox.sinks import mqtt_wire as wire

_MOST: Final = 65_535
_BUFFER: Final = 1 << 20
_DROP_UNSENT: Final = struct.pack("ii", 1, 0)


class Lost(Exception):
    """The connection is not there, or no longer."""


class Flight:
    """The messages of one delivery: what became of each, and which keys are stopped by a failure."""

    __slots__ = ("_done", "_judge", "_left", "answered", "is_careful", "outcomes", "stopped")

    def __init__(self, count: int, judge: Callable[[wire.Answer], Outcome]) -> None:
        self.outcomes: list[Outcome] = [RELEASED] * count
        self.stopped: set[str] = set()
        self.answered = 0
        self.is_careful = False
        self._judge = judge
        self._left = 0
        self._done: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        return not self._left

    def begin(self, *, is_careful: bool) -> None:
        """Forget what was under way on a connection that is lost; a careful flight sends its messages one by one."""
        self._left = 0
        self.is_careful = is_careful

    async def wait(self, seconds: float) -> None:
        """Return when every message has its answer, when the connection is lost, or after so many seconds."""
        if self._left:
            self._done = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._done], timeout=seconds)

    def refuse(self, position: int, key: str | None, outcome: Outcome) -> None:
        self.outcomes[position] = outcome
        if key is not None:
            self.stopped.add(key)

    def add(self) -> None:
        self._left += 1

    def take(self, position: int, key: str | None, answer: wire.Answer | None) -> None:
        """Take the server's answer; None is success."""
        self.answered += 1
        outcome = DELIVERED if answer is None else self._judge(answer)
        self.outcomes[position] = outcome
        if outcome is not DELIVERED and key is not None:
            self.stopped.add(key)
        self.leave()

    def leave(self) -> None:
        self._left -= 1
        if not self._left:
            self.wake()

    def wake(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


_Sent = tuple[Flight, int, str | None]


class Connection(asyncio.Protocol):
    """Sends CONNECT when made; `accepted` is done once the server answered."""

    def __init__(self, connect: bytes, *, keepalive: float) -> None:
        self.accepted: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self.lost: Lost | None = None
        self.answered = 0
        """How many answers came: whether there is progress."""
        self.was_last_refused = False
        """Whether the last answer was a refusal."""
        self.was_cut = False
        """Whether the server ended the connection without a word, or over a message."""
        self.maximum_packet = wire.LARGEST + 5
        self._window = _MOST
        self._connect = connect
        self._keepalive = keepalive
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._sent: dict[int, _Sent] = {}
        self._waiting: deque[tuple[_Sent, bytes, bytes]] = deque()
        self._out: list[bytes] = []
        self._mid = 0
        self._is_paused = False
        self._ping: asyncio.Future[None] | None = None
        self._ping_of_beat: asyncio.Future[None] | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- what the sink does ----------------------------------------------------------------------------------------

    def send(self, flight: Flight, position: int, key: str | None, packet: tuple[bytes, bytes]) -> None:
        """Send a message or let it wait for its turn; `flush` must follow."""
        flight.add()
        sent = (flight, position, key)
        if self._waiting or self._is_paused or len(self._sent) >= self._window:
            self._waiting.append((sent, *packet))
            return
        self._put(sent, *packet)
        if len(self._sent) >= self._window:
            self.flush()

    def flush(self) -> None:
        if self._out and self._transport is not None:
            data = b"".join(self._out)
            self._out.clear()
            self._transport.write(data)

    async def ping(self) -> None:
        """Return when the server has answered; raises `Lost`."""
        if self.lost is not None:
            raise self.lost
        await asyncio.shield(self._ping or self._start_ping())

    def drop(self, reason: str) -> None:
        """Lose the connection at once, with everything that is not sent yet."""
        self._lose(Lost(reason))
        if self._transport is not None:
            handle = self._transport.get_extra_info("socket")
            if handle is not None and handle.fileno() >= 0:
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
            self._transport.abort()

    async def close(self, seconds: float) -> None:
        """Take leave of the server and return when the connection is gone."""
        if self.lost is None and self._transport is not None:
            self._write(wire.GOODBYE)
            self._transport.close()
            self._lose(Lost("the connection was closed"))
        if self._transport is not None:
            await asyncio.wait([self._closed], timeout=seconds)
            self._transport.abort()

    # -- what the event loop does ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_BUFFER)
        self._write(self._connect)
        self._connect = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._read(data)
        except wire.Malformed as error:
            self.drop(f"the server does not speak MQTT 5: {error}")
            return
        self._send_waiting()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lost is None:
            self.was_cut = True
        self._lose(Lost("the server closed the connection" if exc is None else f"the connection was lost: {exc}"))
        if not self._closed.done():
            self._closed.set_result(None)

    # -- packets ---------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        if not self.accepted.done() and buffer[0] >> 4 not in (wire.CONNACK, wire.DISCONNECT):
            raise wire.Malformed(f"it began with {bytes(buffer[:40])!r}")
        at = 0
        while True:
            # Nearly every packet is the short form of a success.
            if buffer[at : at + 2] == b"\x40\x02" and len(buffer) >= at + 4:
                self._finish(buffer[at + 2] << 8 | buffer[at + 3], None)
                at += 4
                continue
            if at >= len(buffer) or (found := wire.split_packet(buffer, at)) is None:
                break
            kind, (start, end) = buffer[at] >> 4, found
            self._take(kind, bytes(buffer[start:end]))
            at = end
        del buffer[:at]

    def _take(self, kind: int, body: bytes) -> None:
        if kind in (wire.PUBACK, wire.PUBREC, wire.PUBCOMP):
            if len(body) < 2:
                raise wire.Malformed(f"an acknowledgement of {len(body)} bytes")
            answer = wire.decode_answer(body, 2)
            mid = body[0] << 8 | body[1]
            if kind == wire.PUBREC and answer.code < 0x80:
                self._out.append(wire.encode_release(mid))
            else:
                self._finish(mid, answer if answer.code else None)
        elif kind == wire.PINGRESP:
            if self._ping is not None:
                self._ping.set_result(None)
                self._ping = None
        elif kind == wire.CONNACK:
            self._accept(wire.decode_answer(body, 1))
        elif kind == wire.DISCONNECT:
            self._end(wire.decode_answer(body, 0))
        else:
            raise wire.Malformed(f"an unexpected packet of kind {kind}")

    def _accept(self, answer: wire.Answer) -> None:
        if self.accepted.done():
            raise wire.Malformed("a second CONNACK")
        self._window = answer.numbers.get(wire.RECEIVE_MAXIMUM, _MOST)
        self.maximum_packet = answer.numbers.get(wire.MAXIMUM_PACKET, self.maximum_packet)
        # The server's word on the keepalive counts; 0 means none.
        self._keepalive = answer.numbers.get(wire.SERVER_KEEPALIVE, self._keepalive)
        self.accepted.set_result(answer)
        self._plan_beat()

    def _end(self, answer: wire.Answer) -> None:
        if answer.code in wire.MESSAGE_FAULTS:
            self.was_cut = True
            # Right after a refusal the server may mean the message that it refused, not the one sent since.
            if len(self._sent) == 1 and not self.was_last_refused:
                ((mid, (flight, _, _)),) = self._sent.items()
                # Only of a careful flight: its new connection shows that the server does not mean the login.
                if flight.is_careful:
                    self._finish(mid, answer)
        self.drop(f"the server ended the connection: {answer}")

    def _finish(self, mid: int, answer: wire.Answer | None) -> None:
        sent = self._sent.pop(mid, None)
        self.answered += 1
        self.was_last_refused = answer is not None and answer.code >= 0x80
        if sent is not None:
            flight, position, key = sent
            flight.take(position, key, answer)

    def _send_waiting(self) -> None:
        waiting = self._waiting
        while waiting and not self._is_paused and len(self._sent) < self._window:
            sent, head, tail = waiting.popleft()
            flight, _, key = sent
            if key is not None and key in flight.stopped:
                flight.leave()
            else:
                self._put(sent, head, tail)
        self.flush()

    def _put(self, sent: _Sent, head: bytes, tail: bytes) -> None:
        mid = self._mid
        while True:
            mid = mid % _MOST + 1
            if mid not in self._sent:
                break
        self._mid = mid
        self._sent[mid] = sent
        self._out += (head, mid.to_bytes(2, "big"), tail)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._out.append(data)
            self.flush()

    # -- its life --------------------------------------------------------------------------------------------------

    def _plan_beat(self) -> None:
        if self._keepalive:
            self._beat = asyncio.get_running_loop().call_later(self._keepalive / 2, self._keep_alive)

    def _keep_alive(self) -> None:
        if self._ping is not None and self._ping is self._ping_of_beat:
            self.drop(f"no answer to a ping within {self._keepalive / 2:g} s")
            return
        self._ping_of_beat = self._ping or self._start_ping()
        self._plan_beat()

    def _start_ping(self) -> asyncio.Future[None]:
        self._ping = asyncio.get_running_loop().create_future()
        # Nobody may be there to hear of the loss.
        self._ping.add_done_callback(lambda ping: ping.cancelled() or ping.exception())
        self._write(wire.PING)
        return self._ping

    def _lose(self, lost: Lost) -> None:
        if self.lost is not None:
            return
        self.lost = lost
        if self._beat is not None:
            self._beat.cancel()
        flights = {sent[0] for sent in self._sent.values()} | {entry[0][0] for entry in self._waiting}
        self._sent.clear()
        self._waiting.clear()
        self._out.clear()
        for flight in flights:
            flight.wake()
        if self._ping is not None:
            self._ping.set_exception(lost)
            self._ping = None
        if not self.accepted.done():
            self.accepted.set_exception(lost)
            self.accepted.exception()
