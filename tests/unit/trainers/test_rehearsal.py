"""Rehearsals: toys are what the readers of the real things read, and what no toy can stand in for is named first."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from pipelines.formats.sources import AnySource
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.hub_mirror import HUB_MIRROR
from raytriever.cli import app
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe, recipe_names
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.pretrained import find_tokenizer, locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from tests.unit.small_run import make
from trainers.rehearsal.collections import Size, write_source
from trainers.rehearsal.command import parts_of
from trainers.rehearsal.models import HUB_MODELS, write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZE = Size(documents=64, training_queries=20, queries=6)
TEXTS = ["the harbour of a town", "a town without a harbour", "what the river carries to the sea"]
CORPUS = {"table": "docs.jsonl.gz", "id": "docid", "title": "title"}
SOURCES: dict[str, dict[str, Any]] = {
    "beir": {"kind": "beir", "path": "data/nfcorpus"},
    "mteb": {"kind": "mteb", "path": "mteb/x", "splits": ["test"]},
    "subset": {
        "kind": "mteb", "path": "CoIR/x", "subset": "go", "splits": ["test"]
    },
    "passages": {"kind": "columns", "path": "data/wikipedia", "documents": CORPUS | {"join_by": "title"}},
    "parts": {
        "kind": "columns", "path": "data/batches", "documents": {"table": "*.jsonl", "id": None, "in_parts": True}
    },
    "glob": {
        "kind": "columns", "path": "data/posts", "documents": {"table": "*.json", "id": None}, "empty_documents": "drop"
    },
    "tables": {
        "kind": "columns",
        "path": "data/tables",
        "documents": {"table": "corpus", "domain": "metadata.source"},
        "queries": {"table": "queries.csv", "answers": "answer"},
        "judgments": {"table": "judged.parquet", "split": "part"},
    },
    "pairs": {"kind": "columns", "path": "data/pairs", "pairs": {"splits": {"train": "a.tsv"}, "negatives": ["other"]}},
    "ms_marco": {
        "kind": "trec",
        "path": "data/msmarco",
        "documents": "collection.tsv",
        "queries": ["queries.train.tsv", "queries.test.tsv"],
        "qrels": {"test": "qrels.txt"},
        "triples": {"train": "triples.tsv"},
    },
    "tripclick": {
        "kind": "trec",
        "path": "data/tripclick",
        "documents": "documents/docs_grp_*.txt",
        "queries": ["topics/topics.head.val.txt", "topics/topics.tail.val.txt"],
        "qrels": {"head": ["qrels/qrels.raw.head.val.txt", "qrels/other.txt"], "tail": "qrels/qrels.raw.tail.val.txt"},
    },
    "dpr": {
        "kind": "dpr", "path": "data/dpr", "examples": {"train": "nq-train.json"}, "passages": "psgs_w100.tsv",
        "questions": {"test": "nq-test.qa.csv"}, "differing_texts": "first",
    },
    "pairs of domains": {
        "kind": "columns", "path": "data/nomic",
        "pairs": {"splits": {"train": "**/*.parquet"}, "negatives": ["negative"], "domain": "dataset"},
    },
    "sources": {
        "kind": "sources",
        "sources": {"a": {"kind": "beir", "path": "data/a"}, "b": {"kind": "beir", "path": "b", "splits": ["dev"]}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_toy_is_read_as_what_it_stands_in_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source: AnySource = TypeAdapter(AnySource).validate_python(SOURCES[name])
    write_source(source, SIZE)
    write_source(source, SIZE)  # once more changes nothing
    collection = StoredCollection(make(Collect(CollectConfig(source=source, output="collection"))))
    texts = collection.rows_of("documents").read(["id", "text"])["text"].to_pylist()
    assert len(texts) >= 30  # of pairs, those that are named
    assert all("." in text for text in texts)
    if name in ("passages", "glob", "parts"):
        assert min(len(text.split()) for text in texts) > 200
        assert len(texts) == 60
        return
    judgments = pa.concat_tables([collection.judgments(split) for split in splits_of(collection)])
    assert set(judgments["relevance"].to_pylist()) >= {0, 1}
    assert len(collection.rows_of("queries")) >= 6


def splits_of(collection: StoredCollection) -> list[str]:
    return sorted(set(collection.rows_of("judgments").read(["split"])["split"].to_pylist()))


def test_collections_of_one_folder_share_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shared: dict[str, Any] = {"kind": "trec", "path": "data/msmarco", "documents": "collection.tsv"}
    triples, trec = {"train": "triples.train.tsv"}, "msmarco-test2019-queries.tsv"
    sources = [
        shared | {"queries": ["queries.train.tsv", trec], "qrels": {"dl19": "2019qrels-pass.txt"}, "triples": triples},
        shared
        | {"queries": ["queries.dev.tsv", trec], "qrels": {"dev": "qrels.dev.tsv", "trec": "2019qrels-pass.txt"}},
    ]
    read: list[AnySource] = [TypeAdapter(AnySource).validate_python(source) for source in sources]
    for source in read:
        write_source(source, SIZE)
    for number, source in enumerate(read):
        make(Collect(CollectConfig(source=source, output=f"collection-{number}")))


def test_no_toy_is_written_over_what_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    source = {"kind": "trec", "path": "data", "documents": [str(tmp_path / "collection.tsv")]}
    with pytest.raises(UserError, match=r"written to .*collection\.tsv, outside of the rehearsal's folder"):
        write_source(TypeAdapter(AnySource).validate_python(source), SIZE)
    assert not (tmp_path / "collection.tsv").exists()


@pytest.mark.parametrize("model", {known: model for model, known in HUB_MODELS.items()}.values())
def test_a_toy_model_is_loaded_from_the_mirror(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(HUB_MODELS[model], 3, TEXTS, tmp_path / "models" / model)
    write_model(
        HUB_MODELS["google-bert/bert-base-uncased"], 2, TEXTS, tmp_path / "models" / "google-bert/bert-base-uncased"
    )
    monkeypatch.setenv(HUB_MIRROR, str(tmp_path))
    has_tokenizer = HUB_MODELS[model].tokenizer
    tokenizer = None if has_tokenizer else "google-bert/bert-base-uncased"
    settings = EncoderSettings(model=model, tokenizer=tokenizer, pooling="mean", dtype="float32")
    located = locate_model(model)
    assert "mirror" in located.origin
    assert (find_tokenizer(model) == located.path) if has_tokenizer else True
    encoder = load_encoder(settings, located.path, located.fingerprint)
    assert encoder.contract.dimension == 64
    assert encoder.contract.max_length >= 512


@pytest.mark.parametrize("kind", ["adamw_8bit", "adamw"])
def test_an_optimizer_in_8_bits_is_rehearsed_where_its_package_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = kind == "adamw_8bit"
    monkeypatch.setattr(
        "trainers.rehearsal.command.find_spec", lambda name: name if name == "bitsandbytes" and is_there else None
    )
    stages = parts_of(load_recipe("papers/adaptive_margins", []))[-1].stages.values()
    assert {stage.config.training.optimizer.kind for stage in stages if stage.command == "train"} == {kind}


def test_the_hub_is_not_asked_where_there_is_a_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HUB_MIRROR, str(tmp_path))
    with pytest.raises(
        UserError, match=rf"{HUB_MIRROR} is .*nothing is read but what lies there: .*models/org/name is no"
    ):
        locate_model("org/name")
    source: AnySource = TypeAdapter(AnySource).validate_python(
        SOURCES["mteb"] | {"path": f"hf://datasets/mteb/x@{COMMIT}"}
    )
    with pytest.raises(UserError, match=r"datasets/mteb/x is no folder"):
        source.open()


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("papers/")])
def test_toys_can_stand_in_for_all_that_the_papers_recipes_name(name: str) -> None:
    *_, whole = parts_of(load_recipe(name, []))
    assert list(whole.stages) == list(load_recipe(name, []).stages)


def rehearse(folder: Path, stages: dict[str, Any], *arguments: str) -> str:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"description": "", "output": "runs/mine", "stages": stages}))
    done = CliRunner().invoke(app, ["rehearse", str(recipe), "--output", str(folder / "toys"), *arguments])
    assert done.exit_code == 2
    return " ".join(done.stderr.split())


SOURCE_TREE = {"job": "collect", "source": {"kind": "source_tree", "path": "a/src"}}
COLLECTION = {"job": "collect", "source": SOURCES["beir"]}
VECTORS = {"job": "embed", "collection": "corpus", "encoder": {"model": "org/name"}}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"corpus": COLLECTION, "vectors": VECTORS}, "No toy can stand in for the model org/name"),
        (
            {"mteb": {"job": "mteb", "encoder": VECTORS["encoder"], "tasks": ["STS12"]}},
            "mteb reads MTEB's own data sets",
        ),
        ({"corpus": SOURCE_TREE}, "corpus.source.kind is source_tree, of which no toy can be made"),
        ({"vectors": VECTORS | {"collection": "runs/other/corpus"}}, "vectors.collection is runs/other/corpus, which"),
    ],
)
def test_what_no_toy_can_stand_in_for_is_named_before_anything_is_made(
    stages: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in rehearse(tmp_path, stages)
    assert not (tmp_path / "toys").exists()


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toys" / "data").mkdir(parents=True)
    assert "holds other things than a rehearsal" in rehearse(tmp_path, {"corpus": COLLECTION})
