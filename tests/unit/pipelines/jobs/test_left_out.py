"""What every format gets: unique ids, no empty records, no judgments of what is not there, bounded memory."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.jobs import left_out
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections import records
from retrieval.collections.records import (
    CrossValidation,
    DocumentRecord,
    Format,
    JudgmentRecord,
    Place,
    Policies,
    QueryRecord,
    Source,
)
from tests.unit.retrieval.collections.contents import contents, contents_and_dropped, counts, dropped

Rows = list[tuple[Any, ...]]
DROP = Policies(empty_documents="drop", empty_queries="drop", unknown_ids="drop")


class Listed(Format):
    """A format of given rows: (id, title, text), (id, text), (query, document, relevance, split)."""

    documents_name, queries_name = "/docs", "/queries"

    def __init__(self, documents: Rows, queries: Rows, judgments: Rows | None, *, repeats: bool = False) -> None:
        super().__init__(Folder("/"))
        self.repeats = repeats
        self.judgments_name = "" if judgments is None else "/qrels"
        self.rows = {"/docs": documents, "/queries": queries, "/qrels": judgments or []}
        self.started: list[str] = []

    def _records(self, name: str, make: Callable[..., Any]) -> Iterator[Any]:
        self.started.append(name)
        for line, row in enumerate(self.rows[name], start=1):
            yield make(Place(name, line), *row)

    def documents(self) -> Iterator[DocumentRecord]:
        return self._records("/docs", DocumentRecord)

    def queries(self) -> Iterator[QueryRecord]:
        return self._records("/queries", partial(QueryRecord, answers=("yes",)))

    def judgments(self) -> Iterator[JudgmentRecord]:
        return self._records("/qrels", JudgmentRecord)

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": 1}


DOCUMENTS = [("d1", "", "one"), ("d2", "two", "")]
QUERIES = [("q1", "first"), ("q2", "second")]


def refused(format_: Listed, message: str, policies: Policies | None = None) -> None:
    with pytest.raises(UserError, match=message):
        contents(Source(format_, policies or Policies()))


def test_records_become_rows_in_their_order() -> None:
    format_ = Listed(DOCUMENTS, QUERIES, [("q2", "d1", 3, "test"), ("q1", "d2", -1, "train")])
    source = Source(format_, Policies())
    documents, queries, judgments = contents(source)
    assert documents == [("d1", "", "one", ""), ("d2", "two", "", "")]
    assert queries == [("q1", "first", "", ["yes"]), ("q2", "second", "", ["yes"])]
    assert judgments == [("q2", "d1", 3, "test"), ("q1", "d2", -1, "train")]
    assert format_.started == ["/docs", "/queries", "/qrels"]  # each once
    assert (counts(source), dropped(source)) == ({}, {})


def test_a_corpus_needs_no_queries_and_no_judgments() -> None:
    assert contents(Source(Listed(DOCUMENTS, [], None), Policies()))[1:] == ([], [])
    assert contents(Source(Listed(DOCUMENTS, QUERIES, None), Policies()))[2] == []
    refused(Listed([], [], None), r"/docs holds no documents with a text\. Is it the right file")
    refused(Listed(DOCUMENTS, [], [("q1", "d1", 1, "a")]), "/queries holds no queries with a text")
    refused(Listed(DOCUMENTS, QUERIES, []), r"No judgments to keep in /qrels: 0 were left out \(there are none\)")


def test_a_repeated_id_or_judgment_is_refused_with_both_places() -> None:
    ids = [(f"d{number}", "", "x") for number in range(10_000)]
    refused(Listed([*ids, ids[17]], QUERIES, None), "/docs, line 10001: id 'd17' already belongs to line 18")
    refused(Listed(DOCUMENTS, [*QUERIES, ("q1", "other")], None), "/queries, line 3: id 'q1' already belongs to line 1")
    empty = [("d1", "", ""), ("d1", "", "full")]
    refused(Listed(empty, QUERIES, None), "/docs, line 2: id 'd1' already belongs to line 1", DROP)
    judged = [("q1", "d1", 1, "a"), ("q1", "d1", 1, "b"), ("q1", "d1", 0, "a")]
    message = "/qrels, line 3 judges query 'q1' and document 'd1' with 0, line 1 with 1. Keep one of the two"
    refused(Listed(DOCUMENTS, QUERIES, judged), message)


def test_an_equal_judgment_is_left_out_and_counted() -> None:
    judged = [("q1", "d1", 1, "a"), ("q2", "d1", 1, "a"), ("q1", "d1", 1, "a"), ("q1", "d1", 0, "b")]
    source = Source(Listed(DOCUMENTS, QUERIES, judged), Policies())
    assert contents(source)[2] == [judged[0], judged[1], judged[3]]
    assert dropped(source) == {"repeated_judgments": 1}


def test_an_id_of_two_texts_is_refused_where_records_repeat_too() -> None:
    other = [*DOCUMENTS, *DOCUMENTS, ("d2", "", "two!")]
    message = "/docs, line 5: id 'd2' already belongs to line 2 with another text. Ids must be unique"
    refused(Listed(other, QUERIES, None, repeats=True), message)
    asked = [*QUERIES, *QUERIES, ("q1", "second")]
    refused(Listed(DOCUMENTS, asked, None, repeats=True), "/queries, line 5: id 'q1' already belongs to line 1 with")

    class OneLine(Listed):
        def documents(self) -> Iterator[DocumentRecord]:
            return (DocumentRecord(Place("/docs", 1), *row) for row in self.rows["/docs"])

    message = "/docs, line 1: id 'd1' already belongs to line 1 with another text"
    refused(OneLine([("d1", "", "one"), ("d1", "", "two")], QUERIES, None, repeats=True), message)


def test_pairs_whose_ids_join_to_the_same_string_are_different() -> None:
    documents = [("b", "", "x"), ("ab", "", "x"), ("1 b", "", "x")]
    queries = [("a", "x"), ("aa", "x")]
    judged = [("aa", "b", 1, "s"), ("a", "ab", 1, "s"), ("a", "b", 1, "sa"), ("a", "1 b", 1, "s")]
    assert contents(Source(Listed(documents, queries, judged), Policies()))[2] == judged


@pytest.mark.parametrize("part", ["documents", "queries"])
def test_empty_records_are_refused_or_left_out_with_their_judgments(part: str) -> None:
    documents = [("e", " ", "\n"), *DOCUMENTS] if part == "documents" else DOCUMENTS
    queries = [("e", "\t"), *QUERIES] if part == "queries" else QUERIES
    judged = [("q1", "e", 1, "a") if part == "documents" else ("e", "d1", 1, "a"), ("q2", "d2", 1, "a")]
    what = "document 'e' has neither title nor text" if part == "documents" else "query 'e' has no text"
    refused(Listed(documents, queries, judged), rf"line 1: {what}\. Give it .* out: source\.empty_{part}=drop")
    source = Source(Listed(documents, queries, judged), DROP)
    assert contents(source) == contents(Source(Listed(DOCUMENTS, QUERIES, judged[1:]), Policies()))
    assert dropped(source) == {f"empty_{part}": 1, f"judgments_of_empty_{part}": 1}
    only = Listed(documents[:1], queries, None) if part == "documents" else Listed(documents, queries[:1], None)
    refused(only, f"/{'docs' if part == 'documents' else 'queries'} holds no {part} with a text", DROP)


def test_judgments_of_unknown_ids_are_refused_or_left_out() -> None:
    judged = [("q1", "d1", 1, "a"), ("q1", "x", 1, "a"), ("y", "d1", 0, "a"), ("y", "x", 1, "a"), ("q1", "z", 1, "b")]
    counted = "/docs does not hold; in all, 2 judgments name unknown documents and 2 unknown queries"
    refused(Listed(DOCUMENTS, QUERIES, judged), f"/qrels, line 2 names 'x', which {counted}.*source.unknown_ids=drop")
    refused(Listed(DOCUMENTS, QUERIES, judged[2:]), "/qrels, line 1 names 'y', which /queries does not hold")
    source = Source(Listed(DOCUMENTS, QUERIES, judged), DROP)
    assert contents(source)[2] == [("q1", "d1", 1, "a")]
    assert dropped(source) == {"judgments_of_unknown_documents": 2, "judgments_of_unknown_queries": 2}
    none = r"No judgments to keep in /qrels: 1 were left out \(judgments_of_unknown_documents 1\)"
    refused(Listed(DOCUMENTS, QUERIES, judged[1:2]), none, DROP)


def test_little_is_read_ahead_of_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_CHARACTERS_AT_ONCE", 1000)
    given_out = 0

    class Endless(Listed):
        def documents(self) -> Iterator[DocumentRecord]:
            nonlocal given_out
            for line in range(10**9):
                given_out += 1
                yield DocumentRecord(Place("/docs", line), f"d{line}", "", "x" * 300)

    assert len(next(left_out.record_batches(Endless([], [], None), "documents"))) == given_out == 4
    monkeypatch.setattr(records, "_CHARACTERS_AT_ONCE", 1 << 30)
    given_out = 0
    next(left_out.record_batches(Endless([], [], None), "documents"))
    assert given_out == records._RECORDS_AT_ONCE


SEVERAL_GRADES = [("a", "a", 0, "t"), ("a", "a", 3, "t"), ("a", "a", 1, "t"), ("a", "b", -2, "t"), ("a", "b", -1, "t")]
names = st.sampled_from(["a", "b", "c", "d"])
judgment = st.tuples(names, names, st.integers(-2, 3), st.sampled_from(["t", "u"]))
judged_rows = st.lists(judgment, min_size=1, max_size=30)


@settings(max_examples=25, deadline=None)
@given(st.lists(names, min_size=1), st.lists(names, min_size=1), judged_rows, st.sets(names), st.integers(1, 5))
@example(["a", "b"], ["a"], SEVERAL_GRADES, set(), 1)
def test_against_a_plain_reading(documents, queries, judged, empty, at_once):
    texts = {name: "" if name in empty else "x" for name in "abcd"}
    kept_documents = list(dict.fromkeys(name for name in documents if texts[name]))
    best = {(split, query, document): 2 for query, document, _, split in judged}  # 0: positive, 1: zero, 2: below
    for query, document, relevance, split in judged:
        best[split, query, document] = min(best[split, query, document], (relevance <= 0) + (relevance < 0))
    first: dict[tuple[str, str, str], int] = {}
    for row, (query, document, relevance, split) in enumerate(judged):
        is_best = best[split, query, document] == (relevance <= 0) + (relevance < 0)
        if is_best and document in kept_documents and query in queries:
            first.setdefault((split, query, document), row)
    expected = [judged[row] for row in sorted(first.values())]
    listed = Listed([(name, "", texts[name]) for name in documents], [(q, "x") for q in queries], judged, repeats=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_RECORDS_AT_ONCE", at_once)
        source = Source(listed, DROP)
        if not kept_documents or not expected:
            with pytest.raises(UserError, match=r"holds no documents|No judgments to keep"):
                contents(source)
            return
        found, left_out = contents_and_dropped(source)
    assert [row[0] for row in found[0]] == kept_documents
    assert [row[0] for row in found[1]] == list(dict.fromkeys(queries))
    assert found[2] == expected
    assert len(judged) == len(found[2]) + sum(n for reason, n in left_out.items() if "judgments" in reason)


def test_every_query_is_tested_in_one_fold_and_never_trained_on_in_it() -> None:
    queries = [(f"q{number}", "text") for number in range(60)]
    judged = [(id_, document, 1, "test") for id_, _ in queries for document in ("d1", "d2")]
    queries.append(("qx", "text"))
    judged.append(("qx", "d1", 1, "other"))
    tested: list[str] = []
    for fold in range(4):
        policies = Policies(cross_validation=CrossValidation(folds=4, fold=fold))
        source = Source(Listed(DOCUMENTS, queries, judged), policies)
        found = contents(source).judgments
        assert len(found) == len(judged)
        of_split: dict[str, set[str]] = {}
        for query, _, _, split in found:
            of_split.setdefault(split, set()).add(query)
        assert of_split.pop("other") == {"qx"}
        assert sorted(of_split) == ["dev", "test", "train"]
        assert sum(map(len, of_split.values())) == 60  # all judgments of a query are of one split
        assert len(of_split["train"]) > len(of_split["test"]) > 5
        tested += of_split["test"]
    assert sorted(tested) == sorted(id_ for id_, _ in queries[:-1])


def test_two_folds_share_a_split_out_between_selecting_and_testing() -> None:
    queries = [(f"q{number}", "text") for number in range(40)]
    judged = [(id_, "d1", 1, "val" if int(id_[1:]) < 30 else "train") for id_, _ in queries]
    halves = []
    for fold in (0, 1):
        policies = Policies(cross_validation=CrossValidation(folds=2, fold=fold, split="val"))
        table = contents(Source(Listed(DOCUMENTS, queries, judged), policies))[2]
        of_split = {split: {row[0] for row in table if row[3] == split} for split in ("train", "dev", "test")}
        assert of_split["train"] == {f"q{number}" for number in range(30, 40)}
        halves.append((of_split["dev"], of_split["test"]))
    assert halves[0] == halves[1][::-1]
    assert len(halves[0][0] | halves[0][1]) == 30
    assert min(map(len, halves[0])) > 5


SHARED = [("q1", "d1", 1, "test"), ("q2", "d1", 1, "test"), ("q1", "d1", 1, "train"), ("q2", "x", 1, "dev")]


FIRST_FOLD = CrossValidation(fold=0)


@pytest.mark.parametrize("at_once", [1, 100])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_splits_of_the_same_queries_are_not_cross_validated(order, at_once, monkeypatch) -> None:
    monkeypatch.setattr(records, "_RECORDS_AT_ONCE", at_once)
    folded = Policies(cross_validation=FIRST_FOLD)
    message = r"/qrels, line \d judges query 'q1' in split '(test|train)', and it is judged in .*split.* too\."
    rows_read = [SHARED[place] for place in order]
    for repeats in (False, True):
        refused(Listed(DOCUMENTS, QUERIES, rows_read, repeats=repeats), rf"{message}.*\(splits: \[test\]", folded)
    alone = Source(Listed(DOCUMENTS, QUERIES, SHARED[:2]), folded)
    assert [row[0] for row in contents(alone)[2]] == ["q1", "q2"]
    # judgments that are left out are of no other split
    dropping = Policies(cross_validation=FIRST_FOLD, unknown_ids="drop")
    source = Source(Listed(DOCUMENTS, QUERIES, [SHARED[1], SHARED[3]]), dropping)
    assert [row[0] for row in contents(source)[2]] == ["q2"]
    assert dropped(source) == {"judgments_of_unknown_documents": 1}


def test_folds_that_are_not_there_are_named_and_of_no_judgments_at_once() -> None:
    with pytest.raises(ValueError, match="fold is 5, but 5 folds are numbered 0 to 4"):
        CrossValidation(fold=5)
    message = r"cross_validation.split is 'test', but /qrels has no .* Splits there: dev"
    format_ = Listed(DOCUMENTS, QUERIES, [("q1", "d1", 1, "dev")])
    refused(format_, message, Policies(cross_validation=FIRST_FOLD))
    format_ = Listed(DOCUMENTS, QUERIES, None)
    message = r"judged queries, but with /docs no judgments are read\. Give them too, or"
    refused(format_, message, Policies(cross_validation=FIRST_FOLD))
    assert format_.started == []
