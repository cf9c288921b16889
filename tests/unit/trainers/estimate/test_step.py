"""What a step is estimated to hold, against what PyTorch allocates when the same step runs on real tensors."""

import gc
import json
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import TypeAdapter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from pipelines.batches import BatchReader
from pipelines.formats.sources import AnySource
from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.object_store import HUB_MIRROR
from raytriever.settings.configuration import apply_values, validate
from raytriever.stages.cost import Size
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.language_model import load_language_model
from retrieval.encoders.pretrained import BYTES_OF_A_TOKEN
from retrieval.encoders.specification import EncoderSettings
from retrieval.jobs.embed import Embed, EmbedConfig
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.retrieval.encoders.contextual.made_up import contextual
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.small_run import make_artifact, make_collection
from tests.unit.trainers.chunk_batches import store_chunk_batches
from tests.unit.trainers.pair_batches import pair, store_pairs
from trainers.engine.settings import OptimizerSettings
from trainers.estimate import recipe, step
from trainers.estimate.counting import Counting, attention_of_gpus
from trainers.estimate.machines import find_gpus
from trainers.estimate.made_up import MadeUpBatches, Shape, outlined_objective, token_counts
from trainers.estimate.outlines import outline, without_weights
from trainers.estimate.recipe import (
    EncoderCost,
    Estimating,
    count_forward,
    embedding_causes,
    encoder_cost,
    joined,
    published_size,
    shape_of,
    stored_size,
)
from trainers.estimate.step import StepCost, count_step, fake_objective, step_cost
from trainers.jobs.score import Score, ScoreConfig
from trainers.jobs.train import Train, TrainConfig
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.run_settings import RunSettings
from trainers.training_run import place

LAYERS = {"kind": "layers", "layers": [1, 2]}
PAIRS, TRIPLETS = Shape(24, 8, 24, 2), Shape(24, 8, 24, 1)
CHUNKS, LISTS = Shape(12, 20, 20), Shape(24, 8, candidates=50)
IN_BF16 = {"training": {"bf16": True}}
CACHED = {"chunk_size": 8, "gradient_cache": True}
LANGUAGE_MODEL = {"kind": "revela", "language_model": {"model": "lm"}}

# name: objective, form of a document's vectors, batches, other settings
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Shape, dict[str, Any]]] = {
    "contrastive": ({"kind": "contrastive"}, None, PAIRS, {}),
    "contrastive, distilled": ({"kind": "contrastive", "distillation": 0.5}, None, PAIRS, {}),
    "contrastive, cached": ({"kind": "contrastive", **CACHED}, None, PAIRS, {}),
    "contrastive, again": ({"kind": "contrastive"}, None, PAIRS, {"activation_checkpointing": True}),
    "contrastive, bf16": ({"kind": "contrastive"}, None, PAIRS, IN_BF16),
    "contrastive, LoRA, bf16": ({"kind": "contrastive"}, None, PAIRS, {"lora": {"rank": 4}} | IN_BF16),
    "adaptive_margin": ({"kind": "adaptive_margin"}, None, TRIPLETS, {}),
    "margin_mse": ({"kind": "margin_mse"}, None, TRIPLETS, {}),
    "multi_layer": ({"kind": "multi_layer", "training_form": "multi_vector"}, LAYERS, PAIRS, {}),
    "revela": (LANGUAGE_MODEL, None, CHUNKS, {}),
    "revela, frozen, bf16": (
        LANGUAGE_MODEL | {"language_model": {"model": "lm", "frozen": True}}, None, CHUNKS, IN_BF16
    ),
    "replug": ({"kind": "replug", "scores": "none"}, None, CHUNKS, {}),
    "contextual": ({"kind": "contextual", "context_documents": 6}, None, PAIRS, {}),
    "coder": ({"kind": "coder", "documents": "none", "smoothing": {}}, None, LISTS, {}),
}  # fmt: skip

LIKE_OTHERS = {
    "contrastive, again", "contrastive, bf16", "margin_mse", "multi_layer", "revela, frozen, bf16", "replug",
}  # fmt: skip


def slow_if(condition: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if condition else []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model("bert", folder / "encoder")
    save_tiny_model("qwen2", folder / "lm", language_model=True)
    return folder


def run_settings(name: str, models: Path) -> RunSettings:
    objective, form, _, others = KINDS[name]
    if "language_model" in objective:
        objective = objective | {"language_model": objective["language_model"] | {"model": str(models / "lm")}}
    training = {"bf16": False} | others.get("training", {})
    encoder = {"model": str(models / "encoder"), "pooling": "cls", "form": form}
    values = {"batches": "none", "encoder": encoder, "objective": objective, **others, "training": training}
    return TypeAdapter(RunSettings).validate_python(values)


def on_real_tensors(settings: RunSettings, shape: Shape) -> StepCost:
    """The peak by the profiler, which hears of every block that the allocator gives and takes."""
    objective = place(outlined_objective(settings, shape), settings, None)
    counting = Counting()
    gc.collect()  # else what other tests have left may be freed meanwhile, and counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cost = count_step(objective, settings, shape, counting)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return replace(cost, peak=peak + sum(each.nbytes for each in [*objective.parameters(), *objective.buffers()]))


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name in LIKE_OTHERS)) for name in KINDS])
def test_a_step_holds_what_is_estimated(name: str, models: Path) -> None:
    settings, shape = run_settings(name, models), KINDS[name][2]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    objective = fake_objective(settings, shape, fake)
    found = count_step(objective, settings, shape, Counting(fake))
    expected = on_real_tensors(settings, shape)
    assert found.peak == pytest.approx(expected.peak, rel=0.01)
    assert found.flops == pytest.approx(expected.flops, rel=0.01)
    assert found.optimizer == pytest.approx(2 * found.gradients, rel=0.01)  # AdamW's two moments
    assert expected.launches <= found.launches < 1.3 * expected.launches  # fake gradients are clipped one by one


def test_sharing_out_divides_what_stands(models: Path) -> None:
    settings = run_settings("contrastive", models)
    settings = settings.model_copy(update={"training": settings.training.model_copy(update={"batches_per_step": 4})})
    shared = settings.model_copy(update={"sharding": "sharded"})
    whole, found = (step_cost(each, PAIRS, workers=4) for each in (settings, shared))
    assert whole.sent == pytest.approx(2 * whole.gradients, rel=0.01)  # a ring sends each byte twice
    assert found.sent > whole.sent
    assert found.optimizer < whole.optimizer / 3
    assert found.weights < whole.weights / 2


@pytest.mark.parametrize(("kind", "batches", "sharding", "workers", "counted", "pieces"), [
    ("contrastive", 2, "replicated", 8, [32, 64], 1),  # a fourth of the rows on a rank
    ("contrastive", 6, "replicated", 2, [8, 16], 3),
    ("contrastive", 6, "sharded", 2, [8, 16], 3),
    ("contextual", 1, "replicated", 1, [1000], 1),
])  # fmt: skip
def test_what_is_linear_is_counted_at_smaller_sizes(
    models: Path, monkeypatch, kind: str, batches: int, sharding: str, workers: int, counted: list[int], pieces: int
) -> None:
    sizes, settings = list[int](), run_settings("contrastive", models).model_dump()
    settings |= {"objective": {"kind": kind, "chunk_size": 4}, "sharding": sharding}
    settings["training"]["batches_per_step"] = batches

    def count(_: Any, of: RunSettings, shape: Shape, __: Any) -> StepCost:
        sizes.append(shape.rows)
        assert of.training.batches_per_step == min(batches, workers)
        return StepCost(*[10 + shape.rows] * 10)

    monkeypatch.setattr(step, "fake_objective", lambda *_: SimpleNamespace(joins_step=False))
    monkeypatch.setattr(step, "count_step", count)
    found = step_cost(RunSettings.model_validate(settings), Shape(1000), workers)
    assert sizes == counted
    assert (found.peak, found.flops, found.launches, found.tokens) == (1010, *[1010 * pieces] * 3)
    assert found.sent == 1010 * (pieces if sharding == "sharded" else 1)


def test_a_step_is_counted_as_it_is_trained(models: Path) -> None:
    settings, shape = run_settings("contrastive", models), Shape(2, 3, 5, hard_negatives=2)
    objective = outlined_objective(settings, shape)

    def counted(**changes: Any) -> StepCost:
        training = settings.training.model_copy(update=changes)
        return count_step(objective, settings.model_copy(update={"training": training}), shape, Counting())

    kinds: list[Any] = ["adamw", "adamw_8bit", "radam"]
    plain, in_8_bits, radam = (counted(optimizer=OptimizerSettings(kind=kind)) for kind in kinds)
    assert in_8_bits.optimizer == pytest.approx(plain.optimizer / 4, rel=0.01)
    assert radam.launches > plain.launches
    assert counted(hard_negatives=1).tokens < plain.tokens


def test_ranks_that_share_a_batch_share_its_work(models: Path) -> None:
    settings = run_settings("contextual", models)
    alone, one_of_two, one_of_eight = (step_cost(settings, PAIRS, workers) for workers in (1, 2, 8))
    assert alone.flops / 2 < one_of_two.flops < 0.7 * alone.flops  # fewer rows are padded to the longest, too
    assert alone.flops / 8 < one_of_eight.flops < 1.3 * alone.flops / 8  # no rank has the others' texts


def test_texts_that_nobody_has_measured_have_an_assumed_length(tmp_path: Path) -> None:
    values = {"batches": "b", "output": str(tmp_path), "objective": {"kind": "contrastive"}, "encoder": {"model": "m"}}
    config = validate(TrainConfig, values, "train")
    known = shape_of(Size(rows=8, query_bytes=46, document_bytes=460, negatives=3), config)
    assert astuple(known) == pytest.approx((8, 10, 100, 3, 0))
    unknown = shape_of(Size(rows=8), config)
    assert astuple(unknown) == pytest.approx((8, 100 / 4.6, 600 / 4.6, 0, 0))


def test_a_run_on_stored_batches_is_of_their_size(models: Path, tmp_path: Path, monkeypatch) -> None:
    batches = store_pairs(tmp_path / "batches", [[pair(4 * batch + row) for row in range(4)] for batch in range(3)])
    values = {
        "batches": batches,
        "encoder": {"model": str(models / "encoder"), "pooling": "cls"},
        "objective": {"kind": "contrastive"},
        "output": str(tmp_path / "model"),
        "resources": {"workers": 1, "gpus_per_worker": 1},
    }
    found = []
    monkeypatch.setattr(recipe, "step_cost", lambda *_: StepCost(*[7] * 10))
    for changes in ({}, {"checkpoints_kept": 5}, {"training.max_steps": 2}, {"training.batches_per_step": 2}):
        config = validate(TrainConfig, apply_values(values, {"checkpoints_kept": 2} | changes, "train"), "train")
        estimating = Estimating({"train": Train(config)}, find_gpus("h100", 1))
        estimating.add("train")
        found.append(estimating.found["train"])
    assert [each.steps for each in found] == [3, 3, 2, 1]
    assert found[1].made.disk - found[0].made.disk == 3 * 3 * 4 * 7  # weights and two moments
    batch = stored_size(batches, Size())
    assert (batch.rows, batch.batches, batch.negatives) == (4, 3, 0)
    texts = BatchReader(batches).read(0, 0)["document"].to_pylist()
    assert batch.document_bytes == round(sum(len(text.encode()) for text in texts) / 4)


def test_what_is_counted_of_a_computation() -> None:
    with Counting() as counting:
        left = torch.ones(4, 8)
        product = left @ left.view(8, 4)
        room = torch.empty(16)
    assert (counting.flops, counting.launches) == (2 * 4 * 8 * 4, 2)
    assert counting.alive == counting.peak == left.nbytes + product.nbytes + room.nbytes
    del product
    assert counting.alive == left.nbytes + room.nbytes
    assert (counting.mark(), counting.mark()) == (256, 192)
    _, peak = count_forward(torch.nn.Linear(8, 4, bias=False), torch.ones(16, 8))
    assert peak == 2 * (8 * 4 + 16 * 8 + 8 * 4 + 16 * 4)  # bfloat16: weights, copies of texts and weights, vectors
    query = FakeTensorMode().from_tensor(torch.ones(1, 2, 8, 4))
    with attention_of_gpus(), torch.autocast("cpu", torch.bfloat16):
        assert functional.scaled_dot_product_attention(query, query, query).dtype == torch.bfloat16


def test_made_up_texts_are_of_the_shape_and_all_different() -> None:
    counts = token_counts(1001, 80)
    assert counts == token_counts(1001, 80) != sorted(counts)
    assert np.mean(counts) == pytest.approx(80, rel=0.01)
    assert np.std(np.log(counts)) == pytest.approx(0.5, rel=0.02)
    assert min(token_counts(9, 0.1)) == 1
    batches = MadeUpBatches(Shape(6, 3, 5, hard_negatives=2, candidates=4), 2, ContrastiveSettings())
    rows = [row for index in range(2) for row in batches.read(0, index).to_pylist()]
    texts = [text for row in rows for text in (row["query"], row["document"], *row["hard_negatives"])]
    assert sorted(int(text.split()[0]) for text in texts) == list(range(2 * 6 * 4))
    assert [len(row["query"].split()) for row in rows[:6]] == token_counts(6, 3)
    documents = [row["document"] for row in rows[:6]] + [text for row in rows[:6] for text in row["hard_negatives"]]
    assert [len(text.split()) for text in documents] == token_counts(18, 5)
    assert {len(row[name]) for row in rows for name in ("hard_negatives", "hard_negative_scores")} == {2}
    assert [row["candidate_relevance"] for row in rows] == [[1, 0, 0, 0]] * 12
    assert {len(row["candidate_rows"]) for row in rows} == {4}
    assert len({tuple(row["candidate_rows"]) for row in rows}) == 12


def test_scoring_reads_each_chunk_once_and_behind_each_of_its_batch(models: Path, tmp_path: Path, monkeypatch) -> None:
    batches = store_chunk_batches(tmp_path / "chunks", epochs=2)  # of 3 batches of 4
    model, asked = {"model": str(models / "lm"), "revision": "0" * 40}, set[Any]()
    monkeypatch.setattr(recipe, "outline", lambda *of: asked.add(of) or outline(*of))
    values = {"batches": batches, "language_model": model, "output": str(tmp_path / "made")}
    stage, h100 = Score(validate(ScoreConfig, values, "score")), find_gpus("h100", 1)
    found = []
    for machines in (h100, find_gpus("h100", 2), replace(h100, peak=1e-9), replace(h100, peak=2e-9)):
        estimating = Estimating({"score": stage}, machines)
        estimating.add("score")
        found.append(estimating.found["score"])
    assert [list(each.causes) for each in found] == [["launches"]] * 2 + [["arithmetic"]] * 2
    assert found[0].seconds == pytest.approx(2 * found[1].seconds)
    assert found[2].seconds == pytest.approx(2 * found[3].seconds)
    with without_weights("meta"):
        reader, _ = load_language_model(models / "lm")
    texts = torch.ones(4, 7, dtype=torch.int64)  # as many tokens as their bytes make, on average
    counting, peak = count_forward(reader, input_ids=texts, use_cache=False)
    assert found[0].seconds / (2 * 3) / (2 * 4) / 14e-6 == pytest.approx(counting.launches)
    assert found[0].peak == peak
    assert {each.made.disk for each in found} == {4 * 2 * 3 * 4 * 4}
    assert asked == {tuple(model.values())}


def test_what_inputs_hold_is_added_up(tmp_path: Path) -> None:
    one = Size(documents=3, document_bytes=10, splits={"a": (1, 2)}, disk=5)
    other = Size(documents=2, rows=7, splits={"b": (3, 4)}, disk=6)
    together = Size(documents=3, document_bytes=10, rows=7, splits={"a": (1, 2), "b": (3, 4)}, disk=11)
    assert joined([one, other]) == together
    sources = {
        "a": {"kind": "mteb", "path": f"hf://datasets/mteb/nfcorpus@{'0' * 40}"},
        "b": {"kind": "trec", "path": "data/msmarco", "documents": "d", "qrels": {"dev": "q"}},
        "c": {"kind": "beir", "path": "data/own"},
    }
    source = TypeAdapter[Any](AnySource).validate_python({"kind": "sources", "sources": sources})
    found = published_size(SimpleNamespace(source=source))
    splits = {"test": (323, 323), "dev": (55_578, 59_273)}
    lengths = {"document_bytes": found.document_bytes, "query_bytes": found.query_bytes}
    assert found == Size(3_633 + 8_841_823, splits=splits, disk=found.texts, **lengths)
    assert found.documents * found.document_bytes == pytest.approx(6 * (3_633 * 232 + 8_841_823 * 56))
    assert found.queries() * found.query_bytes == pytest.approx(6 * (323 * 3 + 55_578 * 6))
    twice = SimpleNamespace(
        source=source.model_copy(update={"sources": {"x": source.sources["a"], "y": source.sources["a"]}})
    )
    assert published_size(twice).splits == {"test": (646, 646)}
    made = StoredCollection(make_collection(tmp_path))
    texts = made.rows_of("documents").read(["text"])["text"].to_pylist()
    of_text = sum(map(len, texts)) / len(texts)
    held = Size(54, of_text, 7 + 44 / 54, {"train": (48, 48), "test": (6, 6)}, disk=made.bytes)
    assert stored_size(made.uri, one) == held
    asked, judged = [("q", "what", "", [])], [("q", "d0", 1, "test"), ("q", "d1", 1, "test")]
    texts = pa.Table.from_pylist([{"id": f"d{row}", "title": "", "text": "x", "domain": ""} for row in range(2)])
    assert stored_size(store(tmp_path / "several", [texts], asked, judged), one).splits == {"test": (1, 2)}
    pairs = Artifact(make_artifact(tmp_path / "pairs", "pairs", {}, {}, {"x": "12345"}, 7))
    assert stored_size(pairs.uri, one) == replace(one, pairs=7, domains=(7,), disk=pairs.bytes)


@pytest.mark.parametrize(("files", "of_token", "workers", "cause", "seconds"), [
    (8, 1e-6, 1, "tokenizing", 1.65495),  # by two threads
    (8, 2e-6, 1, "GPUs", 3.2768),
    (8, 2e-6, 8, "the longest task", 26.2144),  # eight on a GPU take eight times as long, and are too many
    (64, 1e-9, 8, "tokenizing", 2.20660),  # by one core and a half
])  # fmt: skip
def test_embedding_is_bound_by_its_slower_half(files, of_token, workers, cause: str, seconds: float) -> None:
    texts = files * 16_384  # of a hundred tokens, vectors of a hundred numbers
    found = embedding_causes([(texts, 460)], EncoderCost(of_token, 100), find_gpus("h100", 8), workers)
    assert found == pytest.approx({"one task": 5, cause: seconds, "a node's reading": texts * 660 / 2e9}, rel=1e-4)


@pytest.mark.parametrize(("share", "bytes_of_a_text", "tokens", "cause", "seconds"), [
    (1, 100, 32, "GPUs", 1),
    (0, 500, 128, "GPUs", 5),
    (0.25, 9_000, 512, "the longest task", 4 * 90),  # four on a GPU, for one task
])  # fmt: skip
def test_an_encoder_is_counted_once_with_texts_of_about_the_length(
    tmp_path: Path, monkeypatch, share: float, bytes_of_a_text: int, tokens: int, cause: str, seconds: float
) -> None:
    asked: list[int] = []
    cost = EncoderCost(BYTES_OF_A_TOKEN / 1e4, 7, peak=5)
    monkeypatch.setattr(recipe, "encoder_cost", lambda *given: asked.append(given[-1]) or cost)
    values = {"collection": "c", "encoder": {"model": str(tmp_path)}, "output": str(tmp_path), "parts": ["documents"]}
    stage = Embed(validate(EmbedConfig, values | {"resources": {"gpus_per_worker": share}}, "embed"))
    estimating = Estimating({}, find_gpus("h100", 1))
    size = Size(documents=100, document_bytes=bytes_of_a_text, splits={"dev": (9, 9)})
    found = [estimating._embedding(stage, size) for _ in range(2)][1]
    assert asked == [tokens]
    assert (found.made.disk, found.made.dimension, found.peak) == (100 * (2 * 7 + 20), 7, 5)
    assert found.causes[cause] == pytest.approx(seconds)


def test_a_static_encoders_stages_are_not_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "stored_size", lambda *_: Size(disk=9))
    first = {"collection": "c", "encoder": {"model": "m", "static": True}, "output": "o"}
    again = {"collection": "c", "encoder": {"model": "o"}, "output": str(tmp_path)}
    stages = {str(each): Embed(validate(EmbedConfig, each, "embed")) for each in (first, again)}
    estimating = Estimating(stages, find_gpus("h100", 1))
    for name in stages:
        estimating.add(name)
        assert (estimating.found[name].made.disk, estimating.found[name].causes) == (0, {})


def test_an_encoder_is_counted_as_it_is_used(models: Path, tmp_path: Path) -> None:
    """Without its tokenizer; merged with an adapter; behind a context."""
    contextual().save(tmp_path)
    encoder = {"model": str(models / "encoder"), "pooling": "cls", "tokenizer": "org/none"}
    values = {"batches": "b", "encoder": encoder, "objective": {"kind": "contrastive"}, "output": "o"}
    maker = Train(validate(TrainConfig, values | {"lora": {"rank": 4}, "training": {"bf16": False}}, "train"))
    used = EncoderSettings.model_validate(encoder), EncoderSettings(model=str(tmp_path))
    plain, trained, behind = (
        encoder_cost(settings, made_by, find_gpus("h100", 1), 4096)
        for settings, made_by in ((used[0], None), (used[0], maker), (used[1], None))
    )
    assert plain == trained
    assert (behind.dimension, behind.of_token > plain.of_token) == (32, True)


def test_a_peak_is_weights_gradients_states_and_what_is_left() -> None:
    cost = StepCost(2**30, 2**29, 2**31, 2**32, *[0] * 6)
    assert cost.parts == "weights 1.0, gradients 0.5, optimizer states 2.0, activations 0.5"
    assert replace(cost, peak=2**30).parts.endswith("activations 0.0")


@pytest.mark.parametrize("found_in", ["mirror", "cache"])
def test_a_models_configuration_is_that_of_the_mirror_or_else_of_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found_in: str
) -> None:
    name = f"own/{tmp_path.name}"  # outlines are made once a process
    cached = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
    folders = (tmp_path / "mirror" / "models" / name, cached / "snapshots" / "abc", cached / "snapshots" / "def")
    for layers, folder in enumerate(folders, start=1):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "bert", "num_hidden_layers": layers}))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    if found_in == "mirror":
        monkeypatch.setenv(HUB_MIRROR, str(tmp_path / "mirror"))
    found = [json.loads((outline(name, revision).path / "config.json").read_text()) for revision in (None, "def")]
    assert [each["num_hidden_layers"] for each in found] == {"mirror": [1, 1], "cache": [2, 3]}[found_in]
