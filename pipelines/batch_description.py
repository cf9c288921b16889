"""A stored batch as lines of text, so that a person can read it."""

import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from pipelines.batches import BatchReader
from raytriever.command_line import echo

Row = dict[str, Any]

_CANDIDATES_SHOWN = 10  # of a list's best, beside its relevant ones


def describe_batch(reader: BatchReader, epoch: int, index: int) -> Iterator[str]:
    """The batch as lines: what it is made of, then every example, as its layout has it."""
    rows = reader.read(epoch, index).to_pylist()
    domains = sorted({row["domain"] or "(none)" for row in rows})
    yield f"batch {index} of epoch {epoch} ({reader.number_of_batches(epoch)} batches), {len(rows)} examples"
    yield f"domains: {', '.join(domains)}"
    match reader.layout:
        case "pairs":
            yield from _pairs(rows)
        case "chunks":
            yield from _chunks(rows)
        case "candidates":
            yield from _candidates(rows)


def _pairs(rows: list[Row]) -> Iterator[str]:
    """Clusters and the masked share, then each example with the documents that its row leaves out."""
    clusters = sorted({row["cluster"] for row in rows} - {-1})
    if clusters:
        yield f"clusters: {', '.join(map(str, clusters))}"
    # what a mask's columns mean: the batch's documents, then all hard negatives in row order
    columns = [f"[{number}]" for number in range(len(rows))]
    for number, row in enumerate(rows):
        columns += [f"[{number}] negative {place}" for place in range(len(row["hard_negatives"]))]
    masked = sum(len(row["masked"]) for row in rows)
    cells = len(rows) * (len(columns) - 1)
    yield f"masked: {masked} of {cells} negatives ({masked / max(cells, 1):.1%})"
    for number, row in enumerate(rows):
        yield ""
        yield f"[{number}] query {row['query_id']}, document {row['document_id']}"
        yield _shorten("query:      ", row["query"], 2)
        yield _shorten("document:   ", row["document"], 4)
        for place, negative in enumerate(row["hard_negatives"]):
            yield _shorten(f"negative {place}: ", negative, 2)
        if row["masked"]:
            yield f"    masked:     {', '.join(columns[column] for column in row['masked'])}"


def _chunks(rows: list[Row]) -> Iterator[str]:
    """For each source its number of chunks here, and their range. Then each chunk, in the same order."""
    numbered = sorted(enumerate(rows), key=lambda item: (item[1]["source_id"], item[1]["number"]))
    sources: dict[str, list[int]] = {}
    for _, row in numbered:
        sources.setdefault(row["source_id"], []).append(row["number"])
    yield f"sources: {len(sources)}"
    for source, numbers in sources.items():
        yield f"    {source}: {len(numbers)} chunks, {numbers[0]} to {numbers[-1]}"
    for place, row in numbered:
        yield ""
        yield f"[{place}] {row['source_id']}, chunk {row['number']}"
        yield _shorten("", row["document"], 4)


def _candidates(rows: list[Row]) -> Iterator[str]:
    """Each query with its list: what is judged, and the first of the rest."""
    lengths = [len(row["candidate_ids"]) for row in rows]
    relevant = sum((grade or 0) > 0 for row in rows for grade in row["candidate_relevance"])
    yield f"candidates: {min(lengths)} to {max(lengths)} a query; {relevant} of {sum(lengths)} relevant"
    for number, row in enumerate(rows):
        yield ""
        yield f"[{number}] query {row['query_id']}"
        yield _shorten("query: ", row["query"], 2)
        judged = zip(row["candidate_ids"], row["candidate_relevance"], row["candidate_scores"], strict=True)
        lines = [
            f"    {place:4}. {name}  {'not judged' if grade is None else f'relevance {grade}'}{_score(score)}"
            for place, (name, grade, score) in enumerate(judged, 1)
            if grade or place <= _CANDIDATES_SHOWN
        ]
        yield from lines
        if len(lines) < len(row["candidate_ids"]):
            yield f"          … {len(row['candidate_ids']) - len(lines)} more"


def _score(score: float | None) -> str:
    return "" if score is None else f", score {score:.4g}"


def _shorten(label: str, text: str, lines: int) -> str:
    shown = textwrap.wrap(text, 100)
    more = " …" if len(shown) > lines else ""
    return "    " + label + ("\n" + " " * (4 + len(label))).join(shown[:lines]) + more


def show(
    batches: Annotated[str, typer.Argument(help="A batches artifact.")],
    batch: Annotated[int, typer.Option(help="Number of the batch.")] = 0,
    epoch: Annotated[int, typer.Option(help="Number of the epoch.")] = 0,
) -> None:
    """Prints one stored batch so that a person can read it."""
    echo("\n".join(describe_batch(BatchReader(batches), epoch, batch)))
