"""TripClick's benchmark, small and hand-written, read as the paper's recipe reads it."""

from typing import Any

import pytest

from pipelines.formats.trec import TrecFiles
from raytriever.settings.recipe import load_recipe
from retrieval.collections.records import Source
from tests.unit.retrieval.collections.contents import contents
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


def opened(path: str) -> Source:
    source = load_recipe("papers/coder_tripclick", []).stages["corpus"]["source"]
    return TrecFiles.model_validate({**source, "path": path, "cross_validation": None}).open()


def read(source: Source) -> tuple[list[tuple[Any, ...]], ...]:
    documents, queries, judgments = contents(source)
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
    ]
    train = [(str(n), id_, grade, "train") for n in (1, 2, 3) for id_, grade in (("7", 1), ("8", 0))]
    assert judgments == [*train, ("11", "7", 2, "val"), ("11", "8", 1, "val"), ("11", "9", 0, "val")]
    assert f"topics/topics.all.txt{ending}" not in [file["name"] for file in source.format.fingerprint()["files"]]
