from pathlib import Path

import numpy as np
import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.candidate_batches import DOCUMENTS, document_values, store_vectors
from trainers.objectives.coder.candidates import ABSENT, DocumentVectors

LISTS = torch.tensor([[39, 0, 7, 8, ABSENT], [0, 27, 28, 7, 6], [ABSENT] * 5])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return store_vectors(tmp_path_factory.mktemp("documents"))


def test_every_candidate_is_found_once(stored):
    documents = DocumentVectors(stored)
    pool = documents.pool(LISTS)
    vectors = documents.gather(pool.rows)
    assert vectors.dtype == torch.float16
    assert len(vectors) == len(pool.rows) + 1
    assert len(torch.unique(pool.rows)) == len(pool.rows) <= 7
    expected = torch.from_numpy(document_values()).float()[LISTS.clamp(min=0)]
    found = vectors.float()[pool.places]
    assert torch.equal(found, expected.masked_fill((LISTS == ABSENT).unsqueeze(-1), 0.0))


def test_what_can_not_be_looked_up_is_refused(stored, tmp_path: Path):
    with pytest.raises(UserError, match=r"names document row 40, but .* has vectors of 40 documents"):
        DocumentVectors(stored).pool(torch.tensor([[1, 40]]))
    several = store_vectors(tmp_path / "several", np.zeros((DOCUMENTS, 2, 6), np.float16))
    with pytest.raises(UserError, match="has 2 vectors of each document"):
        DocumentVectors(several)
