"""Chunks of any text: lossless, within the limit, whole sentences, the same when cut again."""

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from sentencex import get_sentence_boundaries

from pipelines.chunking import sentences
from pipelines.chunking.chunks import ChunkingSettings, Kind, chunk_text
from pipelines.chunking.pieces import pack_pieces
from retrieval.words import count_words
from tests.unit.pipelines.chunking.texts import cut, limits, real_texts, texts, texts_of

PROSE = "The first sentence has six words. Here are four. " * 4


@pytest.mark.parametrize("kind", ["sentences", "markdown", "code", "lines", "parts"])
@given(text=texts, limit=limits)
def test_chunks_are_the_text(kind: Kind, text: str, limit: tuple[int, int]) -> None:
    settings = ChunkingSettings(kind=kind, max_words=limit[0], min_words=limit[1])
    chunks = chunk_text(text, settings, "a.py")
    found = texts_of(text, chunks)
    assert "".join(found) == (text if text.strip() else "")
    assert all(chunk.strip() for chunk in found)
    # Thai sentences that no space parts count their own words
    assert all(count_words(chunk) <= words for chunk, words in zip(found, chunks.words, strict=True))
    if kind == "sentences":
        assert max(chunks.words, default=0) <= settings.max_words
        assert not any(chunk[0].isspace() for chunk in found[1:])


def test_sentences_fill_chunks_up_to_the_limit_and_longer_ones_are_cut_by_words() -> None:
    assert (
        cut(PROSE, max_words=21, min_words=0)
        == ["The first sentence has six words. Here are four. The first sentence has six words. Here are four. "] * 2
    )
    text = " ".join(f"word{number}" for number in range(25)) + ". Next one."
    chunks = chunk_text(text, ChunkingSettings(max_words=10, min_words=0))
    assert chunks.words == [10, 10, 7]
    assert chunks.counts == {"sentences_cut_by_words": 1, "sources_cut_as_sentences": 1}
    text = "One two three four. " * 5 + "Last."
    assert chunk_text(text, ChunkingSettings(max_words=20, min_words=0)).words == [20, 1]
    assert chunk_text(text, ChunkingSettings(max_words=20, min_words=4)).words == [16, 5]
    assert chunk_text(text, ChunkingSettings(max_words=4, min_words=0)).counts == {"sources_cut_as_sentences": 1}


def test_lines_are_cut_at_blank_ones_first_and_never_within_and_parts_are_chunks() -> None:
    long = "a b c d e f g\n"
    for chunks in (
        ["a b\n\n", "c d\ne f\ng h\n"],
        ["x\n\na b c d\n", "e f g h"],
        ["a\n", long],
        [f"{long}  "],
        ["a b c d e f\n", "g"],
    ):
        assert cut("".join(chunks), kind="lines", max_words=6, min_words=0) == chunks
    counts = chunk_text(long, ChunkingSettings(kind="lines", max_words=6, min_words=0)).counts
    assert counts == {"sources_cut_as_lines": 1, "lines_longer_than_a_chunk": 1}
    for parts in (["a b c d\x1e", "e\x1e", "f"], ["a\x1e", "b\x1e", "c d e f"]):
        assert cut("".join(parts), kind="parts", max_words=3, min_words=1) == parts


@pytest.mark.parametrize("kind", ["sentences", "markdown"])
def test_what_sentencex_fails_on_is_counted_and_its_paragraphs_stay_whole(kind: Kind, monkeypatch) -> None:
    class PanicException(BaseException):  # as Rust names its own
        pass

    def panic(language: str, _: str) -> None:
        asked.append(language)
        raise PanicException

    asked: list[str] = []
    monkeypatch.setattr(sentences, "segment", panic)
    text = "One two. Three four.\n\nFive six."
    chunks = chunk_text(text, ChunkingSettings(kind=kind, max_words=4, min_words=0, language="de"))
    assert texts_of(text, chunks) == ["One two. Three four.\n\n", "Five six."]
    assert chunks.counts == {"windows_not_segmented": 1, f"sources_cut_as_{kind}": 1}
    assert asked == ["de"]


@pytest.mark.parametrize("unit", ["中", "ก", "あ。", "x", "word ", "😀", "\u0301", "a\n\n", "\ud800"])
def test_texts_of_one_unit_are_bounded(unit: str) -> None:
    text = unit * (300_000 // len(unit))
    chunks = chunk_text(text, ChunkingSettings())
    assert max(chunks.words) <= 120
    assert max(len(chunk) for chunk in texts_of(text, chunks)) <= 120 * 33
    assert "".join(texts_of(text, chunks)) == text


def test_nothing_comes_of_nothing_and_min_words_must_leave_room() -> None:
    assert chunk_text(" \n\u2028\t", ChunkingSettings()).ends == chunk_text("", ChunkingSettings()).ends == []
    with pytest.raises(ValidationError, match="lower it to 15 or less"):
        ChunkingSettings(max_words=30, min_words=16)


@pytest.mark.parametrize("corpus", ["raw_wikipedia", "raw_stackexchange_threads", "raw_techdocs"])
@pytest.mark.parametrize("kind", ["sentences", "markdown"])
def test_real_documents(data: Path, corpus: str, kind: Kind) -> None:
    settings = ChunkingSettings(kind=kind)
    short = total = 0
    for source_id, text in real_texts(data, corpus, 100):
        chunks = chunk_text(text, settings, source_id)
        found = texts_of(text, chunks)
        assert "".join(found) == text
        assert [count_words(chunk) for chunk in found] == chunks.words
        assert max(chunks.words) <= 120 or kind == "markdown"
        for chunk in found if kind == "sentences" else []:
            assert len(chunk_text(chunk, settings).ends) == 1  # cut again, it stays
        short += sum(words < 20 for words in chunks.words)
        total += len(chunks.words)
    assert short < (0.01 if kind == "sentences" else 0.15) * total


def test_sentences_of_real_articles_are_cut_only_where_they_are_too_long(data: Path) -> None:
    short = 0
    for _, text in real_texts(data, "raw_wikipedia", 40):
        ends = set(chunk_text(text, ChunkingSettings()).ends)
        for sentence in get_sentence_boundaries("en", text):
            if count_words(sentence["text"]) <= 120:
                short += 1
                inside = range(sentence["start_index"] + 1, sentence["start_index"] + len(sentence["text"].rstrip()))
                assert not ends.intersection(inside)
    assert short > 1000


def packed(sizes: list[int], openings: list[int], most: int, least: int) -> list[list[int]]:
    stops = pack_pieces([0, *accumulate(sizes)], openings, most, least)
    return [sizes[first:stop] for first, stop in pairwise([0, *stops])]


@pytest.mark.parametrize(("sizes", "openings", "least", "expected"), [
    ([4, 4, 4, 4], [], 0, [[4, 4], [4, 4]]),
    ([5, 5, 1], [], 0, [[5, 5], [1]]),
    ([3, 3, 3, 2], [], 3, [[3, 3], [3, 2]]),  # the tail takes as little as does
    ([4, 5, 1, 1], [], 2, [[4, 5], [1, 1]]),
    ([9, 1, 1], [], 3, [[9, 1], [1]]),  # no place leaves both with three
    ([3, 7, 2], [], 3, [[3], [7, 2]]),
    ([5, 9, 1], [1, 2], 2, [[5], [9, 1]]),  # a short tail joins what has room
    ([9, 1], [1], 2, [[9, 1]]),
    ([2, 2], [1], 2, [[2], [2]]),  # this one is not short
    ([1, 3], [1], 0, [[1], [3]]),
    ([1, 3, 3], [1, 2], 2, [[1, 3], [3]]),  # nothing begins before the chunk holds enough
    ([20, 1], [], 0, [[20], [1]]),
])  # fmt: skip
def test_examples(sizes: list[int], openings: list[int], least: int, expected: list[list[int]]) -> None:
    assert packed(sizes, openings, 10, least) == expected


@given(st.lists(st.integers(1, 12), min_size=1), st.sets(st.integers(0, 30)), st.integers(0, 5))
def test_chunks_hold_the_limit_and_break_only_where_they_must(sizes, opening_set, least) -> None:
    openings = sorted(opening for opening in opening_set if opening < len(sizes))
    chunks = packed(sizes, openings, 10, least)
    assert [size for chunk in chunks for size in chunk] == sizes
    assert all(sum(chunk) <= 10 or len(chunk) == 1 for chunk in chunks)
    place = 0
    for chunk, following in pairwise(chunks[:-1]):
        place += len(chunk)
        assert sum(chunk) + following[0] > 10 or (place in openings and sum(chunk) >= least) or following == chunks[-2]
    if len(chunks) > 1 and sum(chunks[-1]) < least:
        assert sum(chunks[-2]) + sum(chunks[-1]) > 10
