"""Mining: which of a query's ranked documents are fit to train against, rule by rule.

A rule is a function of arrays that says of every candidate (queries, k) whether it stays. The rules are asked in the
order of ``RULES``, and a candidate counts for the first one that drops it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from raytriever.hashes import string_hashes
from raytriever.settings.configuration import Settings
from retrieval.evaluation.conventions import SelfHits
from retrieval.vectors import VectorRows

RULES = {
    "positive": "a judged positive of the query",
    "self": "the query itself: its id or its text",
    "judged_negative": "judged, but not relevant enough for a positive",
    "duplicate": "the text of a positive or of a better ranked candidate",
    "rank": "among the first skip_first ranks",
    "maximum_score": "above maximum_score",
    "absolute_margin": "scored above the positive's score less absolute_margin",
    "relative_margin": "scored above the positive's score less its share relative_margin",
    "answer": "holds an answer to the query",
}
KEPT, ABSENT = 254, 255  # beside the number of a rule: no rule drops it; the ranking ends before
UNJUDGED = int(np.iinfo(np.int32).min)  # stands where a relevance would

_PAIRS_AT_ONCE = 8192  # of one vector a document; of several, fewer
_NUMBER_OF_RULE = {name: number for number, name in enumerate(RULES)}


class MiningRules(Settings):
    """Rules that drop candidates. Positives, the query's own text and repeated texts are always dropped.

    A margin is the distance of the candidate's score from the query's lowest-scored positive. Scores are inner products
    if vectors are given. Otherwise they are the run's, and a positive that was not retrieved has none. For a query
    without any scored positive the margins drop all candidates.
    """

    minimum_relevance: PositiveInt = 1
    """Lowest grade of a positive."""
    judged_negatives: Literal["keep", "drop"] = "keep"
    """What to do with documents judged below that."""
    self_hits: SelfHits = "remove"
    """What to do with the document that has the query's id. Where queries are documents it is the query itself. Set
    keep where both are numbered apart, as in MS MARCO. A document with the query's text is always removed."""
    skip_first: NonNegativeInt = 0
    """Number of first ranks to drop."""
    depth: PositiveInt | None = None
    """The last rank to read. null: all."""
    maximum_score: FiniteFloat | None = None
    """The highest score of a candidate."""
    absolute_margin: FiniteFloat | None = None
    """Smallest distance of a candidate's score below the positive's."""
    relative_margin: FiniteFloat | None = Field(default=None, le=1)
    """The same as a share of the positive's score. 0.05 keeps scores of at most 95 % of it; 1 keeps none above 0."""
    answers: Literal["string", "regex", "ignore"] = "string"
    """How answers are matched in candidates."""
    with_title: bool = True
    """Whether the text that is compared and searched for answers includes the title."""

    @property
    def has_margin(self) -> bool:
        """Whether scores of positives are needed."""
        return self.absolute_margin is not None or self.relative_margin is not None

    def active(self) -> list[str]:
        """The rules that are asked, in order."""
        asked = {
            "judged_negative": self.judged_negatives == "drop",
            "rank": self.skip_first > 0,
            "maximum_score": self.maximum_score is not None,
            "absolute_margin": self.absolute_margin is not None,
            "relative_margin": self.relative_margin is not None,
            "answer": self.answers != "ignore",
        }
        return [name for name in RULES if asked.get(name, True)]


@dataclass(frozen=True)
class JudgedPairs:
    """Judgments in (query, row) order: ``queries`` int64 counted from the block's first, ``rows`` int64 of
    documents, ``relevance`` int32, each (pairs,)."""

    queries: NDArray[np.int64]
    rows: NDArray[np.int64]
    relevance: NDArray[np.int32]

    def where(self, chosen: NDArray[np.bool_]) -> "JudgedPairs":
        """Some of the pairs."""
        return JudgedPairs(self.queries[chosen], self.rows[chosen], self.relevance[chosen])


@dataclass(frozen=True)
class Positives:
    """The positives of a block: ``pairs``, and of each (pairs,) what is known.

    ``scores`` float32, NaN where unknown; ``ranks`` int32 from 1, 0 where not retrieved; ``text_keys`` uint64.
    """

    pairs: JudgedPairs
    scores: NDArray[np.float32]
    ranks: NDArray[np.int32]
    text_keys: NDArray[np.uint64]


@dataclass(frozen=True)
class Block:
    """The rules' input for some queries and their candidates, best first.

    (queries, k): ``rows`` int64, -1 for none. ``scores`` float32. ``relevance`` int32, ``UNJUDGED`` where not judged.
    ``text_keys`` uint64. (queries,): ``own_rows`` int64, the document that has the query's id, or -1.
    ``query_text_keys`` uint64.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]
    relevance: NDArray[np.int32]
    text_keys: NDArray[np.uint64]
    own_rows: NDArray[np.int64]
    query_text_keys: NDArray[np.uint64]
    positives: Positives


def apply_rules(
    rules: MiningRules, block: Block, contain_answer: Callable[[NDArray[np.int64]], NDArray[np.bool_]]
) -> NDArray[np.uint8]:
    """The number of the rule that drops each candidate, ``KEPT`` or ``ABSENT``, (queries, k).

    ``contain_answer`` is asked last, as it reads texts: of rows (queries, k), with -1 where it doesn't matter.
    """
    rule_of = np.where(block.rows >= 0, KEPT, ABSENT).astype(np.uint8)
    asked = rules.active()

    def ask(name: str, rule: Callable[[], NDArray[np.bool_]]) -> None:
        if name in asked:
            rule_of[(rule_of == KEPT) & ~rule()] = _NUMBER_OF_RULE[name]

    minimum, scores = rules.minimum_relevance, block.scores
    reference = reference_scores(len(scores), block.positives)
    ask("positive", lambda: block.relevance < minimum)
    ask("self", lambda: is_not_query(block, by_id=rules.self_hits == "remove"))
    ask("judged_negative", lambda: block.relevance == UNJUDGED)
    ask("duplicate", lambda: is_first_of_text(block))
    ask("rank", lambda: np.broadcast_to(np.arange(scores.shape[1]) >= rules.skip_first, scores.shape))
    ask("maximum_score", lambda: scores <= (rules.maximum_score or 0.0))
    ask("absolute_margin", lambda: scores <= (reference - (rules.absolute_margin or 0.0))[:, None])
    share = rules.relative_margin or 0.0
    # of its size, so that a margin below a negative score is below it too
    ask("relative_margin", lambda: scores <= (reference - share * np.abs(reference))[:, None])
    ask("answer", lambda: ~contain_answer(np.where(rule_of == KEPT, block.rows, -1)))
    return rule_of


def is_not_query(block: Block, *, by_id: bool) -> NDArray[np.bool_]:
    """Whether a candidate has another text than the query, and where that counts (``by_id``) another id."""
    other_text = np.not_equal(block.text_keys, block.query_text_keys[:, None])
    return np.asarray(other_text & np.not_equal(block.rows, block.own_rows[:, None]) if by_id else other_text)


def is_first_of_text(block: Block) -> NDArray[np.bool_]:
    """Whether a candidate's text is that of no positive and of no candidate before it, kept or not."""
    queries, k = block.rows.shape
    positives = block.positives
    # (query, text) as one number; positives come first, so a candidate that is the first of its number is new
    keys = np.concatenate([positives.text_keys, block.text_keys.ravel()])
    distinct, texts = np.unique(keys, return_inverse=True)
    owners = np.concatenate([positives.pairs.queries, np.repeat(np.arange(queries), k)])
    _, first = np.unique(owners * len(distinct) + texts, return_index=True)
    is_first = np.zeros(len(keys), dtype=bool)
    is_first[first] = True
    return is_first[len(positives.text_keys) :].reshape(queries, k)


def reference_scores(queries: int, positives: Positives) -> NDArray[np.float64]:
    """The lowest known score of each query's positives, (queries,); NaN where none is known."""
    known = ~np.isnan(positives.scores)
    found = np.full(queries, np.inf)
    np.minimum.at(found, positives.pairs.queries[known], positives.scores[known].astype(np.float64))
    found[np.isinf(found)] = np.nan
    return found


def match_judgments(
    rows: NDArray[np.int64], scores: NDArray[np.float32], judged: JudgedPairs
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Looks up candidates (queries, k) among the judgments of a block, and the other way round.

    Returns the relevance of each candidate (queries, k), ``UNJUDGED`` where it has none. Also returns for each judgment
    (pairs,) its rank from 1, with the score there. A judgment that was not retrieved has rank 0 and NaN.
    """
    relevance = np.full(rows.shape, UNJUDGED, dtype=np.int32)
    ranks = np.zeros(len(judged.rows), dtype=np.int32)
    found_scores = np.full(len(judged.rows), np.nan, dtype=np.float32)
    if not len(judged.rows) or not rows.size:
        return relevance, ranks, found_scores
    width = int(max(judged.rows.max(), rows.max())) + 1  # (query, row) as one number
    wanted = np.arange(len(rows))[:, None] * width + rows
    known = judged.queries * width + judged.rows
    pairs = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    queries, places = np.nonzero((known[pairs] == wanted) & (rows >= 0))
    pairs = pairs[queries, places]
    relevance[queries, places] = judged.relevance[pairs]
    ranks[pairs] = places + 1
    found_scores[pairs] = scores[queries, places]
    return relevance, ranks, found_scores


def exact_scores(
    *, queries: VectorRows, documents: VectorRows, query_rows: NDArray[np.int64], document_rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Inner products of pairs (n,); a pair's score depends on its own vectors alone.

    Of a document with several vectors the largest product counts, as in searching.
    """
    scores = np.empty(len(query_rows), dtype=np.float32)
    step = max(1, _PAIRS_AT_ONCE // documents.vectors_per_text)
    for start in range(0, len(scores), step):
        pairs = slice(start, start + step)
        distinct, place = np.unique(query_rows[pairs], return_inverse=True)
        left, right = queries.gather(distinct)[place], documents.gather(document_rows[pairs])
        several = right.reshape(len(right), -1, documents.dimension)
        scores[pairs] = np.einsum("nd,nmd->nm", left, several).max(axis=1)
    return scores


def first_of(eligible: NDArray[np.bool_], number: int | None) -> NDArray[np.bool_]:
    """The first ``number`` of each query's eligible candidates (queries, k); None: all."""
    return eligible & (np.cumsum(eligible, axis=1) <= (number or eligible.shape[1]))


def sampling_keys(seed: int, query_ids: Iterable[str]) -> NDArray[np.uint64]:
    """A pseudo-random number for each query, a function of seed and id alone; (queries,)."""
    return string_hashes(f"{seed}\0{query_id}" for query_id in query_ids)


def folded_text_keys(texts: Iterable[str]) -> NDArray[np.uint64]:
    """64 bits of XXH3 for each text, equal for texts that differ only in case and white space; (texts,).

    By these, texts are compared in mining and within a batch. Across the batches of a step, training compares them
    exactly (``trainers.engine.draws.text_keys``).
    """
    from xxhash import xxh3_64_intdigest  # settings import this module

    folded = (" ".join(text.casefold().split()).encode("utf-8", "surrogatepass") for text in texts)
    return np.fromiter(map(xxh3_64_intdigest, folded), np.uint64)
