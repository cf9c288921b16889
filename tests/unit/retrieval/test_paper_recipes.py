"""The papers' settings: what the recipes resolve to, and what must hold between the stages of any recipe."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raytriever.cluster.submit import program_files
from raytriever.settings.recipe import load_recipe, recipe_names
from raytriever.stages.recipe_run import recipe_stages

ROOT = Path(__file__).parents[3]
NAMES = recipe_names()
PAPERS = [name for name in NAMES if name.startswith("papers/")]
Stages = dict[str, Any]


recipe_of = cache(lambda name: load_recipe(name, []))


@cache
def stages_of(name: str) -> Stages:
    return recipe_stages(recipe_of(name))


def value(stages: Stages, key: str) -> Any:
    stage, *keys = key.split(".")
    found = stages[stage].config
    for part in keys:
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def stored_epochs(stages: Stages, folder: str) -> int:
    """For how many epochs the batches in ``folder`` will be there."""
    stage = next(stage for stage in stages.values() if stage.config.output == folder)
    if stage.command == "filter":
        return stored_epochs(stages, stage.config.packing)
    if stage.command == "mix":
        return stage.config.epochs or min(stored_epochs(stages, source) for source in stage.config.sources.values())
    epochs: int = stage.config.epochs
    return epochs


# settings that a section or table of the papers gives
PRINTED: dict[str, dict[str, dict[str, Any]]] = {
    "adaptive_margins": {
        "model.encoder": {"pooling": "cls"},
        "model.objective": {"target": "distributed", "query_max_length": 30, "document_max_length": 200},
        "packing": {"epochs": 20},  # so that a triplet is seen once: a query has about a hundred
        "packing.packing": {"batch_size": 128},
        # drawn without replacement over epochs; some queries have more than a hundred negatives
        "batches": {"choose_negatives": "sample", "negatives_per_example": 1},
        "model.training": {"epochs": 20},
        "model.training.optimizer": {"learning_rate": pytest.approx(5e-6 / 128), "weight_decay": 1e-6},
        "model.training.schedule": {"decay": 0.99999},
        "model.validation": {"measure": "nDCG@10", "every": 500, "patience": 16},
    },
    "multi_layer": {
        "pairs": {"choose_documents": "first"},
        "dev_pairs": {"choose_documents": "first"},
        "packing.packing": {"batch_size": 128},
        "model.document_encoder.form": {"layers": (10, 12)},
        "model.objective": {"regularisation": 1.0, "document_max_length": 256},
        "model.training": {"epochs": 40, "hard_negatives": 1, "seed": 12345},
        "model.training.optimizer": {"learning_rate": 2e-5, "max_grad_norm": 2.0},
        "model.training.schedule": {"warmup_ratio": 0.05},
        "model.validation.then": {"after_epoch": 30},
        "wikipedia/single-vector_MLR/nq_open/run": {"top_k": 100, "domain": "nq"},
        "wikipedia/nq_open/evaluation": {"measures": ("Accuracy@5", "Accuracy@20", "Accuracy@100")},
    },
    "multi_layer_two_stages": {
        "packing.packing": {"batch_size": 128},
        "stage_1_model.training": {"epochs": 4, "hard_negatives": 15},
        "stage_1_model.training.optimizer": {"learning_rate": 1e-5},
        "stage_1_model.objective": {"regularisation": 0.01},
        "mined_negatives": {"number": 100},
        "msmarco/msmarco_dev/evaluation": {"measures": ("RR@10", "nDCG@10", "R@1000")},
        "msmarco/stage_2/msmarco_dev/run": {"top_k": 1000},
    },
    "multi_layer_open_qa": {
        "stage_1_model.training": {"epochs": 40},
        "model.training": {"epochs": 20},
        "model.training.optimizer": {"learning_rate": 5e-6},
        "model.objective": {"regularisation": 0.1},
        "mined_negatives": {"number": 50},
        "mined_batches": {"judged_negatives": "train", "negatives_per_example": 100},
    },
    "multi_layer_beir": {
        "stage_1_model.training": {"epochs": 10},
        "stage_1_model.training.optimizer": {"learning_rate": 3e-5},
        "stage_1_model.objective": {"regularisation": 0.01},
    },
    "coder_ms_marco": {
        "msmarco/BM25/index.index.bm25": {"k1": 0.82},
        "msmarco/CODER/trec_dl_2019/run": {"top_k": 1000},
        "msmarco/trec_dl_2019/evaluation": {
            "measures": ("RR@10", "RR(rel=2)@10", "nDCG@10", "nDCG(rel=2)@10", "R(rel=2)@1000")
        },
        "candidates": {"form": "labelled_lists"},
        "train_run": {"top_k": 1000},
        "batches": {"batch_size": 32},
        "vectors.encoder": {"max_length": 256},
        "model": {"dropout": 0.1},
        "model.objective": {"loss": "list_net", "candidates": 1000, "query_max_length": 32, "temperature": 1.0},
        "model.training.optimizer": {
            "kind": "radam",
            "learning_rate": pytest.approx(1.73e-6, rel=2e-3),
            "epsilon": pytest.approx(1.3e-7, rel=1e-2),
            "weight_decay": pytest.approx(9.5e-5, rel=1e-2),
            "max_grad_norm": 1.0,
        },
        "model.training.schedule": {"warmup_steps": 9000},
        "model.validation": {"queries": 10000, "exclude_split": "test"},
    },
    "coder_tripclick": {
        "vectors.encoder": {"max_length": 512},
        "model.training.optimizer": {"learning_rate": pytest.approx(1.73e-6, rel=2e-3)},
        "corpus.source": {"kind": "trec"},
        "corpus.source.qrels": {"val": ("qrels/qrels.dctr.head.val.txt",)},
        "corpus.source.cross_validation": {"split": "val", "folds": 2},
        "tripclick_halved/collection.source.cross_validation": {"folds": 2},
        "tripclick_halved/CODER/tripclick_head_dctr/run": {"split": "test"},
        "model.validation": {"split": "dev"},
    },
    "coder_zero_shot": {
        "tripclick/CODER/tripclick_head_dctr/run": {"index": "runs/papers/coder_zero_shot/tripclick/TAS-B/index"}
    },
    "contextual_large": {
        "clusters": {"cluster_size": 512},
        "clusters.kmeans": {"iterations": 100, "restarts": 3},
        "packing.packing": {"order": "tour", "batch_size": 512},
        "batches.false_negatives": {"surrogate_score": True},
        "model.encoder": {"tokenizer": "google-bert/bert-base-uncased"},
        "model.objective": {
            "context_documents": 512,
            "document_max_length": 512,
            "similarity_temperature": 0.02,
            "sequence_dropout": 0.005,
        },
        "model.training": {"epochs": 3},
        "model.training.optimizer": {"kind": "adam", "learning_rate": 2e-5},
        "model.training.schedule": {"warmup_steps": 1000},
    },
    "contextual_small": {
        "model.encoder": {"tokenizer": None},
        "model.objective": {"context_documents": 64, "query_max_length": 64, "document_max_length": 64},
        "packing.packing": {"batch_size": 512},
    },
    "contextual_baseline": {"model.objective": {"document_max_length": 512}, "packing.packing": {"batch_size": 512}},
    "contextual_small_baseline": {
        "model.objective": {"kind": "contrastive", "similarity_temperature": 0.02, "query_max_length": 64},
        "model.encoder": {"max_length": 64},
    },
    "contextual_supervised": {
        "model.encoder": {"model": "runs/papers/contextual_large/model", "tokenizer": None},
        "model.objective": {"context_documents": 512},
        "batches": {"negatives_per_example": 1},
    },
    "revela": {
        "chunks.chunking": {"max_words": 120},
        "batches.grouping": {"batch_size": 16},
        "model.lora": {"rank": 256},
        "model.objective.language_model.lora": {"rank": 256},
        "model.objective.language_model": {"max_length": 160},
        "model.objective": {"max_length": 160, "similarity_temperature": 1e-4, "first_half": True},
        "model.training.optimizer": {"learning_rate": 1e-4},
        "model.training.schedule": {"warmup_steps": 100},
        "arguana/Revela_BM25/run": {"rank_constant": 60, "depth": 200},
    },
    "revela_code": {"model.objective": {"first_half": False}, "batches.grouping": {"batch_size": 16}},
    "revela_dual": {
        "model.objective": {"first_half": ["wikipedia"]},
        "batches": {"ratios": {"articles": 1, "threads": 1}},
    },
    "revela_published_batches": {"batches.grouping": {"documents_per_batch": 1, "batch_size": 16}},
    "revela_beir": {
        "article_batches": {"batches_per_epoch": 320_000 - 54_312},
        "model.objective": {"first_half": True},
    },
    "revela_table_1": {"arguana/Revela_1B_BM25/run": {"rank_constant": 60}},
    "revela_table_2": {"apps/evaluation": {"measures": ("nDCG@10", "R@100")}},
    "replug_code": {"model.objective": {"first_half": False}, "chunks.chunking": {"kind": "markdown"}},
    "replug": {
        "model.objective": {"similarity_temperature": 1e-3, "likelihood_temperature": 1e-3},
        "model.training.optimizer": {"learning_rate": 5e-4},
        "model.training": {"max_steps": 4500},
    },
}


# recipes whose rows no table of their paper has
NOTHING_PRINTED = [f"papers/{name}" for name in ("coder_zero_shot", "contextual_small", "contextual_small_baseline")]
PAGE = (ROOT / "docs" / "reports" / "reproduction.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^raytriever (?:run|sweep) (papers/[^#\n]*)", PAGE.replace("\\\n", ""), re.MULTILINE)
_REVELA, _FORM = "suite.systems.Revela.published=revela/", "model.document_encoder.form"
_REGULARISATION, _TRAINED = "model.objective.regularisation", "model.objective.training_form"
VARIANTS = [  # of what headers of recipes propose
    ("revela", [_REVELA + "9/Revela 135M random", "batches.grouping.order=random"]),
    ("revela", [_REVELA + "6/Revela 135M LM 0.5B", "model.objective.language_model.model=Qwen/Qwen2.5-0.5B"]),
    ("revela", [_REVELA + "8/Revela 135M rank 64", "model.objective.language_model.lora.rank=64"]),
    ("revela", [_REVELA + "11/Revela 135M batch 8", "batches.grouping.batch_size=8"]),
    ("revela_code", [_REVELA + "12/Revela 135M batch 12", "batches.batches_per_epoch=478350"]),
    ("revela", [_REVELA + "13/Revela 135M without v-norm", "model.objective.value_normalization=false"]),
    (
        "multi_layer",
        [
            "corpus.source.examples={train: biencoder-trivia-train.json, dev: biencoder-trivia-dev.json}",
            "suite.collections.wikipedia.columns={triviaqa: {search: {split: null, domain: triviaqa}}}",
        ],
    ),
    ("multi_layer", [_FORM + ".layers=[8,12]"]),
    ("multi_layer", [_TRAINED + "=multi_vector", _REGULARISATION + "=null", _FORM + ".reduction=none"]),
    ("multi_layer", [_TRAINED + "=average", _REGULARISATION + "=null", _FORM + ".reduction=average"]),
    ("multi_layer", [_TRAINED + "=dual_encoder", _REGULARISATION + "=null", _FORM + "=null"]),
    ("multi_layer", [_FORM + "={kind: first_tokens, tokens: 8, reduction: last}"]),
    ("multi_layer", [_FORM + "={kind: all_tokens, reduction: last}", _REGULARISATION + "=0.01"]),
    ("contextual_small_baseline", ["packing.clusters=null", "packing.pairs=pairs", "packing.packing.order=random"]),
    ("adaptive_margins", ["suite.systems.BM25={files: {trec_dl_2019: x/a.trec, trec_dl_2020: x/b.trec}}"]),
    ("coder_ms_marco", ["train_run.index=bm25_index", "train_run.vectors=null"]),
    ("revela_table_1", ["suite.systems.REPLUG 1B=null"]),
]


def test_the_page_of_commands_has_every_recipe() -> None:
    assert {command.split()[0] for command in COMMANDS} == set(PAPERS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_one(command: str) -> None:
    name, *words = shlex.split(command)
    options = list(zip(words[::2], words[1::2], strict=True))
    assert {option for option, _ in options} <= {"--set", "--grid", "--system"}
    overrides = [value for option, value in options if option == "--set"]
    for key, values in (value.split("=", 1) for option, value in options if option == "--grid"):
        overrides += [f"{key}={value}" for value in values.split(",")]
    stages = recipe_stages(load_recipe(name, overrides))
    for option, value in options:
        if option == "--system":
            assert all(value in stage.config.runs for stage in stages.values() if stage.command == "evaluate")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "overrides"), VARIANTS)
def test_what_a_header_proposes_is_possible(name: str, overrides: list[str]) -> None:
    stages = recipe_stages(load_recipe(f"papers/{name}", overrides))
    for stage in stages.values():
        if stage.command != "train":  # an optimizer may not be installed
            stage.check_settings(stages)


@pytest.mark.parametrize("name", PAPERS)
def test_what_the_papers_print_is_what_runs(name: str) -> None:
    """A paper's recipe ends in its table, beside what was printed."""
    stages = stages_of(name)
    sections = PRINTED[name.removeprefix("papers/")].items()
    printed = {f"{section}.{key}": wanted for section, settings in sections for key, wanted in settings.items()}
    assert {key: value(stages, key) for key in printed} == printed
    table = stages["table"]
    table.check_settings(stages)  # rows that there are, of measures that are taken here
    assert list(stages)[-1] == "table"
    assert table.config.published or name in NOTHING_PRINTED


@pytest.mark.parametrize(("name", "rules"), [
    ("multi_layer", []),  # all documents of other queries are negatives
    ("multi_layer_two_stages", []),
    ("multi_layer_open_qa", []),
    ("contextual_large", ["surrogate_score"]),  # eq. 4
    ("contextual_small", ["surrogate_score"]),
    ("contextual_baseline", ["surrogate_score"]),
    ("contextual_supervised", ["surrogate_score"]),
])  # fmt: skip
def test_what_is_left_out_of_a_softmax_is_what_the_paper_leaves_out(name: str, rules: list[str]) -> None:
    filters = [stage.config for stage in stages_of(f"papers/{name}").values() if stage.command == "filter"]
    for config in filters:
        settings = config.false_negatives.model_dump()
        assert [rule for rule, asked in settings.items() if asked is True] == rules
    assert filters


CHUNKS = {"articles": "articles", "chunks": "chunks", "batches": "batches"}


@pytest.mark.parametrize(("name", "stages", "other"), [
    ("revela_dual", {"article_batches": "batches", "chunks": "chunks"}, "revela"),
    ("revela_dual", {"thread_batches": "batches", "thread_chunks": "chunks"}, "revela_code"),
    ("replug", CHUNKS, "revela"),
    ("replug_code", CHUNKS, "revela_code"),
])  # fmt: skip
def test_sets_of_chunks_are_those_of_the_recipe_that_it_is_compared_with(name, stages, other) -> None:
    ours, theirs = stages_of(f"papers/{name}"), stages_of(f"papers/{other}")
    left_out = {"output", "collection", "batches_per_epoch"}
    for here, there in stages.items():
        assert ours[here].config.model_dump(exclude=left_out) == theirs[there].config.model_dump(exclude=left_out)
        if name == "revela_dual" and there == "batches":
            assert ours[here].config.batches_per_epoch == 160_000  # a draw whose first are those of a longer one


@pytest.mark.parametrize("name", NAMES)
def test_a_gated_model_is_named_as_one_and_retromae_is_read_where_its_safetensors_are(name: str) -> None:
    if "Llama" in str(recipe_of(name).stages):
        text = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
        assert "meta-llama/Llama-3.2-1B is gated: accept its licence" in " ".join(text.split())
    for stage in stages_of(name).values():
        for model in (getattr(stage.config, key, None) for key in ("encoder", "document_encoder")):
            assert model is None or model.model != "Shitao/RetroMAE" or model.revision == "refs/pr/1"


@pytest.mark.parametrize("name", ["multi_layer_two_stages", "coder_ms_marco", "coder_tripclick"])
def test_a_passage_that_has_a_querys_number_is_no_query(name: str) -> None:
    mined = [stage.config for stage in stages_of(f"papers/{name}").values() if stage.command == "mine"]
    assert {config.rules.self_hits for config in mined} == {"keep"}


@pytest.mark.parametrize(("name", "batches"), [
    ("revela", 320_000),
    ("revela_dual", 320_000),
    ("revela_code", 358_763),
    ("replug", 144_000),
    ("replug_code", 144_000),
])  # fmt: skip
def test_revela_reads_as_many_batches_as_the_paper(name: str, batches: int) -> None:
    stages = stages_of(f"papers/{name}")
    step = value(stages, "model.training.batches_per_step")
    assert step == 32  # 4 GPUs, 8 batches accumulated
    assert 0 <= batches - value(stages, "model.training.max_steps") * step < step


@pytest.mark.parametrize("name", NAMES)
def test_a_run_trains_on_what_is_stored_for_it(name: str) -> None:
    stages = stages_of(name)
    for stage in (stage for stage in stages.values() if stage.command == "train"):
        training = stage.config.training
        assert training.epochs <= stored_epochs(stages, stage.config.batches)
        if training.max_steps is not None:
            assert training.schedule.warmup_steps < training.max_steps
        filtered = next(made for made in stages.values() if made.config.output == stage.config.batches)
        if filtered.command == "filter" and training.hard_negatives is not None:
            assert training.hard_negatives <= filtered.config.negatives_per_example


@pytest.mark.parametrize("name", [name for name in NAMES if "coder" in name])
def test_coder_trains_the_encoder_behind_its_documents(name: str) -> None:
    stages = stages_of(name)
    if "model" not in stages:
        return  # it measures the model of another recipe
    trained = stages["model"].config
    assert trained.objective.documents == stages["vectors"].config.output
    behind = [stage for key, stage in stages.items() if key in ("vectors", "other_vectors") or "TAS-B/vec" in key]
    assert behind
    for embed in behind:
        # embedding has settled by now what 'auto' is on this machine
        assert embed.config.encoder.model_copy(update={"dtype": trained.encoder.dtype}) == trained.encoder


def test_all_recipes_travel_with_the_program_and_write_to_folders_of_their_own() -> None:
    sent = {Path(name) for name, _ in program_files()}
    assert sent >= {Path("recipes") / f"{name}.yaml" for name in NAMES}
    outputs = [recipe_of(name).output for name in NAMES]
    assert len(set(outputs)) == len(outputs)
