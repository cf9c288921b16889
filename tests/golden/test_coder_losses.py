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


def check(name, loss, rows=..., **leaves):
    """The loss, and the gradients of these rows of the leaves, are those that are recorded."""
    loss.backward()
    close(loss, f"{name}_loss")
    for leaf, tensor in leaves.items():
        close(tensor.grad[rows], f"{name}_grad_{leaf}")


def test_list_net():
    query, documents, scores = inputs()
    losses = list_net_loss(scores, LABELS, PRESENT)
    close(losses, "listnet_per_query")
    check("listnet", mean_over_labelled(losses, LABELS, PRESENT), query=query, doc=documents)


def test_list_net_over_the_mean_of_the_tokens():
    tokens = torch.from_numpy(CASE["query_tokens"]).clone().requires_grad_()
    mask = torch.from_numpy(CASE["query_mask"]).unsqueeze(-1)
    query = (tokens * mask).sum(dim=1) / mask.sum(dim=1)
    scores = torch.einsum("bd,bnd->bn", query, torch.from_numpy(CASE["doc_emb"]))
    check("listnet_mean", list_net_loss(scores, LABELS, PRESENT).mean(), tokens=tokens)


def test_a_scale_of_the_scores():
    query, _, scores = inputs()
    check("listnet_scale05", list_net_loss(0.5 * scores, LABELS, PRESENT).mean(), query=query)
    query, _, scores = inputs()
    scale = torch.tensor(float(CASE["listnet_learn_scale"]), dtype=torch.float64, requires_grad=True)
    scores = scale * scores + float(CASE["listnet_learn_bias"])
    check("listnet_learn", list_net_loss(scores, LABELS, PRESENT).mean(), scale=scale, query=query)


def test_cosine():
    query, documents, _ = inputs()
    scores = torch.nn.functional.cosine_similarity(query.unsqueeze(1), documents, dim=-1, eps=1e-6)
    close(scores.detach().masked_fill(~PRESENT, -torch.inf), "listnet_cosine_scores")
    check("listnet_cosine", list_net_loss(scores, LABELS, PRESENT).mean(), query=query, doc=documents)


def test_strict_and_binary_labels():
    query, _, scores = inputs()
    strict = at_level(LABELS, 2.0)
    loss = mean_over_labelled(list_net_loss(scores, strict, PRESENT), strict, PRESENT)
    check("listnet_strict2", loss, rows=torch.from_numpy(CASE["strict_rows"]), query=query)
    query, _, scores = inputs()
    loss = list_net_loss(scores, binary(at_level(LABELS, 1.0)), PRESENT).mean()
    check("listnet_binary", loss, query=query)


def test_one_positive_is_info_nce():
    best = torch.full_like(LABELS, -torch.inf)
    best[torch.arange(len(best)), torch.from_numpy(CASE["nll_positive_index"])] = 1.0
    for loss_of, labels in ((info_nce_loss, LABELS), (list_net_loss, best)):
        query, documents, scores = inputs()
        losses = loss_of(scores, labels, PRESENT)
        close(losses, "nll_per_query")
        check("nll", losses.mean(), query=query, doc=documents)


KINDS = {
    "max": "max", "maxmin": "max_min", "maxminmax": "max_min_max", "maxminbatchmean": "max_min_batch_mean",
    "std": "standard_deviation",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_normalized_labels(name):
    rows = torch.from_numpy(CASE["norm_rows"])
    labels = normalized(LABELS[rows], KINDS[name])
    close(labels, f"labels_norm_{name}")
    query, _, scores = inputs()
    loss = list_net_loss(scores[rows], labels, PRESENT[rows]).mean()
    check(f"listnet_norm_{name}", loss, rows, query=query)


@pytest.mark.parametrize("kind", ["max", "max_min", "standard_deviation"])
def test_normalized_labels_have_no_unit_and_a_single_one_becomes_1(kind):
    labels = torch.tensor([[4.0, 1.0, 2.0], [3.0, -torch.inf, -torch.inf]])
    torch.testing.assert_close(normalized(labels / 10, kind), normalized(labels, kind))
    assert normalized(labels, kind)[1].tolist() == [1, -torch.inf, -torch.inf]


def test_max_margin():
    query, documents, scores = inputs()
    losses = max_margin_loss(scores, LABELS, PRESENT, divide_by_width=True)
    close(losses, "maxmargin_per_query")
    check("maxmargin", losses.mean(), query=query, doc=documents)
    own = max_margin_loss(scores, LABELS, PRESENT)
    close(own.detach() * PRESENT.sum(dim=1), "maxmargin_sum_over_pairs_per_query")
