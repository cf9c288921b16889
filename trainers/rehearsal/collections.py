"""Toy collections for rehearsals: texts of several topics, written in the very layout that a source's settings name."""

import csv
import io
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipelines.formats.beir import BeirFolder
from pipelines.formats.columns import ColumnFiles, PairTables, SplitTables
from pipelines.formats.dpr import Dpr
from pipelines.formats.mteb import MtebFolder
from pipelines.formats.python_functions import PythonFunctions
from pipelines.formats.source_tree import Files
from pipelines.formats.sources import AnySource, JoinedSources, SingleSource
from pipelines.formats.tables import JSON_ENDINGS
from pipelines.formats.trec import TrecFiles
from raytriever.errors import UserError
from retrieval.collections.text_lines import plain_name

TOPICS = 16
_WORDS_OF_TOPIC, _WORDS_OF_ALL = 24, 200
_ARTICLES, _ARTICLE_WORDS, _PASSAGES = 60, 480, 4  # where there are documents alone; rows may be passages of one
_HARD_NEGATIVES = 32  # of a question in DPR's files, as Natural Questions' have 30 or more
_SPLITS = ("train", "dev", "test")  # where the settings name none
_SENTENCE = 12  # words
_MARKED_UP = "<DOC>\n<DOCNO>{}</DOCNO>\n<TITLE>{}</TITLE>\n<TEXT>\n{}\n</TEXT>\n</DOC>\n"
_PARTS = 16  # of a text that is a list
_SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class Size:
    """How much a collection holds: its documents, queries of each split that trains, and of each other one."""

    documents: int = 96
    training_queries: int = 24
    queries: int = 12
    words: int = 24  # of a document
    packed: frozenset[str] = frozenset()  # splits that batches are made of, beside those called train


class Document(NamedTuple):
    """A document; its number is the query's whose positive it is."""

    id: str
    title: str
    text: str


class Query(NamedTuple):
    """A query; ``judged``: numbers of documents with their grades, the best first."""

    id: str
    text: str
    judged: tuple[tuple[int, int], ...]

    @property
    def answer(self) -> str:
        """A word of its positive document."""
        return self.text.split()[0]


@dataclass
class Toy:
    """Documents, and queries by split."""

    documents: list[Document]
    queries: dict[str, list[Query]] = field(default_factory=dict)

    def all_queries(self) -> list[Query]:
        """Those of all splits, each once."""
        return list({query.id: query for queries in self.queries.values() for query in queries}.values())

    def texts(self, query: Query, grade: int) -> list[str]:
        """Of the documents that have this grade for the query."""
        return [self.documents[number].text for number, found in query.judged if found == grade]


def make_toy(
    name: str, splits: Iterable[str] | Mapping[str, Sequence[str]], size: Size, ids: tuple[str, str] = ("", "")
) -> Toy:
    """A collection of ``size``, the same for one ``name``; ``ids``: what is before numbers of documents, of queries.

    A document has words of its topic, a query some of its document's. Training judgments are all 1, with a 0 beside;
    others are graded 0 to 3. The queries of a split, or of its file where one is given, are everywhere the same.
    """
    words = random.Random(0)  # all toys are written in the same ones
    topics = [[_word(words) for _ in range(_WORDS_OF_TOPIC)] for _ in range(TOPICS)]
    common = [_word(words) for _ in range(_WORDS_OF_ALL)]
    draw, documents = random.Random(name), []
    for number in range(size.documents):
        topic = topics[number % TOPICS]
        drawn = [draw.choice(topic if place % 2 else common) for place in range(size.words)]
        drawn[0] = f"{drawn[0]}{number}"  # no two texts are equal
        sentences = [
            " ".join(drawn[start : start + _SENTENCE]).capitalize() for start in range(0, len(drawn), _SENTENCE)
        ]
        title = f"{topic[0]} {topic[1]} {number}".capitalize()
        documents.append(Document(f"{ids[0]}{number}", title, ". ".join(sentences) + "."))
    toy = Toy(documents)
    for split in splits:
        is_trained = "train" in split or split in size.packed
        judged_in = splits[split][0] if isinstance(splits, Mapping) else split
        first = zlib.crc32(judged_in.encode()) % 1000 * 1000
        total = size.training_queries if is_trained else size.queries
        toy.queries[split] = [_query(first + number, documents, ids[1], is_trained) for number in range(total)]
    return toy


def _query(number: int, documents: Sequence[Document], before: str, is_trained: bool) -> Query:
    positive = number % len(documents)
    others = [(positive + TOPICS * step) % len(documents) for step in (1, 2)]
    judged = [(positive, 1), (others[0], 0)] if is_trained else [(positive, 3), (others[0], 1), (others[1], 0)]
    words = re.findall(r"\w+", documents[positive].text.lower())
    asked = [words[0], *random.Random(number).sample(words[1:], 3), f"q{number}"]
    return Query(f"{before}{number}", " ".join(asked), tuple(judged))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4)))


def write_source(source: AnySource, size: Size) -> None:
    """Writes a toy collection where the settings look for one."""
    for each in single_sources(source):
        if not isinstance(each, PythonFunctions):  # which every Python has
            WRITERS[type(each)](each, size, Path(each.path))


def single_sources(source: AnySource) -> Sequence[SingleSource]:
    """The source itself, or those that it joins."""
    return list(source.sources.values()) if isinstance(source, JoinedSources) else [source]


def is_known(source: SingleSource) -> bool:
    """Whether ``write_source`` knows the kind."""
    return isinstance(source, PythonFunctions) or type(source) in WRITERS


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table in the form that the file's name ends in; ``.gz`` and ``.zst`` pack it."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), _prepared(path))
        return
    plain, text = plain_name(path.name), io.StringIO()
    if plain.endswith(".json"):
        json.dump(list(rows), text)
    elif plain.endswith(JSON_ENDINGS):
        text.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if plain.endswith(".tsv") else ",")
        writer.writeheader()
        writer.writerows(rows)
    _write_text(path, text.getvalue())


def _write_text(path: Path, text: str) -> None:
    with pa.output_stream(str(_prepared(path)), compression="detect") as file:
        file.write(text.encode())


def _prepared(path: Path) -> Path:
    """The path, its folder made. Raises ``UserError`` outside of the rehearsal's folder: real data may be there."""
    if not path.resolve().is_relative_to(Path.cwd().resolve()):
        raise UserError(
            f"A toy would be written to {path}, outside of the rehearsal's folder, over what may be data. Name files by"
            " paths below the source's folder."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_lines(path: Path, rows: Iterable[Sequence[object]], separator: str = "\t") -> None:
    _write_text(path, "".join(separator.join(map(str, row)) + "\n" for row in rows))


def _file(folder: Path, name: str, ending: str = "") -> Path:
    """One file that a name with wildcards stands for; in a folder, one with this ``ending``."""
    plain = re.sub(r"\*+|\?|\[[^]]*\]", "0", name)
    return folder / (plain if not ending or Path(plain_name(plain)).suffix else f"{plain}/0{ending}")


def _write_beir(source: BeirFolder, size: Size, folder: Path) -> None:
    toy = make_toy(str(folder), source.splits or _SPLITS, size, ("d", "q"))
    write_table(folder / "corpus.jsonl", [{"_id": d.id, "title": d.title, "text": d.text} for d in toy.documents])
    write_table(folder / "queries.jsonl", [{"_id": q.id, "text": q.text} for q in toy.all_queries()])
    for split in toy.queries:
        write_table(folder / "qrels" / f"{split}.tsv", _judgments(toy, split))


def _judgments(toy: Toy, split: str) -> list[dict[str, Any]]:
    """As BEIR and MTEB name them."""
    return [
        {"query-id": query.id, "corpus-id": toy.documents[number].id, "score": grade}
        for query in toy.queries[split]
        for number, grade in query.judged
    ]


def _write_mteb(source: MtebFolder, size: Size, folder: Path) -> None:
    """As most of MTEB's repositories are; as those of CoIR where there are subsets, which share a repository."""
    toy = make_toy(f"{folder} {source.subset}", source.splits or _SPLITS, size, ("d", "q"))
    id_, name = ("id", f"{source.subset}-{{}}/{{}}-00000-of-00001.parquet") if source.subset else ("_id", "{}.jsonl")
    documents = [{id_: d.id, "title": d.title, "text": d.text} for d in toy.documents]
    write_table(folder / name.format("corpus", "test"), documents)
    write_table(folder / name.format("queries", "test"), [{id_: q.id, "text": q.text} for q in toy.all_queries()])
    for split in toy.queries:
        rows = [row | {"score": float(row["score"])} for row in _judgments(toy, split)]
        write_table(folder / (name.format("qrels", split) if source.subset else f"qrels/{split}.jsonl"), rows)
    files: dict[str, list[dict[str, str]]] = {}
    for path in sorted(path.relative_to(folder) for path in folder.rglob("*.[jp]*")):
        configuration = (path.parent.name or path.stem).replace("qrels", "qrels" if source.subset else "default")
        entry = {"split": path.stem.split("-")[0], "path": path.as_posix().replace("00000-of-00001.parquet", "*")}
        files.setdefault(configuration, []).append(entry)
    configs = [{"config_name": name, "data_files": entries} for name, entries in files.items()]
    _write_text(folder / "README.md", f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def _write_columns(source: ColumnFiles, size: Size, folder: Path) -> None:
    if source.pairs is not None:
        _write_pairs(source.pairs, size, folder)
        return
    documents, queries, judgments = source.documents, source.queries, source.judgments
    assert documents is not None
    passages = _PASSAGES if documents.join_by else 1
    alone = Size(documents=_ARTICLES * passages, words=_ARTICLE_WORDS // passages)
    toy = make_toy(str(folder), _splits(judgments), size if queries else alone, ("d", "q") if queries else ("", ""))
    rows: list[dict[str | None, Any]] = [
        {documents.id: d.id, documents.title: d.title, documents.text: d.text, documents.domain: f"domain{number % 2}"}
        | ({documents.join_by: f"Article {number // passages}"} if documents.join_by else {})
        for number, d in enumerate(toy.documents)
    ]
    if documents.in_parts:
        rows = [row | {documents.text: _parts(row[documents.text])} for row in rows]
    if source.empty_documents == "drop":
        rows.append({**rows[-1], documents.id: "empty", documents.title: "", documents.text: ""})
    write_table(_file(folder, documents.table[0], ".jsonl"), [_nested(row) for row in rows])
    if queries is not None:
        asked = ({queries.id: q.id, queries.text: q.text, queries.answers: [q.answer]} for q in toy.all_queries())
        write_table(_file(folder, queries.table[0], ".jsonl"), [_nested(row) for row in asked])
    if judgments is not None:
        names = (judgments.query_id, judgments.document_id, judgments.relevance)
        by_split = {
            split: [dict(zip(names, row.values(), strict=True)) for row in _judgments(toy, split)]
            for split in toy.queries
        }
        _write_splits(judgments, by_split, folder)


def _parts(text: str) -> list[str]:
    """The text as as many lists of words as a batch of Revela has chunks."""
    words = text.split()
    return [" ".join(words[part::_PARTS]) for part in range(_PARTS)]


def _write_pairs(pairs: PairTables, size: Size, folder: Path) -> None:
    if pairs.domain:  # two, each large enough for batches and clusters
        size = replace(size, documents=2 * size.documents, training_queries=2 * size.training_queries)
    toy = make_toy(str(folder), _splits(pairs), size)
    by_split = {
        split: [
            {pairs.query: query.text, pairs.document: toy.documents[query.judged[0][0]].text, pairs.title: "A title"}
            | {pairs.relevance: query.judged[0][1], pairs.domain: f"domain{number % 2}"}
            | {column: toy.texts(query, 0)[0] for column in pairs.negatives}
            for number, query in enumerate(queries)
        ]
        for split, queries in toy.queries.items()
    }
    _write_splits(pairs, by_split, folder)


def _splits(tables: SplitTables | None) -> Sequence[str]:
    return [] if tables is None else list(tables.splits or _SPLITS)


def _write_splits(tables: SplitTables, rows: Mapping[str, Sequence[Mapping[str | None, Any]]], folder: Path) -> None:
    """A table for each split, or one with a column that names it."""
    for split, names in tables.tables():
        of = rows if split is None else {split: rows[split]}
        table = [_nested({**row, tables.split: name}) for name, of_split in of.items() for row in of_split]
        write_table(_file(folder, names[0], ".jsonl"), table)


def _nested(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """The row without what has no name, ``a.b`` under ``b`` in ``a``."""
    result: dict[str, Any] = {}
    for name, value in row.items():
        if name is not None:
            *above, last = name.split(".")
            level = result
            for part in above:
                level = level.setdefault(part, {})
            level[last] = value
    return result


def _write_trec(source: TrecFiles, size: Size, folder: Path) -> None:
    """Queries and documents are numbered apart; of a split's files the first has all of its queries or judgments."""
    splits = {**source.qrels, **source.triples}
    toy = make_toy(str(folder), splits, size)
    for name in source.documents:
        if plain_name(name).endswith(".tsv"):
            rows = ([getattr(d, column, "-") for column in source.document_columns] for d in toy.documents)
            _write_lines(_file(folder, name), rows)
        else:
            _write_text(_file(folder, name), "".join(_MARKED_UP.format(d.id, d.title, d.text) for d in toy.documents))
    _write_queries(source.queries, toy, splits, folder)
    for split, (first, *others) in source.qrels.items():
        queries = toy.queries[split]
        lines = ((q.id, 0, toy.documents[number].id, grade) for q in queries for number, grade in q.judged)
        _write_lines(_file(folder, first), lines, " ")
        for name in others:
            _write_lines(_file(folder, name), ())
    for split, names in source.triples.items():
        _write_lines(_file(folder, names[0]), ((q.id, q.judged[0][0], q.judged[-1][0]) for q in toy.queries[split]))


def _write_queries(names: Sequence[str], toy: Toy, files: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Each split's queries in the file whose name is most like that of its judgments."""

    def alike(name: str, judged_in: str) -> tuple[int, int]:
        parts, wanted = (set(re.findall("[a-z]+|[0-9]+", each)) for each in (name, judged_in))
        return len(parts & wanted), -len(parts - wanted)

    for name in names:
        splits = [split for split in files if name == max(names, key=lambda each: alike(each, files[split][0]))]
        _write_topics(_file(folder, name), Toy([], {split: toy.queries[split] for split in splits}).all_queries())


def _write_topics(path: Path, queries: Sequence[Query]) -> None:
    """With those that are there: several collections may have a file in common."""
    if plain_name(path.name).endswith(".tsv"):
        there = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
        _write_lines(path, (dict(there) | {q.id: q.text for q in queries}).items())
    else:
        parts = "<top>\n\n<num> Number: {}\n<title> {}\n\n<desc> Description:\n{}\n\n</top>\n"
        _write_text(path, "".join(parts.format(q.id, q.text, q.text) for q in queries))


def _write_files(_: Files, size: Size, folder: Path) -> None:
    """Pages of Markdown, a document below each heading."""
    documents = make_toy(str(folder), [], size).documents
    for first in range(0, len(documents), _PASSAGES):
        sections = [f"## {each.title}\n\n{each.text}\n" for each in documents[first : first + _PASSAGES]]
        _write_text(folder / f"{first}.md", "\n".join(sections))


def _write_dpr(source: Dpr, size: Size, folder: Path) -> None:
    toy = make_toy(str(folder), [*source.examples, *source.questions], size)
    passages = [{"title": d.title, "text": d.text, "score": 0, "passage_id": d.id} for d in toy.documents]
    for split, names in source.examples.items():
        rows = []
        for query in toy.queries[split]:
            number, total = query.judged[0][0], len(passages)
            others = [passages[(number + 1 + step) % total] for step in range(_HARD_NEGATIVES + 2)]
            rows.append(
                {"dataset": "toy", "question": query.text, "answers": [query.answer]}
                | {"positive_ctxs": [passages[number]]}
                | {"negative_ctxs": others[:2], "hard_negative_ctxs": others[2:]}
            )
        write_table(_file(folder, names[0]), rows)
    for name in source.passages:
        write_table(_file(folder, name), [{"id": d.id, "text": d.text, "title": d.title} for d in toy.documents])
    for split, names in source.questions.items():
        path, queries = _file(folder, names[0]), toy.queries[split]
        if plain_name(path.name).endswith((".json", ".jsonl")):
            write_table(path, [{"question": q.text, "answers": [q.answer]} for q in queries])
        else:
            _write_lines(path, ((q.text, [q.answer]) for q in queries))


WRITERS: dict[type[Any], Callable[[Any, Size, Path], None]] = {
    BeirFolder: _write_beir,
    MtebFolder: _write_mteb,
    ColumnFiles: _write_columns,
    TrecFiles: _write_trec,
    Dpr: _write_dpr,
    Files: _write_files,
}
