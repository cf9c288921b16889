"""A real collection in DPR's form, and real collections written in every form and read back."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats import flag_embedding, tevatron
from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles
from pipelines.formats.dpr import Dpr
from pipelines.formats.tevatron import Tevatron
from pipelines.jobs.collect import Collect, CollectConfig
from retrieval.collections.collection import StoredCollection, passage_text
from retrieval.collections.records import text_id
from tests.unit.pipelines.formats.made_up import FLAG_EMBEDDING, made_examples
from tests.unit.retrieval.collections.contents import Contents, contents
from tests.unit.small_run import make

SAMPLE = "dpr_sample_200.json"


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("RAYTRIEVER_TEST_DATA")
    if not folder:
        pytest.skip("RAYTRIEVER_TEST_DATA does not name a folder of BEIR collections")
    return Path(folder)


@pytest.fixture(scope="module")
def squad(data: Path) -> Contents:
    return contents(BeirFolder(path=str(data / "squad_dpr")).open())


def collected(data: Path, name: str, folder: Path) -> StoredCollection:
    source = BeirFolder(path=str(data / name))
    return StoredCollection(make(Collect(CollectConfig(output=str(folder / name), source=source))))


def mined(data: Path, split: str) -> dict[str, list[str]]:
    with (data / "squad_dpr" / "dpr_ids" / f"{split}.jsonl").open(encoding="utf-8") as file:
        records = map(json.loads, file)
        return {record["query_id"]: record["hard_negative_ids"][:4] for record in records}


def test_the_sample_in_dprs_form_is_the_collection(data: Path, squad: Contents) -> None:
    sample = contents(Dpr(path=str(data / "squad_dpr"), examples={"train": SAMPLE}).open())
    assert len(sample.queries) == 200
    assert len(sample.documents) > 500
    assert set(sample.documents) < set(squad.documents)
    ids_of: dict[str, list[str]] = {}
    for id_, text, _, answers in squad.queries:
        ids_of.setdefault(text_id(text, *answers), []).append(id_)
    relevant = {row[:2] for row in squad.judgments}
    hard_negatives = mined(data, "train") | mined(data, "dev")
    for query, document, relevance, _ in sample.judgments:
        assert relevance in (1, 0)
        assert any(
            (id_, document) in relevant if relevance else document in hard_negatives[id_] for id_ in ids_of[query]
        )
    assert {row[0] for row in sample.judgments if row[2] == 1} == {row[0] for row in sample.queries}


def test_judged_negatives_are_the_negatives_of_every_form(data: Path, tmp_path: Path) -> None:
    collection = collected(data, "climate_fever_sent", tmp_path)
    source = contents(BeirFolder(path=str(data / "climate_fever_sent")).open())
    train = [row for row in source.judgments if row[3] == "train"]
    with_positive = {row[0] for row in train if row[2] > 0}
    wanted = {(query, document, min(grade, 1)) for query, document, grade, _ in train if query in with_positive}
    assert {grade for *_, grade in wanted} == {0, 1}
    text_of = {id_: passage_text(title, text) for id_, title, text, _ in source.documents}
    query_of = {id_: text for id_, text, *_ in source.queries}

    written = tevatron.write(made_examples(collection, tmp_path), tmp_path)
    assert all((tmp_path / name).is_file() for name in written)
    read = contents(Tevatron(path=str(tmp_path), examples={"train": "train.jsonl"}, corpus="corpus.jsonl").open())
    assert read.documents == source.documents
    assert [row[0] for row in read.queries] == [row[0] for row in source.queries if row[0] in with_positive]
    assert {row[:3] for row in read.judgments} == wanted

    flag_embedding.write(made_examples(collection, tmp_path), tmp_path)
    read = contents(ColumnFiles(path=str(tmp_path), pairs=FLAG_EMBEDDING).open())
    texts: dict[Any, str] = {row[0]: row[2] for row in read.documents} | {row[0]: row[1] for row in read.queries}
    positive = {(query_of[query], text_of[document]) for query, document, grade in wanted if grade}
    assert {(texts[row[0]], texts[row[1]]) for row in read.judgments if row[2]} == positive
    negative = {(query_of[query], text_of[document]) for query, document, grade in wanted if not grade}
    assert {(texts[row[0]], texts[row[1]]) for row in read.judgments if not row[2]} == negative - positive
