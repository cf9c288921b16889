"""The scoring module against torch's own transformer layers, and what has to hold for any list."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from raytriever.errors import UserError
from retrieval.encoders.list_scorer import ListScorer, list_scorer_beside, load_list_scorer, save_list_scorer
from retrieval.encoders.specification import ListScorerForm
from tests.unit.retrieval.encoders.tiny_models import edited

DIMENSION, DOCUMENTS = 6, 20


def trained_scorer(seed: int = 0, **form: object) -> ListScorer:
    """In float64, with weights that are none of them zero."""
    values = {"layers": 2, "heads": 2, "width": 8, "dropout": 0.0} | form
    scorer = ListScorer(ListScorerForm(**values), DIMENSION, seed).double().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return scorer


def some_vectors(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, documents with a zero vector behind them, and lists of these lengths padded to the longest and one."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(len(lengths), DIMENSION, generator=generator, dtype=torch.float64)
    documents = torch.randn(DOCUMENTS + 1, DIMENSION, generator=generator, dtype=torch.float64)
    documents[-1] = 0
    places = torch.full((len(lengths), max(lengths) + 1), DOCUMENTS)
    for row, length in enumerate(lengths):
        places[row, :length] = torch.randperm(DOCUMENTS, generator=generator)[:length]
    return queries, documents, places


def normalized(norm: nn.Module, states: Tensor) -> Tensor:
    return functional.layer_norm(states, norm.bias.shape, norm.weight, norm.bias)


def expected_scores(scorer: ListScorer, query: Tensor, candidates: Tensor) -> Tensor:
    """One list, by torch's own transformer layers with the scorer's weights."""
    read = []
    for (linear, norm), vectors in ((scorer.read_query, query[None]), (scorer.read_candidate, candidates)):
        read.append(normalized(norm, functional.linear(vectors, linear.weight, linear.bias)))
    states = torch.cat(read)
    for block in scorer.blocks:
        parts = {
            "self_attn.in_proj_": block.attention_in,
            "self_attn.out_proj.": block.attention_out,
            "linear1.": block.feed_forward[0],
            "linear2.": block.feed_forward[3],
            "norm1.": block.attention_norm,
            "norm2.": block.feed_forward_norm,
        }
        size = (states.shape[1], scorer.form.heads, len(block.feed_forward[0].bias))
        layer = nn.TransformerEncoderLayer(*size, 0.0, "gelu", norm_first=True, dtype=torch.float64)
        layer.load_state_dict(
            {to + name: value for to, part in parts.items() for name, value in part.state_dict().items()}
        )
        states = layer(states)
    return (candidates + normalized(scorer.norm, states[1:]) @ scorer.out.T) @ query


@pytest.mark.parametrize("form", [{}, {"layers": 1, "heads": 1, "width": None}, {"layers": 3, "feed_forward": 5}])
def test_scores_are_those_of_torchs_own_layers_in_ragged_lists(form):
    scorer, lengths = trained_scorer(**form), [7, 1, 0, 4, 20]
    queries, documents, places = some_vectors(lengths)
    found = scorer(queries, documents, places)
    assert found.shape == (5, 21)
    for row, length in enumerate(lengths):
        expected = expected_scores(scorer, queries[row], documents[places[row, :length]])
        torch.testing.assert_close(found[row, :length], expected, rtol=1e-10, atol=0)
        assert not found[row, length:].any()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(0, 2**16), st.integers(0, 6))
def test_order_padding_and_neighbours_change_no_score(lengths, seed, padding):
    scorer = trained_scorer()
    queries, documents, places = some_vectors(lengths, seed)
    whole = scorer(queries, documents, places)
    wider = torch.nn.functional.pad(places, (0, padding), value=DOCUMENTS)
    order = torch.randperm(wider.shape[1], generator=torch.Generator().manual_seed(seed))
    shuffled = scorer(queries, documents, wider[:, order])
    torch.testing.assert_close(shuffled[:, order.argsort()][:, : places.shape[1]], whole, rtol=1e-10, atol=1e-12)
    for row, length in enumerate(lengths):
        alone = scorer(queries[row : row + 1], documents, places[row : row + 1, :length])
        torch.testing.assert_close(alone[0], whole[row, :length], rtol=1e-10, atol=1e-12)


def test_it_begins_as_the_inner_product_and_every_weight_learns():
    scorer = ListScorer(ListScorerForm(heads=2, width=8, dropout=0.0), DIMENSION, seed=3).double()
    queries, documents, places = some_vectors([5, 3])
    queries.requires_grad_()
    inner_products = torch.einsum("bd,bnd->bn", queries, documents[places])
    torch.testing.assert_close(scorer(queries, documents, places), inner_products, rtol=1e-12, atol=1e-12)
    optimizer = torch.optim.SGD(scorer.parameters(), 0.1)
    for _ in range(2):  # the first step moves W alone, which is zero before
        optimizer.zero_grad()
        torch.logsumexp(scorer(queries, documents, places)[places < DOCUMENTS], 0).backward()
        optimizer.step()
    assert queries.grad.abs().sum() > 0
    assert not [name for name, parameter in scorer.named_parameters() if not parameter.grad.any()]


def test_seeds_draw_the_weights_and_dropout_acts_in_training_alone() -> None:
    first, same, other = (ListScorer(ListScorerForm(heads=2), DIMENSION, seed) for seed in (1, 1, 2))
    assert all(torch.equal(mine, yours) for mine, yours in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.read_query[0].weight, other.read_query[0].weight)
    linear = [module for module in first.modules() if isinstance(module, torch.nn.Linear)]
    assert {module.out_features for module in linear} == {DIMENSION, 3 * DIMENSION, 4 * DIMENSION}
    drawn = torch.cat([module.weight.flatten() * module.in_features**0.5 for module in linear])
    assert (drawn.mean().item(), drawn.std().item()) == pytest.approx((0, 1), abs=0.1)
    scorer, vectors = trained_scorer(dropout=0.5), some_vectors([6])
    torch.manual_seed(0)
    for training in (False, True):
        assert torch.equal(scorer.train(training)(*vectors), scorer(*vectors)) is not training


def test_gradients_are_those_of_finite_differences_and_padding_has_none():
    scorer = trained_scorer(layers=1)
    queries, documents, places = some_vectors([3, 1])
    vectors = (queries.requires_grad_(), documents.requires_grad_())
    assert torch.autograd.gradcheck(lambda q, d: scorer(q, d, places), vectors)
    queries, documents, places = some_vectors([2, 9])
    documents.requires_grad_()
    trained_scorer()(queries, documents, places)[0].sum().backward()
    assert {row for row in range(DOCUMENTS) if documents.grad[row].any()} == set(places[0, :2].tolist())


def test_half_precision_changes_little_and_the_result_is_float32():
    scorer = trained_scorer().float()
    queries, documents, places = some_vectors([7, 2])
    queries, documents = queries.float(), documents.half()
    exact = scorer(queries, documents, places)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = scorer(queries, documents, places)
    assert exact.dtype == rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def test_what_is_saved_scores_alike(tmp_path: Path):
    scorer = trained_scorer(feed_forward=5).float()
    save_list_scorer(scorer, tmp_path)
    loaded = load_list_scorer(tmp_path)
    vectors = [tensor.float() if tensor.is_floating_point() else tensor for tensor in some_vectors([6, 2])]
    assert torch.equal(loaded.eval()(*vectors), scorer(*vectors))
    assert (loaded.form, loaded.blocks[1].feed_forward[0].out_features) == (scorer.form, 5)
    assert list_scorer_beside(tmp_path) == "transformer over lists, 2 layers, 2 heads, width 8"
    assert list_scorer_beside(tmp_path / "elsewhere") is None


def said(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], Path]:
    return lambda folder: edited(folder / "scoring.json", change)


def without_out(folder: Path) -> None:
    weights = folder / "scoring.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if name != "out"}, weights)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: (path / "scoring.json").unlink(), r"holds no scoring module \(scoring.json\).*kind 'transformer'"),
    (said(lambda said: said["form"].update(layers=3)), r"scoring.safetensors can't be read: .* has no blocks.2"),
    (said(lambda said: said.pop("dimension")), r"scoring.json can't be read: it has no 'dimension'"),
    (without_out, "has no out"),
    (lambda path: (path / "scoring.safetensors").write_bytes(b"no"), r"scoring.safetensors can't be read"),
])  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, damage, message):
    save_list_scorer(trained_scorer(), tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load_list_scorer(tmp_path)


@pytest.mark.parametrize(("form", "width"), [({"width": 10}, 10), ({}, 6)])
def test_heads_share_the_width(form, width):
    with pytest.raises(UserError, match=f"width is {width}, which 8 heads can't share"):
        ListScorer(ListScorerForm(**form), DIMENSION)
