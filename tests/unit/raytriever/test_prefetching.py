"""Results made ahead by background threads: in order, bounded, and nothing stays running."""

import threading
import time

import pytest

from raytriever.errors import UserError
from raytriever.prefetching import prefetched


def test_results_come_in_order_and_a_bounded_number_ahead():
    made, threads = list[int](), set[str]()

    def produce(item: int) -> int:
        made.append(item)
        threads.add(threading.current_thread().name)
        return item * item

    for item, result in prefetched(produce, range(20), depth=3):
        assert result == item * item
        time.sleep(0.002)
        assert len(made) <= item + 4
    assert made == list(range(20))
    assert threads == {"prefetching_0"}


def test_who_leaves_early_waits_for_what_is_begun_alone():
    made: list[int] = []
    for _ in prefetched(lambda item: made.append(item) or time.sleep(0.02 * item), range(9), depth=2):
        break
    assert 2 not in made


def test_reading_goes_on_while_the_consumer_works():
    made = [threading.Event() for _ in range(5)]
    for item, _ in prefetched(lambda item: made[item].set(), range(5), depth=2):
        assert all(event.wait(10) for event in made[: item + 3])


def test_an_error_is_raised_at_its_turn_and_leaving_early_is_no_error_and_the_threads_end():
    def produce(item: int) -> int:
        if item == 3:
            raise UserError("broken")
        return item

    results = prefetched(produce, range(100), depth=2)
    assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="broken"):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetching")]
    for item, _ in prefetched(lambda item: item, range(1000), depth=2):
        if item == 5:
            break
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("prefetching") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_threads_work_at_once_and_results_keep_their_order():
    both = threading.Barrier(2, timeout=10)

    def produce(item: int) -> int:
        if both.wait() == item % 2:
            time.sleep(0.002)  # either may be the later one
        return item * item

    assert list(prefetched(produce, range(8), depth=3, threads=2)) == [(item, item * item) for item in range(8)]
