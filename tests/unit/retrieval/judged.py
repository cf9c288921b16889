"""A small collection with graded judgments and answers, runs on it, and stages made in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.artifacts.artifact import Artifact
from tests.unit.retrieval.made_up import write_beir
from tests.unit.small_run import make, make_artifact

Run = dict[str, dict[str, float]]

# id: text; titles hold an answer that must not be found
DOCUMENTS = {
    "d1": "The capital of France is Paris.",
    "d2": "Berlin is large.",
    "d3": "paris, Texas",
    "d4": "Nothing of note",
    "d5": "Rome was not built in a day",
}
ANSWERS = {"q1": ["Paris"], "q2": ["Berlin", "Bonn"], "q4": ["Rome"], "q5": ["Oslo"]}
# q3 has judgments and no answers; q4 and q5 have answers and no judgments; q6 has no positive
JUDGMENTS = {"q1": {"d1": 2, "d3": 1}, "q2": {"d2": 1, "d4": 0}, "q3": {"d5": 2}, "q6": {"d4": 0}}
SITES = {"q1": "beer", "q3": "beer", "q6": "coffee", "q4": "tea"}  # and none: q2, q5
QUERIES = ("q1", "q2", "q3", "q4", "q5", "q6")
RUN: Run = {
    "q1": {"d3": 3.0, "d1": 2.0, "d4": 1.0},
    "q2": {"d4": 5.0, "d5": 4.0, "d2": 3.0},
    "q4": {"d4": 2.0, "d5": 1.0},
    "q5": {"d1": 1.0},
}


def make_collection(folder: Path) -> str:
    """The collection's artifact."""
    source = folder / "source"
    of_documents = {"title": "Rome Oslo", "metadata": {"site": "beer"}}
    documents = [{"_id": name, "text": text} | of_documents for name, text in DOCUMENTS.items()]
    of_queries = {query: {"answers": ANSWERS.get(query, []), "site": SITES.get(query, "")} for query in QUERIES}
    queries = [{"_id": q, "text": f"text of {q}", "metadata": metadata} for q, metadata in of_queries.items()]
    write_beir(source, documents, queries, [(q, d, grade) for q, of in JUDGMENTS.items() for d, grade in of.items()])
    return make(Collect(CollectConfig(source=BeirFolder(path=str(source)), output=str(folder / "collection"))))


def run_lines(run: Run, tag: str) -> str:
    """The run in TREC's form; its documents in the order given."""
    return "".join(
        f"{query} Q0 {document} {rank} {score!r} {tag}\n"
        for query, found in run.items()
        for rank, (document, score) in enumerate(found.items(), 1)
    )


def write_run_file(path: Path, run: Run) -> str:
    """The run as a TREC file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_lines(run, path.stem))
    return str(path)


def write_qrels_file(path: Path, qrels: dict[str, dict[str, int]] = JUDGMENTS) -> str:
    """The judgments in TREC's form."""
    path.write_text("".join(f"{q} 0 {d} {grade}\n" for q, grades in qrels.items() for d, grade in grades.items()))
    return str(path)


def make_run_artifact(folder: Path, collection: str, run: Run, system: dict[str, Any] | None = None) -> str:
    """A run artifact that was searched for all of ``run``'s queries, also those without a document."""
    ids = list(DOCUMENTS)
    width = max(len(found) for found in run.values())
    rows, scores = np.full((len(run), width), -1), np.full((len(run), width), -np.inf, dtype=np.float32)
    for line, found in enumerate(run.values()):
        rows[line, : len(found)] = [ids.index(document) for document in found]
        scores[line, : len(found)] = list(found.values())
    tables = {"queries.parquet": pa.table({"id": list(run)}), "documents.parquet": pa.table({"id": ids})}
    files = {"rows.npy": rows, "scores.npy": scores, "run.trec": run_lines(run, "x"), **tables}
    facts = {} if system is None else {"system": system}
    return make_artifact(folder, "run", {"collection": Artifact(collection).fingerprint}, facts, files, len(run))
