"""Contextual training: however a batch lies on ranks, gradients of both stages are those of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from tests.distributed.processes import assert_close, run_each
from tests.unit.trainers.objectives.contextual.made_up import objective_of, rows_of
from trainers.engine import collectives
from trainers.engine.sharding import equal_passes, is_sharded, shard, whole, whole_weights
from trainers.objectives.contextual import ContextualBatch

CASES: dict[str, dict[str, Any]] = {
    "fewer documents in the context": {"context_documents": 5},
    "all documents in the context, several vectors each": {"context_documents": 64, "vectors_per_document": 2},
    "the paper's way": {"context_documents": 5, "own_documents_in_context": True, "sequence_dropout": 0.0},
    "released": {"context_documents": 7, "variant": "released"},
    "prefix alone": {"context_documents": 7, "prefix_attends": "prefix"},
}


Step = tuple[dict[str, Any], list[float], int]


def steps(
    rank: int, ranks: int, folder: str, cases: dict[str, dict[str, Any]], shares: bool = False, batches: bool = False
) -> dict[str, Step]:
    """Of each case: gradients, loss and metrics over all ranks, and how many tokens of the context this rank read.

    Every rank has a slice of one batch, with ``batches`` a batch of its own. With ``shares`` the model is shared out.
    """
    found = {}
    for name, settings in cases.items():
        objective = objective_of(Path(folder), **{"sequence_dropout": 0.3} | settings).double()
        if shares:
            shard(objective)
            assert is_sharded(objective) == (ranks > 1)
        objective.batch_group = collectives.neighbours(1 if batches else ranks)
        each = 8 // ranks
        both = [rows_of(8), emptied(rows_of(4))]
        rows = both[rank::ranks] if batches else [both[0].slice(rank * each, each)]
        with collectives.GradientSum(objective.parameters()) as total:
            if not shares:
                total.start()
            for piece in rows:
                batch = objective.collate(piece)
                outcome = objective(equal_passes(batch, torch.device("cpu")) if shares else batch)
                (outcome.loss / (2 if batches else ranks)).backward()
        told = collectives.sum_across_ranks(torch.stack([outcome.loss, *outcome.metrics.values()])) / ranks
        gradients = {key: p.grad for key, p in objective.named_parameters() if p.grad is not None}
        whole_gradients = {key: whole(gradient).detach().numpy().copy() for key, gradient in gradients.items()}
        found[name] = whole_gradients, told.tolist(), outcome.tokens - tokens_of_pairs(batch)
    return found


def tokens_of_pairs(batch: ContextualBatch) -> int:
    """Of queries and documents, which are not those of the context."""
    chunks = (*batch.queries.chunks, *batch.documents.chunks)
    return sum(int(chunk["attention_mask"].sum()) for chunk in chunks)


def in_chunks(size: int) -> dict[str, dict[str, Any]]:
    return {name: {"chunk_size": size, "gradient_cache": True} | settings for name, settings in CASES.items()}


@pytest.mark.usefixtures("one_thread")
def test_two_ranks_equal_one_process(tiny_encoder: Path) -> None:
    alone = steps(0, 1, str(tiny_encoder), in_chunks(3))
    for both in run_each(2, *((steps, 2, str(tiny_encoder), in_chunks(size)) for size in (2, 64))):
        for case, (expected, measured, tokens) in alone.items():
            # the context is shared out: no document of it is read twice
            assert sum(answers[case][2] for answers in both) == tokens > 0, case
            for found, told, _ in (answers[case] for answers in both):
                assert told == pytest.approx(measured, rel=1e-6), case
                assert any("first_stage.transformer" in name for name in found)
                assert_close(found, expected, case, rtol=1e-10, of_largest=1e-10)


SHARDED: dict[str, dict[str, Any]] = {
    "in chunks": {"context_documents": 5, "chunk_size": 2, "gradient_cache": True},
    "chunks without the cache": {"context_documents": 5, "chunk_size": 3},
    "whole": {"context_documents": 64, "vectors_per_document": 2},
    "released": {"context_documents": 7, "variant": "released", "chunk_size": 2, "gradient_cache": True},
    "prefix alone": {"context_documents": 7, "prefix_attends": "prefix", "chunk_size": 2, "gradient_cache": True},
    "one document": {"context_documents": 1, "chunk_size": 2, "gradient_cache": True},  # one rank has none
}


def emptied(rows: pa.Table) -> pa.Table:
    """Without a document that could be context."""
    rows = rows.set_column(1, "document", [[" " * number for number in range(len(rows))]])
    return rows.set_column(2, "hard_negatives", pa.array([[]] * len(rows), pa.list_(pa.string())))


@pytest.mark.usefixtures("one_thread")
def test_shared_out_over_two_ranks(tiny_encoder: Path) -> None:
    ways = (False, True)  # slices of a batch, a batch each
    for batches, both in zip(
        ways, run_each(2, *((steps, 2, str(tiny_encoder), SHARDED, True, each) for each in ways)), strict=True
    ):
        for case, (expected, *_) in steps(0, 1, str(tiny_encoder), SHARDED, True, batches).items():
            for answers in both:
                gradients, *_ = answers[case]
                found = {name: array for name, array in gradients.items() if array.any() or name in expected}
                assert_close(found, expected, f"{case}, batches: {batches}", rtol=1e-9, of_largest=1e-10)


def trained_and_exported(rank: int, ranks: int, folder: str, exported: str, variant: str) -> list[float]:
    """A vector in a fitted context, after two steps; the first rank reads more texts, and exports alone."""
    settings = {"context_documents": 5, "chunk_size": 2, "gradient_cache": True, "sequence_dropout": 0.3}
    # a length that leaves positions for the context, which takes some up as released
    objective = objective_of(Path(folder), {"max_length": 48}, variant=variant, **settings)
    shard(objective)
    objective.batch_group = collectives.neighbours(ranks)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.01)
    each = 8 // ranks
    for epoch in range(2):
        batch = objective.collate(rows_of(8, epoch).slice(rank * each, each))
        with collectives.GradientSum(objective.parameters()) as total:
            total.start()
            (objective(equal_passes(batch, torch.device("cpu"))).loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    with whole_weights(objective), torch.no_grad():
        objective.eval()
        objective.read_corpus(["import os", "def f(): pass", "return x"])
        encoder = objective.contextual
        for text in ["sort a list", "close it", "all keys"][: 3 if rank == 0 else 1]:
            vectors = encoder(encoder.tokenize([text], "query"))
        if rank == 0:
            objective.eval()
            objective.export(Path(exported))
    objective.train()
    return [float(number) for number in vectors[0]]


VARIANTS = ("paper", "released")  # released: dense layers behind the first stage


@pytest.mark.usefixtures("one_thread")
def test_a_sharded_run_validates_and_exports(tiny_encoder: Path, tmp_path: Path) -> None:
    folders = {variant: [str(tmp_path / variant / name) for name in ("one", "two")] for variant in VARIANTS}
    answers = run_each(
        2, *((trained_and_exported, 2, str(tiny_encoder), folders[variant][1], variant) for variant in VARIANTS)
    )
    for variant, (found, _) in zip(VARIANTS, answers, strict=True):
        expected = trained_and_exported(0, 1, str(tiny_encoder), folders[variant][0], variant)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        loaded = [load_towers(EncoderSettings(model=path), Path(path), "f" * 64).query for path in folders[variant]]
        weights = [dict(encoder.named_parameters()) for encoder in loaded]
        start = dict(objective_of(tiny_encoder, variant=variant).contextual.named_parameters())
        assert weights[0].keys() == weights[1].keys()
        for name, value in weights[0].items():
            torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=1e-4, msg=name)
        moved = {name for name, value in weights[1].items() if (value - start[name]).abs().max() > 1e-6}
        own = {"null"} if variant == "paper" else {"null", "prompts", "head"}
        assert {name.split(".")[0] for name in moved} == {"transformer", "first_stage"} | own
        dense = {name for name in start if name.startswith("first_stage.dense.")}
        assert dense <= moved
        assert len(dense) == (0 if variant == "paper" else 4)
