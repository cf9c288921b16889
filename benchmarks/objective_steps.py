"""A training step of an objective against another way to take it: forward and backward pass, MiniLM, tokenised before.

    python -m benchmarks.objective_steps margins ../data/squad_dpr
    python -m benchmarks.objective_steps layers ../data/squad_dpr
    python -m benchmarks.objective_steps lengths ../data/squad_dpr

``margins``: distributed relevance margins over 128 triplets (queries of some 9 tokens, passages of some 75, by seeded
cuts) against the same step with every text padded to 30, 200 and 200 tokens and an encoder call for each of the three,
as the authors of adaptive relevance margins take it. ``layers``: self-contrastive training of the last two layers
against the plain dual encoder. ``lengths``: a contrastive step over whole passages in chunks of tokens, as by default,
against all of them padded to the longest. Both sides take turns whose order alternates; the median of the rounds'
ratios counts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import torch

from benchmarks.training_pairs import MODEL, read_pairs
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings, Role
from retrieval.encoders.towers import load_towers
from trainers.objective import Objective, build_objective
from trainers.objectives.adaptive_margin import distributed_residuals, mean_error
from trainers.objectives.pair_settings import AdaptiveMarginSettings, ContrastiveSettings, MultiLayerSettings
from trainers.objectives.pairs import Triplets, unit_vectors
from trainers.objectives.settings import ObjectiveSettings

PADDED = {"query": 30, "document": 200, "negative": 200}


def triplets(folder: Path, count: int, query_words: int, passage_words: int) -> pa.Table:
    """``count`` rows; texts cut after a number of words drawn around a mean; negatives are other rows' passages."""
    generator = np.random.default_rng(0)
    rows = read_pairs(folder, 2 * count)

    def cut(text: str, mean: int) -> str:
        words = text.split()
        return " ".join(words[: max(2, int(generator.integers(mean // 2, mean + mean // 2 + 1)))])

    queries = [cut(text, query_words) for text in rows["query"].to_pylist()[:count]]
    passages = [cut(text, passage_words) for text in rows["document"].to_pylist()]
    return pa.table(
        {
            "query": queries,
            "document": passages[:count],
            "hard_negatives": pa.array([[text] for text in passages[count:]], pa.list_(pa.string())),
            "masked": pa.array([[]] * count, pa.list_(pa.int32())),
            "batch": pa.array([0] * count, pa.int32()),
        }
    )


def objective_of(settings: ObjectiveSettings, form: dict[str, object] | None) -> Objective:
    """Around MiniLM with dropout as it comes."""
    located = locate_model(MODEL)
    encoder = EncoderSettings.model_validate({"model": MODEL, "form": form})
    return build_objective(settings, load_towers(encoder, located.path, located.fingerprint)).train()


def step_of(objective: Objective, rows: pa.Table) -> Callable[[], None]:
    """Forward and backward of a batch that is collated beforehand."""
    batch = objective.collate(rows)

    def step() -> None:
        objective.zero_grad(set_to_none=True)
        objective(batch).loss.backward()

    return step


def padded_step(objective: Objective, rows: pa.Table) -> Callable[[], None]:
    """Every text padded to its kind's full length, queries, positives and negatives each encoded by themselves."""
    encoder = objective.encoder("query")
    texts = {
        "query": rows["query"].to_pylist(),
        "document": rows["document"].to_pylist(),
        "negative": [texts[0] for texts in rows["hard_negatives"].to_pylist()],
    }
    features = {
        name: encoder.tokenizer(
            of_kind, padding="max_length", truncation=True, max_length=PADDED[name], return_tensors="pt"
        )
        for name, of_kind in texts.items()
    }

    def step() -> None:
        objective.zero_grad(set_to_none=True)
        wanted = ("input_ids", "attention_mask")
        vectors = Triplets(*(unit_vectors(encoder({key: each[key] for key in wanted})) for each in features.values()))
        mean_error(distributed_residuals(vectors, vectors)[0]).backward()

    return step


def compare(names: tuple[str, str], ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> None:
    """Prints the ratio of times, theirs to ours."""
    for step in (ours, theirs):
        step()  # the first of each starts threads
    ratios = []
    for number in range(rounds):
        seconds = {}
        for step in (ours, theirs) if number % 2 else (theirs, ours):
            started = time.perf_counter()
            step()
            seconds[step] = time.perf_counter() - started
        ratios.append(seconds[theirs] / seconds[ours])
        print(
            f"{names[0]} {seconds[ours]:.2f} s, {names[1]} {seconds[theirs]:.2f} s, ratio {ratios[-1]:.3f}", flush=True
        )
    print(f"{names[1]} / {names[0]}: {np.median(ratios):.3f} (median of {rounds}), {torch.get_num_threads()} threads")


def main() -> None:
    """Measures one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=("margins", "layers", "lengths"))
    parser.add_argument("folder", type=Path, help="a BEIR folder with training judgments")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.comparison == "margins":
        rows = triplets(arguments.folder, arguments.batch_size or 128, query_words=6, passage_words=57)
        objective = objective_of(AdaptiveMarginSettings(target="distributed", chunk_size=32), None)
        encoder = objective.encoder("query")
        for role in get_args(Role):
            lengths = [len(ids) for ids in encoder.tokenize_ids(rows[role].to_pylist(), role)]
            print(f"tokens of a {role}: mean {np.mean(lengths):.1f}, longest {max(lengths)}")
        compare(("ours", "padded"), step_of(objective, rows), padded_step(objective, rows), arguments.rounds)
        return
    if arguments.comparison == "lengths":
        rows = read_pairs(arguments.folder, 10 * (arguments.batch_size or 32))
        rows = rows.take(list(range(0, len(rows), 10))).append_column(
            "batch", pa.array([0] * (len(rows) // 10), pa.int32())
        )
        chunks = step_of(objective_of(ContrastiveSettings(), None), rows)
        whole = step_of(objective_of(ContrastiveSettings(chunk_size=len(rows)), None), rows)
        compare(("chunks of tokens", "padded to the longest"), chunks, whole, arguments.rounds)
        return
    rows = triplets(arguments.folder, arguments.batch_size or 32, query_words=10, passage_words=100)
    form = {"kind": "layers", "layers": [5, 6], "reduction": "last"}
    layers = MultiLayerSettings(training_form="self_contrastive", regularisation=1.0, chunk_size=32)
    plain = MultiLayerSettings(training_form="dual_encoder", chunk_size=32)
    ours, theirs = (step_of(objective_of(settings, form), rows) for settings in (layers, plain))
    compare(("two layers", "dual encoder"), ours, theirs, arguments.rounds)


if __name__ == "__main__":
    main()
