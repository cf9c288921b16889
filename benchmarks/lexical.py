"""BM25 in parts against bm25s's own index of all texts: seconds of one core, taken in turns, and whether scores agree.

    OMP_NUM_THREADS=1 python -m benchmarks.lexical ../shared/data/medquad_liveqa ../shared/data/npl_vaswani

Prints the seconds that either takes to build and to answer all queries, and how many times as fast ours is.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from retrieval.indexes.top_k import merge_rankings
from retrieval.lexical import BM25Settings, LexicalIndex, WordCounts, _tokenizer_of, bm25_scores, sum_frequencies

ROUNDS, DEPTH = 3, 100


def texts_of(folders: list[Path], name: str) -> Iterator[str]:
    """Titles and texts of a file of each BEIR folder."""
    for folder in folders:
        for line in (folder / name).open(encoding="utf-8"):
            record = json.loads(line)
            yield f"{record.get('title') or ''} {record['text']}".strip()


def ours(texts: list[str], parts: int, settings: BM25Settings) -> list[tuple[int, LexicalIndex]]:
    """An index of each part, and where it begins."""
    bounds = [len(texts) * number // parts for number in range(parts + 1)]
    counts = [WordCounts.of(texts[start:stop], settings) for start, stop in pairwise(bounds)]
    frequencies = sum_frequencies(part.frequencies() for part in counts)
    scored = (bm25_scores(part, frequencies, len(texts), settings) for part in counts)
    indexes = [LexicalIndex(part.words, scores, settings) for part, scores in zip(counts, scored, strict=True)]
    return list(zip(bounds, indexes, strict=False))


def theirs(texts: list[str], settings: BM25Settings) -> tuple[Any, Any]:
    """bm25s's index, and the tokenizer that knows its words."""
    tokenizer = _tokenizer_of(settings)
    tokens = list(tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False))
    index = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", backend="numpy")
    index.index((tokens, tokenizer.get_vocab_dict()), create_empty_token=False, show_progress=False)
    return index, tokenizer


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="BEIR folders")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--queries", type=int, default=300)
    arguments = parser.parse_args()
    texts, settings = list(texts_of(arguments.folders, "corpus.jsonl")), BM25Settings()
    queries = list(texts_of(arguments.folders, "queries.jsonl"))[: arguments.queries]
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        started = time.process_time()
        index, tokenizer = theirs(texts, settings)
        built = time.process_time()
        asked = tokenizer.streaming_tokenize(queries, update_vocab=False, allow_empty=False)
        expected = [np.sort(index.get_scores_from_ids(tokens))[::-1][:DEPTH] for tokens in asked if tokens]
        seconds.setdefault("build, bm25s", []).append(built - started)
        seconds.setdefault("search, bm25s", []).append(time.process_time() - built)
        started = time.process_time()
        parts = ours(texts, arguments.parts, settings)
        built = time.process_time()
        found = merge_rankings([part.search(queries, DEPTH, first_row=start) for start, part in parts], DEPTH)
        seconds.setdefault("build, in parts", []).append(built - started)
        seconds.setdefault("search, in parts", []).append(time.process_time() - built)
    for name, of_rounds in seconds.items():
        print(f"{name:18} {min(of_rounds):8.2f} s")
    for what in ("build", "search"):
        ratio = min(seconds[f"{what}, bm25s"]) / min(seconds[f"{what}, in parts"])
        print(f"{what}: {ratio:.2f} times as fast as bm25s")
    ranked = [scores[scores > -np.inf] for scores in found.scores if scores[0] > -np.inf]
    agree = all(np.array_equal(a, b[b > 0]) for a, b in zip(ranked, expected, strict=True))
    print(f"{len(texts):,} texts, {len(queries):,} queries; scores agree to the bit: {agree}")


if __name__ == "__main__":
    main()
