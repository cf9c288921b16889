"""Whether a text contains an answer to a question, as open-domain question answering has judged it since DrQA and DPR.

A **string** answer is found if its words and punctuation marks occur in the text in a row, in any case. Both sides are
decomposed (NFD) and lower-cased. They are split into runs of letters, digits and marks, and single other characters. So
"U.S." is found in "the u.s. army", "art" not in "party", and "café" in any of its encodings. A **regex** answer
(CuratedTREC) is searched in the decomposed text, ignoring case. ``^`` and ``$`` match at lines.

Published numbers use these tokens; ``retrieval.words`` has the words of BM25. One difference from DPR: an answer
without a word or a mark is never found. DPR finds it in every text.

Top-k accuracy is DPR's measure: whether one of a query's first k documents holds an answer to it.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import regex
from numpy.typing import NDArray

from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.evaluation.conventions import Conventions
from retrieval.evaluation.measures import distinct_scores

Match = Literal["string", "regex"]

_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")  # DrQA's, to the letter
_DOCUMENTS_AT_ONCE = 4096


def ranking_hits(
    rows: NDArray[np.int64],
    answers: Sequence[Sequence[str]],
    texts: Callable[[NDArray[np.int64]], list[str]],
    match: Match = "string",
) -> NDArray[np.bool_]:
    """Whether every ranked document holds an answer to its query, bool (queries, k).

    ``rows`` (queries, k): row numbers of documents, -1 for none. ``answers``: those of each query, maybe none.
    ``texts`` gives the texts of ascending rows. Each document is read and normalised once, however many queries
    retrieved it, and a few thousand of them are in memory at a time. Raises ``UserError`` for an answer that is no
    regular expression where ``match`` is "regex".
    """
    hits = np.zeros(rows.shape, dtype=bool)
    matchers = [answer_matcher(strings, match) for strings in answers]
    with_answers = np.array([len(strings) > 0 for strings in answers], dtype=bool)
    queries, ranks = np.nonzero((rows >= 0) & with_answers[:, None])
    by_row = np.argsort(rows[queries, ranks])
    queries, ranks = queries[by_row], ranks[by_row]
    distinct, starts = np.unique(rows[queries, ranks], return_index=True)
    ends = np.append(starts, len(queries))[1:]
    for first in range(0, len(distinct), _DOCUMENTS_AT_ONCE):
        block = slice(first, first + _DOCUMENTS_AT_ONCE)
        for text, start, end in zip(texts(distinct[block]), starts[block], ends[block], strict=True):
            document = normalised(text, match)
            found = [matchers[query](document) for query in queries[start:end].tolist()]
            hits[queries[start:end], ranks[start:end]] = found
    return hits


def answer_matcher(answers: Sequence[str], match: Match = "string") -> Callable[[str], bool]:
    """A test of ``normalised`` texts for one query's answers.

    Raises ``UserError`` for an answer that is no regular expression where ``match`` is "regex".
    """
    if match == "regex":
        patterns = [_compile(answer) for answer in answers if answer.strip()]
        return lambda text: any(pattern.search(text) for pattern in patterns)
    wanted = [form for form in (normalised(answer, match) for answer in answers) if form.strip()]
    return lambda text: any(form in text for form in wanted)


def normalised(text: str, match: Match = "string") -> str:
    """Texts and strings as they are compared: tokens with a space around each."""
    decomposed = unicodedata.normalize("NFD", text)
    if match == "regex":
        return decomposed
    return f" {' '.join(_TOKEN.findall(decomposed)).lower()} "


def _compile(answer: str) -> re.Pattern[str]:
    try:
        return re.compile(unicodedata.normalize("NFD", answer), re.IGNORECASE | re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"The answer {answer!r} is no regular expression ({error}). Correct it in the queries, or match answers as"
            " strings."
        ) from error


def answer_accuracy(
    collection: StoredCollection,
    answers: Mapping[str, Sequence[str]],
    ranking: Mapping[str, Mapping[str, float]],
    cutoffs: Sequence[int],
    conventions: Conventions,
    match: Match = "string",
) -> dict[str, NDArray[np.bool_]]:
    """For each query of the ranking that has answers: whether its first k documents contain one, bool (cutoffs,).

    Titles are not looked at, as in DPR. Raises ``UserError`` for a document that the collection doesn't hold.
    """
    queries = [query for query in ranking if query in answers]
    deepest = max(cutoffs)
    ranked = []
    for query in queries:
        scores = distinct_scores(query, ranking[query], conventions)
        ranked.append(sorted(scores, key=lambda document: -scores[document])[:deepest])
    names = sorted({document for documents in ranked for document in documents})
    row_of = dict(zip(names, collection.require("documents", names).tolist(), strict=True))
    rows = np.full((len(queries), deepest), -1)
    for line, documents in enumerate(ranked):
        rows[line, : len(documents)] = [row_of[document] for document in documents]
    stored, answers_of = collection.rows_of("documents"), [answers[query] for query in queries]
    hits = ranking_hits(rows, answers_of, lambda wanted: stored.take(wanted, ["text"])["text"].to_pylist(), match)
    found = np.stack([hits[:, :cutoff].any(axis=1) for cutoff in cutoffs], axis=1)
    return dict(zip(queries, found, strict=True))
