"""DPR's files: training examples, passages, questions with answers, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats.dpr import Dpr
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.pairs import Pairs
from pipelines.pairs.pairs import SCHEMA, read_pairs
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import StoredCollection
from retrieval.collections.records import text_id
from retrieval.evaluation.stored import StoredEvaluation
from retrieval.jobs.evaluate import Evaluate
from retrieval.jobs.index import Index
from retrieval.jobs.search import Search
from tests.unit.pipelines.jobs.made_up import made_by
from tests.unit.retrieval.collections.contents import Contents, contents, dropped
from tests.unit.retrieval.collections.packed_files import write_files

SERIES = {"title": "Series", "text": "All seven.", "passage_id": "11"}
EXAMPLES: list[dict[str, Any]] = [
    {
        "dataset": "any", "question": "how many episodes", "answers": ["seven", "7"],
        "positive_ctxs": [SERIES | {"score": 1000}],
        "negative_ctxs": [{"title": "Far", "text": "Away.", "psg_id": 13}],
        "hard_negative_ctxs": [{"title": None, "text": "Near."}, {"text": "Nearer.", "passage_id": None}],
    },
    {"question": "who", "answers": [], "positive_ctxs": [], "hard_negative_ctxs": [SERIES]},
    {"question": "how many episodes", "answers": ["eight"], "positive_ctxs": [{"title": "", "text": "Near."}]},
]  # fmt: skip
NEAR, NEARER = text_id("", "Near."), text_id("", "Nearer.")
MANY, WHO, MANY_MORE = text_id("how many episodes", "seven", "7"), text_id("who"), text_id("how many episodes", "eight")
EXPECTED = Contents(
    [("11", "Series", "All seven.", ""), (NEAR, "", "Near.", ""), (NEARER, "", "Nearer.", ""),
     ("13", "Far", "Away.", "")],
    [(MANY, "how many episodes", "", ["seven", "7"]), (WHO, "who", "", []),
     (MANY_MORE, "how many episodes", "", ["eight"])],
    [(MANY, "11", 1, "train"), (MANY, NEAR, 0, "train"), (MANY, NEARER, 0, "train"), (MANY, "13", -1, "train"),
     (WHO, "11", 0, "train"), (MANY_MORE, NEAR, 1, "train")],
)  # fmt: skip
PASSAGES = 'id\ttext\ttitle\n1\t"Aaron ( ""Ahärôn"")\nis a prophet."\tAaron\n2\tplain text\t"""Weird Al"" Yankovic"\n'
QUESTIONS = """who got it\t['Röntgen', "Wilhelm 's"]
is it "true"\t"['""quoted""']"

when\t['(19|20)\\d\\d?']
"""


def read(path: str, **values: Any) -> Contents:
    return contents(Dpr(path=path, **values).open())


def refused(folder: Path, files: dict[str, str], message: str, **values: Any) -> None:
    with pytest.raises(UserError, match=message) as raised:
        read(write_files(str(folder), files), **values)
    assert str(folder) in str(raised.value)


def test_examples_of_a_json_list_and_of_json_lines(place: str, ending: str) -> None:
    files = {f"{number}.jsonl": json.dumps(example) + "\n" for number, example in enumerate(EXAMPLES)}
    write_files(place, files | {"train.json": json.dumps(EXAMPLES, indent=4)}, ending)
    for names in ("train.json", f"*.jsonl{ending}", ["0.jsonl", "1.jsonl", "2.jsonl"]):
        assert read(place, examples={"train": names}) == EXPECTED
    both = read(place, examples={"train": "0.jsonl", "dev": ["2.jsonl", "1.jsonl"]})
    assert both.queries == [EXPECTED.queries[2], EXPECTED.queries[1], EXPECTED.queries[0]]  # splits by name
    assert [row[3] for row in both.judgments] == ["dev", "dev", "train", "train", "train", "train"]


def test_a_hard_negative_stays_one(tmp_path: Path) -> None:
    def example(**contexts: str) -> dict[str, Any]:
        judged = {key: [{"title": "", "text": id_, "psg_id": id_} for id_ in ids] for key, ids in contexts.items()}
        return {"question": "q", "answers": ["a"], "positive_ctxs": []} | judged

    listed = [example(negative_ctxs="zr"), example(positive_ctxs="p", hard_negative_ctxs="hz", negative_ctxs="h")]
    write_files(str(tmp_path), {"e.json": json.dumps(listed)})
    opened = Dpr(path=str(tmp_path), examples={"train": "e.json"}).open()
    assert [row[1:3] for row in contents(opened).judgments] == [("r", -1), ("p", 1), ("h", 0), ("z", 0)]
    assert dropped(opened) == {"repeated_judgments": 2}


def test_passages_and_questions_need_no_judgments(place: str) -> None:
    write_files(place, {"psgs_w100.tsv": PASSAGES, "test.qa.csv": QUESTIONS}, ".gz")
    source = Dpr(path=place, passages="psgs_w100.tsv", questions={"test": "test.qa.csv"}).open()
    read = contents(source)
    assert read.documents == [
        ("1", "Aaron", 'Aaron ( "Ahärôn")\nis a prophet.', ""),
        ("2", '"Weird Al" Yankovic', "plain text", ""),
    ]
    assert [(row[1], row[3]) for row in read.queries] == [
        ("who got it", ["Röntgen", "Wilhelm 's"]),
        ('is it "true"', ['"quoted"']),
        ("when", ["(19|20)\\d\\d?"]),
    ]
    assert read.judgments == []
    assert dropped(source) == {}


def test_passages_questions_and_examples_are_one_collection(tmp_path: Path) -> None:
    passages = "id\ttext\ttitle\n10\tTen.\t\n11\tAll seven.\tSeries\n"
    questions = [{"question": "who", "answers": []}, {"question": "new", "answers": ["yes"]}]
    write_files(str(tmp_path), {"p.tsv": passages, "t.json": json.dumps(EXAMPLES), "q.json": json.dumps(questions)})
    read_ = read(str(tmp_path), passages="p.tsv", examples={"train": "t.json"}, questions={"test": "q.json"})
    assert [row[0] for row in read_.documents] == ["10", "11", NEAR, NEARER, "13"]
    assert [row[1] for row in read_.queries] == ["who", "new", "how many episodes", "how many episodes"]
    assert read_.judgments == EXPECTED.judgments
    source = Dpr(path=str(tmp_path), passages="p.tsv", questions={"a": "q.json"}, examples={"b": "t.json"})
    described = source.open().format.fingerprint()["files"]
    sizes = [(name, (tmp_path / name).stat().st_size) for name in ("p.tsv", "q.json", "t.json")]
    assert [(file["name"], file["bytes"]) for file in described] == sizes


def collected(folder: Path, **source: Any) -> str:
    source = {"kind": "dpr", "path": str(folder), **source}
    return made_by(Collect, {"output": str(folder / "collection"), "source": source})


def test_questions_without_judgments_are_stored(tmp_path: Path) -> None:
    write_files(str(tmp_path), {"p.tsv": PASSAGES, "test.qa.csv": QUESTIONS})
    stored = StoredCollection(collected(tmp_path, passages="p.tsv", questions={"test": "test.qa.csv"}))
    assert (stored.count("documents"), stored.count("queries"), stored.count("judgments")) == (2, 3, 0)
    assert next(iter(stored.answers().values())) == ["Röntgen", "Wilhelm 's"]
    with pytest.raises(UserError, match=r"no judgments of split 'test'\. Splits there: none"):
        stored.judgments("test")


def test_questions_of_one_split_are_searched_and_judged_alone(tmp_path: Path) -> None:
    shared = {"question": "who found the rays", "answers": ["Ten"]}
    files = {"nq.json": [shared], "web.json": [shared, {"question": "how many in the series", "answers": ["seven"]}]}
    passages = "id\ttext\ttitle\n10\tTen found the rays.\t\n11\tAll seven.\tSeries\n"
    write_files(str(tmp_path), {"p.tsv": passages} | {name: json.dumps(each) for name, each in files.items()})
    collection = collected(tmp_path, passages="p.tsv", questions={"nq": "nq.json", "web": "web.json"})
    index = {"kind": "lexical", "collection": collection}
    index_uri = made_by(Index, {"index": index, "output": str(tmp_path / "index")})

    def evaluated(domain: str) -> dict[str, Any]:
        search = {"index": index_uri, "collection": collection, "split": None, "domain": domain}
        ranking = made_by(Search, search | {"output": str(tmp_path / domain)})
        judged = {"collection": collection, "runs": {"BM25": ranking}, "measures": ["Accuracy@5"]}
        judged["output"] = str(tmp_path / f"{domain}-evaluation")
        metrics: dict[str, Any] = StoredEvaluation(made_by(Evaluate, judged)).metrics
        return metrics

    assert (evaluated("nq")["queries"], evaluated("web")["queries"]) == (1, 2)
    with pytest.raises(UserError, match=r"no query of domain 'nqq'. Set 'domain' to one of 'nq', 'web'"):
        evaluated("nqq")


answers = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n")), max_size=3)
questions = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip)


@settings(max_examples=10)
@given(pairs=st.lists(st.tuples(questions, answers), min_size=1, unique_by=repr))
def test_questions_are_what_was_written(tmp_path_factory: pytest.TempPathFactory, pairs: list[Any]) -> None:
    def field(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if '"' in text else text

    lines = "".join(f"{field(question)}\t{field(repr(answers))}\n" for question, answers in pairs)
    folder = write_files(str(tmp_path_factory.mktemp("qa")), {"q.csv": lines, "p.tsv": PASSAGES})
    assert [(row[1], row[3]) for row in read(folder, passages="p.tsv", questions={"q": "q.csv"}).queries] == pairs


def test_of_two_texts_of_one_id_the_first_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    passages = [{"title": "", "text": text, "passage_id": "0"} for text in ("one", "two")]
    examples = [{"question": p["text"], "answers": [], "positive_ctxs": [p]} for p in passages]
    path = write_files(str(tmp_path), {"t.json": json.dumps(examples)})
    kept = read(path, examples={"train": "t.json"}, differing_texts="first")
    assert kept.documents == [("0", "", "one", "")]
    assert [row[1:3] for row in kept.judgments] == [("0", 1), ("0", 1)]


@pytest.mark.parametrize(("example", "message"), [
    ({"answers": []}, 'entry 1 has no "positive_ctxs"'),
    ({"positive_ctxs": []}, 'entry 1 has no "question"'),
    ({"positive_ctxs": [], "question": 1}, 'entry 1: "question" is 1. It must be a string'),
    ({"positive_ctxs": [], "question": "q", "answers": "a"}, "entry 1: \"answers\" is 'a'. It must be a list of str"),
    ({"positive_ctxs": ["text"], "question": "q"},
     r"entry 1: \"positive_ctxs\" is \['text'\]. It must be a list of obj"),
    ({"positive_ctxs": [{"title": "t"}], "question": "q"}, 'entry 1 has no "text"'),
    ({"positive_ctxs": [{"text": "t", "title": 3}], "question": "q"}, 'entry 1: "title" is 3'),
    ({"positive_ctxs": [{"text": "t", "psg_id": 1.5}], "question": "q"}, 'entry 1: "psg_id" is 1.5'),
])  # fmt: skip
def test_wrong_examples_are_named(tmp_path: Path, example: dict[str, Any], message: str) -> None:
    refused(tmp_path, {"t.json": json.dumps([example])}, message, examples={"train": "t.json"})


@pytest.mark.parametrize(("line", "message"), [
    ("question only", "line 2 has 1 tab-separated fields"),
    ("q\t['a']\tmore", "line 2 has 3 tab-separated fields"),
    ('"q" and more\t[]', "line 2 is .* not valid CSV"),
    ("q\tnone", "line 2: the answers are 'none'. They must be a list of strings such as"),
    ("q\t__import__('os').abort()", "line 2: the answers are"),
    ("q\t'a'", "line 2: \"answers\" is 'a'. It must be a list of strings"),
    ("q\t['a', 2]", r'line 2: "answers" is \[\'a\', 2\]'),
    (r"q" "\t" r"['\ud800']", "line 2: the answers are"),
    ("q\t" + "[" * 300, "line 2: the answers are"),
])  # fmt: skip
def test_wrong_questions_are_named(tmp_path: Path, line: str, message: str) -> None:
    files = {"p.tsv": PASSAGES, "q.csv": f"good\t[]\n{line}\n"}
    refused(tmp_path, files, rf"q\.csv, {message}", passages="p.tsv", questions={"test": "q.csv"})


def test_wrong_files_and_settings_without_documents_are_refused(tmp_path: Path) -> None:
    files = {"p.tsv": "1\ttext\ttitle\n", "q.csv": "q\t[]\n", "q.json": '[{"question": "q"}]', "e.json": "[]"}
    refused(tmp_path, files, r"p\.tsv.* no column 'id'", passages="p.tsv", questions={"test": "q.csv"})
    refused(tmp_path, {}, r"examples\.dev: .*none\.json does not exist", examples={"dev": "none.json"})
    refused(tmp_path, {}, r"e\.json holds no documents", examples={"train": "e.json"})
    files["p.tsv"] = PASSAGES
    refused(tmp_path, files, 'q.json, entry 1 has no "answers"', passages="p.tsv", questions={"test": "q.json"})
    for given_ in ({}, {"passages": "p.tsv"}, {"questions": {"test": "q.csv"}}):
        with pytest.raises(UserError, match="give examples, or passages and questions"):
            validate(CollectConfig, {"output": "o", "source": {"kind": "dpr", "path": "x", **given_}}, "collect")


def test_the_annotated_passage_of_a_question_is_the_first_of_its_positives(tmp_path: Path) -> None:
    """Whatever number it has in the collection, in which passages come in the order of their first example."""
    examples = [
        {"question": f"question {number}", "answers": [], "positive_ctxs": [{"text": f"passage {at}"} for at in listed]}
        for number, listed in enumerate([[0, 1, 2], [2, 0, 1], [1, 2, 0], [3], [2, 1, 0]])
    ]
    (tmp_path / "train.json").write_text(json.dumps(examples))
    collection = collected(tmp_path, examples={"train": "train.json"})
    values = {"collection": collection, "documents_per_query": 1, "output": str(tmp_path / "pairs")}
    pairs = Artifact(made_by(Pairs, values | {"choose_documents": "first"}))
    assert read_pairs(pairs, SCHEMA.names).schema == SCHEMA
    assert read_pairs(pairs, ["document_id"])["document_id"].to_pylist() == [
        text_id("", f"passage {at}") for at in (0, 2, 1, 3, 2)
    ]
    with pytest.raises(UserError, match="'choose_documents: first' needs 'documents_per_query'"):
        validate(Pairs.config_class, values | {"documents_per_query": None, "choose_documents": "first"}, "pairs")
