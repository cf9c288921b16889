"""Known positives of pairs: whatever is judged relevant, pair or not."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.filtering.false_negatives import pair_keys
from pipelines.jobs.pairs import Pairs
from pipelines.pairs.pairs import read_positives
from raytriever.artifacts.artifact import Artifact
from tests.unit.pipelines.jobs.made_up import made_by, store

GRADES = {("q0", "d0"): 2, ("q0", "d1"): 1, ("q1", "d1"): 0, ("q1", "d2"): -1, ("q2", "d2"): 2}


def known_positives(folder: Path, grades: dict[tuple[str, str], int], minimum_relevance: int) -> Any:
    documents = [{"id": f"d{number}", "title": "", "text": "x", "domain": ""} for number in range(3)]
    judged = [(*pair, grade, "train") for pair, grade in grades.items()]
    queries = [(f"q{number}", f"query {number}", "", []) for number in range(3)]
    collection = store(folder / "collection", [pa.Table.from_pylist(documents)], queries, judged)
    settings = {"collection": collection, "minimum_relevance": minimum_relevance, "output": str(folder / "pairs")}
    pairs = Artifact(made_by(Pairs, settings))
    return read_positives(pairs)


@pytest.mark.parametrize(("minimum_relevance", "least"), [(2, 1), (1, 1), (0, 0), (-1, -1)])
def test_every_relevant_grade_counts(tmp_path: Path, minimum_relevance: int, least: int) -> None:
    judged = [(int(q[1]), int(d[1])) for (q, d), grade in GRADES.items() if grade >= least]
    query_rows, document_rows = np.array(judged, dtype=np.int64).T
    expected = np.unique(pair_keys(query_rows=query_rows, document_rows=document_rows))
    np.testing.assert_array_equal(known_positives(tmp_path, GRADES, minimum_relevance), expected)


def test_pairs_of_judgments_without_a_positive_grade(tmp_path: Path) -> None:
    grades = {pair: min(grade, 0) for pair, grade in GRADES.items()}
    assert len(known_positives(tmp_path, grades, 0)) == 4
