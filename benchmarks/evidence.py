"""The papers' directions, decided on weak students: what docs/reports/evidence.md states before and reports after.

    raytriever run multi_layer --until batches --set corpus.source.path=data/conala --set packing.epochs=4
    python -m benchmarks.evidence self_contrastive runs/multi_layer --output /tmp/evidence

Trains each way of a claim, seed after seed, on a recipe's stored stages, measures it on dev and test queries, and ends
in the claim's verdict. Every finished trial is a file: a run that was interrupted goes on.
"""

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t

from benchmarks.probe_and_transformers import student
from pipelines.batches import BatchReader
from raytriever.settings.configuration import apply_values
from retrieval.encoders.specification import has_bfloat16
from trainers.engine.early_stopping import Criterion
from trainers.engine.loop import train
from trainers.run_settings import RunSettings
from trainers.training_run import objective_to_train
from trainers.validation.retrieval import RetrievalValidation
from trainers.validation.settings import RetrievalValidationSettings

_PILOTS = 3  # seeds that tell the spread, and count
_POWER, _CONFIDENCE = 0.9, 0.95


@dataclass(frozen=True)
class Claim:
    """A claim of two ways, each the best on dev queries of those ``ways`` that ``best_on_dev`` takes for it.

    ``ways`` and ``settings``: of a training run, where names of stages stand for their folders. ``tested``: the stages
    with the collections whose test queries are asked, each with its verdict; dev queries are those of ``corpus``.
    ``test``: the first has more ('greater'), as much within ``margin`` ('equivalent', by two one-sided tests), or at
    least as much but for ``margin`` ('at least'). ``margin``: of the measure, and the smallest difference to be found.
    """

    ways: Mapping[str, Mapping[str, Any]]
    compared: tuple[str, str]
    test: Literal["greater", "equivalent", "at least"]
    margin: float
    layers: int
    settings: Mapping[str, Any]
    measure: str = "nDCG@10"
    tested: tuple[str, ...] = ("corpus",)


_LAYERS = {"kind": "layers", "layers": [1, 2], "reduction": "last"}
_MULTI_LAYER = {
    "objective.kind": "multi_layer",
    "objective.query_max_length": 32,
    "objective.document_max_length": 96,
    "encoder.normalize": False,
    "training.hard_negatives": 1,
    "training.epochs": 4,
    "training.optimizer.learning_rate": 2e-4,
}
_SELF_CONTRASTIVE = {"objective.training_form": "self_contrastive", "encoder.form": _LAYERS}
_LISTS = {
    "objective.kind": "coder",
    "objective.query_max_length": 32,
    "objective.documents": "vectors",
    "objective.other_encoder": True,  # documents are MiniLM's, of all layers
    "objective.temperature": 0.1,
    "training.epochs": 6,
}
_REVELA = {
    "objective.kind": "revela",
    "objective.language_model.model": "language_model",
    "objective.language_model.max_length": 96,
    "objective.max_length": 96,
    "objective.first_half": True,
    "objective.similarity_temperature": 0.02,
    "training.max_steps": 25,
    "training.batches_per_step": 8,
    "training.optimizer.learning_rate": 1e-4,
}
_CONTEXT = {"objective.context_documents": 16, "objective.context_max_length": 64, "objective.kind": "contextual"}


def with_rates(ways: Mapping[str, Mapping[str, Any]], *rates: float) -> dict[str, dict[str, Any]]:
    """Each way with each learning rate, of which dev queries choose."""
    key = "training.optimizer.learning_rate"
    return {f"{way}, {rate:g}": {**of, key: rate} for way, of in ways.items() for rate in rates}


_LENGTHS = {"1000 candidates": {"objective.candidates": 1000}, "32 candidates": {"objective.candidates": 32}}
CLAIMS = {
    # static margins tuned in tenths on dev queries against the adaptive target, which has nothing to tune
    "adaptive_margins": Claim(
        {"adaptive": {"objective.target": "adaptive"}}
        | {f"static {n / 10}": {"objective.target": "static", "objective.margin": n / 10} for n in range(1, 11)},
        ("adaptive", "static"),
        "equivalent",
        0.01,
        layers=0,
        settings={
            "objective.kind": "adaptive_margin",
            "objective.query_max_length": 32,
            "objective.in_batch": True,
            "objective.document_max_length": 96,
            "training.epochs": 4,
            "training.optimizer.learning_rate": 1e-3,
        },
    ),
    "self_contrastive": Claim(
        {
            "self-contrastive": {**_SELF_CONTRASTIVE, "objective.regularisation": 1.0},
            "dual encoder": {"objective.training_form": "dual_encoder"},
        },
        ("self-contrastive", "dual encoder"),
        "at least",
        0.005,
        layers=2,
        settings=_MULTI_LAYER,
    ),
    # run multi_layer_two_stages, packing.epochs=4; the first stage trains the same two layers, 4 epochs at 2e-4;
    # a mixed epoch has the batches of both stages, so that two of them are as many steps as four of one
    "two_stages": Claim(
        {"two stages": {"batches": "batches", "training.epochs": 2}, "one stage": {"batches": "bm25_batches"}},
        ("two stages", "one stage"),
        "greater",
        0.01,
        layers=2,
        settings={**_MULTI_LAYER, **_SELF_CONTRASTIVE, "objective.regularisation": 0.1},
    ),
    # run coder, batches.epochs=6
    "long_lists": Claim(
        with_rates(_LENGTHS, 3e-4, 1e-3),
        ("1000 candidates", "32 candidates"),
        "greater",
        0.005,
        layers=2,
        settings={**_LISTS, "objective.loss": "list_net"},
    ),
    "long_lists_max_margin": Claim(
        with_rates(_LENGTHS, 3e-4, 1e-3),
        ("32 candidates", "1000 candidates"),
        "at least",
        0.005,
        layers=2,
        settings={**_LISTS, "objective.loss": "max_margin"},
    ),
    # run contextual, packing.epochs=4, and in its folder nfcorpus_filtered, collected as "other"
    "contextual": Claim(
        with_rates({"contextual": _CONTEXT, "plain": {"objective.kind": "contrastive"}}, 1e-4, 3e-4),
        ("contextual", "plain"),
        "greater",
        0.01,
        layers=2,
        settings={
            "objective.similarity_temperature": 0.02,
            "objective.query_max_length": 32,
            "objective.document_max_length": 96,
            "training.epochs": 4,
        },
        tested=("corpus", "other"),
    ),
    # run revela_batches, chunks.chunking.max_words=60, batches of 8; in its folder squad_dpr, collected as "corpus",
    # and "language_model": benchmarks.small_language_model of raw_wikipedia, raw_techdocs, raw_stackexchange_threads,
    # --minutes 9 --width 192 --vocabulary 2000 --length 192
    "chunk_batches": Claim(
        {"chunks": {"batches": "batches"}, "random": {"batches": "random_batches"}},
        ("chunks", "random"),
        "greater",
        0.01,
        layers=2,
        settings=_REVELA,
    ),
    "value_normalization": Claim(
        {"with": {}, "without": {"objective.value_normalization": False}},
        ("with", "without"),
        "greater",
        0.01,
        layers=2,
        settings=_REVELA,
    ),
}


def run_trial(
    claim: Claim, way: str, seed: int, arguments: argparse.Namespace, validations: Mapping[str, RetrievalValidation]
) -> dict[str, float]:
    """Trains, and measures the dev queries and the test queries of each collection."""
    model = student(arguments.encoder, claim.layers, "pretrained", seed, arguments.output / "students")
    settings = {
        "batches": "batches",
        "encoder": {"model": str(model), "pooling": "mean", "normalize": True, "max_length": 128},
        "objective": {},
        "training": {"seed": seed, "schedule": {"warmup_ratio": 0.06}},
    }
    of_way = apply_values(settings, {**claim.settings, **claim.ways[way]}, way)
    objective = of_way["objective"]
    for of, key in ((of_way, "batches"), (objective, "documents"), (objective.get("language_model", {}), "model")):
        if key in of:
            of[key] = str(arguments.stages / of[key])
    run = RunSettings.model_validate(of_way)
    run = run.model_copy(update={"training": run.training.resolved()})
    trained = objective_to_train(run, run.located(), torch.device("cpu"))
    train(trained, BatchReader(of_way["batches"]), run.training)
    return {asked: validation.measure(trained)[claim.measure] for asked, validation in validations.items()}


def trials(claim: Claim, ways: list[str], seeds: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each way the measures of its seeds, of "dev" and of each tested stage; made where their files aren't there."""
    folder = arguments.output / arguments.claim
    folder.mkdir(parents=True, exist_ok=True)
    decides = Criterion(claim.measure, higher_is_better=True)
    validations = {
        asked: RetrievalValidation(
            RetrievalValidationSettings(
                collection=str(arguments.stages / stage), split=split, measure=claim.measure, others=()
            ),
            [decides],
            bf16=has_bfloat16(gpu=False),
        )
        for asked, stage, split in [("dev", "corpus", "dev"), *((stage, stage, "test") for stage in claim.tested)]
    }
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        for seed in range(seeds):
            target = folder / f"{way}-{seed}.json"
            if not target.exists():
                trial = run_trial(claim, way, seed, arguments, validations)
                print(way, seed, trial, flush=True)
                target.with_suffix(".part").write_text(json.dumps(trial))
                target.with_suffix(".part").rename(target)
            for asked, measured in json.loads(target.read_text()).items():
                found.setdefault(way, {}).setdefault(asked, []).append(measured)
    return found


def best_on_dev(found: Mapping[str, Mapping[str, Any]], named: str) -> str:
    """Of the way of that name, and those whose names go on behind a space or a comma, the best on dev queries."""
    ways = [way for way in found if re.match(rf"{re.escape(named)}($|[ ,])", way)]
    return max(ways, key=lambda way: float(np.mean(found[way]["dev"])))


def seeds_needed(differences: NDArray[np.float64], margin: float) -> int:
    """Seeds with which a difference of ``margin`` is found with a power of .9, from the spread of pilots."""
    spread, seeds = float(np.std(differences, ddof=1)), _PILOTS
    while (t.ppf((1 + _CONFIDENCE) / 2, seeds - 1) + t.ppf(_POWER, seeds - 1)) * spread / seeds**0.5 > margin:
        seeds += 1
    return seeds


def verdict(differences: NDArray[np.float64], claim: Claim) -> tuple[str, float, float]:
    """Whether the claim holds, and the interval of the mean difference that says so.

    The interval is of 95 % for 'greater', else of 90 %, whose ends are one-sided bounds of 95 %.
    """
    share = (1 + _CONFIDENCE) / 2 if claim.test == "greater" else _CONFIDENCE
    half = float(t.ppf(share, len(differences) - 1) * np.std(differences, ddof=1) / len(differences) ** 0.5)
    low, high = float(np.mean(differences)) - half, float(np.mean(differences)) + half
    floor = 0.0 if claim.test == "greater" else -claim.margin
    ceiling = claim.margin if claim.test == "equivalent" else np.inf
    if low > floor and high < ceiling:
        return "holds", low, high
    return ("does not hold" if high < floor or low > ceiling else "cannot be decided"), low, high


def main() -> None:
    """Pilots, then as many seeds as the power asks for, at most ``--most-seeds``; then the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("stages", type=Path, help="the output folder of the recipe that docs/reports/evidence.md names")
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--most-seeds", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    claim = CLAIMS[arguments.claim]
    piloted = trials(claim, list(claim.ways), _PILOTS, arguments)
    for way, of in piloted.items():
        print(f"{way:20}", *(f" {asked} {np.mean(m):.4f} ± {np.std(m, ddof=1):.4f}" for asked, m in of.items()))
    first, second = (best_on_dev(piloted, named) for named in claim.compared)
    needed = [seeds_needed(np.subtract(piloted[first][of], piloted[second][of]), claim.margin) for of in claim.tested]
    seeds = min(max(needed), arguments.most_seeds)
    found = trials(claim, [first, second], seeds, arguments)
    print(f"{first} over {second}, {claim.test}, margin {claim.margin}, {seeds} seeds:")
    for asked in claim.tested:
        differences = np.subtract(found[first][asked], found[second][asked])
        decided, low, high = verdict(differences, claim)
        print(f"{asked}: {float(np.mean(differences)):+.4f} [{low:+.4f}, {high:+.4f}]: {decided}")


if __name__ == "__main__":
    main()
