import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.queries.spans import sentence_spans

PIECES = [
    "Dr. ",
    "He said: hello! ",
    "e.g. ",
    "a",
    ". ",
    "\n\n",
    "\u2028",
    "\xa0",
    "\u3000",
    "。",
    "中",
    "\U0001d518",
    "(1.",
    "\r\n",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text())
def test_sentences_lose_nothing_but_white_space(text: str) -> None:
    spans = sentence_spans(text)
    end = 0
    for start, stop in spans:
        assert end <= start < stop
        assert not text[end:start].strip()
        assert text[start:stop] == text[start:stop].strip()
        end = stop
    assert not text[end:].strip()


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Dr. Smith went. He said: hello!\n\nNew one", ["Dr. Smith went.", "He said: hello!", "New one"]),
        ("你好。世界。", ["你好。", "世界。"]),
        ("He left J.\u2028Smith.", ["He left J.\u2028Smith."]),
        (" \n ", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences
