"""The report's section on the data: the collection and the pairs made from it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.batches import BATCHES
from pipelines.clustering.clusters import CLUSTERS
from pipelines.mining.candidates import CANDIDATES
from pipelines.mining.rules import RULES
from pipelines.pairs.pairs import PAIRS, read_pairs
from pipelines.reports.examples import excerpt, sample_of
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.long_columns import take_rows
from raytriever.reports.report import Block, Details, Section, folder_name
from raytriever.reports.table import Cell, Table, counted
from retrieval.collections.collection import COLLECTION, StoredCollection, TextPart

# What the report says of pairs: how many of which domains, examples, and which repeated an earlier one.

_EXAMPLES = 5
_CHARACTERS_OF_AN_ID = 32
_DUPLICATES = {
    "pairs with both texts of an earlier one": "pairs with both texts of an earlier one (but for case and white space)",
    "pairs with nearly both texts of an earlier one": "pairs with nearly both texts of an earlier one",
    "queries with nearly the text of an earlier one": "queries with nearly the text of an earlier one",
    "documents with nearly the text of an earlier one": "documents with nearly the text of an earlier one",
}


def pairs_sentence(pairs: Artifact, domains: Mapping[str, int]) -> str:
    """How many pairs, of which split and domains; ``domains``: pairs of each."""
    split = pairs.config.get("split")
    splits = [split] if isinstance(split, str) else split or []
    of_split = f" of split{'s' if len(splits) > 1 else ''} {', '.join(map(repr, splits))}" if splits else ""
    of_domains = counted(len(domains), "domain")
    sentence = f"Training has {counted(pairs.rows, 'pair')}{of_split} in {of_domains}"
    if len(domains) > 1:
        largest = max(domains, key=lambda name: domains[name])
        sentence += f"; the largest, '{largest}', holds {domains[largest] / pairs.rows:.1%} of them"
    return sentence + "."


def domains_of_pairs(pairs: Artifact) -> Counter[str]:
    """The number of pairs of each domain."""
    found = pc.value_counts(read_pairs(pairs, ["domain"])["domain"])
    return Counter({item["values"]: item["counts"] for item in found.to_pylist()})


def pairs_rows(pairs: Artifact, domains: Mapping[str, int]) -> list[Sequence[str | Cell]]:
    """Rows of the table of quantities."""
    counts = pairs.manifest["counts"]
    sizes = np.array(list(domains.values()))
    rows: list[Sequence[str | Cell]] = [["training pairs", f"{pairs.rows:,}"]]
    rows += [
        [f"distinct {part} of the pairs", f"{counts[part]:,}"] for part in ("queries", "documents") if part in counts
    ]
    rows.append(["domains of the pairs", f"{len(domains):,}"])
    rows.append(["pairs per domain: median, largest", f"{np.median(sizes):,.0f}, {sizes.max():,}"])
    rows += [[words, f"{counts[name]:,}"] for name, words in _DUPLICATES.items() if name in counts]
    return rows


def duplicates_sentence(pairs: Artifact) -> str:
    """How many pairs repeat an earlier one, and what became of them; empty where nobody looked."""
    counts, settings = pairs.manifest["counts"], pairs.config.get("duplicates", {})
    exact, near = (counts.get(f"pairs with {both} texts of an earlier one") for both in ("both", "nearly both"))
    if exact is None:
        return ""
    told = [f"the same two texts: {exact:,}{_became(exact, settings['exact'])}"]
    if near is not None:
        told.append(f"nearly the same: {near:,}{_became(near, settings['near'])}")
    unknown = "; whether others are nearly the same nobody asked" if near is None else ""
    return f"Pairs that repeat an earlier one: {'; '.join(told)}{unknown}."


def _became(number: int, setting: str) -> str:
    if not number:
        return ""
    return ", dropped" if setting == "drop" else ", kept"


def pair_examples(pairs: Artifact, collection: StoredCollection) -> list[Block]:
    """A few pairs, and a few that repeat an earlier one; ``collection``: whose pairs they are."""
    blocks: list[Block] = [Details("Examples: pairs", _examples(pairs, collection))]
    facts = pairs.manifest["facts"]
    for name, words in (("exact_duplicates", "pairs with the same texts"), ("near_duplicates", "nearly equal pairs")):
        if facts.get(name):
            blocks.append(Details(f"Examples: {words}", _duplicates_table(facts[name], collection)))
    return blocks


def _examples(pairs: Artifact, collection: StoredCollection) -> Table:
    rows = take_rows(read_pairs(pairs, ["query_row", "document_row", "domain"]), sample_of(pairs.rows, _EXAMPLES, 0))
    domains = rows["domain"].to_pylist()
    queries = collection.texts("queries", rows["query_row"].to_numpy())
    documents = collection.texts("documents", rows["document_row"].to_numpy())
    shown = [
        [domain or "(none)", excerpt(query), excerpt(document)]
        for domain, query, document in zip(domains, queries, documents, strict=True)
    ]
    caption = f"{len(shown)} of {pairs.rows:,} pairs, drawn at random; texts are cut off."
    return Table(["domain", "query", "document"], shown, caption, text_columns=3)


def _duplicates_table(found: Sequence[Mapping[str, Any]], collection: StoredCollection) -> Table:
    texts: dict[TextPart, dict[str, str]] = {}
    for place, part in enumerate[TextPart](("queries", "documents")):
        texts[part] = _texts_by_id(collection, part, {pair[place] for item in found for pair in item.values()})
    rows = []
    for number, item in enumerate(found, 1):
        for role in ("repeats", "pair"):
            query, document = item[role]
            name = f"{number}" if role == "repeats" else f"{number}, again"
            of_query, of_document = texts["queries"].get(query, ""), texts["documents"].get(document, "")
            rows.append([name, _short(query), of_query, _short(document), of_document])
    caption = "The first such pairs, each below the one that it repeats."
    return Table(["", "query id", "query", "document id", "document"], rows, caption, text_columns=5)


def _short(name: str) -> str:
    return excerpt(name, _CHARACTERS_OF_AN_ID)


def _texts_by_id(collection: StoredCollection, part: TextPart, ids: Iterable[str]) -> dict[str, str]:
    """Excerpts of the texts of these ids; the column of ids is read through, a row group at a time."""
    wanted = pa.array(sorted(ids), pa.string())
    places: list[int] = []
    names: list[str] = []
    start = 0
    for table in collection.rows_of(part).tables(["id"]):
        column = table["id"].combine_chunks()
        hits = pc.indices_nonzero(pc.is_in(column, value_set=wanted))
        places += [start + place for place in hits.to_pylist()]
        names += column.take(hits).to_pylist()
        start += len(column)
    texts = collection.texts(part, np.array(places, dtype=np.int64))
    return dict(zip(names, map(excerpt, texts), strict=True))


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


# The report's section on what did not become training data: which stage left out how much of what, and why.

_STAGES = (COLLECTION, PAIRS, CLUSTERS, "packing", BATCHES, CANDIDATES)  # whose manifests count what they drop


def left_out_section(artifacts: Iterable[Artifact]) -> Section | None:
    """None where none of the artifacts could have dropped anything."""
    counting = [artifact for artifact in artifacts if artifact.kind in _STAGES]
    if not counting:
        return None
    rows, without = [], []
    for artifact in counting:
        reasons = {reason: count for reason, count in artifact.manifest["dropped"].items() if count}
        rows += [[folder_name(artifact), _in_words(artifact, reason), f"{n:,}"] for reason, n in reasons.items()]
        if not reasons:
            without.append(folder_name(artifact))
    if not rows:
        return Section("Left out", "No stage reports that it dropped anything.", [])
    lead = f"{len(counting) - len(without)} of {len(counting)} stages left something out, for the reasons below."
    if without:
        lead += f" Nothing was dropped by: {', '.join(without)}."
    caption = (
        "What stages left out, over all epochs: an example that a packing leaves out in one epoch is in another's."
    )
    return Section("Left out", lead, [Table(["stage", "left out", "count"], rows, caption, text_columns=2)])


def _in_words(artifact: Artifact, reason: str) -> str:
    if artifact.kind == CANDIDATES and reason in RULES:
        return f"candidates by the rule {reason}: {RULES[reason]}"
    return reason.replace("_", " ")
