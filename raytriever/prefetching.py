"""Results made ahead of their use, by background threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

TOKENIZING_THREADS = 2
"""Threads of a worker that tokenizes ahead. Both run at once, because the tokenizer isn't Python."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetched(
    produce: Callable[[Item], Result], items: Iterable[Item], depth: int, threads: int = 1
) -> Generator[tuple[Item, Result], None, None]:
    """(item, ``produce(item)``) in order, with up to ``depth`` results made ahead by so many background threads.

    What ``produce`` raises is raised here, at its item's turn.
    """
    pending: deque[tuple[Item, Future[Result]]] = deque()
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="prefetching")
    try:
        left = iter(items)
        while True:
            pending.extend((item, pool.submit(produce, item)) for item in islice(left, depth + 1 - len(pending)))
            if not pending:
                return
            ready, future = pending.popleft()
            yield ready, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
