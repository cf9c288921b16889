"""Stored vectors: one numbering of all shards, whose files are mapped when a row is asked for."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raytriever.errors import UserError
from retrieval.vectors import StoredVectors, VectorRows
from tests.unit.retrieval.made_up import CONTRACT, stored_vectors
from tests.unit.small_run import make_artifact

SIZES = (4, 1, 3)
VALUES = np.random.default_rng(0).normal(size=(sum(SIZES), 3)).astype(np.float16)


def make(folder: Path) -> StoredVectors:
    ids = [f"d{row}" for row in range(len(VALUES))]
    return StoredVectors(stored_vectors(folder, None, {"documents": (VALUES, ids)}, files=SIZES))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> VectorRows:
    return make(tmp_path_factory.mktemp("vectors") / "id=3").part("documents")


def test_shards_are_one_numbering(rows: VectorRows) -> None:
    assert (len(rows), rows.dimension, rows.vectors_per_text) == (8, 3, 1)
    assert rows.ids().to_pylist() == [f"d{row}" for row in range(8)]
    for start in range(9):
        for stop in range(start, 9):
            assert rows.ids(start, stop).to_pylist() == [f"d{row}" for row in range(start, stop)]


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_blocks_cover_every_row_once_and_shards_are_mapped_not_read(rows: VectorRows, size: int) -> None:
    blocks = list(rows.blocks(size))
    assert [start for start, _ in blocks] == list(range(0, 8, size))
    assert max(len(block) for _, block in blocks) <= size
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), VALUES.astype(np.float32))
    assert all(isinstance(rows._file(number).base, np.memmap) for number in range(len(SIZES)))


@pytest.mark.parametrize("wrong", [[-1], [8], [3, 13]])
def test_rows_that_are_not_there_are_no_vectors(rows: VectorRows, wrong: list[int]) -> None:
    with pytest.raises(IndexError, match="of 8"):
        rows.gather(np.array(wrong))


def test_a_text_may_have_several_vectors(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float16).reshape(4, 2, 3)
    rows = StoredVectors(stored_vectors(tmp_path / "v", None, {"documents": (values, list("abcd"))})).part("documents")
    assert (len(rows), rows.dimension, rows.vectors_per_text) == (4, 3, 2)
    np.testing.assert_array_equal(rows.gather(np.array([3, 0])), values[[3, 0]].astype(np.float32))
    assert [(start, block.shape) for start, block in rows.blocks(2, 1, 4)] == [(1, (2, 2, 3)), (3, (1, 2, 3))]


def test_vectors_of_some_rows_alone(tmp_path: Path) -> None:
    files = {
        "documents/00000.npy": VALUES[:2],
        "documents/00000.ids.parquet": pa.table({"id": ["d3", "d9"], "row": [3, 9]}),
        "documents/00001.npy": VALUES[2:3],
        "documents/00001.ids.parquet": pa.table({"id": ["d40"], "row": [40]}),
    }
    facts = {"encoder": CONTRACT | {"dimension": 3}}
    rows = StoredVectors(make_artifact(tmp_path / "v", "vectors", {}, facts, files, 3)).part("documents")
    np.testing.assert_array_equal(rows.gather(np.array([40, 3, 40])), VALUES[[2, 0, 2]].astype(np.float32))
    with pytest.raises(UserError, match=r"holds no vector of row 4294967336 \(2 of 3 are missing\)"):
        rows.gather(np.array([9, (1 << 32) + 40, 0]))
    with pytest.raises(UserError, match="only vectors of a ranking's texts"):
        rows.require_all()


def test_a_part_that_was_not_embedded_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no vectors of queries\. Embed with parts including 'queries'"):
        make(tmp_path / "v").part("queries")


def test_files_are_opened_for_rows_that_are_asked_for_and_few_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.vectors._MOST_MAPS", 2)
    opened: list[str] = []
    load = np.load

    def noted(path: Path, mmap_mode: str) -> object:
        opened.append(Path(path).stem)
        return load(path, mmap_mode=mmap_mode)

    artifact = make(tmp_path / "v")
    monkeypatch.setattr(np, "load", noted)
    rows = artifact.part("documents")
    assert (len(rows), opened) == (8, ["00000"])
    for wanted in ([7, 5], [7, 7, 6], [4, 0], [7, 4], [1], []):
        found = rows.gather(np.array(wanted, dtype=np.int64))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, VALUES[np.array(wanted, dtype=np.int64)])
    assert opened == ["00000", "00002", "00001", "00002", "00000"]
