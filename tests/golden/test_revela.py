"""In-batch attention against recorded outputs of the authors' code and of the equations in float64.

Where a thing could be understood in two ways, a transcription of the equations with that mistake is off by what is
written beside it, so that the values here would tell.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.trainers.objectives.revela.equations import EPSILON, InBatchLlama, Llama, reading
from tests.unit.trainers.objectives.revela.models import in_float64
from trainers.objectives.revela.cross_attention import cross_document_attention, find_readers
from trainers.objectives.revela.language_model import InBatchLanguageModel
from trainers.objectives.revela.objective import in_batch_similarity

FOLDER = Path(__file__).parent
CASE = {name: torch.from_numpy(array) for name, array in np.load(FOLDER / "revela_case_a.npz").items()}
WEIGHTS = load_file(FOLDER / "revela_case_a_weights.safetensors")
IDS, MASK, SIMILARITY = (CASE[f"lm.{name}"] for name in ("input_ids", "attention_mask", "sim"))
REAL = MASK.bool()
DOCUMENTS = [ids[real] for ids, real in zip(IDS, REAL, strict=True)]
OTHERS = ~torch.eye(len(IDS), dtype=torch.bool)

each_normalization = pytest.mark.parametrize("normalization", ["vnorm", "novnorm"])
pytestmark = pytest.mark.usefixtures("one_thread")


def causal_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=64,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(WEIGHTS)
    return model


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
    logits = model.lm_head(model.last_states(IDS, MASK, similarity))
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
    logits = model.lm_head(model.last_states(IDS, MASK, similarity))
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


MODEL = Llama({name: tensor.double() for name, tensor in WEIGHTS.items()}, 3, 4, 2, 1e-5, 10000.0)


class AllHeadsNorm(InBatchLlama):
    """The norm of a token's values over all heads."""

    def read_one(self, queries, keys, values):
        norms = values.square().sum(dim=(0, 2)).sqrt().unsqueeze(1)
        plain = [reading(query, keys[self.group(h)], values[self.group(h)], False) for h, query in enumerate(queries)]
        lengths = [reading(query, keys[self.group(h)], norms, False) for h, query in enumerate(queries)]
        return torch.stack([read / (length + EPSILON) for read, length in zip(plain, lengths, strict=True)])


class ResultNorm(InBatchLlama):
    """Divided by the norm of what was read."""

    def read_one(self, queries, keys, values):
        plain = [reading(query, keys[self.group(h)], values[self.group(h)], False) for h, query in enumerate(queries)]
        return torch.stack([read / (read.norm(dim=-1, keepdim=True) + EPSILON) for read in plain])


class CausalReading(InBatchLlama):
    """A token reads only those before its own place."""

    def read_one(self, queries, keys, values):
        result = []
        for place in range(queries.shape[1]):
            seen = slice(place + 1)
            result.append(super().read_one(queries[:, place : place + 1], keys[:, seen], values[:, seen]))
        return torch.cat(result, dim=1)


class Transposed(InBatchLlama):
    def read(self, i, e_stream, h_stream, similarity):
        return super().read(i, e_stream, h_stream, similarity.T)


class OtherGroups(InBatchLlama):
    """Heads take turns in the groups instead of lying side by side."""

    def group(self, head):
        return head % self.model.groups


class OwnStream(InBatchLlama):
    """Keys and values of the h-stream."""

    def read(self, i, e_stream, h_stream, similarity):  # noqa: ARG002
        return super().read(i, h_stream, h_stream, similarity)


class Shifted(InBatchLlama):
    """A document's tokens come behind those that it reads."""

    first_position = 12


class JointSoftmax(InBatchLlama):
    """One softmax over the tokens of all other documents, log Sim added to the scores."""

    def read(self, i, e_stream, h_stream, similarity):
        others = [j for j in range(len(e_stream)) if j != i]
        keys = torch.cat([self.rotate(e_stream[j][1]) for j in others], dim=1)
        values = torch.cat([e_stream[j][2] for j in others], dim=1)
        bias = torch.cat([similarity[i, j].log().expand(e_stream[j][1].shape[1]) for j in others])
        result = []
        for head, query in enumerate(self.rotate(h_stream[i][0])):
            key, value = keys[self.group(head)], values[self.group(head)]
            weights = (query @ key.T / math.sqrt(query.shape[-1]) + bias).softmax(dim=-1)
            result.append(weights @ value / (weights @ value.norm(dim=-1, keepdim=True) + EPSILON))
        return torch.stack(result)


class DocumentMeans(InBatchLlama):
    """The mean over documents of their means."""

    def loss(self, documents, similarity):
        logits = self.h_logits(documents, similarity)
        losses = [
            torch.nn.functional.cross_entropy(each[:-1], ids[1:]) for each, ids in zip(logits, documents, strict=True)
        ]
        return torch.stack(losses).mean()


class Detached(InBatchLlama):
    """No gradient through what is read."""

    def read(self, i, e_stream, h_stream, similarity):
        return super().read(i, [[heads.detach() for heads in each] for each in e_stream], h_stream, similarity)


def test_the_equations_are_the_recorded_ones() -> None:
    for normalization in ("vnorm", "novnorm"):
        equations = InBatchLlama(MODEL, value_normalization=normalization == "vnorm")
        logits = torch.cat(equations.h_logits(DOCUMENTS, SIMILARITY.double()))
        near(logits, CASE[f"lm.{normalization}.h_logits_f64"][REAL], 1e-12)
        near(equations.loss(DOCUMENTS, SIMILARITY.double()), CASE[f"lm.{normalization}.h_loss_f64"], 1e-12)


@pytest.mark.parametrize(
    ("mistaken", "of_logits", "of_loss"),
    [
        (InBatchLlama(MODEL, value_normalization=False), 3.8, 0.28),
        (AllHeadsNorm(MODEL), 0.43, -0.027),
        (ResultNorm(MODEL), 0.82, 0.046),
        (CausalReading(MODEL), 1.3, -0.021),
        (Transposed(MODEL), 1.2, -0.024),
        (OtherGroups(MODEL), 5.6, 0.044),
        (OwnStream(MODEL), 0.17, 0.0039),
        (Shifted(MODEL), 0.84, -0.053),
        (JointSoftmax(MODEL), 0.80, 0.034),
        (DocumentMeans(MODEL), 0.0, 0.080),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, InBatchLlama) else "",
)
def test_a_mistake_would_show(mistaken: InBatchLlama, of_logits: float, of_loss: float) -> None:
    """By far more than the tolerances above, which our model keeps."""
    model = in_float64(InBatchLanguageModel(causal_model()))
    similarity = SIMILARITY.double()
    logits = model.lm_head(model.last_states(IDS, MASK, similarity))[REAL].detach()
    loss = model(IDS, MASK, similarity)[0].detach()
    theirs = torch.cat(mistaken.h_logits(DOCUMENTS, similarity))
    assert float((theirs - logits).abs().max()) == pytest.approx(of_logits, rel=0.03, abs=1e-9)
    assert float(mistaken.loss(DOCUMENTS, similarity) - loss) == pytest.approx(of_loss, rel=0.03)


def test_keys_and_values_that_are_detached_would_show() -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    gradients = []
    for kind in (InBatchLlama, Detached):
        weight = MODEL.weights[name].clone().requires_grad_()
        equations = kind(Llama({**MODEL.weights, name: weight}, 3, 4, 2, 1e-5, 10000.0))
        gradients.append(torch.autograd.grad(equations.loss(DOCUMENTS, SIMILARITY.double()), weight)[0])
    near(gradients[0], CASE[f"lm.vnorm.grad.{name}"].double(), of_largest=1e-5)
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) == pytest.approx(0.23, abs=0.01)
