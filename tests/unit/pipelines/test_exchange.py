from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.exchange import number_parts, read_parts, string_parts, write_parts
from raytriever.artifacts.artifact import ShardWriter
from raytriever.artifacts.storage import Folder

STRINGS = st.lists(st.text(max_size=80))


def test_a_part_is_what_every_file_has_of_it_in_order(tmp_path: Path) -> None:
    generator, folder, written = np.random.default_rng(0), Folder(str(tmp_path)), []
    for number in range(3):
        table = pa.table({"id": [f"{number} {row}" for row in range(50)], "part": generator.integers(0, 5, 50)})
        with folder.scratch() as scratch:
            name = f"exchange/{number}.arrow"
            write_parts(ShardWriter(folder, str(number), scratch), name, table, table["part"].to_numpy(), 7)
        written += table.to_pylist()
    names = [f"exchange/{number}.arrow" for number in range(3)]
    for part in range(7):
        assert read_parts(str(tmp_path), names, [part]).to_pylist() == [row for row in written if row["part"] == part]
    assert read_parts(str(tmp_path), names[:1], [3, 4]).to_pylist() == sorted(
        (row for row in written[:50] if row["part"] in (3, 4)), key=lambda row: int(row["part"])
    )


@settings(max_examples=50)
@given(STRINGS, STRINGS, st.integers(1, 9))
def test_the_part_of_a_string_depends_on_the_string_alone(one: list[str], other: list[str], parts: int) -> None:
    together = pa.chunked_array([pa.array(one, pa.string()), pa.array(["x", *other], pa.string()).slice(1)])
    found = string_parts(together, parts)
    assert len(found) == len(one) + len(other)
    assert ((found >= 0) & (found < parts)).all()
    for string, part in zip([*one, *other], found, strict=True):
        assert string_parts(pa.chunked_array([pa.array([string], pa.string())]), parts).tolist() == [part]


def test_parts_are_of_about_one_size() -> None:
    ids = pa.chunked_array([pa.array([f"doc-{number}" for number in range(20_000)])])
    for found in (string_parts(ids, 10), number_parts(np.arange(20_000, dtype=np.uint64), 10)):
        assert np.bincount(found, minlength=10).min() > 1_700
