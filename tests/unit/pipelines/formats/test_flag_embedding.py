"""FlagEmbedding's lines: what is read, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats.flag_embedding import FlagEmbedding
from pipelines.jobs.collect import CollectConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.records import text_id
from tests.unit.retrieval.collections.contents import Contents, contents
from tests.unit.retrieval.collections.packed_files import write_files

EXAMPLES: list[dict[str, Any]] = [
    {"query": "what", "pos": ["a", "b"], "neg": ["c"], "pos_scores": [1, 0.5], "neg_scores": [0.1], "type": "normal"},
    {"query": "who", "pos": ["c"], "neg": ["a", "c"], "prompt": "Find it: ", "type": "symmetric_sts"},
    {"query": "what", "pos": ["c"], "neg": []},
]


def lines(*records: Any) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def read(path: str, **values: Any) -> Contents:
    return contents(FlagEmbedding(path=path, **({"examples": {"train": "t.jsonl"}} | values)).open())


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_positives_have_relevance_1_and_negatives_0(place: str, ending: str) -> None:
    read_ = read(write_files(place, {"t.jsonl": lines(*EXAMPLES)}, ending))
    a, b, c, what, who = (text_id("", text) for text in ("a", "b", "c", "what", "who"))
    assert read_.documents == [(a, "", "a", ""), (b, "", "b", ""), (c, "", "c", "")]
    assert read_.queries == [(what, "what", "", []), (who, "who", "", [])]
    assert read_.judgments == [  # a positive of one example that is a negative of another is a positive
        (what, a, 1, "train"),
        (what, b, 1, "train"),
        (who, c, 1, "train"),
        (what, c, 1, "train"),
        (who, a, 0, "train"),
    ]


@pytest.mark.parametrize(
    ("domain", "domains"),
    [
        ("file", [("t", "what"), ("t", "who")]),
        ("type", [("normal", "what"), ("symmetric_sts", "who"), ("", "what")]),
        ("prompt", [("", "what"), ("Find it: ", "who")]),
    ],
)
def test_texts_of_two_domains_are_two(tmp_path: Path, domain: str, domains: list[tuple[str, str]]) -> None:
    write_files(str(tmp_path), {"folder/t.jsonl": lines(*EXAMPLES)}, ".gz")
    read_ = read(str(tmp_path), examples={"train": "folder/t.jsonl"}, domain=domain)
    assert [(row[2], row[1]) for row in read_.queries] == domains
    assert [row[0] for row in read_.queries] == [text_id(*both) for both in domains]
    domain_of = {row[0]: row[3] for row in read_.documents} | {row[0]: row[2] for row in read_.queries}
    assert len(read_.judgments) >= 4
    assert all(domain_of[query] == domain_of[document] for query, document, *_ in read_.judgments)


def test_splits_and_several_files(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"b/1.jsonl": lines(EXAMPLES[0]), "a/2.jsonl": lines(EXAMPLES[1])})
    both = read(str(tmp_path), examples={"train": "*/?.jsonl", "dev": ["a/2.jsonl"]})
    assert [row[1] for row in both.queries] == ["who", "what"]
    assert {row[3] for row in both.judgments} == {"dev", "train"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"pos": ["a"], "neg": []}, 'line 2 has no "query"'),
        ({"query": "q", "pos": "a"}, "line 2: \"pos\" is 'a'. It must be a list of strings"),
        ({"query": "q", "pos": ["a"], "neg": [1]}, r"line 2: \"neg\" is \[1\]. It must be a list of strings"),
        ({"query": "q", "pos": ["a"], "type": 1}, 'line 2: "type" is 1. It must be a string'),
        ({"query": "q", "pos": [""]}, "line 2: document .* has neither title nor text"),
        ({"query": "", "pos": ["a"]}, "line 2: query .* has no text"),
        ({"query": "q", "neg": ["a"]}, 'line 2 has no "pos"'),
    ],
)
def test_wrong_examples_are_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    write_files(str(tmp_path), {"t.jsonl": lines(EXAMPLES[0], record)})
    with pytest.raises(UserError, match=rf"{tmp_path}/t\.jsonl, {message}"):
        read(str(tmp_path), domain="type")


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"examples\.train: .*t\.jsonl is not there"):
        read(str(tmp_path))
    settings = {"kind": "flag_embedding", "path": "x", "examples": {}}
    with pytest.raises(UserError, match=r"source\.examples"):
        validate(CollectConfig, {"output": "o", "source": settings}, "collect")
