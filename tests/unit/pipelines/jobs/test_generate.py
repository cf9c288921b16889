"""The stage that lets a language model write queries: its collection, its splits, and what it is derived from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.jobs import generate
from pipelines.jobs.generate import Generate, GenerateConfig
from pipelines.queries.generated import QueryWriter
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from raytriever.stages.cost import Size
from tests.unit.pipelines.jobs.made_up import made_by, stored_rows
from tests.unit.pipelines.jobs.test_queries import chunked, collected
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), language_model=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The prompts of each call. Answered are the passage's first two words and its last two, a line each."""
    prompts: list[Sequence[str]] = []

    def answers(_: QueryWriter, batch: Sequence[str]) -> list[str]:
        prompts.append(batch)
        passages = [prompt.partition("Passage: ")[2].partition("\n\nQueries:")[0].split() for prompt in batch]
        return [f"1. {' '.join(words[:2])}\n2. {' '.join(words[-2:])}" for words in passages]

    monkeypatch.setattr(QueryWriter, "answers", answers)
    return prompts


def generated(folder: Path, collection: str, model: Path, **values: Any) -> str:
    named = {"language_model": {"model": str(model), "dtype": "float32"}, "collection": collection}
    return made_by(Generate, named | {"output": str(folder)} | values)


def test_it_costs_the_tokens_that_are_read_and_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "seconds_of_tokens", lambda *given: given[-1])
    values = {"language_model": {"model": str(model), "dtype": "float32"}, "collection": "corpus", "output": "made"}
    tokens = list[float]()
    for documents, document_bytes, written in ((100, 0, 10), (100, 450, 10), (100, 450, 30), (200, 450, 30)):
        generation = {"max_new_tokens": written, "number": 3}
        stage = Generate(
            validate(GenerateConfig, values | {"generation": generation, "rows_per_shard": 60}, "generate")
        )
        cost = stage.cost(Size(documents=documents, document_bytes=document_bytes))
        assert (cost.tasks, cost.made.splits) == (-(-documents // 60), {"train": (3 * documents, 3 * documents)})
        tokens.append(cost.work)
    assert tokens[1] - tokens[0] == pytest.approx(100 * 450 / generate.BYTES_OF_A_TOKEN)
    assert tokens[2] - tokens[1] == pytest.approx(100 * 20)
    assert tokens[3] == pytest.approx(2 * tokens[2])


def test_a_passage_is_found_by_each_of_its_queries(tmp_path: Path, model: Path, asked: list[Sequence[str]]) -> None:
    uri = generated(tmp_path / "made", chunked(tmp_path), model, batch_size=4)
    found = stored_rows(uri)
    assert found.documents[0] == ("beer-q1#0", "What is a citra hop?", "I was offered one. It was bitter.\n\n", "be")
    assert len(found.documents) == 6
    assert found.queries[:2] == [
        ("query:beer-q1#0#0", "I was", "be", []), ("query:beer-q1#0#1", "was bitter.", "be", []),
    ]  # fmt: skip
    assert found.judgments[:2] == [
        ("query:beer-q1#0#0", "beer-q1#0", 1, "train"), ("query:beer-q1#0#1", "beer-q1#0", 1, "train"),
    ]  # fmt: skip
    assert len(found.queries) == len(found.judgments) == Artifact(uri).manifest["counts"]["queries"]
    assert list(map(len, asked)) == [4, 2]
    assert asked[0][0].startswith("Write 2 different search queries")
    assert "Title: What is a citra hop?\nPassage: I was offered one." in asked[0][0]
    assert Artifact(uri).manifest["facts"]["made_by"] == "generated"


@pytest.mark.usefixtures("asked")
def test_other_shards_and_batches_change_nothing_when_answers_do_not(tmp_path: Path, model: Path) -> None:
    collection, shares = collected(tmp_path), {"held_out": 0.4, "validation": 0.2}
    one, other = (
        stored_rows(generated(tmp_path / f"{rows}", collection, model, rows_per_shard=rows, batch_size=rows, **shares))
        for rows in (1, 3)
    )
    assert one == other
    drawn = {split for *_, split in one.judgments}
    assert len(drawn) > 1
    others = (
        stored_rows(generated(tmp_path / f"seed-{seed}", collection, model, seed=seed, **shares)) for seed in (2, 10)
    )
    assert any(other.judgments != one.judgments for other in others)


def test_what_a_model_without_sense_writes_is_counted(tmp_path: Path, model: Path) -> None:
    """Random weights answer with no words; nothing is patched here."""
    settings = {"generation": {"max_new_tokens": 3, "minimum_words": 4}}
    with pytest.raises(UserError, match=r"No query of kind 'generated' can be made .*passages that got no query"):
        generated(tmp_path / "made", collected(tmp_path), model, **settings)
    assert not (tmp_path / "made" / "manifest.json").exists()


@pytest.mark.usefixtures("asked")
def test_the_prompt_is_stored_and_another_one_asks_anew(tmp_path: Path, model: Path) -> None:
    collection, prompt = collected(tmp_path), tmp_path / "prompt.txt"
    prompt.write_text("Passage: {text}\n\nQueries:")
    settings = {"generation": {"prompt": str(prompt)}}
    uri = generated(tmp_path / "made", collection, model, **settings)
    assert Artifact(uri).manifest["facts"]["prompt"] == prompt.read_text()
    values = settings | {"collection": collection, "language_model": {"model": str(model)}, "output": uri}
    stage = Generate(validate(GenerateConfig, values, "Settings of generate"))
    before = stage.derivation().digest
    prompt.write_text("Ask. Passage: {text}\n\nQueries:")
    assert stage.derivation().digest != before
    prompt.write_text("Passage:")
    with pytest.raises(UserError, match=r"prompt\.txt has no \{text\}"):
        stage.check_inputs({"language_model.model", "generation.prompt"})
