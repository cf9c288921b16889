"""The stage that makes queries: the same bytes however it is cut into shards, and a collection like any other."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.jobs.pairs import Pairs
from pipelines.jobs.queries import Queries, QueriesConfig
from pipelines.pairs.pairs import read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from raytriever.stages.recipe_run import run_stage
from retrieval.collections.collection import DOCUMENTS
from retrieval.evaluation.conventions import CONVENTIONS
from retrieval.evaluation.measures import evaluate
from tests.unit.pipelines.jobs.made_up import made_by, store, stored_rows

THREADS = [
    ("beer-q1", "What is a citra hop?",
     "I was offered one. It was bitter.\n\nA hop with high alpha acids and citrus notes."),
    ("beer-q2", "When was the first beer brewed?", "As far as we know, when and where?\n\nNobody knows. Long ago."),
    ("beer-q3", "", "A post without a title. It has two sentences."),
    ("ai-q1", "Can a machine be bored?", "I wonder about that. Others do too."),
]  # fmt: skip
TITLES: dict[str, Any] = {"kind": "title"}
KINDS: list[dict[str, Any]] = [
    TITLES, {"kind": "headings", "minimum_words": 1}, {"kind": "crops"}
]  # fmt: skip
CODE = [
    (f"sea{number}.sh", "", f"# Opens all claws of lobster {number}.\nopen() {{\n  :\n}}\n" * 2) for number in range(3)
]


def collected(folder: Path, rows: list[tuple[str, str, str]] = THREADS) -> str:
    documents = [{"id": id_, "title": title, "text": text, "domain": id_[:2]} for id_, title, text in rows]
    return store(folder / "collection", [pa.Table.from_pylist(documents, DOCUMENTS)], [], [])


def chunked(folder: Path) -> str:
    """Threads cut at paragraphs, in two files of which the second begins within a thread."""
    rows = []
    for id_, title, text in THREADS:
        ends = [end + 2 for end in range(len(text)) if text.startswith("\n\n", end)]
        for number, (start, end) in enumerate(zip([0, *ends], [*ends, len(text)], strict=True)):
            bounds = {"source_id": id_, "number": number, "start": start, "end": end}
            texts = {"title": title, "text": text[start:end], "domain": id_[:2]}
            rows.append({"id": f"{id_}#{number}", **texts, **bounds})
    return store(folder / "chunks", [pa.Table.from_pylist(rows[:3]), pa.Table.from_pylist(rows[3:])], [], [])


def queries(folder: Path, collection: str, **values: Any) -> str:
    return made_by(Queries, {"collection": collection, "output": str(folder), **values})


def test_questions_of_threads_and_their_posts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = queries(tmp_path / "queries", collected(tmp_path), queries={"kind": "title"})
    with_title = [thread for thread in THREADS if thread[1]]
    assert stored_rows(uri) == (
        [(id_, "", text, id_[:2]) for id_, _, text in with_title],
        [(f"query:{id_}", title, id_[:2], []) for id_, title, _ in with_title],
        [(f"query:{id_}", id_, 1, "train") for id_, _, _ in with_title],
    )
    manifest = Artifact(uri).manifest
    assert manifest["dropped"] == {"documents without a title": 1}
    assert manifest["counts"] == {
        "documents": 3, "queries": 3, "judgments": 3, "source documents": 4, "queries of split train": 3,
        "judgments of split 'train'": 3,
    }  # fmt: skip
    pairs = Artifact(made_by(Pairs, {"collection": uri, "output": str(tmp_path / "pairs")}))
    found_pairs = [tuple(row.values()) for row in read_pairs(pairs, ["query_id", "domain"]).to_pylist()]
    assert found_pairs == [("query:beer-q1", "be"), ("query:beer-q2", "be"), ("query:ai-q1", "ai")]
    config = QueriesConfig(collection=str(tmp_path / "collection"), queries=TITLES, output=uri)  # type: ignore[arg-type]
    run_stage(Queries(config), None)  # type: ignore[arg-type]
    assert "reused, 3 queries and 3 documents out of 4" in capsys.readouterr().err


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings["kind"])
@pytest.mark.parametrize("source", [collected, chunked])
def test_shards_change_nothing(tmp_path: Path, settings: dict[str, Any], source: Any) -> None:
    collection = source(tmp_path)
    asked = {"queries": settings, "held_out": 0.5}
    sharded = [queries(tmp_path / f"{rows}", collection, rows_per_shard=rows, **asked) for rows in (1, 2, 100)]
    whole = stored_rows(sharded[-1])
    assert all(stored_rows(uri) == whole for uri in sharded)
    for rows in (whole.documents, whole.queries):
        assert len({row[0] for row in rows}) == len(rows) > 0
    assert [len(Artifact(uri).shards) for uri in sharded] == [4, 2 if source is collected else 3, 1]
    assert len({str(Artifact(uri).manifest["dropped"]) for uri in sharded}) == 1


def test_all_chunks_of_a_thread_answer_its_question(tmp_path: Path) -> None:
    uri = queries(tmp_path / "queries", chunked(tmp_path), queries=TITLES, rows_per_shard=1)
    assert [row[:2] for row in stored_rows(uri).judgments] == [
        ("query:beer-q1", "beer-q1#0"), ("query:beer-q1", "beer-q1#1"),
        ("query:beer-q2", "beer-q2#0"), ("query:beer-q2", "beer-q2#1"),
        ("query:ai-q1", "ai-q1#0"),
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [*KINDS, {"kind": "docstring"}], ids=lambda settings: settings["kind"])
@pytest.mark.parametrize("source", [collected, chunked])
def test_a_perfect_run_measures_one_by_every_convention(tmp_path: Path, settings: dict[str, Any], source: Any) -> None:
    """BEIR and others remove a result that has the query's id, and mining drops it as the query itself."""
    collection = collected(tmp_path, CODE) if settings["kind"] == "docstring" else source(tmp_path)
    found = stored_rows(queries(tmp_path / "queries", collection, queries=settings))
    documents, query_ids = ({row[0] for row in rows} for rows in (found.documents, found.queries))
    assert len(query_ids) == len(found.queries)
    assert query_ids.isdisjoint(documents)
    qrels: dict[str, dict[str, int]] = {}
    for query, document, relevance, _ in found.judgments:
        qrels.setdefault(query, {})[document] = relevance
    perfect = {query: {id_: 1.0 + (id_ in judged) for id_ in documents} for query, judged in qrels.items()}
    for conventions in CONVENTIONS.values():
        assert evaluate(qrels, perfect, ["nDCG@10"], conventions).mean("nDCG@10") == 1


@pytest.mark.parametrize(("rows", "message"), [
    ([("a", "One", "Text."), ("query:a", "Two", "Text.")],
     "would have the id 'query:a', but ids of the queries made here begin with 'qu"),
    ([("a", "", "Text."), ("b", "", "Text.")],
     r"No query of kind 'title' can be made .*: 2 documents without a title\."),
    ([], r"No query of kind 'title' can be made from the documents of .*: it is empty\."),
])  # fmt: skip
def test_what_gives_no_collection_is_refused_with_the_reasons(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        queries(tmp_path / "out", collected(tmp_path, rows), queries=TITLES)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_the_held_out_are_whole_sources(tmp_path: Path) -> None:
    text = "one two three four five. six seven eight nine ten."
    collection = collected(tmp_path, [(f"d{number}", f"title {number}", text) for number in range(200)])
    splits: dict[str, set[str]] = {}
    for settings in ({"kind": "title"}, {"kind": "crops"}):
        uri = queries(tmp_path / settings["kind"], collection, queries=settings, held_out=0.2, validation=0.1, seed=5)  # type: ignore[operator]
        for _, document, _, split in stored_rows(uri).judgments:
            splits.setdefault(document.partition("#")[0], set()).add(split)
    assert len(splits) == 200
    assert {len(found) for found in splits.values()} == {1}
    assert 20 <= sum(found == {"test"} for found in splits.values()) <= 60
    assert 8 <= sum(found == {"dev"} for found in splits.values()) <= 35
    test_alone = queries(tmp_path / "test", collection, queries={"kind": "title"}, held_out=0.2, seed=5)
    tested = {
        document.partition("#")[0] for _, document, _, split in stored_rows(test_alone).judgments if split == "test"
    }
    assert tested == {source for source, found in splits.items() if found == {"test"}}  # a validation share moves none


@pytest.mark.parametrize(("values", "message"), [
    ({"queries": {"kind": "titel"}}, "'queries.kind' can't be 'titel'. Did you mean 'title'?"),
    ({"queries": {"kind": "title"}, "split": "test", "held_out": 0.1}, "split can't be 'test'"),
    ({"queries": {"kind": "title"}, "split": "dev", "validation": 0.1}, "split can't be 'dev'"),
    ({"queries": {"kind": "title"}, "held_out": 0.6, "validation": 0.5}, "held_out and validation take all documents"),
    ({"queries": {"kind": "crops", "words": 3}}, "'queries.words' is not a setting"),
])  # fmt: skip
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(QueriesConfig, {"collection": "c", "output": "o", **values}, "queries")
    assert message in str(error.value)


def asked(folder: Path, judged: list[tuple[str, str, int, str]]) -> str:
    """The threads as they were before they were chunked, with two questions and who answers them."""
    documents = [{"id": id_, "title": title, "text": text, "domain": id_[:2]} for id_, title, text in THREADS]
    questions: list[tuple[Any, ...]] = [("a", "which hop is bitter?", "", []), ("b", "who is bored?", "", [])]
    return store(folder / "asked", [pa.Table.from_pylist(documents, DOCUMENTS)], questions, judged)


@pytest.mark.parametrize("rows_per_shard", [1, 100])
def test_own_questions_are_the_test_and_all_documents_are_trained_on(tmp_path: Path, rows_per_shard: int) -> None:
    judged = [
        ("a", "beer-q1", 1, "test"),
        ("a", "ai-q1", 1, "test"),
        ("b", "ai-q1", 1, "test"),
        ("b", "beer-q2", 0, "test"),
    ]
    settings = {"queries": TITLES, "held_out": 0.5, "rows_per_shard": rows_per_shard}
    collection, questions = chunked(tmp_path), asked(tmp_path, judged)
    own = queries(tmp_path / "own", collection, questions=questions, **settings)
    found = stored_rows(own)
    assert found.queries[:2] == [("query:a", "which hop is bitter?", "", []), ("query:b", "who is bored?", "", [])]
    tested = [(query, document) for query, document, _, split in found.judgments if split == "test"]
    assert sorted(tested) == [
        ("query:a", "ai-q1#0"), ("query:a", "beer-q1#0"), ("query:a", "beer-q1#1"), ("query:b", "ai-q1#0")
    ]  # fmt: skip
    trained = {query for query, _, _, split in found.judgments if split == "train"}
    assert trained == {"query:beer-q1", "query:beer-q2", "query:ai-q1"}
    assert Artifact(own).manifest["facts"]["tested_on"] == "own questions"
    assert "own questions whose page gave no document" not in Artifact(own).manifest["dropped"]
    lost = asked(tmp_path / "lost", [judged[0], ("b", "beer-q3", 1, "test")])  # a page without a title
    some = queries(tmp_path / "some", collection, questions=lost, **settings)
    assert Artifact(some).manifest["dropped"]["own questions whose page gave no document"] == 1
    without = queries(tmp_path / "without", collection, questions=collected(tmp_path), **settings)
    assert stored_rows(without) == stored_rows(queries(tmp_path / "none", collection, **settings))
    assert Artifact(without).manifest["facts"]["tested_on"] == "queries made of held-out documents"


def test_questions_of_which_no_document_has_a_passage(tmp_path: Path) -> None:
    questions = asked(tmp_path, [("a", "beer-q3", 1, "test")])  # which has no title
    with pytest.raises(UserError, match=r"^4 source documents can't fill the splits: no query is left for 'test'"):
        queries(tmp_path / "own", chunked(tmp_path), questions=questions, queries=TITLES)


@pytest.mark.parametrize("source", [collected, chunked])
def test_a_small_share_holds_a_document_out(tmp_path: Path, source: Any) -> None:
    shares = {"held_out": 0.001, "validation": 0.001, "queries": {"kind": "crops", "minimum_words": 1}, "seed": 3}
    found = stored_rows(queries(tmp_path / "few", source(tmp_path), **shares))
    of_split: dict[str, set[str]] = {}
    for _, document, _, split in found.judgments:
        of_split.setdefault(split, set()).add(document.partition("#")[0])
    assert {split: len(sources) for split, sources in of_split.items()} == {"test": 1, "dev": 1, "train": 2}


def test_too_few_documents_for_all_splits_are_refused(tmp_path: Path) -> None:
    collection = collected(tmp_path, THREADS[:1])
    message = (
        r"^1 source document can't fill the splits: .* left for 'train'\. Give more .*\. They gave \d+ of kind 'title'"
        r" \(.*\); another kind may give more"
    )
    with pytest.raises(UserError, match=message):
        queries(tmp_path / "few", collection, queries=TITLES, held_out=0.1)
    assert not (tmp_path / "few" / "manifest.json").exists()
