"""Known positives: what the data judges relevant, whether or not it became a pair."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.filtering.false_negatives import pair_keys
from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from pipelines.pairs.pairs import read_positives
from raytriever.artifacts.artifact import Artifact
from retrieval.collections.collection import StoredCollection
from tests.unit.small_run import make

GRADES = {("q0", "d0"): 2, ("q0", "d1"): 1, ("q1", "d1"): 0, ("q1", "d2"): -1, ("q2", "d2"): 2}


def collection(folder: Path, grades: dict[tuple[str, str], int]) -> str:
    source = folder / "source"
    (source / "qrels").mkdir(parents=True)
    for name, letter in (("corpus", "d"), ("queries", "q")):
        rows = [json.dumps({"_id": f"{letter}{number}", "text": f"{letter} {number}"}) for number in range(3)]
        (source / f"{name}.jsonl").write_text("\n".join(rows))
    rows = [f"{query}\t{document}\t{grade}" for (query, document), grade in grades.items()]
    (source / "qrels" / "train.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]))
    return make(Collect(CollectConfig(source=BeirFolder(path=str(source)), output=str(folder / "collection"))))


def known_positives(folder: Path, grades: dict[tuple[str, str], int], minimum_relevance: int) -> Any:
    stored = StoredCollection(collection(folder, grades))
    settings = {"collection": stored.uri, "minimum_relevance": minimum_relevance, "output": str(folder / "pairs")}
    pairs = Artifact(make(Pairs(PairsConfig.model_validate(settings))))
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
