"""The job on a small collection against a literal filter, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.batches import BatchReader
from pipelines.filtering import pair_batches
from pipelines.jobs import lookups
from pipelines.jobs.filter import Filter, FilterConfig
from pipelines.jobs.filter_lookups import make_negatives, open_negatives
from pipelines.mining.candidates import StoredCandidates
from raytriever.artifacts.artifact import Artifact, ShardWriter
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.relations import open_relations
from raytriever.settings.configuration import validate
from raytriever.stages.stage import StageConfig
from retrieval.collections.collection import DOCUMENTS, StoredCollection
from tests.unit.pipelines.jobs.batch_inputs import (
    artifact,
    contents,
    make_candidates,
    make_packing,
    make_pairs,
    make_vectors,
)
from tests.unit.pipelines.jobs.made_up import made_by, store
from tests.unit.pipelines.jobs.test_mine import key

QUERIES, DOCUMENTS_, SIZE, BATCHES, EPOCHS = 30, 50, 4, 6, 2


class World:
    """Artifacts, and the same as Python values."""

    def __init__(self, folder: Path) -> None:
        self.folder, random = folder, np.random.default_rng(5)
        texts = [f"text {random.integers(15)}" for _ in range(DOCUMENTS_)]
        self.documents = [
            {"id": f"d{row}", "title": f"title {row % 3}" if row % 2 else "", "text": text, "domain": ""}
            for row, text in enumerate(texts)
        ]
        self.queries = [f"query {random.integers(24)}?" for _ in range(QUERIES)]
        known = {(int(random.integers(QUERIES)), int(random.integers(DOCUMENTS_))) for _ in range(40)}
        self.pairs = sorted(known)
        judged = [(f"q{query}", f"d{document}", 1, "train") for query, document in self.pairs]
        judged += [
            (f"q{query}", f"d{document}", -(document % 2), "judged")
            for query in range(QUERIES)
            for document in random.permutation(DOCUMENTS_)[: 2 + query % 3].tolist()
            if (query, document) not in known
        ]
        tables = [pa.Table.from_pylist(self.documents[at : at + 17], DOCUMENTS) for at in range(0, DOCUMENTS_, 17)]
        asked = [(f"q{row}", text, "", []) for row, text in enumerate(self.queries)]
        collection = store(folder / "c", tables, asked, judged)
        self.lists: dict[int, list[tuple[int, int | None]]] = {}
        for query in random.permutation(QUERIES).tolist():
            rows = random.permutation(DOCUMENTS_)[: 3 + query % 4].tolist()
            self.lists[query] = [(row, 1 if (query, row) in known else [None, 0][row % 2]) for row in rows]
        vectors = [random.integers(-2, 3, (number, 4)).astype(np.float16) for number in (QUERIES, DOCUMENTS_)]
        self.scores = vectors[0].astype(float) @ vectors[1].astype(float).T
        pairs = make_pairs(folder / "p", collection, self.pairs)
        number = BATCHES * SIZE
        self.epochs = [random.permutation(len(known))[:number].reshape(BATCHES, SIZE) for _ in range(EPOCHS)]
        self.inputs = {
            "collection": collection, "pairs": pairs, "packing": make_packing(folder / "k", pairs, self.epochs),
            "vectors": make_vectors(folder / "v", collection, *vectors),
        }  # fmt: skip
        self.candidates = make_candidates(folder / "n", collection, self.lists, "labelled_lists")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("filter"))


def run(world: World, output: Path, **settings: Any) -> BatchReader:
    return BatchReader(made_by(Filter, {**world.inputs, "output": str(output), "batches_per_shard": 4, **settings}))


class Literal:
    """Which rule leaves what out, said plainly."""

    def __init__(self, world: World, rows: list[dict[str, Any]], pairs: list[int]) -> None:
        self.world = world
        self.queries = [world.pairs[pair][0] for pair in pairs]
        hard = [int(name[1:]) for row in rows for name in row["hard_negative_ids"]]
        self.columns = [world.pairs[pair][1] for pair in pairs] + hard
        self.owners = [*range(len(rows)), *(at for at, row in enumerate(rows) for _ in row["hard_negatives"])]
        self.texts = [key(row["document"]) for row in rows] + [key(t) for row in rows for t in row["hard_negatives"]]
        self.query_texts = [key(row["query"]) for row in rows]

    def same_answers(self, i: int) -> list[int]:
        rows = zip(self.queries, self.query_texts, strict=True)
        twins = [k for k, (row, text) in enumerate(rows) if row == self.queries[i] or text == self.query_texts[i]]
        return twins if len(twins) > 1 else []

    def rule(self, i: int, j: int) -> str | None:
        scores = self.world.scores[self.queries[i]]
        if i == j:
            return None
        if self.columns[i] == self.columns[j]:
            return "same document"
        if self.texts[i] == self.texts[j]:
            return "same text"
        if any(self.columns[k] == self.columns[j] or self.texts[k] == self.texts[j] for k in self.same_answers(i)):
            return "same query"
        if (self.queries[i], self.columns[j]) in self.world.pairs:
            return "known positive"
        judged = self.owners[j] != i
        return "surrogate score" if judged and scores[self.columns[j]] >= scores[self.columns[i]] else None


@pytest.mark.parametrize("settings", [
    {},
    {"negatives": "mined", "negatives_per_example": 2},
    {"negatives": "mined", "with_title": False},
    {"judged_negatives": "judged", "negatives_per_example": 3, "too_few_negatives": "repeat"},
], ids=["plain", "mined", "without titles", "judged"])  # fmt: skip
def test_batches_are_those_of_a_literal_filter(world: World, tmp_path, settings, monkeypatch) -> None:
    monkeypatch.setattr(pair_batches, "_EXAMPLES_AT_ONCE", 2 * SIZE)
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 20)
    if "negatives" in settings:
        settings = {**settings, "negatives": world.candidates}
    reader = run(world, tmp_path / "b", **settings)
    number = settings.get("negatives_per_example", 1) if len(settings) else 0
    with_title = settings.get("with_title", True)
    counts: dict[str, int] = {}
    for epoch in range(EPOCHS):
        assert reader.number_of_batches(epoch) == BATCHES
        for index, pairs in enumerate(world.epochs[epoch].tolist()):
            rows = reader.read(epoch, index).to_pylist()
            literal = Literal(world, rows, pairs)
            for place, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
                query, document = world.pairs[pair]
                assert (row["query_id"], row["query"]) == (f"q{query}", world.queries[query])
                assert row["document_id"] == f"d{document}"
                names, texts = (
                    [row["document_id"], *row["hard_negative_ids"]],
                    [row["document"], *row["hard_negatives"]],
                )
                for name, text in zip(names, texts, strict=True):
                    stored = world.documents[int(name[1:])]
                    assert text == (f"{stored['title']} {stored['text']}".strip() if with_title else stored["text"])
                assert len(row["hard_negative_ids"]) == number
                assert (row["domain"], row["cluster"]) == (f"its {document % 3}", -1)  # not the packing's
                found = [literal.rule(place, column) for column in range(len(literal.columns))]
                assert row["masked"] == [column for column, rule in enumerate(found) if rule]
                for rule in filter(None, found):
                    counts[rule] = counts.get(rule, 0) + 1
    stored_counts = reader.artifact.manifest["counts"]
    assert {rule: stored_counts[f"masked by {rule}"] for rule in counts} == counts
    assert len(counts) >= 4
    assert len(reader.artifact.names("epoch=")) == 2 * EPOCHS
    assert stored_counts["negatives"] == EPOCHS * BATCHES * SIZE * (SIZE + SIZE * number - 1)
    assert reader.artifact.manifest["facts"] == {"layout": "pairs", "negatives_per_example": number}


def drawn(reader: BatchReader, epoch: int) -> dict[tuple[str, str], list[str]]:
    rows = [row for index in range(BATCHES) for row in reader.read(epoch, index).to_pylist()]
    return {(row["query_id"], row["document_id"]): row["hard_negative_ids"] for row in rows}


def of_list(world: World, query: str) -> list[str]:
    return [f"d{row}" for row, grade in world.lists[int(query[1:])] if not grade]


def test_negatives_are_a_sample_of_each_epochs_own_or_the_first(world: World, tmp_path: Path) -> None:
    asked = {"negatives": world.candidates, "negatives_per_example": 2}
    sampled = run(world, tmp_path / "s", **asked)
    again = run(world, tmp_path / "t", **asked, seed=1)
    first = run(world, tmp_path / "f", **asked, choose_negatives="first")
    both = [drawn(sampled, epoch) for epoch in range(EPOCHS)]
    for epoch in range(EPOCHS):
        for (query, _), found in drawn(first, epoch).items():
            assert found == of_list(world, query)[:2]
        for (query, _), found in both[epoch].items():
            assert len(set(found)) == 2
            assert set(found) <= set(of_list(world, query))
        assert both[epoch] != drawn(again, epoch)
    assert sum(both[0][pair] != both[1][pair] for pair in both[0].keys() & both[1].keys()) > 5


@pytest.fixture(scope="module")
def mined(world: World) -> BatchReader:
    return run(world, world.folder / "mined", negatives=world.candidates)


def test_a_pair_draws_the_same_in_whatever_batch_it_is(world: World, mined: BatchReader, tmp_path: Path) -> None:
    turned = make_packing(tmp_path / "k", world.inputs["pairs"], [epoch[::-1, ::-1] for epoch in world.epochs])
    there = run(world, tmp_path / "b", negatives=world.candidates, packing=turned)
    for epoch in range(EPOCHS):
        assert drawn(mined, epoch) == drawn(there, epoch)


def test_too_few_negatives(world: World, tmp_path: Path) -> None:
    asked = {"negatives": world.candidates, "negatives_per_example": 5}
    packed = sorted({pair for epoch in world.epochs for pair in epoch.ravel().tolist()})
    lengths = {query: len(of_list(world, query)) for query in (f"q{world.pairs[pair][0]}" for pair in packed)}
    query = next(query for query, length in lengths.items() if length < 5)
    fewer = rf"packed pairs have fewer than 5 hard negatives, the first of query '{query}' \({lengths[query]}\)"
    with pytest.raises(UserError, match=fewer):
        run(world, tmp_path / "r", **asked)
    repeated = run(world, tmp_path / "f", **asked, too_few_negatives="repeat")
    at_random = run(world, tmp_path / "x", **asked, too_few_negatives="random")
    short = 0
    for epoch in range(EPOCHS):
        for (query, _), found in drawn(repeated, epoch).items():
            listed = of_list(world, query)
            short += max(0, 5 - len(listed))
            assert set(found) == set(listed) or len(listed) > 5
            assert max(found.count(name) for name in found) == -(-5 // min(len(listed), 5))
        for (query, _), found in drawn(at_random, epoch).items():
            listed = of_list(world, query)
            assert len(set(found)) == 5
            assert set(listed) <= set(found) or len(listed) > 5
            assert not {(int(query[1:]), int(name[1:])) for name in found} & set(world.pairs)
    assert repeated.artifact.manifest["counts"]["hard negatives repeated"] == short > 0
    assert at_random.artifact.manifest["counts"]["hard negatives drawn at random"] == short
    stage = Filter(validate(FilterConfig, world.inputs | asked | {"output": ""}, "filter"))
    rows = sum(epoch.size for epoch in world.epochs)
    for found, how in ((repeated, "repeated"), (at_random, "drawn at random")):
        assert stage.summary(found.artifact).endswith(f"masked, {short:,} of {5 * rows:,} hard negatives {how}")


def test_a_query_without_any_gets_random_ones_on_request(world: World, tmp_path: Path, logged: list[str]) -> None:
    query = world.pairs[int(world.epochs[0][0, 0])][0]
    lists = {row: found for row, found in world.lists.items() if row != query}
    negatives = make_candidates(tmp_path / "n", world.inputs["collection"], lists)
    with pytest.raises(UserError, match=rf"the first of query 'q{query}' \(0\)"):
        run(world, tmp_path / "r", negatives=negatives)
    reader = run(world, tmp_path / "b", negatives=negatives, too_few_negatives="repeat")
    assert reader.read(0, 0)["hard_negative_ids"][0].as_py()
    assert reader.artifact.manifest["counts"]["hard negatives drawn at random"] > 0
    nobody = make_candidates(tmp_path / "e", world.inputs["collection"], {query: []})
    with pytest.raises(UserError, match="No packed pair's query has a hard negative"):
        run(world, tmp_path / "q", negatives=nobody, too_few_negatives="repeat")
    drawn = run(world, tmp_path / "d", negatives=nobody, too_few_negatives="random")
    assert any("Warning: No packed pair's query has a hard negative." in line for line in logged)
    assert all(len(row) == 1 for row in drawn.read(0, 0)["hard_negative_ids"].to_pylist())
    with pytest.raises(UserError, match=r"Too few documents .* the collection has 50\. Give more, or lower neg"):
        run(world, tmp_path / "y", negatives=negatives, negatives_per_example=60, too_few_negatives="random")


def test_mined_and_judged_negatives_are_taken_in_turn(world: World, tmp_path: Path) -> None:
    asked = {"negatives_per_example": 3, "too_few_negatives": "random", "choose_negatives": "first"}
    mined, judged = {"negatives": world.candidates}, {"judged_negatives": "judged"}
    pools = [run(world, tmp_path / f"{n}", **asked, **given) for n, given in enumerate((mined, judged, mined | judged))]
    taken = 0
    for of_mined, of_judged, both in zip(*(reader.read(0, 0).to_pylist() for reader in pools), strict=True):
        first_two = [of_mined["hard_negative_ids"][0], of_judged["hard_negative_ids"][0]]
        taken += both["hard_negative_ids"][:2] == first_two
    assert taken > 1


def negatives_of(folder: Path, collection: str, mined: str | None = None, judged: str | None = None) -> list[list[int]]:
    """Of each query its hard negatives."""
    writer = ShardWriter(Folder(str(folder / "out")), "negatives", folder / "scratch")
    stored = StoredCandidates(mined) if mined else None
    with open_relations(StageConfig(output="out"), folder / "spill") as db:
        lengths = make_negatives(writer, db, StoredCollection(collection), stored, judged)
    writer.commit(0)
    found = [rows.tolist() for rows in open_negatives(str(folder / "out")).of(np.arange(len(lengths)))]
    assert [len(rows) for rows in found] == lengths.tolist()
    return found


def test_negatives_are_in_turn_or_in_the_order_of_their_source_each_once(tmp_path: Path) -> None:
    documents = [{"id": f"d{row}", "title": "", "text": f"text {row}", "domain": ""} for row in range(10)]
    judged = [("c", "d6", 0), ("a", "d1", 1), ("c", "d2", -1), ("b", "d4", 0), ("a", "d3", 2), ("c", "d8", 0)]
    queries = [(name, "a query", "", []) for name in "abcd"]
    rows = [(*row, "train") for row in judged] + [("d", "d4", 0, "test")]
    collection = store(tmp_path / "c", [pa.Table.from_pylist(documents, DOCUMENTS)], queries, rows)
    lists = {2: [(5, None), (9, 1), (6, 0), (7, None)], 3: [(1, 2)], 0: [(8, 0), (0, None)]}
    mined = make_candidates(tmp_path / "n", collection, lists, "labelled_lists")
    assert negatives_of(tmp_path / "mined", collection, mined) == [[8, 0], [], [5, 6, 7], []]
    assert negatives_of(tmp_path / "judged", collection, judged="train") == [[], [4], [6, 2, 8], []]
    assert negatives_of(tmp_path / "both", collection, mined, "train") == [[8, 0], [4], [5, 6, 2, 7, 8], []]


def test_bytes_do_not_depend_on_blocks_or_parts(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"negatives": world.candidates, "negatives_per_example": 2, "surrogate_scores": True}
    run(world, tmp_path / "a", **asked)
    monkeypatch.setattr(pair_batches, "_EXAMPLES_AT_ONCE", 1)
    monkeypatch.setattr(lookups, "ROWS_OF_A_LOOKUP", 1)
    run(world, tmp_path / "b", **asked)
    assert contents(str(tmp_path / "a")) == contents(str(tmp_path / "b"))


@pytest.mark.parametrize("judged", [True, False])
def test_surrogate_scores_are_of_all_documents_of_a_batch(world: World, tmp_path: Path, judged: bool) -> None:
    asked = {"negatives": world.candidates, "false_negatives": {"surrogate_score": judged}}
    made, without = run(world, tmp_path / "a", surrogate_scores=True, **asked), run(world, tmp_path / "b", **asked)
    assert made.columns == (*without.columns, "surrogate_scores")
    assert made.artifact.manifest["facts"] == without.artifact.manifest["facts"] | {"surrogate_scores": True}
    for epoch in range(EPOCHS):
        for number in range(BATCHES):
            rows = made.read(epoch, number)
            named = (rows[each].to_pylist() for each in ("query_id", "document_id"))
            places = np.ix_(*([int(name[1:]) for name in names] for names in named))
            assert rows["surrogate_scores"].to_pylist() == world.scores[places].tolist()
            assert rows.drop_columns("surrogate_scores") == without.read(epoch, number)


def test_surrogate_scores_are_rounded_once(world: World, tmp_path: Path) -> None:
    random, collection = np.random.default_rng(3), world.inputs["collection"]
    sides = [random.standard_normal((number, 96)).astype(np.float16) for number in (QUERIES, DOCUMENTS_)]
    vectors = make_vectors(tmp_path / "v", collection, *sides)
    expected = np.inner(*(side.astype(np.float64) for side in sides)).astype(np.float32)
    made = run(world, tmp_path / "a", surrogate_scores=True, vectors=vectors)
    for number in range(BATCHES):
        rows = made.read(0, number, ["query_id", "document_id", "surrogate_scores"])
        queries, documents, scores = (rows[name].to_pylist() for name in rows.column_names)
        places = np.ix_(*([int(name[1:]) for name in names] for names in (queries, documents)))
        assert scores == expected[places].tolist()
    sides[0][world.pairs[int(world.epochs[0][0, 0])][0]] = np.nan
    damaged = make_vectors(tmp_path / "d", collection, *sides)
    off = {"surrogate_score": False}
    with pytest.raises(UserError, match=r"holds a NaN or an infinity, so nothing can be scored with it"):
        run(world, tmp_path / "b", surrogate_scores=True, vectors=damaged, false_negatives=off)


def test_the_audit_counts_and_shows_what_each_rule_masked(world: World, mined: BatchReader) -> None:
    kept = {name.split("/")[0] for name in contents(mined.uri)}
    assert kept == {"audit.json", "audits", "epoch=00000", "epoch=00001", "manifest.json"}  # no lookup is left behind
    audit = mined.artifact.read_json("audit.json")
    counts = mined.artifact.manifest["counts"]
    assert audit["batches"] == counts["batches"] == EPOCHS * BATCHES
    assert audit["negatives"] == counts["negatives"]
    batches = [mined.read(epoch, number) for epoch in range(EPOCHS) for number in range(BATCHES)]
    masked = [len(row) for batch in batches for row in batch["masked"].to_pylist()]
    of_row = audit["negatives"] // len(masked)
    halves = sum(2 * row >= of_row for row in masked)
    assert audit["rows"] == {"all": len(masked), "with_half_masked": halves, "without_negatives": masked.count(of_row)}
    shown = 0
    for rule, found in audit["rules"].items():
        assert found["negatives"] == counts[f"masked by {rule}"]
        places = [(example["epoch"], example["batch"]) for example in found["examples"]]
        assert places == sorted(set(places))
        assert len(places) == min(10, found["batches"])
        for example in found["examples"]:
            shown += 1
            rows = mined.read(example["epoch"], example["batch"]).to_pylist()
            row, column = rows[example["row"]], example["column"]
            assert column in row["masked"]
            assert (row["query_id"], row["document_id"]) == (example["query_id"], example["positive_id"])
            names = [r["document_id"] for r in rows] + [name for r in rows for name in r["hard_negative_ids"]]
            texts = [r["document"] for r in rows] + [text for r in rows for text in r["hard_negatives"]]
            assert (names[column], texts[column]) == (example["document_id"], example["document"])
            scores = world.scores[int(row["query_id"][1:])]
            assert example["score"] == scores[int(example["document_id"][1:])]
            assert example["positive_score"] == scores[int(example["positive_id"][1:])]
            assert rule != "surrogate score" or example["score"] >= example["positive_score"]
    assert shown > 20


def test_examples_that_have_no_negative_left_are_told_of(world: World, mined: BatchReader, tmp_path) -> None:
    stage = Filter(validate(FilterConfig, world.inputs | {"output": ""}, "filter"))
    assert re.fullmatch(r"12 batches, [0-9.]+% of negatives masked", stage.summary(mined.artifact))
    assert not any(line.startswith("Warning") for line in stage.announce(mined.artifact))
    bare = run(world, tmp_path, false_negatives={"margin": 100.0}).artifact
    assert stage.summary(bare) == "12 batches, 100.00% of negatives masked, 48 of 48 examples without any left"
    assert stage.announce(bare)[-1].startswith("Warning: 100% of the negatives are masked, most by 'surrogate score',")


def test_without_vectors_the_other_rules_mask(world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'false_negatives\.surrogate_score' needs 'vectors'"):
        run(world, tmp_path / "r", vectors=None)
    asked: dict[str, Any] = {"with_title": False, "false_negatives": {"surrogate_score": False}}
    with pytest.raises(UserError, match=r"'surrogate_scores' needs 'vectors', whose scores it takes"):
        run(world, tmp_path / "r", vectors=None, surrogate_scores=True, **asked)
    reader = run(world, tmp_path / "b", vectors=None, **asked)
    counts = reader.artifact.manifest["counts"]
    assert counts["masked by surrogate score"] == 0
    assert counts["masked by same text"] > 0
    audit = json.loads((tmp_path / "b" / "audit.json").read_text())
    assert audit["rules"]["same text"]["examples"][0]["score"] is None
    run(world, tmp_path / "c", **asked)
    assert audit == json.loads((tmp_path / "c" / "audit.json").read_text())  # vectors that no rule asks for


def older_pairs(world: World, folder: Path) -> str:
    """As an earlier version made them: their known positives in files of another name."""
    pairs = Artifact(world.inputs["pairs"])
    files = {name: pq.read_table(pairs.path(name)) for name in pairs.names("pairs/")}
    files["positives/0.parquet"] = pa.table({"key": [1]})
    return artifact(folder / "older", "pairs", {}, pairs.manifest["inputs"], [{"files": files, "rows": pairs.rows}])


def test_what_does_not_fit_is_refused(world: World, tmp_path: Path) -> None:
    collection = world.inputs["collection"]
    zeros = np.zeros((QUERIES, 2, 4))
    several = make_vectors(tmp_path / "m", collection, zeros, np.zeros((DOCUMENTS_, 4)))
    documents = np.ones((DOCUMENTS_, 4))
    asked, hidden = world.pairs[int(world.epochs[0][2, 1])]
    documents[hidden, 2] = np.nan
    damaged = make_vectors(tmp_path / "v", collection, zeros[:, 0], documents)
    queries = zeros[:, 0].copy()
    queries[asked] = np.nan
    damaged_queries = make_vectors(tmp_path / "dq", collection, queries, np.ones((DOCUMENTS_, 4)))
    other = store(tmp_path / "o", [pa.Table.from_pylist(world.documents, DOCUMENTS)], [("q0", "?", "", [])], [])
    foreign = make_candidates(tmp_path / "w", other, {0: [(1, None)]})
    foreign_vectors = make_vectors(tmp_path / "fv", other, zeros[:1, 0], np.ones((DOCUMENTS_, 4)))
    other_pairs = make_pairs(tmp_path / "op", collection, world.pairs[1:])
    for number, (settings, message) in enumerate([
        ({"vectors": several}, "vectors for each of its queries, and one of each is needed"),
        ({"vectors": damaged_queries}, rf"The vector of query 'q{asked}' holds a NaN or an infinity"),
        ({"vectors": damaged}, rf"The vector of document 'd{hidden}' holds a NaN or an infinity"),
        ({"collection": other}, "don't come from the same collection"),
        ({"vectors": foreign_vectors}, "don't come from the same collection"),
        ({"pairs": other_pairs}, "don't come from the same pairs"),
        ({"negatives": foreign}, "don't come from the same collection"),
        ({"judged_negatives": "train"}, r"Split 'train' of .* judges no document with a relevance of 0 or less"),
        ({"judged_negatives": "dev"}, "no judgments of split 'dev'"),
        ({"pairs": older_pairs(world, tmp_path)}, r"no positives.npy because another version .* Run its recipe again"),
    ]):  # fmt: skip
        with pytest.raises(UserError, match=message):
            run(world, tmp_path / f"{number}", **settings)
    stage = Filter(validate(FilterConfig, world.inputs | {"judged_negatives": "dev", "output": ""}, "filter"))
    with pytest.raises(UserError, match="no judgments of split 'dev'"):
        stage.check_inputs({"collection"})
