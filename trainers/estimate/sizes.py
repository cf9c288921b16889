"""How much a recipe's stages read: of what is stored already, else by published numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pyarrow.compute as pc

from pipelines.batches import BATCHES, BatchReader
from pipelines.pairs.pairs import PAIRS
from raytriever.artifacts.artifact import Artifact, is_artifact
from raytriever.stages.cost import BYTES_OF_A_WORD, Size
from retrieval.collections.collection import COLLECTION, StoredCollection, TextPart
from trainers.estimate.outlines import published
from trainers.rehearsal.collections import single_sources

_SPLITS = ("qrels", "triples", "examples", "questions", "splits")  # settings of sources that name some
_OF_COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("query_bytes", "query", pc.binary_length),
    ("document_bytes", "document", pc.binary_length),
    ("negatives", "hard_negatives", pc.list_value_length),
    ("candidates", "candidate_rows", pc.list_value_length),
)


def joined(read: Sequence[Size]) -> Size:
    """What is known of all inputs; the largest where several say it."""
    names = [field.name for field in fields(Size) if field.name not in ("splits", "disk")]
    found: dict[str, Any] = {name: max(getattr(size, name) for size in [Size(), *read]) for name in names}
    splits = {split: of for size in read for split, of in size.splits.items()}
    return Size(**found, splits=splits, disk=sum(size.disk for size in read))


def published_size(config: Any) -> Size:
    """Of the sources of a collection."""
    found = Size()
    for source in single_sources(config.source):
        name = str(getattr(source, "path", "")).removeprefix("hf://datasets/").partition("@")[0]
        known = published()["collections"].get(name)
        if known is None:
            continue
        named = {split for key in _SPLITS for split in getattr(source, key, None) or ()}
        splits = {split: (of[0], of[-1]) for split, of in known["splits"].items() if not named or split in named}
        found = Size(
            documents=found.documents + known["documents"],
            document_bytes=known["document_words"] * BYTES_OF_A_WORD,
            query_bytes=known["query_words"] * BYTES_OF_A_WORD,
            splits={**found.splits, **splits},
            domains=tuple(known.get("domains", ())),
        )
    return replace(found, disk=found.texts)


def stored_size(uri: str, size: Size) -> Size:
    """``size``, put right by what is stored at ``uri``, if anything is."""
    if not is_artifact(uri):
        return size
    artifact = Artifact(uri)
    if artifact.kind == COLLECTION:
        size = _of_collection(StoredCollection(uri))
    if artifact.kind == PAIRS:
        size = replace(size, pairs=artifact.rows, domains=(artifact.rows,))
    if artifact.kind == BATCHES:
        size = _of_batches(size, BatchReader(uri))
    return replace(size, disk=artifact.bytes)


def _of_collection(collection: StoredCollection) -> Size:
    queries, judgments = collection.count("queries"), Counter[str]()
    for table in collection.rows_of("judgments").tables(["split"]):
        judgments.update(table["split"].to_pylist())
    judged = {split: (min(queries, pairs), pairs) for split, pairs in judgments.items()}
    lengths = _bytes_of_a_text(collection, "documents"), _bytes_of_a_text(collection, "queries")
    return Size(collection.count("documents"), *lengths, splits=judged or {"all": (queries, 0)})


def _bytes_of_a_text(collection: StoredCollection, part: TextPart) -> float:
    """On average, of the first rows; 0 where there are none."""
    for table in collection.rows_of(part).tables(["text"]):
        return float(pc.mean(pc.binary_length(table["text"])).as_py())
    return 0


def _of_batches(size: Size, batches: BatchReader) -> Size:
    """Texts are as long as the first batch's."""
    rows, count, table = batches.batch_size, batches.number_of_batches(0), batches.read(0, 0)
    found: dict[str, Any] = {"rows": rows, "batches": count, "epochs": batches.epochs, "pairs": count * rows}
    for name, column, length in _OF_COLUMNS:
        if column in table.column_names:
            found[name] = round(pc.mean(length(table[column])).as_py())
    return replace(size, **found)
