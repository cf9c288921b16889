"""CODER's losses against recorded outputs of the authors' code, in float64 to 1e-9."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainers.objectives.coder.labels import at_level, binary, normalized
from trainers.objectives.coder.losses import info_nce_loss, list_net_loss, max_margin_loss, mean_over_labelled

CASE = dict(np.load(Path(__file__).parent / "coder_case_a.npz", allow_pickle=False))
PRESENT = torch.from_numpy(CASE["doc_mask"])
LABELS = torch.from_numpy(CASE["labels"])


def close(found, name):
    np.testing.assert_allclose(
        found.detach().numpy() if isinstance(found, torch.Tensor) else found, CASE[name], rtol=1e-9, atol=1e-10
    )


def inputs():
    query, documents = (torch.from_numpy(CASE[name]).clone().requires_grad_() for name in ("query_first", "doc_emb"))
    return query, documents, torch.einsum("bd,bnd->bn", query, documents)


def test_list_net():
    query, documents, scores = inputs()
    losses = list_net_loss(scores, LABELS, PRESENT)
    loss = mean_over_labelled(losses, LABELS, PRESENT)
    loss.backward()
    close(losses, "listnet_per_query")
    close(loss, "listnet_loss")
    close(query.grad, "listnet_grad_query")
    close(documents.grad, "listnet_grad_doc")


def test_list_net_over_the_mean_of_the_tokens():
    tokens = torch.from_numpy(CASE["query_tokens"]).clone().requires_grad_()
    mask = torch.from_numpy(CASE["query_mask"]).unsqueeze(-1)
    query = (tokens * mask).sum(dim=1) / mask.sum(dim=1)
    scores = torch.einsum("bd,bnd->bn", query, torch.from_numpy(CASE["doc_emb"]))
    loss = list_net_loss(scores, LABELS, PRESENT).mean()
    loss.backward()
    close(loss, "listnet_mean_loss")
    close(tokens.grad, "listnet_mean_grad_tokens")


def test_a_scale_of_the_scores():
    query, _, scores = inputs()
    loss = list_net_loss(0.5 * scores, LABELS, PRESENT).mean()
    loss.backward()
    close(loss, "listnet_scale05_loss")
    close(query.grad, "listnet_scale05_grad_query")
    query, _, scores = inputs()
    scale = torch.tensor(float(CASE["listnet_learn_scale"]), dtype=torch.float64, requires_grad=True)
    loss = list_net_loss(scale * scores + float(CASE["listnet_learn_bias"]), LABELS, PRESENT).mean()
    loss.backward()
    close(loss, "listnet_learn_loss")
    close(scale.grad, "listnet_learn_grad_scale")
    close(query.grad, "listnet_learn_grad_query")


def test_cosine():
    query, documents, _ = inputs()
    scores = torch.nn.functional.cosine_similarity(query.unsqueeze(1), documents, dim=-1, eps=1e-6)
    loss = list_net_loss(scores, LABELS, PRESENT).mean()
    loss.backward()
    close(scores.detach().masked_fill(~PRESENT, -torch.inf), "listnet_cosine_scores")
    close(loss, "listnet_cosine_loss")
    close(query.grad, "listnet_cosine_grad_query")
    close(documents.grad, "listnet_cosine_grad_doc")


def test_strict_labels():
    query, _, scores = inputs()
    strict = at_level(LABELS, 2.0)
    loss = mean_over_labelled(list_net_loss(scores, strict, PRESENT), strict, PRESENT)
    loss.backward()
    close(loss, "listnet_strict2_loss")
    close(query.grad[torch.from_numpy(CASE["strict_rows"])], "listnet_strict2_grad_query")


def test_binary_labels():
    query, _, scores = inputs()
    loss = list_net_loss(scores, binary(at_level(LABELS, 1.0)), PRESENT).mean()
    loss.backward()
    close(loss, "listnet_binary_loss")
    close(query.grad, "listnet_binary_grad_query")


def test_one_positive_is_info_nce():
    best = torch.full_like(LABELS, -torch.inf)
    best[torch.arange(len(best)), torch.from_numpy(CASE["nll_positive_index"])] = 1.0
    for loss_of, labels in ((info_nce_loss, LABELS), (list_net_loss, best)):
        query, documents, scores = inputs()
        losses = loss_of(scores, labels, PRESENT)
        losses.mean().backward()
        close(losses, "nll_per_query")
        close(losses.mean(), "nll_loss")
        close(query.grad, "nll_grad_query")
        close(documents.grad, "nll_grad_doc")


KINDS = {
    "max": "max",
    "maxmin": "max_min",
    "maxminmax": "max_min_max",
    "maxminbatchmean": "max_min_batch_mean",
    "std": "standard_deviation",
}


@pytest.mark.parametrize("name", KINDS)
def test_normalized_labels(name):
    rows = torch.from_numpy(CASE["norm_rows"])
    labels = normalized(LABELS[rows], KINDS[name])
    close(labels, f"labels_norm_{name}")
    query, _, scores = inputs()
    loss = list_net_loss(scores[rows], labels, PRESENT[rows]).mean()
    loss.backward()
    close(loss, f"listnet_norm_{name}_loss")
    close(query.grad[rows], f"listnet_norm_{name}_grad_query")


def test_max_margin():
    query, documents, scores = inputs()
    losses = max_margin_loss(scores, LABELS, PRESENT, divide_by_width=True)
    losses.mean().backward()
    close(losses, "maxmargin_per_query")
    close(losses.mean(), "maxmargin_loss")
    close(query.grad, "maxmargin_grad_query")
    close(documents.grad, "maxmargin_grad_doc")
    own = max_margin_loss(inputs()[2], LABELS, PRESENT)
    close(own.detach() * PRESENT.sum(dim=1), "maxmargin_sum_over_pairs_per_query")
