"""How many CPUs a training worker gets where nothing is set, and what a run that fails says."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.train import WorkerGroupError

from raytriever.errors import StorageError, UserError
from raytriever.stages.stage import Resources
from trainers.jobs import workers
from trainers.jobs.worker import Spread


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch):
    """What a run is where Ray Train ends in an error."""

    def fit_that_raises(error: Exception) -> str:
        def fit() -> None:
            raise error

        monkeypatch.setattr(workers, "trainer_of", lambda *_: SimpleNamespace(fit=fit))
        return workers.fit_on_workers({}, Spread(Resources(workers=2), None, 0))

    return fit_that_raises


def test_a_controller_that_died_is_a_matter_of_running_again(fitted) -> None:
    died = ray.exceptions.ActorDiedError()
    with pytest.raises(UserError, match=r"controller.*has died.*run the same command again"):
        fitted(died)


def test_what_one_of_several_workers_refused_is_said_in_its_words(fitted) -> None:
    raised = WorkerGroupError("Traceback …", {1: StorageError("s3://full: no room")})
    with pytest.raises(UserError, match=r"^s3://full: no room$") as caught:
        fitted(raised)
    assert caught.value.__cause__ is raised
    with pytest.raises(WorkerGroupError, match="Traceback"):
        fitted(WorkerGroupError("Traceback …", {1: RuntimeError("connection closed")}))


@pytest.mark.parametrize("error", [UserError("row 3 has no negative"), StorageError("s3://full: no room")], ids=repr)
def test_an_error_is_raised_where_other_workers_may_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: UserError
) -> None:
    def refuse() -> None:
        raise error

    board = SimpleNamespace(actor=SimpleNamespace(put_nowait=SimpleNamespace(remote=None)))
    arguments = {"settings": SimpleNamespace(located=refuse, output=str(tmp_path)), "board": board}
    arguments |= {"threads": torch.get_num_threads(), "derivation": None}
    monkeypatch.setattr(workers, "get_device", lambda: torch.device("cpu"))

    def train(world_size: int) -> str:
        context = SimpleNamespace(get_world_size=lambda: world_size, get_world_rank=lambda: 0)
        monkeypatch.setattr(workers.ray.train, "get_context", lambda: context)
        return workers.train_on_worker(arguments)

    assert json.loads(train(1)) == {"error": str(error)}  # alone, Ray Train has nobody to start again
    with pytest.raises(UserError) as caught:
        train(2)
    assert caught.value is error
