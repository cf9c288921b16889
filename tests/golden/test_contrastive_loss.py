"""The masked contrastive loss against the recorded outputs of the authors' implementation (CDE)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainers.objectives.masked_contrastive import masked_contrastive_loss

GOLDEN = np.load(Path(__file__).parent / "cde_case_a.npz")
CASES = {"nomask": None, "mask": "ii_mask_rel", "hn_mask": "ii_mask_hn_rel"}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case):
    queries = torch.from_numpy(GOLDEN["iii_e1"]).requires_grad_()
    documents = GOLDEN["iii_e2"]
    if case == "hn_mask":
        documents = np.concatenate([documents, GOLDEN["iii_ehn"]])
    documents = torch.from_numpy(documents).requires_grad_()
    mask = torch.zeros(len(queries), len(documents), dtype=torch.bool)
    if CASES[case]:
        mask = torch.from_numpy(GOLDEN[CASES[case]])
    loss = masked_contrastive_loss(
        torch.nn.functional.normalize(queries, dim=1),
        torch.nn.functional.normalize(documents, dim=1),
        mask,
        torch.arange(len(queries)),
        1 / float(GOLDEN["iii_inv_temperature"]),
    )
    loss.backward()
    assert loss.item() == pytest.approx(float(GOLDEN[f"iii_loss_{case}"]), rel=1e-5)
    assert loss.item() == pytest.approx(float(GOLDEN[f"iii_author_loss_{case}"]), rel=1e-5)
    np.testing.assert_allclose(queries.grad, GOLDEN[f"iii_ge1_{case}"], atol=1e-5)
    np.testing.assert_allclose(documents.grad, GOLDEN[f"iii_ge2_{case}"], atol=1e-5)
