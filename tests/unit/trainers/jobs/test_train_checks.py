"""What is found of a training before the stages begin that it reads."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.batches import BatchReader
from pipelines.jobs.collect import Collect
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import NotLocal, UserError
from raytriever.settings.configuration import validate
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import check_before_run, recipe_stages
from raytriever.stages.stage import Stage
from retrieval.encoders.pretrained import BYTES_OF_A_TOKEN, locate_named, seconds_of_tokens
from tests.unit.small_run import make_artifact
from tests.unit.trainers.pair_batches import pair, store_epochs, store_pairs
from tests.unit.trainers.validation.made_up import make_collection
from trainers.jobs.train import Train, TrainConfig
from trainers.jobs.train_checks import number_of_maker, training_set_warnings
from trainers.validation.settings import RetrievalValidationSettings

RECIPE = """
stages:
  collection: {job: collect, source: {kind: beir, path: some/data}}
  others: {job: embed, collection: collection, encoder: {model: MODEL, dtype: float32, pooling: mean}}
  pairs: {job: pairs, collection: collection, split: train}
  packing: {job: pack, pairs: pairs, packing: {batch_size: 4, order: random}, epochs: 2}
  batches: {job: filter, packing: packing, pairs: pairs, collection: collection, judged_negatives: hard,
            false_negatives: {surrogate_score: false}}
  held_out: {job: filter, packing: packing, pairs: pairs, collection: collection,
             false_negatives: {surrogate_score: false}}
  mixed: {job: mix, sources: {a: batches, b: held_out}}
  first: {job: train, batches: batches, encoder: {model: MODEL, pooling: mean}, training: {bf16: false, epochs: 2},
          objective: {kind: contrastive}, validation: {kind: batches, batches: held_out}}
  model: {job: train, batches: batches, encoder: {model: first}, training: {bf16: false},
          objective: {kind: adaptive_margin}}
  vectors: {job: embed, collection: collection, encoder: {model: model, dtype: float32}}
"""


@pytest.fixture
def check(tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch):
    """Checks the recipe with overrides as a run does before its first stage."""
    monkeypatch.setattr(Collect, "check_inputs", lambda *_: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(tiny_encoder)))

    def check(*overrides: str) -> None:
        recipe = load_recipe(str(tmp_path / "recipe.yaml"), overrides, str(tmp_path / "out"))
        stages: dict[str, Stage[Any]] = recipe_stages(recipe)
        check_before_run(stages, stages)

    return check


def test_what_would_run_is_not_refused(check, tiny_encoder: Path) -> None:
    check()
    documents = f"first.document_encoder={{model: {tiny_encoder}, pooling: mean}}"
    check(documents, "first.encoder.max_length=8", "first.objective.document_max_length=9")
    form = "first.encoder.form={kind: layers, layers: [1, 2], reduction: last}"
    check(form, "first.objective={kind: multi_layer, training_form: self_contrastive, regularisation: 1.0}")
    check("first.encoder.max_length=64", "first.objective.query_max_length=64", "first.tracking.trackers=[]")
    check("first.resources.workers=6", "first.training.batches_per_step=3")  # slices
    check("first.training.hard_negatives=0", "model.training.hard_negatives=1")  # the first trains on no triplets
    check("first.training.exchange_bf16=true")  # of whole gradients


@pytest.mark.parametrize(("override", "said"), [
    ("first.encoder.model=./nowhere", "Encoder './nowhere' is no folder"),
    ("others.encoder.model=./nowhere", "Encoder './nowhere' is no folder"),
    ("model.document_encoder={model: ./nowhere}", "Encoder './nowhere' is no folder"),
    ("others.encoder.max_length=65", "encoder.max_length is 65, over the limit of .*, 64 tokens"),
    ("others.encoder.form={kind: layers, layers: [1]}", r"encoder.form.layers is \[1\]. It must end in 2"),
    ("first.objective.document_max_length=65", "objective.document_max_length is 65, but the encoder reads 64"),
    ("first.encoder.max_length=8,first.objective.query_max_length=9", "query_max_length is 9, .* reads 8 tokens"),
    ("first.training.epochs=3", "training.epochs is 3, but .*batches holds batches for 2"),
    ("model.training.epochs=3", "training.epochs is 3, but .*batches holds batches for 2"),
    ("batches.judged_negatives=null", "adaptive_margin trains on triplets, and .* will have no hard negatives"),
    ("model.training.hard_negatives=0", "hard_negatives is 0, so every row's .*, but a triplet has one.*Set it to 1"),
    ("batches.judged_negatives=null,first.training.hard_negatives=2", "hard_negatives is 2, and .* will have no"),
    ("first.objective.distillation=0.5", "distillation learns from scores, and the batches in .*/batches will have no"),
    ("first.training.exchange_bf16=true,first.sharding=zero2",
     "exchange_bf16 is for whole gradients, but sharding zer"),
    ("first.validation.batches=batches", "the training batches, so validation says nothing"),
    ("first.resources.workers=3,first.training.batches_per_step=2", "batches_per_step 2 can't be divided among 3 work"),
    ("first.resources.workers=3", r"Batches of 4 rows \(.*/batches\) can't be cut into 3 equal slices"),
    ("first.resources.workers=4,first.fewest_workers=2", "as 3 workers, which may be left of 4"),
    ("first.training.optimizer.kind=adamw_8bit", "adamw_8bit, which needs the package bitsandbytes"),
    ("first.tracking.trackers=[wandb]", "names wandb, but its package isn't installed"),
])  # fmt: skip
def test_mistakes_are_found_before_the_first_stage(
    check, monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    for absent in ("bitsandbytes", "wandb"):
        monkeypatch.setitem(sys.modules, absent, None)
    overrides = override.split(",first") if ",first" in override else [override]
    with pytest.raises(UserError, match=said):
        check(overrides[0], *(f"first{rest}" for rest in overrides[1:]))


def test_batches_of_a_validation_need_scores_too(check, tmp_path: Path) -> None:
    scored = ["surrogate_scores=true", "vectors=others"]
    asked = ["first.objective.distillation=0.5", *(f"batches.{each}" for each in scored)]
    with pytest.raises(UserError, match=r"learns from scores, and the batches in .*/held_out will have none"):
        check(*asked)
    check(*asked, *(f"held_out.{each}" for each in scored))
    there = store_epochs(tmp_path / "there", [[[pair(row) for row in range(4)]]] * 2)
    asked = ["first.objective.distillation=0.5", f"first.batches={there}"]
    with pytest.raises(UserError, match=r"learns from scores, and the batches in .*/held_out will have none"):
        check(*asked)
    check(*asked, *(f"held_out.{each}" for each in scored))


def test_each_source_of_a_mix_needs_scores(check, tmp_path: Path) -> None:
    scored = [f"batches.{each}" for each in ("surrogate_scores=true", "vectors=others")]
    asked = ["first.objective.distillation=0.5", "first.validation=null", "first.batches=mixed", *scored]
    there = store_epochs(tmp_path / "there", [[[pair(row) for row in range(4)]]] * 2)
    check(*asked, f"mixed.sources={{a: batches, b: {there}}}")
    for sources in ("{a: batches, b: held_out}", "{a: held_out, b: batches}"):
        with pytest.raises(UserError, match=r"learns from scores, and the batches in .*/mixed will have none"):
            check(*asked, f"mixed.sources={sources}")


def test_packages_are_needed_neither_by_a_model_that_is_there_nor_on_a_cluster_by_the_driver(
    check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with monkeypatch.context() as on_a_cluster:
        on_a_cluster.setenv("RAY_ADDRESS", "ray://head:10001")
        check("first.tracking.trackers=[wandb]")
        (line,) = logged
        assert line.startswith("Warning: tracking.trackers names wandb")
        with pytest.raises(NotLocal, match="is no folder"):  # the driver needs its models
            check("first.encoder.model=./nowhere")
    make_artifact(tmp_path / "out" / "first", "model", {}, {}, {"x": "1"}, 1)
    check("first.tracking.trackers=[wandb]")


def test_lengths_and_layers_are_those_that_the_folder_states(check, tmp_path: Path, tiny_encoder: Path) -> None:
    stated = tmp_path / "stated"
    shutil.copytree(tiny_encoder, stated)
    (stated / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    with pytest.raises(UserError, match="document_max_length is 17, but the encoder reads 16 tokens"):
        check(f"first.encoder.model={stated}", "first.objective.document_max_length=17")
    check(f"first.encoder.model={stated}", "first.objective.document_max_length=17", "first.encoder.max_length=32")
    unknown = tmp_path / "unknown"
    shutil.copytree(tiny_encoder, unknown)
    config = json.loads((unknown / "config.json").read_text())
    for name in ("num_hidden_layers", "max_position_embeddings"):
        del config[name]
    (unknown / "config.json").write_text(json.dumps(config))
    form = "others.encoder.form={kind: layers, layers: [7]}"  # whoever loads it knows
    check(f"others.encoder.model={unknown}", form, "others.encoder.max_length=4000")


def job(batches: str, folder: Path, encoder: Path, **changes: Any) -> Train:
    values = {
        "batches": batches,
        "output": str(folder / "model"),
        "encoder": {"model": str(encoder)},
        "objective": {"kind": "contrastive"},
        "training": {"bf16": False},
    }
    return Train(validate(TrainConfig, values | changes, "model"))


def test_batches_that_are_there_already_tell_their_epochs_and_their_size(tmp_path: Path, tiny_encoder: Path) -> None:
    batches = store_pairs(tmp_path / "batches", [[pair(0), pair(1)]])

    def check_inputs(**changes: Any) -> None:
        job(batches, tmp_path, tiny_encoder, **changes).check_inputs({"batches"})

    check_inputs()
    with pytest.raises(UserError, match=rf"Batches of 2 rows \({batches}\) can't be cut into 3 equal slices"):
        check_inputs(resources={"workers": 3})
    with pytest.raises(UserError, match="warmup_steps is 2, but the run ends after step 1"):
        check_inputs(training={"bf16": False, "schedule": {"warmup_steps": 2}})
    with pytest.raises(UserError, match=f"training.epochs is 2, but {batches} holds batches for 1"):
        check_inputs(training={"bf16": False, "epochs": 2})


def test_what_a_training_here_takes_is_three_passes_over_its_texts(tmp_path: Path, tiny_encoder: Path) -> None:
    def made(count: int, lengths: dict[str, int], **training: Any) -> tuple[Train, float]:
        """Of so many stored batches of two pairs: the stage, and the tokens that it takes as long as."""
        rows = [[pair(2 * batch), pair(2 * batch + 1)] for batch in range(count)]
        batches = store_pairs(tmp_path / f"{count}", rows)
        changes = {"objective": {"kind": "contrastive", **lengths}, "training": {"bf16": False, **training}}
        stage = job(batches, tmp_path, tiny_encoder, **changes)
        model = stage.config.encoder
        return stage, stage.seconds_here([]) / seconds_of_tokens(locate_named(model), model, 1)

    lengths = {"query_max_length": 3, "document_max_length": 4}
    stage, tokens = made(4, lengths, batches_per_step=2)
    assert stage.total_rows() == 8
    assert tokens == pytest.approx(3 * 8 * (3 + 4))
    assert made(4, lengths, max_steps=1)[1] == pytest.approx(tokens / 4)
    stage, tokens = made(1, {})
    assert tokens == pytest.approx(3 * BatchReader(stage.config.batches).stored_bytes(0, 0) / BYTES_OF_A_TOKEN)


def test_the_size_of_batches_is_that_of_whatever_they_are_made_by(tmp_path: Path) -> None:
    recipe = """
stages:
  pack: {job: pack, pairs: some/pairs, packing: {batch_size: 6, order: random}}
  packed: {job: filter, packing: pack, pairs: some/pairs, collection: some/docs,
           false_negatives: {surrogate_score: false}}
  lists: {job: lists, candidates: some/candidates, collection: some/docs, batch_size: 9}
  groups: {job: group, collection: some/docs, grouping: {batch_size: 12, documents_per_batch: 3}}
  mixed: {job: mix, sources: {a: some/other, b: packed}}
  unknown: {job: mix, sources: {a: some/other}}
"""
    (tmp_path / "recipe.yaml").write_text(recipe)
    stages = recipe_stages(load_recipe(str(tmp_path / "recipe.yaml"), [], str(tmp_path / "out")))
    sizes = {name: number_of_maker("batch_size", stage.config.output, stages) for name, stage in stages.items()}
    assert sizes == {"pack": 6, "packed": 6, "lists": 9, "groups": 12, "mixed": 6, "unknown": None}


def test_a_split_that_the_batches_have_queries_of_is_told_before_a_training_begins(
    tmp_path: Path, tiny_encoder: Path, logged: list[str]
) -> None:
    collection = make_collection(tmp_path / "corpus")  # q0 to q5 are judged by dev, q6 to q11 by train
    inputs = {"collection": Artifact(collection).fingerprint}

    def warnings(name: str, split: str, *numbers: int, inputs: dict[str, str] = inputs) -> list[str]:
        trained = BatchReader(store_pairs(tmp_path / name, [[pair(number) for number in numbers]], inputs))
        return training_set_warnings(RetrievalValidationSettings(collection=collection, split=split), trained)

    (warning,) = warnings("batches", "train", 6, 7, 5)
    assert "2 of 3 queries in the batches of" in warning
    assert "such as 'q6', are of split 'train'" in warning
    (warning,) = warnings("of dev", "dev", 6, 7, 5)
    assert "1 of 3 queries" in warning
    assert warnings("apart", "dev", 6, 7, 8) == []
    assert warnings("elsewhere", "train", 6, 7, 8, inputs={"collection": "f" * 64}) == []  # its q6 is another query
    batches = str(tmp_path / "batches")
    of_chunks: Any = SimpleNamespace(columns={"document"}, artifact=Artifact(batches))
    assert training_set_warnings(RetrievalValidationSettings(collection=collection), of_chunks) == []

    def plan(**of_validation: Any) -> None:
        job(batches, tmp_path, tiny_encoder, validation=of_validation).plan()

    plan(kind="retrieval", collection=collection, split="train")
    assert len([line for line in logged if line.startswith("  Warning: the dev set is trained on")]) == 1
    message = f"validation.batches is {batches}, the training batches, so validation says nothing"
    with pytest.raises(UserError, match=message):
        plan(kind="batches", batches=batches)


def test_workers_get_the_folder_of_trackers_from_where_the_command_was_given(
    tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = {"batches": "b", "encoder": {"model": str(tiny_encoder)}, "objective": {"kind": "contrastive"}}
    for folder, expected in (("logs", str(tmp_path / "logs")), ("~/logs", "/home/me/logs"), (None, None)):
        values = {**given, "tracking": {"folder": folder}, "output": "out"}
        stage = Train(validate(TrainConfig, values, "train")).for_workers()
        assert (stage.config.tracking.folder, stage.config.output) == (expected, str(tmp_path / "out"))


def test_a_test_on_what_is_trained_on_is_told_of(logged: list[str]) -> None:
    def told(*overrides: str) -> int:
        stages: dict[str, Stage[Any]] = recipe_stages(load_recipe("finetune", overrides))
        logged.clear()
        stages["model"].check_settings(stages)
        return sum("trained on pairs of split 'test', and it is evaluated on this split" in line for line in logged)

    assert [told(f"pairs.split={split}") for split in ("test", "[train, test]", "train")] == [1, 1, 0]
    assert not told("pairs.split=test", "batches.packing=/elsewhere", "batches.pairs=/elsewhere")  # another run's
