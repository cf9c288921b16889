"""Batches in one call from Python: what the recipe's stages make, from any form of data; bad data in one sentence."""

import importlib
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from pipelines.batches import BatchReader, mask_of
from pipelines.build_batches import RECIPE, build_batches
from pipelines.filtering.false_negatives import batch_hardness
from raytriever.artifacts.artifact import MANIFEST, Artifact
from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from retrieval.collections.collection import StoredCollection
from retrieval.vectors import StoredVectors
from tests.unit.pipelines.formats.files import put
from tests.unit.pipelines.jobs.batch_inputs import contents
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


def rows_of(batches: BatchReader) -> list[dict[str, Any]]:
    dataset = batches.to_dataset()
    assert {dataset.features[name].dtype for name in ("epoch", "batch")} == {"int32"}
    rows: list[dict[str, Any]] = dataset.to_list()
    return rows


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What the call reads of its arguments; no batches are made of it."""
    found: list[Any] = []
    module = importlib.import_module("pipelines.build_batches")
    monkeypatch.setattr(module, "BuiltBatches", lambda _: found.pop())

    def keep(_: str, given: Any, *more: Any) -> None:
        found.append((given.tables(), given.ids, given.negatives, *more))

    monkeypatch.setattr(module, "_make", keep)
    return build_batches


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
    made = tmp_path / "run" / "batches"
    assert len(contents(str(saved))) > 5
    assert contents(str(saved)) | {MANIFEST: b""} == contents(str(made)) | {MANIFEST: b""}
    ours, theirs = (Artifact(str(folder)).manifest for folder in (saved, made))
    assert {**ours, "inputs": theirs["inputs"]} == theirs
    with pytest.raises(UserError, match=r"holds files \(.*Nothing was changed. Choose a new folder"):
        batches.save(saved)
    with pytest.raises(UserError, match=r"is a file, where .* would be a folder"):
        batches.save(saved / "manifest.json")


def test_texts_in_lists_give_the_batches_of_a_table(columns: Columns, vectors: Any) -> None:
    table = pa.table(columns)
    expected = rows_of(build_batches(table, **vectors, batch_size=SIZE))
    others = {
        "query_vectors": torch.from_numpy(vectors["query_vectors"]),
        "document_vectors": vectors["document_vectors"].astype(np.float64),
    }
    assert rows_of(build_batches(table, **others, batch_size=SIZE)) == expected
    lists: dict[str, Any] = {"documents": columns["document"], "domains": columns["domain"]}
    lists["queries"] = Dataset(table)["query"]  # neither a list nor an array
    without_ids = rows_of(build_batches(**lists, **vectors, batch_size=SIZE))
    texts = ("query", "document", "masked", "domain", "epoch", "batch")
    assert [[row[name] for name in texts] for row in without_ids] == [[row[name] for name in texts] for row in expected]


TRIPLETS = [(f"what is {row}", f"it is {row}", f"it is {(row + 1) % COUNT}") for row in range(COUNT)]
NAMED = {name: [row[place] for row in TRIPLETS] for place, name in enumerate(("anchor", "positive", "negative"))}


class Triplet(NamedTuple):
    """In another order than that of a tuple."""

    negative: str
    positive: str
    anchor: str


class Streamed:
    """What a frame of Polars has for others."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self._table.__arrow_c_stream__(schema)


def typed(type_: pa.DataType) -> pa.Table:
    return pa.table({name: pa.array(column).cast(type_) for name, column in NAMED.items()})


FORMS: dict[str, Callable[[], Any]] = {
    "columns": lambda: NAMED,
    "list of tuples": lambda: TRIPLETS,
    "list of lists": lambda: list(map(list, TRIPLETS)),
    "generator of tuples": lambda: (row for row in TRIPLETS),
    "list of mappings": lambda: [dict(zip(NAMED, row, strict=True)) for row in TRIPLETS],
    "named tuples": lambda: [Triplet(negative, positive, anchor) for anchor, positive, negative in TRIPLETS],
    "lists": lambda: {  # as FlagEmbedding's files have them
        "query": NAMED["anchor"],
        "pos": [[text] for text in NAMED["positive"]],
        "neg": [(text,) for text in NAMED["negative"]],
    },
    "Dataset": lambda: Dataset.from_dict(NAMED),
    "streaming": lambda: Dataset.from_dict(NAMED).to_iterable_dataset(),
    "streaming columns": lambda: {name: Dataset.from_dict(NAMED).to_iterable_dataset()[name] for name in NAMED},
    "pandas": lambda: pd.DataFrame(NAMED),
    "NumPy": lambda: {name: np.array(column) for name, column in NAMED.items()},
    "large_string": lambda: typed(pa.large_string()),
    "string_view": lambda: typed(pa.string_view()),
    "dictionary": lambda: typed(pa.dictionary(pa.int32(), pa.string())),
    "Arrow's interface": lambda: Streamed(typed(pa.string_view())),
    "polars": lambda: pytest.importorskip("polars").DataFrame(NAMED),
}


@pytest.mark.parametrize("form", FORMS)
def test_triplets_of_any_form_are_read_alike(read: Callable[..., Any], form: str) -> None:
    assert read(FORMS[form](), encoder="none") == read(NAMED, encoder="none")


def test_triplets_have_their_negatives_and_masks(vectors: Any) -> None:
    of_documents = np.concatenate([vectors["document_vectors"]] * 2)
    given = {"query_vectors": vectors["query_vectors"], "document_vectors": of_documents}
    settings = {"batches.false_negatives.surrogate_score": False}
    batches = build_batches(NAMED, **given, batch_size=SIZE, settings=settings)
    negative_of = {anchor: (positive, negative) for anchor, positive, negative in TRIPLETS}
    seen = list[str]()
    for batch in batches:
        positives, negatives = batch["documents"][:SIZE], batch["documents"][SIZE:]
        assert list(zip(positives, negatives, strict=True)) == [negative_of[query] for query in batch["queries"]]
        expected = np.array([[text == own for text in batch["documents"]] for own in positives])
        expected[np.arange(SIZE), np.arange(SIZE)] = False
        assert batch["masked"].tolist() == expected.tolist()  # a negative that is the positive of another query
        seen += batch["queries"]
    assert sorted(seen) == sorted(NAMED["anchor"])
    assert batches.audit["rules"]["same document"]["negatives"]


def test_vectors_of_negatives_stand_behind_those_of_documents() -> None:
    absent: list[Any] = [[], None, [None], ""]
    lists = [[f"no {row}", f"never {row}"] if row % 3 else absent[row % 4] for row in range(COUNT)]
    columns = {
        "query": NAMED["anchor"],
        "document": NAMED["positive"],
        "negative_1": NAMED["negative"],
        "negatives": lists,
    }
    texts = NAMED["positive"] + NAMED["negative"] + [text for of_row in lists for text in of_row or () if text]
    vector_of = {text: np.random.default_rng(number).normal(size=8) for number, text in enumerate(texts)}
    given = {"query_vectors": [vector_of[text] for text in NAMED["positive"]]}
    given["document_vectors"] = [vector_of[text] for text in texts]
    batches = build_batches(columns, **given, batch_size=SIZE)
    folder = Path(batches.uri).parent
    stored = StoredCollection(str(folder / "corpus")).rows_of("documents").read(["text"])["text"].to_pylist()
    assert set(stored) == {text for text in texts if text}
    kept = StoredVectors(str(folder / "vectors")).part("documents").gather(np.arange(len(stored)))
    np.testing.assert_allclose(kept, [vector_of[text] for text in stored], atol=2e-3)


def test_hard_negatives_are_as_many_as_the_median_row_has(tiny_encoder: Path, logged: list[str]) -> None:
    lists = [[f"{row} no {number}" for number in range(row % 4)] for row in range(COUNT)]  # 0, 1, 2, 3
    columns = {"query": NAMED["anchor"], "document": NAMED["positive"], "negatives": lists}
    how: dict[str, Any] = {"encoder": tiny_encoder, "batch_size": SIZE}
    settings = {"vectors.encoder.pooling": "mean"}
    batches = build_batches(columns, **how, settings=settings)
    assert (
        "Hard negatives of an example: 2. Examples with fewer repeat theirs; examples with more use them in turn,"
        " epoch by epoch." in logged
    )
    counts = batches.artifact.manifest["counts"]
    for row in rows_of(batches):
        number = int(row["query"].split()[-1])
        own = [text for text in row["hard_negatives"] if text in lists[number]]
        assert len(row["hard_negatives"]) == 2
        assert len(set(own)) == min(number % 4, 2)
    assert counts["hard negatives repeated"] == COUNT // 4
    assert counts["hard negatives drawn at random"] == 2 * COUNT // 4
    other = build_batches(columns, **how, settings=settings | {"batches.negatives_per_example": 1})
    assert {len(row["hard_negatives"]) for row in rows_of(other)} == {1}


def test_hard_negatives_of_few_rows_are_not_drawn_for_all(tiny_encoder: Path) -> None:
    lists = [[f"{row} no {number}" for number in range(5 * (row < 4))] for row in range(COUNT)]
    columns = {"query": NAMED["anchor"], "document": NAMED["positive"], "negatives": lists}
    batches = build_batches(
        columns, encoder=tiny_encoder, batch_size=SIZE, settings={"vectors.encoder.pooling": "mean"}
    )
    assert {len(row["hard_negatives"]) for row in rows_of(batches)} == {1}


def test_an_answer_of_two_domains_is_a_document_of_each(vectors: Any) -> None:
    half = COUNT // 2
    columns = {
        "query": NAMED["anchor"],
        "document": NAMED["positive"][:half] * 2,
        "domain": ["a"] * half + ["b"] * half,
    }
    one_sided = {"query_vectors": vectors["query_vectors"], "document_vectors": vectors["document_vectors"]}
    batches = build_batches(columns, **one_sided, batch_size=SIZE, settings={"clusters.small_domains": "merge"})
    domains = Counter(row["domain"] for row in rows_of(batches))
    assert domains == {"a": half, "b": half}


def test_several_positives_are_given_in_rows_or_in_lists(vectors: Any) -> None:
    texts = [f"what is {row}" for row in range(COUNT)]
    pairs = [(texts[row // 2], f"it is {row}") for row in range(COUNT)]
    half = vectors | {"query_vectors": vectors["query_vectors"][::2]}
    twice = vectors | {"query_vectors": half["query_vectors"].repeat(2, axis=0)}
    lists = {
        "query": texts[: COUNT // 2],
        "positives": [[f"it is {row}", f"it is {row + 1}"] for row in range(0, COUNT, 2)],
    }
    of_rows = build_batches(pairs, **twice, batch_size=SIZE)
    of_lists = build_batches(lists, **half, batch_size=SIZE)
    in_arguments = build_batches(queries=lists["query"], documents=lists["positives"], **half, batch_size=SIZE)
    assert rows_of(of_rows) == rows_of(of_lists) == rows_of(in_arguments)
    assert sorted((row["query"], row["document"]) for row in rows_of(of_rows)) == sorted(pairs)
    assert of_rows.audit["rules"]["same query"]["negatives"] or of_rows.audit["rules"]["known positive"]["negatives"]


EMPTY = {"query": [*NAMED["anchor"][:-3], None, " ", "what"], "document": [*NAMED["positive"][:-1], np.nan]}


def test_what_has_no_text_is_left_out_where_asked_for(vectors: Any) -> None:
    made = build_batches(EMPTY, **vectors, batch_size=3, drop_empty=True)
    assert len(made) == COUNT // 3 - 1
    assert {row["query"] for row in rows_of(made)} == set(EMPTY["query"][:-3])


def test_no_text_is_the_same_in_every_frame(read: Callable[..., Any], logged: list[str]) -> None:
    expected = read(EMPTY, encoder="none", drop_empty=True)
    for data in (EMPTY, pd.DataFrame(EMPTY), pd.DataFrame(EMPTY, dtype="string")):
        logged.clear()
        assert read(data, encoder="none", drop_empty=True) == expected
        assert [line for line in logged if "left out" in line] == [
            f"2 of {COUNT} queries have no text and are left out.",
            f"1 of {COUNT} documents have no text and are left out.",
        ]


def test_columns_are_taken_by_their_position_where_two_are_of_texts(
    read: Callable[..., Any], logged: list[str]
) -> None:
    expected = read({"query": NAMED["anchor"], "document": NAMED["positive"]}, encoder="none")
    for names in (("question", "answer"), ("sentence1", "sentence2"), ("query", "answer"), ("passage", "query")):
        logged.clear()
        columns = dict(zip(names, (NAMED["anchor"], NAMED["positive"]), strict=True)) | {"label": [1] * COUNT}
        if names[1] == "query":
            columns["passage"], columns["query"] = columns["query"], columns["passage"]
        assert read(columns | {"page": range(COUNT)}, encoder="none") == expected
        taken = [line for line in logged if "by its position" in line]
        assert len(taken) == 2 - ("query" in names)
        assert "Warning: unused columns: label, page." in logged


def test_batches_to_learn_nothing_from_are_warned_of(vectors: Any, logged: list[str]) -> None:
    pairs = {"query": NAMED["anchor"], "document": NAMED["positive"]}
    build_batches(pairs, **vectors, batch_size=SIZE)
    assert not [line for line in logged if line.startswith("Warning")]
    ones = np.ones((COUNT, 4))
    build_batches(pairs, query_vectors=ones, document_vectors=ones, batch_size=SIZE)
    assert any("of query_vectors all are alike" in line for line in logged)
    assert any(
        re.match(r"Warning: \d+% of the negatives are masked, most by 'surrogate score'", line) for line in logged
    )
    logged.clear()
    some = vectors["document_vectors"].copy()
    some[[3, 5]] = 0
    build_batches(pairs, query_vectors=vectors["query_vectors"], document_vectors=some, batch_size=SIZE)
    assert [line for line in logged if line.startswith("Warning")] == [
        "Warning: of document_vectors 2 are zero, so their clusters and masks are meaningless. Embed the texts with a"
        " trained encoder."
    ]
    logged.clear()
    build_batches(pairs | {"document": ["the same"] * COUNT}, **vectors, batch_size=SIZE)
    (warned,) = (line for line in logged if "100% of the negatives are masked, most by 'same document'" in line)
    assert "pairs.documents_per_query and pairs.queries_per_document leave fewer pairs" in warned
    assert "margin" not in warned


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_a_sentence_transformer_gives_the_vectors(tmp_path: Path, similarity: Any) -> None:
    """By its similarity: cosines are inner products of vectors of length 1."""
    model = save_sentence_transformer(save_tiny_model("bert", tmp_path / "bert"), tmp_path / "model")
    encoder = SentenceTransformer(str(model), device="cpu", similarity_fn_name=similarity)
    texts = [f"number {row} of {row * row % 101}" for row in range(48)]
    columns = {"query": texts, "document": [f"{text}." for text in texts]}
    found = (encoder.encode(columns[side], normalize_embeddings=similarity == "cosine") for side in columns)
    vectors = dict(zip(("query_vectors", "document_vectors"), found, strict=True))
    made, expected = (build_batches(columns, batch_size=SIZE, **how) for how in ({"encoder": encoder}, vectors))
    assert rows_of(made) == rows_of(expected)
    assert made.hardness.tolist() == expected.hardness.tolist()


class Ignorant:
    """An encoder that knows nothing of the texts."""

    def encode_query(self, texts: list[str], **_: Any) -> NDArray[np.float32]:
        return np.random.default_rng(len(texts[0])).normal(size=(len(texts), 8)).astype(np.float32)

    encode_document = encode_query


def test_an_encoder_that_is_yet_to_be_trained_may_know_nothing() -> None:
    columns = {"query": [f"is {row} prime?" for row in range(64)], "document": ["yes", "no"] * 32}
    assert len(build_batches(columns, encoder=Ignorant(), batch_size=8)) == 8


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


TWO = {"query": ["a", "b"], "document": ["c", "d"]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"data": {"page": ["a"], "document": ["b"], "text": ["c"]}}, "No column is named 'query'. .*: 'page', 'document'"),
    ({"data": {"document": ["b"], "year": [1]}}, "No column is named 'query'. Columns there: 'document', 'year'"),
    ({"data": {"query": ["a"], "anchor": ["a"], "document": ["b"]}}, "'query' and 'anchor' would all be 'query'"),
    ({"data": 7}, r"data is a int and can't be read .*Give a table with a column of queries"),
    ({"data": "pairs.csv"}, r"data is 'pairs.csv'.* datasets.load_dataset reads files as such a table"),
    ({"data": ["a", "b"]}, r"data is \['a', 'b'\]\. Give a table"),
    ({"data": []}, r"data is \[\]\. Give a table"),
    ({"data": {"query": "a", "document": "b"}}, "query is 'a'. It must be a list"),
    ({"data": DatasetDict({"train": Dataset.from_dict(TWO)})}, "data holds the tables train. Give one: data"),
    ({"data": TWO | {"query": ["a", None]}}, r"Row 1 \(from 0\) of 'query' is None. Give .*, or .*drop_empty=True"),
    ({"data": [("a", "b"), (" ", "c")]}, r"Row 1 \(from 0\) of 'query' is ' '"),
    ({"data": [{"anchor": "a", "positive": "b"}, {"anchor": "c"}]}, r"Row 1 \(from 0\) of 'positive' is None"),
    ({"data": TWO | {"document": [["c"], []]}}, r"Row 1 \(from 0\) of 'document' is None"),
    ({"data": TWO | {"document": ["c", 3]}}, r"Row 1 \(from 0\) of 'document' is 3. It must be a string"),
    ({"data": TWO | {"negative": ["e", b"f"]}}, r"Row 1 \(from 0\) of 'negative' is b'f'. It must be a string"),
    ({"data": TWO | {"document_id": ["x", "x"]}}, r"Row 1 \(from 0\) of 'document': id 'x' already belongs to another"),
    (
        {"data": TWO | {"document": ["c"] * 2, "document_id": ["x"] * 2, "domain": ["e", "f"]}},
        r"Row 1 \(from 0\) of 'document': id 'x' already belongs to .* the same of another domain",
    ),
    ({"data": TWO | {"document": ["c", "d\ud800"]}}, r"Row 1 \(from 0\) of 'document' is not valid Unicode"),
    ({"data": TWO | {"label": [1, 0]}}, r"Row 1 \(from 0\) of 'label' is 0, but every row is taken"),
    ({"data": TWO | {"score": [0.5, 1]}}, r"Row 0 \(from 0\) of 'score' is 0.5, but every row is taken"),
    ({"queries": ["a"], "documents": ["b", "c"]}, "'queries' has 1 values and 'documents' has 2"),
    ({"queries": "abc", "documents": ["b", "c"]}, "queries is 'abc'. It must be a list"),
    ({"queries": {"q": "a"}, "documents": ["b"]}, "queries is {'q': 'a'}. It must be a list"),
    ({"queries": [], "documents": []}, "batch_size is 64. Give a number above 1, .* which is 0"),
    ({"data": TWO, "batch_size": 1}, "batch_size is 1. Give a number above 1, .* different pairs, which is 2"),
    ({"data": [("a", "b")] * 2, "batch_size": 2}, "batch_size is 2. .* different pairs, which is 1"),
    ({"data": TWO, "batch_size": "2"}, "batch_size is '2'. .* which is 2"),
    ({"data": TWO, "settings": ["a"]}, "settings is a list. It must be a mapping"),
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
        (bad, r"query_vectors\[5\] holds a NaN"),
        (queries * np.where(np.arange(COUNT) == 7, 1e6, 1)[:, None], r"query_vectors\[7\] .* beyond half precision"),
        (queries[1:], r"query_vectors are float32 of shape \(95, 16\), but 96 queries are given"),
        (queries[:, 1:], r"differ in dimension: {'documents': \(48, 16\), 'queries': \(96, 15\)}"),
        (queries[0], r"query_vectors are float32 of shape \(16,\)"),
        (queries.astype(str), r"query_vectors are <U\d+ of shape \(96, 16\)"),
        ("vectors.npy", r"query_vectors are <U11 of shape \(\)"),
        ([[1.0], [1.0, 2.0]], "query_vectors must be an array .*inhomogeneous"),
        (shuffled, "in another order than the texts"),
    ):
        with pytest.raises(UserError, match=message):
            build_batches(columns, query_vectors=wrong, document_vectors=documents)
    unchecked = {"vectors.check_order": False}
    made = build_batches(columns, query_vectors=shuffled, document_vectors=documents, batch_size=8, settings=unchecked)
    assert len(made) == COUNT // 8
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
    page = (Path(__file__).parents[3] / "docs/guide/batches_in_my_script.md").read_text(encoding="utf-8")
    [(program, printed)] = re.findall(r"```python\n([^`]*build_batches\([^`]*)```\n\nprints `(.*)`", page)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert capsys.readouterr().out == f"{printed}\n"
    assert BatchReader("runs/mine/batches").number_of_batches(1) == 4
