"""The report's section on chunks: how long they are, how documents were cut into them, and what they look like."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.reports.examples import excerpt
from raytriever.reports.plots import counted_bars
from raytriever.reports.report import Block, Details, Plot, Section
from raytriever.reports.table import Cell, Table, counted
from retrieval.collections.collection import StoredCollection

_CUT_AS = "sources_cut_as_"
_EXAMPLES = 5  # chunks after one another

# what is counted on the way, in words
_COUNTED = {
    "sentences_cut_by_words": "sentences longer than a chunk, cut by words",
    "lines_longer_than_a_chunk": "lines longer than a chunk, kept whole",
    "chunks_shorter_than_min_words": "chunks shorter than min_words",
    "sources_not_parsed": "sources of code that have no parser here",
    "sources_with_syntax_errors": "sources of code with syntax errors",
    "windows_not_segmented": "stretches of text that could not be segmented into sentences",
}


def chunks_section(chunks: StoredCollection) -> Section | None:
    """None where the collection was not made by `raytriever chunk`."""
    histogram = chunks.manifest["facts"].get("words_per_chunk")
    if histogram is None or not chunks.rows:
        return None
    most = int(chunks.config["chunking"]["max_words"])
    blocks: list[Block] = [
        _plot(histogram, most),
        Table(["quantity", "count"], _rows(chunks)),
        Details("Examples: chunks that follow on one another", _example_table(chunks)),
    ]
    return Section("Chunks", _lead(chunks, histogram, most), blocks)


def _lead(chunks: StoredCollection, histogram: Mapping[str, Any], most: int) -> str:
    counts = chunks.manifest["counts"]
    sources = counts["source_documents"]
    by_bin = np.array([*histogram["chunks"], histogram["longer"]])
    mean = counts["words"] / chunks.rows
    lead = (
        f"{counted(sources, 'document')} cut into {counted(chunks.rows, 'chunk')}, {chunks.rows / sources:,.1f} a"
        " document; put together again they are the texts as they were. A chunk has"
        f" {mean:,.0f} words on average; {length_sentence(histogram['up_to'], by_bin)}"
    )
    cut, longer = counts.get("sentences_cut_by_words", 0), int(histogram["longer"])
    lead += f" Sentences of more than {most} words, cut by words: {cut:,}." if cut else ""
    lead += f" Chunks of more than {most} words, since lines are never cut: {longer:,}." if longer else ""
    return lead


def length_sentence(up_to: Sequence[int], counts: NDArray[np.int64]) -> str:
    """Where half of the chunks are, and how many are nearly as long as allowed.

    ``counts`` (n + 1,): chunks of at most ``up_to`` (n,) words each, and last those that are longer.
    """
    total = counts.sum()
    median = int(np.searchsorted(np.cumsum(counts), total / 2))
    half = f"at most {up_to[median]:,}" if median < len(up_to) else f"more than {up_to[-1]:,}"
    near_full = next(number for number, bound in enumerate(up_to) if bound >= 0.75 * up_to[-1])
    share = counts[near_full + 1 :].sum() / total
    return f"half of them have {half}, and {share:.0%} have more than {up_to[near_full]:,}."


def _plot(histogram: Mapping[str, Any], most: int) -> Plot:
    bounds, counts, longer = list(histogram["up_to"]), list(histogram["chunks"]), int(histogram["longer"])
    edges = [0.0, *map(float, bounds)]
    caption = f"Lengths of all {sum(counts) + longer:,} chunks in words."
    if longer:
        edges.append(edges[-1] + bounds[0])
        counts.append(longer)
        caption += f" The last bar holds all {longer:,} that are longer than max_words."
    marks = {f"max_words {most}": float(most)}
    return Plot(counted_bars(edges, counts, "words", "chunks", "Histogram of chunk lengths", marks), caption)


def _rows(chunks: StoredCollection) -> list[Sequence[str | Cell]]:
    counts = chunks.manifest["counts"]
    rows: list[Sequence[str | Cell]] = [["chunks", f"{chunks.rows:,}"]]
    rows.append(["source documents", f"{counts['source_documents']:,}"])
    rows.append(["words", f"{counts['words']:,}"])
    kinds = sorted(name for name in counts if name.startswith(_CUT_AS))
    rows += [[f"sources cut as {name.removeprefix(_CUT_AS)}", f"{counts[name]:,}"] for name in kinds]
    rows += [[words, f"{counts[name]:,}"] for name, words in _COUNTED.items() if counts.get(name)]
    again = chunks.manifest["facts"].get("titles_that_come_again", 0)
    if again:
        rows.append(["titles that came again after others, not joined", f"{again:,}"])
    return rows


def _example_table(chunks: StoredCollection) -> Table:
    """Chunks in the middle of the collection."""
    first = max(0, chunks.rows // 2 - _EXAMPLES // 2)
    places = np.arange(first, min(first + _EXAMPLES, chunks.rows))
    columns = ["source_id", "number", "start", "end", "text"]
    rows = [
        [row["source_id"], excerpt(row["text"]), f"{row['number']:,}", f"{row['start']:,}", f"{row['end']:,}"]
        for row in chunks.rows_of("documents").take(places, columns).to_pylist()
    ]
    caption = "From the middle of the collection; start and end are characters of the source's text."
    return Table(["source", "text", "number", "start", "end"], rows, caption, text_columns=2)
