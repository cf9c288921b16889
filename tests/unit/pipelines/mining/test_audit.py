"""An audit of blocks, added up, is the audit of the whole; and what a person sees of it."""

import numpy as np
import pytest

from pipelines.mining.audit import COUNTS, EXAMPLES, Audit, block_audit, merge_audits, remark_table, rule_table
from pipelines.mining.inputs import QueryBlock
from pipelines.mining.rules import ABSENT, KEPT, RULES, UNJUDGED, Block, JudgedPairs, MiningRules, Positives
from pipelines.reports.data import mining_section
from raytriever.reports.table import Table

QUERIES, K = 90, 7
RULESET = MiningRules(relative_margin=0.1, judged_negatives="drop")


def block_of(numbers: np.ndarray) -> tuple[QueryBlock, np.ndarray, np.ndarray]:
    """Queries of these numbers with made-up outcomes, each a function of the query alone."""
    rows = np.zeros((len(numbers), K), np.int64)
    rule_of = np.zeros((len(numbers), K), np.uint8)
    codes = [list(RULES).index(name) for name in RULESET.active()]
    for place, number in enumerate(numbers):
        generator = np.random.default_rng(number)
        rows[place] = generator.permutation(1000)[:K]
        rule_of[place] = generator.choice([*codes, KEPT, KEPT, KEPT], size=K)
        if number % 5 == 0:
            rule_of[place, 4:] = ABSENT
            rows[place, 4:] = -1
    pairs = JudgedPairs(np.arange(len(numbers)), np.full(len(numbers), 5), np.ones(len(numbers), np.int32))
    known = np.where(numbers % 4 == 0, np.nan, 1.0).astype(np.float32)
    positives = Positives(pairs, known, (numbers % 3).astype(np.int32), np.zeros(len(numbers), np.uint64))
    relevance, scores = np.full(rows.shape, UNJUDGED, np.int32), (rows / 7).astype(np.float32)
    keys = np.zeros(len(numbers), np.uint64)
    block = Block(rows, scores, relevance, rows.astype(np.uint64), numbers * 0, keys, positives)
    answers = [["x"] if number % 2 else [] for number in numbers]
    queries = QueryBlock([f"q{number}" for number in numbers], numbers, answers, block, left_out=len(numbers) // 10)
    return queries, rule_of, rule_of == KEPT


def describe(query_rows: np.ndarray, rows: np.ndarray) -> list[dict[str, str]]:
    return [
        {"query_id": f"q{query}", "query": f"<b>{query}", "document_id": f"d{row}", "document": f"\x00{row} " * 100}
        for query, row in zip(query_rows, rows, strict=True)
    ]


def audit_of(numbers: np.ndarray, number: int | None = 3) -> Audit:
    queries, rule_of, chosen = block_of(numbers)
    return block_audit(RULESET, queries, rule_of, chosen, number, describe)


@pytest.mark.parametrize("blocks", [1, 2, 9, 90])
def test_blocks_all_reduce_sum(blocks: int) -> None:
    numbers = np.arange(QUERIES)
    parts = [audit_of(part) for part in np.split(numbers, blocks)]
    merged, whole = merge_audits(parts), merge_audits([audit_of(numbers)])
    assert merged["rules"] == whole["rules"]
    assert merged["chosen"] == whole["chosen"]
    left_out = merged["counts"].pop("queries_without_positive")
    assert left_out == sum(len(part) // 10 for part in np.split(numbers, blocks))
    assert merged["counts"] == {name: n for name, n in whole["counts"].items() if name != "queries_without_positive"}


def test_counts_and_examples() -> None:
    numbers = np.arange(QUERIES)
    _, rule_of, chosen = block_of(numbers)
    audit = merge_audits([audit_of(numbers)])
    for name in RULESET.active():
        mask = rule_of == list(RULES).index(name)
        group = audit["rules"][name]
        assert (group["candidates"], group["queries"]) == (mask.sum(), mask.any(axis=1).sum())
        assert len(group["examples"]) == EXAMPLES == len({example["query_id"] for example in group["examples"]})
        for example in group["examples"]:
            number = int(example["query_id"][1:])
            assert mask[number].argmax() + 1 == example["rank"]
            assert set(example) == {"query_id", "query", "document_id", "document", "rank", "score"}
            assert len(example["document"]) == 240
            assert len(str(example["score"]).partition(".")[2]) <= 6
    assert audit["counts"] == {
        "queries": QUERIES, "queries_without_positive": 9, "positives": QUERIES, "positives_retrieved": 60,
        "candidates": QUERIES * K - 18 * 3, "eligible": chosen.sum(),
        "queries_with_fewer": (chosen.sum(axis=1) < 3).sum(), "queries_with_none": (chosen.sum(axis=1) == 0).sum(),
        "queries_without_answers": 45, "queries_without_positive_score": 23,
    }  # fmt: skip
    assert audit_of(numbers, None)["counts"]["queries_with_fewer"] == 0
    margin = block_audit(MiningRules(absolute_margin=0.1), *block_of(numbers), 3, describe)["counts"]
    assert margin["queries_without_positive_score"] == 23
    plain = block_audit(MiningRules(answers="ignore"), *block_of(numbers), 3, describe)["counts"]
    assert (plain["queries_without_answers"], plain["queries_without_positive_score"]) == (0, 0)


def test_tables_and_the_section_of_the_report_name_every_rule_in_order() -> None:
    audit = merge_audits([audit_of(np.arange(QUERIES))])
    table = rule_table(audit)
    assert table.caption.startswith("576 candidates of 90 queries")
    assert table.text_columns == 2
    assert [line.split()[0] for line in table.lines() if "%" in line] == [*RULESET.active(), "chosen"]
    shown = mining_section(audit).blocks[0]
    assert isinstance(shown, Table)
    assert [row[0] for row in shown.rows] == [*RULESET.active(), "chosen"]
    remark = ("queries that have no answers to match", "45")
    assert remark in remark_table(audit).rows
    counts = audit["counts"] | {"queries_with_none": 0, "queries_with_fewer": QUERIES}
    names = (
        "queries_without_positive",
        "queries_with_fewer",
        "queries_without_answers",
        "queries_without_positive_score",
    )
    assert [row[0] for row in remark_table({"counts": counts}).rows] == [COUNTS[name] for name in names]
    without_answers = {**audit, "counts": audit["counts"] | {"queries_without_answers": QUERIES}}
    assert remark[0] not in [row[0] for row in remark_table(without_answers).rows]
    nothing = merge_audits([audit_of(np.arange(0))])
    assert rule_table(nothing).caption.startswith("0 candidates of 0 queries")
