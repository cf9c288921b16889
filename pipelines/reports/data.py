"""The report's sections on the data: collection and pairs, chunks, mined candidates, and what was left out."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.mining.audit import Audit, remark_table, rule_table
from pipelines.pairs.pairs import read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.report import Block, Section, folder_name
from raytriever.reports.table import Table
from retrieval.collections.collection import StoredCollection


def sample_of(total: int, most: int, seed: int) -> NDArray[np.int64]:
    """At most ``most`` of ``total`` numbers, ascending: all where they are no more."""
    if total <= most:
        return np.arange(total)
    return np.sort(np.random.default_rng([seed, 1]).choice(total, most, replace=False))


def data_section(collection: StoredCollection | None, pairs: Artifact | None) -> Section | None:
    """None where there is neither."""
    rows = [] if collection is None else _collection_rows(collection)
    rows += [] if pairs is None else _pairs_rows(pairs)
    lead = "The collection, and the training pairs made from it."
    return Section("Data", lead, [Table(["quantity", "count"], rows)]) if rows else None


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


def chunks_section(chunks: Artifact) -> Section:
    """The number of chunks and their sources, of a collection that `raytriever chunk` made."""
    counts = chunks.manifest["counts"]
    rows = [
        ["chunks", f"{chunks.rows:,}"],
        ["chunks of a source document: mean", f"{chunks.rows / counts['source_documents']:,.1f}"],
        ["words of a chunk: mean", f"{counts['words'] / chunks.rows:,.1f}"],
        *([name.replace("_", " "), f"{count:,}"] for name, count in counts.items() if count),
    ]
    lead = "Documents cut into chunks. The chunks put together give the texts unchanged."
    return Section("Chunks", lead, [Table(["quantity", "count"], rows)])


def mining_section(audit: Audit) -> Section:
    """The section on one candidates artifact; ``audit`` as its audit.json has it."""
    remarks = remark_table(audit)
    blocks: list[Block] = [rule_table(audit), *([remarks] if remarks.rows else [])]
    return Section("Mined candidates", "What became of the documents that a run ranks.", blocks)


def left_out_section(artifacts: Iterable[Artifact]) -> Section | None:
    """The records that stages dropped, by reason. None if there are none."""
    rows = [
        [folder_name(artifact), reason.replace("_", " "), f"{count:,}"]
        for artifact in artifacts
        for reason, count in artifact.manifest["dropped"].items()
        if count
    ]
    caption = "Over all epochs."
    table = Table(["stage", "left out", "count"], rows, caption, text_columns=2)
    return Section("Left out", "What did not become training data, and why.", [table]) if rows else None
