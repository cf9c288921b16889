"""What Python code is called with by mistake: a ``UserError``, or it works; no other traceback."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict

import raytriever
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.jobs.embed import Embed
from retrieval.jobs.index import Index
from tests.unit.small_run import BATCH_SIZE, make, make_artifact, make_collection
from trainers.sentence_transformers import stored_mask

TEXTS = {"query": [f"q{row}" for row in range(16)], "document": [f"d{row}" for row in range(16)]}
VECTORS = np.random.default_rng(0).normal(size=(16, 4))
ARRAYS = {"query_vectors": VECTORS, "document_vectors": VECTORS, "batch_size": BATCH_SIZE}
TASK = SimpleNamespace(name="task", type="Retrieval")

WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "path": lambda: Path("nowhere/at/all"),
    "str": lambda: "a text",
    "no str": lambda: "",
    "bytes": lambda: b"a text",
    "int": lambda: 7,
    "float": lambda: 1.5,
    "list of str": lambda: ["a", "b"],
    "empty list": list,
    "generator": lambda: (text for text in ("a", "b")),
    "Series": lambda: pd.Series(["a", "b"]),
    "Arrow": lambda: pa.array(["a", "b"]),
    "frame": lambda: pd.DataFrame({"text": ["a", "b"]}),
    "Dataset": lambda: Dataset.from_dict({"text": ["a", "b"]}),
    "streaming": lambda: Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset(),
    "DatasetDict": lambda: DatasetDict({"train": Dataset.from_dict({"text": ["a", "b"]})}),
    "mapping": lambda: {"a": "b"},
    "set": lambda: {"a", "b"},
    "list of None": lambda: [None],
    "list of int": lambda: [3],
    "list of list": lambda: [["a"]],
    "array": lambda: np.ones((2, 3)),
    "tensor": lambda: torch.ones(2, 3),
    "object": object,
}
if find_spec("polars"):
    WRONG["polars"] = lambda: import_module("polars").DataFrame({"text": ["a", "b"]})
STRINGS = {"list of str", "empty list", "generator", "Series", "Arrow"}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Mapping[str, Any]:
    """What the calls need."""
    folder = tmp_path_factory.mktemp("calls")
    collection = make_collection(folder)
    files = {path.name: path.read_bytes() for path in tiny_encoder.iterdir()}
    encoder = {
        "model": make_artifact(folder / "model", "model", {}, {}, files, 1),
        "dtype": "float32",
        "pooling": "mean",
    }

    def stage(kind: Any, name: str, **values: Any) -> str:
        return make(kind(validate(kind.config_class, values | {"output": str(folder / name)}, name)))

    vectors = stage(Embed, "vectors", collection=collection, encoder=encoder)
    stage(Index, "dense", index={"kind": "vectors", "vectors": vectors})
    stage(Index, "words", index={"kind": "lexical", "collection": collection})
    batches = raytriever.build_batches(TEXTS, **ARRAYS)
    return {
        "run": str(folder),
        "searcher": raytriever.Searcher(folder, ["dense", "words"]),
        "collection": raytriever.StoredCollection(collection),
        "batches": batches,
        "columns": raytriever.training_columns(batches),
        "encoder": raytriever.RaytrieverEncoder(str(tiny_encoder), pooling="mean", name="an/encoder"),
    }


def build(data: Any = None, **values: Any) -> Any:
    return raytriever.build_batches(data, **(ARRAYS | values))


QUERIES, DOCUMENTS = TEXTS.values()
PAIRS: dict[str, Any] = {"queries": QUERIES, "documents": DOCUMENTS}
Call = Callable[[Mapping[str, Any], Any], Any]
# each call, and the values with which it works
CALLS: dict[str, tuple[Call, set[str]]] = {
    "build_batches(…)": (lambda _, wrong: build(wrong), set()),
    "queries": (lambda _, wrong: build(queries=wrong, documents=DOCUMENTS), set()),
    "documents": (lambda _, wrong: build(queries=QUERIES, documents=wrong), set()),
    "domains": (lambda _, wrong: build(**PAIRS, domains=wrong), {"None"}),
    "a column": (lambda _, wrong: build(TEXTS | {"query": wrong}), set()),
    "a query": (lambda _, wrong: build(TEXTS | {"query": [*QUERIES[1:], wrong]}), {"str"}),
    "a document": (lambda _, wrong: build(TEXTS | {"document": [*DOCUMENTS[1:], wrong]}), {"str"}),
    "a label": (lambda _, wrong: build(TEXTS | {"label": [1] * 15 + [wrong]}), {"None", "no str"}),
    "query_vectors": (lambda _, wrong: build(TEXTS, query_vectors=wrong), set()),
    "encoder": (
        lambda _, wrong: raytriever.build_batches(TEXTS, encoder=wrong, batch_size=BATCH_SIZE),
        set(),
    ),
    "batch_size": (lambda _, wrong: build(TEXTS, batch_size=wrong), {"int"}),
    "settings": (lambda _, wrong: build(TEXTS, settings=wrong), {"None"}),
    "save": (lambda there, wrong: there["batches"].save(wrong), {"path", "str"}),
    "Searcher(…)": (lambda _, wrong: raytriever.Searcher(wrong), set()),
    "Searcher(indexes)": (lambda there, wrong: raytriever.Searcher(there["run"], wrong), {"empty list"}),
    "Searcher(encoder)": (
        lambda there, wrong: raytriever.Searcher(there["run"], encoder=wrong),
        {"None", "no str"},
    ),
    "search": (lambda there, wrong: there["searcher"].search(wrong), STRINGS),
    "search(k)": (lambda there, wrong: there["searcher"].search(["a"], wrong), {"int"}),
    "Artifact": (lambda _, wrong: raytriever.Artifact(wrong), set()),
    "BatchReader": (lambda _, wrong: raytriever.BatchReader(wrong), set()),
    "StoredCollection": (lambda _, wrong: raytriever.StoredCollection(wrong), set()),
    "StoredVectors": (lambda _, wrong: raytriever.StoredVectors(wrong), set()),
    "find": (lambda there, wrong: there["collection"].find("documents", wrong), STRINGS),
    "require": (lambda there, wrong: there["collection"].require("documents", wrong), {"empty list"}),
    "training_columns": (lambda _, wrong: raytriever.training_columns(wrong), set()),
    "StoredBatchSampler": (lambda _, wrong: raytriever.StoredBatchSampler(wrong, BATCH_SIZE), set()),
    "labels": (lambda _, wrong: stored_mask(wrong if isinstance(wrong, torch.Tensor) else None, 1), set()),
    "encode": (
        lambda there, wrong: there["encoder"].encode(wrong, task_metadata=TASK, hf_split="test", hf_subset="all"),
        {"empty list", "list of list"},  # nothing, and batches of texts
    ),
    "encode a batch": (
        lambda there, wrong: there["encoder"].encode(
            [{"text": wrong}], task_metadata=TASK, hf_split="test", hf_subset="all"
        ),
        STRINGS,
    ),
    "use_tasks": (lambda there, wrong: there["encoder"].use_tasks(wrong), {"empty list"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_refused_in_a_sentence(
    name: str, there: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, working = CALLS[name]
    monkeypatch.chdir(tmp_path)
    for kind, make_wrong in WRONG.items():
        wrong = make_wrong()
        if kind in working:
            call(there, wrong)
            continue
        with pytest.raises(UserError) as caught:
            call(there, wrong)
        assert len(str(caught.value)) < 700, kind
