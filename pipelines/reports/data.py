"""The report's sections on the data: collection and pairs, chunks, mined candidates, and what was left out."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.mining.audit import Audit, remark_table, rule_table
from pipelines.mining.rules import RULES
from pipelines.pairs.pairs import read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.long_columns import take_rows
from raytriever.reports.report import Block, Details, Section, folder_name
from raytriever.reports.table import Table
from retrieval.collections.collection import StoredCollection, TextPart

_MOST_CHARACTERS = 240
_EXAMPLES = 5
_LONG = re.compile(r"\S{24}(?=\S)")
_MAY_BREAK = "\u200b"  # where a table's cell may break a long name or address; takes no room


def excerpt(text: str, most: int = _MOST_CHARACTERS) -> str:
    """The beginning of a text, on one line, at most so many characters; a cut is shown."""
    read = text[: 4 * most]  # of a very long text no more is looked at
    shown = " ".join(read.split())
    is_whole = len(shown) <= most and len(read) == len(text)
    return _LONG.sub(rf"\g<0>{_MAY_BREAK}", shown if is_whole else shown[: most - 1] + "…")


def sample_of(total: int, most: int, seed: int) -> NDArray[np.int64]:
    """At most ``most`` of ``total`` numbers, ascending: all where they are no more."""
    if total <= most:
        return np.arange(total)
    return np.sort(np.random.default_rng([seed, 1]).choice(total, most, replace=False))


def data_section(collection: StoredCollection | None, pairs: Artifact | None) -> Section | None:
    """None where there is neither."""
    rows: list[list[str]] = []
    examples: list[Block] = []
    if collection is not None:
        rows += _collection_rows(collection)
    if pairs is not None:
        rows += _pairs_rows(pairs)
        if collection is not None:
            examples = _pair_examples(pairs, collection)
    lead = "The collection, and the training pairs made from it."
    return Section("Data", lead, [Table(["quantity", "count"], rows), *examples]) if rows else None


def _collection_rows(collection: StoredCollection) -> list[list[str]]:
    config, facts = collection.config, collection.manifest["facts"]
    made_by = config["source"]["kind"] if "source" in config else collection.manifest["stage"]
    rows = [["source of the collection", str(made_by).replace("_", " ")]]
    if "made_by" in facts:
        rows.append(["queries made out of documents", str(facts["made_by"]).replace("_", " ")])
    splits = Counter[str]()
    for table in collection.rows_of("judgments").tables(["split"]):
        splits.update({item["values"]: item["counts"] for item in pc.value_counts(table["split"]).to_pylist()})
    counts = collection.manifest["counts"] | {f"judgments of split '{name}'": splits[name] for name in sorted(splits)}
    return rows + [[name.replace("_", " "), f"{count:,}"] for name, count in counts.items()]


def _pairs_rows(pairs: Artifact) -> list[list[str]]:
    """Pairs, their domains, and what else `raytriever pairs` counted."""
    found = pc.value_counts(read_pairs(pairs, ["domain"])["domain"]).to_pylist()
    largest = max(found, key=lambda item: item["counts"])
    share = f"{largest['counts'] / pairs.rows:.1%}"
    return [
        ["training pairs", f"{pairs.rows:,}"],
        ["domains of the pairs", f"{len(found):,}"],
        [f"pairs of the largest domain, '{largest['values'] or '(none)'}'", f"{largest['counts']:,} ({share})"],
        *([f"pairs: {name.replace('_', ' ')}", f"{count:,}"] for name, count in pairs.manifest["counts"].items()),
    ]


def _pair_examples(pairs: Artifact, collection: StoredCollection) -> list[Block]:
    """A few pairs, and a few that repeat an earlier one; ``collection``: whose pairs they are."""
    rows = take_rows(read_pairs(pairs, ["query_row", "document_row", "domain"]), sample_of(pairs.rows, _EXAMPLES, 0))
    queries = collection.texts("queries", rows["query_row"].to_numpy())
    documents = collection.texts("documents", rows["document_row"].to_numpy())
    shown = [
        [domain or "(none)", excerpt(query), excerpt(document)]
        for domain, query, document in zip(rows["domain"].to_pylist(), queries, documents, strict=True)
    ]
    caption = f"{len(shown)} of {pairs.rows:,} pairs, drawn at random; texts are cut off."
    table = Table(["domain", "query", "document"], shown, caption, text_columns=3)
    blocks: list[Block] = [Details("Examples: pairs", table)]
    facts = pairs.manifest["facts"]
    for name, words in (("exact_duplicates", "pairs with the same texts"), ("near_duplicates", "nearly equal pairs")):
        if facts.get(name):
            blocks.append(Details(f"Examples: {words}", _duplicates_table(facts[name], collection)))
    return blocks


def _duplicates_table(found: Sequence[Mapping[str, Any]], collection: StoredCollection) -> Table:
    ids = [item[role] for item in found for role in ("repeats", "pair")]
    queries, documents = (
        collection.texts(part, collection.find(part, pa.array([pair[place] for pair in ids], pa.string())))
        for place, part in enumerate[TextPart](("queries", "documents"))
    )
    rows = [
        [excerpt(", ".join(pair)), excerpt(query), excerpt(document)]
        for pair, query, document in zip(ids, queries, documents, strict=True)
    ]
    caption = "The first such pairs, each below the one that it repeats."
    return Table(["ids", "query", "document"], rows, caption, text_columns=3)


def chunks_section(chunks: StoredCollection) -> Section | None:
    """How long chunks are and what they look like; None where `raytriever chunk` did not make the collection."""
    histogram = chunks.manifest["facts"].get("words_per_chunk")
    if histogram is None or not chunks.rows:
        return None
    counts = chunks.manifest["counts"]
    rows = [
        ["chunks", f"{chunks.rows:,}"],
        ["chunks of a source document: mean", f"{chunks.rows / counts['source_documents']:,.1f}"],
        *([name.replace("_", " "), f"{count:,}"] for name, count in counts.items() if count),
    ]
    bounds = [0, *histogram["up_to"]]
    lengths = [
        [f"{first + 1:,} to {last:,}", f"{count:,}", f"{count / chunks.rows:.1%}"]
        for (first, last), count in zip(pairwise(bounds), histogram["chunks"], strict=True)
        if count
    ]
    longer = histogram["longer"]
    lengths += [[f"more than {bounds[-1]:,}", f"{longer:,}", f"{longer / chunks.rows:.1%}"]] if longer else []
    blocks: list[Block] = [
        Table(["quantity", "count"], rows),
        Table(["words of a chunk", "chunks", "share"], lengths),
        Details("Examples: chunks that follow on one another", _example_chunks(chunks)),
    ]
    return Section("Chunks", "Documents cut into chunks, which put together again are the texts as they were.", blocks)


def _example_chunks(chunks: StoredCollection) -> Table:
    first = max(0, chunks.rows // 2 - _EXAMPLES // 2)
    places = np.arange(first, min(first + _EXAMPLES, chunks.rows))
    found = chunks.rows_of("documents").take(places, ["source_id", "number", "text"]).to_pylist()
    rows = [[row["source_id"], excerpt(row["text"]), f"{row['number']:,}"] for row in found]
    return Table(["source", "text", "number"], rows, "From the middle of the collection.", text_columns=2)


def mining_section(audit: Audit) -> Section:
    """The section on one candidates artifact; ``audit`` as ``StoredCandidates.audit`` gives it."""
    remarks = remark_table(audit)
    blocks: list[Block] = [rule_table(audit), *([remarks] if remarks.rows else [])]
    for name in (*RULES, "chosen"):
        group = audit["chosen"] if name == "chosen" else audit["rules"].get(name)
        if group and group["examples"]:
            blocks.append(Details(f"Examples: {name}", _example_candidates(group["examples"])))
    return Section("Mined candidates", "What became of the documents that a run ranks.", blocks)


def _example_candidates(examples: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [query, f"{found['document_id']}: {found['document']}", f"{found['rank']:,}", f"{found['score']:.4f}"]
        for found in examples
        for query in [f"{found['query']} ({found['answer']})" if "answer" in found else found["query"]]
    ]
    caption = "The best ranked such candidate of some queries, drawn by a hash of their ids."
    return Table(["query", "document", "rank", "score"], rows, caption, text_columns=2)


def left_out_section(artifacts: Iterable[Artifact]) -> Section | None:
    """What stages dropped, by reason; None where nothing was."""
    rows = [
        [folder_name(artifact), reason.replace("_", " "), f"{count:,}"]
        for artifact in artifacts
        for reason, count in artifact.manifest["dropped"].items()
        if count
    ]
    caption = "Over all epochs: an example that a packing leaves out in one epoch is in another's."
    table = Table(["stage", "left out", "count"], rows, caption, text_columns=2)
    return Section("Left out", "What did not become training data, and why.", [table]) if rows else None
