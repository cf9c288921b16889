"""What each rule left out of the batches, with examples: counted file by file, then added up.

An audit is plain JSON::

    {"batches": …, "negatives": …, "rows": {"all": …, "with_half_masked": …, "without_negatives": …},
     "rules": {"same text": {"negatives": …, "batches": …, "examples": [{"epoch", "batch", "row", "column", "query_id",
               "query", "positive_id", "positive", "document_id", "document", "positive_score", "score"}, …]}, …}}

Scores are the surrogate's, null without vectors. The examples of a rule come from the first batches where it left
something out: the first such negative of each batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.filtering.false_negatives import RULES
from raytriever.reports.table import Table, shortened

EXAMPLES = 10  # of a rule
_ROWS = ("all", "with_half_masked", "without_negatives")
_SHOWN_CHARACTERS = 240
_EXAMPLES_SHOWN = 3  # on the screen
_LINE = 90
_MOST_MASKED = 0.5  # a share

Audit = dict[str, Any]


@dataclass(frozen=True)
class AuditedBatch:
    """A batch as an audit sees it.

    ``rule_of`` uint8 (B, M), of ``false_negatives``. ``queries`` (B rows) and ``documents`` (M rows) have columns id
    and text. ``vectors`` of both, (B, d) and (M, d), or None.
    """

    epoch: int
    number: int
    rule_of: NDArray[np.uint8]
    queries: pa.Table
    documents: pa.Table
    vectors: tuple[NDArray[np.float32], NDArray[np.float32]] | None


class MaskAudit:
    """Gathers the audit of one file of batches, in their order: ``found``, as this module describes it."""

    def __init__(self) -> None:
        rules = {rule: {"negatives": 0, "batches": 0, "examples": []} for rule in RULES}
        self.found: Audit = {"batches": 0, "negatives": 0, "rows": dict.fromkeys(_ROWS, 0), "rules": rules}

    def add(self, batch: AuditedBatch) -> None:
        """Counts one batch; its texts are read where it has an example to give."""
        size, columns = batch.rule_of.shape
        rows, masked = self.found["rows"], np.count_nonzero(batch.rule_of, axis=1)
        self.found["batches"] += 1
        self.found["negatives"] += size * (columns - 1)
        rows["all"] += size
        rows["with_half_masked"] += int(np.count_nonzero(2 * masked >= columns - 1))
        rows["without_negatives"] += int(np.count_nonzero(masked == columns - 1))
        counts = np.bincount(batch.rule_of.ravel(), minlength=len(RULES) + 1)
        for number, rule in enumerate(RULES, 1):
            if counts[number]:
                found = self.found["rules"][rule]
                found["negatives"] += int(counts[number])
                found["batches"] += 1
                if len(found["examples"]) < EXAMPLES:
                    row, column = divmod(int(np.argmax(batch.rule_of == number)), columns)
                    found["examples"].append(_example(batch, row, column))


def _example(batch: AuditedBatch, row: int, column: int) -> Audit:
    def score(place: int) -> float | None:
        if batch.vectors is None:
            return None
        queries, documents = batch.vectors
        product = np.dot(queries[row].astype(np.float64), documents[place].astype(np.float64))
        return round(float(product), 4)  # coarser by far than what the order of a sum may change

    def shown(name: str, table: pa.Table, place: int) -> dict[str, str]:
        text = table["text"][place].as_py()[:_SHOWN_CHARACTERS]
        return {f"{name}_id": table["id"][place].as_py(), name: text}

    return {
        "epoch": batch.epoch,
        "batch": batch.number,
        "row": row,
        "column": column,
        **shown("query", batch.queries, row),
        **shown("positive", batch.documents, row),
        **shown("document", batch.documents, column),
        "positive_score": score(row),
        "score": score(column),
    }


def merge_audits(audits: Sequence[Audit]) -> Audit:
    """One audit of all files, in their order: sums, and the first examples of each rule."""
    rules = {}
    for rule in RULES:
        parts = [audit["rules"][rule] for audit in audits]
        rules[rule] = {
            "negatives": sum(part["negatives"] for part in parts),
            "batches": sum(part["batches"] for part in parts),
            "examples": [example for part in parts for example in part["examples"]][:EXAMPLES],
        }
    totals = {name: sum(audit[name] for audit in audits) for name in ("batches", "negatives")}
    rows = {name: sum(audit["rows"][name] for audit in audits) for name in _ROWS}
    return {**totals, "rows": rows, "rules": rules}


def example_lines(audit: Audit) -> list[str]:
    """Some documents that the surrogate left out, each with the query and its own document, for a person to judge."""
    lines = []
    for found in audit["rules"][RULES[-1]]["examples"][:_EXAMPLES_SHOWN]:
        lines += ["", f"  query     {shortened(found['query'], _LINE)}"]
        for name, of_document, score in (("positive", "positive", "positive_score"), ("masked", "document", "score")):
            shown = "" if found[score] is None else f"{found[score]:.2f}  "
            lines.append(f"    {name:8}  {shown}{shortened(found[of_document], _LINE)}")
    return lines


def example_table(audit: Audit) -> Table:
    """The first examples of each rule: the query, its own document, and the one that was masked."""
    rows = [
        [rule, *(shortened(found[name], _LINE) for name in ("query", "positive", "document"))]
        for rule in RULES
        for found in audit["rules"][rule]["examples"][:_EXAMPLES_SHOWN]
    ]
    return Table(["rule", "query", "its document", "masked"], rows, text_columns=4)


def mask_table(audit: Audit) -> Table:
    """For each rule the number of negatives it masked, and of their batches."""
    found = [(rule, audit["rules"][rule]) for rule in RULES]
    counts = [(rule, of_rule["negatives"], f"{of_rule['batches']:,}") for rule, of_rule in found]
    counts.append(("all rules", sum(of_rule["negatives"] for _, of_rule in found), ""))
    rows = [(rule, f"{n:,}", f"{n / max(audit['negatives'], 1):.3%}", batches) for rule, n, batches in counts]
    rows_of = audit["rows"]
    caption = (
        f"Of {audit['negatives']:,} negatives in {audit['batches']:,} batches, all epochs. A negative counts for"
        f" the first rule that masks it. Of {rows_of['all']:,} rows, {rows_of['with_half_masked']:,} have at least"
        f" half of their negatives masked, and {rows_of['without_negatives']:,} all of them. Surrogate score:"
        " the surrogate encoder finds that the document fits the query too well for a negative."
    )
    return Table(["masked by", "negatives", "share", "batches"], rows, caption)


def masked_share(audit: Audit) -> float:
    """The share of negatives that are masked."""
    return float(sum(of_rule["negatives"] for of_rule in audit["rules"].values()) / max(audit["negatives"], 1))


def warnings_of(audit: Audit) -> list[str]:
    """A line where most negatives are masked: what did it, and what to do."""
    share, rules = masked_share(audit), audit["rules"]
    if share <= _MOST_MASKED:
        return []
    most = max(rules, key=lambda rule: rules[rule]["negatives"])
    remedy = "pairs.documents_per_query and pairs.queries_per_document leave fewer pairs that mask one another."
    if most == RULES[-1]:
        remedy = (
            "Do the vectors belong to these texts, and does their encoder tell the texts apart?"
            " batches.false_negatives.margin: -0.1 masks less."
        )
    return [
        f"Warning: {share:.0%} of the negatives are masked, most by {most!r}, so little is left to learn from. Examples"
        f" stand in audit.json. {remedy}"
    ]
