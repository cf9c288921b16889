"""Workers of k-means in a process without Ray."""

from threading import Event
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pipelines.clustering.points import Split
from pipelines.jobs import part_workers
from raytriever.stages.stage import Resources


def test_after_an_error_no_other_domain_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Domains that are under way fail as soon as the workers are gone."""
    killed, begun = Event(), list[str]()
    ray = SimpleNamespace(remote=MagicMock(), kill=lambda _: killed.set())
    monkeypatch.setattr(part_workers, "ray", ray)
    monkeypatch.setattr(part_workers, "workers_that_fit", lambda *_: 1)

    def make(domain: str, _: Split) -> None:
        begun.append(domain)
        if domain == "a":
            raise ValueError("no good")
        assert killed.wait(10)

    with pytest.raises(ValueError, match="no good"), part_workers.PartWorkers(Resources(), 1, 1) as workers:
        list(workers.map_domains(make, "abcd"))
    assert begun in (["a"], ["a", "b"])
