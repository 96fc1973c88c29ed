"""One batch on its way to Kafka, in a thread: every message is handed to the client, then all answers are awaited.

Brokers answer for all messages of one request, so an answer that some message is bad may be about its neighbour. Those
messages, with what follows them of their keys, are then sent one by one. In a transaction nothing of a batch is visible
unless all of it is: after a failure the transaction is aborted and begun again without the messages that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from pillarbox.errors import MissingExtra
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Delivered, Event, Outcome, Retry
from pillarbox.sinks.kafka_errors import BATCH, PURGED, UNKNOWN_TOPIC, Outage, judge
from pillarbox.sinks.kafka_producer import KafkaProducer
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.refused import Refused

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

Headers = dict[str, str | bytes | None]
Render = Callable[[Event], tuple[str, bytes, Headers]]
"""Returns an event's topic, value and headers; raises `Refused`."""

JudgeMissing = Callable[[str], Outcome]
"""Asks the cluster for a topic that the client does not know: what becomes of its messages; raises `Outage`."""


class Delivery:
    """One batch; `outcomes` are what is known so far."""

    def __init__(self, claims: Sequence[Claim], render: Render) -> None:
        self.claims = claims
        self.outcomes: list[Outcome] = [RELEASED] * len(claims)
        self._render = render
        self._errors: dict[int, KafkaError] = {}
        self._stopped: set[str] = set()
        self._missing: dict[str, Outcome] = {}

    def use(self, producer: KafkaProducer, judge_missing: JudgeMissing, *, refused: Mapping[str, KafkaError]) -> None:
        """Go by this producer, which has begun; nothing can go to topics that were refused."""
        self._producer = producer
        self._judge_missing = judge_missing
        self._refused = refused

    def send(self) -> list[Outcome]:
        """Send the batch and return its outcomes; raises `Outage` or `Stopped`."""
        client = self._producer.client
        self._produce(client, range(len(self.claims)))
        self._producer.wait()
        if not self._errors:
            return release_successors(self.claims, self.outcomes) if self._stopped else self.outcomes
        suspects = self._judge(finds_suspects=len(self.claims) > 1)
        self.outcomes = release_successors(self.claims, self.outcomes)
        if suspects:
            self._send_one_by_one(client)
        return self.outcomes

    def send_in_transaction(self) -> list[Outcome]:
        """Send the batch so that all of it that can be delivered becomes visible at once."""
        failed: dict[int, Outcome] = {}
        is_one_by_one = False
        while unsent := self._list_unsent(failed):
            client = self._producer.client
            client.begin_transaction()
            try:
                self._produce(client, unsent, waits=is_one_by_one)
                # A transaction sends nothing more after a failure: its other messages wait in vain.
                self._producer.wait(self._errors)
            except BaseException:
                self._forget_acknowledged()
                raise
            if not self._errors:
                acknowledged = self._forget_acknowledged()
                self._producer.repeat(client.commit_transaction)
                return release_successors(self.claims, acknowledged)
            self._forget_acknowledged()
            self._producer.repeat(client.abort_transaction)
            # The others of a failed transaction are thrown away by the client: that says nothing about them.
            told = {n: error for n, error in self._errors.items() if error.code() not in PURGED}
            self._errors = told or self._errors
            is_one_by_one |= self._judge(finds_suspects=not is_one_by_one)
            failed = {n: each for n, each in enumerate(self.outcomes) if isinstance(each, Dead | Retry)}
            if self._producer.is_late:
                break
            # After a message has failed the client cannot number the next ones without a gap.
            self._producer.discard()
            self._producer.have_client()
        return release_successors(self.claims, self.outcomes)

    def _list_unsent(self, failed: Mapping[int, Outcome]) -> list[int]:
        """The events that have not failed, and follow none of their key that has."""
        stopped: set[str | None] = set()
        unsent: list[int] = []
        for position, claim in enumerate(self.claims):
            key = claim.event.key
            if position in failed:
                stopped.add(key)
            elif key is None or key not in stopped:
                unsent.append(position)
        self._stopped = set()
        return unsent

    def _forget_acknowledged(self) -> list[Outcome]:
        """Nothing counts before the commit; returns what will count then."""
        acknowledged = self.outcomes
        self.outcomes = [RELEASED if outcome is DELIVERED else outcome for outcome in acknowledged]
        return acknowledged

    def _send_one_by_one(self, client: Producer) -> None:
        for position, outcome in enumerate(self.outcomes):
            if isinstance(outcome, Dead | Retry):
                self._stop_key(position)
        for position in [n for n, outcome in enumerate(self.outcomes) if outcome is RELEASED]:
            if self._producer.is_late:
                return
            self._produce(client, [position])
            self._producer.wait()
            self._judge(finds_suspects=False)
            if not isinstance(self.outcomes[position], Delivered):
                self._stop_key(position)

    def _produce(self, client: Producer, positions: Iterable[int], *, waits: bool = False) -> None:
        claims, render, report, stopped, refused = self.claims, self._render, self._report, self._stopped, self._refused
        produce = client.produce
        for position in positions:
            event = claims[position].event
            key = event.key or None
            if stopped and key in stopped:
                continue
            try:
                topic, value, headers = render(event)
                if topic in refused:
                    raise KafkaException(refused[topic])
                while True:
                    try:
                        produce(topic, value=value, key=key, headers=headers, on_delivery=partial(report, position))
                        break
                    except BufferError:
                        self._producer.make_room()
                if waits:
                    self._producer.wait(self._errors)
                if not waits or not self._errors:
                    continue
                return
            except Refused as error:
                self.outcomes[position] = Dead(str(error))
            except ValueError as error:
                self.outcomes[position] = Dead(f"The key or a header cannot be sent: {error}")
            except KafkaException as error:
                if error.args[0].code() == KafkaError._STATE:
                    # A transaction takes nothing more after one of its messages has failed: which one?
                    self._producer.wait(self._errors)
                    if self._errors:
                        return
                self.outcomes[position] = self._judge_error(topic, error.args[0])
            self._stop_key(position)

    def _stop_key(self, position: int) -> None:
        key = self.claims[position].event.key
        if key is not None:
            self._stopped.add(key)

    def _report(self, position: int, error: KafkaError | None, message: object) -> None:
        if error is None:
            self.outcomes[position] = DELIVERED
            self._producer.note_answer()
        else:
            self._errors[position] = error

    def _judge(self, *, finds_suspects: bool) -> bool:
        """Turn the errors into outcomes; returns whether some may be about a neighbour, which stay released."""
        has_suspects = False
        outage: Outage | None = None
        errors, self._errors = self._errors, {}
        for position, error in errors.items():
            if finds_suspects and error.code() in BATCH:
                has_suspects = True
                continue
            topic = self._render(self.claims[position].event)[0]
            if outage is not None and error.code() in UNKNOWN_TOPIC and topic not in self._missing:
                # A cluster that cannot be used is not asked about one topic after the other.
                continue
            try:
                self.outcomes[position] = self._judge_error(topic, error)
            except Outage as found:
                outage = outage or found
        if outage is not None:
            raise outage
        return has_suspects

    def _judge_error(self, topic: str, error: KafkaError) -> Outcome:
        if error.code() not in UNKNOWN_TOPIC:
            return judge(error, topic)
        if topic not in self._missing:
            self._missing[topic] = self._judge_missing(topic)
        return self._missing[topic]
