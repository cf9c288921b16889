"""Teacher scores in stored batches: where they come from, what they are drawn by, and what is refused."""

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.batches import LAYOUTS, BatchReader
from pipelines.jobs import filter_lookups
from pipelines.jobs.export import Export
from pipelines.jobs.filter import Filter
from pipelines.jobs.mix import Mix
from pipelines.mining.candidates import SCHEMA as CANDIDATES_SCHEMA
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS, StoredCollection
from tests.unit.pipelines.jobs.batch_inputs import artifact, contents, make_candidates, make_packing, make_pairs
from tests.unit.pipelines.jobs.made_up import made_by, store
from tests.unit.pipelines.jobs.test_mine import make_run

QUERIES, DOCUMENTS_, SIZE, EPOCHS = 12, 40, 4, 3
LISTED = 9


class World:
    """Artifacts, and the teacher's score of every pair."""

    def __init__(self, folder: Path) -> None:
        self.folder, random = folder, np.random.default_rng(3)
        documents = [{"id": f"d{row}", "title": "", "text": f"text {row}", "domain": ""} for row in range(DOCUMENTS_)]
        pairs = [(query, int(random.integers(DOCUMENTS_))) for query in range(QUERIES)]
        judged = [(f"q{query}", f"d{document}", 1, "train") for query, document in pairs]
        queries = [(f"q{row}", f"query {row}", "", []) for row in range(QUERIES)]
        collection = store(folder / "c", [pa.Table.from_pylist(documents, DOCUMENTS)], queries, judged)
        self.positives = dict(pairs)
        self.lists = {
            query: [row for row in random.permutation(DOCUMENTS_).tolist() if row != positive][:LISTED]
            for query, positive in pairs
        }
        stored_pairs = make_pairs(folder / "p", collection, pairs)
        epochs = [random.permutation(QUERIES).reshape(-1, SIZE) for _ in range(EPOCHS)]
        candidates = {query: [(row, None) for row in rows] for query, rows in self.lists.items()}
        self.inputs = {
            "collection": collection, "pairs": stored_pairs,
            "packing": make_packing(folder / "k", stored_pairs, epochs),
            "negatives": make_candidates(folder / "n", collection, candidates),
        }  # fmt: skip
        self.scores = random.gamma(2, 2, (QUERIES, DOCUMENTS_)).astype(np.float32)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("scores"))


def run_file(world: World, path: Path, left_out: set[tuple[int, int]] = frozenset(), more: str = "") -> str:
    lines = [
        f"q{query} Q0 d{row} 1 {float(world.scores[query, row])!r} teacher\n"
        for query in range(QUERIES)
        for row in range(DOCUMENTS_)
        if (query, row) not in left_out
    ]
    path.write_text("".join(lines) + more)
    return str(path)


def run(world: World, output: Path, **settings: Any) -> BatchReader:
    values = {**world.inputs, "output": str(output), "batches_per_shard": 2, **settings}
    values["false_negatives"] = {"surrogate_score": False}
    return BatchReader(made_by(Filter, values))


@pytest.fixture(scope="module")
def teacher(world: World) -> str:
    """A run file with a score of every pair."""
    return run_file(world, world.folder / "teacher.trec")


@pytest.fixture(scope="module")
def scored(world: World, teacher: str) -> BatchReader:
    return run(world, world.folder / "scored", teacher_scores=teacher)


def rows_of(reader: BatchReader, epoch: int) -> list[dict[str, Any]]:
    return [row for index in range(reader.number_of_batches(epoch)) for row in reader.read(epoch, index).to_pylist()]


def row_of(name: str) -> int:
    return int(name[1:])


def test_scores_of_a_run_file_are_stored_with_each_row(world: World, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(filter_lookups, "_LINES_AT_ONCE", 7)
    # a teacher may have scored what this collection doesn't have, and said the same thing twice
    more = f"q0 Q0 unknown 1 3.5 t\nunknown Q0 d0 1 3.5 t\n\nq0 Q0 d0 1 {float(world.scores[0, 0])!r} t\n"
    path = run_file(world, tmp_path / "teacher.trec", more=more)
    reader = run(world, tmp_path / "b", teacher_scores=path, negatives_per_example=3)
    assert reader.columns == tuple(LAYOUTS["pairs"].schema({"teacher_scores": True}).names)
    assert reader.artifact.manifest["facts"]["teacher_scores"] is True
    assert reader.read(0, 0).schema.field("positive_score").type == pa.float32()
    for epoch in range(EPOCHS):
        for row in rows_of(reader, epoch):
            of_query = world.scores[row_of(row["query_id"])]
            assert row["positive_score"] == of_query[row_of(row["document_id"])]
            assert row["hard_negative_scores"] == [of_query[row_of(name)] for name in row["hard_negative_ids"]]
            assert len(row["hard_negative_scores"]) == 3


class Ids(StoredCollection):
    """A collection of which only the ids are there."""

    def __init__(self, queries: Any, documents: Any) -> None:
        self._ids = {"queries": pa.table({"id": queries}), "documents": pa.table({"id": documents})}

    def count(self, part: Any) -> int:
        return len(self._ids[part])

    def rows_of(self, part: Any) -> Any:
        return SimpleNamespace(tables=lambda _: [self._ids[part]])


def test_ids_of_more_than_two_gigabytes(tmp_path: Path) -> None:
    letters = [letter * (1 << 20) for letter in "abcdefgh"]
    others = pa.array([letter.upper() for letter in letters])
    long = pa.chunked_array([pa.array(letters), *[others] * 299])  # 2.4 GiB, of which 16 MiB exist
    collection = Ids(["q0"], long)
    path = tmp_path / "teacher.trec"
    path.write_text(f"q0 Q0 {letters[3]} 1 2.5 t\nq0 Q0 {letters[3][1:]} 2 1.5 t\n")
    pairs = [[column.tolist() for column in block] for block in filter_lookups._of_run_file(path, collection)]
    assert pairs == [[[0], [3], [2.5]]]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_ascii_white_space_alone_separates_columns(ending: str, tmp_path: Path) -> None:
    """As in every other reading of a run: an id may hold a no-break space."""
    collection = Ids(["q\u00a00"], ["d", "d\u20031"])
    path, lines = tmp_path / f"teacher.trec{ending}", "\ufeffq\u00a00\tQ0  d\u20031 1 2.5 t\r\n\nq\u00a00 Q0 d 2 1 t"
    path.write_bytes(gzip.compress(lines.encode()) if ending else lines.encode())
    pairs = filter_lookups._of_run_file(path, collection)
    assert [np.concatenate(column).tolist() for column in zip(*pairs, strict=True)] == [[0, 0], [1, 0], [2.5, 1.0]]


def test_candidates_and_runs_say_the_same(world: World, scored: BatchReader, tmp_path: Path) -> None:
    for name, made in (("candidates", labelled), ("run", stored_run)):
        found = run(world, tmp_path / name, teacher_scores=made(world, tmp_path / f"{name}-scores"))
        assert [rows_of(found, epoch) for epoch in range(EPOCHS)] == [rows_of(scored, e) for e in range(EPOCHS)]


def labelled(world: World, folder: Path) -> str:
    """All documents of each query with the teacher's scores, but for one that no batch needs."""
    unlisted = next(row for row in range(DOCUMENTS_) if row not in world.lists[0] and row != world.positives[0])
    documents = range(DOCUMENTS_)
    common = {"document_ids": [f"d{row}" for row in documents], "document_rows": list(documents),
              "ranks": [None] * DOCUMENTS_, "relevance": [None] * DOCUMENTS_}  # fmt: skip
    rows = []
    for query, scores in enumerate(world.scores.tolist()):
        known = [None if (query, row) == (0, unlisted) else score for row, score in enumerate(scores)]
        rows.append({"query_id": f"q{query}", "query_row": query, "scores": known, **common})
    config = {"form": "labelled_lists", "rules": {"minimum_relevance": 1}}
    inputs = {"collection": Artifact(world.inputs["collection"]).fingerprint}
    files = {"candidates/00000.parquet": pa.Table.from_pylist(rows, CANDIDATES_SCHEMA)}
    return artifact(folder, "candidates", config, inputs, [{"files": files, "rows": QUERIES}])


def stored_run(world: World, folder: Path) -> str:
    order = np.argsort(-world.scores, axis=1, kind="stable")
    scores = np.take_along_axis(world.scores, order, axis=1)
    documents = [{"_id": f"d{row}"} for row in range(DOCUMENTS_)]
    return make_run(
        folder, world.inputs["collection"], [f"q{query}" for query in range(QUERIES)], documents, order, scores
    )


def test_negatives_drawn_by_balanced_margins(world: World, teacher: str, tmp_path: Path) -> None:
    asked = {"teacher_scores": teacher, "choose_negatives": "balanced_margins"}
    reader = run(world, tmp_path / "b", **asked)
    again, other = (run(world, tmp_path / str(seed), **asked, seed=seed) for seed in (0, 1))
    assert contents(reader.uri) == contents(again.uri)
    assert [rows_of(reader, e) for e in range(EPOCHS)] != [rows_of(other, e) for e in range(EPOCHS)]
    drawn: dict[int, set[int]] = {}
    for epoch in range(EPOCHS):
        for row in rows_of(reader, epoch):
            query, negative = row_of(row["query_id"]), row_of(row["hard_negative_ids"][0])
            assert negative in world.lists[query]
            drawn.setdefault(query, set()).add(negative)
    assert max(map(len, drawn.values())) > 1  # every epoch draws anew


def test_what_the_teacher_did_not_score_is_named(world: World, tmp_path: Path) -> None:
    listed = run_file(world, tmp_path / "teacher.trec", left_out={(5, row) for row in world.lists[5]})
    positives = {(q, row) for q in range(QUERIES) for row in range(DOCUMENTS_) if row not in world.lists[q]}
    without = run_file(world, tmp_path / "positives.trec", left_out=positives)
    for number, (teacher, choose, message) in enumerate([
        (listed, "sample", r"The teacher has no score for hard negative 'd\d+' of query 'q5'"),
        (listed, "balanced_margins", f"no score for {LISTED} of its document and {LISTED} hard negatives"),
        (without, "sample", r"The teacher has no score for document 'd\d+' of query 'q\d+'"),
    ]):  # fmt: skip
        with pytest.raises(UserError, match=message):
            run(world, tmp_path / f"{number}", teacher_scores=teacher, choose_negatives=choose)


@pytest.mark.parametrize(("line", "message"), [
    ("q0 Q0 d1 1 2.0\n", r"line 481 has 5 columns; 6 are needed"),
    ("q0 Q0 d1 1 nan t\n", r"line 481: column 5 \(score\) is 'nan', no finite number"),
    ("q0 Q0 d1 1 high t\n", r"line 481: column 5 \(score\) is 'high'"),
    ("q0 Q0 d1 1 -77 t\n", r"gives query 'q0' and document 'd1' two different scores"),
])  # fmt: skip
def test_a_damaged_run_file_is_refused(world: World, tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(world, tmp_path / "b", teacher_scores=run_file(world, tmp_path / "teacher.trec", more=line))


def test_what_does_not_fit_is_refused(world: World, teacher: str, tmp_path: Path) -> None:
    strangers = tmp_path / "strangers.trec"
    strangers.write_text("a Q0 b 1 2.0 t\n")
    collection, documents = world.inputs["collection"], [{"_id": f"d{row}"} for row in range(DOCUMENTS_)]
    found = ["q0"], documents, np.array([[1, 2]]), np.array([[2, 1]], np.float32)
    asked_elsewhere = make_run(tmp_path / "r", collection, *found, queries="0" * 64)
    other = store(tmp_path / "o", [DOCUMENTS.empty_table()], [("q0", "?", "", [])], [])
    unmined = make_candidates(tmp_path / "n", collection, {q: [(r, None) for r in world.lists[q]] for q in range(1, 9)})
    for settings, message in [
        (
            {"teacher_scores": teacher, "negatives": unmined, "too_few_negatives": "repeat"},
            r"have fewer than 1 hard negatives, the first of query 'q0' .*\. Mine some for each query, or",
        ),
        ({"choose_negatives": "balanced_margins"}, "needs 'teacher_scores'"),
        ({"teacher_scores": teacher, "negatives": None}, "give 'negatives' too"),
        ({"teacher_scores": teacher, "too_few_negatives": "random"}, "without a teacher's score: set refuse or repeat"),
        ({"teacher_scores": str(tmp_path / "none")}, "neither an artifact .* nor a run file"),
        ({"teacher_scores": world.inputs["packing"]}, r"which holds packing\. Scores come from"),
        ({"teacher_scores": asked_elsewhere}, "answers the queries of another collection"),
        ({"teacher_scores": make_run(tmp_path / "f", other, *found)}, "don't come from the same collection"),
        (
            {"teacher_scores": str(strangers)},
            r"no document of .* for any of its queries\. Are ids written in the same way",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            run(world, tmp_path / "b", **settings)


def test_other_scores_are_another_artifact(world: World, tmp_path: Path) -> None:
    """A run file counts by its bytes: the same batches are reused, others are not taken for them."""
    path = run_file(world, tmp_path / "teacher.trec")
    fingerprint = run(world, tmp_path / "b", teacher_scores=path).fingerprint
    assert run(world, tmp_path / "b", teacher_scores=path).fingerprint == fingerprint
    run_file(world, tmp_path / "teacher.trec", more="unknown Q0 d0 1 3.5 t\n")
    with pytest.raises(UserError, match="teacher_scores"):
        run(world, tmp_path / "b", teacher_scores=path)


def test_scores_survive_mixing_and_exporting(world: World, scored: BatchReader, tmp_path: Path) -> None:
    plain = run(world, tmp_path / "p")
    assert plain.columns == tuple(LAYOUTS["pairs"].schema().names)
    mixed = {"sources": {"one": scored.uri, "two": scored.uri}, "output": str(tmp_path / "m")}
    reader = BatchReader(made_by(Mix, mixed))
    assert reader.columns == scored.columns
    twice, once = ([row["positive_score"] for row in rows_of(each, 0)] for each in (reader, scored))
    assert sorted(twice) == sorted(2 * once)
    unlike = {"sources": {"one": plain.uri, "two": scored.uri}, "output": str(tmp_path / "u")}
    with pytest.raises(UserError, match="has batches of columns query_id"):
        made_by(Mix, unlike)
    published = {"batches": scored.uri, "format": "hugging_face", "output": str(tmp_path / "h")}
    made_by(Export, published)
    table = pq.read_table(tmp_path / "h" / "data" / "epoch-00000" / "batches-00000.parquet")
    first = scored.read(0, table["batch"][0].as_py())
    for name in ("positive_score", "hard_negative_scores"):
        assert table[name].to_pylist()[:SIZE] == first[name].to_pylist()
    assert "positive_score" in (tmp_path / "h" / "README.md").read_text()
