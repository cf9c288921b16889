"""Stretches of items that shards of an earlier phase wrote, read whole and by shares."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.jobs.lookups import add_stretches, read_stretch
from raytriever.artifacts.artifact import ShardWriter
from raytriever.artifacts.storage import Folder
from raytriever.stages.stage import Shard


def stretches(folder: Path, sizes: list[list[int]]) -> list[str]:
    """A shard for each list of sizes, with a stretch of each; items are numbered through, their negatives below."""
    names, first = [f"part-{number}" for number in range(len(sizes))], 0
    for name, own in zip(names, sizes, strict=True):
        items = np.arange(first, first + sum(own))
        scratch = folder / "scratch" / name
        writer = ShardWriter(Folder(str(folder / "out")), name, scratch)
        add_stretches(writer, Shard(name), [items, -items], np.cumsum([0, *own]))
        writer.commit(0)
        first += sum(own)
    return names


@pytest.mark.parametrize("of", [1, 3, 7])
def test_shares_are_disjoint_and_complete(tmp_path: Path, of: int) -> None:
    names = stretches(tmp_path, [[5, 0, 11], [0, 3, 20], [1, 0, 0], [64, 2, 9]])
    for number, total in enumerate((70, 5, 40)):
        whole = read_stretch(str(tmp_path / "out"), names, number)
        assert whole.shape == (2, total)
        assert (whole[1] == -whole[0]).all()
        shares = [read_stretch(str(tmp_path / "out"), names, number, share, of) for share in range(of)]
        assert sorted(np.concatenate(shares, axis=1)[0].tolist()) == sorted(whole[0].tolist())


@pytest.mark.parametrize(("shards", "items", "of"), [(10, 64, 10), (7, 128, 7), (12, 64, 4), (5, 1, 5)])
def test_shares_of_shards_with_as_many_items_are_equal(tmp_path: Path, shards: int, items: int, of: int) -> None:
    """Else each would be short of a whole batch by about half of one."""
    names = stretches(tmp_path, [[items]] * shards)
    shares = [read_stretch(str(tmp_path / "out"), names, 0, share, of).shape[1] for share in range(of)]
    assert shares == [shards * items // of] * of
