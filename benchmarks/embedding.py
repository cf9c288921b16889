"""Embedding with MiniLM on a CPU, against ``SentenceTransformer.encode`` and against the bare forward pass.

    python -m benchmarks.embedding ../data/nfcorpus ../data/squad_dpr --texts 600

Takes BEIR folders: documents (title and text) and queries. Everything runs in one process, in turns that change their
order from round to round; the median of the rounds' ratios counts. Prints four figures for each folder:

- texts/s against ``SentenceTransformer.encode`` with its defaults (float32),
- texts/s against the same in the precision that ours resolves 'auto' to,
- tokens/s against the transformer alone on the same padded batches, made beforehand,
- the smallest cosine between our vectors and those of the defaults.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from pipelines.formats.beir import BeirFolder
from retrieval.collections.collection import passage_text
from retrieval.embedding import encode_texts, token_budget_batches
from retrieval.encoders.attention import last_states
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings, resolve_dtype
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.jobs.embed import ON_CPU

TEXTS_PER_SHARD, TOKEN_BUDGET = ON_CPU["texts_per_shard"], ON_CPU["token_budget"]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def main() -> None:
    """Measures each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--texts", type=int, help="of each folder, evenly spaced; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch; as many as it wants by default")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    located = locate_model(MODEL)
    dtype = resolve_dtype("auto")
    settings = EncoderSettings(model=MODEL, dtype=dtype)
    encoder = load_encoder(settings, located.path, located.fingerprint).eval().to(getattr(torch, dtype))
    exact = SentenceTransformer(str(located.path), device="cpu")
    same = SentenceTransformer(str(located.path), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    print(f"MiniLM in {dtype}, {torch.get_num_threads()} threads, rounds of every run in turns: {arguments.rounds}")
    for warm in (exact.encode, same.encode, lambda texts: encode_texts(encoder, texts, "document")):
        warm(["the first pass is slower than any other"] * 8)
    for folder in arguments.folders:
        texts = read_texts(folder)
        step = max(1, len(texts) // arguments.texts) if arguments.texts else 1
        measure(folder.name, texts[::step], encoder, exact, same, arguments.rounds)


def read_texts(folder: Path) -> list[str]:
    """Documents, then queries."""
    format_ = BeirFolder(path=str(folder)).open().format
    documents = [passage_text(record.title, record.text) for record in format_.documents()]
    return documents + [record.text for record in format_.queries()]


def measure(
    name: str,
    texts: list[str],
    encoder: TextEncoder,
    exact: SentenceTransformer,
    same: SentenceTransformer,
    rounds: int,
) -> None:
    """Prints the figures of one folder's texts."""
    shards = [texts[start : start + TEXTS_PER_SHARD] for start in range(0, len(texts), TEXTS_PER_SHARD)]
    batches = [batch for shard in shards for batch in padded_batches(encoder, shard)]
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: np.concatenate(
            [encode_texts(encoder, s, "document", token_budget=TOKEN_BUDGET) for s in shards]
        ),
        "exact": lambda: exact.encode(texts, show_progress_bar=False),
        "same": lambda: same.encode(texts, show_progress_bar=False),
        "bare": lambda: forward(encoder, batches),
    }
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    vectors: dict[str, NDArray[np.float32]] = {}
    for number in range(rounds):
        order = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
        for key in order:
            started = time.perf_counter()
            vectors[key] = runs[key]()
            seconds[key].append(time.perf_counter() - started)
    ratio = {key: np.median(np.array(values) / np.array(seconds["ours"])) for key, values in seconds.items()}
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    padded = sum(batch["input_ids"].numel() for batch in batches)
    cosine = np.einsum("nd,nd->n", vectors["ours"], vectors["exact"]).min()
    print(f"{name}: {len(texts):,} texts, {tokens:,} tokens ({tokens / padded:.1%} of the padded)")
    print(f"  {ratio['exact']:.2f} times the texts/s of SentenceTransformer.encode")
    print(f"  {ratio['same']:.2f} times the texts/s of SentenceTransformer.encode in our precision")
    print(f"  {ratio['bare']:.1%} of the tokens/s of the bare forward pass")
    print(f"  {cosine:.5f} the smallest cosine with the defaults' vectors")
    for key, values in seconds.items():
        print(f"  seconds of each round, {key}: {', '.join(f'{value:.2f}' for value in values)}")


def padded_batches(encoder: TextEncoder, texts: list[str]) -> list[dict[str, Tensor]]:
    """What ``encode_texts`` gives to the transformer."""
    ids = encoder.tokenize_ids(list(dict.fromkeys(texts)), "document")
    batches = token_budget_batches([len(row) for row in ids], TOKEN_BUDGET)
    return [encoder.pad([ids[index] for index in batch]) for batch in batches]


@torch.inference_mode()
def forward(encoder: TextEncoder, batches: list[dict[str, Tensor]]) -> None:
    """The transformer alone."""
    for batch in batches:
        last_states(encoder.transformer, batch)


if __name__ == "__main__":
    main()
