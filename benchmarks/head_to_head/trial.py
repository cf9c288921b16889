"""One trial: a student trained in one way on one collection, and measured on its held-out queries."""

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from datasets import concatenate_datasets
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from transformers import AutoModel

from benchmarks.head_to_head.data import Collection, Limits, Split
from benchmarks.head_to_head.ways import Material
from retrieval.encoders.specification import has_bfloat16
from retrieval.evaluation.measures import evaluate
from retrieval.indexes.exact_search import exact_top_k

MEASURE = "nDCG@10"
_CUTOFF = 10
_WARMUP = 0.1
_ROWS_COUNTED = 512


@dataclass(frozen=True)
class Student:
    """``layers`` of the base encoder, 0 for its word embeddings alone.

    ``rates``: learning rates that are tried, on the dev queries of ``tuned_on`` for all collections, or where that is
    empty for each collection on its own. ``untuned``: ways that have the reference's rate and temperature.
    """

    layers: int
    limits: Limits
    epochs: int
    rates: tuple[float, ...]
    ways: tuple[str, ...]
    tuned_on: tuple[str, ...] = ()
    untuned: tuple[str, ...] = ()

    def build(self, base: str, max_length: int, collection: Collection) -> SentenceTransformer:
        """Begins with the base encoder's weights."""
        if not self.layers:
            return SentenceTransformer(modules=[_static(base, max_length, collection)], device="cpu")
        model = SentenceTransformer(base, device="cpu", config_kwargs={"num_hidden_layers": self.layers})
        model.max_seq_length = max_length
        return model


def _static(base: str, max_length: int, collection: Collection) -> StaticEmbedding:
    """With the tokens of the collection alone, because those of no text would never change."""
    whole = Tokenizer.from_file(str(Path(base) / "tokenizer.json"))
    texts = [*collection.queries.values(), *collection.documents.values()]
    used = {token for text in texts for token in whole.encode(text, add_special_tokens=False).tokens}
    unknown = "[UNK]"
    kept = sorted(used | {unknown})
    specification = json.loads(whole.to_str())
    specification["model"]["vocab"] = {token: number for number, token in enumerate(kept)}
    specification["added_tokens"] = []
    specification["post_processor"] = specification["padding"] = None
    tokenizer = Tokenizer.from_str(json.dumps(specification))
    tokenizer.enable_truncation(max_length)
    words = AutoModel.from_pretrained(base).get_input_embeddings().weight.detach()
    return StaticEmbedding(tokenizer, embedding_weights=words[[whole.token_to_id(token) for token in kept]].clone())


class Point(NamedTuple):
    """What is tuned."""

    learning_rate: float
    temperature: float


@dataclass(frozen=True)
class Outcome:
    """``dev`` and ``test``: the measure of each query, in the split's order. ``seconds``: training's processor time."""

    dev: NDArray[np.float64]
    test: NDArray[np.float64]
    steps: int
    seconds: float
    loss: float


def run_trial(
    student: SentenceTransformer, material: Material, collection: Collection, batch: int, epochs: int,
    steps: int | None, point: Point, seed: int, folder: Path,
) -> Outcome:  # fmt: skip
    """Trains for ``epochs``, or ``steps`` where a number is given. Raises ``FloatingPointError`` if it diverges."""
    arguments = SentenceTransformerTrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        num_train_epochs=epochs,
        max_steps=steps or -1,
        learning_rate=point.learning_rate,
        warmup_steps=_WARMUP,
        batch_sampler=material.sampler,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=len(student) > 1 and has_bfloat16(gpu=False),
    )
    loss = material.loss(student, point.temperature)
    trainer = SentenceTransformerTrainer(student, arguments, material.data, loss=loss)
    started = time.process_time()
    with contextlib.redirect_stdout(None):
        result = trainer.train()
    seconds = time.process_time() - started
    if not all(weights.isfinite().all() for weights in student.parameters()):
        raise FloatingPointError(f"Weights are no numbers any more, and the loss is {result.training_loss}.")
    dev, test = measure(student, collection, collection.splits["dev"], collection.splits["test"])
    return Outcome(dev, test, result.global_step, seconds, result.training_loss)


@torch.inference_mode()
def measure(student: SentenceTransformer, collection: Collection, *splits: Split) -> list[NDArray[np.float64]]:
    """The measure of each query of each split, over all documents."""
    ids = list(collection.documents)
    documents = student.encode(list(collection.documents.values()), normalize_embeddings=True)
    found = []
    for split in splits:
        texts = [collection.queries[query] for query in split.queries]
        ranking = exact_top_k(student.encode(texts, normalize_embeddings=True), documents, _CUTOFF)
        scores = {
            query: {ids[row]: float(score) for row, score in zip(rows, of_query, strict=True)}
            for query, rows, of_query in zip(split.queries, ranking.rows.tolist(), ranking.scores.tolist(), strict=True)
        }
        judged = evaluate(split.grades, scores, [MEASURE])
        places = {query: place for place, query in enumerate(judged.query_ids)}
        found.append(judged.values[MEASURE][[places[query] for query in split.queries]])
    return found


def rows_and_tokens(student: SentenceTransformer, material: Material) -> tuple[int, float]:
    """How many rows the data have, and the tokens of all texts of a row, on average over some of them."""
    parts = list(material.data.values()) if isinstance(material.data, dict) else [material.data]
    rows = concatenate_datasets(parts)
    chosen = rows.select(range(0, len(rows), max(1, len(rows) // _ROWS_COUNTED)))
    texts = [text for name in rows.column_names if name != "label" for text in chosen[name][:]]
    tokenizer = student.tokenizer
    if isinstance(tokenizer, Tokenizer):
        count = sum(len(each) for each in tokenizer.encode_batch(texts, add_special_tokens=False))
    else:
        count = sum(map(len, tokenizer(texts, truncation=True, max_length=student.max_seq_length)["input_ids"]))
    return len(rows), count / len(chosen)
