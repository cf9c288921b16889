"""The base of objectives over batches of chunks: a retriever compares every chunk of a batch with every other.

Each chunk is encoded twice: as a query (with the query prompt, perhaps only its first half) and as a passage (with the
document prompt). So the matrix of their similarities is not symmetric. Or it is encoded once, as a passage.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from retrieval.encoders.specification import Role
from retrieval.encoders.text_encoder import TextEncoder
from trainers.engine.gradient_cache import Chunks, encode_chunks
from trainers.objective import Batch, Comparisons, Objective
from trainers.objectives.settings import ChunkSettings

_FEWEST_CHUNKS = 3
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class EncodedTwice:
    """B chunks as the retriever reads them. ``queries``: None where passages are compared with passages.

    ``sources``: int64 (B,), equal for chunks of one document. ``tokens``: of all texts, without padding.
    """

    passages: Chunks
    queries: Chunks | None
    sources: Tensor
    tokens: int


def first_half(text: str) -> str:
    """The first half of a text's words, rounded up, as they stand in the text: a text with a word keeps one."""
    words = list(_WORD.finditer(text))
    return text[: words[(len(words) - 1) // 2].end()] if words else text


SettingsOfChunks = TypeVar("SettingsOfChunks", bound=ChunkSettings)


class ChunkObjective(Objective[Batch], Generic[Batch, SettingsOfChunks]):
    """An objective over batches of layout ``chunks`` around one retriever; batches are never cut over ranks."""

    columns: tuple[str, ...] = ("document", "source_id", "domain")
    columns_from: ClassVar[str] = "Make batches of chunks (raytriever chunk, then group), or choose another objective."

    def __init__(self, retriever: TextEncoder, settings: SettingsOfChunks) -> None:
        super().__init__()
        self.retriever = retriever
        self.settings = settings

    def check_batches(self, batches: BatchReader) -> None:
        """Enough chunks for a choice, and the domains that are named.

        In a batch of two each chunk has one other, whatever the similarities say, and nothing is learnt.
        """
        if batches.batch_size < _FEWEST_CHUNKS:
            raise UserError(
                f"The batches in {batches.uri} have {batches.batch_size} chunks. With fewer than {_FEWEST_CHUNKS}"
                " the similarities have no choice to make and the retriever learns nothing. Group more chunks"
                " (grouping.batch_size; the paper has 16)."
            )
        if isinstance(self.settings.first_half, list):
            there = batches.distinct("domain")
            unknown = [domain for domain in self.settings.first_half if domain not in there]
            if unknown:
                raise UserError(
                    f"objective.first_half names the domain {unknown[0]!r}, which no chunk in {batches.uri} has."
                    f"{did_you_mean(unknown[0], sorted(there))}"
                )

    def collate_chunks(self, rows: pa.Table) -> EncodedTwice:
        """Tokenises the chunks for the retriever, as passages and as queries."""
        settings, texts = self.settings, rows["document"].to_pylist()
        passages = self.retriever.tokenize(texts, "document", settings.max_length)
        tokens, queries = int(passages["attention_mask"].sum()), None
        if settings.similarity == "asymmetric":
            asked = self._queries(texts, rows["domain"].to_pylist())
            features = self.retriever.tokenize(asked, "query", settings.max_length)
            tokens += int(features["attention_mask"].sum())
            queries = settings.cut(features, self.retriever)
        _, sources = np.unique(rows["source_id"].to_numpy(zero_copy_only=False), return_inverse=True)
        return EncodedTwice(settings.cut(passages, self.retriever), queries, torch.from_numpy(sources), tokens)

    def _queries(self, texts: Sequence[str], domains: Sequence[str]) -> list[str]:
        halved = self.settings.first_half
        return [
            first_half(text) if halved is True or (halved and domain in halved) else text
            for text, domain in zip(texts, domains, strict=True)
        ]

    def encode_sides(self, chunks: EncodedTwice) -> tuple[Tensor, Tensor]:
        """Vectors (B, d) of the queries and of the passages, float32, as the encoder returns them."""
        cached = self.settings.gradient_cache
        passages = encode_chunks(self.retriever, chunks.passages, cached=cached)
        if chunks.queries is None:
            return passages, passages
        return encode_chunks(self.retriever, chunks.queries, cached=cached), passages

    def comparisons(self, rows: pa.Table) -> Comparisons:
        """Each chunk with all others of its batch; none is marked as its answer."""
        count = len(rows)
        return Comparisons(count, count, in_batch=count - 1.0, hard=0.0, masked=0.0)

    def encoder(self, role: Role) -> TextEncoder:  # noqa: ARG002
        """The retriever, for both."""
        return self.retriever

    def export(self, folder: Path) -> None:
        """Writes the retriever alone."""
        self.retriever.save(folder)


@torch.no_grad()
def same_source_share(weights: Tensor, sources: Tensor) -> Tensor:
    """The share of each chunk's weight on chunks of its own document: the mean over rows, a scalar.

    ``weights`` (B, B) with rows that sum to 1 and nothing on the diagonal; ``sources`` int64 (B,).
    """
    return (weights * (sources[:, None] == sources)).sum(dim=1).mean()
