"""The losses of multi-layer representations against recorded values, in float64.

The file holds what two independent implementations of the paper's equations and a transcription of the authors' code
gave alike.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from retrieval.encoders.multi_vector import scalar_mix
from trainers.objectives.masked_contrastive import masked_contrastive_loss
from trainers.objectives.multi_layer import (
    best_vector,
    max_similarity,
    multi_vector_loss,
    reduced_vector_loss,
    self_contrastive_loss,
    self_contrastive_regulariser,
    vector_similarities,
)

GOLDEN = np.load(Path(__file__).parent / "mlr_case_a.npz")
LAMBDAS = {"lam0": 0.0, "lam001": 0.01, "lam1": 1.0, "lam10": 10.0}


class Case:
    """Queries, and documents in the file's order: each query's positive, then its negatives."""

    def __init__(self, tokens: bool = False, last_only: bool = False) -> None:
        self.reduced = 0 if tokens else -1
        prefix, suffix = ("tok_", "") if tokens else ("", "_layers")
        names = "query", f"{prefix}pos{suffix}", f"{prefix}neg{suffix}"
        arrays = [GOLDEN[name] for name in names]
        if last_only:
            arrays[1:] = arrays[1][:, -1:], arrays[2][:, :, -1:]
        self.query, self.pos, self.neg = (torch.from_numpy(array).requires_grad_() for array in arrays)
        self.documents = torch.cat([self.pos.unsqueeze(1), self.neg], dim=1).flatten(0, 1)
        self.present = torch.ones(self.documents.shape[:2], dtype=torch.bool)
        if tokens:
            masks = torch.from_numpy(GOLDEN["tok_pos_mask"]).unsqueeze(1), torch.from_numpy(GOLDEN["tok_neg_mask"])
            self.present = torch.cat(masks, dim=1).flatten(0, 1)
        count, each = len(self.query), 1 + self.neg.shape[1]
        self.positives = torch.arange(count) * each
        self.mask = torch.zeros(count, count * each, dtype=torch.bool)
        self.others = torch.arange(count * each) // each != torch.arange(count)[:, None]

    def similarities(self) -> Tensor:
        return vector_similarities(self.query, self.documents, self.present)

    def check(self, name: str, losses: Tensor) -> None:
        """``losses`` (n,) give the recorded loss and gradients."""
        loss = losses.mean()
        assert loss.item() == pytest.approx(float(GOLDEN[f"{name}_loss"]), rel=1e-9)
        for leaf, gradient in zip(("query", "pos", "neg"), self.gradients(loss), strict=True):
            np.testing.assert_allclose(gradient, GOLDEN[f"{name}_grad_{leaf}"], rtol=1e-9, atol=1e-10, err_msg=leaf)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.query, self.pos, self.neg), retain_graph=True)


def close(found: Tensor, name: str) -> None:
    np.testing.assert_allclose(found.detach().numpy(), GOLDEN[name], rtol=1e-9, atol=1e-10, err_msg=name)


def test_similarities():
    case = Case()
    similarities = case.similarities()
    close(similarities, "sim_layers")
    close(max_similarity(similarities, -1), "sim_max")
    assert best_vector(similarities, -1).tolist() == GOLDEN["sim_argmax_layer"].tolist()
    own = similarities[torch.arange(len(case.query)), case.positives, -1]
    close(max_similarity(similarities, -1).scatter(1, case.positives[:, None], own[:, None]), "sim_selfcon")


@pytest.mark.parametrize(("name", "tokens", "own"), [("mv", 0, 0), ("mv_own", 0, 1), ("tok_mv", 1, 0)])
def test_multi_vector_loss(name, tokens, own):
    case = Case(bool(tokens))
    losses = multi_vector_loss(case.similarities(), case.others if own else case.mask, case.positives, case.reduced)
    close(losses, f"{name}_per_query")
    case.check(name, losses)


@pytest.mark.parametrize(
    "name", [*(f"selfcon_{lam}" for lam in LAMBDAS), "selfcon_own_lam1", "tok_selfcon_lam001", "tok_selfcon_lam1"]
)
def test_self_contrastive_loss(name):
    case = Case(name.startswith("tok"))
    mask = case.others if "own" in name else case.mask
    similarities = case.similarities()
    losses = self_contrastive_loss(similarities, mask, case.positives, case.reduced)
    regulariser = self_contrastive_regulariser(similarities, case.positives, case.reduced)
    close(losses, f"{name}_per_query")
    close(losses.mean(), f"{name}_con_mean")
    close(regulariser, f"{name}_reg_per_query")
    close(regulariser.mean(), f"{name}_reg_mean")
    case.check(name, losses + LAMBDAS[name.rsplit("_")[-1]] * regulariser)


def check_pooled(name: str, documents: Tensor, case: Case) -> Tensor:
    """The contrastive losses of the queries and of one vector a document, which are the recorded ones."""
    rows = zip(case.query.split(1), case.mask.split(1), case.positives.split(1), strict=True)
    losses = torch.stack([masked_contrastive_loss(row, documents, mask, own, 1.0) for row, mask, own in rows])
    close(losses, f"{name}_per_query")
    case.check(name, losses)
    return losses


@pytest.mark.parametrize("name", ["avg", "tok_avg"])
def test_average(name):
    case = Case(name.startswith("tok"))
    pooled = scalar_mix(case.documents, case.present, torch.zeros(case.present.shape[1]))
    if name == "avg":
        close(pooled, "pooled_avg")
    check_pooled(name, pooled, case)


def test_scalar_mix():
    case = Case()
    alpha = torch.from_numpy(GOLDEN["alpha"]).requires_grad_()
    pooled = scalar_mix(case.documents, case.present, alpha)
    close(pooled, "pooled_mix")
    losses = check_pooled("mix", pooled, case)
    close(torch.autograd.grad(losses.mean(), alpha, retain_graph=True)[0], "mix_grad_alpha")
    close(torch.softmax(alpha, 0), "mix_weights")


def test_the_dual_encoder():
    case = Case(last_only=True)
    check_pooled("last_only", case.documents[:, 0], case)
    losses = reduced_vector_loss(case.similarities(), case.mask, case.positives, -1)
    close(losses, "last_only_per_query")
    case.check("last_only", losses)


def test_every_recorded_value_is_compared():
    """Losses, gradients and what they are made of; all else in the file is input."""
    compared = {"mv", "mv_own", "avg", "mix", "last_only", "tok_mv", "tok_avg", "selfcon_own_lam1"}
    compared |= {f"selfcon_{lam}" for lam in LAMBDAS} | {"tok_selfcon_lam001", "tok_selfcon_lam1"}
    recorded = {name.removesuffix("_loss") for name in GOLDEN if name.endswith("_loss")}
    assert recorded == compared
