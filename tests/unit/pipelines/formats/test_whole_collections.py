"""BEIR and TREC: what is written reads back as the same collection, or is refused; bytes never differ."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import beir, trec
from pipelines.formats.beir import BeirFolder
from pipelines.formats.trec import TrecFiles
from raytriever.errors import UserError
from tests.unit.pipelines.jobs.made_up import stored
from tests.unit.retrieval.collections.contents import Contents, contents

WRITERS = {"beir": beir.write, "trec": trec.write}

COLLECTION = Contents(
    [("d1", "Cats", "They purr.\n\tOften.", "pets"), ("d/2", "", 'def f():\n\treturn "x"', ""),
     ("d3", "Only a title", "", "")],
    [("q1", "what purrs", "pets", ["cats", "the cat"]), ("q2", "never\njudged", "", [])],
    [("q1", "d1", 2, "test"), ("q1", "d3", -1, "test"), ("q1", "d/2", 0, "train")],
)  # fmt: skip


def read_back(name: str, folder: Path, names: list[str]) -> Contents:
    """What our reader of the format makes of the files."""
    assert sorted(names) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if name != "trec":
        return contents(BeirFolder(path=str(folder)).open())
    columns = (folder / "documents.tsv").read_bytes().partition(b"\n")[0].count(b"\t")
    qrels = {file.split(".", 1)[1].removesuffix(".txt"): (file,) for file in names if file.startswith("qrels.")}
    settings = {
        "path": str(folder),
        "documents": "documents.tsv",
        "queries": "topics.tsv" if "topics.tsv" in names else (),
        "qrels": qrels,
        "document_columns": ("id", "title", "text") if columns == 2 else ("id", "text"),
    }
    return contents(TrecFiles.model_validate(settings).open())


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
any_id = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"), max_size=12)
word = st.text(st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=6)
grades = st.integers(-(2**31), 2**31 - 1)


@st.composite
def collections(draw: st.DrawFn, ids: st.SearchStrategy[str], texts: st.SearchStrategy[str], bare: bool) -> Contents:
    """``bare``: without domains and answers."""
    domains = st.just("") if bare else any_text
    answers = st.just(list[str]()) if bare else st.lists(any_text.filter(bool), max_size=2)
    documents = draw(st.dictionaries(ids, st.tuples(texts, texts.map(lambda text: f"{text}."), domains), min_size=1))
    queries = draw(st.dictionaries(ids, st.tuples(texts.map(lambda text: f"{text}?"), domains, answers), min_size=1))
    pairs = [(query, document) for query in queries for document in documents]
    splits = draw(st.lists(st.sampled_from(["dev", "test", "train_2"]), min_size=1, unique=True).map(sorted))
    judged = {split: draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True)) for split in splits}
    return Contents(
        [(id_, *values) for id_, values in documents.items()],
        [(id_, *values) for id_, values in queries.items()],
        [(query, document, draw(grades), split) for split in splits for query, document in judged[split]],
    )


in_qrels = any_id.filter(lambda id_: not set(id_) & set("\t\r\n") and not id_.startswith('"'))


@pytest.mark.parametrize(("name", "ids", "texts"), [("beir", in_qrels, any_text), ("trec", word, line)])
@settings(max_examples=12)
@given(data=st.data())
def test_any_unicode_round_trips(tmp_path_factory, name, ids, texts, data) -> None:
    collection = data.draw(collections(ids, texts, bare=name == "trec"))
    folder = tmp_path_factory.mktemp("round_trip")
    (folder / "out").mkdir()
    names = WRITERS[name](stored(folder, collection), folder / "out")
    assert read_back(name, folder / "out", names) == collection


def test_a_beir_folder_to_the_byte_and_read_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = beir.write(stored(tmp_path, COLLECTION), out)
    assert names == ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv", "qrels/train.tsv"]
    assert read_back("beir", out, names) == COLLECTION
    lines = [json.loads(line) for line in (out / "corpus.jsonl").read_text().splitlines()]
    assert lines[0] == {"_id": "d1", "title": "Cats", "text": "They purr.\n\tOften.", "metadata": {"domain": "pets"}}
    assert lines[1] == {"_id": "d/2", "title": "", "text": 'def f():\n\treturn "x"'}
    assert (out / "qrels" / "test.tsv").read_bytes() == b"query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td3\t-1\n"


def test_trec_files_to_the_byte(tmp_path: Path) -> None:
    documents = [("d1", "Cats", "They purr.", "pets"), ("d2", "", "é", "")]
    collection = Contents(documents, [("q1", "what purrs", "", [])], [("q1", "d2", -1, "test")])
    assert trec.write(stored(tmp_path, collection), tmp_path) == ["documents.tsv", "topics.tsv", "qrels.test.txt"]
    assert (tmp_path / "documents.tsv").read_bytes() == "d1\tCats\tThey purr.\nd2\t\té\n".encode()
    assert (tmp_path / "topics.tsv").read_bytes() == b"q1\twhat purrs\n"
    assert (tmp_path / "qrels.test.txt").read_bytes() == b"q1 0 d2 -1\n"
    (tmp_path / "bare").mkdir()
    corpus = Contents([("d1", "", "x", "")], [], [])
    assert trec.write(stored(tmp_path / "bare", corpus), tmp_path / "bare") == ["documents.tsv"]
    assert (tmp_path / "bare" / "documents.tsv").read_bytes() == b"d1\tx\n"


@pytest.mark.parametrize(("name", "change", "message"), [
    ("beir", {"judgments": []}, "has no judgments, but a BEIR folder needs them"),
    ("beir", {"judgments": [("q1", "d1", 1, "a/b")]}, "the split 'a/b' can't be the name of a file"),
    ("beir", {"judgments": [("q1", "d1", 1, "..")]}, r"the split '\.\.' can't be the name of a file"),
    ("beir", {"judgments": [('"q1', "d1", 1, "t")]}, "the id '\"q1' can't be in a tab-separated judgment file"),
    ("beir", {"judgments": [("q1", "d\n1", 1, "t")]},
     r"the id 'd\\n1' can't be in a tab-separated .* collect again\."),
    ("trec", {"judgments": [("q1", "d1", 1, "a/b")]}, "the split 'a/b' can't be the name of a file"),
    ("trec", {"documents": [("d 1", "", "x", "")]}, "the id 'd 1' can't be in TREC's files, .*whitespace"),
    ("trec", {"documents": [("\ufeffd", "", "x", "")]}, "can't be in TREC's files"),
    ("trec", {"documents": [("d1", "a\tb", "x", "")]}, r"'d1' has a tab or a line end in 'a\\tb', .*to beir"),
    ("trec", {"queries": [("q1", "two\nlines", "", [])]}, r"'q1' has a tab or a line end in 'two\\nlines'"),
])  # fmt: skip
def test_what_a_format_can_not_hold_is_refused(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    simple = Contents([("d1", "", "x", "")], [("q1", "y", "", [])], [("q1", "d1", 1, "test")])
    with pytest.raises(UserError, match=message):
        WRITERS[name](stored(tmp_path, simple._replace(**change)), tmp_path)
