"""A submitted job's log as it grows, shown once and whole, whatever happens to the connection."""

import asyncio
import time
from collections.abc import Callable

from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.job_server import Job, JobServer, UnknownJob, Unreachable
from raytriever.retrieval.progress import say

_POLL_SECONDS = 0.5
_RECONNECT_SECONDS = 2.0
_RECONNECTS = 60
_PATIENCE_SECONDS = 180  # with a server that takes connections and doesn't answer, where each attempt lasts long


class JobLog:
    """Hands over what the job ``name`` writes, as it writes it.

    ``shown`` counts the characters that were handed over: after a cut, an early end or an interrupt, it goes on there.
    """

    def __init__(self, server: JobServer, name: str, write: Callable[[str], object]) -> None:
        self.server = server
        self.name = name
        self.shown = 0
        self._write = write

    def follow(self) -> Job:
        """Goes on until the job has ended and all of its log is shown; returns the job.

        Raises ``UserError`` where the cluster doesn't answer for minutes, or doesn't know the job or no longer does.
        """
        failures, known, answered = 0, False, time.monotonic()
        while True:
            before = self.shown
            try:
                job = self.server.job(self.name)
                known, answered = True, time.monotonic()
                if job.is_over:
                    self._show_rest()
                    return job
                connected = asyncio.run(self._tail())
            except Unreachable:
                connected = False
            except UnknownJob as error:
                if not known:
                    raise
                raise UserError(
                    f"The cluster at {self.server.address} knows the job {self.name} no more: its head has been started"
                    " anew, and a job ends with its head. Submit it again with the same --output, it goes on from what"
                    " is finished."
                ) from error
            if connected or self.shown > before:
                failures, answered = 0, time.monotonic()
            else:
                failures += 1
            if failures > _RECONNECTS or time.monotonic() - answered > _PATIENCE_SECONDS:
                raise UserError(
                    f"The cluster at {self.server.address} has not answered for some minutes. The job may run on;"
                    f" later: raytriever jobs logs {self.name} --follow"
                )
            time.sleep(_POLL_SECONDS if connected and self.shown > before else _RECONNECT_SECONDS)

    async def _tail(self) -> bool:
        """Shows what is written until the server ends it, with the job or before; whether it did, not a cut."""
        import aiohttp

        begin = 0
        try:
            async for text in self.server.tail(self.name):
                self._show(text, begin)
                begin += len(text)
        except (RuntimeError, aiohttp.ClientError, OSError):
            return False
        return True

    def _show_rest(self) -> None:
        """What a job that is over wrote last."""
        try:
            self._show(self.server.logs(self.name), 0)
        except Unreachable:
            raise
        except UserError as error:  # the node that has the log is lost; how the job ended is known all the same
            say(f"{self.name}: the end of its log can't be read. {error}")

    def _show(self, text: str, begin: int) -> None:
        """Hands over what is new of ``text``, which begins at the log's character ``begin``."""
        if new := text[max(0, self.shown - begin) :]:
            self._write(new)
            self.shown = begin + len(text)
