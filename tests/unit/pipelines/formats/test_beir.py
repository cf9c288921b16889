"""BEIR folders: what is read, what is refused and how it is said, what is left out when asked; real collections."""

import gzip
import hashlib
import json
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.formats.beir import BeirFolder
from raytriever.errors import UserError
from retrieval.collections.collection import passage_text
from retrieval.collections.records import Source
from retrieval.collections.text_lines import HEADER
from tests.unit.retrieval.collections.contents import contents, contents_and_dropped, dropped
from tests.unit.retrieval.collections.packed_files import write_files

CORPUS: list[dict[str, Any]] = [
    {"_id": "d1", "title": "Cats", "text": "They purr.", "metadata": {"domain": "pets", "site": "zoo"}},
    {"_id": "d2", "title": "Only a title", "text": ""},
    {"_id": "d3", "text": "def f():\n\treturn 1"},
    {"_id": 4, "title": None, "text": "An integer id"},
]
QUESTIONS: list[dict[str, Any]] = [
    {"_id": "q1", "text": "what purrs", "metadata": {"domain": "pets"}},
    {"_id": "q2", "text": "never judged"},
]
QRELS = {"train": ["q1\td1\t2", "q1\td2\t0"], "test": ["q1\t4\t-1", "q1\td3\t1"]}


def write(folder: Path, corpus: list[Any] = CORPUS, queries: list[Any] = QUESTIONS, qrels: Any = QRELS) -> Path:
    """A BEIR folder; a string stands for a line as it is."""

    def lines(records: list[Any]) -> str:
        return "".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records)

    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(lines(corpus), encoding="utf-8")
    (folder / "queries.jsonl").write_text(lines(queries), encoding="utf-8")
    for split, judgments in qrels.items():
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join([HEADER, *judgments, ""]), encoding="utf-8")
    return folder


def opened(folder: Path | str, **settings: Any) -> Source:
    return BeirFolder(path=str(folder), **settings).open()


def refused(folder: Path, message: str, **settings: Any) -> None:
    """Asserts that reading raises, from whichever part it is found, and that the message names the folder."""
    with pytest.raises(UserError, match=message) as raised:
        contents(opened(folder, **settings))
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("qrels", ["q1\td1\t1\nq1\td3\t0\n", "q1 0 d1 1\nq1 0 d3 0\n", "q1\tQ0\td1\t1\nq1\tQ0\td3\t0"])
def test_judgments_without_a_header_and_in_the_columns_of_trec(tmp_path: Path, qrels: str) -> None:
    folder = write(tmp_path / "c")
    (folder / "qrels" / "test.tsv").write_text(qrels)
    found = contents(opened(folder, splits=["test"])).judgments
    assert found == [("q1", "d1", 1, "test"), ("q1", "d3", 0, "test")]


def test_a_document_may_lack_its_text_where_others_have_one(tmp_path: Path) -> None:
    corpus = [{"_id": "d1", "title": "Alone"}, {"_id": "d3", "text": "x"}]
    folder = write(tmp_path / "c", corpus, qrels={"a": ["q1\td1\t1"]})
    assert contents(opened(folder)).documents == [("d1", "Alone", "", ""), ("d3", "", "x", "")]


def test_documents_queries_and_judgments(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "c", qrels={**QRELS, "dev": []}))  # a split may be empty while another is not
    documents, queries, judgments = contents(source)
    assert documents == [
        ("d1", "Cats", "They purr.", "pets"),
        ("d2", "Only a title", "", ""),
        ("d3", "", "def f():\n\treturn 1", ""),
        ("4", "", "An integer id", ""),
    ]
    assert queries == [("q1", "what purrs", "pets", []), ("q2", "never judged", "", [])]
    judged = [("4", -1, "test"), ("d3", 1, "test"), ("d1", 2, "train"), ("d2", 0, "train")]
    assert judgments == [("q1", *row) for row in judged]
    assert dropped(source) == {}
    documents, queries, _ = contents(opened(tmp_path / "c", domain_key="site"))
    assert [row[3] for row in documents] == ["zoo", "", "", ""]
    assert [row[2] for row in queries] == ["", ""]


def test_chosen_splits_are_read_and_described_and_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", qrels={**QRELS, "broken": ["no judgment"]})
    source = opened(folder, splits=("train", "test", "train"))
    assert [row[3] for row in contents(source)[2]] == ["test", "test", "train", "train"]
    names = ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv"]
    data = {name: (folder / name).read_bytes() for name in names}
    assert source.format.fingerprint()["files"] == [
        {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in data.items()
    ]
    refused(folder, r"has no qrels/tset\.tsv\. The splits there are broken, test, train", splits=("tset", "train"))
    with pytest.raises(ValidationError):
        BeirFolder(path=str(folder), splits=())


@pytest.mark.parametrize(("removed", "named"), [
    (["corpus.jsonl"], r"lacks corpus\.jsonl\."),
    (["queries.jsonl"], r"lacks queries\.jsonl\."),
    (["qrels/test.tsv", "qrels/train.tsv"], r"lacks qrels/<split>\.tsv\."),
    (["qrels"], r"lacks qrels/<split>\.tsv\."),
    ([""], r"lacks corpus\.jsonl and queries\.jsonl and qrels/<split>\.tsv\..*Is the path right\?"),
])  # fmt: skip
def test_missing_files_are_named_before_anything_is_read(tmp_path: Path, removed: list[str], named: str) -> None:
    folder = write(tmp_path / "c", corpus=["broken"])
    for name in removed:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match=named):
        opened(folder)


def test_files_beside_those_of_the_format_are_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    (folder / "qrels" / "old").mkdir()
    names = ["qrels/._test.tsv", "qrels/README.md", "qrels/old/dev.tsv"]
    for name in [*names, "corpus.jsonl.gz", "queries.jsonl.gz", "qrels/test.tsv.gz"]:  # a plain file comes first
        (folder / name).write_text("broken")
    assert len(contents(opened(folder))[2]) == 4


@pytest.mark.parametrize(("record", "message"), [
    ('{"_id": "d9", "text": "cut', r"corpus\.jsonl, line 5 is not valid JSON .*cut"),
    ({"id": "d9", "text": "x"}, r'corpus\.jsonl, line 5: "_id" is None\. It must be a string'),
    ({"_id": 1.5, "text": "x"}, r"line 5: \"_id\" is 1\.5\. It must be a string that is not empty, or an integer"),
    ({"_id": True, "text": "x"}, r"line 5: \"_id\" is True"),
    ({"_id": None, "text": "x"}, r"line 5: \"_id\" is None"),
    ({"_id": "", "text": "x"}, r"line 5: \"_id\" is ''"),
    ({"_id": "d2", "text": "x"}, r"line 5: id 'd2' already belongs to line 2"),
    ({"_id": "4", "text": "x"}, r"line 5: id '4' already belongs to line 4"),
    ({"_id": "d9", "contents": "x"}, r"line 5: document 'd9' has neither title nor text"),
    ({"_id": "d9", "text": None}, r"line 5: document 'd9' has neither title nor text"),
    ({"_id": "d9", "text": ["x"]}, r"line 5: \"text\" is \['x'\]"),
    ({"_id": "d9", "title": 7, "text": "x"}, r"line 5: \"title\" is 7"),
    ({"_id": "d9", "text": "x", "metadata": {"domain": 7}}, r"line 5: \"metadata.domain\" is 7"),
    ({"_id": "d9", "title": " ", "text": "\n"}, r"line 5: document 'd9' has neither .*source\.empty_documents=drop"),
])  # fmt: skip
def test_bad_documents_are_named(tmp_path: Path, record: Any, message: str) -> None:
    refused(write(tmp_path / "c", corpus=[*CORPUS, record]), message)


@pytest.mark.parametrize(("record", "message"), [
    ("null", r"queries\.jsonl, line 3 is 'null', but every line must be one JSON object"),
    ({"_id": "q1", "text": "x"}, r"queries\.jsonl, line 3: id 'q1' already belongs to line 1"),
    ({"_id": "q9"}, r"line 3: query 'q9' has no text"),
    ({"_id": "q9", "text": "\t"}, r"line 3: query 'q9' has no text\..*source\.empty_queries=drop"),
    ({"_id": "q9", "text": "x", "metadata": {"answers": 7}},
     r'queries\.jsonl, line 3: "metadata\.answers" is 7\. It must be a string or a list of strings'),
])  # fmt: skip
def test_bad_queries_are_named(tmp_path: Path, record: Any, message: str) -> None:
    refused(write(tmp_path / "c", queries=[*QUESTIONS, record]), message)


ONE = {"a": ["q1\td1\t1"]}
UNKNOWN = {"a": ["q1\td1\t1", "q1\tx1\t1", "y\td1\t1"], "b": ["q1\tx2\t0", "q1\td2\t1", "z\tx3\t1"]}
DROP: dict[str, Any] = {"empty_documents": "drop", "empty_queries": "drop", "unknown_ids": "drop"}


@pytest.mark.parametrize(("files", "settings", "message"), [
    ({}, {"domain_key": "stie"}, r"corpus\.jsonl has no column 'metadata\.stie'"),
    ({"corpus": []}, {}, r"corpus\.jsonl holds no documents with a text"),
    ({"corpus": [{"_id": "d1", "text": ""}]}, DROP, r"corpus\.jsonl holds no documents"),
    ({"corpus": [*CORPUS, {"_id": "e", "text": ""}, {"_id": "e", "text": "full"}]}, DROP,
     r"line 6: id 'e' already belongs to line 5"),  # the id of a dropped record is still taken
    ({"corpus": [{"_id": "d1", "title": "Alone"}], "qrels": ONE}, {}, "has no column 'text'"),
    ({"corpus": [{"_id": "d1"}, {"_id": "d3", "text": "x"}], "qrels": ONE}, {},
     "line 1: document 'd1' has neither title nor text"),
    ({"queries": []}, {}, r"queries\.jsonl holds no queries with a text"),
    ({"qrels": {"a": [], "b": []}}, {}, r"No judgments to keep in .*/qrels/a\.tsv, .*/qrels/b\.tsv: 0 "),
    ({"qrels": {"a": ["q1\td1\t1", "q1\td1\t0"]}}, {}, r"a\.tsv, line 3 judges .* with 0, line 2 with 1\. Keep one"),
    ({"qrels": UNKNOWN}, {}, r"qrels/a\.tsv, line 3 names 'x1', which .*/c/corpus\.jsonl does not hold; in all, 2 "
     r"judgments name unknown documents and 2 unknown queries\..*source\.unknown_ids=drop"),
    ({"qrels": {"a": ["y\tx\t1"]}}, {},
     r"qrels/a\.tsv, line 2 names 'y', which .*/c/queries\.jsonl does not hold; in all, 0 .* and 1 unknown"),
    ({"qrels": {"a": ["y\tx\t1"]}}, DROP,
     r"No judgments to keep in .*/qrels/a\.tsv: 1 were left out \(judgments_of_unknown_queries 1\)"),
])  # fmt: skip
def test_folders_that_make_no_collection_are_refused(tmp_path, files, settings, message) -> None:
    refused(write(tmp_path / "c", **files), message, **settings)


def test_bytes_outside_utf8_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    (folder / "corpus.jsonl").write_bytes('{"_id": "1", "text": "Käse"}\n'.encode("latin-1"))
    refused(folder, r"corpus\.jsonl, line 1 is not UTF-8: byte 0xe4 at offset 23")


def test_what_is_empty_or_unknown_is_dropped_and_counted_when_asked(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "c",
        corpus=[*CORPUS, {"_id": "e1", "text": " "}, {"_id": "e2", "title": "", "text": ""}],
        queries=[*QUESTIONS, {"_id": "e", "text": ""}],
        qrels={"test": ["q1\te1\t1", "q1\td1\t1", "e\td1\t1", "e\te1\t1"]},
    )
    source = opened(folder, empty_documents="drop", empty_queries="drop")
    documents, queries, judgments = contents(source)
    assert [row[0] for row in documents] == ["d1", "d2", "d3", "4"]
    assert [row[0] for row in queries] == ["q1", "q2"]
    assert judgments == [("q1", "d1", 1, "test")]
    assert dropped(source) == {
        "empty_documents": 2, "empty_queries": 1, "judgments_of_empty_documents": 1, "judgments_of_empty_queries": 2
    }  # fmt: skip
    source = opened(write(tmp_path / "unknown", qrels=UNKNOWN), unknown_ids="drop")
    assert contents(source)[2] == [("q1", "d1", 1, "a"), ("q1", "d2", 1, "b")]
    assert dropped(source) == {"judgments_of_unknown_documents": 2, "judgments_of_unknown_queries": 2}


def test_a_pair_may_be_judged_once_a_split(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", qrels={"a": ["q1\td1\t1"], "b": ["q1\td1\t0"]})
    assert len(contents(opened(folder))[2]) == 2


def test_documents_come_while_the_file_is_read(tmp_path: Path) -> None:
    corpus = [{"_id": str(number), "text": "x"} for number in range(10_000)]
    documents = opened(write(tmp_path / "c", corpus=[*corpus, "broken"])).format.documents()
    assert len(list(islice(documents, 9_999))) == 9_999
    with pytest.raises(UserError, match="line 10001"):
        next(documents)


def test_files_in_a_store_plain_or_compressed_read_as_local_ones(tmp_path: Path, place: str, ending: str) -> None:
    plain = write(tmp_path / "c")
    names = ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv"]
    write_files(place, {name: (plain / name).read_bytes() for name in names}, ending)
    source, local = opened(place), opened(plain)
    assert contents(source) == contents(local)
    described = source.format.fingerprint()
    assert [file["name"] for file in described["files"]] == [f"{name}{ending}" for name in names]
    assert (described == local.format.fingerprint()) == (not ending)
    message = rf"{place}/other is no BEIR folder because it lacks corpus\.jsonl .*\{{kind: columns, path: its folder"
    with pytest.raises(UserError, match=message):
        opened(f"{place}/other")


def test_a_table_in_place_of_the_folder_is_told_how_to_be_read(tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("question,answer\n")
    message = rf"{table} is a file, where a BEIR .* path: {tmp_path}, pairs: \{{table: pairs\.csv, query: a column"
    with pytest.raises(UserError, match=message):
        opened(table)


@pytest.mark.parametrize("name", ["corpus.jsonl", "qrels/test.tsv"])
def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "c")
    packed = gzip.compress((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / f"{name}.gz").write_bytes(packed[:-9])
    refused(folder, rf"{name}\.gz can't be decompressed: .*If it is not whole, fetch it again")


@pytest.mark.parametrize(("metadata", "answers"), [
    ([{}, {"answers": ["Ada", "Grace"], "other": ["x"]}], [[], ["Ada", "Grace"]]),
    ([{"answers": "Ada"}], [["Ada"]]),
    ([{"answers": []}, "none"], [[], []]),
])  # fmt: skip
def test_answers_are_read_from_metadata(tmp_path, metadata, answers) -> None:
    asked = [{"_id": f"q{number}", "text": "who", "metadata": each} for number, each in enumerate(metadata)]
    folder = write(tmp_path / "c", queries=asked, qrels={"test": ["q0\td1\t1"]})
    assert [row[3] for row in contents(opened(folder))[1]] == answers


# documents, queries, judgments of each split
COUNTS = {
    "cranfield": (1398, 225, {"test": 1836}),
    "cystic_fibrosis": (1239, 99, {"test": 4812}),
    "nfcorpus_filtered": (3395, 3210, {"train": 110075, "dev": 11385, "test": 12334}),
    "cisi": (1460, 76, {"test": 3114}),
    "cacm": (3204, 52, {"test": 796}),
    "npl_vaswani": (11429, 93, {"test": 2083}),
    "medquad_liveqa": (15808, 14404, {"train": 15268, "dev": 1089, "test": 382}),
    "squad_dpr": (1474, 7194, {"train": 5417, "dev": 825, "test": 952}),
    "nq_qed": (1343, 1355, {"train": 798, "dev": 145, "test": 412}),
    "stackexchange_qa": (6160, 2628, {"train": 4243, "dev": 636, "test": 1277}),
    "climate_fever_sent": (5240, 1534, {"train": 4645, "dev": 715, "test": 2310}),
    "pubmedqa": (1000, 1000, {"train": 451, "dev": 49, "test": 500}),
    "cosqa": (6267, 1070, {"train": 570, "dev": 500}),
    "conala": (2811, 2760, {"train": 2090, "dev": 277, "test": 494}),
    "mbpp": (972, 971, {"train": 381, "dev": 90, "test": 504}),
}


LARGE = {name for name, (documents, *_) in COUNTS.items() if documents > 1_300}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in COUNTS]
)
def test_real_collections_have_the_counts_of_their_descriptions(data: Path, name: str) -> None:
    source = opened(data / name)
    (documents, queries, judgments), left_out = contents_and_dropped(source)
    assert (len(documents), len(queries), Counter(split for *_, split in judgments)) == COUNTS[name]
    assert all(passage_text(title, text) for _, title, text, _ in documents)
    assert contents(source, bytes_per_shard=50_000) == (documents, queries, judgments)
    assert left_out == {}
