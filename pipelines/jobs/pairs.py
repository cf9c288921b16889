"""`raytriever pairs`: the judged positives of a collection's splits as training pairs, each once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from math import ceil
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pipelines.exchange import number_parts, read_parts, string_parts, write_parts
from pipelines.filtering.false_negatives import pair_keys
from pipelines.jobs.lookups import earlier_record, shard_name
from pipelines.mining.rules import folded_text_keys
from pipelines.pairs.duplicates import (
    DuplicateSettings,
    band_keys,
    candidate_pairs,
    first_of_equal,
    first_similar,
    shingle_hashes,
    shingle_sets,
    similarity,
    text_blocks,
)
from pipelines.pairs.pairs import (
    LISTED,
    PAIR_ORDER,
    PAIRS,
    POSITIVES,
    SCHEMA,
    ChooseDocuments,
    in_pair_order,
    no_pairs,
    some_of_each,
)
from raytriever.artifacts.artifact import Artifact, ShardRecord, ShardWriter
from raytriever.artifacts.long_columns import places_among, take_rows
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath
from raytriever.stages.stage import Shard, Stage, StageConfig
from retrieval.collections.collection import (
    JUDGMENTS,
    ParquetRows,
    Part,
    StoredCollection,
    TextPart,
    text_columns,
    texts_of,
)

ROWS_OF_A_PART = 1 << 19
"""Rows that one worker holds, and as many to compare them with."""
_RANGES_OF_A_PART = 8
_BUCKETS_OF_A_PART = 1 << 22
_ROWS_AT_ONCE = 10_000
_SIDES: dict[TextPart, Literal["query", "document"]] = {"queries": "query", "documents": "document"}
_READ: tuple[Part, ...] = (*_SIDES, "judgments")
_EXAMPLES = 5

_Found = dict[str, dict[str, Any]]  # counts, what was dropped, facts


class PairsConfig(StageConfig):
    """Which judgments become pairs, and what becomes of those that repeat one another."""

    collection: InputPath
    """The collection whose judgments become pairs."""
    split: str | Annotated[tuple[str, ...], Field(min_length=1)] = "train"
    """Which judgments; several splits make one set of pairs."""
    minimum_relevance: int = 1
    """The grade from which a document answers its query."""
    duplicates: DuplicateSettings = DuplicateSettings()
    """Pairs that repeat an earlier one."""
    documents_per_query: int | None = Field(default=None, gt=0)
    """Most pairs of one query: a batch of one query's pairs alone has all negatives masked."""
    choose_documents: ChooseDocuments = "drawn"
    """Which so many: drawn by their ids, or the first as the source lists them, in DPR's files the annotated one."""
    queries_per_document: int | None = Field(default=None, gt=0)
    """Most pairs of one document, of those left, drawn by their ids: they mask each other in a batch."""
    rows_per_file: int = Field(default=1_000_000, gt=0)
    """Pairs of a file."""
    texts_per_shard: int = Field(default=100_000, gt=0)
    """Rows of the collection whose texts one worker hashes."""

    @model_validator(mode="after")
    def _number_is_said(self) -> Self:
        if self.choose_documents == "first" and self.documents_per_query is None:
            raise ValueError("'choose_documents: first' needs 'documents_per_query', how many of a query's to keep")
        return self


class Pairs(Stage[PairsConfig]):
    """qrels to pairs, each step one phase of many tasks, in which rows with one key meet.

    Judgments find their queries, then their documents; pairs then find those with the same texts, nearly the same, the
    same query, the same document, as far as the settings ask; at last they are cut into files. Which texts are nearly
    the same is found by buckets: texts that share one are candidates, whose shingles then meet.
    """

    command = "pairs"
    kind = PAIRS
    algorithm_version = 6
    config_class = PairsConfig
    unit = "pairs"

    def check_inputs(self, there: Set[str]) -> None:
        """A split that is not judged."""
        if "collection" in there:
            for split in self._splits():
                StoredCollection(self.config.collection).require_split(split)

    def plan(self) -> list[Shard]:
        """The collection by stretches, every step by parts, the files: as many as there are judgments for."""
        collection, config = StoredCollection(self.config.collection), self.config
        near = config.duplicates.near != "off"
        queries, documents, judgments = (collection.count(part) for part in _READ)
        numbers = {
            "queries": ceil(queries / config.texts_per_shard),
            "documents": ceil(documents / config.texts_per_shard),
            "judgments": ceil(judgments / ROWS_OF_A_PART),
            **dict.fromkeys(self._steps(), ceil(max(queries, documents, judgments) / ROWS_OF_A_PART)),
            "pairs": ceil(judgments / config.rows_per_file),
        }
        phases: list[Sequence[str]] = [_READ, *([step] for step in self._steps()), ["pairs"]]
        if near:
            buckets = 1 + config.duplicates.similarity.bands
            for part, count in zip(_SIDES, (queries, documents), strict=True):
                numbers |= dict.fromkeys((f"bands-{part}", f"shingles-{part}"), numbers[part])
                numbers[f"candidates-{part}"] = ceil(count * buckets / _BUCKETS_OF_A_PART)
            at = phases.index(["near-queries"])
            phases[at:at] = [[f"{make}-{part}" for part in _SIDES] for make in ("bands", "candidates", "shingles")]
        counted = {"of": numbers, "queries": queries, "rows": ROWS_OF_A_PART}
        return [
            Shard(shard_name(make, number), {"make": make, "number": number, **counted}, phase, make != "pairs")
            for phase, makes in enumerate(phases)
            for make in makes
            for number in range(numbers[make])
        ]

    def _steps(self) -> list[str]:
        """Those in which pairs change hands, in order."""
        config = self.config
        asked_for = {
            "asked": True,
            "answered": True,
            "distinct": config.duplicates.needs_texts,
            **dict.fromkeys(("near-queries", "near-documents", "near"), config.duplicates.near != "off"),
            "of-query": config.documents_per_query is not None,
            "of-document": config.queries_per_document is not None,
        }
        return [step for step, is_asked_for in asked_for.items() if is_asked_for]

    def _splits(self) -> tuple[str, ...]:
        split = self.config.split
        return (split,) if isinstance(split, str) else tuple(dict.fromkeys(split))

    def make(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """One of the shards that ``plan`` lists."""
        make = shard.description["make"]
        if make in _SIDES:
            return self._make_texts(make, shard, writer)
        if make == "judgments":
            return self._hand_on(self._judged(shard), shard, writer, {})
        if make == "pairs":
            return self._make_file(shard, writer)
        kind, _, part = make.partition("-")
        compare = {"bands": self._make_bands, "candidates": self._make_candidates, "shingles": self._make_shingles}
        if kind in compare:
            return compare[kind](part, shard, writer)
        steps = ["judgments", *self._steps()]
        table, found = self._read(steps[steps.index(make) - 1], shard, [shard.description["number"]]), _Found()
        match make:
            case "asked":
                table = self._joined(table, "queries", shard)
            case "answered":
                table = self._joined(table, "documents", shard)
                # what batches mask, be it a pair or left out: by ranges of queries, one for each file of pairs
                of, queries = shard.description["of"], _rows(table, "query")
                keys = pair_keys(query_rows=queries, document_rows=_rows(table, "document"))
                part_of = queries * of["pairs"] // shard.description["queries"]
                write_parts(writer, _file(shard.name, "positives"), pa.table({"key": keys}), part_of, of["pairs"])
                table = table.filter(table["is_pair"]).drop_columns("is_pair")
            case "distinct":
                table, found = self._distinct(in_pair_order(table), shard, writer)
            case "near-queries" | "near-documents":
                table, found = self._with_near(table, part, shard)
            case "near":
                table, found = self._not_near(in_pair_order(table))
            case _:
                table, found = self._some(in_pair_order(table), make)
        return self._hand_on(table, shard, writer, found)

    def _make_texts(self, part: TextPart, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Id and row of each text of a stretch, a hash of it where texts are compared, a document's domain."""
        rows, side, compared = self._rows_of(part), _SIDES[part], self.config.duplicates.needs_texts
        start, size = shard.description["number"] * self.config.texts_per_shard, self.config.texts_per_shard
        stop, tables = min(start + size, len(rows)), []
        names = ["id", "domain"] if part == "documents" else ["id"]
        for begin in range(start, stop, _ROWS_AT_ONCE):
            own = np.arange(begin, min(begin + _ROWS_AT_ONCE, stop))
            read = rows.take(own, [*names, *(text_columns(part) if compared else ())])
            table = read.select(names).append_column(f"{side}_row", pa.array(own))
            if compared:
                table = table.append_column(f"{side}_key", pa.array(folded_text_keys(texts_of(read, part))))
            tables.append(table)
        table, parts = pa.concat_tables(tables), shard.description["of"]["asked"]
        write_parts(writer, _file(shard.name), table, string_parts(table["id"], parts), parts)
        return writer.commit(0)

    def _judged(self, shard: Shard) -> pa.Table:
        """The ids of those judgments of a stretch that are positive, and their places in the order of splits and rows.

        Of a grade of 1 or more, or of ``minimum_relevance`` if less; ``is_pair``: of ``minimum_relevance``.
        """
        rows, start = self._rows_of("judgments"), shard.description["number"] * shard.description["rows"]
        own = np.arange(start, min(start + shard.description["rows"], len(rows)))
        table = rows.take(own, JUDGMENTS.names)
        split = pc.index_in(table["split"], value_set=pa.array(self._splits(), pa.string()))
        listed = pc.add(pc.multiply(split.cast(pa.int64()), len(rows)), pa.array(own))
        is_pair = pc.greater_equal(table["relevance"], self.config.minimum_relevance)
        positive = pc.and_(pc.is_valid(split), pc.or_(is_pair, pc.greater_equal(table["relevance"], 1)))
        judged = table.select(["query_id", "document_id"]).append_column(LISTED, listed)
        return judged.append_column("is_pair", is_pair).filter(positive)

    def _rows_of(self, part: Part) -> ParquetRows:
        return StoredCollection(self.config.collection).rows_of(part)

    def _hand_on(self, table: pa.Table, shard: Shard, writer: ShardWriter, found: _Found) -> ShardRecord:
        """Commits pairs for the step that follows, with what was ``found`` on the way."""
        numbers, steps = shard.description["of"], ["judgments", *self._steps(), "pairs"]
        step = steps[steps.index(shard.description["make"]) + 1]
        parts, facts = numbers[step], dict(found.get("facts", {}))
        match step:
            case "asked" | "answered":
                facts["pairs"] = pc.sum(table["is_pair"]).as_py() or 0
                part_of = string_parts(table["query_id" if step == "asked" else "document_id"], parts)
            case "distinct" | "near":
                name = "key" if step == "distinct" else "near"
                keys = (table[f"{side}_{name}"].to_numpy().astype(np.uint64) for side in _SIDES.values())
                part_of = number_parts(np.uint64(3) * next(keys) + next(keys), parts)
            case "pairs":  # by ranges of queries, of which a file takes some; it counts one share of the documents
                documents = table.select(["document_row"])
                write_parts(
                    writer, _file(shard.name, "documents"), documents, _rows(documents, "document") % parts, parts
                )
                parts = numbers["asked"] * _RANGES_OF_A_PART
                part_of = _rows(table, "query") * parts // shard.description["queries"]
                facts["ranges"] = np.bincount(part_of, minlength=parts).tolist()
            case _:
                side: Literal["query", "document"] = "document" if "document" in step else "query"
                part_of = number_parts(_rows(table, side).astype(np.uint64), parts)
        write_parts(writer, _file(shard.name), table, part_of, parts)
        return writer.commit(0, counts=found.get("counts"), dropped=found.get("dropped"), facts=facts)

    def _read(self, step: str, shard: Shard, parts: Iterable[int], what: str = "") -> pa.Table:
        """What all shards of an earlier step wrote for these parts."""
        return read_parts(self.config.output, (_file(name, what) for name in _names(step, shard)), parts)

    def _records(self, step: str, shard: Shard) -> list[ShardRecord]:
        return [earlier_record(self.config.output, name) for name in _names(step, shard)]

    def _joined(self, table: pa.Table, part: TextPart, shard: Shard) -> pa.Table:
        """The pairs with what was written of their queries, or documents.

        Raises ``UserError`` where there are no pairs at all, and where one has an unknown id.
        """
        has_pairs = pc.any(table["is_pair"]).as_py()
        if not has_pairs and not any(record.facts["pairs"] for record in self._records("judgments", shard)):
            raise no_pairs(self.config.minimum_relevance)
        known, ids = self._read(part, shard, [shard.description["number"]]), table[f"{_SIDES[part]}_id"]
        places = places_among(ids, known["id"])
        if len(absent := np.flatnonzero(places < 0)):
            raise UserError(
                f"Judgments name {part} that are not in {self.config.collection}, such as"
                f" {ids[int(absent[0])].as_py()!r}. Make the collection again."
            )
        found = take_rows(known.drop_columns("id"), places)
        return pa.table([*table.columns, *found.columns], names=[*table.column_names, *found.column_names])

    def _distinct(self, table: pa.Table, shard: Shard, writer: ShardWriter) -> tuple[pa.Table, _Found]:
        """The pairs, of which none of another part has the texts, without those that repeat an earlier one."""
        for part, side in _SIDES.items() if self.config.duplicates.near != "off" else ():
            rows = np.unique(_rows(table, side))
            part_of, parts = rows // self.config.texts_per_shard, shard.description["of"][part]
            write_parts(writer, _file(shard.name, part), pa.table({"row": rows}), part_of, parts)
        keys = [f"{side}_key" for side in _SIDES.values()]
        first = first_of_equal(*(table[key].to_numpy() for key in keys))
        drop = self.config.duplicates.exact == "drop"
        return _without_repeats(table.drop_columns(keys), first, "with both texts", "exact duplicates", drop=drop)

    def _make_bands(self, part: TextPart, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """The texts of a stretch that pairs have, by their buckets, of which a hash of the whole text is one."""
        settings, parts = self.config.duplicates, shard.description["of"][f"candidates-{part}"]
        used = np.unique(self._read("distinct", shard, [shard.description["number"]], part)["row"].to_numpy())
        keys = [np.empty((0, 1 + settings.similarity.bands), dtype=np.uint64)]
        for texts in text_blocks(self._rows_of(part), part, used):
            bands = band_keys(*shingle_hashes(texts, settings.words(part)), settings.similarity)
            keys.append(np.concatenate([folded_text_keys(texts)[:, None], bands], axis=1))
        buckets = np.concatenate(keys)
        table = pa.table({"bucket": buckets.ravel(), "row": np.repeat(used, buckets.shape[1])})
        write_parts(writer, _file(shard.name), table, number_parts(buckets.ravel(), parts), parts)
        return writer.commit(0)

    def _make_candidates(self, part: TextPart, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Pairs of texts that share some buckets, by the part that compares them, which is that of the later text.

        Beside them their rows, by stretches, with the part that wants their shingles.
        """
        numbers = shard.description["of"]
        shared, parts = self._read(f"bands-{part}", shard, [shard.description["number"]]), numbers[f"near-{part}"]
        low, high = candidate_pairs(shared["bucket"].to_numpy(), shared["row"].to_numpy()).T
        part_of = number_parts(high.astype(np.uint64), parts)
        write_parts(writer, _file(shard.name), pa.table({"low": low, "high": high}), part_of, parts)
        rows, wants = np.concatenate([low, high]), np.concatenate([part_of, part_of])
        stretch, wanted = rows // self.config.texts_per_shard, pa.table({"row": rows, "part": wants})
        write_parts(writer, _file(shard.name, "rows"), wanted, stretch, numbers[part])
        return writer.commit(0)

    def _make_shingles(self, part: TextPart, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """The shingles of a stretch's texts that are compared, for each part that wants them."""
        wanted = _distinct_rows(self._read(f"candidates-{part}", shard, [shard.description["number"]], "rows"))
        rows, place = np.unique(wanted["row"].to_numpy(), return_inverse=True)
        blocks = text_blocks(self._rows_of(part), part, rows)
        sets = [own for texts in blocks for own in shingle_sets(texts, self.config.duplicates.words(part))]
        column = pa.array(sets, pa.large_list(pa.uint64())).take(pa.array(place))
        table, parts = wanted.select(["row"]).append_column("shingles", column), shard.description["of"][f"near-{part}"]
        write_parts(writer, _file(shard.name), table, wanted["part"].to_numpy(), parts)
        return writer.commit(0)

    def _with_near(self, table: pa.Table, part: TextPart, shard: Shard) -> tuple[pa.Table, _Found]:
        """The pairs with the first text that is similar to theirs, and with the shingles of theirs if it is another."""
        number, side, threshold = [shard.description["number"]], _SIDES[part], self.config.duplicates.threshold(part)
        candidates = _distinct_rows(self._read(f"candidates-{part}", shard, number)).to_pydict()
        shingles = self._read(f"shingles-{part}", shard, number)
        of_rows = (own.values.to_numpy() for own in shingles["shingles"])
        sets = dict(zip(shingles["row"].to_pylist(), of_rows, strict=True))
        rows, of_pair = np.unique(_rows(table, side), return_inverse=True)
        near = first_similar(rows, zip(candidates["low"], candidates["high"], strict=True), sets, threshold)
        repeats = [sets[row] if is_later else None for row, is_later in zip(rows.tolist(), near != rows, strict=True)]
        carried = pa.array(repeats, pa.large_list(pa.uint64())).take(pa.array(of_pair))
        table = table.append_column(f"{side}_near", pa.array(near[of_pair])).append_column(f"{side}_shingles", carried)
        return table, {"counts": {f"{part} with nearly the text of an earlier one": int((near != rows).sum())}}

    def _not_near(self, table: pa.Table) -> tuple[pa.Table, _Found]:
        """The pairs without those both of whose texts are nearly an earlier pair's."""
        settings = self.config.duplicates
        first = first_of_equal(*(table[f"{side}_near"].to_numpy() for side in _SIDES.values()))
        later = np.flatnonzero(first != np.arange(len(first)))
        for part, side in _SIDES.items():
            rows, near = _rows(table, side), table[f"{side}_near"].to_numpy()
            shingles, threshold = table[f"{side}_shingles"].combine_chunks(), settings.threshold(part)
            is_alike = [
                near[own] in (rows[own], rows[earlier])  # else both carry their shingles
                or similarity(*(shingles[row].values.to_numpy() for row in (own, earlier))) >= threshold
                for own, earlier in zip(later.tolist(), first[later].tolist(), strict=True)
            ]
            later = later[np.array(is_alike, dtype=bool)]
            table = table.drop_columns([f"{side}_near", f"{side}_shingles"])
        repeated = np.arange(len(first))
        repeated[later] = first[later]
        drop = settings.near == "drop"
        return _without_repeats(table, repeated, "with nearly both texts", "near duplicates", drop=drop)

    def _some(self, table: pa.Table, step: str) -> tuple[pa.Table, _Found]:
        """At most so many pairs of each query, or document."""
        config, setting = self.config, "documents_per_query" if step == "of-query" else "queries_per_document"
        number = getattr(config, setting)
        if step == "of-query":
            chosen = some_of_each(table, "query", number, config.choose_documents)
        else:
            chosen = some_of_each(table, "document", number)
        return table.filter(pa.array(chosen)), {"dropped": {f"pairs beyond {setting}": int((~chosen).sum())}}

    def _make_file(self, shard: Shard, writer: ShardWriter) -> ShardRecord:
        """Writes one of ``pairs/00000.parquet`` and on, if there are so many pairs; the first says what was found.

        Beside it ``positives/00000.npy`` and on: ``pair_keys`` of what is known to be relevant, ascending.
        """
        number, size, last = shard.description["number"], self.config.rows_per_file, self._steps()[-1]
        lengths = np.sum([record.facts["ranges"] for record in self._records(last, shard)], axis=0)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        begin, end = number * size, min((number + 1) * size, int(starts[-1]))
        counts = Counter(documents=len(self._read(last, shard, [number], "documents")["document_row"].unique()))
        if begin < end:
            first, after = int(np.searchsorted(starts, begin, side="right")) - 1, int(np.searchsorted(starts, end))
            table, before = in_pair_order(self._read(last, shard, range(first, after))), begin - int(starts[first])
            queries = table["query_row"].slice(0, before + end - begin)
            # a query whose pairs begin in the file before was counted there
            counts["queries"] = len(queries.unique()) - len(queries.slice(0, before).unique())
            own = table.select(SCHEMA.names).slice(before, end - begin).cast(SCHEMA)
            writer.add_table(f"pairs/{number:05d}.parquet", own.combine_chunks())
        positives = self._read("answered", shard, [number], "positives")["key"].to_numpy()
        writer.add_array(f"{POSITIVES}{number:05d}.npy", np.unique(positives))
        found = self._found(shard) if not number else _Found(counts={}, dropped={}, facts={})
        counts.update(found["counts"])
        return writer.commit(max(0, end - begin), counts=counts, dropped=found["dropped"], facts=found["facts"])

    def _found(self, shard: Shard) -> _Found:
        """What all steps counted and dropped, and the first of each kind of examples."""
        counts, dropped, examples = Counter[str](), Counter[str](), defaultdict[str, list[Any]](list)
        for record in (record for step in self._steps() for record in self._records(step, shard)):
            counts.update(record.counts)
            dropped.update(record.dropped)
            for kind, found in record.facts.get("examples", {}).items():
                examples[kind] += found
        facts = {kind: [example for _, example in sorted(found)[:_EXAMPLES]] for kind, found in examples.items()}
        return {"counts": counts, "dropped": +dropped, "facts": facts}

    def facts(self, records: list[ShardRecord]) -> dict[str, Any]:
        """Some duplicates, by the ids of both pairs."""
        return records[0].facts

    def summary(self, artifact: Artifact) -> str:
        """Pairs, distinct queries, distinct documents, what was dropped."""
        counts, dropped = artifact.manifest["counts"], artifact.manifest["dropped"]
        pairs = f"{artifact.rows:,} pairs of {counts['queries']:,} queries and {counts['documents']:,} documents"
        return "; ".join([pairs, *(f"{count:,} {reason} dropped" for reason, count in dropped.items())])


def _names(make: str, shard: Shard) -> list[str]:
    """The shards of an earlier phase, of those that ``shard`` is one of."""
    return [shard_name(make, number) for number in range(shard.description["of"][make])]


def _file(shard: str, what: str = "") -> str:
    return f"exchange/{shard}{what and '.'}{what}.arrow"


def _rows(table: pa.Table, side: Literal["query", "document"]) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = table[f"{side}_row"].to_numpy()
    return rows


def _distinct_rows(table: pa.Table) -> pa.Table:
    """Each row once, in order."""
    return (
        table.group_by(table.column_names).aggregate([]).sort_by([(name, "ascending") for name in table.column_names])
    )


def _without_repeats(
    table: pa.Table, first: NDArray[np.int64], how: str, reason: str, *, drop: bool
) -> tuple[pa.Table, _Found]:
    """The pairs, less those that repeat the ``first`` of their kind (pairs,), if they are to go, and some of these."""
    later = np.flatnonzero(first != np.arange(len(first)))
    columns = table.select(["query_id", "document_id", *PAIR_ORDER])
    repeating, repeated = (take_rows(columns, rows[:_EXAMPLES]).to_pylist() for rows in (later, first[later]))
    examples = []
    for row, earlier in zip(repeating, repeated, strict=True):
        pair, repeats = ([of["query_id"], of["document_id"]] for of in (row, earlier))
        examples.append([[row[name] for name in PAIR_ORDER], {"pair": pair, "repeats": repeats}])
    facts = {"examples": {f"{reason.replace(' ', '_')}": examples}}
    found: _Found = {"counts": {f"pairs {how} of an earlier one": len(later)}, "dropped": {}, "facts": facts}
    if drop:
        found["dropped"] = {reason: len(later)}
        table = take_rows(table, np.flatnonzero(first == np.arange(len(first))))
    return table, found
