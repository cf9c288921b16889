"""Every seed of every job decides bytes: the same seed makes the same artifact, another seed another one.

And what these artifacts store has the types that readers elsewhere rely on.
"""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.filtering.false_negatives import FalseNegativeSettings
from pipelines.jobs.filter import Filter, FilterConfig
from raytriever.jobs import JOBS, stage_class
from raytriever.settings.configuration import validate
from retrieval.collections.collection import DOCUMENTS, StoredCollection
from tests.unit import small_run
from tests.unit.pipelines.jobs.batch_inputs import contents, make_candidates
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.retrieval.encoders.contextual.made_up import contextual
from tests.unit.test_every_setting import changes, example

ROOT = Path(__file__).parents[2]
TEXTS, CHUNKS_OF_A_SOURCE = 60, 5
ELSEWHERE = {
    ("generate", "seed"): "tests/unit/pipelines/jobs/test_generate.py",
    ("mteb", "seed"): "tests/unit/retrieval/jobs/test_mteb.py",
    ("probe", "seeds"): "tests/unit/trainers/probe/test_probe_job.py",
    ("train", "training.seed"): "tests/unit/trainers/engine/test_loop_written_out.py",
    ("train", "objective[CoderSettings].seed"): "tests/unit/trainers/objectives/coder/test_objective.py",
    ("train", "objective[ContextualSettings].seed"): "tests/unit/trainers/objectives/contextual/test_contextual.py",
    ("train", "validation[BatchValidationSettings].seed"): "tests/unit/trainers/validation/test_batches.py",
    ("train", "validation[RetrievalValidationSettings].seed"): "tests/unit/trainers/validation/test_retrieval.py",
}
TYPES = {
    "string": "id title text domain query_id query document_id document source_id split",
    "list<element: string>": "answers document_ids hard_negative_ids hard_negatives",
    "int32": "batch cluster epoch number relevance",
    "list<element: int32>": "masked ranks relevance",
    "int64": "pair query_row document_row row positives.npy order.npy",
    "list<element: int64>": "document_rows",
    "float": "centroids.npy vectors.npy",
    "list<element: float>": "scores",
}  # a measure of evaluate has a slash in its name, and is a double


def assert_types(files: dict[str, bytes]) -> None:
    known = {(name, kind) for kind, names in TYPES.items() for name in names.split()}
    for file, data in files.items():
        found: dict[str, pa.DataType] = {}
        if file.endswith(".parquet"):
            found = {field.name: field.type for field in pq.read_schema(io.BytesIO(data))}
        elif file.endswith(".npy"):
            name = re.findall("[a-z]+", file.rpartition("/")[2])[0]
            found[f"{name}.npy"] = pa.from_numpy_dtype(np.load(io.BytesIO(data)).dtype)
        for name, kind in found.items():
            assert (name, str(kind)) in known or ("/" in name and kind == pa.float64()), file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small run, and what its jobs don't take: chunks, candidates, a ranking, a contextual encoder, many vectors."""
    folder = tmp_path_factory.mktemp("seeds")
    made = small_run.make_run(folder)
    rows = [
        {
            "id": f"d{row}",
            "title": f"title {row}",
            "text": f"{row} of words and {row * 7 % 11} more",
            "domain": "all",
        }
        for row in range(TEXTS)
    ]
    places = [{"source_id": f"s{row // CHUNKS_OF_A_SOURCE}", "number": row} for row in range(TEXTS)]
    schema = pa.schema([*DOCUMENTS, ("source_id", pa.string()), ("number", pa.int32())])
    tables = [pa.Table.from_pylist([row | place for row, place in zip(rows, places, strict=True)], schema)]
    queries = [(f"q{row}", f"query {row}", "all", []) for row in range(TEXTS)]
    judged = [(f"q{row}", f"d{row}", 1, "train") for row in range(TEXTS)]
    made["chunks"] = store(folder / "chunks", tables, queries, judged)
    lists = {row: [(row, 1), *(((row + step) % TEXTS, None) for step in range(1, 9))] for row in range(TEXTS)}
    made["candidates"] = make_candidates(folder / "candidates", made["chunks"], lists, "labelled_lists")
    pool = {row: [((row + step) % small_run.PAIRS, None) for step in range(1, 9)] for row in range(small_run.PAIRS)}
    made["negatives"] = make_candidates(folder / "negatives", made["collection"], pool)
    made["few_negatives"] = make_candidates(folder / "few", made["collection"], dict(list(pool.items())[::2]))
    inputs = {name: made[name] for name in ("packing", "pairs", "collection", "vectors")}
    others = FilterConfig(**inputs, false_negatives=FalseNegativeSettings(margin=0.1), output=str(folder / "others"))
    made["other_batches"] = small_run.make(Filter(others))
    rng = np.random.default_rng(0)
    for name in ("bad_run", "good_run"):
        lines = [f"q{row} Q0 d{rng.integers(row, row + 3) % TEXTS} 1 1.0 {name}\n" for row in range(TEXTS)]
        made[name] = str(folder / f"{name}.trec")
        Path(made[name]).write_text("".join(lines))
    found = np.array([[other for other, _ in lists[row]] for row in range(TEXTS)])
    ranking: dict[str, Any] = {
        "rows.npy": found, "scores.npy": -np.tile(np.arange(9, dtype=np.float32), (TEXTS, 1)), "run.trec": "",
        "queries.parquet": pa.table({"id": [name for name, *_ in queries]}),
        "documents.parquet": pa.table({"id": [row["id"] for row in rows]}),
    }  # fmt: skip
    origin = {"collection": StoredCollection(made["chunks"]).fingerprint}
    made["ranking"] = small_run.make_artifact(folder / "ranking", "run", origin, {"system": {}}, ranking, TEXTS)
    contextual(dtype=torch.float32, context_documents=8).save(folder / "contextual")
    made["contextual"] = str(folder / "contextual")
    return made


def vector_index(**settings: Any) -> dict[str, Any]:
    return {"index": {"kind": "vectors", "vectors": "$vectors", **settings}}


RANDOM = {"batch_size": 4, "order": "random"}
FILTERED = {
    "packing": "$packing",
    "pairs": "$pairs",
    "collection": "$collection",
    "false_negatives": {"surrogate_score": False},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("cluster", "seed", {"pairs": "$pairs", "vectors": "$vectors", "cluster_size": 5, "smallest_domain": 4}),
    ("pack", "seed", {"clusters": "$clusters", "packing": {"batch_size": 4}}),
    ("pack", "seed", {"clusters": "$clusters", "packing": {"batch_size": 4, "shuffled": 0.5, "region_pairs": 10}}),
    ("pack", "seed", {"pairs": "$pairs", "packing": RANDOM}),
    ("pack", "seed", {"pairs": "$pairs", "packing": RANDOM | {"region_pairs": 10}}),
    ("filter", "seed", FILTERED | {"negatives": "$negatives"}),
    ("filter", "seed", FILTERED | {"negatives": "$few_negatives", "too_few_negatives": "random"}),
    ("mix", "seed", {"sources": {"a": "$batches", "b": "$other_batches"}}),
    ("group", "seed", {"collection": "$chunks", "grouping": {"batch_size": 8}}),
    ("group", "seed", {"collection": "$chunks", "grouping": {"batch_size": 8}, "batches_per_epoch": 3}),
    ("lists", "seed", {"collection": "$chunks", "candidates": "$candidates", "batch_size": 8}),
    ("queries", "seed", {"collection": "$chunks", "queries": {"kind": "crops", "minimum_words": 2}}),
    ("queries", "seed", {"collection": "$chunks", "queries": {"kind": "title"}, "held_out": 0.5}),
    ("export", "seed", {"batches": "$batches", "format": "hugging_face"}),
    ("context", "seed", {"collection": "$collection", "encoder": {"model": "$contextual"}, "documents": 5}),
    ("index", "index[VectorIndexSettings].seed", vector_index(factory="IVF4,Flat")),
    ("index", "index[VectorIndexSettings].seed", vector_index(factory="IVF3,Flat", training_sample=20)),
    ("evaluate", "seed", {"collection": "$chunks", "split": "train", "runs": {"bad": "$bad_run", "good": "$good_run"}}),
    ("report", "seed", {"packing": "$packing", "pairs": "$pairs", "vectors": "$vectors", "sampled_batches": 2}),
]


def made(
    job: str, run: dict[str, str], output: Path, settings: dict[str, Any], key: str, seed: int
) -> dict[str, bytes]:
    """The files of the artifact that ``job`` makes by ``seed``, but its manifest, which has the settings."""

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: named(each) for name, each in value.items()}
        return run[value[1:]] if isinstance(value, str) and value.startswith("$") else value

    values = named(settings) | {"output": str(output)}
    (values["index"] if key.startswith("index") else values)["seed"] = seed
    stage = stage_class(job, job)
    files = contents(small_run.make(stage(validate(stage.config_class, values, f"Settings of {job}"))))
    return {name: content for name, content in files.items() if name != "manifest.json"}


@pytest.mark.parametrize(("job", "key", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_another_seed_makes_another_artifact(
    job: str, key: str, settings: dict[str, Any], run: dict[str, str], tmp_path: Path
) -> None:
    one, again, other = (
        made(job, run, tmp_path / name, settings, key, seed) for name, seed in (("one", 3), ("again", 3), ("other", 4))
    )
    assert one == again
    assert one != other
    assert_types(one)


@pytest.mark.parametrize("artifact", ["collection", "pairs", "clusters", "packing", "batches", "evaluation"])
def test_artifacts_without_a_seed_have_the_same_types(artifact: str, run: dict[str, str]) -> None:
    assert_types(contents(run[artifact]))


def test_no_seed_is_left_out() -> None:
    found = set()
    for job in JOBS:
        for key, *_ in changes(example(stage_class(job, job).config_class)):
            if "seed" in key.rpartition(".")[2]:
                found.add((job, key))
    assert found == {(job, key) for job, key, _ in CASES} | ELSEWHERE.keys()
    assert all((ROOT / file).exists() for file in ELSEWHERE.values())
