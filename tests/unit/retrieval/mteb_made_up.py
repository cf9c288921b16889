"""Tasks of MTEB made here without a hub."""

from typing import Any

import mteb
import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS

WORDS = ["wing", "lift", "drag", "flow", "shock", "heat", "plate", "cone", "jet", "wave"]
DOCUMENTS, QUERIES = 120, 20


def metadata(name: str, type_: str = "Retrieval", main_score: str = "ndcg_at_10") -> Any:
    return mteb.TaskMetadata(
        name=name,
        description="Made up",
        dataset={"path": "nowhere/at-all", "revision": "0" * 40},
        type=type_,
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
        prompt={"query": "Find a passage about flight"},
    )


class Flight(AbsTaskRetrieval):
    """Queries repeat words of the one or two documents that are relevant; some have an instruction."""

    metadata = metadata("Flight")
    candidates = False

    def load_data(self, *_: Any, **__: Any) -> None:
        generator = np.random.default_rng(5)
        texts = [" ".join(generator.choice(WORDS, size=6)) for _ in range(DOCUMENTS)]
        corpus = [
            {"id": f"d/{row:03d} ü", "title": WORDS[row % 10] if row % 3 else "", "text": f"{texts[row]} {row}"}
            for row in range(DOCUMENTS)
        ]
        corpus[9]["text"] = ""  # MTEB has such documents
        corpus[18]["text"] = corpus[9]["title"] = ""
        queries = [
            {"id": f"q{row}", "text": f"{texts[row]}?", "instruction": "No patents." if row % 2 else ""}
            for row in range(QUERIES)
        ]
        judged = {f"q{row}": {corpus[row]["id"]: 2, corpus[row + 20]["id"]: 1} for row in range(QUERIES - 1)}
        ranked = {f"q{row}": [corpus[n]["id"] for n in generator.permutation(60)[:30]] for row in range(1, QUERIES)}
        split = {"corpus": Dataset.from_list(corpus), "queries": Dataset.from_list(queries), "relevant_docs": judged}
        self.dataset = {"default": {"test": split | {"top_ranked": ranked if self.candidates else None}}}
        self.data_loaded = True


class FlightReranking(Flight):
    metadata = metadata("FlightReranking", "Reranking")
    candidates = True


def texts(count: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=6)) for _ in range(count)]


class FlightTopics(AbsTaskClassification):
    """Whether a text speaks of wings."""

    metadata = metadata("FlightTopics", "Classification", "accuracy")
    n_experiments = 2
    samples_per_label = 8

    def load_data(self, *_: Any, **__: Any) -> None:
        splits = {"train": texts(60, 1), "test": texts(40, 2)}
        tables = {
            split: Dataset.from_dict({"text": of, "label": [int("wing" in text) for text in of]})
            for split, of in splits.items()
        }
        self.dataset = DatasetDict(tables)
        self.data_loaded = True


class FlightSimilarity(AbsTaskSTS):
    """How many words two texts share."""

    metadata = metadata("FlightSimilarity", "STS", "cosine_spearman")

    def load_data(self, *_: Any, **__: Any) -> None:
        first, second = texts(30, 3), texts(30, 4)
        scores = [5 * len({*a.split()} & {*b.split()}) / 6 for a, b in zip(first, second, strict=True)]
        table = {"sentence1": first, "sentence2": second, "score": scores}
        self.dataset = DatasetDict({"test": Dataset.from_dict(table)})
        self.data_loaded = True
