"""Any bytes in any file of a source are read or refused by name: no reader fails otherwise, and none waits for ever.

``RAYTRIEVER_FUZZ``: how many inputs each reader is given, 20 by default.
"""

import gzip
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipelines.formats.sources import AnySource
from raytriever.errors import UserError
from tests.unit.pipelines.formats import test_dpr, test_mteb, test_tevatron, test_trec
from tests.unit.pipelines.formats.files import encoded, lines
from tests.unit.retrieval.collections.contents import contents
from tests.unit.retrieval.collections.packed_files import write_files

SOURCES = TypeAdapter[Any](AnySource)
INPUTS = int(os.environ.get("RAYTRIEVER_FUZZ", "20"))
ROWS: list[dict[str, Any]] = [
    {"query": "what", "document": "a", "negative": ["b", "c"], "dataset": "msmarco"},
    {"query": "who", "document": "b", "negative": [], "dataset": "reddit"},
]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td2\t2\n"


BEIR = {"corpus.jsonl": lines(*test_mteb.CORPUS), "queries.jsonl": lines(*test_mteb.QUERIES), "qrels/test.tsv": QRELS}
PACKED = {"corpus.jsonl.gz": gzip.compress(lines(*test_mteb.CORPUS).encode()), **BEIR}
del PACKED["corpus.jsonl"]
MTEB = {
    "README.md": test_mteb.README,
    "judged/test.jsonl": lines(*test_mteb.TEST),
    "judged/train-1.jsonl": lines(*test_mteb.TRAIN),
    "judged/more.jsonl": lines({"query-id": "q2", "corpus-id": "d1", "score": 0}),
    "texts/c.parquet": encoded(test_mteb.CORPUS, ".parquet"),
    "texts/q-1.jsonl": lines(*test_mteb.QUERIES),
}
CSV = {"table": "docs.csv", "id": "_id", "text": "text", "title": "title"}
TSV = {"table": "queries.tsv", "id": "_id", "text": "text"}
TABLES = {"docs.csv": '_id,title,text\n0,One,"first, ""x"""\n', "queries.tsv": "_id\ttext\na\twhat\n"}
MARCO, MARCO_NAMES = test_trec.MARCO_FILES, {"kind": "trec", **test_trec.MARCO_NAMES}
TREC = {
    "docs.txt": test_trec.TRIPCLICK_FILES["documents/docs_grp_00.txt"],
    "topics.txt": test_trec.TRIPCLICK_FILES["topics/topics.head.train.txt"],
    "qrels.txt": "1 0 7 1\n",
}
PAIRS = {"splits": {"train": "**"}, "negatives": ["negative"], "domain": "dataset"}
# by name: settings, and the files of a source that can be read
READERS: dict[str, tuple[dict[str, Any], Mapping[str, str | bytes]]] = {
    "beir": ({"kind": "beir"}, BEIR),
    "packed beir": ({"kind": "beir"}, PACKED),
    "mteb": ({"kind": "mteb"}, MTEB),
    "columns": ({"kind": "columns", "documents": CSV, "queries": TSV}, TABLES),
    "parquet": ({"kind": "columns", "documents": {"table": "docs.parquet", "id": "_id", "text": "text"}},
                {"docs.parquet": encoded(test_mteb.CORPUS, ".parquet")}),
    "ms_marco": (MARCO_NAMES, {name: text for name, text in MARCO.items() if name != "triples.tsv"}),
    "ms_marco triples": (MARCO_NAMES | {"qrels": {}, "triples": {"train": "triples.tsv"}}, MARCO),
    "trec": ({"kind": "trec", "documents": "docs.txt", "queries": "topics.txt", "qrels": {"test": "qrels.txt"}}, TREC),
    "dpr list": ({"kind": "dpr", "examples": {"train": "t.json"}}, {"t.json": json.dumps(test_dpr.EXAMPLES)}),
    "dpr": ({"kind": "dpr", "passages": "psgs.tsv", "questions": {"test": "q.csv"}},
            {"psgs.tsv": test_dpr.PASSAGES, "q.csv": test_dpr.QUESTIONS}),
    "tevatron": ({"kind": "tevatron", "examples": {"train": "t.jsonl"}},
                 {"t.jsonl": lines(*test_tevatron.WRITTEN_OUT)}),
    "pairs": ({"kind": "columns", "pairs": PAIRS},
              {"data/train.parquet": encoded(ROWS, ".parquet"), "more.jsonl": lines(*ROWS)}),
    "source_tree": ({"kind": "source_tree"}, {"a.py": "x = 1\n", "b/c.md": "# Head\n", "d.rs": "fn f() {}\n"}),
}  # fmt: skip

MARKS = "\0|{|\"|'|\\ud800|\t|\n|\r|<|<!--|&#|PAR1|1e999|NaN|null|[]|\u2028|-0|<DOC>|</DOC>|<row |/>|query-id|_id|:|,"
JUNK = st.sampled_from(
    [b"", b"\xff\xfe", b"\x1f\x8b", b"[" * 3000, b"9" * 5000, *(mark.encode() for mark in MARKS.split("|"))]
)


@pytest.mark.parametrize("name", READERS)
def test_the_source_can_be_read(tmp_path: Path, name: str) -> None:
    assert contents(opened(tmp_path, *READERS[name])).documents


def opened(folder: Path, values: dict[str, Any], files: Mapping[str, str | bytes]) -> Any:
    return SOURCES.validate_python({**values, "path": write_files(str(folder), files)}).open()


@settings(max_examples=INPUTS, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_read_or_refused(tmp_path_factory, name: str, data: st.DataObject) -> None:
    values, files = READERS[name]
    changed = data.draw(st.sampled_from(sorted(files)))
    content = files[changed]
    whole = content if isinstance(content, bytes) else content.encode()
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.sampled_from([begin, begin + 1, begin + 7, len(whole)]))
        whole = whole[:begin] + data.draw(JUNK | st.binary(max_size=12)) + whole[end:]
    folder = tmp_path_factory.mktemp("any")
    with suppress(UserError):
        source = opened(folder, values, {**files, changed: whole})
        source.format.fingerprint()
        contents(source)
