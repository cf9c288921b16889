"""Judgments in tab-separated files, and in TREC's columns."""

from pathlib import Path

import pytest

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.text_lines import HEADER, read_qrels, read_trec_qrels

READ = {"tsv": read_qrels, "trec": read_trec_qrels}


def judgments(folder: Path, form: str, text: str) -> list[tuple[int, str, str, int]]:
    (folder / f"test.{form}").write_bytes(text.encode())
    return [(place.line, *values) for place, *values in READ[form](Folder(str(folder)), f"test.{form}")]


@pytest.mark.parametrize(("form", "text", "expected"), [
    ("tsv", f'{HEADER}\r\nq 1\td\u2028\t0\r\n\r\nq 1\te\t-2\r\nq2\t"e"\t+2147483647',
     [(2, "q 1", "d\u2028", 0), (4, "q 1", "e", -2), (5, "q2", '"e"', 2147483647)]),
    ("tsv", "", []),
    ("tsv", f"{HEADER}\n", []),
    ("trec", "301 0 FBIS-1 1\r\n\r\n 301\tQ0\td\u00a02\t-2 \nq  0   d3 \t +2147483647",
     [(1, "301", "FBIS-1", 1), (3, "301", "d\u00a02", -2), (4, "q", "d3", 2147483647)]),
    ("trec", "", []),
    ("trec", "\n \n", []),
])  # fmt: skip
def test_scores_of_any_sign_and_spaces_in_ids_survive(tmp_path, form, text, expected):
    assert judgments(tmp_path, form, text) == expected


@pytest.mark.parametrize(("form", "text", "message"), [
    ("tsv", "q1\td1\t1\n",
     r"test\.tsv, line 1 is 'q1\\td1\\t1'.*begins with the header 'query-id\\tcorpus-id\\tscore'"),
    ("tsv", "q1 0 d1 1\n", r"line 1 is 'q1 0 d1 1'"),
    ("tsv", f"{HEADER}\nq1\td1\n", r"line 2 has 2 tab-separated fields: 'q1\\td1'"),
    ("tsv", f"{HEADER}\nq1\t0\td1\t1\n", r"line 2 has 4 tab-separated fields"),
    ("tsv", f"{HEADER}\nq1 d1 1\n", r"line 2 has 1 tab-separated fields"),
    ("tsv", f"{HEADER}\nq1\td1\t1.0\n", r"line 2: the score is '1\.0'\. It must be an integer"),
    ("tsv", f"{HEADER}\nq1\td1\t1_0\n", r"line 2: the score is '1_0'"),
    ("tsv", f"{HEADER}\nq1\td1\t\n", r"line 2: the score is ''"),
    ("tsv", f"{HEADER}\nq1\td1\t٣\n", r"line 2: the score is '٣'"),
    ("tsv", f"{HEADER}\nq1\td1\t2147483648\n", r"line 2: the score is '2147483648'"),
    ("trec", f"{HEADER}\n", r"test\.trec, line 1 has 3 columns: .* It must have 4, with spaces or tabs"),
    ("trec", "q 0 d 1\nq 0 d\n", r"line 2 has 3 columns: 'q 0 d'"),
    ("trec", "q 0 d 1\n\nq 0 d 1 x\n", r"line 3 has 5 columns"),
    ("trec", "q 0 d 1.0\n", r"line 1: the relevance is '1\.0'\. It must be an integer of 32 bits"),
    ("trec", "q 0 d 2147483648\n", r"line 1: the relevance is '2147483648'"),
])  # fmt: skip
def test_malformed_lines_are_named(tmp_path, form, text, message):
    with pytest.raises(UserError, match=message):
        judgments(tmp_path, form, text)
