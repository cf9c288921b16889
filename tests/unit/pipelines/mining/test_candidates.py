"""Lists are put together as a plain loop would and read back as written; hard negatives out of judgments."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.mining import candidates as mining
from pipelines.mining.rules import UNJUDGED, JudgedPairs, Positives
from raytriever.artifacts.artifact import Artifact, Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.errors import UserError
from retrieval.collections.collection import ParquetRows
from tests.unit.retrieval.mined_lists import MinedList, mined_lists
from tests.unit.small_run import make_artifact

DOCUMENTS = 12
Entry = tuple[int, int, int]  # row, rank, relevance


def entries(lists: mining.CandidateLists) -> list[list[Entry]]:
    columns = [lists.rows.tolist(), lists.ranks.tolist(), lists.relevance.tolist()]
    flat = list(zip(*columns, strict=True))
    return [flat[start:stop] for start, stop in pairwise(lists.offsets.tolist())]


@settings(max_examples=300)
@given(data=st.data())
def test_lists_are_put_together_as_by_a_loop(data: st.DataObject) -> None:
    queries, k = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 6))
    rows, chosen, relevance = (np.zeros((queries, k), dtype) for dtype in (np.int64, bool, np.int32))
    negatives: list[list[Entry]] = []
    positives: list[list[Entry]] = []
    for query in range(queries):
        rows[query] = data.draw(st.permutations(range(DOCUMENTS)))[:k]
        grades = data.draw(st.dictionaries(st.integers(0, DOCUMENTS - 1), st.integers(-1, 3), max_size=6))
        relevance[query] = [grades.get(row, UNJUDGED) for row in rows[query].tolist()]
        ranked = {row: number + 1 for number, row in enumerate(rows[query].tolist())}
        chosen[query] = [grades.get(row, 0) < 1 and data.draw(st.booleans()) for row in ranked]
        taken = [row for row, is_chosen in zip(ranked, chosen[query], strict=True) if is_chosen]
        negatives.append([(row, ranked[row], grades.get(row, UNJUDGED)) for row in taken])
        positives.append([(row, ranked.get(row, 0), grade) for row, grade in sorted(grades.items()) if grade >= 1])
    scores = (1.0 / (1 + np.broadcast_to(np.arange(k), rows.shape))).astype(np.float32)
    found = mining.negative_lists(chosen, rows, scores, relevance)
    assert entries(found) == negatives
    assert found.ranks.dtype == np.int32
    np.testing.assert_array_equal(found.scores, (1 / found.ranks).astype(np.float32))

    flat = [(query, *entry) for query, of_query in enumerate(positives) for entry in of_query]
    columns = np.array(flat, np.int64).reshape(-1, 4).T
    pairs = JudgedPairs(columns[0], columns[1], columns[3].astype(np.int32))
    known = np.where(columns[2] > 0, 1 / np.maximum(columns[2], 1), np.nan).astype(np.float32)
    given_positives = Positives(pairs, known, columns[2].astype(np.int32), columns[1].astype(np.uint64))
    labelled = mining.labelled_lists(found, given_positives)
    expected = []
    for of_query, extra in zip(negatives, positives, strict=True):
        most_relevant_first = sorted(extra, key=lambda entry: (-entry[2], entry[0]))
        expected.append(most_relevant_first + of_query)
    assert entries(labelled) == expected
    with np.errstate(divide="ignore"):
        expected_scores = np.where(labelled.ranks > 0, (1 / labelled.ranks).astype(np.float32), np.nan)
    np.testing.assert_array_equal(labelled.scores, expected_scores)


def lists_of(lengths: list[int], generator: np.random.Generator) -> mining.CandidateLists:
    total = sum(lengths)
    return mining.CandidateLists(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        generator.integers(DOCUMENTS, size=total),
        np.where(generator.random(total) < 0.3, np.nan, generator.random(total)).astype(np.float32),
        20_000 * generator.integers(4, size=total, dtype=np.int32),
        generator.choice(np.array([UNJUDGED, -(2**15), 0, 1, 40_000], np.int32), size=total),
    )


def write(folder: Path, shards: list[mining.CandidateLists]) -> mining.StoredCandidates:
    """An artifact of these lists; query number n has id qn and row 2²⁹ n, document number n id dn."""
    ids = pa.table({"id": [f"d{number}" for number in range(DOCUMENTS)]})
    source = make_artifact(folder / "documents", "made up", {}, {}, {"all.parquet": ids}, DOCUMENTS)
    documents = ParquetRows(Artifact(source), ["all.parquet"])
    config = {"form": "labelled_lists", "rules": {"minimum_relevance": 1}}
    writer = ArtifactWriter(str(folder / "candidates"), Derivation("candidates", "mine", 1, config, {}))
    writer.begin()
    records, first = [], 0
    for number, lists in enumerate(shards):
        queries = np.arange(first, first + len(lists.offsets) - 1)
        first += len(queries)
        with writer.folder.scratch() as scratch:
            shard = ShardWriter(writer.folder, f"{number:05d}", scratch)
            name = f"candidates/{number:05d}.parquet"
            mining.write_lists(shard.path(name), [f"q{query}" for query in queries], queries << 29, lists, documents)
            shard.add(name)
            records.append(shard.commit(len(queries)))
    return mining.StoredCandidates(writer.finish(records, {}, {}).uri)


SHARDS = [[3, 0, 2, 5], [], [1], [0, 4, 4]]


@pytest.fixture
def shards() -> list[mining.CandidateLists]:
    generator = np.random.default_rng(0)
    return [lists_of(lengths, generator) for lengths in SHARDS]


@pytest.fixture
def stored(
    tmp_path: Path, shards: list[mining.CandidateLists], monkeypatch: pytest.MonkeyPatch
) -> mining.StoredCandidates:
    monkeypatch.setattr("pipelines.mining.candidates._CANDIDATES_OF_A_ROW_GROUP", 8)
    return write(tmp_path, shards)


def expected_lists(shards: list[mining.CandidateLists]) -> list[MinedList]:
    expected: list[MinedList] = []
    for lists in shards:
        for start, stop in pairwise(lists.offsets.tolist()):
            rows, scores, ranks, grades = (
                column[start:stop].tolist() for column in (lists.rows, lists.scores, lists.ranks, lists.relevance)
            )
            found = [
                [f"d{row}" for row in rows], rows, [None if np.isnan(score) else score for score in scores],
                [rank or None for rank in ranks], [None if grade == -(2**31) else grade for grade in grades],
            ]  # fmt: skip
            expected.append(MinedList(f"q{len(expected)}", len(expected) << 29, *found))
    return expected


def test_what_is_written_is_read_and_equal_lists_are_equal_bytes(stored, shards, tmp_path) -> None:
    assert len(stored) == 8
    assert list(mined_lists(stored)) == expected_lists(shards)
    for table in stored.tables():
        assert table.schema.equals(mining.SCHEMA)
        assert len(table["document_ids"].combine_chunks().flatten()) <= 8
    one, two = (write(tmp_path / name, shards) for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    longer = [lists_of([40_000], np.random.default_rng(1))]
    assert list(mined_lists(write(tmp_path / "longer", longer))) == expected_lists(longer)
    stored_file = pq.ParquetFile(f"{one.uri}/{one.names('candidates/')[0]}")
    assert stored_file.metadata.row_group(0).column(0).compression == "ZSTD"
    other = make_artifact(tmp_path / "run", "run", {}, {}, {"run.trec": ""}, 0)
    with pytest.raises(UserError, match="of kind 'run', one of kind 'candidates' is needed"):
        mining.StoredCandidates(other)
