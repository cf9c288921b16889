"""Which queries of cross-validation are judged in another split too: by sets, whatever the order and the chunks."""

from hypothesis import given
from hypothesis import strategies as st

from raytriever.errors import UserError
from retrieval.collections.checked_source import JudgedQueries
from retrieval.collections.records import CrossValidation, JudgmentRecord, Place

FOLDS = CrossValidation(fold=0, split="all")


def records(judged: list[tuple[str, str]]) -> list[JudgmentRecord]:
    return [JudgmentRecord(Place("/qrels", line), query, "d", 1, split) for line, (query, split) in enumerate(judged)]


def refusal(judged: list[JudgmentRecord], at_once: int) -> str:
    queries = JudgedQueries(FOLDS)
    try:
        for start in range(0, len(judged), at_once):
            queries.add(judged[start : start + at_once])
    except UserError as error:
        return str(error)
    return ""


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["all", "train", "test"]))), st.integers(1, 9))
def test_a_query_of_both_is_refused_with_its_place(judged: list[tuple[str, str]], at_once: int) -> None:
    of_split = {query for query, split in judged if split == "all"}
    both = of_split & {query for query, split in judged if split != "all"}
    message = refusal(records(judged), at_once)
    assert bool(message) == bool(both)
    named = [
        f"/qrels, line {line} judges query {query!r} in split '{split}', and it is judged in "
        for line, (query, split) in enumerate(judged)
        if query in both
    ]
    assert sum(message.startswith(start) for start in named) == bool(both)
    assert not message or "Read split 'all' alone (splits: [all]" in message
