"""The report's section on the data: the collection and the pairs made from it."""

from collections import Counter
from collections.abc import Sequence

import pyarrow.compute as pc

from raytriever.pipelines.reports.pairs import (
    domains_of_pairs,
    duplicates_sentence,
    pair_examples,
    pairs_rows,
    pairs_sentence,
)
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.report import Block, Cell, Section, Table

_QUERIES_MADE = {
    "title": "a document's title finds its text",
    "headings": "a heading finds its section",
    "inverse_cloze": "a sentence taken out of a text finds the rest",
    "crops": "two crops of one text find each other",
    "docstring": "a docstring or comment finds the code it describes",
}


def data_section(collection: StoredCollection | None, pairs: Artifact | None) -> Section | None:
    """None where there is neither."""
    if collection is None and pairs is None:
        return None
    lead: list[str] = []
    rows: list[Sequence[str | Cell]] = []
    examples: list[Block] = []
    if collection is not None:
        lead.append(_collection_sentence(collection))
        rows += _collection_rows(collection)
    if pairs is not None:
        domains = domains_of_pairs(pairs)
        lead += [pairs_sentence(pairs, domains), duplicates_sentence(pairs)]
        rows += pairs_rows(pairs, domains)
        if collection is not None:
            examples = pair_examples(pairs, collection)
    return Section("Data", " ".join(filter(None, lead)), [Table(["quantity", "count"], rows), *examples])


def _collection_sentence(collection: StoredCollection) -> str:
    documents, queries = collection.count("documents"), collection.count("queries")
    sentence = f"The collection ({_source(collection)}) has {documents:,} documents and {queries:,} queries."
    made_by = collection.manifest["facts"].get("made_by")
    if made_by is None:
        return sentence
    sources = collection.manifest["counts"].get("source documents", 0)
    kind = str(made_by).replace("_", " ")
    meaning = f" ({_QUERIES_MADE[made_by]})" if made_by in _QUERIES_MADE else ""
    return f"{sentence} Its queries were made out of {sources:,} source documents, kind '{kind}'{meaning}."


def _source(collection: StoredCollection) -> str:
    facts = collection.manifest["facts"]
    if "source" not in collection.config:  # made from another collection
        return f"made by `{collection.manifest['stage']}`"
    kind = str(collection.config["source"].get("kind", "unknown")).replace("_", " ")
    if "python" in facts:
        kind += f", {facts.get('implementation', 'Python')} {facts['python']}"
    return kind


def _collection_rows(collection: StoredCollection) -> list[Sequence[str | Cell]]:
    counts = dict(collection.manifest["counts"])
    rows: list[Sequence[str | Cell]] = [
        [part, f"{counts.pop(part, 0):,}"] for part in ("documents", "queries", "judgments")
    ]
    splits: Counter[str] = Counter()
    for table in collection.rows_of("judgments").tables(["split"]):
        splits.update({item["values"]: item["counts"] for item in pc.value_counts(table["split"]).to_pylist()})
    rows += [[f"judgments of split '{split}'", f"{count:,}"] for split, count in sorted(splits.items())]
    rows += [[name.replace("_", " "), f"{count:,}"] for name, count in counts.items()]
    return rows
