"""Look-ups of earlier phases: stretches read whole and by shares; known positives, judged relevant, pair or not."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.filtering.false_negatives import pair_keys
from pipelines.jobs.lookups import add_stretches, read_stretch
from pipelines.jobs.pairs import Pairs
from pipelines.pairs.pairs import read_positives
from raytriever.artifacts.artifact import Artifact, ShardWriter
from raytriever.artifacts.storage import Folder
from raytriever.stages.stage import Shard
from tests.unit.pipelines.jobs.made_up import made_by, store


def stretches(folder: Path, sizes: list[list[int]]) -> list[str]:
    """A shard for each list of sizes, with a stretch of each; items are numbered through, their negatives below."""
    names, first = [f"part-{number}" for number in range(len(sizes))], 0
    for name, own in zip(names, sizes, strict=True):
        items = np.arange(first, first + sum(own))
        scratch = folder / "scratch" / name
        writer = ShardWriter(Folder(str(folder / "out")), name, scratch)
        add_stretches(writer, Shard(name), [items, -items], np.cumsum([0, *own]))
        writer.commit(0)
        first += sum(own)
    return names


@pytest.mark.parametrize("of", [1, 3, 7])
def test_shares_are_disjoint_and_complete(tmp_path: Path, of: int) -> None:
    names = stretches(tmp_path, [[5, 0, 11], [0, 3, 20], [1, 0, 0], [64, 2, 9]])
    for number, total in enumerate((70, 5, 40)):
        whole = read_stretch(str(tmp_path / "out"), names, number)
        assert whole.shape == (2, total)
        assert (whole[1] == -whole[0]).all()
        shares = [read_stretch(str(tmp_path / "out"), names, number, share, of) for share in range(of)]
        assert sorted(np.concatenate(shares, axis=1)[0].tolist()) == sorted(whole[0].tolist())


@pytest.mark.parametrize(("shards", "items", "of"), [(10, 64, 10), (7, 128, 7), (12, 64, 4), (5, 1, 5)])
def test_shares_of_shards_with_as_many_items_are_equal(tmp_path: Path, shards: int, items: int, of: int) -> None:
    """Else each would be short of a whole batch by about half of one."""
    names = stretches(tmp_path, [[items]] * shards)
    shares = [read_stretch(str(tmp_path / "out"), names, 0, share, of).shape[1] for share in range(of)]
    assert shares == [shards * items // of] * of


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
