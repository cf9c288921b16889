"""Lexical retrieval by BM25, in Lucene's form, over bm25s.

An index is a folder: bm25s's own files (sparse scores as ``.npy``, vocabulary and parameters as JSON) and
``settings.json``, which also says how words were split. Nothing is pickled, equal texts and settings give equal bytes,
and the scores are memory-mapped.
"""

import json
import logging
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import bm25s
import numpy as np
import Stemmer
from bm25s.tokenization import Tokenizer
from numpy.typing import NDArray
from pydantic import Field, field_validator

from raytriever.errors import UserError
from raytriever.settings.configuration import Settings, validate
from retrieval.indexes.top_k import Ranking
from retrieval.words import words_of

StopWords = Literal[
    "chinese", "danish", "dutch", "english", "english_plus", "french", "german", "italian", "korean",
    "norwegian", "portuguese", "russian", "spanish", "swedish", "turkish",
]  # fmt: skip

_SETTINGS = "settings.json"

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG, past the root logger's level


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


class LexicalIndex:
    """BM25 scores of a collection's terms; rows number the texts in the order in which they were given."""

    def __init__(self, scorer: Any, settings: BM25Settings) -> None:
        """``scorer``: a ``bm25s.BM25`` that holds an index; use ``build`` or ``load``."""
        self.settings = settings
        self._scorer = scorer
        self._tokenizer = _tokenizer_of(settings, scorer.vocab_dict)

    @classmethod
    def build(cls, texts: Iterable[str], settings: BM25Settings) -> "LexicalIndex":
        """Indexes ``texts``, read once; of each, four bytes a token stay in memory.

        Lucene's BM25 (Kamphuis et al., ECIR 2020, table 1): ``idf(t) tf / (tf + k1 (1 - b + b |d| /
        avgdl))``, idf ``ln(1 + (N - df + 0.5) / (df + 0.5))``, of the words of ``words_of`` in lower case. Raises
        ``UserError`` where there is no text.
        """
        tokenizer = _tokenizer_of(settings)
        tokens = tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False)
        documents = [array("i", ids) for ids in tokens]
        if not documents:
            raise UserError("BM25 was given no text to index. Is the collection empty, or everything filtered out?")
        scorer = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy")
        vocabulary = tokenizer.get_vocab_dict()
        with np.errstate(invalid="ignore"):  # where no text has a word, the average length is 0
            scorer.index((documents, vocabulary), create_empty_token=False, show_progress=False)
        return cls(scorer, settings)

    def save(self, folder: Path) -> None:
        """Writes the index into ``folder``, which is made where absent."""
        self._scorer.save(folder, show_progress=False)
        text = json.dumps(self.settings.model_dump(mode="json"), indent=1, sort_keys=True)
        (folder / _SETTINGS).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "LexicalIndex":
        """Opens what ``save`` wrote. Raises ``UserError`` for a folder without such an index."""
        try:
            settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
            scorer = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{folder} holds no BM25 index ({error}). Build it again.") from error
        return cls(scorer, validate(BM25Settings, settings, str(folder / _SETTINGS)))

    def search(self, query_texts: Sequence[str], k: int) -> Ranking:
        """The ``k`` best texts of each query, score descending, then row ascending.

        A text that shares no term with the query is no result: such places have row -1 and score -inf.
        """
        ranking = Ranking.empty(len(query_texts), k)
        tokenized = self._tokenizer.streaming_tokenize(query_texts, update_vocab=False, allow_empty=False)
        for query, tokens in enumerate(tokenized):
            if tokens:
                found, found_scores = _best(self._scorer.get_scores_from_ids(tokens), k)
                ranking.rows[query, : len(found)] = found
                ranking.scores[query, : len(found)] = found_scores
        return ranking


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
