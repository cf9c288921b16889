"""Queries that gained and lost most, with what each system ranked first."""

from pathlib import Path
from typing import Any

from raytriever.reports.table import Table
from raytriever.settings.configuration import validate
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.report import examples_section
from retrieval.evaluation.stored import StoredEvaluation
from retrieval.jobs.evaluate import Evaluate, EvaluateConfig
from retrieval.rankings import StoredRanking
from tests.unit.retrieval.judged import Run, make_collection, make_run_artifact
from tests.unit.small_run import make

# nDCG@1: q1 falls from 1 to .5 (d3 has grade 1 of 2), q2 rises from 0 to 1, q3 from 0 to 1; q6 has no positive
OTHER: Run = {"q1": {"d1": 2.0}, "q2": {"d4": 2.0, "d2": 1.0}, "q3": {"d1": 1.0}, "q6": {"d1": 1.0}}
MINE: Run = {
    "q1": {"d3": 2.0},
    "q2": {"d2": 2.0, "d1": 1.0, "d4": 0.5, "d3": 0.1},
    "q3": {"d5": 1.0},
    "q6": {"d2": 1.0},
}


def section(folder: Path, systems: dict[str, Run], **settings: Any) -> tuple[str, list[str], list[Table]]:
    collection = make_collection(folder)
    runs = {name: make_run_artifact(folder / name, collection, run) for name, run in systems.items()}
    values = {"output": str(folder / "evaluation"), "collection": collection, "runs": runs, "measures": ["nDCG@1"]}
    evaluation = make(Evaluate(validate(EvaluateConfig, values | settings, "evaluate")))
    rankings = {name: StoredRanking(path) for name, path in runs.items()}
    found = examples_section(StoredEvaluation(evaluation), rankings, StoredCollection(collection))
    texts = [block for block in found.blocks if isinstance(block, str)]
    return found.lead, texts, [block for block in found.blocks if isinstance(block, Table)]


def test_what_gained_and_what_lost_with_the_first_documents_of_each_system(tmp_path: Path) -> None:
    lead, texts, tables = section(tmp_path, {"mine": MINE, "other": OTHER, "worst": {"q1": {"d4": 1.0}}}, mine="mine")
    assert lead == "Queries where mine gained and lost most nDCG@1 against other; +: judged relevant."
    assert sorted(texts[:2]) == ["+1.00  text of q2", "+1.00  text of q3"]
    assert texts[2:] == ["-0.50  text of q1"]
    of_q2, of_q1 = tables[texts.index("+1.00  text of q2")], tables[2]
    assert of_q2.header == ["", "mine 1.00", "other 0.00", "worst 0.00"]
    assert of_q2.rows == [
        ["1", "+ Rome Oslo Berlin is large.", "Rome Oslo Nothing of note", ""],
        ["2", "Rome Oslo The capital of France is Paris.", "+ Rome Oslo Berlin is large.", ""],
        ["3", "Rome Oslo Nothing of note", "", ""],
    ]
    assert [row[1:] for row in of_q1.rows[:1]] == [
        ["+ Rome Oslo paris, Texas", "+ Rome Oslo The capital of France is Paris.", "Rome Oslo Nothing of note"]
    ]


def test_the_last_system_is_compared_with_the_best_other_where_none_is_mine(tmp_path: Path) -> None:
    lead, texts, tables = section(tmp_path, {"worst": {"q1": {"d4": 1.0}}, "better": OTHER, "last": OTHER})
    assert lead.startswith("Queries where last gained and lost most nDCG@1 against better;")
    assert (texts, tables) == (["No query differs."], [])
