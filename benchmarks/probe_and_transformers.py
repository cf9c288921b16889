"""Do transformers rank ways of making batches as a probe's static encoders do?

    python -m benchmarks.probe_and_transformers runs/probe/probe --encoder MODEL --layers 2 --output /tmp/rank

Trains on each way's batches, seed after seed, the first ``--layers`` layers of an encoder (``--start random``: with
random weights), measures them on the held-out queries, and ends in a table with the rank correlation of both orders.
Every finished trial is a file: a run that was interrupted goes on, and what is there already is only read.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from transformers import AutoConfig, AutoModel, AutoTokenizer

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact
from retrieval.encoders.pretrained import locate_named
from retrieval.encoders.specification import ModelSettings, has_bfloat16
from trainers.engine.early_stopping import Criterion
from trainers.engine.loop import train
from trainers.jobs.probe import TRIALS, UNTRAINED
from trainers.run_settings import RunSettings
from trainers.training_run import objective_to_train
from trainers.validation.retrieval import RetrievalValidation
from trainers.validation.settings import RetrievalValidationSettings

_RESAMPLES = 10_000


def batches_of(probe: Artifact) -> dict[str, str]:
    """Where each way's batches lie: beside the probe, as its recipe puts them."""
    beside = [path for path in Path(probe.uri).parent.iterdir() if (path / "manifest.json").is_file()]
    by_fingerprint = {Artifact(str(path)).fingerprint: str(path) for path in beside}
    inputs = probe.manifest["inputs"].items()
    return {key.removeprefix("batches."): by_fingerprint[of] for key, of in inputs if key.startswith("batches.")}


def student(encoder: str, layers: int, start: str, seed: int, folder: Path, width: int | None = None) -> Path:
    """The encoder's first layers as a folder, with its own weights or random ones (``width`` numbers a token)."""
    is_random = start == "random"
    name = _name(layers, start, width)
    target = folder / (f"{name}-{seed}" if is_random else name)
    if not target.exists():
        source = locate_named(ModelSettings(model=encoder)).path
        config = AutoConfig.from_pretrained(source, num_hidden_layers=layers)
        if width:
            heads = config.num_attention_heads * width // config.hidden_size  # as wide as the encoder's
            size = {"hidden_size": width, "intermediate_size": 4 * width}
            config.update(size | {"num_attention_heads": heads})
        torch.manual_seed(seed)
        model = AutoModel.from_config(config) if is_random else AutoModel.from_pretrained(source, config=config)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


def _name(layers: int, start: str, width: int | None) -> str:
    return f"{layers}-{start}-{width}" if width else f"{layers}-{start}"


def run_trial(
    batches: str | None, seed: int, arguments: argparse.Namespace, validation: RetrievalValidation
) -> dict[str, Any]:
    """Trains (``None``: not at all) and measures; settings are the probe's where transformers have them too."""
    started = time.perf_counter()
    asked = arguments.encoder, arguments.layers, arguments.start
    model = student(*asked, seed, arguments.output / "students", arguments.width)
    optimizer, schedule = {"learning_rate": arguments.learning_rate}, {"warmup_ratio": 0.06}
    settings = RunSettings.model_validate(
        {
            "batches": batches or "none",
            "encoder": {"model": str(model), "pooling": "mean", "normalize": True, "max_length": arguments.max_length},
            "dropout": 0.0,
            "objective": {"kind": "contrastive", "similarity_temperature": 0.05},
            "training": {"epochs": arguments.epochs, "seed": seed, "optimizer": optimizer, "schedule": schedule},
        }
    )
    settings = settings.model_copy(update={"training": settings.training.resolved()})
    objective = objective_to_train(settings, settings.located(), torch.device("cpu"))
    if batches is not None:
        train(objective, BatchReader(batches), settings.training)
    spent = time.perf_counter() - started
    return {"measures": validation.measure(objective), "seconds": spent}


def trials(arguments: argparse.Namespace, ways: Mapping[str, str]) -> dict[str, list[float]]:
    """The measure of each way's seeds; made where its file isn't there."""
    folder = arguments.output / _name(arguments.layers, arguments.start, arguments.width)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = RetrievalValidationSettings(collection=arguments.held_out, split="test", others=())
    decides = Criterion(held_out.measure, higher_is_better=True)
    validation = RetrievalValidation(held_out, [decides], bf16=has_bfloat16(gpu=False))
    found: dict[str, list[float]] = {}
    for seed in range(arguments.seeds):
        for name, batches in {UNTRAINED: None, **ways}.items():
            target = folder / f"{name}-{seed}.json"
            if not target.exists():
                trial = run_trial(batches, seed, arguments, validation)
                print(arguments.layers, arguments.start, name, seed, trial, flush=True)
                target.with_suffix(".part").write_text(json.dumps(trial))
                target.with_suffix(".part").rename(target)
            found.setdefault(name, []).append(json.loads(target.read_text())["measures"][held_out.measure])
    return found


def correlation(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Spearman's of the ways' means, and its 95 % interval over seeds drawn anew for each way."""
    random = np.random.default_rng(0)

    def drawn(ways: Sequence[Sequence[float]]) -> NDArray[np.float64]:
        return np.array([random.choice(np.asarray(seeds), (_RESAMPLES, len(seeds))).mean(axis=1) for seeds in ways])

    resampled = [_spearman(a, b) for a, b in zip(drawn(ours).T, drawn(theirs).T, strict=True)]
    low, high = np.quantile(resampled, [0.025, 0.975])
    means = [np.array([np.mean(seeds) for seeds in ways], dtype=np.float64) for ways in (ours, theirs)]
    return _spearman(*means), float(low), float(high)


def _spearman(ours: NDArray[np.floating], theirs: NDArray[np.floating]) -> float:
    return float(np.corrcoef(rankdata(ours), rankdata(theirs))[0, 1])


def spreads(of_seeds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Standard deviations: of the ways' means, of one way's seeds, and of these without what a seed adds to all ways.

    Ways of one seed begin at the same weights, so the last is the noise of a comparison of two ways.
    """
    values = np.array(of_seeds, dtype=np.float64)  # a row a way, a column a seed
    means = values.mean(axis=1, keepdims=True)
    left = values - means
    left -= left.mean(axis=0)
    freedom = (values.shape[0] - 1) * (values.shape[1] - 1)
    one = float(np.sqrt(values.var(axis=1, ddof=1).mean()))
    return float(means.std(ddof=1)), one, float(np.sqrt((left**2).sum() / freedom))


def main() -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", help="the folder of a finished probe")
    parser.add_argument("--held-out", required=True, help="a collection whose test split is searched")
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--start", choices=("pretrained", "random"), default="pretrained")
    parser.add_argument("--width", type=int, help="of a token's vector, with random weights; else the encoder's")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.width and arguments.start != "random":
        parser.error("--width needs --start random")
    probe = Artifact(arguments.probe)
    foretold = probe.read_json(TRIALS)["ways"]
    found = trials(arguments, batches_of(probe))
    for name, values in found.items():
        static = foretold[name]["mean"]
        print(f"{name:26} {static:.4f} {np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}")
    names = [name for name in found if name != UNTRAINED]
    of_seeds = [found[name] for name in names]
    ways, seeds, paired = spreads(of_seeds)
    rho, low, high = correlation([foretold[name]["of_seeds"] for name in names], of_seeds)
    print(f"spread of ways {ways:.4f}, of seeds {seeds:.4f}, way against way {paired:.4f}")
    print(f"Spearman's rho {rho:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
