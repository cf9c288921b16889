"""Collections made up by hypothesis, and stored."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from pipelines.formats.columns import PairTables
from pipelines.formats.training_examples import TrainingExamples
from retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES, StoredCollection, passage_text
from tests.unit.small_run import make_artifact

Rows = list[dict[str, Any]]

FLAG_EMBEDDING = PairTables(splits={"train": ("train.jsonl",)}, document="pos", negatives=("neg",))  # its lines

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_IDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=4)
_DOCUMENTS = st.fixed_dictionaries({"id": _IDS, "title": _TEXT, "text": _TEXT, "domain": st.just("")}).filter(
    lambda row: passage_text(row["title"], row["text"])
)
_QUERIES = st.fixed_dictionaries(
    {"id": _IDS, "text": _TEXT.filter(str.strip), "domain": st.just(""), "answers": st.lists(_TEXT, max_size=2)}
)


@st.composite
def collections(draw: st.DrawFn) -> tuple[Rows, Rows, Rows]:
    """Documents, queries with distinct texts, and judgments, at least one of them a positive of split "train"."""
    documents = draw(st.lists(_DOCUMENTS, min_size=1, max_size=8, unique_by=lambda row: row["id"]))
    queries = draw(
        st.lists(_QUERIES, min_size=1, max_size=5, unique_by=(lambda row: row["id"], lambda row: row["text"]))
    )
    judgment = st.fixed_dictionaries(
        {
            "query_id": st.sampled_from([row["id"] for row in queries]),
            "document_id": st.sampled_from([row["id"] for row in documents]),
            "relevance": st.integers(-2, 3),
            "split": st.sampled_from(["train", "test"]),
        }
    )
    judgments = draw(
        st.lists(judgment, min_size=1, max_size=20, unique_by=lambda row: (row["query_id"], row["document_id"]))
    )
    judgments[-1] |= {"relevance": 2, "split": "train"}
    return documents, queries, judgments


def stored(folder: Path, documents: Rows, queries: Rows, judgments: Rows) -> StoredCollection:
    """Stores rows as a collection, documents and queries in two files each."""
    files = {"judgments/00000.parquet": pa.Table.from_pylist(judgments, JUDGMENTS)}
    for part, rows, schema in (("documents", documents, DOCUMENTS), ("queries", queries, QUERIES)):
        half = len(rows) // 2
        for number, some in enumerate((rows[:half], rows[half:])):
            files[f"{part}/{number:05d}.parquet"] = pa.Table.from_pylist(some, schema)
    return StoredCollection(make_artifact(folder, "collection", {}, {}, dict(sorted(files.items())), len(documents)))


def made_examples(
    collection: StoredCollection, folder: Path, hard_negatives: dict[str, list[str]] | None = None, split: str = "train"
) -> TrainingExamples:
    """The examples of a split, with these hard negatives, by query, in place of those judged."""
    mined = None
    if hard_negatives is not None:
        queries = collection.find("queries", pa.array(hard_negatives, pa.string()))
        rows = [collection.find("documents", pa.array(ids, pa.string())) for ids in hard_negatives.values()]
        mined = [(queries, pa.array(rows, pa.list_(pa.int64())))]
    return TrainingExamples(collection, split, mined, folder)
