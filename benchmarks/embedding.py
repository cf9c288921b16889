"""Embedding, against ``SentenceTransformer.encode`` with its defaults, on the standard library's functions.

    python -m benchmarks.embedding --texts 1500

Both run on the same texts in one process, in turns; prints the ratio of texts a second and the smallest cosine.
"""

import argparse
import time

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from raytriever.retrieval.collections.python_functions import PythonFunctions
from raytriever.retrieval.embedding import encode_texts
from raytriever.retrieval.encoders.pretrained import locate_model
from raytriever.retrieval.encoders.specification import EncoderSettings, resolve_dtype
from raytriever.retrieval.encoders.text_encoder import load_encoder

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def main() -> None:
    """Three rounds of each; the median ratio counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=1_500)
    arguments = parser.parse_args()
    source = PythonFunctions(limit=arguments.texts).open()
    texts = [text for batch in source.documents() for text in batch["text"].to_pylist()]
    located = locate_model(MODEL)
    theirs = SentenceTransformer(str(located.path), device="cpu")
    dtype = resolve_dtype("auto")
    ours = load_encoder(EncoderSettings(model=MODEL), located.path, located.fingerprint).eval()
    ours = ours.to(getattr(torch, dtype))
    ratios = []
    for _ in range(3):
        started = time.perf_counter()
        expected = theirs.encode(texts, show_progress_bar=False)
        their_seconds = time.perf_counter() - started
        started = time.perf_counter()
        vectors = encode_texts(ours, texts, "document", token_budget=4096)
        ratios.append(their_seconds / (time.perf_counter() - started))
    cosine = np.einsum("nd,nd->n", expected, vectors).min()
    print(f"{len(texts)} texts in {dtype}: {np.median(ratios):.2f} times the texts/s of SentenceTransformer.encode")
    print(f"rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}; smallest cosine {cosine:.5f}")


if __name__ == "__main__":
    main()
