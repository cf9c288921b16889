"""The report's section on batches: how hard they are beside random ones, what they hold, and what is masked in them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.batches import BatchReader
from pipelines.filtering.false_negatives import RULES, from_columns
from pipelines.pairs.pairs import DomainNumbers
from pipelines.reports.data import excerpt, sample_of
from pipelines.reports.packings import (
    EPOCH,
    MASKED,
    Batches,
    PairVectors,
    hardness_blocks,
    hardness_of_packings,
    packed_pairs,
    packing_rows,
    tour_blocks,
)
from raytriever.artifacts.artifact import Artifact, origin
from raytriever.reports.plots import BLUE, GREY, Distribution, histogram, ridgelines
from raytriever.reports.report import Block, Details, Plot, Section, folder_name
from raytriever.reports.table import Table
from retrieval.vectors import StoredVectors

_DOMAINS_SHOWN = 12
_SEED_OF_SHUFFLE = 2
_AUDIT = "audit.json"
_MASKED_BY = "masked by "
_MADE_UP = ("hard negatives repeated", "hard negatives drawn at random")


def batches_section(
    packing: Artifact | None,
    pairs: Artifact | None,
    vectors: StoredVectors | None,
    batches: BatchReader | None,
    most: int,
    seed: int,
) -> Section | None:
    """Hardness (needs packing, pairs and vectors), tours (packing), what batches hold; None where there is neither.

    At most ``most`` batches of epoch 0 are read, a sample by ``seed`` where there are more.
    """
    if packing is None and batches is None:
        return None
    blocks: list[Block] = []
    hardness: dict[str, NDArray[np.float64]] = {}
    of_pairs = PairVectors(pairs, vectors) if pairs is not None and vectors is not None else None
    rows = [] if packing is None else packing_rows(packing)
    if packing is not None and of_pairs is not None:
        chosen = sample_of(packing.shards[EPOCH].counts["batches"], most, seed)
        hardness = hardness_of_packings(packing, of_pairs, chosen, seed)
    if batches is not None:
        chosen = sample_of(batches.number_of_batches(EPOCH), most, seed)
        rows += [] if packing is not None else _stored_rows(batches)
        rows.append([f"batches of epoch {EPOCH} that are looked at", f"{len(chosen):,}"])
        found = _collector(batches, packing, of_pairs)
        blocks = _read(batches, found, chosen)
        if isinstance(found, Masks) and found.hardness is not None:
            hardness[MASKED] = found.hardness
    before: list[Block] = [Table(["quantity", "count"], rows)]
    if packing is not None:
        if hardness and vectors is not None:
            before += hardness_blocks(hardness, vectors, packing)
        before += tour_blocks(packing)
    return Section("Batches", "Which examples are trained on together.", before + blocks)


def _stored_rows(batches: BatchReader) -> list[list[str]]:
    return [
        ["epochs", f"{batches.epochs:,}"],
        ["batches", f"{batches.artifact.manifest['counts']['batches']:,}"],
        [f"{batches.layout} of a batch", f"{batches.batch_size:,}"],
    ]


def _collector(
    batches: BatchReader, packing: Artifact | None, of_pairs: PairVectors | None
) -> "Masks | Sources | Grades":
    """What gathers figures of batches of this layout."""
    match batches.layout:
        case "pairs":
            is_its_own = packing is not None and origin(batches.artifact, "packing") == packing.fingerprint
            return Masks(packed_pairs(packing) if packing is not None and is_its_own else None, of_pairs)
        case "chunks":
            return Sources()
        case "candidates":
            return Grades()


def _read(batches: BatchReader, found: "Masks | Sources | Grades", chosen: NDArray[np.int64]) -> list[Block]:
    """Shows ``found`` the ``chosen`` batches of epoch 0."""
    numbers: list[int] = []  # of each batch's domains
    of_domains, examples = Counter[str](), Counter[str]()
    for number in chosen.tolist():
        batch = batches.read(EPOCH, number)
        here = {item["values"]: item["counts"] for item in pc.value_counts(batch["domain"]).to_pylist()}
        numbers.append(len(here))
        of_domains.update(here.keys())
        examples.update(here)
        found.add(number, batch)
    return [*_domain_blocks(np.array(numbers), of_domains, examples), *_mixed(batches), *found.blocks(batches)]


def _domain_blocks(numbers: NDArray[np.int64], of_domains: Counter[str], examples: Counter[str]) -> list[Block]:
    """A plot where batches have several domains, a table where there are several at all."""
    blocks: list[Block] = []
    if numbers.max() > 1:
        svg = histogram(
            numbers.astype(np.float64), "domains of a batch", "batches", "Histogram of domains of a batch", whole=True
        )
        mixing = f"{int((numbers > 1).sum()):,} of {len(numbers):,} batches have several"
        blocks.append(Plot(svg, f"Domains of a batch of epoch 0, {numbers.mean():.1f} on average; {mixing}."))
    if len(of_domains) > 1:
        most = sorted(examples, key=lambda name: (-examples[name], name))
        groups = [(name or "(none)", [name]) for name in most[:_DOMAINS_SHOWN]]
        rest = most[_DOMAINS_SHOWN:]
        groups += [(f"{len(rest):,} others", rest)] if rest else []
        rows = []
        for name, members in groups:
            count, batches = sum(examples[member] for member in members), sum(of_domains[member] for member in members)
            rows.append([name, f"{batches:,}", f"{count:,}", f"{count / examples.total():.1%}"])
        caption = f"Domains of the {len(numbers):,} batches looked at."
        blocks.append(Table(["domain", "batches with it", "examples", "share of examples"], rows, caption))
    return blocks


def _mixed(batches: BatchReader) -> list[Block]:
    """Of mixed batches how many each source gave; else nothing."""
    manifest = batches.artifact.manifest
    names = [key.removeprefix("sources.") for key in manifest["inputs"] if key.startswith("sources.")]
    if not names:
        return []
    counts, total = manifest["counts"], manifest["counts"]["batches"]
    ratios = batches.artifact.config.get("ratios") or {}
    rows = []
    for name in names:
        given = int(counts.get(f"batches of {name}", 0))
        rows.append([name, f"{given:,}", f"{given / total:.1%}", f"{ratios[name]:g}" if name in ratios else ""])
    return [Table(["source", "batches", "share", "ratio"], rows, "Batches of all epochs by where they come from.")]


class Sources:
    """Gathers of which source documents the chunks of a batch are, and which stand beside one another there."""

    def __init__(self) -> None:
        self._names, self._domains = DomainNumbers(), DomainNumbers()
        self._batches: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, number: int, batch: pa.Table) -> None:  # noqa: ARG002
        """Keeps one batch's sources, places in them and domains, as numbers."""
        places = batch["number"].to_numpy().astype(np.int64)
        self._batches.append((self._names.of(batch["source_id"]), places, self._domains.of(batch["domain"])))

    def blocks(self, batches: BatchReader) -> list[Block]:
        """The stored batches beside random ones of the same chunks and domains."""
        sources, places, domains = (np.stack(parts) for parts in zip(*self._batches, strict=True))
        shuffled = np.random.default_rng(_SEED_OF_SHUFFLE).permutation(sources.size)
        order = shuffled[np.argsort(domains.ravel()[shuffled], kind="stable")]
        distributions, rows = [], []
        kinds = (("as stored", BLUE, np.arange(sources.size)), ("random, same chunks", GREY, order))
        for name, color, chunks in kinds:
            of_chunks, in_source = (values.ravel()[chunks].reshape(sources.shape) for values in (sources, places))
            found = distinct_in_rows(of_chunks)
            distributions.append(Distribution(name, found.astype(np.float64), color))
            numbers = [f"{found.mean():.2f}", f"{found.min():,}", f"{found.max():,}"]
            rows.append([name, *numbers, f"{share_beside(of_chunks, in_source):.0%}"])
        svg = ridgelines(distributions, "source documents of a batch", "Sources of batches", whole=True)
        caption = (
            f"Distinct source documents of {len(sources):,} batches of {batches.batch_size} chunks of epoch 0, and of"
            " random batches of the same chunks, within their domains; each histogram is scaled to its own highest bar."
        )
        header = ["batches", "sources of a batch: mean", "fewest", "most", "chunks beside a neighbour"]
        beside = "Beside a neighbour: chunks with the one before or after them in their batch."
        return [Plot(svg, caption), Table(header, rows, beside)]


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

    def blocks(self, batches: BatchReader) -> list[Block]:  # noqa: ARG002
        """How many relevant candidates a list has, and all grades."""
        relevant, lengths = np.array(self._relevant), np.array(self._lengths)
        svg = histogram(
            relevant.astype(np.float64), "relevant candidates of a list", "lists",
            "Histogram of relevant candidates", whole=True,
        )  # fmt: skip
        plot = Plot(
            svg,
            f"Candidates judged relevant (above 0) in each of {len(lengths):,} lists of epoch 0, which have"
            f" {lengths.min():,} to {lengths.max():,} candidates; {np.count_nonzero(relevant == 0):,} lists have none.",
        )
        grades = sorted((grade for grade in self._candidates if grade is not None), reverse=True)
        unknown = [None] if None in self._candidates else []
        rows = [self._row(grade, len(lengths)) for grade in [*grades, *unknown]]
        caption = f"Grades of the {self._candidates.total():,} candidates of {len(lengths):,} lists."
        return [plot, Table(["relevance", "candidates", "share", "mean a list", "lists with one"], rows, caption)]

    def _row(self, grade: int | None, lists: int) -> list[str]:
        count = self._candidates[grade]
        name = "not judged" if grade is None else str(grade)
        share = f"{count / self._candidates.total():.2%}"
        return [name, f"{count:,}", share, f"{count / lists:.2f}", f"{self._lists[grade]:,}"]


class Masks:
    """Gathers the masks of batches of layout ``pairs``.

    ``packed``: the pair numbers of each batch of the epoch, where they are known; with ``of_pairs`` the batches' own
    hardness without what is masked is measured.
    """

    def __init__(self, packed: Batches | None, of_pairs: PairVectors | None) -> None:
        self._packed, self._of_pairs = packed, of_pairs
        self._shares: list[float] = []
        self._hardness: list[float] = []

    def add(self, number: int, batch: pa.Table) -> None:
        """Counts batch ``number`` of the epoch."""
        mask, share = mask_of(batch)
        self._shares.append(share)
        if self._packed is None or self._of_pairs is None:
            return
        if mask.sum() < len(mask) * (len(mask) - 1):  # of no negatives there is no mean
            self._hardness.append(self._of_pairs.hardness(self._packed[number], mask))

    @property
    def hardness(self) -> NDArray[np.float64] | None:
        """Of each batch, without what is masked; None where its pairs aren't known."""
        return np.array(self._hardness) if self._hardness else None

    def blocks(self, batches: BatchReader) -> list[Block]:
        """Shares of batches, a table of rules, examples."""
        shares, artifact = np.array(self._shares), batches.artifact
        blocks: list[Block] = []
        if shares.any():
            svg = histogram(
                100 * shares, "masked share of a batch's negatives (%)", "batches", "Histogram of masked shares"
            )
            caption = (
                f"Share of negatives masked as false in {len(shares):,} batches of epoch 0, {np.median(shares):.1%} in"
                f" the median one; {int((shares == 1).sum()):,} have no negative left."
            )
            blocks.append(Plot(svg, caption))
        # what `raytriever filter` wrote beside its batches; mixed batches have none
        audit = artifact.read_json(_AUDIT) if _AUDIT in artifact.names("") else None
        blocks.append(_rule_table(artifact.manifest["counts"], audit))
        return blocks + ([] if audit is None else _masked_examples(audit, artifact))


def mask_of(batch: pa.Table) -> tuple[NDArray[np.bool_], float]:
    """The mask (B, B) over the batch's own documents, and the share of all its negatives that is masked."""
    size = len(batch)
    hard_negatives = sum(map(len, batch["hard_negative_ids"].to_pylist()))
    mask = from_columns(batch["masked"].to_pylist(), size + hard_negatives)
    return mask[:, :size], float(mask.sum()) / max(size * (size - 1 + hard_negatives), 1)


def _rule_table(counts: Mapping[str, int], audit: Mapping[str, Any] | None) -> Table:
    by_rule = {name.removeprefix(_MASKED_BY): count for name, count in counts.items() if name.startswith(_MASKED_BY)}
    by_rule = {rule: by_rule[rule] for rule in (*RULES, *by_rule) if rule in by_rule}  # the order they are asked in
    negatives, masked = int(counts["negatives"]), sum(by_rule.values())
    rows = []
    for rule, count in by_rule.items():
        batches = "" if audit is None else f"{audit['rules'][rule]['batches']:,}"
        rows.append([rule, f"{count:,}", f"{count / max(negatives, 1):.2%}", batches])
    rows.append(["all rules", f"{masked:,}", f"{masked / max(negatives, 1):.2%}", ""])
    caption = (
        f"Of {negatives:,} negatives (all batches, all epochs); a negative counts for the first rule that masks it."
        " Batches: those in which the rule masks something."
    )
    caption += "".join(f" {name.capitalize()}: {counts[name]:,}." for name in _MADE_UP if counts.get(name))
    return Table(["masked by", "negatives", "share", "batches"], rows, caption)


def _masked_examples(audit: Mapping[str, Any], batches: Artifact) -> list[Block]:
    caption = (
        "The first such negative of the first batches (epoch: number) in which there is one, and the surrogate's"
        f" scores of the positive and of what is masked. Ids are in {folder_name(batches)}/{_AUDIT}."
    )
    header = ["query", "its positive", "masked document", "batch", "positive", "masked"]
    blocks: list[Block] = []
    for rule in RULES:
        rows = [_masked_row(example) for example in audit["rules"][rule]["examples"]]
        if rows:
            blocks.append(Details(f"Examples: masked by {rule}", Table(header, rows, caption, text_columns=3)))
    return blocks


def _masked_row(example: Mapping[str, Any]) -> Sequence[str]:
    texts = [excerpt(example[name]) for name in ("query", "positive", "document")]
    scores = ["" if score is None else f"{score:.3f}" for score in (example["positive_score"], example["score"])]
    return [*texts, f"{example['epoch']}: {example['batch']:,}", *scores]
