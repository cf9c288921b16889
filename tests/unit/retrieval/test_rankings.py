"""TREC files: exact round trips, the format itself, and errors that name file and line."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pydantic import TypeAdapter, ValidationError

from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.indexes.top_k import Ranking
from retrieval.rankings import RankingFile, Tag, ranking_by_ids, read_ranking_file, require_names, write_trec
from tests.unit.retrieval.judged import make_collection, write_run_file

name = st.text(min_size=1, max_size=6).filter(lambda text: text.split() == [text] and text.isprintable())


def test_the_lines_of_a_run() -> None:
    ranking = Ranking(
        np.array([[2, 0, -1], [-1, -1, -1], [1, 2, 0]]),
        np.array([[1.5, 0.1, -np.inf], [-np.inf] * 3, [3.0, 3.0, -2e-8]], dtype=np.float32),
    )
    file = io.BytesIO()
    write_trec(file, ["q1", "q2", "q3"], pa.chunked_array([["a", "b"], ["ç"]]), ranking, "bm25")
    assert file.getvalue().decode() == (
        "q1 Q0 ç 1 1.5 bm25\nq1 Q0 a 2 0.1 bm25\nq3 Q0 b 1 3 bm25\nq3 Q0 ç 2 3 bm25\nq3 Q0 a 3 -2e-8 bm25\n"
    )
    write_trec(file, ["q2"], pa.chunked_array([["a"]]), Ranking(ranking.rows[1:2], ranking.scores[1:2]), "bm25")
    assert file.tell() == len(file.getvalue())  # a query that found nothing has no line


@settings(max_examples=60, deadline=None)
@given(
    scores=arrays.arrays(np.float32, (3, 4), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    query_ids=st.lists(name, min_size=3, max_size=3, unique=True),
    document_ids=st.lists(name, min_size=9, max_size=9, unique=True),
    seed=st.integers(0, 2**32 - 1),
)
def test_runs_come_back_as_the_same_float32(tmp_path_factory, scores, query_ids, document_ids, seed):
    generator = np.random.default_rng(seed)
    rows = np.stack([generator.permutation(9)[:4] for _ in range(3)])
    scores = -np.sort(-scores, axis=1)
    path = tmp_path_factory.mktemp("runs") / "run.trec"
    with path.open("wb") as file:
        write_trec(file, query_ids, pa.chunked_array([document_ids]), Ranking(rows, scores), "tag")
    run = read_ranking_file(path)
    assert list(run) == query_ids
    for query, line, values in zip(query_ids, rows, scores, strict=True):
        assert list(run[query]) == [document_ids[row] for row in line]
        assert np.array(list(run[query].values()), dtype=np.float32).tobytes() == values.tobytes()


@pytest.mark.parametrize(("text", "expected"), [
    (b"q1\tQ0\td1\t0\t1e2\tx\r\n\nq1   0 d\xc2\xa02 7 -3 x\nq0 Q0 d1 1 inf x",  # of another tool
     {"q1": {"d1": 100.0, "d\u00a02": -3.0}, "q0": {"d1": np.inf}}),
    (b"\xef\xbb\xbfq1 Q0 d1 1 2.5 x\n\xef\xbb\xbfq2 Q0 d1 1 2 x\n",  # a mark is one at the beginning alone
     {"q1": {"d1": 2.5}, "\ufeffq2": {"d1": 2.0}}),
    (b"\xef\xbb\xbf1\t2\t1\n", {"1": {"2": -1.0}}),
    (b"\n \n1\t2\t1\n", {"1": {"2": -1.0}}),  # the first line that has anything tells the form
    (b"\xef\xbb\xbf", {}),
    (b"", {}),
])  # fmt: skip
def test_files_of_other_tools_and_with_a_byte_order_mark(tmp_path, text, expected):
    (tmp_path / "run").write_bytes(text)
    assert read_ranking_file(tmp_path / "run") == expected


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", pa.Codec("zstd").compress)])
def test_compressed_runs(ending: str, compress: Callable[[bytes], Any], tmp_path: Path) -> None:
    path = tmp_path / f"run.trec{ending}"
    path.write_bytes(bytes(compress(b"q Q0 d\xc2\xa01 1 2.5 x\nq Q0 e 2 2 x\n")))
    assert read_ranking_file(path) == {"q": {"d\u00a01": 2.5, "e": 2.0}}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"run\.trec.* can't be read: "):
        read_ranking_file(path)


@pytest.mark.parametrize(("text", "message"), [
    (b"q Q0 d 1 1.0 t\nq Q0 d2 2 0.5\n", "line 2 has 5 columns; 6 are needed: query Q0 document rank score tag"),
    (b"q Q0 d 1 high t\n", r"line 1: column 5 \(score\) is 'high', no number"),
    (b"q Q0 d 1 inf t\nq Q0 g 1 -3.4028235e38 t\nq Q0 e 2 -3.4028235677973366e38 t\n",
     r"line 3: column 5 \(score\) is '-3\.4028235677973366e38', no number of float32"),
    (b"q Q0 d 1 nan t\n", r"line 1: column 5 \(score\) is 'nan'"),
    (b"q Q0 d 1 2 t\n\nq Q0 e 1 2 t\nq Q0 d 2 1 t\n", "line 4 names document 'd' again for query 'q'"),
    (b"q Q0 \xff 1 1.0 t\n", "line 1 is not UTF-8"),
    (b"1\t2\t1\n1\t3\n", "line 2 has 2 columns; 3 are needed: query document rank"),  # from here MS MARCO's
    (b"1\t2\t0\n", r"line 1: column 3 \(rank\) is '0', no positive integer"),
    (b"1\t2\t1\n1\t3\t2.0\n", r"line 2: column 3 \(rank\) is '2.0', no positive integer"),
    (b"1\t2\t-1\n", r"line 1: column 3 \(rank\) is '-1'"),
    (b"1\t2\t1\n1\t2\t2\n", "line 2 names document '2' again for query '1'"),
])  # fmt: skip
def test_wrong_runs(text: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"wrong.run can't be read: .*No such file"):
        read_ranking_file(tmp_path / "wrong.run")
    (tmp_path / "wrong.run").write_bytes(text)
    with pytest.raises(UserError, match=f"wrong.run, {message}"):
        read_ranking_file(tmp_path / "wrong.run")


@settings(max_examples=40, deadline=None)
@given(ranks=st.dictionaries(name, st.dictionaries(name, st.integers(1, 2**31), min_size=1), min_size=1, max_size=4))
def test_runs_of_ms_marco_are_ordered_by_rank(tmp_path_factory, ranks):
    path = tmp_path_factory.mktemp("runs") / "run.tsv"
    lines = [f"{query}\t{document}\t{rank}\n" for query, ranked in ranks.items() for document, rank in ranked.items()]
    path.write_text("".join(lines), encoding="utf-8")
    run = read_ranking_file(path)
    assert {query: {document: -score for document, score in scores.items()} for query, scores in run.items()} == ranks
    for query, scores in run.items():
        best = max(scores, key=scores.__getitem__)
        assert ranks[query][best] == min(ranks[query].values())


def test_a_ranking_of_another_tool_by_the_rows_of_a_collection(tmp_path: Path) -> None:
    collection = StoredCollection(make_collection(tmp_path))
    equal = {"d3": 1 + 2e-9, "d1": 1 + 1e-9}  # in float32, not in the file
    path = write_run_file(tmp_path / "run.trec", {"q2": {**equal, "d2": 1.1}, "q1": {"d5": 1.0}})
    found = RankingFile(Path(path), collection)
    assert found.query_ids() == ["q2", "q1"]
    ids = found.document_ids().to_pylist()
    names = [[None if row == -1 else ids[row] for row in rows] for rows in found.ranking().rows]
    assert names == [["d2", "d3", "d1"], ["d5", None, None]]
    expected = np.array([[1.1, 1, 1], [1, -np.inf, -np.inf]], np.float32)
    np.testing.assert_array_equal(found.ranking().scores, expected)
    assert found.ranking().scores.dtype == np.float32
    with pytest.raises(UserError, match=r"1 of 1 queries are not in .*, such as 'q9'"):
        RankingFile(Path(write_run_file(tmp_path / "other.trec", {"q9": {"d1": 1.0}})), collection)
    (tmp_path / "empty.trec").touch()
    assert RankingFile(tmp_path / "empty.trec", collection).ranking().rows.shape == (0, 0)


@pytest.mark.parametrize("wrong", ["a b", "", "a\tb", "a\u2003b", " a"])
def test_a_tag_holds_no_whitespace(wrong: str) -> None:
    tags = TypeAdapter(Tag)
    assert tags.validate_python("bm25") == "bm25"
    with pytest.raises(ValidationError):
        tags.validate_python(wrong)


def test_ids_with_whitespace_are_refused() -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    require_names([pa.array([mark for mark in characters if mark.split()]), pa.array([], pa.string())], "An id")
    for wrong in ["", *(f"{before}{mark}b" for mark in characters if not mark.split() for before in ("", "a"))]:
        with pytest.raises(UserError) as raised:
            require_names([pa.array(["x"]), pa.chunked_array([["a", wrong, "c d"]])], "An id")
        assert str(raised.value).startswith(f"An id is {wrong!r}, which can't be written")


@pytest.mark.parametrize("count", [1, 1500])
def test_a_ranking_by_ids_has_each_line_under_its_query(tmp_path: Path, count: int) -> None:
    documents = StoredCollection(make_collection(tmp_path)).rows_of("documents")
    ids = documents.read(["id"])["id"].to_pylist()
    rows = np.stack([np.arange(count) % len(ids), np.full(count, -1)], axis=1)
    queries = [str(number) for number in range(count)]
    found = ranking_by_ids(documents, queries, Ranking(rows, np.full((count, 2), 0.5, dtype=np.float32)))
    assert found == {query: {ids[int(query) % len(ids)]: 0.5} for query in queries}
    for asked in (queries[:-1], queries[:1024], []):
        if len(asked) < count:
            with pytest.raises(ValueError, match=r"shorter|longer"):
                ranking_by_ids(documents, asked, Ranking(rows, np.zeros((count, 2), dtype=np.float32)))
