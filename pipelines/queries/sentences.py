"""Sentences as stretches of a text without the white space around them."""

from raytriever.pipelines.chunking.sentences import sentence_ends
from raytriever.pipelines.chunking.words import TextWords


def sentence_spans(text: str, language: str = "en") -> list[tuple[int, int]]:
    """Start and end of every sentence, in characters; none is empty. Where sentencex fails, a paragraph is one."""
    spans: list[tuple[int, int]] = []
    start = 0
    ends, _ = sentence_ends(text, TextWords(text), language)
    for end in ends.tolist():
        sentence = text[start:end]
        if sentence.strip():
            spans.append((start + len(sentence) - len(sentence.lstrip()), end - len(sentence) + len(sentence.rstrip())))
        start = end
    return spans
