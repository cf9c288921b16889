"""What a run refuses before its first stage, or as soon as what a later stage reads is there."""

import os
from collections.abc import Set
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pyarrow as pa
import pytest
from pydantic import Field

from raytriever.artifacts.artifact import Artifact, to_json
from raytriever.artifacts.writer import ArtifactWriter, Lock
from raytriever.errors import UserError
from raytriever.reports.log import SUBMITTED
from raytriever.settings.configuration import Input
from raytriever.stages.recipe_run import check_before_run, closing_lines, run_recipe
from raytriever.stages.stage import WHOLE, Phase, Stage, StageConfig, Stages
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.jobs.search import Search, SearchConfig
from tests.unit.pipelines.jobs.made_up import store
from trainers.jobs.report import Report, ReportConfig


class WatchingConfig(StageConfig):
    inputs: Annotated[dict[str, str], Input()] = Field(default={})
    size: int = 0


class Watching(Stage[WatchingConfig]):
    """Notes what happens to it; refuses what ``refused`` ends in."""

    command = "watching"
    kind = "watching"
    config_class = WatchingConfig
    refused = "nothing"
    happened: list[tuple[str, str]]

    def check_settings(self, stages: Stages) -> None:
        self.happened.append((Path(self.config.output).name, f"among {''.join(stages)}"))

    def check_inputs(self, there: Set[str]) -> None:
        for key in sorted(there):
            name = Path(self.config.inputs[key.removeprefix("inputs.")]).name
            self.happened.append((Path(self.config.output).name, f"sees {name}"))
            if name == self.refused:
                raise UserError("no good")

    def input_fingerprints(self) -> dict[str, str]:
        return {}

    def phases(self):
        return [Phase("all", WHOLE, self.note)]

    def note(self, _, writer):
        self.happened.append((Path(self.config.output).name, "made"))
        return writer.commit(0)

    def execute(self, pending, session, progress):  # noqa: ARG002
        Watching.here = session.makes_here(1e9, is_spread=True)
        yield from map(self.make_shard, pending)


def watching(folder: Path, names: str, size: int = 0) -> dict[str, Stage[Any]]:
    Watching.happened = []
    stages: dict[str, Stage[Any]] = {}
    for number, name in enumerate(names):  # each reads all before it, and something from outside
        inputs = {before: str(folder / before) for before in names[:number]} | {"outside": "/somewhere/outside"}
        stages[name] = Watching(WatchingConfig(output=str(folder / name), inputs=inputs, size=size))
    return stages


def test_later_stages_see_each_artifact_as_soon_as_it_is_made(tmp_path: Path) -> None:
    run_recipe(watching(tmp_path, "abcd"), "abc", "letters", str(tmp_path))
    before = [(name, happens) for name in "abc" for happens in ("among abcd", "sees outside")]
    first = [("a", "sees outside"), ("a", "made"), ("b", "sees a"), ("c", "sees a")]
    second = [("b", "sees a"), ("b", "sees outside"), ("b", "made"), ("c", "sees b")]
    last = [("c", "sees a"), ("c", "sees b"), ("c", "sees outside"), ("c", "made")]
    assert Watching.happened == [*before, *first, *second, *last]


def test_what_is_finished_is_checked_and_made_again_only_where_it_changed(tmp_path: Path, logged: list[str]) -> None:
    run_recipe(watching(tmp_path, "abc"), "abc", "letters", str(tmp_path))
    facts = Artifact(str(tmp_path / "b")).run_facts()
    assert (facts["recipe"], facts["seconds"]) == ("letters", round(facts["seconds"], 3))
    assert facts["seconds"] < 60
    logged.clear()
    run_recipe(watching(tmp_path, "abc"), "abc", "letters", str(tmp_path))
    assert Watching.happened == []
    assert [line[:9] for line in logged] == [f"{name}: reused" for name in "abc"]
    run_recipe(watching(tmp_path, "abc", size=1), "abc", "letters", str(tmp_path))
    assert [name for name, happens in Watching.happened if happens == "made"] == ["a", "b", "c"]


def test_what_is_asked_of_a_run_reaches_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    making, asked = ArtifactWriter.making, list[dict[str, bool]]()
    monkeypatch.setattr(ArtifactWriter, "making", lambda each, **how: asked.append(how) or making(each, **how))
    run_recipe(watching(tmp_path, "a"), "a", "letters", str(tmp_path), force=True, shards_here=True)
    assert (asked, Watching.here) == ([{"force": True}], True)


def test_a_table_stands_for_all_that_it_is_made_of() -> None:
    def stage(output: str, *inputs: str, shows: bool = False) -> Any:
        config = WatchingConfig(output=output, inputs={each: each for each in inputs})
        return SimpleNamespace(config=config, shows_inputs=shows, announce=lambda _: [output], results=("x",))

    artifact: Any = SimpleNamespace(kind="any", folder=SimpleNamespace(describe=lambda name: name))
    stages = [stage("a"), stage("b"), stage("c", "b"), stage("d", "c", shows=True), stage("e", "a")]
    lines = closing_lines([(each, artifact) for each in stages])
    assert [line.split() for line in lines] == [["a"], ["d"], ["e"], *[["any", "x"]] * 3]


def test_inputs_from_elsewhere_take_no_time_to_read(tmp_path: Path) -> None:
    assert watching(tmp_path, "a")["a"].seconds_here([]) == 0


def test_what_a_later_stage_refuses_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = watching(tmp_path, "abc")
    monkeypatch.setattr(Watching, "refused", "a")
    with pytest.raises(UserError, match="no good"):
        run_recipe(stages, "abc", "letters", str(tmp_path))
    assert ("b", "made") not in Watching.happened


@pytest.mark.parametrize("submitted", [False, True])
def test_a_submitted_command_says_whose_files_it_sees(tmp_path: Path, monkeypatch, submitted: bool) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no such folder.")

    monkeypatch.setattr(Watching, "check_inputs", refuse)
    if submitted:
        monkeypatch.setenv(SUBMITTED, "1")
    with pytest.raises(UserError) as raised:
        check_before_run(watching(tmp_path, "a"), "a")
    of_nodes = " This command was submitted, so it sees files of the nodes, not of the machine that submitted it."
    assert str(raised.value) == f"a: no such folder.{of_nodes * submitted}"


def test_an_output_below_a_file_is_refused_before_the_first_stage(tmp_path: Path) -> None:
    stages = watching(tmp_path, "ab") | watching(tmp_path / "file", "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file is a file, where"):
        run_recipe(stages, "abc", "letters", str(tmp_path))
    assert ("a", "made") not in Watching.happened


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Collections: a fine one, and those with a blank in the id of a document or of a query."""
    folder = tmp_path_factory.mktemp("made")
    ids = {"fine": ("d", "q"), "document": ("a b.md", "q"), "query": ("d", "a b")}
    made = {}
    for name, (document, query) in ids.items():
        documents = [pa.Table.from_pylist([{"id": document, "title": "", "text": "x", "domain": ""}])]
        made[name] = store(folder / name, documents, [(query, "y", "", [])], [(query, document, 1, "test")])
    return made


def search(collection: str, **settings: Any) -> Search:
    return Search(SearchConfig(index="index", output="run", collection=collection, **settings))


def evaluation(collection: str, **settings: Any) -> Evaluate:
    return Evaluate(EvaluateConfig(collection=collection, runs={"BM25": "run"}, output="evaluation", **settings))


def test_a_search_looks_at_ids_and_split_when_the_collection_is_there(made: dict[str, str]) -> None:
    search(made["fine"]).check_inputs({"collection"})
    search(made["document"]).check_inputs(set())  # it is not there yet
    search(made["query"], queries=made["fine"]).check_inputs({"queries"})
    for stage, there, said in (
        (search(made["fine"], split="tset"), "collection", "no judgments of split 'tset'"),
        (search(made["document"]), "collection", r"A document id is 'a b\.md'"),
        (search(made["query"]), "collection", "A query id is 'a b'"),
        (search(made["fine"], queries=made["query"]), "queries", "A query id is 'a b'"),
        (evaluation(made["fine"], split="tset"), "collection", "no judgments of split 'tset'"),
    ):
        with pytest.raises(UserError, match=said):
            stage.check_inputs({there})


def test_an_evaluation_is_checked_before_there_are_runs(made: dict[str, str]) -> None:
    evaluation(made["fine"]).check_settings({})
    evaluation(made["fine"]).check_inputs({"collection"})
    with pytest.raises(UserError, match="'MRR@10' is not a measure"):
        evaluation(made["fine"], measures=["MRR@10"]).check_settings({})


def test_a_report_knows_which_systems_the_run_evaluates() -> None:
    def check(baseline: str | None, of: str = "evaluation") -> None:
        report = Report(ReportConfig(evaluation=of, output="report", baseline=baseline))
        report.check_settings({"evaluation": evaluation("collection")})

    check("BM25")
    check(None)
    check("anything", "of another run")
    with pytest.raises(UserError, match=r"'BM52', which .*evaluation does not evaluate\. Did you mean 'BM25'"):
        check("BM52")


def test_another_run_in_the_folder_is_refused_unless_all_is_finished(tmp_path: Path) -> None:
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    lock, other = tmp_path / "lock-0000.json", replace(Lock.of_this_process(), process=parent, started=started)
    lock.write_bytes(to_json(asdict(other)))
    with pytest.raises(UserError, match=rf"{tmp_path.name} is being made already, by process {parent}"):
        run_recipe(watching(tmp_path, "ab"), "ab", "letters", str(tmp_path))
    assert ("a", "made") not in Watching.happened
    lock.unlink()
    run_recipe(watching(tmp_path, "ab"), "ab", "letters", str(tmp_path))
    assert not list(tmp_path.glob("lock-*"))
    lock.write_bytes(to_json(asdict(other)))
    run_recipe(watching(tmp_path, "ab"), "ab", "letters", str(tmp_path))


@pytest.mark.parametrize("inside", ["", "/corpus"])
def test_an_output_with_the_input_in_it_is_refused(tmp_path: Path, inside: str) -> None:
    stage = Watching(WatchingConfig(output=str(tmp_path / "a"), inputs={"data": f"{tmp_path}/a{inside}"}))
    with pytest.raises(UserError, match=r"inputs\.data lies in the output, .*/a, which is emptied"):
        run_recipe({"a": stage}, "a", "letters", str(tmp_path))
