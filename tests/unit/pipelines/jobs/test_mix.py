"""Mixed batches are the sources' own, by ratio or all of them, nothing twice, everything in its turn."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.batches import BatchReader, Layout
from pipelines.jobs.mix import Mix, MixConfig, mixed_order, shares
from raytriever.errors import UserError
from tests.unit.batch_tables import batch_table
from tests.unit.pipelines.jobs.batch_inputs import contents, store_batches
from tests.unit.pipelines.jobs.made_up import made_by


def batch(name: str, layout: Layout, epoch: int, index: int, size: int) -> pa.Table:
    rows = []
    for row in range(size):
        place = f"{name}-{epoch}-{index}-{row}"
        hard = {"hard_negative_ids": ["n"] * (row % 2), "hard_negatives": ["t"] * (row % 2), "masked": [1] * (row == 0)}
        pair = {
            "query_id": place, "query": f"query {place}", "document_id": f"d{row}", "domain": name, "cluster": index,
        }  # fmt: skip
        rows.append(pair | hard if layout == "pairs" else {"document_id": place, "source_id": "s", "number": row})
    return batch_table(layout, rows)


def source(folder: Path, name: str, epochs: list[list[int]], layout: Layout = "pairs", size: int = 2) -> str:
    """So many batches of each shard of each epoch."""
    stored = []
    for epoch, shards in enumerate(epochs):
        batches = iter([batch(name, layout, epoch, index, size) for index in range(sum(shards))])
        stored.append([list(islice(batches, number)) for number in shards])
    inputs = {"collection": "c", "vectors": name, "packing": "k"}
    facts = {"negatives_per_example": 1, "made": name}
    return store_batches(folder / name, layout, stored, inputs=inputs, facts=facts)


def mix(folder: Path, sources: dict[str, str], **settings: Any) -> BatchReader:
    return BatchReader(made_by(Mix, {"sources": sources, "output": str(folder), "batches_per_shard": 3, **settings}))


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
    assert len(reader.artifact.names("epoch=00000/")) == 5
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


def test_bytes_are_a_function_of_sources_and_seed_and_chunks_are_mixed_too(sources, tmp_path) -> None:
    first = contents(mix(tmp_path / "a", sources).uri)
    swapped = dict(reversed(list(sources.items())))
    assert contents(mix(tmp_path / "b", swapped).uri) == first
    assert {name.split("/")[0] for name in first} == {"manifest.json", "epoch=00000", "epoch=00001"}
    made = {name: source(tmp_path, name, [[2]], "chunks") for name in ("wiki", "posts")}
    reader = mix(tmp_path / "m", made)
    names = [reader.read(0, index)["document_id"][0].as_py() for index in range(4)]
    assert sorted(names) == ["posts-0-0-0", "posts-0-1-0", "wiki-0-0-0", "wiki-0-1-0"]
    assert reader.layout == "chunks"
    assert "negatives" not in reader.artifact.manifest["counts"]


def test_what_does_not_fit_is_refused(sources: dict[str, str], tmp_path: Path) -> None:
    chunks, large = source(tmp_path, "chunks", [[1]], "chunks"), source(tmp_path, "large", [[1]], size=3)
    for more, ratios, message in (
        ({"b": chunks}, None, r"of layout chunks, .*code of layout pairs"),
        ({"large": large}, None, r"has batches of size 2, .*large of size 3"),
        ({}, {"wbe": 1}, "ratios are given for wbe, but sources are code, web: give one for each"),
        ({}, {"web": 0, "code": 1}, r"'ratios\.web': Input should be greater than 0"),
        ({}, {"web": 100, "code": 1}, "'code' would give no batch in an epoch"),
    ):
        with pytest.raises(UserError, match=message):
            mix(tmp_path / "m", sources | more, ratios=ratios)


def test_shares_and_an_order_that_mixes_without_repeats_and_rotates() -> None:
    counts = {"web": 100, "code": 30, "news": 9}
    assert shares(counts, None) == counts
    assert shares(counts, {"web": 1, "code": 1, "news": 1}) == {"web": 9, "code": 9, "news": 9}
    assert shares(counts, {"web": 0.7, "code": 0.2, "news": 0.1}) == {"web": 63, "code": 18, "news": 9}
    assert shares(counts, {"web": 5, "code": 3, "news": 0.45}) == {"web": 50, "code": 30, "news": 4}
    message = r"'news' would give no batch.*100 of web \(ratio 5\).*9 of news \(ratio 0\.01\)"
    with pytest.raises(UserError, match=message):
        shares(counts, {"web": 5, "code": 3, "news": 0.01})
    counts, used, stored = np.array([7, 5]), np.array([3, 5]), np.array([1, 1])
    seen: Counter[tuple[int, int]] = Counter()
    orders = []
    for epoch in range(7):
        order = mixed_order(counts, used, stored, seed=2, epoch=epoch)
        assert order.shape == (8, 2)
        batches = list(map(tuple, order.tolist()))
        assert len(set(batches)) == 8
        assert Counter(source for source, _ in batches) == {0: 3, 1: 5}
        seen.update(batches)
        orders.append(order.tobytes())
    assert {count for (source, _), count in seen.items() if source == 0} == {3}
    assert len(set(orders)) == 7
    np.testing.assert_array_equal(mixed_order(counts, used, stored, 2, 6).tobytes(), orders[-1])
    other = mixed_order(counts, used, stored, 3, 6)  # of a seed: which batches, and where
    assert set(map(tuple, other.tolist())) != set(batches)
    assert other[:, 0].tolist() != order[:, 0].tolist()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_every_batch_of_every_stored_epoch_has_its_turn(count: int, used: int, stored: int) -> None:
    used, epochs = min(used, count), stored * count
    seen = Counter[tuple[int, int]]()
    for epoch in range(epochs):
        order = mixed_order(np.array([count]), np.array([used]), np.array([stored]), 0, epoch)
        seen.update((epoch % stored, number) for number in order[:, 1].tolist())
    assert set(seen.values()) == {used}
    assert len(seen) == stored * count


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.01, 100)), min_size=1, max_size=5))
def test_ratios_are_kept_and_one_source_is_used_up(sources: list[tuple[int, float]]) -> None:
    counts = {f"{place}": count for place, (count, _) in enumerate(sources)}
    ratios = {f"{place}": ratio for place, (_, ratio) in enumerate(sources)}
    try:
        found = shares(counts, ratios)
    except UserError:
        unit = min(count / ratio for count, ratio in sources)
        assert min(unit * ratio for _, ratio in sources) < 1
        return
    assert any(found[name] == counts[name] for name in counts)
    unit = min(count / ratio for count, ratio in sources)
    for name in counts:
        assert 0 < found[name] <= counts[name]
        assert unit * ratios[name] - 1 < found[name] <= unit * ratios[name] * (1 + 1e-9)
