"""Retrieval tasks of MTEB made here, without a hub, and what an evaluation of one gives."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from retrieval.collections.collection import StoredCollection
from retrieval.encoders.specification import EncoderSettings
from retrieval.mteb_encoder import RaytrieverEncoder, load_described
from retrieval.vectors import StoredVectors
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mteb = pytest.importorskip("mteb", reason="MTEB is not installed")
    from mteb.abstasks.retrieval import AbsTaskRetrieval

WORDS = ["wing", "lift", "drag", "flow", "shock", "heat", "plate", "cone", "jet", "wave"]
DOCUMENTS, QUERIES = 120, 20


def metadata(name: str, type_: str = "Retrieval") -> Any:
    return mteb.TaskMetadata(
        name=name,
        description="Made up",
        dataset={"path": "nowhere/at-all", "revision": "0" * 40},
        type=type_,
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
        prompt={"query": "Find a passage about flight"},
    )


class Flight(AbsTaskRetrieval):
    """Queries repeat words of the one or two documents that are relevant; some have an instruction."""

    metadata = metadata("Flight")
    candidates = False
    repeated_id = False
    conversations = False

    def load_data(self, *_: Any, **__: Any) -> None:
        generator = np.random.default_rng(5)
        texts = [" ".join(generator.choice(WORDS, size=6)) for _ in range(DOCUMENTS)]
        corpus = [
            {"id": f"d/{row:03d} ü", "title": WORDS[row % 10] if row % 3 else "", "text": f"{texts[row]} {row}"}
            for row in range(DOCUMENTS)
        ]
        corpus[9]["text"] = ""  # MTEB has such documents, and so have we
        corpus[18]["text"] = corpus[9]["title"] = ""
        if self.repeated_id:
            corpus[1]["id"] = corpus[0]["id"]
        queries = [
            {"id": f"q{row}", "text": f"{texts[row]}?", "instruction": "No patents." if row % 2 else ""}
            for row in range(QUERIES)
        ]
        if self.conversations:
            turns = [
                [{"role": "user", "content": query["text"]}, {"role": "system", "content": "Why?"}] for query in queries
            ]
            queries = [{"id": f"q{row}", "text": turn} for row, turn in enumerate(turns)]
        judged = {f"q{row}": {corpus[row]["id"]: 2, corpus[row + 20]["id"]: 1} for row in range(QUERIES - 1)}
        ranked = {f"q{row}": [corpus[n]["id"] for n in generator.permutation(60)[:30]] for row in range(1, QUERIES)}
        self.dataset = {
            "default": {
                "test": {
                    "corpus": Dataset.from_list(corpus),
                    "queries": Dataset.from_list(queries),
                    "relevant_docs": judged,
                    "top_ranked": ranked if self.candidates else None,
                }
            }
        }
        self.data_loaded = True


class FlightReranking(Flight):
    metadata = metadata("FlightReranking", "Reranking")
    candidates = True


class FlightTalk(Flight):
    metadata = metadata("FlightTalk")
    conversations = True


class FlightTwice(Flight):
    metadata = metadata("FlightTwice")
    repeated_id = True


def save_encoder(folder: Path) -> str:
    """A tiny encoder, the same every time, as a sentence-transformers folder with both prompts."""
    model = str(save_tiny_model("bert", folder / "plain"))
    prompts = {"query_prompt": "the index of ", "document_prompt": "return "}
    load_described(EncoderSettings(model=model, pooling="mean", normalize=True, **prompts)).query.save(folder / "tiny")
    return str(folder / "tiny")


class StoredEncoder(RaytrieverEncoder):
    """The vectors that a search has stored, by their texts."""

    def __init__(self, encoder: str, folder: Path) -> None:
        super().__init__(encoder, device="cpu")
        self._vectors: dict[str, Any] = {}
        for part, vectors in (("documents", "document_vectors"), ("queries", "query_vectors")):
            collection, stored = StoredCollection(str(folder / part)), StoredVectors(str(folder / vectors)).part(part)
            texts = collection.texts(part, np.arange(len(stored)))
            self._vectors |= dict(zip(texts, stored.range(0, len(stored)), strict=True))

    def encode(self, inputs: Any, **_: Any) -> Any:
        return np.stack([self._vectors[text] for batch in inputs for text in batch["text"]])


def evaluate(model: Any, task: Any, folder: Path | None = None) -> dict[str, float]:
    """Scores of the test split; ``folder``: where MTEB writes the rankings."""
    done = mteb.evaluate(
        model,
        task,
        cache=None,
        co2_tracker=False,
        show_progress_bar=False,
        prediction_folder=folder,
        encode_kwargs={"batch_size": 16},
    )
    scores: dict[str, float] = done.task_results[0].scores["test"][0]
    return scores


def predictions(folder: Path, name: str) -> dict[str, dict[str, float]]:
    found = json.loads((folder / f"{name}_predictions.json").read_text())
    of_split: dict[str, dict[str, float]] = found["default"]["test"]
    return of_split
