"""Collections in MTEB 2's layout, as data sets on the hub have it.

Parquet and a README whose YAML says which files are the configurations ``corpus``, ``queries`` and ``default``. The
folder loads with ``datasets.load_dataset(folder, "corpus")`` and in MTEB, and can be pushed to the hub as it is.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from raytriever.retrieval.collections.collection import DOCUMENTS, QUERIES
from raytriever.retrieval.collections.mteb import ANSWERS, DOMAIN, README
from raytriever.retrieval.collections.stored import ParquetRows, StoredCollection, TextPart
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.exports.rows import has_values, judgments_by_split, require_judgments

_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")  # what the datasets library takes
_JUDGMENTS = pa.schema({"query-id": pa.string(), "corpus-id": pa.string(), "score": pa.int32()})
_JUDGMENTS_AT_ONCE = 100_000


def write(collection: StoredCollection, folder: Path) -> list[str]:
    """Writes documents, queries and the judgments of all splits; columns for domains and answers where there are some.

    Returns the names of the files. Raises ``UserError`` for a split whose name the ``datasets`` library refuses.
    """
    require_judgments(collection, "MTEB's layout")
    domain = [DOMAIN] if has_values(collection, "documents", DOMAIN) else []
    corpus = _write_texts(collection, "documents", "corpus", ["title", "text", *domain], folder)
    optional = [column for column in (DOMAIN, ANSWERS) if has_values(collection, "queries", column)]
    queries = _write_texts(collection, "queries", "queries", ["text", *optional], folder)
    judgments = _write_judgments(collection, folder)
    (folder / README).write_text(_card(collection, judgments), encoding="utf-8", newline="\n")
    return [README, *corpus, *queries, *judgments.values()]


def _write_texts(
    collection: StoredCollection, part: TextPart, configuration: str, columns: list[str], folder: Path
) -> list[str]:
    """One file for each one of the collection, ids under ``_id``."""
    types = {"documents": DOCUMENTS, "queries": QUERIES}[part]
    schema = pa.schema([("_id", pa.string()), *((column, types.field(column).type) for column in columns)])
    stored = collection.names(f"{part}/")
    names = [f"{configuration}/{configuration}-{n:05d}-of-{len(stored):05d}.parquet" for n in range(len(stored))]
    (folder / configuration).mkdir()
    for source, name in zip(stored, names, strict=True):
        with _open(folder / name, schema) as file:
            for table in ParquetRows(collection, [source]).tables(["id", *columns]):
                file.write_table(table.rename_columns(schema.names).cast(schema))
    return names


def _write_judgments(collection: StoredCollection, folder: Path) -> dict[str, str]:
    """One file for each split: its name."""
    (folder / "qrels").mkdir()
    names: dict[str, str] = {}
    files: dict[str, pq.ParquetWriter] = {}
    waiting: dict[str, list[pa.Table]] = {}
    with ExitStack() as open_files:
        for split, table in judgments_by_split(collection):
            if split not in files:
                _require_split(split, collection)
                names[split] = f"qrels/{split}-00000-of-00001.parquet"
                files[split] = open_files.enter_context(_open(folder / names[split], _JUDGMENTS))
                waiting[split] = []
            waiting[split].append(table.rename_columns(_JUDGMENTS.names).cast(_JUDGMENTS))
            if sum(map(len, waiting[split])) >= _JUDGMENTS_AT_ONCE:
                files[split].write_table(pa.concat_tables(waiting[split]).combine_chunks())
                waiting[split] = []
        for split, tables in waiting.items():
            if tables:
                files[split].write_table(pa.concat_tables(tables).combine_chunks())
    return dict(sorted(names.items()))


def _require_split(split: str, collection: StoredCollection) -> None:
    if not _SPLIT_NAME.fullmatch(split) or len(split.encode()) > 200:
        raise UserError(
            f"{collection.uri}: the datasets library takes no split called {split!r:.80}, only letters, digits and _,"
            " with single dots between. Rename it in the source and collect again, or export to beir."
        )


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_index=True)


def _card(collection: StoredCollection, judgments: Mapping[str, str]) -> str:
    def configuration(name: str, files: Mapping[str, str]) -> dict[str, Any]:
        return {
            "config_name": name,
            "data_files": [{"split": split, "path": path} for split, path in files.items()],
        }

    head = {
        "task_categories": ["text-retrieval"],
        "tags": ["mteb", "text"],
        "configs": [
            configuration("default", judgments),
            configuration("corpus", {"corpus": "corpus/*.parquet"}),
            configuration("queries", {"queries": "queries/*.parquet"}),
        ],
    }
    parts = ", ".join(f"{len(collection.rows_of(part)):,} {part}" for part in ("documents", "queries", "judgments"))
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# A retrieval collection\n\n{parts}. `default` holds the"
        " judgments (score above 0: relevant), `corpus` the documents, `queries` the queries.\n\n"
        f"Written by Raytriever from the collection with fingerprint `{collection.fingerprint}`.\n"
    )
