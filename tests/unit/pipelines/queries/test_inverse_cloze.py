import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.queries.spans import InverseClozeQueries, sentence_spans, without
from tests.unit.pipelines.queries.made_up import examples, source

SENTENCES = ["The lobster is an animal.", "It has two large claws.", "Most of them are blue.", "They live in the sea."]
TEXT = " ".join(SENTENCES)
SOURCES = [source(TEXT, "Lobster", f"s{number}") for number in range(2000)]


def test_a_sentence_finds_the_rest_nine_times_of_ten() -> None:
    made, dropped = examples(InverseClozeQueries(), *SOURCES)
    assert dropped == {}
    assert [example.query_id for example in made] == [f"{found.id}#0" for found in SOURCES]
    removed = []
    for example in made:
        (document,) = example.documents
        assert document.title == "Lobster"
        removed.append(example.query not in document.text)
        rest = [sentence for sentence in SENTENCES if sentence != example.query]
        assert document.text == (" ".join(rest) if removed[-1] else TEXT)
    chosen = [SENTENCES.index(example.query) for example in made]
    assert abs(np.mean(removed) - 0.9) < 4 * np.sqrt(0.09 / len(SOURCES))
    assert np.abs(np.bincount(chosen) / len(SOURCES) - 0.25).max() < 4 * np.sqrt(0.1875 / len(SOURCES))
    assert abs(np.corrcoef(chosen, removed)[0, 1]) < 4 / np.sqrt(len(SOURCES))


def test_draws_are_a_function_of_seed_and_id() -> None:
    settings = InverseClozeQueries()
    made, _ = examples(settings, *SOURCES[:50])
    again, _ = examples(settings, *SOURCES[49::-1])
    assert again[::-1] == made
    other, _ = examples(settings, *SOURCES[:50], seed=1)
    assert other != made


def test_several_sentences_of_a_passage_are_different() -> None:
    made, _ = examples(InverseClozeQueries(per_passage=9, removal=1), source(TEXT))
    assert sorted(example.query for example in made) == sorted(SENTENCES)
    assert [example.query_id for example in made] == ["s#0", "s#1", "s#2", "s#3"]


def test_each_chunk_is_a_passage() -> None:
    cut = TEXT.index("Most")
    made, _ = examples(InverseClozeQueries(removal=1), source(TEXT, cuts=(cut,)))
    assert [example.query_id for example in made] == ["s#0#0", "s#1#0"]
    assert made[1].query in SENTENCES[2:]
    assert made[1].documents[0].text in SENTENCES[2:]


def test_passages_of_one_sentence_are_counted() -> None:
    made, dropped = examples(
        InverseClozeQueries(), source("One sentence of five words."), source(""), source("Yes. No. Perhaps. Never.")
    )
    assert made == []
    assert dropped == {"passages without a sentence to take out": 3}


def test_texts_without_spaces() -> None:
    made, _ = examples(InverseClozeQueries(removal=1), source("龙虾是一种动物。它有两只大爪子。"))
    assert {made[0].query, made[0].documents[0].text} == {"龙虾是一种动物。", "它有两只大爪子。"}


@given(st.text())
def test_nothing_else_is_lost(text: str) -> None:
    for start, end in sentence_spans(text):
        assert "".join(without(text, start, end).split()) == "".join((text[:start] + text[end:]).split())
