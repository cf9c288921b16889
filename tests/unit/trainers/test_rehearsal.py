"""Rehearsals: toys have what the recipe names, and what no toy can stand in for is named first."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from pipelines.formats.sources import AnySource
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.pack import PackConfig
from pipelines.jobs.pairs import PairsConfig
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.object_store import HUB_MIRROR
from raytriever.cli import app
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe, recipe_names
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.pretrained import find_tokenizer, locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from retrieval.jobs.index import IndexConfig
from tests.cluster.test_faults import TrainHere
from tests.unit.small_run import make
from trainers.engine.settings import ScheduleSettings
from trainers.jobs.train import Train, TrainConfig
from trainers.rehearsal.collections import Size, make_documents, make_queries, toy_source, write_toy
from trainers.rehearsal.command import _sizes, parts_of
from trainers.rehearsal.models import hub_models, write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZE = Size(documents=64, training_queries=20, queries=6)
TEXTS = ["the harbour of a town", "a town without a harbour", "what the river carries to the sea"]
CORPUS = {"table": "docs.jsonl.gz", "id": "docid", "title": "title"}
MS_MARCO = {"kind": "trec", "path": "data/msmarco", "documents": "collection.tsv"}
SOURCES: dict[str, dict[str, Any]] = {
    "beir": {"kind": "beir", "path": "data/nfcorpus"},
    "mteb": {"kind": "mteb", "path": "mteb/x", "splits": ["test"]},
    "subset": {"kind": "mteb", "path": "CoIR/x", "subset": "go", "splits": ["test"]},
    "passages": {"kind": "columns", "path": "data/wikipedia", "documents": CORPUS | {"join_by": "title"}},
    "parts": {
        "kind": "columns", "path": "data/batches", "documents": {"table": "*.jsonl", "id": None, "in_parts": True},
    },
    "glob": {
        "kind": "columns", "path": "data/posts", "documents": {"table": "*.json", "id": None}, "empty_documents": "drop"
    },
    "tables": {
        "kind": "columns", "path": "data/tables", "documents": {"table": "corpus", "domain": "metadata.source"},
        "queries": {"table": "queries.csv", "answers": "answer"},
        "judgments": {"table": "judged.parquet", "split": "part"},
    },
    "pairs": {"kind": "columns", "path": "data/pairs", "pairs": {"splits": {"train": "a.tsv"}, "negatives": ["other"]}},
    "ms_marco": MS_MARCO | {
        "queries": ["queries.train.tsv", "queries.test.tsv"], "qrels": {"test": "qrels.txt"},
        "triples": {"train": "triples.tsv"},
    },
    "tripclick": {
        "kind": "trec", "path": "data/tripclick", "documents": "documents/docs_grp_*.txt",
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
SPLITS = {
    "mteb": {"test"},
    "subset": {"test"},
    "pairs": {"train"},
    "pairs of domains": {"train"},
    "ms_marco": {"test", "train"},
    "tripclick": {"head", "tail"},
    "dpr": {"train", "test"},
    "sources": {"train", "dev", "test"},
}  # of the others those that are usual


def source_of(settings: dict[str, Any]) -> Any:
    return TypeAdapter(AnySource).validate_python(settings)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_splits_that_batches_are_made_of_fill_them() -> None:
    values = {"collection": "c", "output": "o", "split": "dev"}
    pairs = [PairsConfig(**values), PairsConfig(**values | {"split": ("test", "own")})]
    packing = PackConfig(pairs="p", output="o", packing={"batch_size": 200, "order": "random"})
    assert _sizes(pairs)[1] == Size(packed=frozenset({"dev", "test", "own"}))
    assert _sizes([packing])[1] == Size(documents=500, training_queries=500)  # two batches, and a quarter more
    train = {"batches": "b", "output": "o", "encoder": {"model": "m"}, "objective": {"kind": "contrastive"}}
    stepped = TrainConfig.model_validate(train | {"training": {"batches_per_step": 3}})
    assert _sizes([packing, stepped])[1] == Size(documents=750, training_queries=750)
    for factory, documents in (("IVF8,Flat", 96), ("PQ4", 256)):  # as many as an index learns from
        index = IndexConfig(index={"kind": "vectors", "vectors": "v", "factory": factory}, output="o")
        assert _sizes([index]) == (Size(documents=documents),) * 2


def test_toys_of_one_name_are_the_same() -> None:
    documents = make_documents("x", Size(documents=3, words=14))
    text = (
        "Latebazu0 kivafonu risotu vuniliru bidade pavona topa medakina pililovi kovufuta bovi kovufuta. Voti datukonu."
    )
    assert documents[0] == ("d0", "Solugo muvutozi 0", text)
    assert [each.title for each in documents[1:]] == ["Gise rule 1", "Nululoru surufe 2"]
    assert make_queries(documents, "train", Size(training_queries=2)) == [
        ("train0", "latebazu0 medakina kovufuta kovufuta train0", ((0, 1), (1, 0))),
        ("train1", "tinikono1 gutoga fufata kala train1", ((1, 1), (2, 0))),
    ]
    assert make_queries(documents, "dev", Size(queries=1)) == [
        ("dev0", "latebazu0 datukonu voti kovufuta dev0", ((0, 3), (1, 1), (2, 0))),
    ]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.usefixtures("here")
def test_a_toy_has_what_the_settings_of_a_source_name(name: str) -> None:
    source = source_of(SOURCES[name])
    for _ in range(2):  # once more changes nothing
        write_toy(source, "toy", SIZE)
    toy = source_of(toy_source(source, "toy"))
    collection = StoredCollection(make(Collect(CollectConfig(source=toy, output="collection"))))
    documents = collection.rows_of("documents").read(["id", "text", "domain"])
    texts, domains = documents["text"].to_pylist(), set(documents["domain"].to_pylist())
    assert len(texts) >= 30
    assert (domains == {"domain0", "domain1"}) == (name in ("tables", "pairs of domains"))
    if name in ("passages", "glob", "parts"):
        assert min(len(text.split()) for text in texts) > 200
        assert len(texts) == 60
        assert collection.count("queries") == 0
        return
    splits = set(collection.rows_of("judgments").read(["split"])["split"].to_pylist())
    assert splits == SPLITS.get(name, {"train", "dev", "test"})
    for split in splits:
        judgments, is_trained = collection.judgments(split), "train" in split
        assert set(judgments["relevance"].to_pylist()) == ({0, 1} if is_trained else {0, 1, 3})
        asked = len(judgments["query_id"].unique())
        assert name == "sources" or asked == (20 * len(domains) if is_trained else 6)
    assert len(texts) == 64 * (2 if name == "sources" else len(domains))
    asked = set(collection.rows_of("queries").read(["domain"])["domain"].to_pylist())
    assert asked == splits if name == "dpr" else asked <= domains


def test_a_rehearsal_has_a_folder_of_its_own(here: Path) -> None:
    (here / "toys" / "data").mkdir(parents=True)
    assert "holds other things than a rehearsal" in rehearse(here, {"corpus": COLLECTION})


@pytest.mark.parametrize("model", {str(known): model for model, known in hub_models().items()}.values())
def test_a_toy_model_is_loaded_from_the_mirror(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(model, 3, TEXTS, tmp_path / "models" / model)
    monkeypatch.setenv(HUB_MIRROR, str(tmp_path))
    settings = EncoderSettings(model=model, pooling="mean", dtype="float32")
    located = locate_model(model)
    assert "mirror" in located.origin
    assert find_tokenizer(model) == located.path
    encoder = load_encoder(settings, located.path, located.fingerprint)
    assert encoder.contract.dimension == 64
    assert encoder.contract.max_length >= 512
    [ids] = encoder.tokenize(TEXTS[:1], "document")["input_ids"].tolist()
    assert (ids[0], ids[-1]) == (0, 2)  # of the beginning and the end


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
    nothing_else = rf"{HUB_MIRROR} is .*files of the hub are read only from there, and .*models/org/name is no"
    with pytest.raises(UserError, match=nothing_else):
        locate_model("org/name")
    source = source_of(SOURCES["mteb"] | {"path": f"hf://datasets/mteb/x@{COMMIT}"})
    with pytest.raises(UserError, match=r"datasets/mteb/x is not a folder"):
        source.open()


EARLIER = {
    "papers/coder_zero_shot": ["papers/coder_ms_marco"], "papers/contextual_supervised": ["papers/contextual_large"],
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("papers/")])
def test_toys_can_stand_in_for_all_that_the_papers_recipes_name(name: str) -> None:
    recipe = load_recipe(name, [])
    *earlier, whole = parts_of(recipe)
    assert list(whole.stages) == list(recipe.stages)
    assert [part.recipe for part in earlier] == EARLIER.get(name, [])  # plain models that these make are toys
    assert (12 in whole.models.values()) == ("multi_layer" in name)  # layers that are named
    if name == "papers/multi_layer":  # another measure decides in the second epoch, of two batches as the first
        trained: list[Any] = [stage.config for stage in whole.stages.values() if isinstance(stage, Train)]
        configs = [each for each in trained if each.validation]
        assert {(each.validation.then.after_epoch, each.training.max_steps) for each in configs} == {(1, 4)}


def rehearse(folder: Path, stages: dict[str, Any], *arguments: str) -> str:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"description": "", "output": "runs/mine", "stages": stages}))
    done = CliRunner().invoke(app, ["rehearse", str(recipe), "--output", str(folder / "toys"), *arguments])
    assert done.exit_code == 2
    return " ".join(done.stderr.split())


COLLECTION = {"job": "collect", "source": SOURCES["beir"]}
MTEB = {"job": "mteb", "encoder": {"model": "org/name"}, "tasks": ["STS12"]}
VECTORS = {"job": "embed", "collection": "corpus", "encoder": {"model": "org/name"}}


@pytest.mark.parametrize(("stages", "message"), [
    ({"corpus": COLLECTION, "vectors": VECTORS}, "No toy can stand in for the model org/name"),
    ({"mteb": MTEB}, "mteb reads MTEB's own data sets"),
    ({"vectors": VECTORS | {"collection": "runs/other/corpus"}}, "vectors.collection is runs/other/corpus, which"),
])  # fmt: skip
def test_what_no_toy_can_stand_in_for_is_named_before_anything_is_made(
    stages: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in rehearse(tmp_path, stages)
    assert not (tmp_path / "toys").exists()


ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 600  # on two cores that others use too; by themselves three minutes

RECIPE = f"""
description: Every kind of stage that a paper's table needs.
output: runs/mine
resources: {{gpus_per_worker: 1}}
stages:
  corpus: {{job: collect, source: {{kind: dpr, path: /data/dpr, examples: {{train: nq-train.json}}}}}}
  pairs: {{job: pairs, collection: corpus}}
  packing: {{job: pack, pairs: pairs, packing: {{batch_size: 16, order: random}}, epochs: 40}}
  batches: {{job: filter, packing: packing, pairs: pairs, collection: corpus, judged_negatives: train,
            false_negatives: {{surrogate_score: false}}}}
  model:
    job: train
    batches: batches
    resources: {{workers: 8}}
    encoder: {{model: sentence-transformers/all-MiniLM-L6-v2}}
    objective: {{kind: contrastive}}
    training: {{epochs: 40, batches_per_step: 8, bf16: false, schedule: {{warmup_steps: 100}}}}
suite:
  evaluate: {{measures: [nDCG@10]}}
  collections:
    nfcorpus: {{source: {{kind: mteb, path: hf://datasets/mteb/nfcorpus@{COMMIT}, splits: [test]}}}}
  systems:
    BM25: {{bm25: {{}}}}
    before: {{encoder: {{model: sentence-transformers/all-MiniLM-L6-v2}}}}
    after: {{encoder: {{model: model}}, index: {{factory: "IVF1024,Flat"}}}}
    both: {{fuse: {{systems: [BM25, after]}}}}
"""


def test_a_recipe_runs_as_it_stands_to_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss", reason="FAISS is not installed")
    monkeypatch.setattr(Train, "execute", TrainHere.execute)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE)
    done = CliRunner().invoke(app, ["rehearse", str(recipe), "--output", str(tmp_path / "toys")])
    assert done.exit_code == 0, (done.output[-3000:], done.exception)
    stages = load_recipe(str(recipe), []).stages
    made = tmp_path / "toys" / "runs" / "mine"
    assert all(Artifact(str(made / stage)).rows for stage in stages)
    assert Artifact(str(made / "model")).manifest["facts"]["steps"] == 2
    assert f"Rehearsed: {len(stages)} stages of mine" in done.stdout
    assert "What this doesn't show: Whether the hub has these models and data sets, and" in done.stdout
    for line in (
        "training.max_steps: 2 (for None) in model",
        "resources.workers: 2 (for 8) in model",
        "training.schedule.warmup_steps: 1 (for 100) in model",
        "index.factory: IVF8,Flat (for IVF1024,Flat) in nfcorpus/after/index",
        f"resources.gpus_per_worker: 0 (for 1.0) in {len(stages)} stages, such as corpus",
    ):
        assert line in done.stderr


@pytest.mark.parametrize(("setting", "given", "rehearsed"), [
    ("model.resources.workers", 1, 1),
    ("model.resources.workers", 4, 2),
    ("model.resources.gpus_per_worker", 1, 0),
    ("pairs.resources.cpus_per_worker", 4, None),
    ("packing.epochs", 1, 1),
    ("packing.epochs", 2, 2),
    ("packing.epochs", 3, 2),
    ("model.training.epochs", 1, 1),
    ("model.training.batches_per_step", 2, 2),
    ("model.training.batches_per_step", 4, 2),
    ("model.training.schedule.warmup_steps", 1, 1),
    ("model.training.schedule.warmup_steps", 2, 1),
    ("model.training.schedule", "{warmup_ratio: 0.6}", ScheduleSettings(warmup_ratio=0.5)),
    ("model.objective.matryoshka", "[16, 32]", (16, 32)),
    ("model.objective.matryoshka", "[32, 64]", (32,)),
    ("model.encoder.truncate_dim", 64, 64),
    ("model.encoder.truncate_dim", 256, 64),
    ("model.training.max_steps", 400, 2),
    ("model.tracking.trackers", "[wandb]", ()),
    ("model.fewest_workers", 1, None),
    ("nfcorpus/after/index.index.factory", "IVF4,Flat", "IVF4,Flat"),
    ("nfcorpus/after/index.index.factory", "IVF8,Flat", "IVF8,Flat"),
    ("nfcorpus/after/index.index.factory", "IVF9_HNSW32,PQ8", "IVF8,PQ8"),
    ("nfcorpus/after/index.index.factory", "HNSW32,Flat", "HNSW32,Flat"),
])  # fmt: skip
def test_what_is_less_in_a_rehearsal(here: Path, setting: str, given: Any, rehearsed: Any) -> None:
    (here / "mine.yaml").write_text(RECIPE)
    stage, _, key = setting.partition(".")
    overrides = ["model.training.batches_per_step=2", "model.resources.workers=1", f"{setting}={given}"]
    *_, part = parts_of(load_recipe("mine.yaml", overrides))
    value: Any = part.stages[stage].config
    for name in key.split("."):
        value = getattr(value, name)
    assert value == rehearsed


@pytest.mark.parametrize(("output", "rehearsed"), [
    ("runs/mine", "runs/mine"), ("~/runs/mine", "run"), ("../mine", "run"), ("runs/../../mine", "run"), ("mine", "run"),
])  # fmt: skip
def test_nothing_is_written_where_a_real_run_lies(here: Path, output: str, rehearsed: str) -> None:
    (here / "mine.yaml").write_text(RECIPE)
    *_, part = parts_of(load_recipe("mine.yaml", [], output))
    assert {stage.config.output.removesuffix(f"/{name}") for name, stage in part.stages.items()} == {rehearsed}


def test_batches_without_a_training_have_a_collection_that_fills_them(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["rehearse", "random_batches", "--output", str(tmp_path)])
    assert done.exit_code == 0, (done.output[-3000:], done.exception)
    assert Artifact(str(tmp_path / "runs" / "random_batches" / "batches")).rows


# domains of real data are named, or encoders compared that must have learnt
NOT_OF_TOYS = {"revela_dual", "context_domains", "probe"}
TOYS = [name for name in recipe_names() if not name.startswith("suites/") and name not in NOT_OF_TOYS]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_recipe_that_comes_along_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="FAISS is not installed")
    command = [sys.executable, "-m", "raytriever", "rehearse", name, "--output", str(tmp_path / "toys")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-3000:])
    assert f"stages of {name}" in done.stdout or f"and {name} ran through" in done.stdout
