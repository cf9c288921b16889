"""What mining kept and what each rule dropped, with examples: counted block by block, then added up.

An audit is plain JSON::

    {"counts": {"queries": …, "candidates": …, …},           as in ``COUNTS``
     "rules": {"duplicate": {"candidates": …, "queries": …, "examples": [{"query_id", "query", "document_id",
               "document", "rank", "score"}, …]}, …},         the rules that were asked
     "chosen": {"candidates": …, "queries": …, "examples": …}}
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.mining.inputs import QueryBlock
from pipelines.mining.rules import ABSENT, KEPT, RULES, MiningRules, reference_scores, sampling_keys
from raytriever.reports.table import Table

EXAMPLES = 20  # at most, each of another query
_SHOWN_CHARACTERS = 240

Audit = dict[str, Any]
# of query rows (n,) and document rows (n,) of the collection: query_id, query, document_id, document
Describe = Callable[[NDArray[np.int64], NDArray[np.int64]], list[dict[str, str]]]

COUNTS = {
    "queries": "queries with a judged positive",
    "queries_without_positive": "queries left out, having none",
    "positives": "judged positives",
    "positives_retrieved": "judged positives in the run",
    "candidates": "candidates read",
    "eligible": "candidates that no rule drops",
    "queries_with_fewer": "queries with fewer candidates than asked for",
    "queries_with_none": "queries with no candidate at all",
    "queries_without_answers": "queries that have no answers to match",
    "queries_without_positive_score": "queries without a scored positive, as margins need (vectors would score it)",
}


def block_audit(
    rules: MiningRules,
    queries: QueryBlock,
    rule_of: NDArray[np.uint8],
    chosen: NDArray[np.bool_],
    number: int | None,
    describe: Describe,
) -> Audit:
    """The effect of the rules on one block. ``rule_of`` and ``chosen`` (queries, k) are their outcome."""
    masks = {name: rule_of == list(RULES).index(name) for name in rules.active()} | {"chosen": chosen}
    keys, block = sampling_keys(0, queries.query_ids), queries.candidates
    examples = {name: _pick(mask, keys) for name, mask in masks.items()}
    owners, places = (np.concatenate([found[axis] for found in examples.values()]) for axis in (0, 1))
    described = iter(describe(queries.query_rows[owners], block.rows[owners, places]))
    groups = {}
    for name, mask in masks.items():
        shown = []
        for query, rank in zip(*(axis.tolist() for axis in examples[name]), strict=True):
            texts = next(described)
            of_candidate = {"rank": rank + 1, "score": round(float(block.scores[query, rank]), 6)}
            cut = {key: text[:_SHOWN_CHARACTERS] for key, text in texts.items()}
            shown.append(cut | of_candidate | {"order": int(keys[query])})
        groups[name] = {"candidates": int(mask.sum()), "queries": int(mask.any(axis=1).sum()), "examples": shown}
    made = groups.pop("chosen")
    found, reference = chosen.sum(axis=1), reference_scores(len(chosen), block.positives)
    counts = {
        "queries": len(found),
        "queries_without_positive": queries.left_out,
        "positives": len(block.positives.ranks),
        "positives_retrieved": int((block.positives.ranks > 0).sum()),
        "candidates": int((rule_of != ABSENT).sum()),
        "eligible": int((rule_of == KEPT).sum()),
        "queries_with_fewer": 0 if number is None else int((found < number).sum()),
        "queries_with_none": int((found == 0).sum()),
        "queries_without_answers": 0 if rules.answers == "ignore" else sum(not found for found in queries.answers),
        "queries_without_positive_score": int(np.isnan(reference).sum()) if rules.has_margin else 0,
    }
    return {"counts": counts, "rules": groups, "chosen": made}


def _pick(mask: NDArray[np.bool_], keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The best-ranked candidate under the mask, of the queries of least key: (query, place) of each."""
    queries = np.flatnonzero(mask.any(axis=1))
    queries = queries[np.argsort(keys[queries], kind="stable")[:EXAMPLES]]
    return queries, mask[queries].argmax(axis=1)


def merge_audits(audits: Sequence[Audit]) -> Audit:
    """One audit of all blocks: sums, and the examples that one block of all queries would have."""
    first = audits[0]
    counts = {name: sum(audit["counts"][name] for audit in audits) for name in COUNTS}
    rules = {name: _merge([audit["rules"][name] for audit in audits]) for name in first["rules"]}
    return {"counts": counts, "rules": rules, "chosen": _merge([audit["chosen"] for audit in audits])}


def _merge(groups: Sequence[Any]) -> Audit:
    examples = sorted((example for group in groups for example in group["examples"]), key=lambda found: found["order"])
    return {
        "candidates": sum(group["candidates"] for group in groups),
        "queries": sum(group["queries"] for group in groups),
        "examples": [{key: value for key, value in e.items() if key != "order"} for e in examples[:EXAMPLES]],
    }


def rule_table(audit: Audit) -> Table:
    """Candidates dropped by each rule, in the order of asking (which JSON doesn't keep), and the remaining ones."""
    total = audit["counts"]["candidates"]
    rows = [(name, RULES[name], audit["rules"][name]) for name in RULES if name in audit["rules"]]
    rows.append(("chosen", f"of the {audit['counts']['eligible']:,} that no rule drops", audit["chosen"]))
    cells = [
        (
            name,
            meaning,
            f"{group['candidates']:,}",
            f"{group['candidates'] / total:.1%}" if total else "-",
            f"{group['queries']:,}",
        )
        for name, meaning, group in rows
    ]
    caption = (
        f"{total:,} candidates of {audit['counts']['queries']:,} queries; a candidate counts for the first rule that"
        " drops it. Queries: those with such a candidate."
    )
    return Table(["rule", "the candidate is", "candidates", "share", "queries"], cells, caption, text_columns=2)


def remark_table(audit: Audit) -> Table:
    """The counts of queries that a user should know of; answers are no matter where no query has any."""
    counts = audit["counts"]
    shown = [name for name in COUNTS if name.startswith("queries_") and counts[name]]
    rows = [
        (COUNTS[name], f"{counts[name]:,}")
        for name in shown
        if name != "queries_without_answers" or counts[name] < counts["queries"]
    ]
    return Table(["queries", "count"], rows)
