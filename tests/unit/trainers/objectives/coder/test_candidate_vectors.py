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


@pytest.mark.parametrize("shares", [1, 2, 3, 45])
def test_every_candidate_is_found_once(stored, shares):
    total = torch.zeros(*LISTS.shape, 6)
    for share in range(shares):
        documents = DocumentVectors(stored, share, shares)
        pool = documents.pool(LISTS)
        vectors = documents.gather(pool.rows)
        assert vectors.dtype == torch.float16
        assert len(vectors) == len(pool.rows) + 1
        assert len(torch.unique(pool.rows)) == len(pool.rows) <= 7
        total += vectors.float()[pool.places]
    expected = torch.from_numpy(document_values()).float()[LISTS.clamp(min=0)]
    assert torch.equal(total, expected.masked_fill((LISTS == ABSENT).unsqueeze(-1), 0.0))


def test_a_share_opens_its_own_files_alone(stored, monkeypatch):
    opened = []
    monkeypatch.setattr(stored, "path", lambda name: opened.append(name) or type(stored).path(stored, name))
    documents = DocumentVectors(stored, 3, 4)
    assert (documents.first, documents.last, documents.total) == (30, 40, DOCUMENTS)
    documents.gather(documents.pool(LISTS).rows)
    first = ("documents/00000.npy", "documents/00000.ids.parquet")  # which says of what shape they are, and of all rows
    assert {name for name in opened if not name.startswith("documents/00003")} <= set(first)


def test_what_can_not_be_looked_up_is_refused(stored, tmp_path: Path):
    with pytest.raises(UserError, match=r"names document row 40, but .* has vectors of 40 documents"):
        DocumentVectors(stored).pool(torch.tensor([[1, 40]]))
    several = store_vectors(tmp_path / "several", np.zeros((DOCUMENTS, 2, 6), np.float16))
    with pytest.raises(UserError, match="has 2 vectors of each document"):
        DocumentVectors(several)
