"""The command: what it says of a recipe, and of what it can't."""

import shutil
import tempfile
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.settings.configuration import validate
from raytriever.settings.recipe import load_recipe
from raytriever.stages.cost import Size
from raytriever.stages.recipe_run import recipe_stages
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.small_run import make, make_collection
from trainers.estimate import command
from trainers.estimate.machines import GPUS, Machines, find_gpus
from trainers.estimate.outlines import _outlines, outline
from trainers.estimate.recipe import Estimate, Estimating, on_gpus, seconds_of
from trainers.estimate.step import StepCost
from trainers.jobs.train import TrainConfig

RECIPE = """
stages:
  corpus:
    job: collect
    source:
      kind: trec
      path: data/msmarco
      documents: collection.tsv
      queries: queries.train.tsv
      qrels: {train: qrels.train.tsv}
  pairs: {job: pairs, collection: corpus}
  packing: {job: pack, pairs: pairs, packing: {batch_size: 64, order: random}}
  batches: {job: filter, packing: packing, pairs: pairs, collection: corpus, false_negatives: {surrogate_score: false}}
  model:
    job: train
    batches: batches
    encoder: {model: tiny, pooling: mean, normalize: true}
    objective: {kind: contrastive}
  vectors: {job: embed, collection: corpus, encoder: {model: model}}
  index: {job: index, index: {kind: vectors, vectors: vectors}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    save_tiny_model("bert", tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("tiny", str(tmp_path / "tiny")))
    monkeypatch.chdir(tmp_path)
    return "recipe.yaml"


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *arguments])
    return result.exit_code, result.output


def test_it_says_what_stages_take(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _outlines()
    monkeypatch.setattr(tempfile, "tempdir", "tmp")
    Path("tmp").mkdir()
    code, found = said(recipe, "--gpu", "a100", "--gpus", "2", "--set", "model.training.batches_per_step=2")
    assert code == 0
    lines = {line.split()[0]: line for line in found.splitlines() if line}
    assert {"corpus", "pairs", "packing", "batches", "model", "vectors", "index", "all"} < lines.keys()
    assert "4,162 steps" in found  # 532,761 pairs in batches of 64, two a step
    assert "It fits: " in found
    assert not list(Path("tmp").iterdir())  # the models' outlines go when the process ends
    code, of_t4 = said(recipe, "--gpu", "t4", "--gpus", "2")  # which has no bfloat16, that this processor may have
    assert code == 0
    assert "trained, bfloat16 autocast." in found
    assert "trained, float32." in of_t4
    assert lines["vectors"].split()[-2:] == ["785", "MB"]  # 8,841,823 documents and 502,939 queries, 32 numbers each


def test_a_collection_that_nobody_has_counted_yet_is_to_be_made_first(recipe: str, tmp_path: Path) -> None:
    made = make_collection(tmp_path / "data")
    source = f"corpus.source={{kind: beir, path: {tmp_path}/data/source}}"
    code, found = said(recipe, "--set", source)
    assert code == 0
    lines = {line.split()[0]: line for line in found.splitlines() if line}
    assert all("?" in lines[name] for name in ("corpus", "pairs", "packing", "batches", "model", "index", "all"))
    assert found.endswith(f"Make it first:\n  raytriever run recipe.yaml '--set={source}' --until corpus\n")
    assert " 7 steps." in said(recipe, "--set", source, "--set", "model.training.max_steps=7")[1]
    shutil.copytree(made, "runs/recipe/corpus")
    make(recipe_stages(load_recipe(recipe, [source], None))["pairs"])
    code, found = said(recipe, "--set", source, "--set", "packing.packing.batch_size=8")
    assert code == 0
    assert "?" not in found
    assert "Not counted" not in found
    assert " 6 steps." in found
    shutil.copytree(tmp_path / "data/source", "others")
    Path("others/queries.jsonl").write_text('{"_id": "q0", "text": "another"}\n')
    Path("others/qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq0\td0\t1\n")
    for other in (source.replace(f"{tmp_path}/data/source", "others"), source.replace("}", ", domain_key: x}")):
        code, found = said(recipe, "--set", other)
        assert "made them, as far as is known here: runs/recipe/corpus, runs/recipe/pairs." in found
        assert f"raytriever run recipe.yaml '--set={other}' --until corpus\n" in found
    shutil.rmtree(tmp_path / "data/source")
    found = said(recipe, "--set", source, "--set", "packing.packing.batch_size=8")[1]
    assert " 6 steps." in found
    assert "Sizes are those of runs/recipe/corpus, whatever was collected there: the source isn't at hand." in found
    found = said(recipe, "--set", "corpus.source={kind: beir, path: data/msmarco}")[1]  # whose sizes are known
    assert "made them, as far as is known here: runs/recipe/corpus" in found
    assert " 6 steps." not in found


RANKED = """
stages:
  corpus:
    job: collect
    source: {kind: trec, path: data/msmarco, documents: collection.tsv, queries: queries.tsv, qrels: {dev: qrels.tsv}}
  chunks: {job: chunk, collection: corpus, chunking: {max_words: 40}}
  words: {job: index, index: {kind: lexical, collection: corpus}}
  vectors: {job: embed, collection: corpus, encoder: {model: sentence-transformers/all-MiniLM-L6-v2, revision: abc}}
  index: {job: index, index: {kind: vectors, vectors: vectors}}
  by_words: {job: search, index: words, collection: corpus, split: dev, top_k: 1000}
  by_vectors: {job: search, index: index, collection: corpus, vectors: vectors, split: dev, top_k: 1000}
  fused: {job: fuse, runs: {words: by_words, vectors: by_vectors}}
  reranked: {job: rerank, run: fused, vectors: vectors, collection: corpus, depth: 100}
  lists: {job: mine, run: by_words, collection: corpus, split: dev, number: 7}
  evaluation:
    {job: evaluate, collection: corpus, split: dev, runs: {fused: fused, reranked: reranked, vectors: by_vectors}}
"""


RANKED_ON_EIGHT = """\
ranked.yaml on 8 H100s: counted and modelled, not measured

stage             time          bound by  GPU memory     disk
corpus           5.8 s             cores              1.25 GB
chunks           3.0 s  the longest task              1.25 GB
words           15.9 s  the longest task              2.23 GB
index           14.9 s  a node's reading              13.6 GB
by_words        21.1 s             cores              2.89 GB
by_vectors  2 min 03 s             cores              2.89 GB
fused           11.2 s  the longest task              2.89 GB
reranked         6.0 s  a node's reading               289 MB
lists           50.8 s          one task              4.67 MB
evaluation  1 min 04 s  the longest task                 0 MB""".splitlines()


def test_sizes_flow_from_stage_to_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranked.yaml").write_text(RANKED)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("ranked.yaml", [], None)
    estimating, asked = Estimating(recipe_stages(recipe), find_gpus("h100", 8)), list[Any]()
    monkeypatch.setattr("trainers.estimate.recipe.outline", lambda *of: asked.append(of) or outline(*of))
    for name in recipe.stages:
        estimating.add(name)
    assert asked == [("sentence-transformers/all-MiniLM-L6-v2", "abc")]
    made = {name: found.made for name, found in estimating.found.items()}
    documents, queries = 8_841_823, 55_578
    assert (made["corpus"].documents, made["corpus"].queries()) == (documents, queries)
    assert made["chunks"].documents == pytest.approx(1.75 * documents, rel=0.02)  # of 56 words, in four fifths of 40
    assert made["vectors"].dimension == 384
    assert made["index"].disk == 4 * 384 * documents
    assert made["index"].shards == 38  # a third of a GiB each
    assert made["words"].shards == 34
    assert made["by_words"].results == made["fused"].results == 1_000 * queries
    assert made["reranked"].disk == 52 * 100 * queries
    assert made["lists"].disk == 12 * 7 * queries
    _, text = said("ranked.yaml")
    assert [line for line in text.splitlines() if not line.startswith(("vectors", "all"))] == RANKED_ON_EIGHT
    seconds = {name: found.seconds for name, found in estimating.found.items()}
    assert seconds["by_vectors"] > 5 * seconds["by_words"] > 0
    assert seconds["evaluation"] == pytest.approx(0.36e-3 * 3 * queries, rel=0.2)


def test_the_queries_of_named_splits_are_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranked.yaml").write_text(RANKED)
    monkeypatch.chdir(tmp_path)
    disk = {}
    for splits in ("[]", "[dev]", "[test]", "[dev, test]"):
        overrides = ["corpus.source.qrels={dev: d.tsv, test: t.tsv}", f"vectors.splits={splits}"]
        stages = recipe_stages(load_recipe("ranked.yaml", overrides, None))
        estimating = Estimating(stages, find_gpus("h100", 8))
        for name in ("corpus", "vectors"):
            estimating.add(name)
        disk[splits] = estimating.found["vectors"].made.disk
    assert disk["[test]"] - disk["[dev]"] == (6_980 - 55_578) * (2 * 384 + 20)
    assert disk["[dev, test]"] == disk["[]"] == disk["[dev]"] + 6_980 * (2 * 384 + 20)


SLICED = ("training.batches_per_step=4", "fewest_workers=1", "resources.workers=2")


@pytest.mark.parametrize(("arguments", "problem"), [
    (["--gpu", "h10"], r"--gpu h10: no such GPU is known. Did you mean 'h100'"),
    (["--gpu", "mine"], "--gpu mine: no such GPU is known. Allowed: h100, h200, b200, a100, a100-40gb, l40s, l4,"),
    (["--gpu", "t4", "--set", "model.training.bf16=true"], "model: training.bf16 is on, and a t4 has no bfloat16"),
    (["--gpus=3", "--set=model.training.batches_per_step=2"], "batches_per_step 2 and 3 ranks don't divide"),
    (["--gpus=128", *(f"--set=model.{each}" for each in SLICED)],
     "model: Batches of 64 rows (runs/recipe/batches) can't be cut into 3 equal slices, as 12"),
    (["--gpus=2", "--set=model.objective={kind: replug, scores: runs/scores}", "--set=model.validation=null"],
     "model: 2 workers (resources.workers) would cut each batch into 2 slices"),
    (["--gpus=16", "--set=packing.packing.batch_size=51200", "--set=model.training.batches_per_step=16"],
     "model: Epoch 0 has 11 stored batches, fewer than the 16 of one step (batches_per_step)."),
    (["--set", "model.encoder.model=org/unknown"], "model: The sizes of the model 'org/unknown' are unknown"),
    (["--set", "model.batches=runs/none"], "model: The size of the batches in runs/none is unknown"),
])  # fmt: skip
def test_what_it_cannot_say(recipe: str, arguments: list[str], problem: str) -> None:
    code, found = said(recipe, *arguments)
    assert code == 2
    assert problem in " ".join(found.split())


def test_what_gpus_hold_compute_and_send() -> None:
    totals = [sum(column) for column in zip(*GPUS.values(), strict=True)]  # of their makers' sheets
    assert totals == pytest.approx([674.0, 5570, 505.8, 2694])
    few, many = find_gpus("t4", 6), find_gpus("h100", 9)  # in one node and in two
    assert [(each.nodes, each.slots) for each in (few, many)] == [(1, 72), (2, 192)]
    assert few.needs(10 * 2**30) == pytest.approx(12)
    operations = [each.operations(bf16=bf16) / 1e12 for each in (few, many) for bf16 in (True, False)]
    assert operations == pytest.approx([3.24, 3.24, 395.6, 26.8])
    assert [each.exchange(32e9) for each in (few, many)] == pytest.approx([2, 5.12])


CONTRASTIVE = {"kind": "contrastive"}
CACHED = CONTRASTIVE | {"gradient_cache": True}
RUN = {"batches": "b", "output": "o", "encoder": {"model": "m"}, "objective": CONTRASTIVE}
REVELA = {"kind": "revela", "language_model": {"model": "lm"}}
IN_8_BITS = {"optimizer": {"kind": "adamw_8bit"}}
CACHE, CHECKPOINTS = ("objective.gradient_cache", True), ("activation_checkpointing", True)
SHARDED, CHUNKS = ("sharding", "sharded"), ("objective.chunk_tokens", 4096)


ONE, TWO, T4 = find_gpus("h100", 1), find_gpus("h100", 2), find_gpus("t4", 1)
OF_LANGUAGE_MODEL = ("objective.language_model.activation_checkpointing", True)


@pytest.mark.parametrize(("machines", "changed", "expected"), [
    (TWO, {}, [CACHE, CHECKPOINTS, SHARDED, CHUNKS]),
    (TWO, {"training": IN_8_BITS}, [CACHE, CHECKPOINTS, CHUNKS]),
    (ONE, {"training": {"bf16": False}}, [CACHE, CHECKPOINTS, ("training.bf16", True), CHUNKS]),
    (T4, {"objective": CACHED | {"chunk_size": 3}}, [CHECKPOINTS, ("objective.chunk_size", 1)]),
    (ONE, {"objective": CONTRASTIVE | {"chunk_tokens": 1000}}, [CACHE, CHECKPOINTS, ("objective.chunk_tokens", 250)]),
    (ONE, {"objective": REVELA}, [CACHE, CHECKPOINTS, OF_LANGUAGE_MODEL, CHUNKS]),
])  # fmt: skip
def test_what_saves_memory_is_proposed_the_cheapest_first(machines: Machines, changed: Any, expected: Any) -> None:
    config = on_gpus(SimpleNamespace(asked=validate(TrainConfig, RUN | changed, "train")), machines)
    found = list(command.remedies(config, machines))
    words = [f"{key}={str(value).lower()}" for key, value in expected]
    assert [said for said, _ in found] == [" ".join(words[:number]) for number in range(1, len(words) + 1)]
    for number, (_, settings) in enumerate(found, start=1):
        dumped = settings.model_dump()
        assert [(key, reduce(getitem, key.split("."), dumped)) for key, _ in expected[:number]] == expected[:number]


@pytest.mark.parametrize(
    ("peaks", "told"),  # GiB that a step holds at the peak, with each thing more that saves memory
    [
        ([20], ["  It fits: with CUDA's context and fragmentation 23.0 of 23 GiB."]),
        (
            [21, 20.5, 20],
            [
                "  It doesn't fit: with CUDA's context and fragmentation 24.1 of 23 GiB. With",
                "    objective.gradient_cache=true: 23.6 GiB",
                "    objective.gradient_cache=true activation_checkpointing=true: 23.0 GiB, which fits",
            ],
        ),
        (
            [21, 21, 21, 21],
            [
                "  It doesn't fit: with CUDA's context and fragmentation 24.1 of 23 GiB. With",
                "    objective.gradient_cache=true: 24.1 GiB",
                "    objective.gradient_cache=true activation_checkpointing=true: 24.1 GiB",
                "    objective.gradient_cache=true activation_checkpointing=true objective.chunk_tokens=4096: 24.1 GiB",
                "  What is left: smaller batches, shorter texts, an adapter (lora), larger GPUs.",
            ],
        ),
    ],
)
def test_a_step_is_told_with_what_makes_it_fit(peaks: list[float], told: list[str], monkeypatch) -> None:
    of_step = {"flops": 3.956e12, "launches": 1000, "sent": 1.5e9, "tokens": 4950}
    held = {"weights": 2**30, "gradients": 2**30, "optimizer": 2**31}
    costs = [
        StepCost(**held, peak=peak * 2**30, **of_step, parameters=110e6, trained=86e6)  # type: ignore[arg-type]
        for peak in peaks
    ]
    later = iter(costs[1:])
    monkeypatch.setattr(command, "step_cost", lambda *_: next(later))
    stage: Any = SimpleNamespace(asked=validate(TrainConfig, RUN, "train"))
    machines = replace(find_gpus("h100", 1), gib=23)
    exact = validate(TrainConfig, RUN | {"training": {"bf16": False}}, "train")
    assert seconds_of(costs[0], exact, machines)["arithmetic"] == pytest.approx(3.956 / (67 * 0.4))
    each = Estimate(stage, Size(rows=8), step=costs[0], steps=1234)
    assert list(command._of_training("model", each, costs[0], machines)) == [
        "",
        f"model: {peaks[0]:.1f} GiB at the peak: weights 1.0, gradients 1.0, optimizer states 2.0, activations"
        f" {peaks[0] - 4:.1f}.",
        "  A step on each GPU: 3.96 TFLOP, 1,000 launches, 1.5 GB sent, 4,950 tokens; arithmetic 0.01 s, launches 0.014"
        " s, tokenizing 0.005 s. 1,234 steps.",
        "  110 million weights, 86 million trained, bfloat16 autocast.",
        *told,
    ]
