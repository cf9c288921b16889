"""A trial's training against one written out: Adam on the rows of a step's tokens, the rate up and then down."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy, normalize

from pipelines.batches import epoch_permutation
from retrieval.encoders.static import TokenTable
from trainers.jobs.probe import compare_with_first, corrected_p_values, verdict_lines
from trainers.probe.token_lists import TokenLists
from trainers.probe.trial import EpochRows, encode, train

TOKENS, DIMENSION = 60, 12
BETAS, EPSILON = (0.9, 0.999), 1e-8


def drawn(texts: int, generator: np.random.Generator, most: int = 12) -> list[list[int]]:
    return [generator.integers(0, TOKENS, generator.integers(1, most)).tolist() for _ in range(texts)]


def means(vectors: torch.Tensor, texts: list[list[int]]) -> torch.Tensor:
    return normalize(torch.stack([vectors[text].mean(dim=0) for text in texts]), dim=-1)


def test_a_trial_is_adam_on_the_rows_in_use_with_the_masks_that_are_stored() -> None:
    generator = np.random.default_rng(0)
    queries, documents = drawn(40, generator), drawn(40, generator)
    batches, size, passes, seed, peak = 10, 4, 8, 3, 1e-2
    rows = np.stack([generator.permutation(40).reshape(batches, size) for _ in range(2)])
    lists = [[int(c) for c in range(size) if c != r and generator.random() < 0.3] for _ in range(10) for r in range(4)]
    epoch = EpochRows(rows[0], rows[1], TokenLists.of(lists))
    start = torch.from_numpy(generator.standard_normal((TOKENS, DIMENSION)).astype(np.float32))
    table = TokenTable(start.clone())
    tokens = TokenLists.of(queries), TokenLists.of(documents)
    found = train(table, [epoch], tokens, passes, seed, 0.1, peak)

    vectors, moments, step, losses = start.double(), torch.zeros(2, TOKENS, DIMENSION, dtype=torch.float64), 0, []
    for number in range(passes):
        for batch in epoch_permutation(seed, number, batches).tolist():
            leaf = vectors.clone().requires_grad_()
            own = [[texts[row] for row in side[batch]] for texts, side in zip((queries, documents), rows, strict=True)]
            scores = means(leaf, own[0]) @ means(leaf, own[1]).T / 0.1
            loss = cross_entropy(scores.masked_fill(torch.from_numpy(epoch.mask(batch)), -torch.inf), torch.arange(4))
            (gradient,) = torch.autograd.grad(loss, leaf)
            used = sorted({token for side in own for text in side for token in text})
            rate = peak * min(1, (step + 1) / 50) * max(0.02, 1 - step / (passes * batches))
            step += 1
            for moment, beta, power in zip(moments, BETAS, (1, 2), strict=True):
                moment[used] = beta * moment[used] + (1 - beta) * gradient[used] ** power
            first, second = (moment / (1 - beta**step) for moment, beta in zip(moments, BETAS, strict=True))
            vectors[used] -= rate * first[used] / (second[used].sqrt() + EPSILON)
            losses.append(loss.item())
    np.testing.assert_allclose(table.embedding.weight.detach(), vectors, atol=2e-5)
    assert found.pairs == passes * batches * size
    assert found.masked == np.mean([len(row) for row in lists]) / (size - 1)
    np.testing.assert_allclose(found.loss, np.mean(losses[-8:]), rtol=1e-5)


def test_texts_are_means_of_their_tokens_whatever_is_beside_them() -> None:
    generator = np.random.default_rng(2)
    start = torch.from_numpy(generator.standard_normal((TOKENS, DIMENSION)).astype(np.float32))
    texts = [*drawn(50, generator), []]
    found = encode(TokenTable(start.clone()), TokenLists.of(texts))
    np.testing.assert_allclose(found[:-1], means(start, texts[:-1]), atol=1e-6)
    assert not found[-1].any()
    assert TokenLists.of(texts).offsets.dtype == np.int64  # of all tokens of a corpus
    assert TokenLists.of([[250_000]]).tokens.tolist() == [250_000]
    taken = TokenLists.of(texts).take(np.array([50, 3, 3, 0]))
    assert [taken.tokens[a:b].tolist() for a, b in zip(taken.offsets, taken.offsets[1:], strict=False)] == [
        texts[number] for number in (50, 3, 3, 0)
    ]


def test_a_verdict_says_no_more_than_its_interval() -> None:
    """Differences of .01, .02 and .03: a mean of .02, half an interval of 4.303 · .01 / √3."""
    ways = {
        "before training": {"of_seeds": [0.1]},
        "random": {"of_seeds": [0.30, 0.30, 0.30]},
        "hard": {"of_seeds": [0.31, 0.32, 0.33]},
        "harder": {"of_seeds": [0.31, 0.311, 0.312]},
        "wrong": {"of_seeds": [0.28, 0.281, 0.279]},
        "same": {"of_seeds": [0.30, 0.30, 0.30]},
    }
    p_values = {"hard": 0.001, "harder": 0.002, "wrong": 0.00025, "chance": 0.1}  # times 3, 2, 4 and 1
    ways["chance"] = ways["harder"].copy()
    found = [("random", name, p) for name, p in p_values.items()] + [
        ("before training", "random", 0.9),
        ("hard", "same", 0.9),
    ]
    comparisons = [
        {"a": a, "b": b, "details": {"t_test": {"p_value": p}}, "holm": {"t_test": 0.95}} for a, b, p in found
    ]
    corrected = corrected_p_values(comparisons, "random")
    assert corrected[frozenset(("hard", "same"))] == 0.95  # over all pairs
    compare_with_first(ways, "random", corrected)
    assert "over" not in ways["random"]
    assert ways["hard"]["over"]["p"] == 0.003
    np.testing.assert_allclose([ways["hard"]["over"][key] for key in ("low", "high")], [-0.00484, 0.04484], atol=1e-5)
    assert verdict_lines(ways, "nDCG@10", 1234, 0.05) == [
        "hard: no difference from random is shown: nDCG@10 +0.0200 [-0.0048, +0.0448], 95 % interval over 3 seeds;"
        " p = 0.003 over 1,234 queries",
        "harder: better than random: nDCG@10 +0.0110 [+0.0085, +0.0135], 95 % interval over 3 seeds;"
        " p = 0.004 over 1,234 queries",
        "wrong: worse than random: nDCG@10 -0.0200 [-0.0225, -0.0175], 95 % interval over 3 seeds;"
        " p = 0.001 over 1,234 queries",
        "same: no difference from random is shown: nDCG@10 +0.0000 [+0.0000, +0.0000], 95 % interval over 3 seeds;"
        " p = 1 over 1,234 queries",
        "chance: no difference from random is shown: nDCG@10 +0.0110 [+0.0085, +0.0135], 95 % interval over 3 seeds;"
        " p = 0.1 over 1,234 queries",
    ]
