"""Training static encoders: against sparse Adam written out, resumed, refused, and by the stages themselves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from pipelines.batches import epoch_permutation
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.stages.ray_session import RaySession
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Stage
from retrieval.encoders import specification
from retrieval.encoders.towers import Towers
from retrieval.jobs.embed import Embed, EmbedConfig
from retrieval.jobs.index import Index, IndexConfig, VectorIndexSettings
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking
from retrieval.vectors import StoredVectors
from tests.unit import small_run
from tests.unit.retrieval.encoders.tiny_models import load_tiny
from tests.unit.trainers.tiny import Reports, TinyBatches, assert_same, tiny_settings, weights_of
from trainers.engine.checkpoint import Checkpoints
from trainers.engine.loop import train
from trainers.engine.optimization import build_optimizer
from trainers.engine.settings import OptimizerSettings, ScheduleSettings
from trainers.jobs.train import Train, TrainConfig
from trainers.objective import build_objective
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.run_settings import RunSettings
from trainers.training_run import load_for_training

RATE = 0.01


def objective_over(folder: Path, **settings: Any) -> Contrastive:
    encoder = load_tiny(folder, static=True, max_length=12)
    found = build_objective(ContrastiveSettings(**settings), Towers(encoder, encoder))
    assert isinstance(found, Contrastive)
    return found


def written_out(folder: Path, limit: float | None) -> tuple[Tensor, list[float]]:
    """The table after three steps of a batch each: means, loss, clipping and lazy Adam by their formulas."""
    encoder = load_tiny(folder, static=True, max_length=12)
    table = encoder.transformer.embedding.weight.detach().double().clone()
    first, second, norms = torch.zeros_like(table), torch.zeros_like(table), []
    for step, number in enumerate(epoch_permutation(0, 0, 3).tolist(), 1):
        rows = TinyBatches().read(0, number).to_pydict()
        weight = table.clone().requires_grad_()
        documents = rows["document"] + [text for pool in rows["hard_negatives"] for text in pool]

        def vectors(texts: Sequence[str], weight: Tensor = weight) -> Tensor:
            ids = encoder.tokenize_ids(texts, "query")
            return normalize(torch.stack([weight[row].mean(dim=0) for row in ids]), dim=-1)

        scores = vectors(rows["query"]) @ vectors(documents).T / 0.05
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        for row, columns in enumerate(rows["masked"]):
            mask[row, columns] = True
        cross_entropy(scores.masked_fill(mask, -torch.inf), torch.arange(len(scores))).backward()
        assert weight.grad is not None
        norm = weight.grad.norm().item()
        norms.append(norm)
        used = weight.grad.abs().sum(dim=1) > 0
        gradient = weight.grad[used] * (1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        first[used] = 0.9 * first[used] + 0.1 * gradient
        second[used] = 0.999 * second[used] + 0.001 * gradient**2
        rate = RATE * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        table[used] -= rate * first[used] / (second[used].sqrt() + 1e-8)
    return table, norms


@pytest.mark.parametrize(("limit", "chunks"), [(None, None), (0.5, 2)])
def test_steps_are_those_of_lazy_adam_written_out(tiny_encoder: Path, limit: float | None, chunks: int | None) -> None:
    start = load_tiny(tiny_encoder, static=True).transformer.embedding.weight.detach().clone()
    objective = objective_over(tiny_encoder, chunk_size=chunks, gradient_cache=chunks is not None)
    points: list[Any] = []
    optimizer = OptimizerSettings(learning_rate=RATE, max_grad_norm=limit)
    schedule = ScheduleSettings(kind="constant")
    settings = tiny_settings(epochs=1, batches_per_step=1, optimizer=optimizer, schedule=schedule)
    train(objective, TinyBatches(counts=(3,)), settings, callbacks=[Reports(on_step=points.append)])
    expected, norms = written_out(tiny_encoder, limit)
    found = objective.query_encoder.transformer.embedding.weight.detach()
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    assert [point["gradient_norm"] for point in points] == pytest.approx(norms, rel=1e-4)
    moved = (found != start).any(dim=1)
    assert 10 < int(moved.sum()) < len(start) / 2
    assert (found - start).abs().max() > RATE


def test_a_resumed_run_gives_the_same_bits(tiny_encoder: Path, tmp_path: Path) -> None:
    def run(folder: Path, **changes: Any) -> Contrastive:
        objective = objective_over(tiny_encoder)
        settings = tiny_settings(optimizer=OptimizerSettings(learning_rate=RATE), **changes)
        train(objective, TinyBatches(), settings, checkpoints=Checkpoints(str(folder), {}))
        return objective

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", max_steps=5)
    resumed = run(tmp_path / "parts")
    assert_same(weights_of(resumed), weights_of(whole))


def test_what_it_can_not_be_trained_with_is_refused(tiny_encoder: Path, tmp_path: Path) -> None:
    model = {"model": str(tiny_encoder), "static": True}
    run = {"batches": "run/batches", "encoder": model, "objective": {"kind": "contrastive"}}

    def refuse(match: str, workers: int = 1, **changes: Any) -> None:
        settings = RunSettings.model_validate(run | changes)
        if workers == 1:
            with pytest.raises(UserError, match=match):
                load_for_training(settings, settings.located())
        resources = {"output": str(tmp_path), "resources": {"workers": workers}}
        stage = Train(TrainConfig.model_validate(settings.model_dump() | resources))
        with pytest.raises(UserError, match=match):
            stage.check_inputs({"encoder.model"})

    refuse("lora is for transformers, but the encoder .* is static", lora={"rank": 2})
    refuse("Leave compile, activation_checkpointing out", compile=True, activation_checkpointing=True)
    refuse("Leave dropout out", dropout=0.1)
    refuse("Leave sharding out", sharding="zero2")
    refuse("adamw with weight_decay 0.1, but a static", training={"optimizer": {"weight_decay": 0.1}})
    refuse("is radam with .*, but a static", training={"optimizer": {"kind": "radam"}})
    refuse(r"2 workers would wait .* \(resources.workers: 1\)", workers=2, training={"batches_per_step": 2})
    objective = objective_over(tiny_encoder)
    with pytest.raises(UserError, match=r"weight_decay 0\.1, but a static"):
        build_optimizer(objective, OptimizerSettings(weight_decay=0.1))
    objective.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
    with pytest.raises(UserError, match=r"other weights to train: .*scale"):
        build_optimizer(objective, OptimizerSettings())


def run(stage: Stage[Any]) -> Artifact:
    """In this process."""
    return run_stage(stage, RaySession(shards_here=True))


def test_stages_embed_train_and_search(tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specification, "has_bfloat16", lambda **_: True)
    made = small_run.make_run(tmp_path)
    collection = made["collection"]
    validation = {"kind": "retrieval", "collection": collection, "split": "test", "every": 8}
    training = {
        "batches": made["batches"],
        "encoder": {"model": str(tiny_encoder), "static": True},
        "objective": {"kind": "contrastive"},
        "training": {"optimizer": {"learning_rate": RATE}, "bf16": False},
        "validation": validation,
    }
    stage = Train(TrainConfig.model_validate(training | {"output": str(tmp_path / "trained")}))
    assert stage.seconds_here([]) < 1
    trained = run(stage)
    assert trained.manifest["facts"]["last_loss"] < trained.manifest["facts"]["first_loss"]
    assert "the mean of the tokens' vectors" in (tmp_path / "trained" / "README.md").read_text()
    again = run(Train(TrainConfig.model_validate(training | {"output": str(tmp_path / "again")})))
    assert again.fingerprint == trained.fingerprint
    config = {"collection": collection, "encoder": {"model": trained.uri, "dtype": "bfloat16"}}
    vectors = StoredVectors(run(Embed(EmbedConfig(**config, output=str(tmp_path / "embedded")))).uri)
    assert (vectors.contract.architecture, vectors.contract.dtype) == ("static", "float32")
    texts = [f"query {number}" for number in range(small_run.PAIRS + 6)]
    theirs = SentenceTransformer(str(tmp_path / "trained"), device="cpu").encode_query(texts)
    ours = vectors.part("queries").range(0, len(texts))
    np.testing.assert_array_equal(ours, theirs.astype(np.float16).astype(np.float32))
    index = run(Index(IndexConfig(index=VectorIndexSettings(vectors=vectors.uri), output=str(tmp_path / "index"))))
    searched = {"index": index.uri, "collection": collection, "vectors": vectors.uri, "split": "test"}
    found = run(Search(SearchConfig(**searched, output=str(tmp_path / "run"))))
    assert StoredRanking(found.uri).ranking().rows.shape[0] == 6
