"""REPLUG's objective on stored batches: its loss and agreement, written out from the vectors and the stored scores."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from tests.gpu.objectives import make_objective, make_rows, settings_of
from tests.unit.trainers.chunk_batches import store_chunk_batches
from trainers.objectives.replug import ScoreReader

BATCH = 1


def test_scores_are_stored_with_the_tokens_of_long_chunks(tiny_encoder: Path, tmp_path: Path) -> None:
    reader = ScoreReader(settings_of("replug").scores)
    sums, means = (reader.read(0, BATCH, mean=mean) for mean in (False, True))
    assert {sums.dtype, means.dtype} == {np.dtype(np.float32)}
    tokens = sums / means
    assert tokens.min() > 0.99
    assert tokens.max() > 1.99
    stored = reader.artifact
    schema = pq.read_schema(stored.path(stored.names("epoch=")[0]))
    assert (schema.field("tokens").type, schema.field("negative_log_likelihood").type.value_type) == (
        pa.int32(), pa.float32()
    )  # fmt: skip
    objective = make_objective("replug", tiny_encoder)
    for size, said in ((2, "the retriever learns nothing"), (4, "belong to other batches")):
        with pytest.raises(UserError, match=said):
            objective.check_batches(BatchReader(store_chunk_batches(tmp_path / str(size), size=size)))


@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize("encoded", [True, False])
def test_the_loss_is_that_of_the_vectors_and_scores(
    tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch, include_self: bool, encoded: bool
) -> None:
    """Of the encoder's vectors, and of drawn ones, of which no chunk is as near to another as that is to it."""
    settings = settings_of("replug").model_copy(update={"include_self": include_self})
    objective = make_objective("replug", tiny_encoder, settings=settings)
    rows = make_rows("replug", BATCH)
    size = len(rows)
    batch = objective.collate(rows)
    with torch.no_grad():
        drawn = torch.randn(2, size, 4, generator=torch.Generator().manual_seed(0)).unbind()
        sides = objective.encode_sides(batch.chunks) if encoded else drawn
        monkeypatch.setattr(objective, "encode_sides", lambda _: sides)
        found = objective(batch)
    queries, passages = (side.tolist() for side in sides)
    losses = ScoreReader(settings.scores).read(0, BATCH, mean=True).tolist()

    def softmax(values: list[float]) -> list[float]:
        exponents = [math.exp(value - max(values)) for value in values]
        return [value / sum(exponents) for value in exponents]

    divergences, agreements = [], 0
    for i in range(size):
        others = [j for j in range(size) if include_self or j != i]
        cosines = [
            sum(a * b for a, b in zip(queries[i], passages[j], strict=True))
            / math.hypot(*queries[i])
            / math.hypot(*passages[j])
            for j in others
        ]
        likely = softmax([-losses[i][j] / settings.likelihood_temperature for j in others])
        retrieved = softmax([cosine / settings.similarity_temperature for cosine in cosines])
        divergences.append(sum(p * math.log(p / q) for p, q in zip(likely, retrieved, strict=True) if p > 0))
        agreements += likely.index(max(likely)) == retrieved.index(max(retrieved))
    assert found.loss.item() == pytest.approx(sum(divergences) / size, rel=1e-4)
    assert found.metrics["agreement"].item() == pytest.approx(agreements / size)
