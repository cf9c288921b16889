"""The rules against a literal reading of each, one candidate at a time."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.mining import rules as mining

# few values, so that scores tie and texts repeat; all exact in float32
SCORES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 1.0, 2.0])
DOCUMENTS = 8


@dataclass
class Case:
    """A block as Python lists. ``rows``: documents of each query, best first; ``grades``: document to relevance."""

    rows: list[list[int]]
    scores: list[list[float]]
    grades: list[dict[int, int]]
    positive_scores: list[dict[int, float]]  # absent: unknown
    texts: list[int]  # of documents
    query_texts: list[int]
    own_rows: list[int]
    with_answer: set[tuple[int, int]]  # (query, document)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    queries, k = draw(st.integers(0, 3)), draw(st.integers(1, 6))
    documents = st.integers(0, DOCUMENTS - 1)
    rows, scores, grades, positive_scores = [], [], [], []
    for _ in range(queries):
        found = draw(st.lists(documents, unique=True, max_size=k))
        rows.append(found + [-1] * (k - len(found)))
        values = sorted(draw(st.lists(SCORES, min_size=len(found), max_size=len(found))), reverse=True)
        scores.append(values + [-np.inf] * (k - len(found)))
        grades.append(draw(st.dictionaries(documents, st.integers(-1, 3), max_size=4)))
        known = draw(st.dictionaries(documents, SCORES, max_size=6))
        positive_scores.append(known)
    texts = st.integers(0, 5)
    return Case(
        rows, scores, grades, positive_scores,
        draw(st.lists(texts, min_size=DOCUMENTS, max_size=DOCUMENTS)),
        draw(st.lists(texts, min_size=queries, max_size=queries)),
        draw(st.lists(st.integers(-1, DOCUMENTS - 1), min_size=queries, max_size=queries)),
        draw(st.sets(st.tuples(st.integers(0, 2), documents), max_size=5)),
    )  # fmt: skip


@st.composite
def rule_sets(draw: st.DrawFn) -> mining.MiningRules:
    margins = st.none() | st.sampled_from([-0.5, 0.0, 0.25, 0.5])
    return mining.MiningRules(
        minimum_relevance=draw(st.integers(1, 3)),
        judged_negatives=draw(st.sampled_from(["keep", "drop"])),
        self_hits=draw(st.sampled_from(["keep", "remove"])),
        skip_first=draw(st.integers(0, 3)),
        maximum_score=draw(st.none() | SCORES),
        absolute_margin=draw(margins),
        relative_margin=draw(margins),
        answers=draw(st.sampled_from(["string", "regex", "ignore"])),
    )


def judged_pairs(grades: list[dict[int, int]], minimum: int | None = None) -> mining.JudgedPairs:
    pairs = [
        (query, row, grade)
        for query, of_query in enumerate(grades)
        for row, grade in sorted(of_query.items())
        if minimum is None or grade >= minimum
    ]
    queries, rows, relevance = np.array(pairs, np.int64).reshape(-1, 3).T
    return mining.JudgedPairs(queries, rows, relevance.astype(np.int32))


def block_of(case: Case, minimum: int) -> mining.Block:
    k = len(case.rows[0]) if case.rows else 1
    rows = np.array(case.rows, np.int64).reshape(-1, k)
    texts = np.array(case.texts, np.uint64)
    pairs = judged_pairs(case.grades, minimum)
    pairs_known = zip(pairs.queries.tolist(), pairs.rows.tolist(), strict=True)
    scores = [case.positive_scores[query].get(row, np.nan) for query, row in pairs_known]
    relevance = np.full(rows.shape, mining.UNJUDGED, np.int32)
    for query, place in np.ndindex(rows.shape):
        relevance[query, place] = case.grades[query].get(int(rows[query, place]), mining.UNJUDGED)
    known = mining.Positives(
        pairs, np.array(scores, np.float32), np.zeros(len(pairs.rows), np.int32), texts[pairs.rows]
    )
    return mining.Block(
        rows=rows, scores=np.array(case.scores, np.float32).reshape(-1, k), relevance=relevance,
        text_keys=np.where(rows >= 0, texts[rows], np.uint64(0)), own_rows=np.array(case.own_rows, np.int64),
        query_text_keys=np.array(case.query_texts, np.uint64), positives=known,
    )  # fmt: skip


def literal_rule(rules: mining.MiningRules, case: Case, query: int, place: int) -> str | None:
    """The first rule that drops a candidate, None for one that is kept."""
    row, score = case.rows[query][place], case.scores[query][place]
    grades = case.grades[query]
    positives = [document for document, grade in grades.items() if grade >= rules.minimum_relevance]
    if row in positives:
        return "positive"
    if (row == case.own_rows[query] and rules.self_hits == "remove") or case.texts[row] == case.query_texts[query]:
        return "self"
    if row in grades and rules.judged_negatives == "drop":
        return "judged_negative"
    before = [case.texts[other] for other in [*positives, *case.rows[query][:place]]]
    if case.texts[row] in before:
        return "duplicate"
    if place < rules.skip_first:
        return "rank"
    if rules.maximum_score is not None and score > rules.maximum_score:
        return "maximum_score"
    known = [case.positive_scores[query][document] for document in positives if document in case.positive_scores[query]]
    reference = min(known, default=None)
    for name, margin in (("absolute_margin", rules.absolute_margin), ("relative_margin", rules.relative_margin)):
        if margin is None:
            continue
        if reference is None:
            return name
        if score > reference - margin * (1 if name == "absolute_margin" else abs(reference)):
            return name
    if rules.answers != "ignore" and (query, row) in case.with_answer:
        return "answer"
    return None


@settings(max_examples=400)
@given(case=cases(), rules=rule_sets())
def test_the_rules_are_the_literal_ones(case: Case, rules: mining.MiningRules) -> None:
    block = block_of(case, rules.minimum_relevance)
    asked: list[tuple[int, int]] = []

    def contain_answer(rows: np.ndarray) -> np.ndarray:
        asked.extend((query, int(row)) for (query, _), row in np.ndenumerate(rows) if row >= 0)
        found = [[(query, int(row)) in case.with_answer for row in of_query] for query, of_query in enumerate(rows)]
        return np.array(found, bool).reshape(rows.shape)

    rule_of = mining.apply_rules(rules, block, contain_answer)
    names = dict(enumerate(mining.RULES))
    read = set()
    for query, place in np.ndindex(rule_of.shape):
        if case.rows[query][place] < 0:
            assert rule_of[query, place] == mining.ABSENT
            continue
        expected = literal_rule(rules, case, query, place)
        assert names.get(int(rule_of[query, place])) == expected
        assert (rule_of[query, place] == mining.KEPT) == (expected is None)
        if expected in (None, "answer") and rules.answers != "ignore":
            read.add((query, case.rows[query][place]))
    assert set(asked) == read  # texts of candidates that another rule drops are not read


@settings(max_examples=200)
@given(case=cases())
def test_judgments_are_looked_up_both_ways(case: Case) -> None:
    block, judged = block_of(case, 1), judged_pairs(case.grades)
    relevance, ranks, scores = mining.match_judgments(block.rows, block.scores, judged)
    np.testing.assert_array_equal(relevance, block.relevance)
    assert [each.dtype.name for each in (relevance, ranks, scores)] == ["int32", "int32", "float32"]
    for pair, (query, row) in enumerate(zip(judged.queries.tolist(), judged.rows.tolist(), strict=True)):
        if row in case.rows[query]:
            place = case.rows[query].index(row)
            assert (ranks[pair], scores[pair]) == (place + 1, np.float32(case.scores[query][place]))
        else:
            assert ranks[pair] == 0
            assert np.isnan(scores[pair])


def test_of_no_candidate_a_judgment_has_no_rank() -> None:
    judged = mining.JudgedPairs(np.array([0]), np.array([5]), np.array([1], dtype=np.int32))
    none = np.empty((1, 0))
    relevance, ranks, scores = mining.match_judgments(none.astype(np.int64), none.astype(np.float32), judged)
    assert (relevance.shape, ranks.tolist(), np.isnan(scores).tolist()) == ((1, 0), [0], [True])


@pytest.mark.parametrize(("margins", "positive", "kept"), [
    ({"absolute_margin": 0.0}, 0.5, [0.5, 0.0, -1.0]),  # equal is far enough
    ({"absolute_margin": 0.5}, 0.5, [0.0, -1.0]),
    ({"absolute_margin": -0.5}, 0.5, [1.0, 0.5, 0.0, -1.0]),
    ({"relative_margin": 0.0}, 0.5, [0.5, 0.0, -1.0]),
    ({"relative_margin": 1.0}, 0.5, [0.0, -1.0]),
    ({"relative_margin": 1.0}, -0.5, [-1.0]),  # below a negative score is further down
    ({"absolute_margin": 0.0, "relative_margin": 0.5}, 0.25, [0.0, -1.0]),
    ({"maximum_score": 0.5}, None, [0.5, 0.0, -1.0]),
    ({"relative_margin": 0.0}, None, []),
])  # fmt: skip
def test_margins(margins: dict[str, Any], positive: float | None, kept: list[float]) -> None:
    scores, known = [2.0, 1.0, 0.5, 0.0, -1.0], {} if positive is None else {7: positive}
    case = Case([[0, 1, 2, 3, 4]], [scores], [{7: 1}], [known], list(range(DOCUMENTS)), [99], [-1], set())
    rule_of = mining.apply_rules(mining.MiningRules(**margins), block_of(case, 1), lambda rows: rows < -1)
    assert [score for score, code in zip(scores, rule_of[0], strict=True) if code == mining.KEPT] == kept


def test_reference_of_several_positives() -> None:
    pairs = mining.JudgedPairs(np.array([0, 0, 2, 2]), np.array([1, 2, 1, 3]), np.ones(4, np.int32))
    known = np.array([0.5, -1.0, np.nan, 3.0], np.float32)
    positives = mining.Positives(pairs, known, np.zeros(4, np.int32), np.zeros(4, np.uint64))
    np.testing.assert_array_equal(mining.reference_scores(3, positives), [-1.0, np.nan, 3.0])


@settings(max_examples=100)
@given(data=st.data(), number=st.none() | st.integers(1, 6))
def test_the_first_are_chosen(data: st.DataObject, number: int | None) -> None:
    queries, k = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6))
    size = {"min_size": queries * k, "max_size": queries * k}
    eligible = np.array(data.draw(st.lists(st.booleans(), **size)), bool).reshape(queries, k)
    chosen = mining.first_of(eligible, number)
    for query in range(queries):
        assert np.flatnonzero(chosen[query]).tolist() == np.flatnonzero(eligible[query])[:number].tolist()


def test_keys_of_a_sample_depend_on_seed_and_query_alone() -> None:
    one, turned = mining.sampling_keys(0, ["a", "b"]), mining.sampling_keys(0, ["b", "a"])
    np.testing.assert_array_equal(turned, one[::-1])
    assert len({*one.tolist(), *mining.sampling_keys(1, ["a", "b"]).tolist()}) == 4


def test_texts_are_compared_without_case_and_white_space() -> None:
    one, two, three, four, five = mining.folded_text_keys(
        ["A  stra\u00dfe\n", "a STRASSE", "a strass", "", "\ud800"]
    ).tolist()
    assert one == two
    assert len({one, three, four, five}) == 4


class Rows:
    """Vectors by row, as ``VectorRows`` gives them."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.dimension = vectors.shape[-1]
        self.vectors_per_text = int(np.prod(vectors.shape[1:-1]))
        self.gathered: list[int] = []
        self._vectors = vectors

    def gather(self, rows: np.ndarray) -> np.ndarray:
        self.gathered.append(len(rows))
        return self._vectors[rows]


@pytest.mark.parametrize("per_document", [(), (1,), (3,)])
def test_scores_of_pairs_don_t_depend_on_their_neighbours(monkeypatch, per_document) -> None:
    generator = np.random.default_rng(0)
    queries = generator.normal(size=(5, 33)).astype(np.float32)
    documents = generator.normal(size=(40, *per_document, 33)).astype(np.float32)
    left, right = generator.integers(5, size=101), generator.integers(40, size=101)
    opened: Any = {"queries": Rows(queries), "documents": Rows(documents)}

    def scored(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return mining.exact_scores(**opened, query_rows=left, document_rows=right)

    scores = scored(left, right)
    assert scores.dtype == np.float32
    pairs = [queries[q].astype(float) @ documents[d].astype(float).T for q, d in zip(left, right, strict=True)]
    np.testing.assert_allclose(scores, [np.max(products) for products in pairs], rtol=1e-5)
    alone = [scored(left[n : n + 1], right[n : n + 1])[0] for n in range(101)]
    np.testing.assert_array_equal(scores, alone)
    monkeypatch.setattr("pipelines.mining.rules._PAIRS_AT_ONCE", 7)
    np.testing.assert_array_equal(scored(left, right), scores)
    assert scored(left[:0], right[:0]).shape == (0,)


def test_as_many_vectors_are_gathered_at_once_however_many_a_document_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.mining.rules._PAIRS_AT_ONCE", 12)
    queries, pairs = Rows(np.ones((1, 2), np.float32)), np.zeros(30, dtype=np.int64)
    for vectors_per_text, expected in ((1, [12, 12, 6]), (4, [3] * 10), (20, [1] * 30)):
        documents = Rows(np.ones((1, vectors_per_text, 2), np.float32))
        opened: Any = {"queries": queries, "documents": documents}
        mining.exact_scores(**opened, query_rows=pairs, document_rows=pairs)
        assert documents.gathered == expected


@pytest.mark.parametrize(("name", "value"), [
    ("minimum_relevance", 0), ("skip_first", -1), ("depth", 0), ("maximum_score", float("nan")),
    ("relative_margin", float("inf")), ("relative_margin", 1.5), ("answers", "exact"),
])  # fmt: skip
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        mining.MiningRules.model_validate({name: value})
