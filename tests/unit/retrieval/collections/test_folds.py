"""Which queries of cross-validation are judged in another split too: by sets, whatever the order."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from retrieval.collections.collection import JUDGMENTS
from retrieval.collections.unfit_records import row_of_both


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["all", "train", "test"]))))
def test_the_first_row_of_a_query_of_both_is_found(judged: list[tuple[str, str]]) -> None:
    of_split = {query for query, split in judged if split == "all"}
    both = of_split & {query for query, split in judged if split != "all"}
    rows = [{"query_id": query, "document_id": "d", "relevance": 1, "split": split} for query, split in judged]
    expected = next((row for row, (query, _) in enumerate(judged) if query in both), None)
    assert row_of_both(pa.Table.from_pylist(rows, JUDGMENTS), "all") == expected
