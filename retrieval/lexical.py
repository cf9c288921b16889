"""Lexical retrieval by BM25, in Lucene's form; bm25s splits texts and stems their words.

Texts are counted part by part, and what words all parts have is added up: a text's score is the same whatever it shares
a part with.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import Stemmer
from bm25s.tokenization import Tokenizer
from numpy.typing import NDArray
from pydantic import Field, field_validator
from scipy.sparse import csc_array, csr_array

from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.settings.configuration import Settings
from retrieval.indexes.top_k import Ranking
from retrieval.words import words_of

StopWords = Literal[
    "chinese", "danish", "dutch", "english", "english_plus", "french", "german", "italian", "korean",
    "norwegian", "portuguese", "russian", "spanish", "swedish", "turkish",
]  # fmt: skip

ALL_WORDS, WORDS_OF = "lexical/all_words.parquet", "lexical/{}/words.parquet"
_ARRAYS = ("data", "indices", "indptr")
_FREQUENCIES = pa.schema([("word", pa.string()), ("texts", pa.int64())])


class BM25Settings(Settings):
    """How texts are analysed and scored; the defaults are those of Anserini for passages, with English."""

    k1: float = Field(default=0.9, ge=0)
    """How slowly a repeated term saturates."""
    b: float = Field(default=0.4, ge=0, le=1)
    """How far long documents are discounted."""
    stemmer: str | None = "english"
    """A Snowball language of PyStemmer, or null."""
    stop_words: StopWords | None = "english"
    """A list of bm25s, or null."""

    @field_validator("stemmer")
    @classmethod
    def _known_stemmer(cls, value: str | None) -> str | None:
        if value is not None and value not in Stemmer.algorithms():
            raise ValueError(f"no such stemmer; allowed are null and {', '.join(Stemmer.algorithms())}")
        return value


class WordCounts(NamedTuple):
    """How often each of ``words`` (w,) is in each of some texts: ``counts``, int32 (texts, w), by words."""

    words: list[str]
    counts: csc_array

    @classmethod
    def of(cls, texts: Iterable[str], settings: BM25Settings) -> Self:
        """By the words of ``words_of`` in lower case. Texts are read once; of each, four bytes a word are in memory."""
        tokenizer = _tokenizer_of(settings)
        found = tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False)
        of_texts = [array("i", ids) for ids in found]
        ids = np.concatenate([np.empty(0, dtype=np.int32), *of_texts])
        starts = np.cumsum([0, *map(len, of_texts)])
        vocabulary = tokenizer.get_vocab_dict()
        counts = csr_array((np.ones(len(ids), dtype=np.int32), ids, starts), (len(of_texts), len(vocabulary))).tocsc()
        counts.sum_duplicates()
        return cls(sorted(vocabulary, key=vocabulary.__getitem__), counts)

    def frequencies(self) -> pa.Table:
        """Each ``word``, and how many ``texts`` have it."""
        return pa.table([self.words, np.diff(self.counts.indptr)], schema=_FREQUENCIES)

    def add_to(self, writer: ShardWriter, name: str) -> None:
        """Puts files into an artifact that ``LexicalIndex.load`` reads as part ``name``."""
        writer.add_table(WORDS_OF.format(name), self.frequencies())
        for array_ in _ARRAYS:
            writer.add_array(f"lexical/{name}/{array_}.npy", getattr(self.counts, array_))


def add_up(tables: Iterable[pa.Table]) -> pa.Table:
    """The ``frequencies`` of words over several parts."""
    total = _FREQUENCIES.empty_table()
    for table in tables:
        by_word = pa.concat_tables([total, table]).group_by("word", use_threads=False)
        total = by_word.aggregate([("texts", "sum")]).select(["word", "texts_sum"]).rename_columns(_FREQUENCIES.names)
    return total


class LexicalIndex:
    """Finds texts of one part by BM25, Lucene's (Kamphuis et al., ECIR 2020, table 1).

    ``idf(t) tf / (tf + k1 (1 - b + b |d| / avgdl))``, idf ``ln(1 + (N - df + 0.5) / (df + 0.5))``.
    """

    def __init__(
        self, part: WordCounts, frequencies: pa.Table, texts: int, average: float, settings: BM25Settings
    ) -> None:
        """``frequencies`` of words in all ``texts``, which have ``average`` words."""
        counts = part.counts
        own = pc.index_in(pa.array(part.words, pa.string()), value_set=frequencies["word"])
        found = frequencies["texts"].take(own).to_numpy()
        idf = np.log(1 + (texts - found + 0.5) / (found + 0.5)).astype(np.float32)
        saturation = settings.k1 * ((1 - settings.b) + settings.b * counts.sum(axis=1) / (average or 1))
        shares = counts.data / (saturation[counts.indices] + counts.data)
        scores = (np.repeat(idf, np.diff(counts.indptr)) * shares).astype(np.float32)
        self._scores = csc_array((scores, counts.indices, counts.indptr), counts.shape)
        self._tokenizer = _tokenizer_of(settings, {word: number for number, word in enumerate(part.words)})

    @classmethod
    def load(cls, index: Artifact, part: ShardRecord) -> Self:
        """Of one of an artifact's shards."""
        base, settings = f"lexical/{part.name}", BM25Settings.model_validate(index.config["index"]["bm25"])
        words = pq.read_table(index.path(WORDS_OF.format(part.name)))["word"].to_pylist()
        arrays = tuple(np.load(index.path(f"{base}/{name}.npy"), mmap_mode="r") for name in _ARRAYS)
        counts = WordCounts(words, csc_array(arrays, (part.rows, len(words))))
        average = index.manifest["counts"]["words"] / index.rows
        return cls(counts, pq.read_table(index.path(ALL_WORDS)), index.rows, average, settings)

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
            scores[self._scores.indices[place]] += self._scores.data[place]  # a word has a text once
        return scores


def _tokenizer_of(settings: BM25Settings, vocabulary: dict[str, int] | None = None) -> Any:
    """bm25s's tokenizer; it knows the terms of ``vocabulary`` (term to number), none by default."""
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
