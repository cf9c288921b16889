"""Judgments in tab-separated files."""

from pathlib import Path

import pytest

from raytriever.retrieval.collections.qrels import HEADER, read_qrels
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.storage import Folder


def judgments(folder: Path, text: str) -> list[tuple[int, str, str, int]]:
    (folder / "test.tsv").write_bytes(text.encode())
    return list(read_qrels(Folder(str(folder)), "test.tsv"))


def test_zero_and_negative_scores_and_spaces_in_ids_survive(tmp_path: Path) -> None:
    text = f'{HEADER}\r\nq 1\td\u2028\t0\r\n\r\nq 1\te\t-2\r\nq2\t"e"\t+2147483647'
    assert judgments(tmp_path, text) == [
        (2, "q 1", "d\u2028", 0),
        (4, "q 1", "e", -2),
        (5, "q2", '"e"', 2147483647),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "q1\td1\t1\n",
            r"test\.tsv, line 1 is 'q1\\td1\\t1'.*begins with the header 'query-id\\tcorpus-id\\tscore'",
        ),
        ("q1 0 d1 1\n", r"line 1 is 'q1 0 d1 1'"),
        (f"{HEADER}\nq1\td1\n", r"line 2 has 2 tab-separated fields: 'q1\\td1'"),
        (f"{HEADER}\nq1\t0\td1\t1\n", r"line 2 has 4 tab-separated fields"),
        (f"{HEADER}\nq1 d1 1\n", r"line 2 has 1 tab-separated fields"),
        (f"{HEADER}\nq1\td1\t1.0\n", r"line 2: the score is '1\.0'\. It must be an integer"),
        (f"{HEADER}\nq1\td1\t1_0\n", r"line 2: the score is '1_0'"),
        (f"{HEADER}\nq1\td1\t\n", r"line 2: the score is ''"),
        (f"{HEADER}\nq1\td1\t٣\n", r"line 2: the score is '٣'"),
        (f"{HEADER}\nq1\td1\t2147483648\n", r"line 2: the score is '2147483648'"),
        (
            f"{HEADER}\nq1\td1\t1\n\nq1\td1\t0\n",
            r"line 4 judges query 'q1' and document 'd1', as line 2 does",
        ),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        judgments(tmp_path, text)


def test_an_empty_file_has_no_judgments(tmp_path: Path) -> None:
    assert judgments(tmp_path, "") == judgments(tmp_path, f"{HEADER}\n") == []
