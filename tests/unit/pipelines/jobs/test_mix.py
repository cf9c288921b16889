"""Mixed batches are the sources' own, by ratio or all of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.batches import LAYOUTS, BatchReader, BatchWriter, Layout
from pipelines.jobs.mix import Mix, MixConfig
from raytriever.artifacts.artifact import Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from tests.unit.batch_tables import batch_table
from tests.unit.pipelines.jobs.batch_inputs import contents
from tests.unit.small_run import make


def batch(name: str, layout: Layout, epoch: int, index: int, size: int) -> pa.Table:
    rows = []
    for row in range(size):
        place = f"{name}-{epoch}-{index}-{row}"
        values: dict[str, dict[str, Any]] = {
            "pairs": {
                "query_id": place, "query": f"query {place}", "document_id": f"d{row}", "document": "text",
                "hard_negative_ids": ["n"] * (row % 2), "hard_negatives": ["t"] * (row % 2), "masked": [1] * (row == 0),
                "domain": name, "cluster": index,
            },
            "chunks": {"document_id": place, "document": "t", "source_id": "s", "number": row, "domain": ""},
        }  # fmt: skip
        rows.append(values[layout])
    return batch_table(layout, rows)


def source(
    folder: Path, name: str, epochs: list[list[int]], layout: Layout = "pairs", size: int = 2, made_of: str = "c"
) -> str:
    """Batches of each shard of each epoch."""
    derivation = Derivation("batches", "made up", 1, {}, {"collection": made_of, "vectors": name, "packing": "k"})
    writer = ArtifactWriter(str(folder / name), derivation)
    writer.begin()
    records = []
    for epoch, shards in enumerate(epochs):
        first = 0
        for number, batches in enumerate(shards):
            with writer.folder.scratch() as scratch:
                shard = ShardWriter(writer.folder, f"{epoch}-{number}", scratch)
                with BatchWriter(shard, LAYOUTS[layout].schema(), epoch, number, size) as file:
                    for index in range(first, first + batches):
                        file.write(batch(name, layout, epoch, index, size))
                records.append(file.commit())
            first += batches
    return writer.finish(records, {"layout": layout, "negatives_per_example": 1, "made": name}, {}).uri


def mix(folder: Path, sources: dict[str, str], **settings: Any) -> BatchReader:
    values = {"sources": sources, "output": str(folder), "batches_per_shard": 3, **settings}
    return BatchReader(make(Mix(validate(MixConfig, values, "Settings of mix"))))


def places(reader: BatchReader, epoch: int) -> list[tuple[str, ...]]:
    """(source, epoch, batch) of every batch, each being a whole one of its source."""
    found = []
    for index in range(reader.number_of_batches(epoch)):
        table = reader.read(epoch, index)
        name, of_epoch, number, _ = table["query_id"][0].as_py().split("-")
        assert table.equals(batch(name, "pairs", int(of_epoch), int(number), 2))
        found.append((name, of_epoch, number))
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    return {"web": source(folder, "web", [[4, 4, 2], [10]]), "code": source(folder, "code", [[3], [2, 1], [3]])}


def test_all_batches_of_all_sources_in_one_order(sources: dict[str, str], tmp_path: Path) -> None:
    reader = mix(tmp_path / "m", sources)
    assert reader.epochs == 2
    orders = []
    for epoch in range(2):
        found = places(reader, epoch)
        counted = {(name, str(epoch), str(n)) for name, number in (("web", 10), ("code", 3)) for n in range(number)}
        assert len(found) == 13
        assert set(found) == counted
        orders.append([name for name, *_ in found])
        assert orders[-1] not in (sorted(orders[-1]), sorted(orders[-1], reverse=True))
    assert orders[0] != orders[1]
    manifest = reader.artifact.manifest
    # two rows with one hard negative: three columns but the positive in each row, one masked
    assert manifest["counts"] == {
        "batches": 26, "batches of web": 20, "batches of code": 6, "negatives": 26 * 4, "masked by any rule": 26,
    }  # fmt: skip
    assert manifest["facts"] == {"layout": "pairs", "negatives_per_example": 1, "origins": {"collection": "c"}}
    assert Mix(MixConfig(sources=sources, output="")).summary(reader.artifact) == "26 batches: 6 of code, 20 of web"


def test_ratios_use_up_the_scarcest_and_rotate(sources: dict[str, str], tmp_path: Path) -> None:
    reader = mix(tmp_path / "m", sources, ratios={"web": 2, "code": 1}, epochs=10)
    seen: Counter[tuple[str, ...]] = Counter()
    for epoch in range(10):
        found = places(reader, epoch)
        assert Counter(name for name, *_ in found) == {"web": 6, "code": 3}
        assert len(set(found)) == 9
        assert {of_epoch for name, of_epoch, _ in found if name == "web"} == {str(epoch % 2)}
        assert {of_epoch for name, of_epoch, _ in found if name == "code"} == {str(epoch % 3)}
        seen.update((name, number) for name, _, number in found)
    assert {count for (name, _), count in seen.items() if name == "web"} == {6}
    assert reader.artifact.manifest["dropped"] == {"batches of web beyond its ratio": 40}


def test_bytes_are_a_function_of_sources_and_seed(sources: dict[str, str], tmp_path: Path) -> None:
    first = contents(mix(tmp_path / "a", sources).uri)
    swapped = dict(reversed(list(sources.items())))
    assert contents(mix(tmp_path / "b", swapped).uri) == first
    assert contents(mix(tmp_path / "c", sources, seed=1).uri) != first
    assert {name.split("/")[0] for name in first} == {"manifest.json", "epoch=00000", "epoch=00001"}


def test_chunks_are_mixed_too(tmp_path: Path) -> None:
    made = {name: source(tmp_path, name, [[2]], "chunks") for name in ("wiki", "posts")}
    reader = mix(tmp_path / "m", made)
    names = [reader.read(0, index)["document_id"][0].as_py() for index in range(4)]
    assert sorted(names) == ["posts-0-0-0", "posts-0-1-0", "wiki-0-0-0", "wiki-0-1-0"]
    assert reader.layout == "chunks"
    assert "negatives" not in reader.artifact.manifest["counts"]


def test_what_does_not_fit_is_refused(sources: dict[str, str], tmp_path: Path) -> None:
    chunks = source(tmp_path, "chunks", [[1]], "chunks")
    with pytest.raises(UserError, match=r"of layout chunks, .*code of layout pairs"):
        mix(tmp_path / "a", {**sources, "b": chunks})
    large = source(tmp_path, "large", [[1]], size=3)
    with pytest.raises(UserError, match=r"has batches of size 2, .*large of size 3"):
        mix(tmp_path / "b", {**sources, "large": large})
    with pytest.raises(UserError, match="ratios are given for wbe, sources are code, web"):
        mix(tmp_path / "c", sources, ratios={"wbe": 1})
    with pytest.raises(UserError, match=r"'ratios\.web': Input should be greater than 0"):
        mix(tmp_path / "d", sources, ratios={"web": 0, "code": 1})
    with pytest.raises(UserError, match="'code' would give no batch in an epoch"):
        mix(tmp_path / "e", sources, ratios={"web": 100, "code": 1})
