"""Source documents out of chunks, and draws that depend on seed and names alone."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipelines.queries.documents import Passage, draws, place_among_sources, source_documents


def rows(*values: tuple[str, str, int, str]) -> pa.Table:
    names = ("id", "source_id", "number", "text")
    columns = dict(zip(names, zip(*values, strict=True), strict=True))
    return pa.table({**columns, "title": [" T "] * len(values), "domain": ["d"] * len(values)})


def test_chunks_are_joined_across_tables_and_a_whole_document_is_one_passage() -> None:
    tables = [
        rows(("a#0", "a", 0, "One. "), ("a#1", "a", 1, "Two.")),
        rows(("a#2", "a", 2, " Three."), ("b#0", "b", 0, "Four.")),
    ]
    first, second = source_documents(tables)
    assert (first.id, first.title, first.text, first.domain) == ("a", "T", "One. Two. Three.", "d")
    assert first.passages == (Passage("a#0", 0, 5), Passage("a#1", 5, 9), Passage("a#2", 9, 16))
    assert [first.text_of(passage) for passage in first.passages] == ["One. ", "Two.", " Three."]
    assert second.passages == (Passage("b#0", 0, 5),)
    table = rows(("a", "", 0, "One."), ("b", "", 0, "Two.")).drop_columns(["source_id", "number"])
    assert [(source.id, source.passages) for source in source_documents([table])] == [
        ("a", (Passage("a", 0, 4),)),
        ("b", (Passage("b", 0, 4),)),
    ]


@given(st.integers(), st.lists(st.text(), min_size=1))
def test_draws_depend_on_seed_and_names(seed: int, names: list[str]) -> None:
    expected = draws(seed, *names).random()
    assert draws(seed, *names).random() == expected
    assert draws(seed + 1, *names).random() != expected
    assert draws(seed, *names, "").random() != expected
    assert draws(seed, "".join(names) + "x").random() != expected


def test_the_held_out_are_a_share_the_same_in_a_larger_one_and_draws_these_very_numbers() -> None:
    random = draws(7, "crops", "wt2v-000")
    assert [round(random.random(), 12) for _ in range(3)] == [0.071223486865, 0.034407934113, 0.78480856447]
    ids = [f"document {number}" for number in range(4000)]
    small, large = ({id_ for id_ in ids if place_among_sources(id_, 3) < share} for share in (0.1, 0.3))
    assert small < large
    assert abs(len(small) / len(ids) - 0.1) < 4 * np.sqrt(0.09 / len(ids))
    assert {id_ for id_ in ids if place_among_sources(id_, 4) < 0.1} != small
    assert all(0 <= place_among_sources(id_, 3) < 1 for id_ in ids)
