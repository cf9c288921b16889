"""The report's section on batches: what each is made of, how hard it is beside other ways to batch, what is masked."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.batches import BatchReader
from pipelines.clustering.clusters import DomainClusters, read_clusters
from pipelines.pairs.pairs import DomainNumbers
from pipelines.reports.examples import sample_of
from pipelines.reports.masks import Masks
from pipelines.reports.packings import (
    EPOCH,
    MASKED,
    PairVectors,
    hardness_blocks,
    hardness_of_packings,
    hardness_sentence,
    packed_name,
    packed_pairs,
    packing_sentence,
    tour_blocks,
)
from raytriever.artifacts.artifact import Artifact, origin
from raytriever.reports.plots import BLUE, GREY, Distribution, histogram, ridgelines
from raytriever.reports.report import Block, Plot, Section
from raytriever.reports.table import Table, counted
from retrieval.vectors import StoredVectors

# What the report says of stored batches by looking at them: domains, sources of chunks, grades of candidate lists.

_DOMAINS_SHOWN = 12
_SEED_OF_SHUFFLE = 2


class Domains:
    """Gathers how many domains each batch has."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._batches: Counter[str] = Counter()
        self._examples: Counter[str] = Counter()

    def add(self, number: int, batch: pa.Table) -> None:  # noqa: ARG002
        """Counts one batch."""
        found = {item["values"]: item["counts"] for item in pc.value_counts(batch["domain"]).to_pylist()}
        self._numbers.append(len(found))
        self._batches.update(found.keys())
        self._examples.update(found)

    def blocks(self, reader: BatchReader) -> list[Block]:
        """A sentence; a plot where batches have several domains; a table where there are several at all."""
        blocks: list[Block] = [domains_sentence(np.array(self._numbers), len(self._batches))]
        if max(self._numbers) > 1:
            svg = histogram(
                np.array(self._numbers, dtype=np.float64), "domains of a batch", "batches",
                "Histogram of domains of a batch", whole=True,
            )  # fmt: skip
            blocks.append(Plot(svg, f"Domains of {len(self._numbers):,} batches of epoch 0."))
        if len(self._batches) > 1:
            blocks.append(self._table())
        return blocks + mixed_blocks(reader)

    def _table(self) -> Table:
        total = self._examples.total()
        most = sorted(self._examples, key=lambda name: (-self._examples[name], name))
        rows = [[name or "(none)", *self._row([name], total)] for name in most[:_DOMAINS_SHOWN]]
        rest = most[_DOMAINS_SHOWN:]
        if rest:
            rows.append([f"{len(rest):,} others", *self._row(rest, total)])
        caption = f"Domains of the {len(self._numbers):,} batches looked at."
        return Table(["domain", "batches with it", "examples", "share of examples"], rows, caption)

    def _row(self, names: Sequence[str], total: int) -> list[str]:
        examples = sum(self._examples[name] for name in names)
        batches = sum(self._batches[name] for name in names)
        return [f"{batches:,}", f"{examples:,}", f"{examples / total:.1%}"]


def domains_sentence(numbers: NDArray[np.int64], domains: int) -> str:
    """``numbers`` (n,): of how many domains each of n batches is; ``domains``: of all of them."""
    if domains == 1:
        return f"All {len(numbers):,} batches looked at are of the one domain there is."
    if (numbers == 1).all():
        return f"Each of the {len(numbers):,} batches looked at is of one domain; together they have {domains:,}."
    return (
        f"{int((numbers > 1).sum()):,} of the {len(numbers):,} batches looked at mix domains: a batch has"
        f" {numbers.mean():.1f} of the {domains:,} on average, at most {numbers.max()}."
    )


def mixed_blocks(reader: BatchReader) -> list[Block]:
    """Of mixed batches how many each source gave; else nothing."""
    manifest = reader.artifact.manifest
    names = [key.removeprefix("sources.") for key in manifest["inputs"] if key.startswith("sources.")]
    if not names:
        return []
    counts, total = manifest["counts"], manifest["counts"]["batches"]
    ratios = reader.artifact.config.get("ratios") or {}
    given = {name: int(counts.get(f"batches of {name}", 0)) for name in names}
    largest = max(given, key=lambda name: given[name])
    rows = [[n, f"{given[n]:,}", f"{given[n] / total:.1%}", f"{ratios[n]:g}" if n in ratios else ""] for n in names]
    sentence = (
        f"The batches are mixed from {len(names)} sources; '{largest}' gives {given[largest] / total:.1%} of them."
    )
    return [
        sentence,
        Table(["source", "batches", "share", "ratio"], rows, "Batches of all epochs by where they come from."),
    ]


class Sources:
    """Gathers of which source documents the chunks of a batch are, and which stand beside one another there."""

    def __init__(self) -> None:
        self._names, self._domains = DomainNumbers(), DomainNumbers()
        self._batches: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, number: int, batch: pa.Table) -> None:  # noqa: ARG002
        """Keeps one batch's sources, places in them and domains, as numbers."""
        places = batch["number"].to_numpy().astype(np.int64)
        self._batches.append((self._names.of(batch["source_id"]), places, self._domains.of(batch["domain"])))

    def blocks(self, reader: BatchReader) -> list[Block]:
        """The stored batches beside random ones of the same chunks and domains."""
        sources, places, domains = (np.stack(parts) for parts in zip(*self._batches, strict=True))
        shuffled = np.random.default_rng(_SEED_OF_SHUFFLE).permutation(sources.size)
        order = shuffled[np.argsort(domains.ravel()[shuffled], kind="stable")]
        other, other_places = (values.ravel()[order].reshape(sources.shape) for values in (sources, places))
        stored, random = distinct_in_rows(sources), distinct_in_rows(other)
        beside, by_chance = share_beside(sources, places), share_beside(other, other_places)
        size = reader.batch_size
        lead = sources_sentence(stored, random, beside, by_chance)
        values = {"as stored": stored, "random, same chunks": random}
        distributions = [
            Distribution(name, numbers.astype(np.float64), color)
            for (name, numbers), color in zip(values.items(), (BLUE, GREY), strict=True)
        ]
        svg = ridgelines(distributions, "source documents of a batch", "Sources of batches", whole=True)
        caption = (
            f"Distinct source documents of {len(stored):,} batches of {size} chunks of epoch 0, and of random batches"
            " of the same chunks, within their domains; each histogram is scaled to its own highest bar."
        )
        counts = np.bincount(stored, minlength=1), np.bincount(random, minlength=1)
        longest = max(map(len, counts))
        both = np.stack([np.pad(count, (0, longest - len(count))) for count in counts])
        rows = [[str(n), f"{both[0, n]:,}", f"{both[1, n]:,}"] for n in np.flatnonzero(both.any(axis=0)).tolist()]
        return [lead, Plot(svg, caption), Table(["sources of a batch", "batches stored", "random batches"], rows)]


def distinct_in_rows(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many different values each row of (n, B) has, int64 (n,)."""
    ordered = np.sort(values, axis=1)
    found: NDArray[np.int64] = 1 + (np.diff(ordered, axis=1) != 0).sum(axis=1)
    return found


def share_beside(sources: NDArray[np.int64], places: NDArray[np.int64]) -> float:
    """The share of chunks that have the one before or after them in their batch; both (batches, B)."""
    rows = np.arange(len(sources)).repeat(sources.shape[1])
    order = np.lexsort((places.ravel(), sources.ravel(), rows))
    row, source, place = rows[order], sources.ravel()[order], places.ravel()[order]
    follows = (np.diff(row) == 0) & (np.diff(source) == 0) & (np.diff(place) == 1)
    has = np.zeros(len(order), dtype=bool)
    has[1:] |= follows
    has[:-1] |= follows
    return float(has.mean())


def sources_sentence(stored: NDArray[np.int64], random: NDArray[np.int64], beside: float, by_chance: float) -> str:
    """What the numbers of sources (batches,) of stored and random batches say."""
    return (
        f"A batch has chunks of {stored.mean():.2f} source documents on average, from {stored.min()} to {stored.max()};"
        f" in random batches of the same chunks it would be {random.mean():.2f}. {beside:.0%} of the chunks have the"
        f" one before or after them in their batch, in random batches {by_chance:.0%}."
    )


class Grades:
    """Gathers the lengths of candidate lists and how relevant their candidates are judged."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._relevant: list[int] = []
        self._candidates: Counter[int | None] = Counter()
        self._lists: Counter[int | None] = Counter()

    def add(self, number: int, batch: pa.Table) -> None:  # noqa: ARG002
        """Counts the lists of one batch."""
        for grades in batch["candidate_relevance"].to_pylist():
            found = Counter(grades)
            self._candidates.update(found)
            self._lists.update(found.keys())
            self._lengths.append(len(grades))
            self._relevant.append(sum(count for grade, count in found.items() if grade and grade > 0))

    def blocks(self, reader: BatchReader) -> list[Block]:  # noqa: ARG002
        """How many relevant candidates a list has, and all grades."""
        relevant, lengths = np.array(self._relevant), np.array(self._lengths)
        unjudged = self._candidates[None] / max(self._candidates.total(), 1)
        svg = histogram(
            relevant.astype(np.float64), "relevant candidates of a list", "lists",
            "Histogram of relevant candidates", whole=True,
        )  # fmt: skip
        grades = sorted((grade for grade in self._candidates if grade is not None), reverse=True)
        unknown = [None] if None in self._candidates else []
        rows = [self._row(grade, len(lengths)) for grade in [*grades, *unknown]]
        caption = f"Grades of the {self._candidates.total():,} candidates of {len(lengths):,} lists."
        header = ["relevance", "candidates", "share", "mean a list", "lists with one"]
        return [
            grades_sentence(lengths, relevant, unjudged),
            Plot(svg, f"Candidates judged relevant (above 0) in each of {len(lengths):,} lists of epoch 0."),
            Table(header, rows, caption),
        ]

    def _row(self, grade: int | None, lists: int) -> list[str]:
        count = self._candidates[grade]
        name = "not judged" if grade is None else str(grade)
        share = f"{count / self._candidates.total():.2%}"
        return [name, f"{count:,}", share, f"{count / lists:.2f}", f"{self._lists[grade]:,}"]


def grades_sentence(lengths: NDArray[np.int64], relevant: NDArray[np.int64], unjudged: float) -> str:
    """What the lengths of lists (n,) and the numbers of relevant candidates in them (n,) say."""
    length = f"{lengths.min():,}" if lengths.min() == lengths.max() else f"{lengths.min():,} to {lengths.max():,}"
    without = int((relevant == 0).sum())
    sentence = (
        f"A list has {length} candidates; the median one has {np.median(relevant):,.0f} that are judged relevant, the"
        f" richest {relevant.max():,}"
    )
    sentence += f"; {counted(without, 'list')} without any." if without else "; no list is without any."
    return f"{sentence} {unjudged:.1%} of the candidates are not judged."


_ROWS = {"pairs": "pairs", "chunks": "chunks", "candidates": "queries with their lists"}


def batches_section(
    packing: Artifact | None,
    pairs: Artifact | None,
    vectors: StoredVectors | None,
    clusters: Artifact | None,
    batches: BatchReader | None,
    most: int,
    seed: int,
) -> Section | None:
    """Hardness (needs packing, pairs and vectors), tours (packing), what batches hold; None where there is neither.

    At most ``most`` batches of epoch 0 are read, a sample by ``seed`` where there are more.
    """
    lead: list[str] = []
    hardness: dict[str, NDArray[np.float64]] = {}
    of_pairs = PairVectors(pairs, vectors) if pairs is not None and vectors is not None else None
    domains = read_clusters(clusters) if packing is not None and clusters is not None else None
    if packing is not None:
        lead.append(packing_sentence(packing))
        if of_pairs is not None:
            chosen = sample_of(packing.shards[EPOCH].counts["batches"], most, seed)
            hardness = hardness_of_packings(packing, of_pairs, domains, chosen, seed)
    elif batches is not None:
        lead.append(_stored_sentence(batches))
    stored: list[Block] = []
    if batches is not None:
        read = sample_of(batches.number_of_batches(EPOCH), most, seed)
        if len(read) < batches.number_of_batches(EPOCH):
            lead.append(f"Of epoch {EPOCH}, {len(read):,} batches drawn at random are looked at here.")
        stored, masked = _stored_blocks(batches, packing, of_pairs, read)
        hardness |= {} if masked is None else {MASKED: masked}
    blocks: list[Block] = []
    if hardness and packing is not None and vectors is not None:
        lead.append(hardness_sentence(hardness, packed_name(packing)))
        blocks = hardness_blocks(hardness, vectors, packing)
    blocks += _tours(packing, domains) + stored
    return Section("Batches", " ".join(lead), blocks) if blocks else None


def _tours(packing: Artifact | None, domains: Sequence[DomainClusters] | None) -> list[Block]:
    return [] if packing is None else tour_blocks(packing, domains)


def _stored_sentence(batches: BatchReader) -> str:
    total = batches.artifact.manifest["counts"]["batches"]
    return (
        f"{counted(total, 'batch', 'batches')} of {batches.batch_size} {_ROWS[batches.layout]} in"
        f" {counted(batches.epochs, 'epoch')}."
    )


def _stored_blocks(
    batches: BatchReader, packing: Artifact | None, of_pairs: PairVectors | None, chosen: NDArray[np.int64]
) -> tuple[list[Block], NDArray[np.float64] | None]:
    """What the ``chosen`` batches of epoch 0 hold; of pairs also their hardness without what is masked, if known."""
    domains = Domains()
    found = _collector(batches, packing, of_pairs)
    for number in chosen.tolist():
        batch = batches.read(EPOCH, number)
        domains.add(number, batch)
        found.add(number, batch)
    blocks = domains.blocks(batches) + found.blocks(batches)
    return blocks, found.hardness if isinstance(found, Masks) else None


def _collector(
    batches: BatchReader, packing: Artifact | None, of_pairs: PairVectors | None
) -> Masks | Sources | Grades:
    """What gathers figures of batches of this layout."""
    match batches.layout:
        case "pairs":
            is_its_own = packing is not None and origin(batches.artifact, "packing") == packing.fingerprint
            return Masks(packed_pairs(packing) if packing is not None and is_its_own else None, of_pairs)
        case "chunks":
            return Sources()
        case "candidates":
            return Grades()
