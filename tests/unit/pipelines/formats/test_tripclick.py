"""TripClick's benchmark in both forms, small and hand-written."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.formats.tripclick import TripClick
from pipelines.jobs.collect import CollectConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import parse_yaml
from retrieval.collections.checked_source import CheckedSource
from tests.unit.retrieval.collections.packed_files import write_files


def document(number: int, title: str, text: str) -> str:
    header = f"<DOC>\n<DOCNO> {number} </DOCNO>\n\n<TITLE> {title} </TITLE>\n<URL> http://x </URL>\n\n"
    return f"{header}<TEXT>\n{text}\n</TEXT>\n\n</DOC>\n\n"


def topic(number: int, title: str) -> str:
    return f"<top>\n\n<num> Number: {number}\n<title> {title}\n\n<desc> Descrption:\n\n<narr> Narrative:\n\n</top>\n\n"


GROUPS = {"head": 1, "torso": 2, "tail": 3}
MARKED_UP = {
    "documents/docs_grp_00.txt": document(7, "A trial.", "BACKGROUND : p < 0.05\nMETHODS") + document(8, "B.", "eight"),
    "documents/docs_grp_01.txt": document(9, "C.", "nine"),
    **{f"topics/topics.{group}.train.txt": topic(n, f"{group} <b>train</b>") for group, n in GROUPS.items()},
    **{f"topics/topics.{group}.val.txt": topic(n + 10, f"{group} val") for group, n in GROUPS.items()},
    **{f"qrels/qrels.raw.{group}.train.txt": f"{n} 0 7 1\n{n} 0 8 0\n" for group, n in GROUPS.items()},
    **{f"qrels/qrels.raw.{group}.val.txt": f"{n + 10} 0 9 1\n" for group, n in GROUPS.items()},
    "qrels/qrels.dctr.head.train.txt": "1 0 7 3\n1 0 9 0\n",
    "qrels/qrels.dctr.head.val.txt": "11 0 7 2\n11 0 8 1\n11 0 9 0\n",
    "topics/topics.all.txt": "not read",
}
TSV = {
    "documents/docs.tsv": "7\tA trial. text\n8\teight\n9\tnine\n",
    "topics/topics.head.val.tsv": "11\thead val\n",
    "qrels/qrels.dctr.head.val.tsv": "11\t0\t7\t2\n11\t0\t9\t0\n",
}


def opened(path: str, **settings: Any) -> CheckedSource:
    return TripClick.model_validate({"path": path, **settings}).open()


def read(source: CheckedSource) -> tuple[list[tuple[Any, ...]], ...]:
    parts = source.documents(), source.queries(), source.judgments()
    documents, queries, judgments = (
        [tuple(row.values()) for batch in part for row in batch.to_pylist()] for part in parts
    )
    return [row[:3] for row in documents], [row[:2] for row in queries], judgments


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_the_benchmark_in_trec_form(place: str, ending: str) -> None:
    source = opened(write_files(place, MARKED_UP, ending))
    documents, queries, judgments = read(source)
    assert documents == [("7", "A trial.", "BACKGROUND : p < 0.05\nMETHODS"), ("8", "B.", "eight"), ("9", "C.", "nine")]
    assert queries == [
        ("1", "head <b>train</b>"),
        ("2", "torso <b>train</b>"),
        ("3", "tail <b>train</b>"),
        ("11", "head val"),
        ("12", "torso val"),
        ("13", "tail val"),
    ]
    train = [(str(n), id_, grade, "train") for n in (1, 2, 3) for id_, grade in (("7", 1), ("8", 0))]
    assert judgments == [
        *train,
        ("11", "7", 2, "val_head_dctr"),
        ("11", "8", 1, "val_head_dctr"),
        ("11", "9", 0, "val_head_dctr"),
        ("11", "9", 1, "val_head"),
        ("12", "9", 1, "val_torso"),
        ("13", "9", 1, "val_tail"),
    ]
    names = [file["name"] for file in source.fingerprint()["files"]]
    read_files = [
        name for name in MARKED_UP if name not in ("topics/topics.all.txt", "qrels/qrels.dctr.head.train.txt")
    ]
    assert sorted(names) == sorted(f"{name}{ending}" for name in read_files)


def test_splits_are_made_of_models_groups_and_parts(tmp_path: Path) -> None:
    path = write_files(str(tmp_path / "c"), MARKED_UP)
    splits = {"graded": ["dctr.head.train", "dctr.head.val"], "tail": ["raw.tail.val"]}
    _, queries, judgments = read(opened(path, splits=splits))
    assert [row[0] for row in queries] == ["1", "11", "13"]
    assert [row[3] for row in judgments] == ["graded"] * 5 + ["tail"]
    mixed = opened(path, splits={"train": ["raw.head.train", "dctr.head.train"]})
    message = "dctr.head.train.txt, line 1 judges query '1' and document '7', as .*raw.head.train.txt, line 1 does"
    with pytest.raises(UserError, match=message):
        read(mixed)


def test_the_benchmark_as_tables(tmp_path: Path) -> None:
    source = opened(write_files(str(tmp_path / "c"), TSV), splits={"val": ["dctr.head.val"]})
    assert read(source) == (
        [("7", "", "A trial. text"), ("8", "", "eight"), ("9", "", "nine")],
        [("11", "head val")],
        [("11", "7", 2, "val"), ("11", "9", 0, "val")],
    )


@pytest.mark.parametrize("name", ["dctr.tail.val", "raw.head", "raw.head.dev", "raw.all.train"])
def test_files_that_tripclick_has_not_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"splits\.val\.0"):
        TripClick.model_validate({"path": "x", "splits": {"val": [name]}})
    with pytest.raises(ValidationError, match="splits"):
        TripClick.model_validate({"path": "x", "splits": {}})


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = write_files(str(tmp_path / "c"), MARKED_UP)
    with pytest.raises(UserError, match=r"queries: .*/c/topics/topics\.tail\.test\.txt is not there"):
        opened(path, splits={"test": ["raw.tail.test"]})
    (tmp_path / "c/topics/topics.head.val.txt").unlink()
    with pytest.raises(UserError, match=r"queries: .*/c/topics/topics\.head\.val\.txt is not there"):
        opened(path)
    with pytest.raises(UserError, match=r"documents: .*/d/documents/docs_grp_\*\.txt is not there"):
        opened(str(tmp_path / "d"))


def test_wrong_records_are_named(tmp_path: Path) -> None:
    cut = {**MARKED_UP, "documents/docs_grp_01.txt": "<DOC>\n<DOCNO> 9 </DOCNO>\n<TEXT>\ncut off"}
    with pytest.raises(UserError, match=r"docs_grp_01\.txt, line 1: <DOC> has no </DOC>\. Is the file complete"):
        read(opened(write_files(str(tmp_path / "c"), cut)))
    again = {**MARKED_UP, "documents/docs_grp_01.txt": document(9, "C.", "nine") + document(7, "A", "again")}
    message = r"docs_grp_01\.txt, line 13: id '7' is already that of .*docs_grp_00\.txt, line 1\. Ids must be unique"
    with pytest.raises(UserError, match=message):
        read(opened(write_files(str(tmp_path / "d"), again)))
    unknown = {**MARKED_UP, "qrels/qrels.raw.tail.val.txt": "13 0 5 1\n"}
    message = r"qrels\.raw\.tail\.val\.txt, line 1 names '5', which .*docs_grp_01\.txt does not hold"
    with pytest.raises(UserError, match=message):
        read(opened(write_files(str(tmp_path / "e"), unknown)))


def test_the_collect_job_reads_it() -> None:
    recipe = """
    output: collection
    source:
      kind: tripclick
      path: data/tripclick/benchmark
      splits:
        train: [raw.head.train, raw.torso.train, raw.tail.train]
        val: [dctr.head.val]
    """
    source = CollectConfig.model_validate(parse_yaml(recipe, "recipe")).source
    assert isinstance(source, TripClick)
    assert source.splits["val"] == ("dctr.head.val",)
