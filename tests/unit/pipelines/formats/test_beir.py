"""BEIR folders: what is read, what is refused and how it is said, what is left out when asked."""

import gzip
import hashlib
import json
import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.formats.beir import BeirFolder
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from retrieval.collections.text_lines import HEADER
from tests.unit.retrieval.collections.contents import contents, dropped
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


def write(
    folder: Path,
    corpus: list[Any] | None = None,
    queries: list[Any] | None = None,
    qrels: Mapping[str, list[str]] = QRELS,
) -> Path:
    """A BEIR folder; a string stands for a line as it is."""

    def lines(records: list[Any]) -> str:
        return "".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records)

    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(lines(CORPUS if corpus is None else corpus), encoding="utf-8")
    (folder / "queries.jsonl").write_text(lines(QUESTIONS if queries is None else queries), encoding="utf-8")
    for split, judgments in qrels.items():
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join([HEADER, *judgments, ""]), encoding="utf-8")
    return folder


read = contents


def refused(folder: Path, message: str, **settings: Any) -> None:
    """Asserts that reading raises, from whichever part it is found, and that the message names the folder."""
    with pytest.raises(UserError, match=message) as raised:
        read(BeirFolder(path=str(folder), **settings).open())
    assert str(folder) in str(raised.value)


def test_documents_queries_and_judgments(tmp_path: Path) -> None:
    source = BeirFolder(path=str(write(tmp_path / "c"))).open()
    documents, queries, judgments = read(source)
    assert documents == [
        ("d1", "Cats", "They purr.", "pets"),
        ("d2", "Only a title", "", ""),
        ("d3", "", "def f():\n\treturn 1", ""),
        ("4", "", "An integer id", ""),
    ]
    assert queries == [("q1", "what purrs", "pets", []), ("q2", "never judged", "", [])]
    assert judgments == [
        ("q1", "4", -1, "test"),
        ("q1", "d3", 1, "test"),
        ("q1", "d1", 2, "train"),
        ("q1", "d2", 0, "train"),
    ]
    assert dropped(source) == {}


def test_chosen_splits_are_read_and_described_and_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", qrels={**QRELS, "broken": ["no judgment"]})
    source = BeirFolder(path=str(folder), splits=("train", "test", "train")).open()
    assert [row[3] for row in read(source)[2]] == ["test", "test", "train", "train"]
    names = ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv"]
    data = [(folder / name).read_bytes() for name in names]
    assert source.format.fingerprint() == {
        "files": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in zip(names, data, strict=True)
        ]
    }
    refused(folder, r"has no qrels/tset\.tsv\. The splits there are broken, test, train", splits=("tset", "train"))
    with pytest.raises(ValidationError):
        BeirFolder(path=str(folder), splits=())


def test_one_split_may_be_empty_while_another_is_not(tmp_path: Path) -> None:
    source = BeirFolder(path=str(write(tmp_path / "c", qrels={**QRELS, "dev": []}))).open()
    assert len(read(source)[2]) == 4


def test_a_domain_may_have_another_key(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    documents, queries, _ = read(BeirFolder(path=str(folder), domain_key="site").open())
    assert [row[3] for row in documents] == ["zoo", "", "", ""]
    assert [row[2] for row in queries] == ["", ""]
    refused(folder, r"corpus\.jsonl has no column 'metadata\.stie'", domain_key="stie")


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
        BeirFolder(path=str(folder)).open()


def test_other_files_beside_the_splits_are_no_splits(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    (folder / "qrels" / "old").mkdir()
    for name in ("._test.tsv", "README.md", "old/dev.tsv"):
        (folder / "qrels" / name).write_text("broken")
    assert len(read(BeirFolder(path=str(folder)).open())[2]) == 4


@pytest.mark.parametrize(("record", "message"), [
    ('{"_id": "d9", "text": "cut', r"corpus\.jsonl, line 5 is not valid JSON .*cut"),
    ({"id": "d9", "text": "x"}, r"corpus\.jsonl, line 5 has no column '_id'\. Columns there: 'id', 'text'"),
    ({"_id": 1.5, "text": "x"}, r"line 5: \"_id\" is 1\.5\. It must be a string that is not empty, or an integer"),
    ({"_id": True, "text": "x"}, r"line 5: \"_id\" is True"),
    ({"_id": None, "text": "x"}, r"line 5: \"_id\" is None"),
    ({"_id": "", "text": "x"}, r"line 5: \"_id\" is ''"),
    ({"_id": "d2", "text": "x"}, r"line 5: id 'd2' is already that of line 2"),
    ({"_id": "4", "text": "x"}, r"line 5: id '4' is already that of line 4"),
    ({"_id": "d9", "contents": "x"}, r"line 5 has no column 'text'\. Columns there: '_id', 'contents'"),
    ({"_id": "d9", "text": None}, r"line 5: document 'd9' has neither title nor text"),
    ({"_id": "d9", "text": ["x"]}, r"line 5: \"text\" is \['x'\]"),
    ({"_id": "d9", "title": 7, "text": "x"}, r"line 5: \"title\" is 7"),
    ({"_id": "d9", "text": "x", "metadata": {"domain": 7}}, r"line 5: \"metadata.domain\" is 7"),
    ({"_id": "d9", "title": " ", "text": "\n"}, r"line 5: document 'd9' has neither .*empty_documents to 'drop'"),
])  # fmt: skip
def test_bad_documents_are_named(tmp_path: Path, record: Any, message: str) -> None:
    refused(write(tmp_path / "c", corpus=[*CORPUS, record]), message)


@pytest.mark.parametrize(("record", "message"), [
    ("null", r"queries\.jsonl, line 3 is 'null', but every line must be one JSON object"),
    ({"_id": "q1", "text": "x"}, r"queries\.jsonl, line 3: id 'q1' is already that of line 1"),
    ({"_id": "q9"}, r"line 3 has no column 'text'"),
    ({"_id": "q9", "text": "\t"}, r"line 3: query 'q9' has no text\..*set empty_queries to 'drop'"),
])  # fmt: skip
def test_bad_queries_are_named(tmp_path: Path, record: Any, message: str) -> None:
    refused(write(tmp_path / "c", queries=[*QUESTIONS, record]), message)


def test_bytes_outside_utf8_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    (folder / "corpus.jsonl").write_bytes('{"_id": "1", "text": "Käse"}\n'.encode("latin-1"))
    refused(folder, r"corpus\.jsonl, line 1 is not UTF-8: byte 0xe4 at offset 23")


def test_empty_files_are_refused(tmp_path: Path) -> None:
    refused(write(tmp_path / "c", corpus=[]), r"corpus\.jsonl holds no documents with a text")
    refused(write(tmp_path / "q", queries=[]), r"queries\.jsonl holds no queries with a text")
    refused(
        write(tmp_path / "j", qrels={"a": [], "b": []}), r"No judgments to keep in .*/qrels/a\.tsv, .*/qrels/b\.tsv: 0 "
    )
    only_empty = write(tmp_path / "e", corpus=[{"_id": "d1", "text": ""}])
    refused(only_empty, r"corpus\.jsonl holds no documents", empty_documents="drop")


def test_empty_records_and_their_judgments_are_dropped_and_counted_when_asked(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "c",
        corpus=[*CORPUS, {"_id": "e1", "text": " "}, {"_id": "e2", "title": "", "text": ""}],
        queries=[*QUESTIONS, {"_id": "e", "text": ""}],
        qrels={"test": ["q1\te1\t1", "q1\td1\t1", "e\td1\t1", "e\te1\t1"]},
    )
    source = BeirFolder(path=str(folder), empty_documents="drop", empty_queries="drop").open()
    documents, queries, judgments = read(source)
    assert [row[0] for row in documents] == ["d1", "d2", "d3", "4"]
    assert [row[0] for row in queries] == ["q1", "q2"]
    assert judgments == [("q1", "d1", 1, "test")]
    expected = {
        "empty_documents": 2,
        "empty_queries": 1,
        "judgments_of_empty_documents": 1,
        "judgments_of_empty_queries": 2,
    }
    assert dropped(source) == expected


def test_the_id_of_a_dropped_record_is_still_taken(tmp_path: Path) -> None:
    corpus = [*CORPUS, {"_id": "e", "text": ""}, {"_id": "e", "text": "full"}]
    refused(write(tmp_path / "c", corpus=corpus), r"line 6: id 'e' is already that of line 5", empty_documents="drop")


UNKNOWN = {"a": ["q1\td1\t1", "q1\tx1\t1", "y\td1\t1"], "b": ["q1\tx2\t0", "q1\td2\t1", "z\tx3\t1"]}


def test_judgments_of_unknown_ids_are_refused_with_the_first_and_their_number(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", qrels=UNKNOWN)
    first = r"qrels/a\.tsv, line 3 names 'x1', which .*/c/corpus\.jsonl does not hold; in all, "
    numbers = r"2 judgments name unknown documents and 2 unknown queries\..*unknown_ids to 'drop'"
    refused(folder, first + numbers)
    folder = write(tmp_path / "d", qrels={"a": ["y\tx\t1"]})
    refused(
        folder, r"qrels/a\.tsv, line 2 names 'y', which .*/d/queries\.jsonl does not hold; in all, 0 .* and 1 unknown"
    )


def test_judgments_of_unknown_ids_are_dropped_and_counted_when_asked(tmp_path: Path) -> None:
    source = BeirFolder(path=str(write(tmp_path / "c", qrels=UNKNOWN)), unknown_ids="drop").open()
    assert read(source)[2] == [("q1", "d1", 1, "a"), ("q1", "d2", 1, "b")]
    assert dropped(source) == {"judgments_of_unknown_documents": 2, "judgments_of_unknown_queries": 2}
    folder = write(tmp_path / "d", qrels={"a": ["y\tx\t1"]})
    refused(
        folder,
        r"No judgments to keep in .*/qrels/a\.tsv: 1 were left out \(judgments_of_unknown_queries 1\)",
        unknown_ids="drop",
    )


def test_a_pair_may_be_judged_once_a_split(tmp_path: Path) -> None:
    source = BeirFolder(path=str(write(tmp_path / "c", qrels={"a": ["q1\td1\t1"], "b": ["q1\td1\t0"]}))).open()
    assert len(read(source)[2]) == 2
    refused(write(tmp_path / "d", qrels={"a": ["q1\td1\t1", "q1\td1\t1"]}), r"a\.tsv, line 3 judges .* as line 2 does")


def test_documents_come_while_the_file_is_read(tmp_path: Path) -> None:
    corpus = [{"_id": str(number), "text": "x"} for number in range(10_000)]
    folder = write(tmp_path / "c", corpus=[*corpus, "broken"])
    documents = BeirFolder(path=str(folder)).open().format.documents()
    assert len(list(islice(documents, 9_999))) == 9_999
    with pytest.raises(UserError, match="line 10001"):
        next(documents)


any_text = st.text(st.characters(exclude_categories=["Cs"]))
identifiers = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"), min_size=1)


@given(
    documents=st.dictionaries(identifiers, st.tuples(any_text, any_text), min_size=1, max_size=8),
    queries=st.dictionaries(identifiers, any_text, min_size=1, max_size=8),
    score=st.integers(-(2**31), 2**31 - 1),
    ascii_only=st.booleans(),
)
def test_any_unicode_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    documents: dict[str, tuple[str, str]],
    queries: dict[str, str],
    score: int,
    ascii_only: bool,
) -> None:
    documents = {id_: (title, f"{text}.") for id_, (title, text) in documents.items()}
    queries = {id_: f"{text}?" for id_, text in queries.items()}
    corpus = [{"_id": id_, "title": title, "text": text} for id_, (title, text) in documents.items()]
    pairs = [(query, document) for query in queries for document in documents]
    folder = write(
        tmp_path_factory.mktemp("beir") / "c",
        corpus=[json.dumps(record, ensure_ascii=ascii_only) for record in corpus],
        queries=[json.dumps({"_id": id_, "text": text}, ensure_ascii=ascii_only) for id_, text in queries.items()],
        qrels={"test": [f"{query}\t{document}\t{score}" for query, document in pairs]},
    )
    found = read(BeirFolder(path=str(folder)).open())
    assert found[0] == [(id_, title, text, "") for id_, (title, text) in documents.items()]
    assert found[1] == [(id_, text, "", []) for id_, text in queries.items()]
    assert found[2] == [(query, document, score, "test") for query, document in pairs]


def test_a_folder_in_an_object_store_reads_as_a_local_one(tmp_path: Path, object_store: str) -> None:
    folder, uri = write(tmp_path / "c"), f"{object_store}/some/collection"
    write_files(uri, {name: (folder / name).read_bytes() for name in Folder(str(folder)).files()})
    remote, local = BeirFolder(path=uri).open(), BeirFolder(path=str(folder)).open()
    assert read(remote) == read(local)
    assert remote.format.fingerprint() == local.format.fingerprint()
    with pytest.raises(UserError, match=rf"{object_store}/some/other is no BEIR folder, it lacks corpus\.jsonl"):
        BeirFolder(path=f"{object_store}/some/other").open()


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_read_as_plain_ones(place: str, tmp_path: Path, ending: str) -> None:
    plain, uri = write(tmp_path / "c"), f"{place}{ending}"
    write_files(uri, {name: (plain / name).read_bytes() for name in Folder(str(plain)).files()}, ending)
    source = BeirFolder(path=uri).open()
    assert read(source) == read(BeirFolder(path=str(plain)).open())
    assert [file["name"] for file in source.format.fingerprint()["files"]] == [
        f"{name}{ending}" for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv")
    ]


def test_a_plain_file_is_read_before_its_compressed_twin(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (folder / f"{name}.gz").write_bytes(b"broken")
    assert len(read(BeirFolder(path=str(folder)).open())[2]) == 4


@pytest.mark.parametrize("name", ["corpus.jsonl", "qrels/test.tsv"])
def test_a_compressed_file_that_is_cut_off_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "c")
    packed = gzip.compress((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / f"{name}.gz").write_bytes(packed[:-9])
    refused(folder, rf"{name}\.gz can't be decompressed: .*If it is not whole, fetch it again")


def test_answers_are_read_from_metadata(tmp_path: Path) -> None:
    asked = [*QUESTIONS, {"_id": "q3", "text": "who", "metadata": {"answers": ["Ada", "Grace"], "other": ["x"]}}]
    folder = write(tmp_path / "c", queries=asked)
    assert [row[3] for row in read(BeirFolder(path=str(folder)).open())[1]] == [[], [], ["Ada", "Grace"]]
    assert read(BeirFolder(path=str(folder), answers_key="other").open())[1][2][3] == ["x"]
    refused(folder, r"queries\.jsonl has no column 'metadata\.asnwers'", answers_key="asnwers")
    empty = [{"_id": "q1", "text": "x", "metadata": {"gold": []}}, {"_id": "q2", "text": "y", "metadata": "gold"}]
    without = write(tmp_path / "e", queries=empty)
    assert read(BeirFolder(path=str(without), answers_key="gold").open())[1][0][3] == []  # the key is there
    one = write(tmp_path / "d", queries=[*QUESTIONS, {"_id": "q3", "text": "who", "metadata": {"answers": "Ada"}}])
    assert read(BeirFolder(path=str(one)).open())[1][2][3] == ["Ada"]
    assert read(BeirFolder(path=str(one), answers_key="").open())[1][2][3] == []
    wrong = write(tmp_path / "f", queries=[*QUESTIONS, {"_id": "q3", "text": "who", "metadata": {"answers": 7}}])
    refused(wrong, r"""queries\.jsonl, line 3: "metadata\.answers" is 7\. It must be a string or a list of strings""")
