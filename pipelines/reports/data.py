"""The report's sections on the data: collection and pairs, chunks, mined candidates, and what was left out."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.batches import BATCHES
from pipelines.clustering.clusters import CLUSTERS
from pipelines.mining.audit import COUNTS, Audit, noteworthy, rules_of
from pipelines.mining.candidates import CANDIDATES
from pipelines.mining.rules import RULES
from pipelines.pairs.pairs import PAIRS, read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.long_columns import take_rows
from raytriever.reports.plots import counted_bars
from raytriever.reports.report import Block, Details, Plot, Section, folder_name
from raytriever.reports.table import Table
from retrieval.collections.collection import COLLECTION, StoredCollection, TextPart

_MOST_CHARACTERS = 240
_CHARACTERS_OF_AN_ID = 32
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


_QUERIES_MADE = {
    "title": "a document's title finds its text",
    "headings": "a heading finds its section",
    "inverse_cloze": "a sentence taken out of a text finds the rest",
    "crops": "two crops of one text find each other",
    "docstring": "a docstring or comment finds the code it describes",
}
_REPEATED = {  # counts of pairs, and the setting that says what became of them
    "pairs with both texts of an earlier one": "exact",
    "pairs with nearly both texts of an earlier one": "near",
    "queries with nearly the text of an earlier one": "",
    "documents with nearly the text of an earlier one": "",
}


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
    counts, made_by = dict(collection.manifest["counts"]), collection.manifest["facts"].get("made_by")
    rows = [["source of the collection", _source(collection)]]
    if made_by is not None:
        meaning = f": {_QUERIES_MADE[made_by]}" if made_by in _QUERIES_MADE else ""
        rows.append(["queries made out of documents", f"kind '{str(made_by).replace('_', ' ')}'{meaning}"])
    rows += [[part, f"{counts.pop(part, 0):,}"] for part in ("documents", "queries", "judgments")]
    splits: Counter[str] = Counter()
    for table in collection.rows_of("judgments").tables(["split"]):
        splits.update({item["values"]: item["counts"] for item in pc.value_counts(table["split"]).to_pylist()})
    rows += [[f"judgments of split '{split}'", f"{count:,}"] for split, count in sorted(splits.items())]
    return rows + [[name.replace("_", " "), f"{count:,}"] for name, count in counts.items()]


def _source(collection: StoredCollection) -> str:
    facts = collection.manifest["facts"]
    if "source" not in collection.config:  # made from another collection
        return f"made by `{collection.manifest['stage']}`"
    kind = str(collection.config["source"]["kind"]).replace("_", " ")
    return f"{kind}, {facts['implementation']} {facts['python']}" if "python" in facts else kind


def _pairs_rows(pairs: Artifact) -> list[list[str]]:
    counts, settings = pairs.manifest["counts"], pairs.config.get("duplicates", {})
    found = pc.value_counts(read_pairs(pairs, ["domain"])["domain"]).to_pylist()
    domains = {item["values"] or "(none)": item["counts"] for item in found}
    sizes, largest = np.array(list(domains.values())), max(domains, key=lambda name: domains[name])
    split = pairs.config.get("split") or []
    splits = ", ".join(map(repr, [split] if isinstance(split, str) else split))
    rows = [[f"training pairs{f' of split {splits}' if splits else ''}", f"{pairs.rows:,}"]]
    rows += [
        [f"distinct {part} of the pairs", f"{counts[part]:,}"] for part in ("queries", "documents") if part in counts
    ]
    rows.append(["domains of the pairs", f"{len(domains):,}"])
    rows.append(["pairs per domain: median, largest", f"{np.median(sizes):,.0f}, {sizes.max():,}"])
    rows.append([f"share of the largest domain, '{largest}'", f"{sizes.max() / pairs.rows:.1%}"])
    for name, setting in _REPEATED.items():
        if name in counts:
            fate = {"drop": ", dropped"}.get(settings.get(setting), ", kept") if setting and counts[name] else ""
            rows.append([name, f"{counts[name]:,}{fate}"])
    return rows


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
    texts: dict[TextPart, dict[str, str]] = {}
    for place, part in enumerate[TextPart](("queries", "documents")):
        ids = sorted({pair[place] for item in found for pair in item.values()})
        of_ids = collection.texts(part, collection.find(part, pa.array(ids, pa.string())))
        texts[part] = dict(zip(ids, map(excerpt, of_ids), strict=True))
    rows = []
    for number, item in enumerate(found, 1):
        for role in ("repeats", "pair"):
            query, document = item[role]
            name = f"{number}" if role == "repeats" else f"{number}, again"
            names = excerpt(query, _CHARACTERS_OF_AN_ID), excerpt(document, _CHARACTERS_OF_AN_ID)
            rows.append([name, names[0], texts["queries"][query], names[1], texts["documents"][document]])
    caption = "The first such pairs, each below the one that it repeats."
    return Table(["", "query id", "query", "document id", "document"], rows, caption, text_columns=5)


# Chunks: how long they are, how documents were cut into them, and what they look like.

_CUT_AS = "sources_cut_as_"
_CHUNK_COUNTS = {
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
    blocks: list[Block] = [
        Table(["quantity", "count"], _chunk_rows(chunks, histogram)),
        _chunk_lengths(histogram, int(chunks.config["chunking"]["max_words"])),
        Details("Examples: chunks that follow on one another", _example_chunks(chunks)),
    ]
    return Section("Chunks", "Documents cut into chunks, which put together again are the texts as they were.", blocks)


def _chunk_rows(chunks: StoredCollection, histogram: Mapping[str, Any]) -> list[list[str]]:
    counts = chunks.manifest["counts"]
    sources, bounds = counts["source_documents"], list(histogram["up_to"])
    by_bin = np.array([*histogram["chunks"], histogram["longer"]])
    median = int(np.searchsorted(np.cumsum(by_bin), by_bin.sum() / 2))
    half = f"at most {bounds[median]:,}" if median < len(bounds) else f"more than {bounds[-1]:,}"
    rows = [
        ["source documents", f"{sources:,}"],
        ["chunks", f"{chunks.rows:,} ({chunks.rows / sources:,.1f} a document)"],
        ["words", f"{counts['words']:,}"],
        ["words of a chunk: mean, median", f"{counts['words'] / chunks.rows:,.0f}, {half}"],
    ]
    kinds = sorted(name for name in counts if name.startswith(_CUT_AS))
    rows += [[f"sources cut as {name.removeprefix(_CUT_AS)}", f"{counts[name]:,}"] for name in kinds]
    rows += [[words, f"{counts[name]:,}"] for name, words in _CHUNK_COUNTS.items() if counts.get(name)]
    return rows


def _chunk_lengths(histogram: Mapping[str, Any], most: int) -> Plot:
    bounds, counts, longer = list(histogram["up_to"]), list(histogram["chunks"]), int(histogram["longer"])
    edges = [0.0, *map(float, bounds)]
    caption = f"Lengths of all {sum(counts) + longer:,} chunks in words."
    if longer:
        edges.append(edges[-1] + bounds[0])
        counts.append(longer)
        caption += f" The last bar holds all {longer:,} that are longer than max_words, since lines are never cut."
    marks = {f"max_words {most}": float(most)}
    return Plot(counted_bars(edges, counts, "words", "chunks", "Histogram of chunk lengths", marks), caption)


def _example_chunks(chunks: StoredCollection) -> Table:
    first = max(0, chunks.rows // 2 - _EXAMPLES // 2)
    places = np.arange(first, min(first + _EXAMPLES, chunks.rows))
    columns = ["source_id", "number", "start", "end", "text"]
    rows = [
        [row["source_id"], excerpt(row["text"]), f"{row['number']:,}", f"{row['start']:,}", f"{row['end']:,}"]
        for row in chunks.rows_of("documents").take(places, columns).to_pylist()
    ]
    caption = "From the middle of the collection; start and end are characters of the source's text."
    return Table(["source", "text", "number", "start", "end"], rows, caption, text_columns=2)


# Mined candidates: what is left of a run's, what each rule dropped, and examples.


def mining_section(audit: Audit) -> Section:
    """The section on one candidates artifact; ``audit`` as ``StoredCandidates.audit`` gives it."""
    counts, chosen, total = audit["counts"], audit["chosen"], audit["counts"]["candidates"]
    rules = {name: (RULES[name], group) for name, group in rules_of(audit).items()}
    groups = rules | {"chosen": (f"of the {counts['eligible']:,} that no rule drops", chosen)}
    rows = [
        [
            name,
            meaning,
            f"{group['candidates']:,}",
            f"{group['candidates'] / total:.1%}" if total else "-",
            f"{group['queries']:,}",
        ]
        for name, (meaning, group) in groups.items()
    ]
    caption = (
        f"The {total:,} documents that the run ranks for {counts['queries']:,} queries, by the rules in the order in"
        " which they are asked; a candidate counts for the first one that drops it. Queries: those with such a"
        " candidate."
    )
    header = ["rule", "the candidate is", "candidates", "share", "queries"]
    blocks: list[Block] = [Table(header, rows, caption, text_columns=2)]
    remarkable = [[COUNTS[name], f"{count:,}"] for name, count in noteworthy(audit).items()]
    if remarkable:
        blocks.append(Table(["queries", "count"], remarkable))
    for name, (meaning, group) in groups.items():
        if group["examples"]:
            blocks.append(Details(f"Examples: {name} ({meaning})", _example_candidates(group)))
    return Section("Mined candidates", "What became of the documents that a run ranks.", blocks)


def _example_candidates(group: Any) -> Table:
    rows = [
        [found["query"], f"{found['document_id']}: {found['document']}", f"{found['rank']:,}", f"{found['score']:.4f}"]
        for found in group["examples"]
    ]
    caption = "The best ranked such candidate of some queries, drawn by a hash of their ids."
    return Table(["query", "document", "rank", "score"], rows, caption, text_columns=2)


# What did not become training data: which stage left out how much of what, and why.

_STAGES = (COLLECTION, PAIRS, CLUSTERS, "packing", BATCHES, CANDIDATES)  # whose manifests count what they drop


def left_out_section(artifacts: Iterable[Artifact]) -> Section | None:
    """None where none of the artifacts could have dropped anything."""
    counting = [artifact for artifact in artifacts if artifact.kind in _STAGES]
    if not counting:
        return None
    rows = []
    for artifact in counting:
        reasons = {reason: count for reason, count in artifact.manifest["dropped"].items() if count}
        rows += [[folder_name(artifact), _in_words(artifact, reason), f"{n:,}"] for reason, n in reasons.items()]
        rows += [] if reasons else [[folder_name(artifact), "nothing", "0"]]
    caption = (
        "What stages left out, over all epochs: an example that a packing leaves out in one epoch is in another's."
    )
    table = Table(["stage", "left out", "count"], rows, caption, text_columns=2)
    return Section("Left out", "What did not become training data, and why.", [table])


def _in_words(artifact: Artifact, reason: str) -> str:
    if artifact.kind == CANDIDATES and reason in RULES:
        return f"candidates by the rule {reason}: {RULES[reason]}"
    return reason.replace("_", " ")
