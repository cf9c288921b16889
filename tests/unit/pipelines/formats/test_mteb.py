"""MTEB's layout on disk: files found by the README or by their names, splits, subsets, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.formats import tables
from pipelines.formats.mteb import MtebFolder, read_layout
from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from tests.unit.pipelines.formats.files import put
from tests.unit.retrieval.collections.contents import Contents, contents
from tests.unit.retrieval.collections.packed_files import write_files

CORPUS = [{"_id": "d1", "title": "Cats", "text": "They purr."}, {"_id": "d2", "title": "", "text": "def f():\n\tpass"}]
QUERIES = [{"_id": "q1", "text": "what purrs"}, {"_id": "q2", "text": "never judged"}]
TEST = [{"query-id": "q1", "corpus-id": "d1", "score": 2}, {"query-id": "q1", "corpus-id": "d2", "score": 0}]
TRAIN = [{"query-id": "q2", "corpus-id": "d2", "score": 1}]
EXPECTED = Contents(
    [("d1", "Cats", "They purr.", ""), ("d2", "", "def f():\n\tpass", "")],
    [("q1", "what purrs", "", []), ("q2", "never judged", "", [])],
    [("q1", "d1", 2, "test"), ("q1", "d2", 0, "test"), ("q2", "d2", 1, "train")],
)

README = """---
language: [en]
configs:
- config_name: default
  data_files:
  - split: test
    path: judged/test.jsonl
  - {split: train, path: [judged/train*, judged/more.jsonl]}
- config_name: corpus
  data_files: texts/c.parquet
- config_name: queries
  data_files: [texts/q-*.jsonl]
---
# A data set
---
"""


def read(folder: Path, **settings: Any) -> Contents:
    return contents(MtebFolder(path=str(folder), **settings).open())


def test_the_readme_says_which_files_there_are(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    put(tmp_path, {
        "judged/test.jsonl": TEST, "judged/train-1.jsonl": TRAIN,
        "judged/more.jsonl": [{"query-id": "q2", "corpus-id": "d1", "score": 0}],
        "texts/c.parquet": CORPUS, "texts/q-1.jsonl": QUERIES[:1], "texts/q-2.jsonl": QUERIES[1:],
        "texts/old.jsonl": [{"broken": 1}],
    })  # fmt: skip
    found = read(tmp_path)
    assert found == EXPECTED._replace(judgments=[*EXPECTED.judgments, ("q2", "d1", 0, "train")])
    assert [row[3] for row in read(tmp_path, splits=("test",)).judgments] == ["test", "test"]
    with pytest.raises(UserError, match=r"splits: .* has no judgments of dev\. The splits there are test, train"):
        read(tmp_path, splits=("dev", "test"))
    names = [file["name"] for file in MtebFolder(path=str(tmp_path)).open().format.fingerprint()["files"]]
    assert "judged/more.jsonl" in names
    assert "texts/old.jsonl" not in names


@pytest.mark.parametrize(("corpus", "queries", "judged", "readme"), [
    ("corpus.jsonl", "queries.jsonl", "qrels/{}.tsv", "# No YAML here\n"),
    ("corpus/corpus-00000-of-00001.parquet", "queries/queries-00000-of-00001.parquet",
     "data/{}-00000-of-00001.parquet", "---\nlanguage: en\n---\n"),
    ("corpus/corpus.jsonl", "queries/test.jsonl", "default/{}.jsonl", "---\n# nothing\n---\n"),
])  # fmt: skip
def test_without_a_readme_names_tell(tmp_path: Path, corpus: str, queries: str, judged: str, readme: str) -> None:
    put(tmp_path, {corpus: CORPUS, queries: QUERIES, judged.format("test"): TEST, judged.format("train"): TRAIN})
    write_files(str(tmp_path), {"README.md": readme, ".cache/x.jsonl": "broken"})
    assert read(tmp_path) == EXPECTED


def test_ids_may_be_called_id_and_titles_be_left_out(tmp_path: Path) -> None:
    put(tmp_path, {
        "corpus.jsonl": [{"id": 1, "text": "x", "partition": "train", "domain": "code"}],
        "queries.jsonl": [{"id": "q", "text": "y", "partition": "test", "answers": ["z"]}],
        "qrels/test.parquet": [{"query-id": "q", "corpus-id": "1", "score": 1.0}],
    })  # fmt: skip
    assert read(tmp_path) == ([("1", "", "x", "code")], [("q", "y", "", ["z"])], [("q", "1", 1, "test")])


def test_a_subset_is_chosen_by_its_name(tmp_path: Path) -> None:
    for language in ("de", "en"):
        put(tmp_path, {
            f"{language}-corpus/test.jsonl": [{"_id": "d1", "text": language}],
            f"{language}-queries/test.jsonl": QUERIES, f"{language}-qrels/test.jsonl": TEST[:1],
        })  # fmt: skip
    assert read(tmp_path, subset="de").documents == [("d1", "", "de", "")]
    with pytest.raises(UserError, match=r"no configuration default or qrels\. .* de-corpus, .*set subset"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"no configuration fr-qrels\. Those there: de-corpus, de-qrels"):
        read(tmp_path, subset="fr")


def test_queries_of_each_split_are_joined_but_corpora_are_not(tmp_path: Path) -> None:
    put(tmp_path, {
        "corpus/test.jsonl": CORPUS, "queries/test.jsonl": QUERIES[:1], "queries/train.jsonl": QUERIES[1:],
        "qrels/test.jsonl": TEST, "qrels/train.jsonl": TRAIN,
    })  # fmt: skip
    assert read(tmp_path) == EXPECTED
    put(tmp_path, {"corpus/train.jsonl": CORPUS[1:]})
    assert read(tmp_path, splits=("train",)) == ([EXPECTED.documents[1]], EXPECTED.queries[1:], EXPECTED.judgments[2:])
    with pytest.raises(UserError, match=r"the corpus has the splits test, train, and each is a collection of its"):
        read(tmp_path)
    judged = 'query-id\tcorpus-id\tscore\n"q2"\td2\t1\n'  # as a library of tables writes it
    (tmp_path / "qrels/train.jsonl").unlink()
    write_files(str(tmp_path), {"qrels/train.tsv": judged})
    assert read(tmp_path, splits=("train",)).judgments == EXPECTED.judgments[2:]
    put(tmp_path, {"qrels/dev.jsonl": TRAIN})
    with pytest.raises(UserError, match=r"the corpus has the splits test, train, but not dev, which has judg"):
        read(tmp_path, splits=("dev", "test"))


@pytest.mark.parametrize(("readme", "message"), [
    ("---\nconfigs: [{data_files: corpus.jsonl}]\n---\n",
     r"README\.md: the YAML at its head can't be read \(KeyErr"),
    ("---\nconfigs: [{config_name: a, data_files: 2020-13-45}]\n---\n", r"can't be read \(ValueError"),
    ("---\nconfigs: [{config_name: corpus, data_files: [{split: x}]}]\n---\n", r"KeyError: 'path'"),
    ("---\nconfigs: {a: 1}\n---\n", r"must be a list of entries with config_name and data_files"),
    ("---\na: [\n---\n", r"README\.md: the YAML at its head can't be read \(ParserError"),
])  # fmt: skip
def test_a_readme_that_makes_no_sense_is_named(tmp_path: Path, readme: str, message: str) -> None:
    put(tmp_path, {"corpus.jsonl": CORPUS})
    (tmp_path / "README.md").write_text(readme)
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_what_a_readme_may_say_otherwise(tmp_path: Path) -> None:
    more = [{"query-id": "q2", "corpus-id": "d1", "score": 0}]
    files = {"c.jsonl": CORPUS, "_q.jsonl": QUERIES, "j/2020.jsonl": TEST, "j/a.jsonl": TRAIN, "j/b.jsonl": more}
    put(tmp_path, files)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: more, data_dir: other}\n"
        "- {config_name: 1, data_files: x}\n"
        "- {config_name: corpus, data_files: ./c.jsonl}\n"
        "- {config_name: queries, data_files: [{split: queries, path: ./_q.jsonl}]}\n"
        "- {config_name: default, data_files: {2020: ./j/2020.jsonl, train: [j/a.jsonl, j/b.jsonl]}}\n"
        "---\n"
    )
    found = read(tmp_path)
    assert found[:2] == EXPECTED[:2]
    judged = [(query, document, grade, split.replace("test", "2020")) for query, document, grade, split in EXPECTED[2]]
    assert found.judgments == [*judged, ("q2", "d1", 0, "train")]
    assert {row[3] for row in read(tmp_path, splits=("2020",)).judgments} == {"2020"}
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: [{split: 2020, path: x}]\n---\n"
    )
    assert read_layout(Folder(str(tmp_path))) == {"default": {"2020": ("x",)}}


@pytest.mark.parametrize("files", [1, 2])
def test_titles_domains_and_answers_are_read_wherever_they_are(tmp_path, files, monkeypatch) -> None:
    monkeypatch.setattr(tables, "_RECORDS_LOOKED_AT", 2)
    corpus = [{"_id": f"d{number}", "text": "x"} for number in range(5)]
    corpus[4] |= {"title": "Late", "domain": "pets"}
    asked: list[dict[str, Any]] = [{"_id": f"q{number}", "text": "y"} for number in range(5)]
    asked[4] |= {"answers": ["z"], "domain": "cats"}
    cut = 4 if files == 2 else 5
    for name, rows in (("corpus", corpus), ("queries", asked)):
        for number, part in enumerate([rows[:cut], rows[cut:]][:files]):
            put(tmp_path, {f"{name}/{name}-{number:05d}-of-{files:05d}.jsonl": part})
    put(tmp_path, {"qrels/test.jsonl": [{"query-id": "q4", "corpus-id": "d4", "score": 1}]})
    found = read(tmp_path)
    assert found.documents[3:] == [("d3", "", "x", ""), ("d4", "Late", "x", "pets")]
    assert found.queries[3:] == [("q3", "y", "", []), ("q4", "y", "cats", ["z"])]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    qrels = {"qrels/test.jsonl": [{"query": "q1", "corpus-id": "d1", "score": 1}], "corpus.jsonl": CORPUS}
    for files, message in (
        ({}, r"no configuration default or qrels\. Those there: none"),
        (qrels, r"no configuration queries or query\. Those there: corpus, qrels"),
        ({"queries.jsonl": QUERIES}, r"qrels/test\.jsonl, line 1 has no column 'query-id'\. Columns there: 'query'"),
    ):
        put(tmp_path, files)
        with pytest.raises(UserError, match=message):
            read(tmp_path)
    (tmp_path / "README.md").write_text("---\nconfigs:\n- {config_name: qrels, data_files: /etc/../x.jsonl}\n---\n")
    with pytest.raises(UserError, match=r"no configuration corpus"):
        read(tmp_path)
