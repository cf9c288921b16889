"""What a trial that runs beside others gets of the machine, what it says, and what becomes of one that fails."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytriever.errors import UserError
from raytriever.reports.log import log
from raytriever.stages import trials
from raytriever.stages.stage import Resources, Stage, StageConfig
from raytriever.stages.trials import _with_share
from raytriever.sweep.plan import StageGroup
from raytriever.sweep.results import Failure


class Trained(Stage[StageConfig]):
    command = "train"
    kind = "model"
    config_class = StageConfig


class Embedded(Trained):
    command = "embed"


@pytest.mark.parametrize(
    ("kind", "resources", "concurrent", "expected"),
    [
        (Trained, {"workers": 2}, 4, 2),
        (Trained, {}, 4, 4),
        (Trained, {"workers": 9}, 4, 1),
        (Trained, {"workers": 2, "cpus_per_worker": 3}, 4, 3),
        (Trained, {"workers": 2}, 1, None),
        (Embedded, {"workers": 2}, 4, None),
    ],
)
def test_trainings_side_by_side_share_the_cpus_evenly(
    kind: type[Trained],
    resources: dict[str, int],
    concurrent: int,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0})
    found = _with_share(kind(StageConfig(output="any", resources=Resources(**resources))), concurrent)
    assert type(found) is kind
    assert found.config.resources.cpus_per_worker == expected


DEFECT = ValueError("a defect\n\nof the last line\n ")


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (None, None),
        (UserError("refused"), "refused"),
        (DEFECT, "ValueError: of the last line"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_group_is_made_in_the_drivers_folder_and_its_lines_have_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: Exception | None, reason: str | None
) -> None:
    made, posted = list[object](), list[str]()

    def run_stage(stage: Any, _: object, **how: object) -> None:
        made.append((stage, Path.cwd(), how))
        log.info("  it runs")
        if raised and stage == "stage b":
            raise raised

    monkeypatch.setattr(trials, "run_stage", run_stage)
    board = SimpleNamespace(put_nowait=lambda record: posted.append(record.getMessage()))
    stages = {name: f"stage {name}" for name in "ab"}
    failure = trials._make_group._function("k=1", stages, "letters", board, str(tmp_path))
    options = [{"replace": True, "label": name, "recipe": "letters"} for name in "ab"]
    assert made == [(f"stage {name}", tmp_path, how) for name, how in zip("ab", options, strict=True)]
    assert posted == ["k=1: it runs"] * 2
    assert (failure and failure.reason) == reason
    assert not failure or ("Traceback" in failure.trace) is not isinstance(raised, UserError)


def test_groups_run_side_by_side_and_those_that_fail_are_said(monkeypatch, logged: list[str]) -> None:
    outcomes = {"a": None, "b": Failure("refused"), "c": ray.exceptions.WorkerCrashedError(), "d": None}
    begun, waited, posted = list[str](), list[int](), list[logging.LogRecord]()

    def begin(name: str, stages: Any, recipe: str, *_: object) -> str:
        begun.append(name)
        posted.append(log.makeRecord(log.name, logging.INFO, "", 0, f"{name}: of {recipe}", (), None))
        assert stages["model"].config.resources.cpus_per_worker == 4
        return name

    def wait(running: list[str], timeout: float) -> tuple[list[str], list[str]]:
        assert timeout < 1
        waited.append(len(running))
        return running[:1], running[1:]

    def get(answer: str) -> Failure | None:
        if isinstance(found := outcomes[answer], Exception):
            raise found
        return found

    def taken(count: int) -> list[logging.LogRecord]:
        taken, posted[:count] = posted[:count], []
        return taken

    monkeypatch.setattr(trials, "open_board", lambda: SimpleNamespace(size=lambda: len(posted), get_nowait_batch=taken))
    monkeypatch.setattr(trials, "_make_group", SimpleNamespace(remote=begin))
    for name, replacement in {"wait": wait, "get": get, "cluster_resources": lambda: {"CPU": 8.0}}.items():
        monkeypatch.setattr(ray, name, replacement)
    groups = [StageGroup(name, {}, {"model": Trained(StageConfig(output=name))}) for name in outcomes]
    failures = trials.make_groups(groups, 2, "letters")
    assert begun == list(outcomes)
    assert waited == [2, 2, 2, 1]
    assert failures.keys() == {"b", "c"}
    assert failures["c"].reason.startswith("the trial's process was lost (")
    assert [line for line in logged if "failed" not in line] == [f"{name}: of letters" for name in outcomes]
    assert next(line for line in logged if "failed" in line) == "b: failed: refused"
