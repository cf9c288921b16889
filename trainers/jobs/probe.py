"""`raytriever probe`: which batches make the better encoder, by static encoders that train on each in seconds."""

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt

from pipelines.batches import BatchReader
from pipelines.clustering.kmeans import KMeansSettings
from pipelines.filtering.false_negatives import FalseNegativeSettings
from pipelines.jobs.lookups import (
    TEXT_PARTS,
    Texts,
    earlier_file,
    earlier_record,
    earlier_shards,
    map_array,
    text_phases,
)
from pipelines.jobs.pack import PACKING
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter, origin, require_same_origin
from raytriever.errors import UserError
from raytriever.reports.report import TEST_SPLIT
from raytriever.reports.table import Table, counted
from raytriever.settings.configuration import InputPath, Level, NamedInputs
from raytriever.settings.recipe import load_recipe
from raytriever.stages.stage import WHOLE, Phase, Shard, Stage, StageConfig, Stages
from retrieval.collections.collection import ParquetRows, StoredCollection, TextPart, text_columns, texts_of
from retrieval.encoders.pretrained import LocatedModel, locate_named
from retrieval.encoders.specification import EncoderSettings
from retrieval.evaluation.conventions import CONVENTIONS
from retrieval.evaluation.judging import collection_judgments
from retrieval.evaluation.measures import PerQuery, evaluate, parse_measure
from retrieval.evaluation.report import Evaluated, block_lines, evaluation_blocks
from retrieval.evaluation.significance import comparable_pairs, compare_systems, holm
from retrieval.evaluation.stored import (
    EVALUATION,
    StoredEvaluation,
    how_it_was_measured,
    metrics_of,
    per_query_table,
    write_evaluation,
)
from trainers.probe.token_lists import TokenLists

if TYPE_CHECKING:
    from retrieval.encoders.static import TokenTable
    from retrieval.encoders.text_encoder import TextEncoder
    from trainers.probe.trial import EpochRows

UNTRAINED = "before training"
_PAIRS_A_SECOND = 1e4  # that one process trains on
TRIALS, RECOMMENDED = "trials.json", "recommended.yaml"


class ProbeConfig(StageConfig):
    """The batches to compare, and how the encoders are trained and measured."""

    batches: NamedInputs = Field(min_length=2)
    """Batches of the same pairs made in several ways, by their names in the table. The simplest comes first."""
    packings: NamedInputs = Field(default={})
    """The packings that the batches were made from, by the same names. The recommendation then includes settings of
    `pack`, and only ways with a packing are recommended."""
    collection: InputPath
    """The collection of the pairs, with held-out queries."""
    split: str = "test"
    """Split of the held-out queries."""
    encoder: EncoderSettings
    """A model. Static encoders use its tokenizer and word embeddings."""
    start: Literal["embeddings", "random"] = "embeddings"
    """Initial token vectors."""
    epochs: PositiveInt = 4
    """Passes over as many pairs as an epoch has. Batches with fewer epochs are repeated."""
    seeds: int = Field(default=3, gt=1)
    """Encoders for each way, which see the batches in different orders."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of lazy Adam."""
    temperature: PositiveFloat = 0.05
    """Divides similarities."""
    max_length: PositiveInt = 64
    """Tokens of a text, without special ones."""
    measure: str = "nDCG@10"
    """The measure that decides."""
    significance_level: Level = 0.05
    """Significance level of a difference between two ways."""
    recipe: str = "contextual_batches"
    """The recipe that the recommended settings are for."""

    def _check(self) -> None:
        if UNTRAINED in self.batches:
            raise ValueError(f"batches has {UNTRAINED!r}, the name of the encoder that isn't trained: choose another")
        if self.recipe.endswith((".yaml", ".yml")) and not Path(self.recipe).is_absolute():
            raise ValueError(f"recipe is {self.recipe}, and the recommended one lies elsewhere: give the whole path")
        for name in self.packings:
            if name not in self.batches:
                raise ValueError(
                    f"'packings' has {name!r}, but 'batches' has {', '.join(self.batches)}: name one of these"
                )


class Trial(NamedTuple):
    """An encoder: the batches that it is trained on, and a seed."""

    batches: str
    seed: int


class Probe(Stage[ProbeConfig]):
    """First all texts as tokens, then a shard for each way and seed, then one table, an evaluation of the ways."""

    command = "probe"
    kind = EVALUATION
    algorithm_version = 7
    config_class = ProbeConfig
    unit = "pairs"
    keeps_state = True
    results = (RECOMMENDED,)

    @cached_property
    def _located(self) -> LocatedModel:
        return locate_named(self.config.encoder)

    @cached_property
    def _encoder(self) -> "TextEncoder":
        from retrieval.encoders.text_encoder import load_encoder

        settings = self.config.encoder.model_copy(update={"static": True})
        return load_encoder(settings, self._located.path, self._located.fingerprint)

    def fingerprint_of(self, key: str, path: str) -> str | None:
        """The encoder's covers its base and its tokenizer."""
        if key.startswith("encoder."):
            return self._located.fingerprint if key == "encoder.model" else None
        return super().fingerprint_of(key, path)

    def check_settings(self, stages: Stages) -> None:  # noqa: ARG002
        """A recipe that can't be read, and a measure of answers."""
        load_recipe(self.config.recipe, [])
        if parse_measure(self.config.measure).by_answers:
            raise UserError(f"measure is {self.config.measure}, but a probe measures by judgments. Choose nDCG@10.")

    def check_inputs(self, there: Set[str]) -> None:
        """Batches of another layout or of other texts, and a split that is not judged."""
        if "collection" not in there:
            return
        collection = StoredCollection(self.config.collection)
        collection_judgments(collection.uri, self.config.split, [self.config.measure])
        for name, path in self.config.batches.items():
            if f"batches.{name}" in there:
                reader = BatchReader(path)
                require_same_origin("collection", collection, reader.artifact)
                if (maker := reader.artifact.manifest["stage"]) != "filter":
                    raise UserError(
                        f"batches.{name} is made by {maker}, but only batches of filter can be compared. Name such"
                        " ones, of a mix its sources."
                    )

    def phases(self) -> list[Phase]:
        """Tokens, trials, the table."""
        collection, config = StoredCollection(self.config.collection), self.config
        for name, path in config.packings.items():
            made_of = origin(BatchReader(config.batches[name]).artifact, "packing")
            if made_of != Artifact(path, PACKING).fingerprint:
                raise UserError(f"batches.{name} was not made of packings.{name} ({path}). Name its own packing.")
        trials = [Trial(name, seed) for name in config.batches for seed in range(config.seeds)]
        return [
            *text_phases(collection, self._make_tokens),
            Phase("trial", [Trial(UNTRAINED, 0), *trials], self._make_trial),
            Phase("table", WHOLE, self._make_table, intermediate=False),
        ]

    def seconds_here(self, pending: list[Shard]) -> float:
        """Seconds of reading the texts, then of the trials' steps."""
        trials = [shard for shard in pending if isinstance(shard.task, Trial)]
        batches = BatchReader(next(iter(self.config.batches.values())))
        pairs = batches.number_of_batches(0) * batches.batch_size * self.config.epochs
        return len(trials) * pairs / _PAIRS_A_SECOND or super().seconds_here(pending)

    def _make_tokens(self, texts: Texts, writer: ShardWriter) -> ShardRecord:
        part, rows = texts.part, ParquetRows(StoredCollection(self.config.collection), texts.files)
        lists: list[list[int]] = []
        for table in rows.tables(text_columns(part)):
            how = {"add_special_tokens": False, "truncation": True, "max_length": self.config.max_length}
            lists += self._encoder.tokenizer(texts_of(table, part), **how)["input_ids"]
        found = TokenLists.of(lists)
        writer.add_array(f"{writer.name}.tokens.npy", found.tokens)
        writer.add_array(f"{writer.name}.offsets.npy", found.offsets)
        return writer.commit()

    def _tokens(self, part: TextPart) -> TokenLists:
        shards = earlier_shards(self.config.output, part)
        tokens, offsets = (
            [map_array(self.config.output, shard, f"{shard}.{what}.npy") for shard in shards]
            for what in ("tokens", "offsets")
        )
        lengths = np.concatenate([np.diff(each) for each in offsets])
        return TokenLists(np.concatenate(tokens), np.append(0, np.cumsum(lengths)))

    def _make_trial(self, trial: Trial, writer: ShardWriter) -> ShardRecord:
        from trainers.probe.trial import search, train

        config = self.config
        collection = StoredCollection(config.collection)
        queries, documents = map(self._tokens, TEXT_PARTS)
        judged = collection_judgments(collection.uri, config.split, [config.measure]).qrels
        table, facts = self._first_table(trial.seed), dict[str, Any]()
        if trial.batches != UNTRAINED:
            epochs = self._epochs(trial.batches, judged)
            started, how = time.perf_counter(), (config.epochs, trial.seed, config.temperature)
            trained = train(table, epochs, (queries, documents), *how, config.learning_rate)
            facts |= asdict(trained) | {"seconds": time.perf_counter() - started}
        found = search(table, collection, (queries, documents), sorted(judged), depth_of(config.measure))
        measured = evaluate(judged, found, [config.measure])
        writer.add_table(f"{writer.name}.parquet", per_query_table({"": measured}, [config.measure]))
        return writer.commit(facts.get("pairs", 0), facts=facts | {"mean": measured.mean(config.measure)})

    def _epochs(self, name: str, judged: Mapping[str, object]) -> "list[EpochRows]":
        """The trials of the batches with this name, one after the other."""
        from trainers.probe.trial import read_epoch

        if self._read is None or self._read[0] != name:
            reader, collection = BatchReader(self.config.batches[name]), StoredCollection(self.config.collection)
            stored = range(min(reader.epochs, self.config.epochs))
            self._read = name, [read_epoch(reader, epoch, collection, judged) for epoch in stored]
        return self._read[1]

    _read: "tuple[str, list[EpochRows]] | None" = None

    def _first_table(self, seed: int) -> "TokenTable":
        import torch

        from retrieval.encoders.static import TokenTable

        table: Any = self._encoder.transformer
        vectors: NDArray[np.float32] = table.embedding.weight.detach().numpy()
        if self.config.start == "embeddings":
            return TokenTable(torch.from_numpy(vectors.copy()))
        drawn = np.random.default_rng(seed).standard_normal(vectors.shape, dtype=np.float32)
        return TokenTable(torch.from_numpy(drawn * vectors.std()))

    def _make_table(self, _: None, writer: ShardWriter) -> ShardRecord:
        config, measures = self.config, [self.config.measure]
        systems: dict[str, PerQuery] = {}
        ways: dict[str, Any] = {}
        trials = self._phases["trial"]
        for name in (UNTRAINED, *config.batches):
            own = [shard for shard, trial in zip(trials.shards, trials.tasks, strict=True) if trial.batches == name]
            records = [earlier_record(config.output, shard) for shard in own]
            tables = [pq.read_table(earlier_file(config.output, shard, f"{shard}.parquet")) for shard in own]
            values = np.mean([table[1].to_numpy() for table in tables], axis=0)
            systems[name] = PerQuery(tuple(tables[0][0].to_pylist()), {config.measure: values})
            ways[name] = summary_of(name, [record.facts for record in records])
        comparisons = compare_systems(systems, measures, 0, 0.01, comparable_pairs(systems, measures))
        how = how_it_was_measured(f"split '{config.split}'", "trec", CONVENTIONS["trec"], {})
        p_values = corrected_p_values(comparisons, first := next(iter(config.batches)))
        compare_with_first(ways, first, p_values)
        chosen, level = recommend(ways, config.packings or config.batches, p_values, config.significance_level)
        metrics = how | metrics_of(systems, measures)
        write_evaluation(writer, metrics, systems, comparisons)
        writer.add_json(TRIALS, {"ways": ways, "recommended": chosen, "level": level})
        writer.add_bytes(RECOMMENDED, self._fragment(chosen).encode())
        return writer.commit(int(sum(of_way.get("pairs", 0) for of_way in ways.values())))

    def _fragment(self, chosen: str) -> str:
        """A recipe that differs from ``recipe`` in what the chosen batches were made with."""
        settings: dict[str, Any] = {}
        if chosen in self.config.packings:
            packing = Artifact(self.config.packings[chosen], PACKING)
            packed = PackingSettings.model_validate(packing.config["packing"])
            if clusters := dict(packing.manifest["facts"]["clusters"]):
                kmeans = KMeansSettings.model_validate(clusters.pop("kmeans"))
                settings |= {f"clusters.{name}": value for name, value in clusters.items()}
                settings["clusters.kmeans"] = kmeans.model_dump(mode="json", exclude_defaults=True)
            settings["packing.packing"] = packed.model_dump(mode="json", exclude_defaults=True)
        rules = BatchReader(self.config.batches[chosen]).artifact.config["false_negatives"]
        changed = FalseNegativeSettings.model_validate(rules).model_dump(mode="json", exclude_defaults=True)
        settings["batches.false_negatives"] = changed
        said = f"Batches '{chosen}', the best of {counted(len(self.config.batches), 'way')} that a probe compared."
        recipe = {"description": said, "based_on": self.config.recipe, "set": settings}
        return str(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))

    def announce(self, artifact: Artifact) -> list[str]:
        """The ways, which are better, and what is recommended."""
        level = self.config.significance_level
        found, stored = artifact.read_json(TRIALS), StoredEvaluation(artifact.uri)
        evaluated = Evaluated(stored.metrics, stored.comparisons, level)
        blocks = [ways_table(found["ways"], self.config.measure), *evaluation_blocks(evaluated)[:1]]
        beside = f" (not significantly better than: {'; '.join(found['level'])})" if found["level"] else ""
        queries = len(next(iter(stored.values().values())).query_ids)
        verdicts = verdict_lines(found["ways"], self.config.measure, queries, level)
        chosen = f"recommended: {found['recommended']}{beside}"
        is_choice = self.config.split == "test" and len(self.config.batches) > 2
        return ["", *block_lines(blocks), "", *verdicts, chosen, *[TEST_SPLIT] * is_choice, ""]


def depth_of(measure: str) -> int:
    """Thrice as far down a ranking as the measure looks: equal scores are put in order behind the search."""
    cut = measure.rpartition("@")[2]
    return 3 * int(cut) if cut.isdecimal() else 100


def summary_of(way: str, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over a way's trials, the measure's deviation too. Raises ``UserError`` where seeds change nothing."""
    means = [float(trial["mean"]) for trial in trials]
    found: dict[str, Any] = {"mean": float(np.mean(means)), "of_seeds": means}
    if "pairs" not in trials[0]:
        return found
    if len({trial["loss"] for trial in trials}) == 1:
        raise UserError(
            f"The encoders of '{way}' agree to the last digit over all seeds, because nothing in them is drawn at"
            " random. This happens if an epoch has one batch. Lower the batch size."
        )
    found["deviation"] = float(np.std(means, ddof=1))
    for name in ("pairs", "masked", "loss", "seconds"):
        found[name] = float(np.mean([trial[name] for trial in trials]))
    return found


def corrected_p_values(comparisons: Sequence[Mapping[str, Any]], first: str) -> dict[frozenset[str], float]:
    """Of the t-test over queries, for each pair of ways: Holm-corrected over the comparisons of ``first`` with others,
    because these are told, and of other pairs over all."""
    told = [found for found in comparisons if found["a"] == first]
    corrected = holm(np.array([found["details"]["t_test"]["p_value"] for found in told]))
    of_all = {frozenset((found["a"], found["b"])): found["holm"]["t_test"] for found in comparisons}
    return of_all | {frozenset((first, found["b"])): float(p) for found, p in zip(told, corrected, strict=True)}


def compare_with_first(ways: Mapping[str, Any], first: str, p_values: Mapping[frozenset[str], float]) -> None:
    """Compares every other way with the ``first`` way of batches: differences over seeds and over queries.

    ``mean``, ``low``, ``high``: of the differences between encoders of one seed, with a 95 % interval of Student's t.
    ``p``: as of ``corrected_p_values``.
    """
    from scipy.special import stdtrit

    for name, way in ways.items():
        if name in (UNTRAINED, first):
            continue
        differences = np.subtract(way["of_seeds"], ways[first]["of_seeds"])
        mean, count = float(differences.mean()), len(differences)
        reach = float(stdtrit(count - 1, 0.975) * differences.std(ddof=1)) / count**0.5  # 0 where seeds agree
        found = {"mean": mean, "low": mean - reach, "high": mean + reach}
        way["over"] = {"way": first, **found, "seeds": count, "p": p_values.get(frozenset((first, name)), 1.0)}


def verdict_lines(ways: Mapping[str, Any], measure: str, queries: int, level: float) -> list[str]:
    """A sentence for each way that was compared with the first.

    It says better or worse where the interval over seeds leaves zero out and p over queries is below ``level``.
    """
    lines = []
    for name, way in ways.items():
        if "over" in way:
            over = way["over"]
            said = f"no difference from {over['way']} is shown"
            if over["p"] < level and (over["low"] > 0 or over["high"] < 0):
                said = f"{'better' if over['low'] > 0 else 'worse'} than {over['way']}"
            lines.append(
                f"{name}: {said}: {measure} {_difference(over)}, 95 % interval over {over['seeds']} seeds;"
                f" p = {over['p']:.2g} over {queries:,} queries"
            )
    return lines


def _difference(over: Mapping[str, float]) -> str:
    return f"{over['mean']:+.4f} [{over['low']:+.4f}, {over['high']:+.4f}]"


def recommend(
    ways: Mapping[str, Any], candidates: Iterable[str], p_values: Mapping[frozenset[str], float], level: float
) -> tuple[str, list[str]]:
    """The candidate with the highest mean, and the ways that don't differ from it significantly, by queries."""
    best = max(candidates, key=lambda name: float(ways[name]["mean"]))
    others = [name for name in ways if name not in (UNTRAINED, best)]
    return best, [name for name in others if p_values.get(frozenset((best, name)), 1.0) >= level]


def ways_table(ways: Mapping[str, Any], measure: str) -> Table:
    """For each way the measure over seeds, and its cost."""
    rows = [[UNTRAINED, f"{ways[UNTRAINED]['mean']:.4f}", *[""] * 5]]
    for name, found in ways.items():
        if name != UNTRAINED:
            speed = f"{found['pairs'] / found['seconds']:,.0f}"
            over = _difference(found["over"]) if "over" in found else ""
            cells = [f"{found['deviation']:.4f}", over, f"{found['masked']:.1%}", f"{found['seconds']:.1f}", speed]
            rows.append([name, f"{found['mean']:.4f}", *cells])
    first = next((way["over"]["way"] for way in ways.values() if "over" in way), "")
    header = ["batches", measure, "± over seeds", f"over {first}", "masked", "seconds", "pairs/s"]
    caption = (
        "Static encoders: means over seeds, each seed another order of the batches. In brackets the 95 % interval over"
        " seeds."
    )
    return Table(header, rows, caption)
