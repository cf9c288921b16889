"""In-batch attention against recorded outputs of the authors' code and of the equations in float64.

A misunderstanding would show by far more than the tolerances here, as transcriptions of the equations with it do. The
logits and the loss are off by 3.8 and +0.28 without value normalization; 0.43 and -0.027 with norms over all heads;
0.82 and +0.046 divided by the norm of what is read; 1.3 and -0.021 with a causal mask across documents; 1.2 and
-0.024 with the similarity transposed; 5.6 and +0.044 with heads that take turns in the groups; 0.17 and +0.0039 with
keys and values of the h-stream; 0.84 and -0.053 with shifted positions; 0.80 and +0.034 with one softmax over all
documents; the loss by +0.080 as a mean of documents' means; a gradient by 23 % where keys and values are detached.
"""

import pytest
import torch
from torch import Tensor

from tests.golden.revela_case import CASE, DOCUMENTS, IDS, MASK, REAL, THETA, WEIGHTS, causal_model
from tests.unit.trainers.objectives.revela.equations import InBatchLlama, Llama
from tests.unit.trainers.objectives.revela.models import in_float64
from trainers.objectives.revela.cross_attention import cross_document_attention, find_readers
from trainers.objectives.revela.language_model import InBatchLanguageModel
from trainers.objectives.revela.objective import in_batch_similarity

SIMILARITY = CASE["lm.sim"]
OTHERS = ~torch.eye(len(IDS), dtype=torch.bool)

each_normalization = pytest.mark.parametrize("normalization", ["vnorm", "novnorm"])
pytestmark = pytest.mark.usefixtures("one_thread")


def near(found: Tensor, expected: Tensor, absolute: float = 0.0, of_largest: float = 0.0) -> None:
    limit = absolute + of_largest * float(expected.abs().max())
    assert float((found.detach() - expected).abs().max()) <= limit


@each_normalization
@pytest.mark.parametrize("settings", [{}, {"recompute_reading": False}, {"activation_checkpointing": True}])
def test_language_model(normalization: str, settings: dict[str, bool]) -> None:
    plain = causal_model()
    model = InBatchLanguageModel(plain, value_normalization=normalization == "vnorm", **settings).train()
    states = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, output: states.append(output))
    similarity = SIMILARITY.clone().requires_grad_()
    logits = model.lm_head(model.last_states(IDS, similarity, find_readers(MASK, similarity)))
    near(logits[REAL], CASE[f"lm.{normalization}.h_logits"][REAL], 2e-5)
    for number, (e_states, h_states) in enumerate(states[:-1], start=1):
        near(e_states[REAL], CASE["lm.e_hidden"][number][REAL], 2e-5)
        near(h_states[REAL], CASE[f"lm.{normalization}.h_hidden"][number][REAL], 2e-5)
    near(plain(IDS, MASK).logits[REAL], CASE["lm.e_logits"][REAL], 2e-5)
    loss, tokens = model(IDS, MASK, similarity)
    assert tokens == int(MASK.sum()) - len(MASK)
    near(loss, CASE[f"lm.{normalization}.h_loss"], 5e-6)
    loss.backward()
    near(similarity.grad[OTHERS], CASE[f"lm.{normalization}.grad_sim"][OTHERS], of_largest=1e-5)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, gradient in gradients.items():
        norm = CASE[f"lm.{normalization}.gradnorm.{name}"]
        near(gradient.double().norm(), norm, of_largest=1e-5)
        if f"lm.{normalization}.grad.{name}" in CASE:
            near(gradient, CASE[f"lm.{normalization}.grad.{name}"], of_largest=1e-5)


@each_normalization
def test_language_model_in_float64(normalization: str) -> None:
    model = in_float64(InBatchLanguageModel(causal_model(), value_normalization=normalization == "vnorm"))
    similarity = SIMILARITY.double().requires_grad_()
    logits = model.lm_head(model.last_states(IDS, similarity, find_readers(MASK, similarity)))
    near(logits[REAL], CASE[f"lm.{normalization}.h_logits_f64"][REAL], 1e-9)
    loss, _ = model(IDS, MASK, similarity)
    near(loss, CASE[f"lm.{normalization}.h_loss_f64"], 1e-10)
    loss.backward()
    near(similarity.grad[OTHERS], CASE[f"lm.{normalization}.grad_sim_f64"][OTHERS], of_largest=1e-8)


@pytest.mark.parametrize("variant", ["vnorm", "novnorm", "vnorm_tinyv"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_document_attention(variant: str, recompute: bool, dtype: torch.dtype) -> None:
    values = (CASE["attn.v"] * 1e-6).float() if variant == "vnorm_tinyv" else CASE["attn.v"]
    given = [CASE["attn.q"], CASE["attn.k"], values, CASE["attn.sim"]]
    queries, keys, values, similarity = (tensor.to(dtype, copy=True).requires_grad_() for tensor in given)
    found = cross_document_attention(
        queries, keys, values, similarity, find_readers(CASE["attn.mask"], similarity),
        value_normalization=variant != "novnorm", recompute=recompute,
    )  # fmt: skip
    if dtype == torch.float64:
        near(found, CASE[f"attn.{variant}.b_f64"], 1e-10)
    near(found, CASE[f"attn.{variant}.b"], of_largest=2e-6)
    gradients = torch.autograd.grad((found * CASE["attn.cotangent"]).sum(), (queries, keys, values, similarity))
    for name, gradient in zip(("q", "k", "v"), gradients[:3], strict=True):
        near(gradient, CASE[f"attn.{variant}.grad_{name}"], of_largest=2e-6)
    others = ~torch.eye(len(similarity), dtype=torch.bool)
    near(gradients[3][others], CASE[f"attn.{variant}.grad_sim"][others], of_largest=2e-6)


@pytest.mark.parametrize(("spread", "share"), [("near", 5e-3), ("wide", 1e-5)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_similarity(spread: str, share: float, symmetric: bool) -> None:
    name = f"sim.{spread}.{'sym' if symmetric else 'asym'}"
    for dtype, suffix in ((torch.float32, ""), (torch.float64, "_f64")):
        queries, passages = (CASE[f"sim.{spread}.{side}"].to(dtype, copy=True).requires_grad_() for side in "qp")
        rows = passages if symmetric else queries
        found = in_batch_similarity(rows, passages, float(CASE[f"sim.{spread}.tau"]))
        (found * CASE["sim.G"]).sum().backward()
        limits = {"of_largest": share} if dtype == torch.float32 else {"absolute": 1e-7 if spread == "near" else 1e-10}
        near(found, CASE[f"{name}.sim{suffix}"], **limits)
        if dtype == torch.float64:
            limits = {"of_largest": limits["absolute"]}
        near(passages.grad, CASE[f"{name}.grad_p{suffix}"], **limits)
        if not symmetric:
            near(queries.grad, CASE[f"{name}.grad_q{suffix}"], **limits)
        assert not found.diagonal().any()


@each_normalization
def test_the_equations_are_the_recorded_ones(normalization: str) -> None:
    config, weights = causal_model().config, {name: tensor.double() for name, tensor in WEIGHTS.items()}
    heads = config.num_attention_heads, config.num_key_value_heads
    model = Llama(weights, config.num_hidden_layers, *heads, config.rms_norm_eps, THETA)
    equations = InBatchLlama(model, value_normalization=normalization == "vnorm")
    logits = torch.cat(equations.h_logits(DOCUMENTS, SIMILARITY.double()))
    near(logits, CASE[f"lm.{normalization}.h_logits_f64"][REAL], 1e-12)
    near(equations.loss(DOCUMENTS, SIMILARITY.double()), CASE[f"lm.{normalization}.h_loss_f64"], 1e-12)
