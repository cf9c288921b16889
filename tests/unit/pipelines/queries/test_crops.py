"""Crops: spans of the same words, drawn independently, as a function of seed and id."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.queries.documents import CropQueries
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from tests.unit.pipelines.queries.made_up import examples, source

WORDS = [f"w{number}" for number in range(200)]
SOURCES = [source(" ".join(WORDS), id_=f"s{number}") for number in range(1500)]


def spans(settings: CropQueries) -> list[tuple[list[int], list[int]]]:
    made, dropped = examples(settings, *SOURCES)
    assert dropped == {}
    return [
        tuple([int(word[1:]) for word in text.split()] for text in (example.query, example.documents[0].text))  # type: ignore[misc]
        for example in made
    ]


def test_two_spans_are_drawn_independently_and_a_tenth_of_the_words_left_out() -> None:
    found = spans(CropQueries(word_deletion=0))
    for pair in found:
        for span in pair:
            assert span == list(range(span[0], span[0] + len(span)))
    lengths = np.array([[len(span) for span in pair] for pair in found])
    assert lengths.min() == 10
    assert lengths.max() == 100
    assert np.abs(lengths.mean(axis=0) - 55).max() < 4 * 26 / np.sqrt(len(found))
    assert abs(np.corrcoef(lengths.T)[0, 1]) < 4 / np.sqrt(len(found))
    places = np.array([[span[0] / (200 - len(span)) for span in pair] for pair in found])
    assert np.abs(places.mean(axis=0) - 0.5).max() < 4 * 0.29 / np.sqrt(len(found))
    assert places.min() == 0
    assert places.max() == 1
    assert abs(np.corrcoef(places.T)[0, 1]) < 4 / np.sqrt(len(found))
    kept, spanned = 0, 0
    for pair in spans(CropQueries(minimum_share=0.5, maximum_share=0.5)):
        for span in pair:
            assert span == sorted(set(span))
            kept, spanned = kept + len(span), spanned + 100
    assert abs(kept / spanned - 0.9) < 4 * np.sqrt(0.09 / spanned)


def test_draws_are_a_function_of_seed_and_id() -> None:
    made, _ = examples(CropQueries(), *SOURCES[:20])
    again, _ = examples(CropQueries(), *SOURCES[10:20])
    assert made[10:] == again
    others, _ = examples(CropQueries(), *SOURCES[:20], seed=1)
    assert not {example.query for example in made} & {example.query for example in others}
    assert [example.query_id for example in made[:3]] == ["s0", "s1", "s2"]
    assert len({example.query for example in made}) == 20


@given(st.text(), st.integers(0, 3))
def test_crops_are_of_the_text(text: str, seed: int) -> None:
    made, dropped = examples(CropQueries(word_deletion=0, minimum_words=1), source(text), seed=seed)
    assert len(made) + sum(dropped.values()) == 1
    for example in made:
        assert example.query
        assert example.query in text
        assert example.documents[0].text in text
        assert example.documents[0].text.strip() == example.documents[0].text


def test_texts_without_spaces_short_passages_and_shares_in_the_wrong_order() -> None:
    text = "龙虾是一种动物它有两只大爪子" * 10
    made, _ = examples(CropQueries(word_deletion=0), source(text))
    assert 7 <= len(made[0].query) <= 70
    assert made[0].query in text
    assert examples(CropQueries(), source("only three words"), source("")) == ([], {"passages too short": 2})
    assert len(examples(CropQueries(), source("just these four words"))[0]) == 1
    made, _ = examples(CropQueries(word_deletion=0.99), *SOURCES[:50])
    assert all(example.query for example in made)  # a word is left of each
    with pytest.raises(UserError, match=r"minimum_share \(0\.6\) is above maximum_share \(0\.5\)"):
        validate(CropQueries, {"minimum_share": 0.6}, "queries")
