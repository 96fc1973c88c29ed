"""What may be claimed of the messages at hand, without a broker."""

from __future__ import annotations

from datetime import timedelta
from random import Random

from pillarbox.sources.pending import Entry, Pending
from pillarbox.sources.reading import Raw, read_message


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def entry(
    name: str, key: str | None = None, *, topic: str = "orders", place: int | None = None, body: bytes = b""
) -> Entry:
    return Entry(read_message(Raw(id=name, topic=topic, body=body, key=key)), token=name, place=place)


def make(*entries: Entry) -> tuple[Pending, Clock]:
    clock = Clock()
    pending = Pending(clock)
    pending.add(entries)
    return pending, clock


def claim(pending: Pending, limit: int = 10) -> list[str]:
    return [each.token for each in pending.claim(limit)[0]]


def test_entries_are_claimed_in_the_order_of_their_arrival():
    pending, _ = make(entry("a", "k"), entry("b"), entry("c", "j"), entry("d", "k"))
    assert claim(pending) == ["a", "b", "c", "d"]
    assert claim(pending) == []


def test_limit_says_that_there_is_more():
    pending, _ = make(entry("a"), entry("b"), entry("c"))
    first, is_full = pending.claim(2)
    assert ([each.token for each in first], is_full) == (["a", "b"], True)
    second, is_full = pending.claim(2)
    assert ([each.token for each in second], is_full) == (["c"], False)


def test_claim_ends_before_it_is_too_heavy():
    bodies = {"a": b"12", "b": b"34", "c": b"56", "heavy": b"1234567", "d": b"7"}
    pending, _ = make(*(entry(name, body=body) for name, body in bodies.items()))
    batches = [pending.claim(10, 5) for _ in range(4)]
    assert [[each.token for each in taken] for taken, _ in batches] == [["a", "b"], ["c"], ["heavy"], ["d"]]
    assert [is_full for _, is_full in batches] == [True, True, True, False]


def test_heavy_message_is_not_passed_by_a_later_one_of_its_key():
    first, heavy, last = entry("a", "k", body=b"12"), entry("heavy", "k", body=b"1234567"), entry("b", "k")
    pending, _ = make(first, heavy, last)
    for each in (first, heavy, last):
        assert [taken.token for taken in pending.claim(10, 5)[0]] == [each.token]
        assert pending.claim(10, 5)[0] == []
        pending.finish(each)


def test_what_waits_behind_its_own_key_is_not_more():
    pending, _ = make(entry("a", "k"), entry("b", "k"))
    assert pending.claim(1)[1] is False


def test_key_is_not_claimed_while_one_of_it_is_taken():
    first, second = entry("a", "k"), entry("b", "k")
    pending, _ = make(first, second, entry("c", "j"))
    assert claim(pending, 1) == ["a"]
    assert claim(pending) == ["c"]
    pending.finish(first)
    assert claim(pending) == ["b"]
    assert second.attempts == 1


def test_keys_of_different_topics_are_different_keys():
    pending, _ = make(entry("a", "k", topic="x"), entry("b", "k", topic="y"))
    assert claim(pending, 1) == ["a"]
    assert claim(pending) == ["b"]


def test_delayed_entry_holds_back_its_key_until_it_is_due():
    first = entry("a", "k")
    pending, clock = make(first, entry("b", "k"), entry("c"))
    assert claim(pending, 1) == ["a"]
    pending.delay(first, timedelta(seconds=5))
    assert claim(pending) == ["c"]
    assert pending.next_due() == 5.0
    clock.now += 5
    assert pending.next_due() == 0.0
    assert claim(pending) == ["a", "b"]
    assert pending.next_due() is None
    assert first.attempts == 2


def test_entry_given_back_was_not_tried():
    first = entry("a")
    pending, _ = make(first)
    assert claim(pending) == ["a"]
    assert (first.attempts, first.turn) == (1, 1)
    pending.give_back(first)
    assert first.attempts == 0
    assert claim(pending) == ["a"]
    assert (first.attempts, first.turn) == (1, 2)


def test_released_successor_waits_for_its_delayed_predecessor():
    first, second = entry("a", "k"), entry("b", "k")
    pending, clock = make(first, second)
    assert claim(pending) == ["a", "b"]
    pending.give_back(second)
    pending.delay(first, timedelta(seconds=1))
    assert claim(pending) == []
    clock.now += 1
    assert claim(pending) == ["a", "b"]


def test_lost_entry_frees_its_key():
    first, second = entry("a", "k"), entry("b", "k")
    pending, _ = make(first, second)
    assert claim(pending, 1) == ["a"]
    pending.lose([first])
    assert first.is_lost
    assert claim(pending) == ["b"]
    assert len(pending) == 1
    pending.lose([first])
    assert len(pending) == 1


def test_lost_entry_that_waited_is_not_due():
    first = entry("a", "k")
    pending, clock = make(first)
    assert claim(pending) == ["a"]
    pending.delay(first, timedelta(seconds=1))
    pending.lose([first])
    assert pending.next_due() is None
    clock.now += 2
    assert claim(pending) == []


def test_finished_entry_is_not_lost():
    first = entry("a")
    pending, _ = make(first)
    assert claim(pending) == ["a"]
    pending.finish(first)
    pending.lose([first])
    assert not first.is_lost


def test_entry_that_comes_late_goes_before_its_successors():
    pending, _ = make(entry("c", "k", place=3))
    pending.add([entry("a", "k", place=1), entry("b", "k", place=2)])
    assert claim(pending) == ["a", "b", "c"]


def test_nothing_is_left_over_when_all_is_finished():
    pending, _ = make(*(entry(f"{number}", f"key-{number % 3}") for number in range(30)))
    taken, _ = pending.claim(100)
    for each in taken:
        pending.finish(each)
    assert len(pending) == 0
    assert pending._lanes == {}


def test_random_failures_never_break_the_order_of_a_key():
    """Three batches at a time, each settled at random; the successors of a failure are given back, as relays do."""
    random = Random(7)
    entries = [entry(f"{number}", f"key-{number % 5}", place=number) for number in range(500)]
    pending, clock = make(*entries)
    done: list[int] = []
    batches: list[list[Entry]] = []
    while len(done) < 500:
        batches.append(pending.claim(random.randint(1, 20))[0])
        held = [each.read.event.key for batch in batches for each in batch]
        assert all(sum(each in {e.read.event.key for e in batch} for batch in batches) == 1 for each in held)
        if len(batches) == 3:
            settle(pending, batches.pop(random.randrange(3)), random, done)
        clock.now += 0.5
    for key in range(5):
        assert [number for number in done if number % 5 == key] == list(range(key, 500, 5))


def settle(pending: Pending, batch: list[Entry], random: Random, done: list[int]) -> None:
    stopped = set()
    for each in batch:
        key = each.read.event.key
        if key in stopped:
            pending.give_back(each)
        elif random.random() < 0.1:
            stopped.add(key)
            pending.delay(each, timedelta(seconds=random.random()))
        else:
            done.append(int(each.token))
            pending.finish(each)
