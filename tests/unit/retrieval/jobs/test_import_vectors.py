"""Vectors of one's own as an artifact: the same from every form of file, taken by later stages, bad ones refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from pipelines.jobs.cluster import Cluster, ClusterConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.collections.collection import StoredCollection
from retrieval.jobs import import_vectors
from retrieval.jobs.import_vectors import ImportVectors, ImportVectorsConfig
from retrieval.jobs.index import Index, IndexConfig, VectorIndexSettings
from retrieval.jobs.rerank import Rerank, RerankConfig
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking
from retrieval.vectors import StoredVectors
from tests.unit.small_run import PAIRS, make, make_collection, make_vectors

Sides = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def embedded(collection: str, tmp_path_factory: pytest.TempPathFactory) -> StoredVectors:
    return StoredVectors(make_vectors(tmp_path_factory.mktemp("embedded"), collection))


@pytest.fixture
def sides(embedded: StoredVectors) -> Sides:
    return {part: embedded.part(part).range(0, PAIRS + 6) for part in ("queries", "documents")}


def imported(collection: str, folder: Path, output: str = "vectors", **files: Any) -> str:
    """Arrays and tables are written below the folder."""
    given = {}
    for part, content in files.items():
        given[part] = str(folder / f"{part}.{'parquet' if isinstance(content, pa.Table) else 'npy'}")
        if isinstance(content, pa.Table):
            pq.write_table(content, given[part], row_group_size=20)
        else:
            np.save(given[part], content)
    values = {"collection": collection, "model": "theirs", "output": str(folder / output), **given}
    return make(ImportVectors(validate(ImportVectorsConfig, values, "Settings of import-vectors")))


def table(collection: str, part: Any, vectors: NDArray[Any], order: NDArray[np.int64], kind: Any = None) -> pa.Table:
    ids = StoredCollection(collection).rows_of(part).read(["id"])["id"].take(order)
    return pa.table({"id": ids, "vector": pa.array(list(vectors[order]), kind or pa.list_(pa.float32()))})


def test_files_in_any_order_give_the_bytes_that_embedding_gives(collection, embedded, sides, tmp_path, monkeypatch):
    monkeypatch.setattr(import_vectors, "_ROWS_AT_ONCE", 7)
    order = np.random.default_rng(1).permutation(PAIRS + 6)
    fixed = pa.list_(pa.float64(), 8)
    forms: list[dict[str, Any]] = [
        {part: vectors.astype(np.float64) for part, vectors in sides.items()},
        {"queries": table(collection, "queries", sides["queries"], order), "documents": sides["documents"]},
        {part: table(collection, part, vectors, order, fixed) for part, vectors in sides.items()},
    ]
    for number, form in enumerate(forms):
        found = StoredVectors(imported(collection, tmp_path, f"vectors-{number}", **form))
        assert found.rows == 2 * (PAIRS + 6)
        assert {found.manifest["counts"][part] for part in sides} == {PAIRS + 6}
        assert (found.contract.model, found.contract.dimension, found.with_title) == ("theirs", 8, True)
        for part in ("queries", "documents"):
            own, theirs = (Path(each.uri) / part for each in (found, embedded))
            assert (own / "00000.npy").read_bytes() == (theirs / "00000.npy").read_bytes()
            assert pq.read_table(own / "00000.ids.parquet").equals(pq.read_table(theirs / "00000.ids.parquet"))


def test_vectors_are_scaled_where_that_is_asked_for(collection: str, sides: Sides, tmp_path: Path) -> None:
    lengths = np.random.default_rng(2).uniform(0.5, 3, (PAIRS + 6, 1))
    given = sides["documents"].astype(np.float32) * lengths
    np.save(tmp_path / "given.npy", given)
    values = {"collection": collection, "model": "theirs", "documents": str(tmp_path / "given.npy"), "normalize": True}
    config = ImportVectorsConfig.model_validate(values | {"output": str(tmp_path / "scaled")})
    found = StoredVectors(make(ImportVectors(config)))
    assert found.contract.normalize
    stored = found.part("documents").range(0, PAIRS + 6).astype(np.float32)
    np.testing.assert_allclose(stored, given / np.linalg.norm(given, axis=1, keepdims=True), atol=1e-3)


def test_a_users_own_file_is_opened_for_reading_alone(collection: str, sides: Sides, tmp_path: Path) -> None:
    np.save(tmp_path / "q.npy", sides["queries"])
    ((rows, vectors),) = import_vectors._blocks(str(tmp_path / "q.npy"), StoredCollection(collection), "queries")
    assert len(rows) == len(vectors)
    assert not vectors.flags.writeable


def test_one_side_is_enough_for_later_stages_too(collection: str, sides: Sides, tmp_path: Path) -> None:
    vectors = imported(collection, tmp_path, **sides)
    pairs = make(Pairs(PairsConfig(collection=collection, output=str(tmp_path / "pairs"))))
    config = {"pairs": pairs, "vectors": vectors, "cluster_size": 5, "smallest_domain": 4}
    make(Cluster(ClusterConfig(**config, output=str(tmp_path / "clusters"))))  # type: ignore[arg-type]
    index = make(Index(IndexConfig(index=VectorIndexSettings(vectors=vectors), output=str(tmp_path / "index"))))
    values = {"index": index, "collection": collection, "split": "test", "vectors": vectors, "top_k": 3}
    ranking = StoredRanking(make(Search(validate(SearchConfig, values | {"output": str(tmp_path / "run")}, "search"))))
    scores = sides["queries"][PAIRS:] @ sides["documents"].T
    assert ranking.ranking().rows[:, 0].tolist() == scores.argmax(axis=1).tolist()
    found = StoredVectors(imported(collection, tmp_path, "one", documents=sides["documents"]))
    np.testing.assert_array_equal(found.part("documents").range(0, 54), sides["documents"])
    with pytest.raises(UserError, match="no vectors of queries"):
        found.part("queries")
    for part, other in (("queries", "documents"), ("documents", "queries")):
        alone = imported(collection, tmp_path, f"{part}-alone", **{part: sides[part]})
        config = RerankConfig(run=ranking.uri, vectors=alone, collection=collection, output=str(tmp_path / "reranked"))
        with pytest.raises(UserError, match=f"no vectors of {other}"):
            Rerank(config).plan()
    with pytest.raises(UserError, match="documents and queries are both missing; give the vectors of at least one"):
        imported(collection, tmp_path)


def wrong(sides: Sides, collection: str) -> list[tuple[Any, str]]:
    queries, order = sides["queries"], np.arange(PAIRS + 6)
    broken = queries.copy()
    broken[5, 3] = np.inf
    ragged = [row[: 8 - (place == 9)].tolist() for place, row in enumerate(queries)]
    whole = table(collection, "queries", queries, order)
    strangers = whole.set_column(0, "id", pa.array([f"x{row}" for row in order]))
    needed = "parquet with columns id and vector"
    return [
        (queries[1:], r"vectors of the 54 queries of .*: it is float32 of shape \(53, 8\)\. Give"),
        (queries[0], r"it is float32 of shape \(8,\)"),
        (queries.astype(str), "it is <U"),
        (np.zeros((54, 0), np.float32), "queries.npy can't be used as vectors"),
        (np.array([{}]), "Array can't be memory-mapped|can't be used"),
        (broken, "queries.npy: the vector of 'q5', row 5 of the queries, holds a NaN, an infinity or a number beyond"),
        (queries * 1e6, "beyond half precision"),
        (queries[:, 1:], r"differ in dimension: {'documents': \(54, 8\), 'queries': \(54, 7\)}"),
        (np.random.default_rng(1).permutation(queries) * 60_000, "in another order than the texts"),
        (whole.slice(1), r"of its 53 vectors 0 are of 'q0'\. Give"),
        (pa.concat_tables([whole, whole.slice(7, 1)]), "of its 55 vectors 2 are of 'q7'"),
        (strangers, "54 of 54 queries are not in .*, such as 'x0'"),
        (whole.select(["id"]), needed),
        (whole.rename_columns(["_id", "vector"]), needed),
        (whole.set_column(1, "vector", pa.array(ragged)), needed),
        (table(collection, "queries", broken, order[::-1]), "the vector of 'q5', row 5 of the queries"),
    ]


def test_bad_files_are_refused_in_a_sentence(collection: str, sides: Sides, tmp_path: Path) -> None:
    for content, message in wrong(sides, collection):
        with pytest.raises(UserError, match=message):
            imported(collection, tmp_path, queries=content, documents=sides["documents"])
        assert not list((tmp_path / "vectors").rglob("*.npy"))
    values = {"collection": collection, "model": "theirs", "output": str(tmp_path / "x")}
    of_documents = {"documents": str(tmp_path / "documents.npy"), "queries": str(tmp_path / "not_yet.npy")}
    ImportVectors(ImportVectorsConfig(**values, **of_documents)).check_inputs({"documents"})
    (tmp_path / "vectors.txt").touch()
    for path in ("nothing.npy", "vectors.txt"):
        stage = ImportVectors(ImportVectorsConfig(**values, documents=str(tmp_path / path)))
        with pytest.raises(UserError, match=rf"no \.npy or \.parquet file .*{path}"):
            stage.check_inputs({"documents"})
        with pytest.raises(UserError, match=rf"no \.npy or \.parquet file .*{path}"):
            stage.input_fingerprints()
