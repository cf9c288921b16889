"""REPLUG's loss, and the likelihoods it learns from, against recorded values (Revela, appendix A.3)."""

import numpy as np
import pytest
import torch

from tests.golden.revela_case import CASE, DOCUMENTS, causal_model
from trainers.objectives.replug import conditional_likelihoods, replug_distributions, replug_loss


@pytest.mark.parametrize("temperatures", ["paper", "warm"])
@pytest.mark.parametrize("include_self", [True, False])
def test_loss_distributions_and_gradient(temperatures: str, include_self: bool) -> None:
    case = f"replug.{temperatures}.{'with_self' if include_self else 'no_self'}"
    scores = CASE["replug.score"].clone().requires_grad_()
    settings = [float(CASE[f"replug.{temperatures}.{name}"]) for name in ("tau_r", "eta_m")]
    likely, retrieved = replug_distributions(scores, CASE["replug.nll"], *settings, include_self=include_self)
    loss = replug_loss(likely, retrieved)
    (gradient,) = torch.autograd.grad(loss, scores)
    np.testing.assert_allclose(likely.exp().detach(), CASE[f"{case}.p_lm_f64"], atol=1e-10)
    np.testing.assert_allclose(retrieved.exp().detach(), CASE[f"{case}.p_ret_f64"], atol=1e-10)
    np.testing.assert_allclose(loss.item(), CASE[f"{case}.loss_f64"], rtol=1e-10)
    expected = CASE[f"{case}.grad_score_f64"]
    np.testing.assert_allclose(gradient, expected, atol=1e-10 * max(float(expected.abs().max()), 1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_likelihoods_of_each_document_given_each(dtype: torch.dtype) -> None:
    """The recorded ones are of one sequence per pair; ours reads every context once."""
    documents = [ids.tolist() for ids in DOCUMENTS]
    model = causal_model().to(dtype)
    model.config.use_cache = False  # as models are left that were trained with checkpoints
    sums = conditional_likelihoods(model, documents, documents)
    np.testing.assert_allclose(sums, CASE["replug.nll_sum_f64"], atol=1e-4)
    lengths = np.array([len(document) for document in documents])
    np.testing.assert_array_equal(lengths, CASE["replug.len"])
    np.testing.assert_allclose(sums / lengths[:, None], CASE["replug.nll_mean_f64"], atol=1e-4)
