"""Hard negatives for real questions by BM25: no answers in them, and those that others made by the same recipe."""

import json
from pathlib import Path

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.mine import Mine, MineConfig
from pipelines.mining.candidates import StoredCandidates, mined_lists
from retrieval.collections.collection import StoredCollection
from retrieval.lexical import BM25Settings
from tests.unit.pipelines.jobs.test_mine import make_run
from tests.unit.retrieval.evaluation.test_answers import literal_has_answer
from tests.unit.retrieval.real_data import real_data
from tests.unit.retrieval.whole_lexical import index_whole
from tests.unit.small_run import make


def test_negatives_of_real_questions(tmp_path: Path) -> None:
    folder = real_data("squad_dpr")
    uri = make(Collect(CollectConfig(source=BeirFolder(path=str(folder)), output=str(tmp_path / "collection"))))
    collection = StoredCollection(uri)
    documents = collection.rows_of("documents").read(["id", "title", "text"]).to_pylist()
    texts = {found["id"]: f"{found['title']} {found['text']}" for found in documents}
    judged = set(collection.judgments("dev")["query_id"].to_pylist())
    asked = collection.rows_of("queries").read(["id", "text"]).to_pylist()
    queries = [row for row in asked if row["id"] in judged]
    query_ids = [query["id"] for query in queries]
    index = index_whole(texts.values(), BM25Settings())
    ranking = index.search([query["text"] for query in queries], 40)
    named = [{"_id": found["id"]} for found in documents]
    run = make_run(tmp_path / "run", uri, query_ids, named, ranking.rows, ranking.scores)
    config = MineConfig(run=run, collection=uri, split="dev", number=8, output=str(tmp_path / "mined"))
    mined: dict[str, list[str]] = {}
    for rows, lists in mined_lists(StoredCandidates(make(Mine(config)))):
        for row, places in zip(rows.tolist(), lists.to_pylist(), strict=True):
            mined[asked[row]["id"]] = [documents[place]["id"] for place in places]
    assert list(mined) == query_ids
    same = total = 0
    for line in (folder / "dpr_ids/dev.jsonl").read_text(encoding="utf-8").splitlines():
        example = json.loads(line)
        found = mined[example["query_id"]]
        assert not set(found) & set(example["positive_ids"])
        assert not any(literal_has_answer(texts[document], example["answers"]) for document in found)
        same += len(set(found) & set(example["hard_negative_ids"]))
        total += len(example["hard_negative_ids"])
    assert same / total > 0.9
