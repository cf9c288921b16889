"""What a run says and refuses before its first step, where memory is full, and how it loads its encoders."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from raytriever.artifacts.artifact import Derivation
from raytriever.errors import UserError
from raytriever.reports.log import log, log_to
from raytriever.settings.configuration import validate
from retrieval.encoders.list_scorer import ListScorer, save_list_scorer
from retrieval.encoders.modules import read_document_model
from retrieval.encoders.specification import EncoderSettings, ListScorerForm
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.towers import load_towers
from tests.unit.retrieval.encoders.tiny_models import save_tiny_model
from tests.unit.trainers.pair_batches import pair, store_pairs
from tests.unit.trainers.tiny import Reports
from tests.unit.trainers.validation.made_up import make_collection, spread
from trainers import training_run
from trainers.engine.callback import Callback
from trainers.engine.early_stopping import Evaluation
from trainers.jobs.train import TrainConfig
from trainers.objective import Objective, build_objective
from trainers.record.ledger import ledger_lines
from trainers.run_settings import RunSettings
from trainers.training_run import (
    ShownProgress,
    load_for_training,
    objective_to_train,
    recorded_training,
    run_training,
)

CPU = torch.device("cpu")
SHARED = {"kind": "contrastive", "share_negatives": "step"}
ONE = "1 a query: 0 of its batch, 1 hard"
ONE_OF_THE_STEP = "at most 1 a query: 0 of its batch, 1 of the step's other batches, 0 hard"
FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.02 GiB is free."
    " Process 1 has 78.15 GiB memory in use. Of the allocated memory 70 GiB is allocated by PyTorch."
)


def settings(encoder: Path, batches: str, **changes: Any) -> RunSettings:
    training = {"bf16": False, "optimizer": {"learning_rate": 1e-3}, "max_steps": 2} | changes.pop("training", {})
    values = {
        "batches": batches,
        "encoder": {"model": str(encoder), "pooling": "mean", "normalize": True},
        "objective": {"kind": "contrastive"},
        "training": training,
    }
    return validate(RunSettings, values | changes, "run")


def ran(chosen: RunSettings, folder: Path) -> list[str]:
    """The lines that a run says."""
    lines: list[str] = []
    shown = Reports(on_start=lambda ledger: lines.extend(ledger_lines(ledger)))
    with log_to(lambda record: lines.append(record.getMessage())):
        run_training(chosen, chosen.located(), str(folder), CPU, [shown])
    return lines


@pytest.fixture
def batches(tmp_path: Path) -> str:
    return store_pairs(tmp_path / "batches", [[pair(4 * batch + row) for row in range(4)] for batch in range(4)])


ALONE = [[pair(batch)] for batch in range(4)]
MASKED = [[pair(row, masked=[c for c in range(3) if c != row]) for row in range(3)]] * 2


@pytest.mark.parametrize(
    ("rows", "said"),
    [(ALONE, "a batch has 1 query and no hard negatives"), (MASKED, "is left out .masked. as a false negative")],
    ids=["alone", "masked"],
)
def test_pairs_without_a_single_negative_are_refused(tmp_path: Path, tiny_encoder: Path, rows: Any, said: str) -> None:
    chosen = settings(tiny_encoder, store_pairs(tmp_path / "alone", rows))
    with pytest.raises(UserError, match=f"no query has a negative: .*{said}"):
        ran(chosen, tmp_path / "out")


@pytest.mark.parametrize(("rows", "changes", "said"), [
    ([[pair(batch, hard_negatives=["other"])] for batch in range(4)], {}, ONE),
    (ALONE, {"objective": SHARED, "training": {"batches_per_step": 2}}, ONE_OF_THE_STEP),
])  # fmt: skip
def test_one_negative_is_enough(tmp_path: Path, tiny_encoder: Path, rows: Any, changes: Any, said: str) -> None:
    lines = ran(settings(tiny_encoder, store_pairs(tmp_path / "one", rows), **changes), tmp_path / "out")
    assert [line.removeprefix("  negatives").strip() for line in lines if line.startswith("  negatives")] == [said]


def test_more_steps_than_the_epochs_give_are_told(tmp_path: Path, tiny_encoder: Path, batches: str) -> None:
    lines = ran(settings(tiny_encoder, batches, training={"max_steps": 1000}), tmp_path / "one")
    (told,) = [line for line in lines if "max_steps" in line]
    assert "training.max_steps is 1,000, but the batches give 4 steps (training.epochs is 1)" in told
    enough = ran(settings(tiny_encoder, batches, training={"max_steps": 4}), tmp_path / "two")
    assert not [line for line in enough if "max_steps" in line]


def test_what_a_run_can_not_mean_is_warned_of(tmp_path: Path, tiny_encoder: Path, batches: str) -> None:
    by_products = {"objective": {"kind": "contrastive", "similarity": "inner_product"}}
    drawn = store_pairs(tmp_path / "drawn", [[pair(row, ["a", "b"]) for row in range(4)]] * 2)
    cosines = "the objective trains cosines, but the encoder doesn't normalise"
    none_there = "training.hard_negatives is 1, but rows of the 4 batches of"
    few_there = f"but rows of the 2 batches of {drawn} that were checked give 2 on average. Store more"
    draw_one, draw_three = ({"training": {"hard_negatives": count, "max_steps": 1}} for count in (1, 3))
    cases: list[tuple[str, bool, dict[str, Any], list[str]]] = [
        (batches, False, {}, [cosines]),
        (batches, False, by_products, []),
        (batches, True, by_products, []),
        (batches, True, draw_one, [none_there]),
        (drawn, True, draw_one, []),
        (drawn, True, draw_three, [few_there]),
    ]
    for number, (stored, normalize, changes, said) in enumerate(cases):
        chosen = settings(tiny_encoder, stored, **{"training": {"max_steps": 1}} | changes)
        encoder = chosen.encoder.model_copy(update={"normalize": normalize})
        lines = ran(chosen.model_copy(update={"encoder": encoder}), tmp_path / str(number))
        warnings = [line for line in lines if "Warning" in line]
        assert [each in line for each, line in zip(said, warnings, strict=True)] == [True] * len(said)
        assert any("7 a query: 6 of its batch, 1 hard" in line for line in lines) == (changes is draw_one and not said)


def test_as_many_checkpoints_are_kept_as_the_settings_say(tmp_path: Path, tiny_encoder: Path, batches: str) -> None:
    ran(settings(tiny_encoder, batches, checkpoints_kept=1, training={"checkpoint_every": 1}), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_run_goes_on_with_what_saves_memory_and_with_no_other_weights_or_objective(
    tmp_path: Path, tiny_encoder: Path, batches: str
) -> None:
    folder = tmp_path / "out"
    ran(settings(tiny_encoder, batches), folder)
    cached = {"kind": "contrastive", "gradient_cache": True}
    ran(settings(tiny_encoder, batches, objective=cached, activation_checkpointing=True, checkpoints_kept=1), folder)
    others = settings(spread(tiny_encoder, tmp_path / "spread"), batches)
    warmer = settings(tiny_encoder, batches, objective={"kind": "contrastive", "similarity_temperature": 0.5})
    for chosen, named in ((others, r"fingerprints\.encoder\.model"), (warmer, r"objective\.similarity_temperature")):
        with pytest.raises(UserError, match=f"holds checkpoints of a run with other settings: .*{named}"):
            ran(chosen, folder)


def test_who_watches_a_run_is_told_of_what_ends_it(tmp_path: Path, tiny_encoder: Path, batches: str) -> None:
    class Watching(Callback):
        def on_step(self, point: Mapping[str, Any]) -> None:
            told.append(point["step"])
            raise KeyboardInterrupt

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            told.append(kind)

    told: list[Any] = []
    values = settings(tiny_encoder, batches).model_dump() | {"output": str(tmp_path / "model")}
    config = TrainConfig.model_validate(values)
    with pytest.raises(KeyboardInterrupt):
        recorded_training(config, Derivation("model", "train", 1, {}, {}), CPU, [Watching()])
    assert told == [1, KeyboardInterrupt]


def test_validation_is_in_the_precision_of_the_training_unless_it_has_its_own(
    tmp_path: Path, tiny_encoder: Path, batches: str
) -> None:
    others = store_pairs(tmp_path / "held_out", [[pair(row, query="held") for row in range(4)]])

    def before_training(in_training: bool, **own: Any) -> dict[str, float]:
        evaluations: list[Evaluation] = []
        validation = {"kind": "batches", "batches": others, **own}
        chosen = settings(tiny_encoder, batches, validation=validation, training={"bf16": in_training, "max_steps": 1})
        folder = tmp_path / f"{in_training} {own}"
        run_training(chosen, chosen.located(), str(folder), CPU, [Reports(on_evaluation=evaluations.append)])
        return evaluations[0].measures

    exact, rounded = before_training(False), before_training(True)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)
    assert before_training(True, bf16=False) == exact
    assert before_training(False, bf16=True) == rounded


def test_what_an_objective_draws_when_it_is_built_is_the_seeds(
    tmp_path: Path, tiny_encoder: Path, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the user's own that knows no seed."""
    drawn: list[float] = []
    build = training_run.build_objective
    monkeypatch.setattr(training_run, "build_objective", lambda *of: drawn.append(torch.rand(()).item()) or build(*of))
    for number, seed in enumerate((5, 5, 6)):
        torch.rand(number)
        ran(settings(tiny_encoder, batches, training={"seed": seed, "max_steps": 1}), tmp_path / str(number))
    assert drawn[0] == drawn[1] != drawn[2]


def test_progress_goes_on_where_a_resumed_run_does() -> None:
    """Its rate is of the steps behind the first."""
    told: list[Any] = []
    progress = SimpleNamespace(start_at=told.append, advance=lambda *said: told.append(said))
    shown = ShownProgress(progress)  # type: ignore[arg-type]
    for step in (5, 6):
        shown.on_step({"step": step, "examples": 8, "loss": 0.5, "learning_rate": 1e-3})
    assert told == [40, *[(examples, "loss 0.500, learning rate 1.0e-03") for examples in (0, 8)]]


def test_memory_that_is_full_in_training_says_first_what_the_run_goes_on_with(
    tmp_path: Path, tiny_encoder: Path, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step, too."""

    def full(*_: Any, **__: Any) -> None:
        raise FULL

    said = (
        r"^The GPU's memory is full in training: Tried to allocate 2\.00 GiB\. GPU 0 has a total capacity of 79\.19 GiB"
        r" of which 1\.02 GiB is free\. The run can resume from its checkpoint with these, the cheapest first:"
        r" objective\.gradient_cache true"
    )
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "place", full)
        with pytest.raises(UserError, match=said):
            ran(settings(tiny_encoder, batches), tmp_path / "moved")
    monkeypatch.setattr(training_run, "shard", full)
    with pytest.raises(UserError, match=said) as caught:
        ran(settings(tiny_encoder, batches, sharding="sharded"), tmp_path / "sharded")
    going_on, anew = str(caught.value).split("It must start again (--force, or another folder) with these:")
    places = [going_on.index(knob) for knob in ("gradient_cache", "activation_checkpointing", "sharding")]
    assert places == sorted(places)
    assert not any(knob in going_on for knob in ("bf16", "lora", "max_length"))
    assert all(knob in anew for knob in ("chunk_tokens", "bf16", "(lora)", "batches_per_step"))


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("retrieval", "Lower validation.token_budget, .* .now 77."), ("batches", "objective.chunk_tokens tokens")],
)
def test_memory_that_is_full_in_validation_has_advice_of_its_own(
    tmp_path: Path, tiny_encoder: Path, batches: str, monkeypatch: pytest.MonkeyPatch, kind: str, advice: str
) -> None:
    forward = TextEncoder.forward

    def full(self: TextEncoder, *arguments: Any, **keywords: Any) -> Any:
        if not self.training:
            raise FULL
        return forward(self, *arguments, **keywords)

    others = store_pairs(tmp_path / "held_out", [[pair(row, query="held") for row in range(4)]])
    inputs = {"retrieval": {"collection": make_collection(tmp_path / "corpus"), "token_budget": 77}}
    validation = {"kind": kind} | inputs.get(kind, {"batches": others})
    chosen = settings(tiny_encoder, batches, validation=validation)
    monkeypatch.setattr(TextEncoder, "forward", full)
    said = f"full in validation, not in training: Tried to allocate 2.00 GiB.*{advice}.* The run then starts again"
    with pytest.raises(UserError, match=said):
        ran(chosen, tmp_path / "out")


def test_a_precision_that_the_worker_lacks_is_refused_where_the_run_starts(
    tmp_path: Path, tiny_encoder: Path, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(training: Any, device: torch.device) -> list[str]:
        assert (training.bf16, device) == (False, CPU)
        raise UserError("no bfloat16 here")

    monkeypatch.setattr(training_run, "require_precision", lacks)
    with pytest.raises(UserError, match="no bfloat16 here"):
        ran(settings(tiny_encoder, batches), tmp_path / "out")
    monkeypatch.setattr(training_run, "require_precision", lambda *_: log.info("slow here"))
    assert "slow here" in ran(settings(tiny_encoder, batches), tmp_path / "other")


@pytest.mark.parametrize(("training", "said"), [
    ({"schedule": {"kind": "plateau"}}, "depends on evaluations, but the run has none: set validation too"),
    ({"schedule": {"warmup_steps": 3}}, "warmup_steps is 3, but the run ends after step 2"),
])  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused_with_the_settings(training: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        settings(Path("any"), "b", training=training)
    assert settings(Path("any"), "b", training=training | {"max_steps": None, "schedule": {"warmup_steps": 99}})


LAYERS = {"kind": "layers", "layers": [1, 2]}
DOCUMENTS = "d" * 64  # the fingerprint of another encoder's contract
MULTI_LAYER = {"kind": "multi_layer", "training_form": "multi_vector"}


@pytest.fixture(scope="module")
def pooled(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with pooling settings of its own."""
    folder = tmp_path_factory.mktemp("plain") / "encoder"
    load(tiny_encoder).save(folder)
    return folder


@pytest.fixture(scope="module")
def of_queries(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of queries alone, with a scoring module, as CODER exports it."""
    encoder = load(tiny_encoder)
    encoder.contract = encoder.contract.model_copy(update={"document_model": DOCUMENTS})
    folder = tmp_path_factory.mktemp("coder") / "encoder"
    encoder.save(folder)
    save_list_scorer(ListScorer(ListScorerForm(heads=4), encoder.dimension), folder)
    return folder


def load(folder: Path) -> Any:
    return load_encoder(EncoderSettings(model=str(folder), pooling="cls", normalize=False), folder, "f" * 64)


def settings_for(model: Path, objective: dict[str, Any], form: Any = None, **settings: Any) -> RunSettings:
    encoder = {"model": str(model)} | ({} if form is None else {"form": form})
    values = {"batches": "any", "encoder": encoder, "objective": objective, "training": {"bf16": False}}
    return RunSettings.model_validate(values | settings)


def objective_of(settings: RunSettings) -> Objective[Any]:
    located = settings.located()
    return build_objective(settings.objective, load_for_training(settings, located), located)


@pytest.mark.parametrize("objective", [
    {"kind": "contrastive"},
    {"kind": "adaptive_margin"},
    {"kind": "contextual", "context_documents": 2},
    {"kind": "margin_mse"},
    MULTI_LAYER,
], ids=lambda objective: objective["kind"])  # fmt: skip
def test_an_encoder_of_queries_that_is_trained_on_is_one_of_documents_too(
    objective: dict[str, Any], of_queries: Path, tmp_path: Path
) -> None:
    form = LAYERS if objective == MULTI_LAYER else None
    trained = objective_of(settings_for(of_queries, objective, form))
    trained.eval()
    trained.export(tmp_path / "model")
    assert read_document_model(tmp_path / "model") is None
    exported = load_towers(EncoderSettings(model=str(tmp_path / "model")), tmp_path / "model", "f" * 64)
    for tower in (exported.query, exported.document):
        assert (tower.contract.document_model, tower.contract.list_scorer) == (None, None)


def test_each_of_two_encoders_may_have_been_one_of_queries(of_queries: Path, pooled: Path, tmp_path: Path) -> None:
    for number, (query, document) in enumerate([(of_queries, pooled), (pooled, of_queries)]):
        own = {"document_encoder": {"model": str(document)}}
        objective_of(settings_for(query, {"kind": "contrastive"}, **own)).eval().export(tmp_path / str(number))
        assert read_document_model(tmp_path / str(number)) is None


def test_blocks_are_compiled_or_computed_again_where_it_is_asked_for(tiny_encoder: Path, monkeypatch) -> None:
    done = list[str]()
    for name in ("compile_blocks", "checkpoint_activations"):
        monkeypatch.setattr(training_run, name, lambda _, name=name: done.append(name))
    for changes in ({}, {"compile": True}, {"activation_checkpointing": True}):
        chosen = settings(tiny_encoder, "any", **changes)
        load_for_training(chosen, chosen.located())
    assert done == ["compile_blocks", "checkpoint_activations"]


def test_fresh_weights_are_drawn_by_the_seed(tiny_encoder: Path, tmp_path: Path) -> None:
    """A projection, an adapter, the prefix of a contextual encoder, the adapter of Revela's language model."""
    encoder, adapter = {"model": str(tiny_encoder), "pooling": "cls"}, {"rank": 2, "targets": "all_linear"}
    contrastive, contextual = {"kind": "contrastive"}, {"kind": "contextual", "context_documents": 2}
    language_model = save_tiny_model("qwen2", tmp_path / "qwen2", language_model=True)
    revela = {"kind": "revela", "language_model": {"model": str(language_model), "lora": adapter}}
    for fresh in (
        {"encoder": encoder | {"projection": "linear"}, "objective": contrastive},
        {"encoder": encoder, "objective": contrastive, "lora": adapter},
        {"encoder": encoder, "objective": contextual},
        {"encoder": encoder, "objective": revela},
    ):
        first, again, other = (first_weights(fresh, seed) for seed in (1, 1, 2))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first), fresh


def first_weights(values: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    chosen = validate(RunSettings, {"batches": "any", "training": {"bf16": False, "seed": seed}} | values, "run")
    return dict(objective_to_train(chosen, chosen.located(), CPU).named_parameters())


def test_coder_knows_the_documents_that_its_encoder_was_trained_for(of_queries: Path) -> None:
    settings = settings_for(of_queries, {"kind": "coder", "documents": "any"})
    contract = load_for_training(settings, settings.located()).query.contract
    assert (contract.document_model, contract.list_scorer) == (DOCUMENTS, None)


def test_a_form_of_the_encoder_that_documents_do_not_have_is_refused(pooled: Path) -> None:
    own = {"document_encoder": {"model": str(pooled)}}
    for objective in ({"kind": "contrastive"}, {"kind": "multi_layer", "training_form": "dual_encoder"}):
        with pytest.raises(ValidationError, match=r"Set document_encoder\.form to it, and leave"):
            settings_for(pooled, objective, LAYERS, **own)
    own["document_encoder"]["form"] = LAYERS
    settings = settings_for(pooled, MULTI_LAYER, **own)
    assert str(load_for_training(settings, settings.located()).document.form) == "layers 1, 2"


def test_a_stored_form_is_trained_on_where_none_is_set(pooled: Path, tmp_path: Path) -> None:
    objective_of(settings_for(pooled, MULTI_LAYER, LAYERS)).eval().export(tmp_path / "model")
    trained = objective_of(settings_for(tmp_path / "model", MULTI_LAYER))
    assert str(trained.encoder("document").form) == "layers 1, 2"
    two = {"document_encoder": {"model": str(tmp_path / "model")}}
    assert str(objective_of(settings_for(pooled, MULTI_LAYER, **two)).encoder("document").form) == "layers 1, 2"
    with pytest.raises(ValidationError, match=r"does not train what the encoder's reduction 'none' searches"):
        settings_for(tmp_path / "model", {"kind": "multi_layer", "training_form": "average"})
    shutil.rmtree(tmp_path / "model")  # such as one that is made before this run
    for model, changes, key in ((tmp_path / "model", {}, "encoder"), (pooled, two, "document_encoder")):
        with pytest.raises(ValidationError, match=rf"but {key}\.form is not set, and .*model is no folder here that"):
            settings_for(model, MULTI_LAYER, **changes)
    settings_for(tmp_path / "model", {"kind": "multi_layer", "training_form": "dual_encoder"})
