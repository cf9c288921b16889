"""REPLUG's loss, and the likelihoods it learns from, against recorded values (Revela, appendix A.3)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from trainers.objectives.replug import conditional_likelihoods, replug_distributions, replug_loss

HERE = Path(__file__).parent
GOLDEN = np.load(HERE / "revela_case_a.npz")


@pytest.mark.parametrize("temperatures", ["paper", "warm"])
@pytest.mark.parametrize("include_self", [True, False])
def test_loss_distributions_and_gradient(temperatures: str, include_self: bool) -> None:
    case = f"replug.{temperatures}.{'with_self' if include_self else 'no_self'}"
    scores = torch.from_numpy(GOLDEN["replug.score"]).requires_grad_()
    likely, retrieved = replug_distributions(
        scores,
        torch.from_numpy(GOLDEN["replug.nll"]),
        float(GOLDEN[f"replug.{temperatures}.tau_r"]),
        float(GOLDEN[f"replug.{temperatures}.eta_m"]),
        include_self=include_self,
    )
    loss = replug_loss(likely, retrieved)
    (gradient,) = torch.autograd.grad(loss, scores)
    np.testing.assert_allclose(likely.exp().detach().numpy(), GOLDEN[f"{case}.p_lm_f64"], atol=1e-10)
    np.testing.assert_allclose(retrieved.exp().detach().numpy(), GOLDEN[f"{case}.p_ret_f64"], atol=1e-10)
    np.testing.assert_allclose(loss.item(), GOLDEN[f"{case}.loss_f64"], rtol=1e-10)
    largest = np.abs(GOLDEN[f"{case}.grad_score_f64"]).max()
    np.testing.assert_allclose(gradient.numpy(), GOLDEN[f"{case}.grad_score_f64"], atol=1e-10 * max(largest, 1.0))


def test_the_other_direction_of_the_divergence_is_another_loss() -> None:
    likely, retrieved = replug_distributions(
        torch.from_numpy(GOLDEN["replug.score"]), torch.from_numpy(GOLDEN["replug.nll"]), 0.05, 0.7, include_self=True
    )
    golden = GOLDEN["replug.warm.with_self.loss_f64"]
    assert abs(replug_loss(retrieved, likely).item() - golden) > 1e-4 * abs(golden)


def golden_language_model(dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=10000,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(load_file(HERE / "revela_case_a_weights.safetensors"))
    return model.to(dtype).eval()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 1e-4)])
def test_likelihoods_of_each_document_given_each(dtype: torch.dtype, tolerance: float) -> None:
    """The recorded ones are of one sequence per pair; ours reads every context once."""
    documents = [
        ids[mask == 1].tolist() for ids, mask in zip(GOLDEN["lm.input_ids"], GOLDEN["lm.attention_mask"], strict=True)
    ]
    sums = conditional_likelihoods(golden_language_model(dtype), documents, documents)
    np.testing.assert_allclose(sums, GOLDEN["replug.nll_sum_f64"], atol=tolerance)
    lengths = np.array([len(document) for document in documents])
    np.testing.assert_array_equal(lengths, GOLDEN["replug.len"])
    np.testing.assert_allclose(sums / lengths[:, None], GOLDEN["replug.nll_mean_f64"], atol=tolerance)
