"""Stretches of a passage as queries: the independent crops of Contriever (Izacard et al., 2022, section 3.2)."""

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pipelines.queries.examples import Example, MadeDocument, SourceDocument, draws
from raytriever.settings.configuration import Settings
from retrieval.words import Offsets, TextWords


class CropQueries(Settings):
    """Query and document are two spans of words of the same passage, drawn independently, so they may overlap.

    Made for passages (256 tokens in the paper), so chunk long documents before. A span's length is uniform between two
    shares of the passage's words, 5 % and 50 % by default. Each of its words is left out with a probability of 10 %, as
    the paper does for tokens.
    """

    kind: Literal["crops"] = "crops"
    """A random span of words is the query, and another span of the same passage is the answer."""
    minimum_share: float = Field(default=0.05, gt=0, le=1)
    """Share of a passage's words in the shortest span."""
    maximum_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a passage's words in the longest span."""
    word_deletion: float = Field(default=0.1, ge=0, lt=1)
    """Probability of deleting each word of a span."""
    minimum_words: int = Field(default=4, ge=1)
    """Fewest words of a span before deletion. Passages with fewer are dropped."""
    per_passage: int = Field(default=1, ge=1)
    """Examples made of each passage."""

    @model_validator(mode="after")
    def _shares_are_in_order(self) -> Self:
        if self.minimum_share > self.maximum_share:
            raise ValueError(
                f"minimum_share ({self.minimum_share}) is above maximum_share ({self.maximum_share}); lower it"
            )
        return self

    def examples(self, source: SourceDocument, seed: int, dropped: Counter[str]) -> Iterator[Example]:
        """``per_passage`` examples a passage; ``dropped`` counts passages that are too short."""
        for passage in source.passages:
            text = source.text_of(passage)
            words = TextWords(text).word_starts(np.empty(0, np.int64))
            if len(words) < self.minimum_words:
                dropped["passages too short"] += 1
                continue
            random = draws(seed, self.kind, passage.id)
            for number in range(self.per_passage):
                query, document = self._crop(text, words, random), self._crop(text, words, random)
                made = MadeDocument(f"{passage.id}#{number}", "", document)
                yield Example(made.id, query, (made,))

    def _crop(self, text: str, words: Offsets, random: Random) -> str:
        share = self.minimum_share + random.random() * (self.maximum_share - self.minimum_share)
        length = max(self.minimum_words, round(share * len(words)))
        first = int(random.random() * (len(words) - length + 1))
        last = first + length
        kept = [place for place in range(first, last) if random.random() >= self.word_deletion] or [first]
        bounds = [*words[first : last + 1].tolist(), len(text)]  # a word goes with the white space behind it
        return "".join(text[bounds[place - first] : bounds[place - first + 1]] for place in kept).strip()
