"""Every setting of every job asks for another artifact, but for those listed with the reason why not; and its cost."""

import json
import types
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.jobs.collect import Collect
from pipelines.packing.pack import PackingSettings
from raytriever.artifacts.artifact import MANIFEST
from raytriever.jobs import JOBS, stage_class
from raytriever.settings.configuration import input_paths, models_in
from raytriever.stages.cost import Cost, Size
from raytriever.stages.stage import Stage
from retrieval.collections.held_out import NewSplits
from retrieval.encoders import pretrained, specification
from retrieval.encoders.contextual.contexts import CorpusContext
from retrieval.encoders.pretrained import LocatedModel
from retrieval.jobs import mteb, rerank
from trainers.engine import settings as engine_settings

EVERY_JOB = {
    "output": "where the bytes are is not what they are",
    "resources.workers": "bytes don't depend on how many make them",
    "resources.cpus_per_worker": "nor on how fast",
    "resources.memory": "nor on what spills to disk",
    "resources.gpus_per_worker": "nor on where, but for a precision that is still 'auto'",
}
OF_A_JOB = {
    "collect": {
        "limits.line_bytes": "what is larger is refused, what isn't is read alike",
        "limits.document_characters": "as line_bytes",
    },
    "mteb": {"published": "shown beside the scores, which it isn't part of"},
    "train": {
        "activation_checkpointing": "the same gradients, computed again",
        "sharding": "the same sums, divided among ranks",
        "checkpoints_kept": "of states on the way",
        "training.checkpoint_every": "as checkpoints_kept",
        "fewest_workers": "steps are the same whatever the ranks",
        "failures_survived": "what is lost is made again",
        "tracking.trackers": "a run is watched, not changed",
        "tracking.project": "as trackers",
        "tracking.run_name": "as trackers",
        "tracking.folder": "as trackers",
        "tracking.every": "as trackers",
        "language_model.activation_checkpointing": "as activation_checkpointing",
        "gradient_cache": "the same gradients, a chunk at a time",
    },
}
RESOLVED_FOR_A_GPU = {"context", "embed", "generate", "mteb", "score", "train"}
FIRST: dict[str, list[dict[str, Any]]] = {
    "evaluate": [{"collection": "collection", "runs": {"a": "run"}}, {"qrels": "qrels.txt", "runs": {"a": "run"}}],
    "export": [
        {"collection": "collection", "format": "trec"},
        {"batches": "batches", "format": "hugging_face"},
        {"encoder": {"model": "encoder"}, "format": "contextual_encoder"},
    ],
    "generate": [
        {"collection": "collection", "language_model": {"model": "model"}, "generation": {"prompt": "{text}.txt"}}
    ],
    "import-vectors": [{"collection": "collection", "model": "m", "documents": "a.npy", "queries": "b.npy"}],
    "mteb": [{"encoder": {"model": "encoder"}, "tasks": ["SciFact"]}],
}
"""Settings that go together, where a job's required ones don't by themselves."""
OTHERS: dict[str, Any] = {
    "bf16": True,
    "dtype": "bfloat16",
    "title": "used",
    "measures": ("nDCG@5",),
    "tasks": ("NFCorpus",),
}
"""What a setting is changed to where not any value of its type will do."""


def other_value(kind: Any, value: Any, name: str) -> Any:
    """A value of the type ``kind`` that is not ``value``, None where there is none; it may fit no other setting."""
    origin, inside = get_origin(kind), get_args(kind)
    if name in OTHERS:
        return OTHERS[name]
    if origin is Annotated:
        return other_value(inside[0], value, name)
    if origin in (Union, types.UnionType):
        return next(found for each in inside if (found := other_value(each, value, name)) not in (None, value))
    if origin is Literal:
        return next((each for each in reversed(inside) if each != value), None)
    if origin in (tuple, list):
        added = other_value(inside[0], None, name)
        return origin([*value[1:], added] if value and inside[1:] not in ((), (...,)) else [*(value or ()), added])
    if origin is dict:
        return (value or {}) | {f"key{len(value or {})}": other_value(inside[1], None, name)}
    if kind is bool:
        return not value
    if kind is str:
        stem, dot, ending = (value or name).partition(".")
        return f"{stem}-other{dot}{ending}"
    return None if kind is type(None) else kind((value or 0) + 1)


def example(model: type[BaseModel]) -> BaseModel:
    """``model`` with its defaults, and any values where it has none."""
    required = {name: field for name, field in model.model_fields.items() if field.is_required()}
    return model.model_construct(**{name: example_value(name, field) for name, field in required.items()})


def example_value(name: str, field: FieldInfo) -> Any:
    models = list(models_in(field))
    if not models:
        return other_value(field.annotation, None, name)
    made = example(models[0])
    return {"one": made} if get_origin(field.annotation) is dict else made


def changes(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, BaseModel, BaseModel]]:
    """Each leaf of ``settings``, and of all models that can stand in them: its key, settings, the same but for it."""
    for name, field in type(settings).model_fields.items():
        value, key, models = getattr(settings, name), f"{prefix}{name}", list(models_in(field))
        if not models:
            other = other_value(field.annotation, value, name)
            if other is not None:
                yield key, settings, settings.model_copy(update={name: other})
            continue
        is_labelled = get_origin(field.annotation) is dict
        there = list(value.values()) if isinstance(value, dict) else [] if value is None else [value]
        for each in [*there, *(example(model) for model in models if model not in map(type, there))]:
            with_it, *_ = _with(settings, name, is_labelled, each)
            if each not in there:
                yield f"{key}={type(each).__name__}", settings, with_it
            for inner, *both in changes(each, f"{key}[{type(each).__name__}]." if len(models) > 1 else f"{key}."):
                before, after = _with(settings, name, is_labelled, *both)
                yield inner, before, after


def _with(settings: BaseModel, name: str, is_labelled: bool, *values: BaseModel) -> list[BaseModel]:
    return [settings.model_copy(update={name: {"one": each} if is_labelled else each}) for each in values]


KINDS = {"runs": "run", "sources": "batches", "batches": "batches"}


def read_source(stage: Collect, name: str) -> Any:
    source = stage.config.source
    paths = input_paths(source.sources[name] if name else source)
    return SimpleNamespace(format=SimpleNamespace(fingerprint=lambda: paths))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input's fingerprint is a function of what names it; 'auto' is bfloat16 on GPUs alone."""

    def located(model: str, *others: Any, with_code: bool = False) -> LocatedModel:
        return LocatedModel(Path(model), model, repr((model, others, with_code)))

    def context(path: str) -> Any:
        return SimpleNamespace(description=SimpleNamespace(fingerprint=path))

    def found_tasks(*named: Any) -> list[Any]:
        return [SimpleNamespace(metadata=SimpleNamespace(name=repr(named)))]

    monkeypatch.chdir(tmp_path)
    for module in (pretrained, rerank):
        monkeypatch.setattr(module, "locate_model", located)
    monkeypatch.setattr(pretrained, "find_tokenizer", Path)
    monkeypatch.setattr(pretrained, "_hash_of", lambda folder, _: str(folder))
    monkeypatch.setattr(mteb, "find_tasks", found_tasks)
    monkeypatch.setattr(mteb, "mteb_version", lambda: "1")
    monkeypatch.setattr(CorpusContext, "of", context)
    monkeypatch.setattr(Collect, "_open", read_source)
    for module in (specification, engine_settings):
        monkeypatch.setattr(module, "has_bfloat16", lambda *, gpu: gpu)


def digest_of(job: str, settings: BaseModel) -> str:
    """Of the derivation, after every input has been written that isn't there: a file, or an artifact's manifest."""
    for key, named in input_paths(settings).items():
        path, names = Path(named), key.split(".")
        if path.suffix or key == "qrels":
            path.write_text(named)
        elif not path.exists():
            kind = next((KINDS[name] for name in names if name in KINDS), names[-1])
            manifest = dict.fromkeys(("stage", "config", "inputs", "dropped", "counts"), named)
            manifest |= {"kind": kind, "schema_version": 1, "algorithm_version": 1, "rows": 0, "shards": []}
            path.mkdir()
            (path / MANIFEST).write_text(json.dumps(manifest | {"facts": {"layout": "pairs"}}))
    return str(stage_class(job, job)(settings).derivation().digest)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.usefixtures("inputs")
def test_every_setting_asks_for_another_artifact(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_class(job, job)
    firsts = [stage.config_class(**first, output="made") for first in FIRST.get(job, ())] or [
        example(stage.config_class)
    ]
    changing, unchanging = set[str](), set[str]()
    for key, before, after in (change for first in firsts for change in changes(first)):
        assert before != after, key
        (changing if digest_of(job, before) != digest_of(job, after) else unchanging).add(key)
    listed = EVERY_JOB | OF_A_JOB.get(job, {})
    if job in RESOLVED_FOR_A_GPU:
        del listed["resources.gpus_per_worker"]
    found = {name: {key for key in unchanging if f".{key}".endswith(f".{name}")} for name in listed}
    assert unchanging - changing == set[str]().union(*found.values())
    assert all(found.values())  # nothing is listed that changes something, or is no setting any more
    before = digest_of(job, firsts[0])
    monkeypatch.setattr(stage, "algorithm_version", stage.algorithm_version + 1)
    assert digest_of(job, firsts[0]) != before


READ = Size(
    documents=1_000_003, document_bytes=301, query_bytes=53, splits={"train": (20_011, 30_011), "test": (701, 907)},
    pairs=500_009, domains=(300_007, 200_002), batches=7_813, rows=64, epochs=3, negatives=5, candidates=17,
    dimension=128, shards=11, results=70_100, disk=3e9,
)  # fmt: skip
COSTS: dict[str, tuple[float, int, float, dict[str, Any]]] = {
    "collect": (
        37.00011,
        20,
        0,
        {"splits": {"train": (19_011, 28_511), "test": (701, 907), "dev": (1_000, 1_500)}, "disk": 126_881_428},
    ),
    "chunk": (8.391629, 7, 0, {"documents": 524_476, "document_bytes": 576, "disk": 126_881_428}),
    "queries": (8.391629, 3_334, 0, {"query_bytes": 60, "splits": {"dev": (1_000_003, 1_000_003)}}),
    "pairs": (0.020011, 6, 0.0260143, {"pairs": 20_011, "domains": (20_011,), "disk": 400_220}),
    "cluster": (54.62686, 2, 0, {"disk": 10_000_180}),
    "pack": (29.00052, 4, 0, {"batches": 125_003, "rows": 4, "epochs": 2, "disk": 20_000_360}),
    "filter": (73.50132, 81, 0, {"negatives": 4, "candidates": 0, "disk": 1_365_564_580}),
    "group": (64, 418, 0, {"pairs": 1_000_000, "batches": 62_500, "rows": 16, "epochs": 2, "disk": 1_969_560_000}),
    "lists": (0.128, 2, 0, {"pairs": 4_000, "batches": 500, "rows": 8, "epochs": 2, "disk": 3_939_120}),
    "index": (6.65602, 2, 0, {"shards": 2, "disk": 512_001_536}),
    "search": (2.032906, 11, 0, {"candidates": 100, "disk": 3_645_200}),
    "mine": (0.039256, 8, 4.833578, {"candidates": 7, "disk": 58_884}),
    "rerank": (0.07177318, 5, 0, {"results": 70_091, "disk": 3_644_732}),
    "fuse": (0.030143, 1, 0, {"disk": 3_645_200}),
    "evaluate": (0.25236, 1, 0, {"disk": 0}),
}
"""Seconds of all tasks, their number, seconds of one that all wait for, and where the size is not what was read."""
OF_COSTS: dict[str, dict[str, Any]] = {
    "collect": {"new_splits": NewSplits()},
    "chunk": {"megabytes_per_shard": 50},
    "queries": {"rows_per_shard": 300, "split": "dev"},
    "pairs": {"texts_per_shard": 10_000, "documents_per_query": 1},
    "cluster": {"cluster_size": 60},
    "pack": {"clusters": "clusters", "packing": PackingSettings(batch_size=4, region_pairs=300_000), "epochs": 2},
    "filter": {
        "negatives": "negatives",
        "negatives_per_example": 4,
        "batches_per_shard": 300,
        "surrogate_scores": True,
    },
    "group": {"epochs": 2, "batches_per_shard": 300},
    "lists": {"epochs": 2, "batches_per_epoch": 500, "batch_size": 8, "batches_per_shard": 300},
    "mine": {"number": 7, "candidates_per_shard": 10_000, "split": "test"},
}
"""Settings of these that are not as the defaults."""


@pytest.mark.parametrize("job", COSTS)
def test_what_a_job_costs_is_worked_out_from_the_size_of_its_inputs(job: str) -> None:
    stage = stage_class(job, job)
    first = next((stage.config_class(**first, output="made") for first in FIRST.get(job, ())), None)
    settings = (first or example(stage.config_class)).model_copy(update=OF_COSTS.get(job, {}))
    found = stage(settings).cost(READ)
    work, tasks, alone, changed = COSTS[job]
    assert (found.work, found.tasks, found.alone) == (pytest.approx(work, 1e-6), tasks, pytest.approx(alone, 1e-6))
    assert asdict(found.made) == asdict(READ) | changed | {"disk": pytest.approx(changed.get("disk", READ.disk), 1e-6)}
    assert stage(settings).cost(Size()).made.documents == 0


def test_other_jobs_take_a_moment() -> None:
    stages = {job: stage_class(job, job) for job in JOBS}
    assert {job for job, stage in stages.items() if stage.cost is not Stage.cost} - {"generate"} == COSTS.keys()
    moment = Stage.cost(None, READ)  # type: ignore[arg-type]
    assert moment == Cost(replace(READ, disk=0), work=0, tasks=1, alone=0)
    assert (READ.queries("test"), READ.queries()) == (701, 20_712)
