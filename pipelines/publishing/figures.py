"""What a published set of batches holds, counted batch by batch: the figures of its card."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from raytriever.pipelines.batches import Layout


@dataclass
class Figures:
    """Counts over batches, and examples of each domain."""

    counts: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)

    def add(self, batch: pa.Table, layout: Layout) -> None:
        """Counts one batch."""
        self.counts.update({"batches": 1, "examples": len(batch), "bytes in memory": batch.nbytes})
        self.counts.update(_COUNTED[layout](batch))
        domains = pc.value_counts(batch["domain"].combine_chunks())
        self.domains.update({item["values"]: item["counts"] for item in domains.to_pylist()})


def _count_pairs(batch: pa.Table) -> Mapping[str, int]:
    lengths = pc.list_value_length(batch["hard_negative_ids"])
    hard_negatives = _sum(lengths)
    return {
        "hard negatives": hard_negatives,
        "examples without a hard negative": _sum(pc.equal(lengths, 0)),
        "negatives": len(batch) * (len(batch) - 1 + hard_negatives),  # of all rows: the other documents of the batch
        "masked": _sum(pc.list_value_length(batch["masked"])),
        "query characters": _sum(pc.utf8_length(batch["query"])),
        "document characters": _sum(pc.utf8_length(batch["document"])),
    }


def _count_chunks(batch: pa.Table) -> Mapping[str, int]:
    return {
        "sources of batches": pc.count_distinct(batch["source_id"]).as_py(),
        "document characters": _sum(pc.utf8_length(batch["document"])),
    }


def _count_candidates(batch: pa.Table) -> Mapping[str, int]:
    relevance = pc.list_flatten(batch["candidate_relevance"])
    return {
        "candidates": _sum(pc.list_value_length(batch["candidate_ids"])),
        "relevant candidates": _sum(pc.greater(relevance, 0)),
        "query characters": _sum(pc.utf8_length(batch["query"])),
    }


def _sum(values: pa.ChunkedArray) -> int:
    return int(pc.sum(values).as_py() or 0)


_COUNTED = {"pairs": _count_pairs, "chunks": _count_chunks, "candidates": _count_candidates}


def figure_rows(figures: Figures, epochs: int, batch_size: int) -> list[tuple[str, str]]:
    """Names and values for a person, what doesn't apply left out."""
    counts = figures.counts
    examples = max(1, counts["examples"])
    rows = [
        ("epochs", f"{epochs:,}"),
        ("batches", f"{counts['batches']:,}"),
        ("examples of a batch", f"{batch_size:,}"),
        ("examples", f"{counts['examples']:,}"),
    ]
    if counts["negatives"]:
        rows += [
            ("hard negatives of an example", f"{counts['hard negatives'] / examples:.2f} on average"),
            ("negatives masked as false", f"{counts['masked']:,} of {counts['negatives']:,}, {_share(counts)}"),
        ]
    if counts["sources of batches"]:
        rows.append(
            ("sources in a batch", f"{counts['sources of batches'] / max(1, counts['batches']):.2f} on average")
        )
    if counts["candidates"]:
        rows += [
            ("candidates of a query", f"{counts['candidates'] / examples:.2f} on average"),
            ("of which relevant", f"{counts['relevant candidates'] / examples:.2f} on average"),
        ]
    for name in ("query", "document"):
        if counts[f"{name} characters"]:
            rows.append((f"characters of a {name}", f"{counts[f'{name} characters'] / examples:.0f} on average"))
    return rows


def _share(counts: Mapping[str, int]) -> str:
    return f"{counts['masked'] / counts['negatives']:.2%}"
