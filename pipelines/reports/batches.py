"""The report's section on batches: what each is made of, how hard it is beside other ways to batch, what is masked."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raytriever.pipelines.batches import BatchReader
from raytriever.pipelines.clusters import DomainClusters, read_clusters
from raytriever.pipelines.reports.layouts import Domains, Grades, Sources
from raytriever.pipelines.reports.masks import Masks
from raytriever.pipelines.reports.packings import (
    EPOCH,
    MASKED,
    PairVectors,
    hardness_blocks,
    hardness_of_packings,
    hardness_sentence,
    packed_name,
    packed_pairs,
    packing_sentence,
)
from raytriever.pipelines.reports.sampling import sample_of
from raytriever.pipelines.reports.tours import tour_blocks
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.lineage import origin
from raytriever.retrieval.plain_text import counted
from raytriever.retrieval.report import Block, Section
from raytriever.retrieval.vectors import StoredVectors

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
