"""The report's section on mining: what is left of a run's candidates, what each rule dropped, and examples."""

from typing import Any

from pipelines.mining.audit import COUNTS, Audit, noteworthy, rules_of
from pipelines.mining.rules import RULES
from raytriever.reports.report import Block, Details, Section
from raytriever.reports.table import Table


def mining_section(audit: Audit) -> Section:
    """The section on one candidates artifact; ``audit`` as ``StoredCandidates.audit`` gives it."""
    counts, chosen = audit["counts"], audit["chosen"]
    lead = (
        f"What became of the {counts['candidates']:,} documents that the run ranks for {counts['queries']:,} queries:"
        f" no rule drops {counts['eligible']:,} of them, and {chosen['candidates']:,} were chosen."
    )
    blocks: list[Block] = [_rule_table(audit)]
    told = [f"{count:,} {COUNTS[name]}" for name, count in noteworthy(audit).items()]
    if told:
        blocks.append(f"There are {'; '.join(told)}.")
    blocks += [
        Details(f"Examples: {name} ({RULES[name]})", _example_table(group))
        for name, group in rules_of(audit).items()
        if group["examples"]
    ]
    if chosen["examples"]:
        blocks.append(Details("Examples: chosen", _example_table(chosen)))
    return Section("Mined candidates", lead, blocks)


def _rule_table(audit: Audit) -> Table:
    total = audit["counts"]["candidates"]
    rows = [_rule_row(name, RULES[name], group, total) for name, group in rules_of(audit).items()]
    rows.append(_rule_row("chosen", "no rule drops it, and it is among those taken", audit["chosen"], total))
    caption = (
        "Rules in the order in which they are asked; a candidate counts for the first one that drops it. Queries: those"
        " with such a candidate."
    )
    return Table(["rule", "the candidate is", "candidates", "share", "queries"], rows, caption, text_columns=2)


def _rule_row(name: str, meaning: str, group: Any, total: int) -> list[str]:
    share = f"{group['candidates'] / total:.1%}" if total else "-"
    return [name, meaning, f"{group['candidates']:,}", share, f"{group['queries']:,}"]


def _example_table(group: Any) -> Table:
    rows = [
        [
            found["query"],
            f"{found['document_id']}: {found['document']}",
            f"{found['rank']:,}",
            f"{found['score']:.4f}",
        ]
        for found in group["examples"]
    ]
    caption = "The best ranked such candidate of some queries, drawn by a hash of their ids."
    return Table(["query", "document", "rank", "score"], rows, caption, text_columns=2)
