"""Batches in one call from Python: what the recipe's stages make, from any form of data; bad data in one sentence."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from pipelines.batches import BatchReader, mask_of
from pipelines.build_batches import RECIPE, build_batches
from pipelines.packing.hardness import batch_hardness
from raytriever.artifacts.artifact import MANIFEST, TIMES, Artifact
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from tests.unit.pipelines.formats.files import put
from tests.unit.retrieval.collections.packed_files import write_files
from tests.unit.retrieval.encoders.tiny_models import save_sentence_transformer, save_tiny_model
from tests.unit.small_run import make

SIZE, COUNT = 8, 96
Columns = dict[str, list[str]]


@pytest.fixture(scope="module")
def columns() -> Columns:
    """Pairs of two domains; two queries in a row share a document."""
    numbers = range(COUNT)
    return {
        "query": [f"what does function number {number} do" for number in numbers],
        "document": [f"def f{number // 2}(): return {number // 2 * 17 % 29}" for number in numbers],
        "domain": [("left", "right")[number // 2 % 2] for number in numbers],
        "query_id": [f"q{number}" for number in numbers],
        "document_id": [f"d{number // 2}" for number in numbers],
    }


@pytest.fixture(scope="module")
def vectors() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(0)
    documents = np.repeat(random.normal(size=(COUNT // 2, 16)), 2, axis=0)
    queries = documents + 0.5 * random.normal(size=documents.shape)
    return {"query_vectors": queries.astype(np.float32), "document_vectors": documents.astype(np.float32)}


def files_of(folder: Path) -> dict[str, bytes]:
    left_out = {*TIMES, MANIFEST}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in left_out
    }


def rows_of(batches: BatchReader) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batches.to_dataset().to_list()
    return rows


def test_what_is_saved_is_byte_for_byte_what_the_stages_make(columns, tiny_encoder, tmp_path) -> None:
    settings = {
        "packing.packing.polish_sweeps": 1,
        "vectors.encoder.pooling": "mean",
        "vectors.encoder.dtype": "float32",
    }
    saved = tmp_path / "saved"
    batches = build_batches(columns, encoder=str(tiny_encoder), batch_size=SIZE, epochs=2, seed=3, settings=settings)
    batches.save(saved)

    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    queries = [{"_id": row["query_id"], "text": row["query"]} for row in rows]
    documents = [
        {"_id": row["document_id"], "title": "", "text": row["document"], "metadata": {"domain": row["domain"]}}
        for row in rows[::2]
    ]
    judged = "".join(f"{row['query_id']}\t{row['document_id']}\t1\n" for row in rows)
    source = put(tmp_path / "source", {"queries.jsonl": queries, "corpus.jsonl": documents})
    write_files(source, {"qrels/train.tsv": "query-id\tcorpus-id\tscore\n" + judged})
    values = {
        "corpus.source.path": source, "vectors.encoder.model": str(tiny_encoder), "clusters.cluster_size": SIZE,
        "clusters.smallest_domain": SIZE, "packing.packing.batch_size": SIZE, "packing.epochs": 2, "clusters.seed": 3,
        "packing.seed": 3, "batches.seed": 3, **settings,
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    stages = recipe_stages(load_recipe(RECIPE, overrides, str(tmp_path / "run")))
    for name in ("corpus", "vectors", "pairs", "clusters", "packing", "batches"):
        make(stages[name])
    assert len(files_of(saved)) > 4
    assert files_of(saved) == files_of(tmp_path / "run" / "batches")
    ours, theirs = (Artifact(str(folder)).manifest for folder in (saved, tmp_path / "run" / "batches"))
    assert {**ours, "inputs": theirs["inputs"]} == theirs
    with pytest.raises(UserError, match=r"holds files \(.*Nothing was touched: choose a new folder"):
        batches.save(saved)


def test_every_form_of_data_gives_the_same_batches(columns: Columns, vectors: Any) -> None:
    table = pa.table(columns)
    named = table.rename_columns({"query": "anchor", "document": "positive"})
    forms: list[dict[str, Any]] = [{"data": form} for form in (table, table.to_pandas(), Dataset(table), named)]
    ids = {"query_id": columns["query_id"], "document_id": columns["document_id"]}
    by_id = {
        "queries": dict(zip(columns["query_id"], columns["query"], strict=True)),
        "documents": dict(zip(columns["document_id"], columns["document"], strict=True)),
        "domains": columns["domain"][::2],
        "judgments": list(zip(*ids.values(), strict=True)),
        "query_vectors": torch.from_numpy(vectors["query_vectors"]),
        "document_vectors": vectors["document_vectors"][::2].astype(np.float64),
    }
    found = [rows_of(build_batches(**{**vectors, **form}, batch_size=SIZE)) for form in (*forms, by_id)]
    assert all(other == found[0] for other in found)
    lists: dict[str, Any] = {"documents": columns["document"], "domains": columns["domain"]}
    lists["queries"] = Dataset(table)["query"]  # neither a list nor an array
    without_ids = rows_of(build_batches(**lists, **vectors, batch_size=SIZE))
    texts = ("query", "document", "masked", "domain", "epoch", "batch")
    assert [[row[name] for name in texts] for row in without_ids] == [[row[name] for name in texts] for row in found[0]]


def test_a_sentence_transformer_gives_the_vectors(tmp_path: Path) -> None:
    model = save_sentence_transformer(save_tiny_model("bert", tmp_path / "bert"), tmp_path / "model")
    encoder = SentenceTransformer(str(model), device="cpu")
    texts = [f"number {row} of {row * row % 101}" for row in range(48)]
    columns = {"query": texts, "document": [f"{text}." for text in texts]}
    vectors = {"query_vectors": encoder.encode_query(texts), "document_vectors": encoder.encode(columns["document"])}
    made, expected = (build_batches(columns, batch_size=SIZE, **how) for how in ({"encoder": encoder}, vectors))
    assert rows_of(made) == rows_of(expected)
    assert made.hardness.tolist() == expected.hardness.tolist()


def test_batches_are_a_sequence_for_a_loader_with_hardness_and_audit(columns: Columns, vectors: Any) -> None:
    batches = build_batches(columns, **vectors, batch_size=SIZE, epochs=2)
    assert len(batches) == 2 * COUNT // SIZE
    loaded = list(torch.utils.data.DataLoader(batches, batch_size=None))
    for number, batch in enumerate(loaded):
        rows = batches.read(batch["epoch"], batch["batch"])
        assert (batch["epoch"], batch["batch"]) == divmod(number, COUNT // SIZE)
        assert batch["queries"] == rows["query"].to_pylist()
        assert batch["documents"] == rows["document"].to_pylist()
        assert batch["masked"].dtype == torch.bool
        assert batch["masked"].tolist() == mask_of(rows).tolist()
        places = [int(name[1:]) for name in rows["query_id"].to_pylist()]
        own, read = (vectors[side][places].astype(np.float16).astype(np.float32) for side in vectors)
        hardness = batch_hardness(queries=own, documents=read, mask=mask_of(rows))
        assert batches.hardness[number] == pytest.approx(hardness, abs=1e-6)
    repeated = [row for row in rows_of(batches) if row["masked"]]
    assert repeated
    assert batches.audit["rules"]["same document"]["negatives"]
    again = pickle.loads(pickle.dumps(batches))
    assert again[3]["queries"] == batches[3]["queries"] == batches[3 - len(batches)]["queries"]
    with pytest.raises(IndexError):
        batches[len(batches)]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"data": {"question": ["a"], "document": ["b"]}}, r'\(.*"query" does not exist.*with columns query and document'),
    ({"data": {"query": ["a"], "anchor": ["a"], "document": ["b"]}}, '"query" exists 2 times'),
    ({"data": 7}, r"The data can't be read \(.*\)\. Give a table"),
    ({"data": {"query": ["a", None], "document": ["b", "c"]}}, r"queries\.parquet, row 2: query '1' has no text"),
    ({"data": {"query": ["a", "a", " "], "document": ["b", "c", "d"]}}, "row 2: query '2' has no text"),
    ({"data": {"query": ["a", "b"], "document": [3, 4]}}, '"document" is 3. It must be a string'),
    ({"data": {"query": ["a"] * 2, "document": ["b", "c"], "document_id": ["x"] * 2}}, "row 2: id 'x' is already that"),
    ({"queries": ["a"], "documents": ["b", "c"]}, "expected length 1 but got length 2.*lists of strings, as many"),
    ({"queries": {"q": "a"}, "documents": ["b"]}, "texts by id need judgments"),
    (
        {"queries": ["a"], "documents": ["b"], "judgments": [(0, 1)]},
        r"judgments\.parquet, row 1 names '1', which .*documents\.parquet does not hold",
    ),
    ({"queries": ["a"], "documents": ["b"], "judgments": [(0,)]}, r"not enough values.*judgments are \(query id, doc"),
    ({"queries": ["a"], "documents": ["b"], "domains": []}, "expected length 1 but got length 0"),
    (
        {"queries": ["a", "b"], "documents": {"x": "c", 7: "d"}, "judgments": {0: ["x"], 1: {"7": 2, "z": 1}}},
        "names 'z'",
    ),
    ({"queries": ["a"], "documents": {"7": "c", 7: "d"}, "judgments": [(0, 7)]}, "row 2: id '7' is already that of"),
    ({"queries": ["a"], "documents": ["b"], "judgments": []}, "No judgments to keep in .*there are none"),
    ({"queries": [], "documents": []}, "holds no documents with a text"),
    ({"queries": ["a"]}, "Give one table of pairs, or queries and documents"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_bad_data_are_refused_in_a_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_batches(**given, query_vectors=np.ones((1, 2)), document_vectors=np.ones((1, 2)))


def test_bad_vectors_are_refused_in_a_sentence(columns: Columns, vectors: Any) -> None:
    queries, documents = vectors.values()
    bad = queries.copy()
    bad[5, 3] = np.nan
    shuffled = np.random.default_rng(1).permutation(queries)
    for wrong, message in (
        (bad, "query_vectors.npy: the vector of 'q5', row 5 of the queries, holds a NaN"),
        (queries[1:], r"query_vectors must be .* text that is given .* shape is \(95, 16\), .* queries are 96"),
        (queries[:, 1:], r"differ in dimension: {'documents': \(48, 16\), 'queries': \(96, 15\)}"),
        (queries[0], r"their shape is \(16,\)"),
        (queries.astype(str), "query_vectors.npy can't be taken as vectors of the 96 queries .*it is <U"),
        ([[1.0], [1.0, 2.0]], "query_vectors must be an array .*inhomogeneous"),
        (shuffled, "in another order than the texts"),
    ):
        with pytest.raises(UserError, match=message):
            build_batches(columns, query_vectors=wrong, document_vectors=documents)
    with pytest.raises(UserError, match="not all three"):
        build_batches(columns, query_vectors=queries)
    with pytest.raises(UserError, match="encoder is a int"):
        build_batches(columns, encoder=3)
    with pytest.raises(UserError, match="no stage of Recipe contextual_batches"):
        build_batches(columns, **vectors, settings={"clusterz.seed": 1})


def test_no_ray_is_needed(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from raytriever import build_batches\n"
        "words = [[0.0] * 4 for _ in range(16)]\n"
        "for number, row in enumerate(words): row[number % 4] = 1.0 + number\n"
        "texts = [[f'{side} {number}' for number in range(16)] for side in 'qd']\n"
        "made = build_batches(queries=texts[0], documents=texts[1], query_vectors=words, document_vectors=words,\n"
        "                     batch_size=4)\n"
        "print(made)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<4 batches of 4 in 1 epoch")


def test_the_program_of_the_documentation_prints_what_it_says(tmp_path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[3] / "docs" / "batches.md").read_text(encoding="utf-8")
    [(program, printed)] = re.findall(r"```python\n([^`]*build_batches\([^`]*)```\n\nprints `(.*)`", page)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert capsys.readouterr().out == f"{printed}\n"
    assert BatchReader("runs/mine/batches").number_of_batches(1) == 64
