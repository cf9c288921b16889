"""What storing vectors in float16 instead of float32 does to retrieval: bytes, and the measures of both.

    python -m benchmarks.stored_precision data/nfcorpus_filtered data/cystic_fibrosis

MiniLM in float32 embeds a BEIR folder's documents and the queries of its split 'test' once; the exact 100 best of
each query are found among the float32 vectors and among the same vectors rounded to float16, as `raytriever embed`
stores them.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.formats.beir import BeirFolder
from retrieval.collections.collection import passage_text
from retrieval.embedding import encode_texts
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from retrieval.evaluation.measures import evaluate
from retrieval.indexes.exact_search import search_stored

MODEL, DEPTH = "sentence-transformers/all-MiniLM-L6-v2", 100
MEASURES = ("nDCG@10", "R@100")


def main() -> None:
    """Prints the measures of each folder with either store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    located = locate_model(MODEL)
    encoder = load_encoder(EncoderSettings(model=MODEL, dtype="float32"), located.path, located.fingerprint).eval()
    for folder in parser.parse_args().folders:
        format_ = BeirFolder(path=str(folder)).open().format
        documents, queries = list(format_.documents()), list(format_.queries())
        qrels: dict[str, dict[str, int]] = {}
        for line in (folder / "qrels" / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]:
            query, document, grade = line.split("\t")
            qrels.setdefault(query, {})[document] = int(grade)
        texts = {record.id: record.text for record in queries}
        asked = encode_texts(encoder, [texts[query] for query in qrels], "query")
        passages = [passage_text(record.title, record.text) for record in documents]
        vectors = encode_texts(encoder, passages, "document")
        print(f"{folder.name}: {len(vectors):,} documents, {len(qrels):,} queries")
        for stored in (vectors, vectors.astype(np.float16)):
            means = _measured(qrels, [record.id for record in documents], asked, stored)
            shown = ", ".join(f"{name} {mean:.5f}" for name, mean in means.items())
            print(f"  {stored.dtype}: {stored.nbytes:,} bytes, {shown}")


def _measured(
    qrels: dict[str, dict[str, int]], ids: list[str], queries: NDArray[np.float32], stored: NDArray[np.floating]
) -> dict[str, float]:
    """Means over the queries; both sides of a product are rounded as the store rounds them."""
    rounded = queries.astype(stored.dtype).astype(np.float32)
    found = search_stored(rounded, np.ascontiguousarray(stored, dtype=np.float32), DEPTH)
    run = {
        query: {ids[row]: float(score) for row, score in zip(rows, scores, strict=True) if row >= 0}
        for query, rows, scores in zip(qrels, found.rows, found.scores, strict=True)
    }
    values = evaluate(qrels, run, MEASURES).values
    return {name: float(values[name].mean()) for name in MEASURES}


if __name__ == "__main__":
    main()
