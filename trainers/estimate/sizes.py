"""How much a recipe's stages read and write: of what is stored already, else by published numbers and the settings."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pyarrow.compute as pc

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact, is_artifact
from raytriever.stages.stage import Stage
from retrieval.collections.collection import StoredCollection, TextPart
from trainers.estimate.costs import Size
from trainers.estimate.outlines import published
from trainers.rehearsal.collections import single_sources

_BYTES_OF_A_WORD = 6
_SPLITS = ("qrels", "triples", "examples", "questions", "splits")  # settings of sources that name some
_OF_COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("query_bytes", "query", pc.binary_length),
    ("document_bytes", "document", pc.binary_length),
    ("negatives", "hard_negatives", pc.list_value_length),
    ("candidates", "candidate_rows", pc.list_value_length),
)
_FULL = 0.8  # of a chunk's words, on average


def size_of(stage: Stage[Any], inputs: Sequence[Size]) -> Size:
    """Of a stage that reads what has these sizes."""
    config: Any = stage.config
    read, stored = _joined(inputs), is_artifact(config.output)
    match stage.command:
        case "collect":
            return _collected(config, stored=stored)
        case "chunk":
            each = config.chunking.max_words * _FULL * _BYTES_OF_A_WORD
            return replace(read, documents=read.documents * read.document_bytes / each, document_bytes=each)
        case "pairs":
            if stored:
                return replace(read, pairs=Artifact(config.output).rows)
            splits = [config.split] if isinstance(config.split, str) else config.split
            judged = [read.splits.get(split, [0, 0]) for split in splits]
            pairs = sum(of[-1] for of in judged)
            return replace(read, pairs=min(pairs, sum(of[0] for of in judged) * (config.documents_per_query or pairs)))
        case "pack":
            rows = config.packing.batch_size
            return replace(read, rows=rows, batches=read.pairs // rows, epochs=config.epochs)
        case "mine":
            return replace(read, candidates=config.number or read.candidates)
        case "search":
            return replace(read, candidates=config.top_k, results=read.queries(config.split) * config.top_k)
        case "filter":
            made = replace(read, negatives=config.negatives_per_example * config.has_negatives)
        case "group":
            rows = config.grouping.batch_size
            batches = config.batches_per_epoch or read.documents // rows
            made = replace(read, rows=rows, batches=batches, epochs=config.epochs)
        case "lists":
            rows = config.batch_size
            made = replace(read, rows=rows, batches=read.queries("train") // rows, epochs=config.epochs)
        case "train":
            return _of_batches(read, BatchReader(config.batches)) if is_artifact(config.batches) else read
        case _:
            return read
    if not stored:
        return replace(made, pairs=made.batches * made.rows)
    return _of_batches(made, BatchReader(config.output))


def _of_batches(size: Size, batches: BatchReader) -> Size:
    """Of those that are there; texts as long as the first batch's."""
    rows, count, table = batches.batch_size, batches.number_of_batches(0), batches.read(0, 0)
    found: dict[str, Any] = {"rows": rows, "batches": count, "epochs": batches.epochs, "pairs": count * rows}
    for name, column, length in _OF_COLUMNS:
        if column in table.column_names:
            found[name] = round(pc.mean(length(table[column])).as_py())
    return replace(size, **found)


def _joined(read: Sequence[Size]) -> Size:
    """What is known of any input; the largest where several say it."""
    names = [each.name for each in fields(Size) if each.name not in ("splits", "domains")]
    joined: dict[str, Any] = {name: max(getattr(size, name) for size in [Size(), *read]) for name in names}
    return Size(**joined, splits={name: of for size in read for name, of in size.splits.items()})


def _bytes_of_a_text(collection: StoredCollection, part: TextPart) -> float:
    """On average, of the first rows; 0 where there are none."""
    for table in collection.rows_of(part).tables(["text"]):
        return float(pc.mean(pc.binary_length(table["text"])).as_py())
    return 0


def _collected(config: Any, *, stored: bool) -> Size:
    if stored:
        collection = StoredCollection(config.output)
        queries, judgments = collection.count("queries"), Counter[str]()
        for table in collection.rows_of("judgments").tables(["split"]):
            judgments.update(table["split"].to_pylist())
        judged = {split: [min(queries, pairs), pairs] for split, pairs in judgments.items()}
        documents, query_bytes = collection.count("documents"), _bytes_of_a_text(collection, "queries")
        document_bytes = _bytes_of_a_text(collection, "documents")
        return Size(documents, document_bytes, query_bytes, splits=judged or {"all": [queries, 0]})
    joined = Size()
    for source in single_sources(config.source):
        name = str(getattr(source, "path", "")).removeprefix("hf://datasets/").partition("@")[0]
        known = published()["collections"].get(name)
        if known is None:
            continue
        named = {split for key in _SPLITS for split in getattr(source, key, None) or ()}
        splits = {name: [of[0], of[-1]] for name, of in known["splits"].items() if not named or name in named}
        joined = Size(
            documents=joined.documents + known["documents"],
            document_bytes=known["document_words"] * _BYTES_OF_A_WORD,
            query_bytes=known["query_words"] * _BYTES_OF_A_WORD,
            splits={**joined.splits, **splits},
        )
    return joined
