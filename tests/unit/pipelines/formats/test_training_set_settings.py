"""Settings of training sets as a recipe has them: read, and written to the manifest without the folder's path."""

from typing import Any

import pytest

from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.settings.configuration import parse_yaml, validate

DPR = """
kind: dpr
path: downloads/data
passages: wikipedia_split/psgs_w100.tsv
examples: {train: retriever/nq-train.json, dev: [retriever/nq-dev.json]}
questions: {test: retriever/qas/nq-test.csv}
"""
TEVATRON = """
kind: tevatron
path: msmarco
corpus: corpus*.jsonl
examples: {train: train.jsonl}
"""
LISTED = [
    (
        DPR,
        {
            "passages": ["wikipedia_split/psgs_w100.tsv"],
            "examples": {"train": ["retriever/nq-train.json"], "dev": ["retriever/nq-dev.json"]},
            "questions": {"test": ["retriever/qas/nq-test.csv"]},
            "differing_texts": "refuse",
        },
    ),
    (TEVATRON, {"corpus": ["corpus*.jsonl"], "examples": {"train": ["train.jsonl"]}, "differing_texts": "refuse"}),
]


@pytest.mark.parametrize(("text", "expected"), LISTED, ids=["dpr", "tevatron"])
def test_settings(text: str, expected: dict[str, Any]) -> None:
    source = parse_yaml(text, "recipe")
    config = validate(CollectConfig, {"output": "o", "source": source}, "collect")
    refused = dict.fromkeys(("empty_documents", "empty_queries", "unknown_ids"), "refuse")
    assert (
        Collect(config).resolved()["source"] == {"kind": source["kind"], "cross_validation": None} | refused | expected
    )
