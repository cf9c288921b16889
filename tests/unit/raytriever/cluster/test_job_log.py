"""Following a job's log through cuts, early ends and interrupts: every character once, none left out."""

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytriever.cluster import submit as job_log
from raytriever.cluster.job_server import Job, UnknownJob, Unreachable
from raytriever.cluster.submit import JobLog
from raytriever.errors import UserError

LOG = "0123456789" * 3
CUTS = (RuntimeError("WebSocket connection closed unexpectedly"), OSError("reset"))


@pytest.fixture(autouse=True)
def waited() -> Any:
    """Seconds that were waited, without waiting."""
    seconds: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_log.time, "sleep", seconds.append)
        yield seconds


class Server:
    """A server that does one thing after another: how far each tail comes, and how it ends.

    A step is a number of characters after which the tail ends as if all was said, the same with an exception that ends
    it, or an exception that the question for the job's state meets. After the last step the job is over.
    """

    address = "http://head:8265"

    def __init__(self, *steps: "int | tuple[int, BaseException] | Unreachable | UnknownJob", log: str = LOG) -> None:
        self.steps, self.log = list(steps), log

    def job(self, name: str) -> Job:
        if self.steps and isinstance(self.steps[0], Unreachable | UnknownJob):
            raise self.steps.pop(0)  # type: ignore[misc]
        over = not self.steps
        return Job(name, "SUCCEEDED" if over else "RUNNING", "python", "", 0 if over else None, 1.0, None)

    async def tail(self, _: str) -> AsyncIterator[str]:
        step = self.steps.pop(0)
        length, error = step if isinstance(step, tuple) else (step, None)
        assert isinstance(length, int)
        for start in range(0, length, 3):
            yield self.log[start : min(start + 3, length)]
        if error is not None:
            raise error

    def logs(self, _: str) -> str:
        return self.log


def followed(server: Server, write: Callable[[str], object]) -> JobLog:
    return JobLog(server, "name", write)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "steps",
    [
        [],  # over before it was asked for
        [30],
        [12],  # the end of the tail comes before the end of the job
        [5, 5, 17, 17],
        [0, 0],
        [(4, CUTS[0]), (4, CUTS[1]), (7, CUTS[0]), 30],
        [12, Unreachable("nothing answers"), 12],  # what was shown before stays known
        [Unreachable("nothing answers"), (9, CUTS[0])],
    ],
)
def test_every_character_is_shown_once(steps: list[Any]) -> None:
    shown: list[str] = []
    job = followed(Server(*steps), shown.append).follow()
    assert job.exit_code == 0
    assert "".join(shown) == LOG


@given(st.integers(0, 2**32 - 1))
def test_every_character_is_shown_once_whatever_happens(seed: int) -> None:
    choice = random.Random(seed)
    kinds: list[Callable[[int], Any]] = [
        lambda length: length,
        lambda length: (length, choice.choice(CUTS)),
        lambda length: (length, KeyboardInterrupt()),
        lambda _: Unreachable("nothing answers"),
    ]
    steps = [choice.choice(kinds)(choice.randint(0, len(LOG))) for _ in range(choice.randint(0, 12))]
    shown: list[str] = []
    log = followed(Server(*steps), shown.append)
    for _ in range(len(steps) + 1):
        try:
            log.follow()
        except KeyboardInterrupt:
            continue
        break
    assert "".join(shown) == LOG


def test_the_end_of_a_job_is_not_waited_for_long(waited: list[float]) -> None:
    followed(Server(30), print).follow()
    assert sum(waited) <= 0.5


def test_a_server_that_has_nothing_new_is_not_asked_at_once(waited: list[float]) -> None:
    followed(Server(12, 12, 12), print).follow()
    assert waited == [0.5, 2.0, 2.0]


def test_a_cluster_that_stays_away_is_given_up_in_the_end(waited: list[float]) -> None:
    server = Server(*[Unreachable("nothing answers")] * 1000)
    with pytest.raises(UserError, match="jobs logs name --follow"):
        followed(server, print).follow()
    assert 1000 - len(server.steps) == job_log._RECONNECTS + 1
    assert sum(waited) == pytest.approx(120)


def test_tails_that_are_always_cut_are_given_up_unless_they_bring_something() -> None:
    cut = CUTS[0]
    with pytest.raises(UserError, match="has not answered"):
        followed(Server(*[(3, cut)] * 1000), print).follow()
    growing = Server(*[(length, cut) for length in range(200)], log="x" * 200)
    assert followed(growing, print).follow().is_over


def test_how_a_job_ended_is_known_without_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    class Lost(Server):
        def logs(self, _: str) -> str:
            raise UserError("The cluster refused: its node is gone")

    assert followed(Lost(12), print).follow().exit_code == 0
    assert "its node is gone" in capsys.readouterr().err


def test_a_job_that_ended_with_its_head_is_to_be_submitted_again() -> None:
    gone = UnknownJob("The cluster at http://head:8265 knows no job name.")
    with pytest.raises(UserError, match=r"started anew.*Submit it again with the same --output"):
        followed(Server(4, Unreachable("nothing answers"), gone), print).follow()
    with pytest.raises(UserError, match="knows no job name"):
        followed(Server(gone), print).follow()
