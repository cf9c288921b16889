"""The inverse cloze task (Lee, Chang and Toutanova, 2019, section 4): a sentence finds the passage it is from."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from raytriever.pipelines.chunking.words import TextWords
from raytriever.pipelines.queries.sentences import sentence_spans
from raytriever.pipelines.queries.sources import QUERY, Example, MadeDocument, SourceDocument, draws
from raytriever.retrieval.configuration import Settings


class InverseClozeQueries(Settings):
    """The query is a random sentence of a passage, the document is the passage, mostly without that sentence.

    Made for passages of a few sentences: chunk long documents before. Where the sentence stays, exact words are learnt
    too (the paper's rate of removal is 0.9). The document keeps its title.
    """

    kind: Literal["inverse_cloze"] = "inverse_cloze"
    removal: float = Field(default=0.9, ge=0, le=1)
    minimum_words: int = Field(default=4, ge=1)  # of the query, and of what is left of the passage without it
    per_passage: int = Field(default=1, ge=1)  # different sentences of one passage
    language: str = "en"  # ISO 639-1, of the rules that find sentences

    def examples(self, source: SourceDocument, seed: int, dropped: Counter[str]) -> Iterator[Example]:
        """``per_passage`` examples a passage, or as many as it has sentences; ``dropped`` counts passages."""
        for passage in source.passages:
            text = source.text_of(passage)
            usable = self._usable(text)
            if not usable:
                dropped["passages without a sentence to take out"] += 1
            random = draws(seed, self.kind, passage.id)
            for number in range(min(self.per_passage, len(usable))):
                start, end = usable.pop(int(random.random() * len(usable)))
                rest = without(text, start, end) if random.random() < self.removal else text
                made = MadeDocument(f"{passage.id}#{number}", source.title, rest)
                yield Example(QUERY + made.id, text[start:end], (made,))

    def _usable(self, text: str) -> list[tuple[int, int]]:
        """Sentences that are long enough and leave enough."""
        spans = sentence_spans(text, self.language)
        words = TextWords(text).word_starts(np.empty(0, np.int64))
        lengths = np.diff(np.searchsorted(words, np.array(spans).reshape(-1, 2))).ravel()
        longest = len(words) - self.minimum_words
        return [span for span, length in zip(spans, lengths, strict=True) if self.minimum_words <= length <= longest]


def without(text: str, start: int, end: int) -> str:
    """The text without a stretch of it and without the white space behind that, if there is some before."""
    before, after = text[:start], text[end:]
    if not before or before[-1].isspace():
        after = after.lstrip()
    return (before + after).strip()
