"""A stored batch as lines of text, so that a person can read it."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer
from numpy.typing import NDArray

from pipelines.batches import BatchReader, mask_of
from raytriever.artifacts.long_columns import places_among
from raytriever.command_line import echo
from raytriever.errors import UserError
from raytriever.reports.report import Plot, Section, render
from raytriever.reports.table import one_line
from retrieval.collections.collection import TextPart
from retrieval.vectors import StoredVectors

Row = dict[str, Any]

_CANDIDATES_SHOWN = 10  # of a list's best, beside its relevant ones
_PRINTED = 40  # queries of a matrix in a terminal, two characters a cell
_SHADES = " ░▒▓█"


def describe_batch(reader: BatchReader, epoch: int, index: int) -> Iterator[str]:
    """The batch as lines: what it is made of, then every example, as its layout has it."""
    rows = list(map(_named_on_one_line, reader.read(epoch, index).to_pylist()))
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


def _named_on_one_line(row: Row) -> Row:
    """The row with no line break in its ids and its domain."""
    names = {name: one_line(row[name]) for name in ("query_id", "document_id", "source_id", "domain") if name in row}
    return row | names | {"candidate_ids": list(map(one_line, row.get("candidate_ids", [])))}


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
            f"    {place:4}. {name}  {'not judged' if grade is None else f'relevance {grade}'}"
            + ("" if score is None else f", score {score:.4g}")
            for place, (name, grade, score) in enumerate(judged, 1)
            if grade or place <= _CANDIDATES_SHOWN
        ]
        yield from lines
        if len(lines) < len(row["candidate_ids"]):
            yield f"          … {len(row['candidate_ids']) - len(lines)} more"


def _shorten(label: str, text: str, lines: int) -> str:
    shown = textwrap.wrap(text, 100)
    more = " …" if len(shown) > lines else ""
    return "    " + label + ("\n" + " " * (4 + len(label))).join(shown[:lines]) + more


def batch_matrix(rows: pa.Table, vectors: StoredVectors) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Similarities of a batch's queries with its documents, then with its hard negatives, and which are masked: (B, M).

    Raises ``UserError`` as ``text_vectors``.
    """
    ids = [*rows["document_id"].chunks, *pc.list_flatten(rows["hard_negative_ids"]).chunks]
    documents = text_vectors(vectors, "documents", pa.chunked_array(ids))
    return text_vectors(vectors, "queries", rows["query_id"]) @ documents.T, mask_of(rows)


def text_vectors(vectors: StoredVectors, part: TextPart, ids: pa.ChunkedArray) -> NDArray[np.float32]:
    """The vectors of texts by their ids: (n, d). Raises ``UserError`` where a text has none, or several."""
    stored = vectors.part(part)
    stored.require_all()
    places = places_among(ids, stored.ids())
    if (places < 0).any() or stored.vectors_per_text > 1:
        raise UserError(
            f"{vectors.uri} does not hold one vector for each of the batch's {part}. Give vectors of the batches'"
            " own collection, from an encoder with one vector a text."
        )
    return stored.gather(places)


def matrix_lines(scores: NDArray[np.float32], mask: NDArray[np.bool_]) -> Iterator[str]:
    """A line for each of a batch's first 40 queries, a cell for each of their documents."""
    scores, mask = scores[:_PRINTED, :_PRINTED], mask[:_PRINTED, :_PRINTED]
    low, high = float(scores.min()), float(scores.max())
    shades = np.rint((scores - low) / max(high - low, 1e-9) * (len(_SHADES) - 1)).astype(int)
    yield f"similarities of {len(scores)} queries and their documents, from {low:.2f} to {high:.2f} (██); xx: masked"
    for row, left_out in zip(shades.tolist(), mask.tolist(), strict=True):
        yield "    " + "".join("xx" if out else _SHADES[shade] * 2 for shade, out in zip(row, left_out, strict=True))


def show(
    batches: Annotated[str, typer.Argument(help="A batches artifact.")],
    batch: Annotated[int, typer.Option(help="Number of the batch.")] = 0,
    epoch: Annotated[int, typer.Option(help="Number of the epoch.")] = 0,
    vectors: Annotated[str | None, typer.Option(help="Vectors of the collection, to show similarities too.")] = None,
    html: Annotated[Path | None, typer.Option(help="HTML file to write, with the matrix of similarities.")] = None,
) -> None:
    """Prints one stored batch so that a person can read it."""
    reader = BatchReader(batches)
    lines = list(describe_batch(reader, epoch, batch))
    if vectors is not None and reader.layout == "pairs":
        from raytriever.reports.plots import heat_map

        scores, mask = batch_matrix(reader.read(epoch, batch), StoredVectors(vectors))
        lines += ["", *matrix_lines(scores, mask)]
        if html is not None:
            plot = Plot(
                heat_map(scores, mask, lines[0]), ("Rows are queries, columns documents and then hard negatives.")
            )
            section = Section("Similarities", "Darker cells are more similar; orange cells are masked.", [plot])
            html.write_text(render(lines[0], reader.uri, [section]), encoding="utf-8")
    elif vectors or html:
        raise UserError("A matrix of similarities needs batches of pairs and --vectors: give both.")
    echo("\n".join(lines))
