"""Lexical retrieval by BM25, in Lucene's form; bm25s splits texts and stems their words.

Words are counted part by part and document frequencies are summed over parts: a text's score is the same whatever it
shares a part with.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import Stemmer
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, field_validator

from raytriever.artifacts.artifact import Artifact, ShardRecord
from raytriever.settings.configuration import Settings, Share, validate
from retrieval.indexes.top_k import Ranking
from retrieval.words import words_of

if TYPE_CHECKING:
    from scipy.sparse import csc_array

StopWords = Literal[
    "danish", "dutch", "english", "english_plus", "french", "german", "italian", "korean",
    "norwegian", "portuguese", "russian", "spanish", "swedish", "turkish",
]  # fmt: skip

WORDS, ARRAYS = "lexical/{}/words.parquet", "lexical/{}/{}.npy"
_FREQUENCIES = pa.schema([("word", pa.string()), ("texts", pa.int64()), ("occurrences", pa.int64())])


class BM25Settings(Settings):
    """How texts are analysed and scored. Defaults are those of Anserini for passages, with English."""

    k1: NonNegativeFloat = 0.9
    """k1: how slowly a repeated term saturates."""
    b: Share = 0.4
    """b: how much long documents are discounted."""
    stemmer: str | None = "english"
    """A stemmer of PyStemmer, a Snowball language. null: none."""
    stop_words: StopWords | None = "english"
    """A list of stop words of bm25s. null: none."""

    @field_validator("stemmer")
    @classmethod
    def _known_stemmer(cls, value: str | None) -> str | None:
        if value is not None and value not in Stemmer.algorithms():
            raise ValueError(f"no such stemmer; allowed are null and {', '.join(Stemmer.algorithms())}")
        return value


class WordCounts(NamedTuple):
    """Counts of each of ``words`` (w,) in each of some texts: ``counts``, int32 (texts, w), by words."""

    words: list[str]
    counts: "csc_array"

    @classmethod
    def of(cls, texts: Iterable[str], settings: BM25Settings) -> Self:
        """Counts the words of ``words_of`` in lower case. Texts are read once; memory holds some 40 bytes a word."""
        from scipy.sparse import csr_array

        tokenizer = _tokenizer_of(settings)
        found = tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False)
        of_texts = [array("i", ids) for ids in found]
        ids = np.concatenate([np.empty(0, dtype=np.int32), *of_texts])
        # scipy numbers texts as wide as these are
        starts = np.cumsum([0, *map(len, of_texts)], dtype=np.int32 if len(ids) < 1 << 31 else np.int64)
        vocabulary = tokenizer.get_vocab_dict()
        counts = csr_array((np.ones(len(ids), dtype=np.int32), ids, starts), (len(of_texts), len(vocabulary))).tocsc()
        counts.sum_duplicates()
        return cls(sorted(vocabulary, key=vocabulary.__getitem__), counts)

    def frequencies(self) -> pa.Table:
        """Each ``word``, how many ``texts`` have it, and its ``occurrences``."""
        return pa.table([self.words, np.diff(self.counts.indptr), self.counts.sum(axis=0)], schema=_FREQUENCIES)


def sum_frequencies(parts: Iterable[pa.Table]) -> pa.Table:
    """The ``frequencies`` of all parts as one table."""
    total, waiting = _FREQUENCIES.empty_table(), list[pa.Table]()
    for part in parts:
        waiting.append(part)
        if sum(map(len, waiting)) > len(total):  # so that a row is summed a few times only
            total, waiting = _summed([total, *waiting]), []
    return _summed([total, *waiting])


def _summed(tables: Sequence[pa.Table]) -> pa.Table:
    by_word = pa.concat_tables(tables).group_by("word", use_threads=False)
    sums = by_word.aggregate([("texts", "sum"), ("occurrences", "sum")])
    return sums.select(["word", "texts_sum", "occurrences_sum"]).rename_columns(_FREQUENCIES.names)


def bm25_scores(part: WordCounts, frequencies: pa.Table, texts: int, settings: BM25Settings) -> "csc_array":
    """Scores of a part's words and texts, float32 (texts of the part, words). ``frequencies`` are over all ``texts``.

    Lucene's (Kamphuis et al., ECIR 2020, table 1): ``idf(t) tf / (tf + k1 (1 - b + b |d| / avgdl))``, idf ``ln(1 + (N -
    df + 0.5) / (df + 0.5))``.
    """
    from scipy.sparse import csc_array

    counts = part.counts
    places = pc.index_in(pa.array(part.words, pa.string()), value_set=frequencies["word"])
    document_frequencies = frequencies["texts"].take(places).to_numpy()
    idf = np.log(1 + (texts - document_frequencies + 0.5) / (document_frequencies + 0.5)).astype(np.float32)
    average_length = max(1, pc.sum(frequencies["occurrences"], min_count=0).as_py()) / texts
    saturation = settings.k1 * ((1 - settings.b) + settings.b * counts.sum(axis=1) / average_length)
    shares = counts.data / (saturation[counts.indices] + counts.data)
    scores = (np.repeat(idf, np.diff(counts.indptr)) * shares).astype(np.float32)
    return csc_array((scores, counts.indices, counts.indptr), counts.shape)


class LexicalIndex:
    """Finds texts of one part by ``bm25_scores`` of its ``words``."""

    def __init__(self, words: Sequence[str], scores: "csc_array", settings: BM25Settings) -> None:
        self._scores = scores
        self._tokenizer = _tokenizer_of(settings, {word: number for number, word in enumerate(words)})

    @classmethod
    def load(cls, index: Artifact, part: ShardRecord) -> Self:
        """One of an artifact's shards; arrays are memory-mapped."""
        from scipy.sparse import csc_array

        words = pq.read_table(index.path(WORDS.format(part.name)), columns=["word"])["word"].to_pylist()
        names = (ARRAYS.format(part.name, name) for name in ("scores", "indices", "indptr"))
        arrays = tuple(np.load(index.path(name), mmap_mode="r") for name in names)
        settings = validate(BM25Settings, index.config["index"]["bm25"], index.uri)
        return cls(words, csc_array(arrays, (part.rows, len(words))), settings)

    def search(self, query_texts: Sequence[str], k: int, first_row: int = 0) -> Ranking:
        """The ``k`` best texts of each query, score descending, then row ascending, which counts from ``first_row``.

        A text that shares no term with the query is no result: such places have row -1 and score -inf.
        """
        ranking = Ranking.empty(len(query_texts), k)
        tokenized = self._tokenizer.streaming_tokenize(query_texts, update_vocab=False, allow_empty=False)
        for query, tokens in enumerate(tokenized):
            if tokens:
                found, found_scores = _best(self._score(tokens), k)
                ranking.rows[query, : len(found)] = first_row + found
                ranking.scores[query, : len(found)] = found_scores
        return ranking

    def _score(self, query: Sequence[int]) -> NDArray[np.float32]:
        scores = np.zeros(self._scores.shape[0], dtype=np.float32)
        for word in query:
            place = slice(*self._scores.indptr[word : word + 2])
            scores[self._scores.indices[place]] += self._scores.data[place]  # none twice
        return scores


def _tokenizer_of(settings: BM25Settings, vocabulary: dict[str, int] | None = None) -> Any:
    """bm25s's tokenizer; it knows the terms of ``vocabulary`` (term to number), none by default."""
    from bm25s.tokenization import Tokenizer

    stemmer = Stemmer.Stemmer(settings.stemmer) if settings.stemmer else None
    without_either: dict[str, Any] = {"stopwords": settings.stop_words, "stemmer": stemmer}  # both may be None
    tokenizer = Tokenizer(lower=True, splitter=words_of, **without_either)
    if vocabulary is not None:
        tokenizer.stem_to_sid = vocabulary
        tokenizer.word_to_id = {} if settings.stemmer else vocabulary
    return tokenizer


def _best(scores: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows and scores of the ``k`` largest positive ``scores`` (documents,); of equal ones the first rows."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > k:
        threshold = np.partition(scores[rows], -k)[-k]
        rows = rows[scores[rows] >= threshold]
    order = np.argsort(-scores[rows], kind="stable")[:k]
    return rows[order], scores[rows[order]]
