"""The similarities of one batch: every query's with every document's, and what is masked."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.batches import mask_of
from raytriever.artifacts.long_columns import places_among
from raytriever.errors import UserError
from retrieval.collections.collection import TextPart
from retrieval.vectors import StoredVectors

_PRINTED = 40  # queries of a matrix in a terminal, two characters a cell
_SHADES = " ░▒▓█"


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
            f"{vectors.uri} does not hold one vector for each of the batch's {part}. Give those of the collection that"
            " the batches were made from, by an encoder with one vector a text."
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
