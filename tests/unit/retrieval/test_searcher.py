"""Questions to a finished run: the passages that its own stages rank first, by vectors, words and both."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

import raytriever
from raytriever.artifacts.artifact import MANIFEST, Artifact
from raytriever.cli import app
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import DOCUMENTS, ParquetRows, StoredCollection
from retrieval.jobs.context import Context
from retrieval.jobs.embed import Embed
from retrieval.jobs.fuse import Fuse
from retrieval.jobs.import_vectors import ImportVectors
from retrieval.jobs.index import Index, IndexConfig
from retrieval.jobs.search import Search
from retrieval.rankings import StoredRanking
from retrieval.searcher import Passage, Searcher
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.retrieval.encoders.contextual.made_up import contextual
from tests.unit.small_run import make, make_artifact, make_collection

K = 5


def stage_of(folder: Path, kind: Any, name: str, **values: Any) -> str:
    return make(kind(validate(kind.config_class, values | {"output": str(folder / name)}, name)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Path:
    """A run with a model, its vectors and an index of them, an index of words, and what its stages find with both."""
    folder = tmp_path_factory.mktemp("run")
    collection, stage = make_collection(folder), partial(stage_of, folder)
    files = {path.name: path.read_bytes() for path in tiny_encoder.iterdir()}
    model = make_artifact(folder / "model", "model", {}, {}, files, 1)
    encoder = {"model": model, "dtype": "float32", "pooling": "mean", "query_prompt": "query "}
    vectors = stage(Embed, "vectors", collection=collection, encoder=encoder)
    dense = stage(Index, "dense", index={"kind": "vectors", "vectors": vectors, "shards": 3})
    words = stage(Index, "words", index={"kind": "lexical", "collection": collection})
    asked = {"collection": collection, "split": None, "top_k": 200}
    runs = {
        "by_vectors": stage(Search, "by_vectors", index=dense, vectors=vectors, **asked),
        "by_words": stage(Search, "by_words", index=words, **asked),
    }
    stage(Fuse, "fused", runs=runs)
    return folder


@pytest.mark.parametrize(
    ("indexes", "expected"), [((), "by_vectors"), (("words",), "by_words"), (("dense", "words"), "fused")]
)
def test_questions_find_what_the_stages_find(run: Path, indexes: tuple[str, ...], expected: str) -> None:
    collection, ranking = StoredCollection(str(run / "documents")), StoredRanking(str(run / expected))
    asked, texts = (
        {row["id"]: row["text"] for row in collection.rows_of(part).read(["id", "text"]).to_pylist()}
        for part in ("queries", "documents")
    )
    found = raytriever.Searcher(str(run), indexes).search([asked[name] for name in ranking.query_ids()], K)
    ids, rows = ranking.document_ids(), ranking.ranking().rows[:, :K]
    assert [[passage.id for passage in of_query] for of_query in found] == [
        [str(ids[row]) for row in of_query if row >= 0] for of_query in rows.tolist()
    ]
    assert all(passage.text == texts[passage.id] for of_query in found for passage in of_query)
    assert any(found)
    assert len(raytriever.Searcher(str(run), indexes).search(["w1"], 10**10)[0]) <= len(texts)
    scores = ranking.ranking().scores[:, :K]
    for of_query, expected_scores in zip(found, scores.tolist(), strict=True):
        assert [passage.score for passage in of_query] == pytest.approx(expected_scores[: len(of_query)], abs=1e-5)


def test_threads_of_a_service_share_a_searcher(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searcher, take, reading, most = Searcher(str(run), ["dense", "words"]), ParquetRows.take, list[int](), list[int]()

    def slow_take(rows: ParquetRows, *given: Any) -> pa.Table:  # Arrow crashes where two threads read one file
        reading.append(1)
        most.append(len(reading))
        time.sleep(0.005)
        reading.pop()
        return take(rows, *given)

    monkeypatch.setattr(ParquetRows, "take", slow_take)
    questions = [f"text {number}" for number in range(16)]
    alone = searcher.search(questions, K)
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda question: searcher.search([question], K)[0], questions))
    assert together == alone
    assert any(alone)
    assert max(most) == 1


def test_an_index_is_searched_as_the_run_searches_it(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    stage = partial(stage_of, tmp_path)
    vectors, collection = str(tmp_path / "vectors"), str(tmp_path / "documents")
    index = stage(Index, "ivf", index={"kind": "vectors", "vectors": vectors, "factory": "IVF8,Flat"})
    texts = StoredCollection(collection).rows_of("queries").read(["text"])["text"].to_pylist()
    narrow = Searcher(str(tmp_path), ["ivf"]).search(texts, K)
    asked = {"index": index, "vectors": vectors, "collection": collection, "split": None}
    for name, parameters in (("narrow", "nprobe=1"), ("wide", "nprobe=8")):  # the last by name counts
        stage(Search, name, **asked, search_parameters=parameters)
    wide = Searcher(str(tmp_path), ["ivf"]).search(texts, K)
    assert ids(wide) == ids(Searcher(str(tmp_path), ["dense"]).search(texts, K))
    assert ids(wide) != ids(narrow)
    assert Searcher(str(tmp_path)).indexes == ("dense",)  # the exact one


def ids(found: list[list[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in passages] for passages in found]


@pytest.mark.parametrize("without", [None, "null", "none"])
def test_questions_are_read_in_the_context_of_the_documents(tmp_path: Path, without: str | None) -> None:
    collection, stage, model = make_collection(tmp_path), partial(stage_of, tmp_path), tmp_path / "encoder"
    contextual(dtype=torch.float32, context_documents=8).save(model)
    encoder = {"model": str(model), "dtype": "float32"}
    fitted = None if without else stage(Context, "context", collection=collection, encoder=encoder)
    how = {"context": fitted} if fitted else {"without_context": without}
    vectors = stage(Embed, "vectors", collection=collection, encoder=encoder, **how)
    index = stage(Index, "index", index={"kind": "vectors", "vectors": vectors})
    asked = {"collection": collection, "split": None, "top_k": K}
    ranking = StoredRanking(stage(Search, "ranking", index=index, vectors=vectors, **asked)).ranking()
    texts = StoredCollection(collection).rows_of("queries").read(["text"])["text"].to_pylist()
    found = Searcher(str(tmp_path), encoder=str(model)).search(texts, K)
    scores = [[passage.score for passage in passages] for passages in found]
    np.testing.assert_allclose(scores, ranking.scores, atol=1e-3)


def test_a_question_of_the_command_is_answered_without_control_characters(run: Path) -> None:
    done = CliRunner().invoke(app, ["ask", str(run), "text 12", "--top", "2", "--index", "words"])
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()[::2]] == ["1", "2"]
    assert "text 12" in done.stdout
    assert "searched: words" in done.stderr
    assert Searcher(str(run)).indexes == ("dense",)
    nothing = CliRunner().invoke(app, ["ask", str(run), "zebra", "--index", "words"])
    assert nothing.stdout == "Nothing was found.\n"


def test_words_are_asked_before_vectors_that_no_encoder_here_made(tmp_path: Path) -> None:
    collection, stage = make_collection(tmp_path), partial(stage_of, tmp_path)
    np.save(tmp_path / "vectors.npy", np.ones((StoredCollection(collection).count("documents"), 8)))
    given = {"collection": collection, "model": "api/x", "documents": str(tmp_path / "vectors.npy")}
    stage(Index, "z", index={"kind": "vectors", "vectors": stage(ImportVectors, "imported", **given)})
    stage(Index, "words", index={"kind": "lexical", "collection": collection})
    ((passage,),) = Searcher(str(tmp_path)).search(["text 12"], k=1)
    assert "text 12" in passage.text
    with pytest.raises(UserError, match="imported was imported, so no encoder reads questions for it"):
        Searcher(str(tmp_path), ["z"], encoder="api/x")


def test_questions_need_no_kernel_of_gpus(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    vectors, index = (json.loads((tmp_path / name / MANIFEST).read_bytes()) for name in ("vectors", "dense"))
    vectors["config"]["encoder"]["attention"] = "flash_attention_2"
    (tmp_path / "vectors" / MANIFEST).write_text(json.dumps(vectors))
    index["inputs"]["index.vectors"] = Artifact(str(tmp_path / "vectors")).fingerprint
    (tmp_path / "dense" / MANIFEST).write_text(json.dumps(index))
    assert Searcher(str(tmp_path)).search(["text 12"]) == Searcher(str(run)).search(["text 12"])


def test_half_of_a_character_is_a_question_too(run: Path) -> None:
    for indexes in (["words"], []):
        searcher = Searcher(str(run), indexes)
        (found,), (expected,) = (searcher.search([text], k=2) for text in ("text 12 \ud83d", "text 12 ?"))
        assert found == expected


def test_without_a_question_each_line_of_the_input_is_one(run: Path) -> None:
    def answer(*question: str, typed: str = "") -> str:
        given = ["ask", str(run), *question, "--top", "2", "--index", "words"]
        done = CliRunner().invoke(app, given, input=typed)
        assert done.exit_code == 0, done.output
        return done.stdout

    apart = "".join(f"{answer(question)}\n" for question in ("text 12", "zebra", "text 3"))
    assert answer(typed="text 12\n \nzebra\ntext 3") == apart
    assert answer(typed="") == ""


def test_text_of_strangers_sends_nothing_to_the_terminal(tmp_path: Path) -> None:
    hostile = {"id": "d\x1b]0;title\x07", "title": "\u202eside", "text": "alarm \x9b31m red" + " x" * 150, "domain": ""}
    collection = store(tmp_path / "documents", [pa.Table.from_pylist([hostile], DOCUMENTS)], [], [])
    index = {"kind": "lexical", "collection": collection}
    make(Index(validate(IndexConfig, {"index": index, "output": str(tmp_path / "words")}, "index")))
    done = CliRunner().invoke(app, ["ask", str(tmp_path), "alarm"])
    assert "d\ufffd]0;title\ufffd" in done.stdout
    assert done.stdout.replace("\n", "").isprintable()
    assert done.stdout.endswith(" x x …\n")


def test_what_is_missing_is_named(run: Path, tmp_path: Path, tiny_encoder: Path) -> None:
    with pytest.raises(UserError, match="There is no index below"):
        Searcher(str(tmp_path))
    make_collection(tmp_path / "one", "other")
    other = {"index": {"kind": "lexical", "collection": str(tmp_path / "one" / "documents")}}
    stage_of(tmp_path / "one", Index, "of_another", **other)
    (tmp_path / "one" / "words").symlink_to(run / "words")
    with pytest.raises(UserError, match="don't come from the same collection"):
        Searcher(str(tmp_path / "one"), ["of_another", "words"])
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(UserError, match=r"questions\[1\] is ' \\n'\. Ask with one word"):
        Searcher(str(run), ["words"]).search(["text 1", " \n"], 1)
    with pytest.raises(UserError, match=r"no index 'sparse'\. Those there: dense, words"):
        Searcher(str(run), ["sparse"])
    (tmp_path / "dense").symlink_to(run / "dense")
    with pytest.raises(UserError, match="collection behind"):
        Searcher(str(tmp_path))
    (tmp_path / "documents").symlink_to(run / "documents")
    with pytest.raises(UserError, match="vectors behind"):
        Searcher(str(tmp_path))
    (tmp_path / "vectors").symlink_to(run / "vectors")
    with pytest.raises(UserError, match="Neither the run nor a package holds the encoder"):
        Searcher(str(tmp_path))
    with pytest.raises(UserError, match="different encoders"):
        Searcher(str(tmp_path), encoder=str(tiny_encoder))
    searcher = Searcher(str(tmp_path), encoder=str(run / "model"))
    assert searcher.search(["text 1"], np.int64(1))[0]
    for wrong in (0, 2.5):
        with pytest.raises(UserError, match=rf"k is {wrong}\. It must be a whole number"):
            searcher.search(["text 1"], wrong)  # type: ignore[arg-type]
