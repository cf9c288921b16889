"""Cutting texts into chunks, against sentencex alone and against the plain way with a split of every sentence.

    python -m benchmarks.chunking $RAYTRIEVER_TEST_DATA/raw_wikipedia/docs.jsonl

Prints MB of UTF-8 a second of one core's time (texts in memory to offsets), and the ratios. Rounds are interleaved, so
that other load on the machine meets all three alike; the median round counts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from sentencex import get_sentence_boundaries, segment

from pipelines.chunking.chunks import ChunkingSettings, chunk_text

SETTINGS = ChunkingSettings()


def plain_ends(text: str) -> list[int]:
    """The same greedy chunks, but for over-long sentences: words counted by splitting each sentence."""
    ends, words = [], 0
    for sentence in get_sentence_boundaries(SETTINGS.language, text):
        more = len(sentence["text"].split())
        if words and words + more > SETTINGS.max_words:
            ends.append(sentence["start_index"])
            words = 0
        words += more
    return [*ends, len(text)]


def main() -> None:
    """Measures the three on the texts of a file of JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with arguments.file.open(encoding="utf-8") as file:
        lines = file.readlines()
    megabytes = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
    ways: dict[str, Callable[[str], object]] = {
        "sentencex alone": lambda text: segment(SETTINGS.language, text),
        "plain": plain_ends,
        "chunk_text": lambda text: chunk_text(text, SETTINGS),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            texts = [json.loads(line)["text"] for line in lines]  # anew: a string keeps its UTF-8 once it was asked for
            started = time.process_time()
            for text in texts:
                way(text)
            seconds[name].append(time.process_time() - started)
    for name, measured in seconds.items():
        print(f"{name}: {megabytes / statistics.median(measured):.1f} MB/s")
    for other in ("sentencex alone", "plain"):
        ratio = statistics.median(a / b for a, b in zip(seconds[other], seconds["chunk_text"], strict=True))
        print(f"speed of chunk_text / speed of {other}: {ratio:.2f}")


if __name__ == "__main__":
    main()
