"""Cross-document attention against the equations, and what must hold for any tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from raytriever.errors import UserError
from tests.unit.trainers.objectives.revela import equations
from tests.unit.trainers.tiny import kept_bytes
from trainers.objectives.revela import cross_attention
from trainers.objectives.revela.cross_attention import find_readers
from trainers.objectives.revela.objective import in_batch_similarity

DOCUMENTS, HEADS, GROUPS, LENGTH, DIMENSION = 5, 6, 2, 9, 8
LENGTHS = [9, 3, 1, 6, 9]

each_way = pytest.mark.parametrize(
    ("value_normalization", "recompute"), [(True, True), (True, False), (False, True), (False, False)]
)


def tensors(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values, attention mask and Sim; the first three and Sim with a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries = normal(DOCUMENTS, HEADS, LENGTH, DIMENSION)
    keys, values = (normal(DOCUMENTS, GROUPS, LENGTH, DIMENSION) for _ in range(2))
    similarity = in_batch_similarity(normal(DOCUMENTS, 7), normal(DOCUMENTS, 7), 0.5)
    mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (queries, keys, values, similarity)]
    return [*leaves[:3], mask, leaves[3]]


def cross_document_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, similarity: Tensor, **settings: bool
) -> Tensor:
    readers = find_readers(mask, similarity)
    return cross_attention.cross_document_attention(queries, keys, values, similarity, readers, **settings)


def gradients(result: Tensor, given: list[Tensor], wanted: Sequence[int] = (0, 1, 2, 4)) -> tuple[Tensor, ...]:
    """Of one made-up function of the result, in queries, keys, values and Sim."""
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.autograd.grad((result * cotangent.to(result.dtype)).sum(), [given[place] for place in wanted])


def without_some_weights(given: list[Tensor]) -> None:
    """Document 2 is read by one alone, document 4 by nobody; the rest of Sim is as before, rows need not sum to 1."""
    weights = given[4].detach().clone()
    weights[:, 4] = 0.0
    weights[[0, 1, 4], 2] = 0.0
    given[4] = weights.requires_grad_()


def with_tiny_values(given: list[Tensor]) -> None:
    """eps counts where values are as small as it, and a token whose values are zero has a gradient that is a number."""
    values = (1e-6 * given[2]).detach()
    values[0, 0, 0] = 0.0
    given[2] = values.requires_grad_()


@each_way
@pytest.mark.parametrize("change", [list, without_some_weights, with_tiny_values], ids=lambda change: change.__name__)
def test_result_and_gradients_are_those_of_the_equations(
    change: Callable[[list[Tensor]], Any], value_normalization: bool, recompute: bool
) -> None:
    given = tensors()
    change(given)
    settings = {"value_normalization": value_normalization}
    found = cross_document_attention(*given, **settings, recompute=recompute)
    expected = equations.cross_document_attention(*given, **settings)
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ours, theirs = gradients(found, given), gradients(expected, given)
    for mine, true in zip(ours[:3], theirs[:3], strict=True):
        assert_close(mine, true, rtol=1e-10, atol=1e-10)
        assert mine.isfinite().all()
    # no softmax passes on the gradients of pairs without weight
    assert_close(ours[3], theirs[3] * (given[4] != 0), rtol=1e-10, atol=1e-10)
    unread = (given[4] == 0).all(dim=0)
    assert not ours[1][unread].any()
    assert not ours[2][unread].any()


def test_pairs_without_weight_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forwards nor backwards: the kernel sees the pairs of a one-hot Sim alone."""
    given = tensors()
    one_hot = torch.eye(DOCUMENTS, dtype=torch.float64).roll(1, dims=1).requires_grad_()
    seen, kernel = [], torch.nn.functional.scaled_dot_product_attention

    def note(queries: Tensor, *arguments: Tensor, **settings: float) -> Tensor:
        seen.append(len(queries))
        return kernel(queries, *arguments, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
    found = cross_document_attention(*given[:4], one_hot)
    assert seen == [DOCUMENTS]
    gradients(found, [*given[:4], one_hot])
    assert seen == [DOCUMENTS] * 2


def test_padding_and_the_diagonal_take_no_part() -> None:
    queries, keys, values, mask, similarity = tensors()
    expected = cross_document_attention(queries, keys, values, mask, similarity)
    padding = mask[:, None, :, None] == 0
    spoilt = [tensor.masked_fill(padding, torch.nan) for tensor in (keys, values)]
    with_itself = similarity + torch.eye(DOCUMENTS)
    found = cross_document_attention(queries, *spoilt, mask, with_itself)
    assert_close(found, expected, rtol=0, atol=0)
    given = [queries, keys, values, mask, similarity]
    for each in zip(gradients(found, given), gradients(expected, given), strict=True):
        assert_close(*each, rtol=0, atol=0)
    wider = [torch.nn.functional.pad(tensor, (0, 0, 0, 4), value=7.0) for tensor in (keys, values)]
    found = cross_document_attention(queries, *wider, torch.nn.functional.pad(mask, (0, 4)), similarity)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value_normalization", [True, False])
def test_bfloat16_is_as_near_as_bfloat16_can_be(value_normalization: bool) -> None:
    """Inputs are rounded, then all else is wrong by a few of bfloat16's steps at most, log norms of 7 included."""
    given = tensors()
    with torch.no_grad():
        given[2][:] = given[2] * torch.logspace(-3, 3, LENGTH).unsqueeze(1)
    rounded = [tensor.detach().bfloat16() for tensor in given[:3]]
    leaves = [tensor.requires_grad_() for tensor in rounded]
    similarity = given[4].detach().float().requires_grad_()
    found = cross_document_attention(*leaves, given[3], similarity, value_normalization=value_normalization)
    assert found.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in (*leaves, similarity)]
    expected = equations.cross_document_attention(
        *exact[:3], given[3], exact[3], value_normalization=value_normalization
    )
    ours = gradients(found, [*leaves, given[3], similarity])
    theirs = gradients(expected, [*exact[:3], given[3], exact[3]])
    for mine, true in zip((found, *ours), (expected, *theirs), strict=True):
        assert (mine.double() - true).norm() < 0.02 * true.norm()
    assert ours[3].dtype == torch.float32


def test_under_autocast_precision_is_that_of_the_tensors() -> None:
    given = tensors(torch.float32)
    expected = cross_document_attention(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found = cross_document_attention(*given)
        inside = gradients(found, given)
    assert_close(found, expected, rtol=0, atol=0)
    for each in zip(inside, gradients(expected, given), strict=True):
        assert_close(*each, rtol=0, atol=0)


def test_recomputation_keeps_what_is_given_alone() -> None:
    given = tensors()

    def kept(recompute: bool) -> int:
        return kept_bytes(lambda: cross_document_attention(*given, recompute=recompute))

    bytes_given = sum(tensor.nbytes for tensor in (*given[:3], given[4]))
    small = DOCUMENTS * DOCUMENTS * 8  # Sim without its diagonal, and where that is
    assert kept(recompute=True) <= bytes_given + 2 * small
    results = DOCUMENTS * given[0].nbytes
    assert results < kept(recompute=False) < 5 * results


def test_readers_are_found_and_wrong_masks_refused() -> None:
    similarity = torch.tensor([[0.0, 0.5, 0.5], [0.0, 3.0, 1.0], [0.0, 1.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    readers = find_readers(mask, similarity)
    assert readers.lengths == (2, 1, 3)
    assert readers.padding[:, 0, :, 0].tolist() == (mask == 0).tolist()
    (rows, read), (last, read_last) = readers.blocks
    assert readers.pairs.tolist() == [1, 5, 7, 2]
    assert (rows, read.tolist()) == (None, [1, 2, 1])
    assert last is not None
    assert (last.tolist(), read_last.tolist()) == ([0], [2])
    assert not find_readers(mask, torch.eye(3)).blocks
    with pytest.raises(ValueError, match="right-padded"):
        find_readers(mask[:, [0, 2, 1]], similarity)
    mask[1] = 0
    with pytest.raises(UserError, match="Document 2 of 3 in a batch has no token"):
        find_readers(mask, similarity)


@pytest.mark.parametrize("wanted", [[4], [0, 4], [1, 4], [2, 4], [1, 2]], ids=str)
@pytest.mark.parametrize("value_normalization", [True, False])
def test_gradients_of_some_alone_are_the_same(wanted: list[int], value_normalization: bool) -> None:
    """A frozen language model's keys and values need none."""
    given = tensors()
    expected = gradients(cross_document_attention(*given, value_normalization=value_normalization), given)
    names = dict(zip((0, 1, 2, 4), expected, strict=True))
    some = [tensor.detach() if place == 3 else tensor.detach().requires_grad_(place in wanted)
            for place, tensor in enumerate(tensors())]  # fmt: skip
    result = cross_document_attention(*some, value_normalization=value_normalization)
    for place, gradient in zip(wanted, gradients(result, some, wanted), strict=True):
        assert_close(gradient, names[place], rtol=1e-12, atol=1e-12)
