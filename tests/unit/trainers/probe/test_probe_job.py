"""`raytriever probe`: batches that teach are told from batches that don't, and what won is a recipe."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.filter import Filter, FilterConfig
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.reports.report import TEST_SPLIT
from raytriever.settings.recipe import load_recipe
from retrieval.evaluation.comparison import compare_sources
from retrieval.evaluation.stored import StoredEvaluation
from tests.unit import small_run
from trainers.jobs.probe import Probe, ProbeConfig, recommend, summary_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two ways to pack the same pairs: along the tour, and dealt anew in every second epoch."""
    folder = tmp_path_factory.mktemp("probe")
    made = small_run.make_run(folder)
    turns = PackingSettings(batch_size=small_run.BATCH_SIZE, shuffled=(1.0, 0.0))
    made["turns"] = small_run.make(
        Pack(PackConfig(clusters=made["clusters"], packing=turns, epochs=2, output=str(folder / "turns")))
    )
    inputs = {name: made[name] for name in ("pairs", "collection", "vectors")} | {"packing": made["turns"]}
    wide = {"margin": 0.1}
    config = FilterConfig.model_validate(inputs | {"false_negatives": wide, "output": str(folder / "wide")})
    made["wide"] = small_run.make(Filter(config))
    return made


def config_of(run: dict[str, str], encoder: Path, output: Path, **changes: Any) -> ProbeConfig:
    values = {
        "batches": {"tour": run["batches"], "in turns": run["wide"]},
        "packings": {"tour": run["packing"], "in turns": run["turns"]},
        "collection": run["collection"],
        "encoder": {"model": str(encoder)},
        "epochs": 3,
        "seeds": 2,
        "max_length": 8,
        "output": str(output),
    }
    return ProbeConfig.model_validate(values | changes)


def test_ways_are_measured_and_what_won_is_a_recipe(run: dict[str, str], tiny_encoder: Path, tmp_path: Path) -> None:
    stage = Probe(config_of(run, tiny_encoder, tmp_path / "probe"))
    found = StoredEvaluation(small_run.make(stage))
    assert list(found.metrics["means"]) == ["before training", "tour", "in turns"]
    compared = compare_sources([found.uri])
    assert list(compared.metrics["means"]) == list(found.metrics["means"])
    trials = found.read_json("trials.json")
    for name in ("tour", "in turns"):
        way = trials["ways"][name]
        assert way["mean"] == pytest.approx(found.metrics["means"][name]["nDCG@10"])
        assert len(way["of_seeds"]) == 2
        assert way["pairs"] == 3 * small_run.PAIRS
    assert trials["ways"]["in turns"]["masked"] != trials["ways"]["tour"]["masked"]
    assert any(line.startswith("recommended: ") for line in stage.announce(found))
    assert TEST_SPLIT not in stage.announce(found)  # of two ways
    batches = {**stage.config.batches, "third": "b"}
    several = Probe(stage.config.model_copy(update={"batches": batches, "split": "test"}))
    assert several.announce(found)[-2] == TEST_SPLIT
    fragment = Path(found.uri) / "recommended.yaml"
    recipe = load_recipe(str(fragment), [])
    won = trials["recommended"]
    assert recipe.stages["packing"]["packing"].get("shuffled") == ([1.0, 0.0] if won == "in turns" else None)
    made_of = Artifact(run["turns" if won == "in turns" else "packing"])
    of_clusters = Artifact(run["clusters"]).config
    assert made_of.manifest["facts"]["clusters"] == {
        name: of_clusters[name] for name in ("cluster_size", "smallest_domain", "small_domains", "kmeans")
    }
    for name in ("cluster_size", "small_domains"):
        assert recipe.stages["clusters"][name] == of_clusters[name]
    assert recipe.stages["batches"].get("false_negatives") == ({"margin": 0.1} if won == "in turns" else {})
    assert yaml.safe_load(fragment.read_text())["based_on"] == "contextual_batches"
    again = small_run.make(Probe(config_of(run, tiny_encoder, tmp_path / "again")))
    assert StoredEvaluation(again).values()["tour"].values["nDCG@10"].tolist() == (
        found.values()["tour"].values["nDCG@10"].tolist()
    )


def test_how_encoders_are_trained_shows_in_their_loss(run: dict[str, str], tiny_encoder: Path, tmp_path: Path) -> None:
    losses = set[float]()
    for change in ({}, {"start": "random"}, {"temperature": 0.5}, {"learning_rate": 1e-2}, {"max_length": 2}):
        probe = Probe(config_of(run, tiny_encoder, tmp_path / str(change), epochs=1, **change))
        losses.add(Artifact(small_run.make(probe)).read_json("trials.json")["ways"]["tour"]["loss"])
    assert len(losses) == 5


@pytest.mark.parametrize("start", ["random", "embeddings"])
def test_a_random_start_is_another_for_each_seed(run, tiny_encoder: Path, tmp_path: Path, start: str) -> None:
    untrained = {"start": start, "learning_rate": 1e-30, "epochs": 1, "packings": {}}
    made = Artifact(small_run.make(Probe(config_of(run, tiny_encoder, tmp_path, **untrained))))
    one, other = made.read_json("trials.json")["ways"]["tour"]["of_seeds"]
    assert (one != other) == (start == "random")
    assert made.read_json("trials.json")["recommended"] in ("tour", "in turns")


def test_what_decides_and_what_it_is_for_are_the_users(run, tiny_encoder: Path, tmp_path: Path, monkeypatch) -> None:
    levels = list[float]()
    monkeypatch.setattr("trainers.jobs.probe.recommend", lambda *of: levels.append(of[-1]) or recommend(*of))
    changes = {"measure": "RR@5", "significance_level": 0.9, "recipe": "finetune", "epochs": 1}
    stage = Probe(config_of(run, tiny_encoder, tmp_path, **changes))
    found = StoredEvaluation(small_run.make(stage))
    assert found.metrics["measures"] == ["RR@5"]
    assert {comparison["measure"] for comparison in found.comparisons} == {"RR@5"}
    best = max(ways := found.read_json("trials.json")["ways"], key=lambda way: ways[way]["mean"])
    assert ways[best]["mean"] == pytest.approx(found.metrics["means"][best]["RR@5"])
    assert levels == [0.9]
    text = "\n".join(stage.announce(found))
    assert "RR@5" in text
    assert "nDCG" not in text
    assert "p < 0.9" in text
    assert yaml.safe_load((tmp_path / "recommended.yaml").read_text())["based_on"] == "finetune"


def test_how_the_best_were_clustered_is_recommended_too(
    run: dict[str, str], tiny_encoder: Path, tmp_path: Path
) -> None:
    """Batches by topics need clusters of queries, without which the recipe would stop."""
    inputs = {name: run[name] for name in ("pairs", "vectors")}
    asked = {"cluster_size": 6, "smallest_domain": 4, "small_domains": "merge_all", "kmeans": {"sides": "queries"}}
    clusters = small_run.make(
        Cluster(ClusterConfig.model_validate(inputs | asked | {"output": str(tmp_path / "topics")}))
    )
    packing = PackingSettings(batch_size=small_run.BATCH_SIZE, order="topics")
    packed = small_run.make(Pack(PackConfig(clusters=clusters, packing=packing, output=str(tmp_path / "packing"))))
    filtered = inputs | {"collection": run["collection"], "packing": packed, "output": str(tmp_path / "batches")}
    batches = small_run.make(Filter(FilterConfig.model_validate(filtered)))
    compared = {"batches": {"tour": run["batches"], "thèmes": batches}, "packings": {"thèmes": packed}}
    probe = small_run.make(Probe(config_of(run, tiny_encoder, tmp_path / "probe", recipe="finetune", **compared)))
    assert Path(probe, "recommended.yaml").read_text().startswith("description: Batches 'thèmes', the best of 2 ways")
    recipe = load_recipe(f"{probe}/recommended.yaml", ["size=best"])
    assert recipe.stages["packing"]["packing"] == {"batch_size": small_run.BATCH_SIZE, "order": "topics"}
    assert recipe.stages["packing"]["epochs"] == recipe.stages["model"]["training"]["epochs"] == 8
    assert recipe.stages["clusters"]["cluster_size"] == 6
    assert recipe.stages["clusters"]["kmeans"] == {"sides": "queries"}


def test_bad_input_is_named(run: dict[str, str], tiny_encoder: Path, tmp_path: Path, monkeypatch) -> None:
    def make(**changes: Any) -> None:
        output = tmp_path / "-".join(changes)
        small_run.make(Probe(config_of(run, tiny_encoder, output / str(changes.get("split")), **changes)))

    with pytest.raises(UserError, match="no judgments of split 'dev'"):
        make(split="dev")
    with pytest.raises(UserError, match=r"trains on .* of the held-out queries, such as 'q"):
        make(split="train")
    asked = Probe(config_of(run, tiny_encoder, tmp_path, measure="Accuracy@5"))
    with pytest.raises(UserError, match=r"measure is Accuracy@5, but a probe measures by judgments"):
        asked.check_settings({})
    with pytest.raises(UserError, match=r"batches\.tour was not made of packings\.tour"):
        make(packings={"tour": run["turns"], "in turns": run["turns"]})
    with pytest.raises(ValidationError, match="at least 2"):
        make(batches={"tour": run["batches"]}, packings={})
    with pytest.raises(ValidationError, match="'packings' has 'tours', but 'batches' has tour, in turns: name one"):
        make(packings={"tours": run["packing"]})
    other = small_run.make_collection(tmp_path / "other", word="word")
    with pytest.raises(UserError, match="collection"):
        make(collection=other)
    with monkeypatch.context() as patched:
        mixed = Artifact(run["batches"])
        patched.setitem(mixed.manifest, "stage", "mix")
        patched.setattr("trainers.jobs.probe.BatchReader", lambda _: SimpleNamespace(artifact=mixed))
        with pytest.raises(UserError, match=r"batches\.tour is made by mix, but only batches of filter can"):
            make()
    with pytest.raises(UserError, match="encoders of 'tour' agree to the last digit over all seeds"):
        summary_of("tour", [{"mean": mean, "pairs": 4, "loss": 1.5} for mean in (0.5, 0.75)])
    with pytest.raises(ValidationError, match=r"recipe is mine\.yaml, .*: give the whole path"):
        make(recipe="mine.yaml")
    with pytest.raises(ValidationError, match="batches has 'before training', the name of"):
        make(batches={"before training": run["batches"], "tour": run["batches"]}, packings={})
    with pytest.raises(UserError, match="There is no recipe 'finetun'"):
        Probe(config_of(run, tiny_encoder, tmp_path, recipe="finetun")).check_settings({})
    trials = [{"mean": mean, "pairs": 4, "masked": 0, "loss": mean, "seconds": 1} for mean in (1, 3)]
    assert summary_of("tour", trials)["deviation"] == pytest.approx(2**0.5)


def test_the_best_is_recommended_and_what_is_level_with_it_named() -> None:
    ways = {"before training": {"mean": 0.9}, "a": {"mean": 0.3}, "b": {"mean": 0.5}, "c": {"mean": 0.49}}
    comparisons = {frozenset("ab"): 0.001, frozenset("bc"): 0.4}
    assert recommend(ways, ["a", "b", "c"], comparisons, 0.05) == ("b", ["c"])
    assert recommend(ways, ["a", "b", "c"], comparisons, 0.4) == ("b", ["c"])  # what is significant is below the level
    assert recommend(ways, ["a", "c"], comparisons, 0.05)[0] == "c"  # b is a baseline
