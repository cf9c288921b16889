"""What the report says of data, clusters and batches, against the artifacts of a small run."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from raytriever.pipelines.batch_report import (
    MASKED,
    RANDOM,
    RANDOM_CLUSTERS,
    RANDOM_IN_DOMAIN,
    PairVectors,
    batches_section,
    hardness_sentence,
    masked_sentence,
    other_packings,
    packed_name,
    packed_pairs,
    read_masks,
    sample_of,
)
from raytriever.pipelines.batches import BatchReader
from raytriever.pipelines.clusters import read_clusters
from raytriever.pipelines.data_report import clusters_section, data_section
from raytriever.pipelines.pairs import read_pairs
from raytriever.retrieval.artifacts import Artifact
from raytriever.retrieval.collections.stored import StoredCollection
from raytriever.retrieval.report import Plot, Section, Table
from raytriever.retrieval.vectors import StoredVectors
from tests.unit.small_run import BATCH_SIZE, ODD_DOMAIN, PAIRS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def packing(run: dict[str, str]) -> Artifact:
    return Artifact(run["packing"])


def section_of(run: dict[str, str], *names: str) -> Section | None:
    def artifact(name: str) -> Artifact | None:
        return Artifact(run[name]) if name in names else None

    return batches_section(
        artifact("packing"),
        artifact("pairs"),
        StoredVectors(run["vectors"]) if "vectors" in names else None,
        artifact("clusters"),
        BatchReader(run["batches"]) if "batches" in names else None,
        1000,
        0,
    )


def tables(section: Section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


def test_packed_pairs_are_those_of_the_stored_batches(run: dict[str, str], packing: Artifact) -> None:
    reader = BatchReader(run["batches"])
    ids = read_pairs(Artifact(run["pairs"]), ["query_id"])["query_id"].to_pylist()
    packed = packed_pairs(packing)
    assert len(packed) == reader.number_of_batches(0)
    for number, batch in enumerate(packed):
        assert reader.read(0, number)["query_id"].to_pylist() == [ids[pair] for pair in batch]


def test_other_packings_batch_the_same_pairs(run: dict[str, str], packing: Artifact) -> None:
    packed, domains = packed_pairs(packing), read_clusters(Artifact(run["clusters"]))
    found = other_packings(packed, domains, packing, seed=3)
    assert list(found) == [RANDOM, RANDOM_IN_DOMAIN, RANDOM_CLUSTERS]
    for batches in found.values():
        assert batches.shape == packed.shape
        assert not np.array_equal(batches, packed)
        np.testing.assert_array_equal(np.sort(batches, axis=None), np.sort(packed, axis=None))
    domain_of = np.empty(PAIRS, dtype=object)
    for domain in domains:
        domain_of[domain.pairs] = domain.name
    for name in (RANDOM_IN_DOMAIN, RANDOM_CLUSTERS):
        assert all(len(set(domain_of[batch])) == 1 for batch in found[name])
    assert any(len(set(domain_of[batch])) > 1 for batch in found[RANDOM])
    assert list(other_packings(packed, None, packing, seed=3)) == [RANDOM]


def test_hardness_of_packed_batches_is_equation_2(run: dict[str, str], packing: Artifact) -> None:
    pairs, vectors = Artifact(run["pairs"]), StoredVectors(run["vectors"])
    queries, documents = (np.load(vectors.path(f"{part}/00000.npy")).astype(float) for part in ("queries", "documents"))
    rows = read_pairs(pairs, ["query_row", "document_row"]).to_pydict()
    of_pairs = PairVectors(pairs, vectors)
    reader = BatchReader(run["batches"])
    chosen = np.arange(reader.number_of_batches(0))
    masked = 0
    for batch, number, (mask, share) in zip(packed_pairs(packing), chosen, read_masks(reader, chosen), strict=True):
        left_out = reader.read(0, int(number))["masked"].to_pylist()
        everything, kept = [], []
        for i, a in enumerate(batch):
            for j, b in enumerate(batch):
                if i != j:
                    everything.append(queries[rows["query_row"][a]] @ documents[rows["document_row"][b]])
                    if j not in left_out[i]:
                        kept.append(everything[-1])
        assert of_pairs.hardness(batch) == pytest.approx(np.mean(everything), abs=1e-6)
        assert of_pairs.hardness(batch, mask) == pytest.approx(np.mean(kept), abs=1e-6)
        assert share == pytest.approx(1 - len(kept) / len(everything))
        masked += len(everything) - len(kept)
    assert masked > 0


def test_the_section_tells_the_means_of_every_packing(run: dict[str, str], packing: Artifact) -> None:
    section = section_of(run, "packing", "pairs", "vectors", "clusters", "batches")
    assert section is not None
    rows = {str(row[0]): row for row in tables(section)[0].rows}
    assert list(rows) == [RANDOM, RANDOM_IN_DOMAIN, RANDOM_CLUSTERS, packed_name(packing), MASKED]
    of_pairs = PairVectors(Artifact(run["pairs"]), StoredVectors(run["vectors"]))
    values = np.array([of_pairs.hardness(batch) for batch in packed_pairs(packing)])
    shown = [f"{len(values)}", f"{values.mean():.4f}", f"{values.std(ddof=1):.4f}"]
    assert rows[packed_name(packing)][1:4] == shown
    masks = (mask for mask, _ in read_masks(BatchReader(run["batches"]), np.arange(len(values))))
    left = np.mean([of_pairs.hardness(*both) for both in zip(packed_pairs(packing), masks, strict=True)])
    assert f"{left:.4f}" != f"{values.mean():.4f}"
    assert rows[MASKED][2] == f"{left:.4f}"
    assert f"An epoch has {PAIRS // BATCH_SIZE} batches of {BATCH_SIZE} pairs (epochs: 2)." in section.lead
    assert f"As packed it is {values.mean():.3f} on average" in section.lead


def test_masks_are_counted_over_all_epochs(run: dict[str, str]) -> None:
    section = section_of(run, "batches")
    assert section is not None
    counted = 0
    reader = BatchReader(run["batches"])
    for epoch in range(2):
        for number in range(reader.number_of_batches(epoch)):
            counted += sum(map(len, reader.read(epoch, number)["masked"].to_pylist()))
    negatives = 2 * PAIRS * (BATCH_SIZE - 1)
    (table,) = tables(section)
    assert table.rows[-1] == ["all rules", f"{counted}", f"{counted / negatives:.2%}"]
    assert sum(int(str(row[1])) for row in table.rows[:-1]) == counted


@pytest.mark.parametrize(
    ("names", "plots"),
    [
        (("packing",), None),
        (("packing", "pairs", "clusters"), None),
        (("packing", "pairs", "vectors"), 1),
        (("packing", "pairs", "vectors", "batches"), 2),
        (("pairs", "vectors", "batches"), 1),
        (("batches",), 1),
    ],
)
def test_what_is_absent_is_left_out(run: dict[str, str], names: tuple[str, ...], plots: int | None) -> None:
    section = section_of(run, *names)
    found = None if section is None else sum(isinstance(block, Plot) for block in section.blocks)
    assert found == plots


def test_the_sentence_on_hardness_claims_no_more_than_the_numbers() -> None:
    packed = np.array([0.2, 0.4, 0.6])
    sentence = hardness_sentence({RANDOM: np.array([0.1, 0.5]), "other": np.array([0.9]), "p": packed}, "p")
    assert "0.400 on average, in random batches of the same pairs 0.300" in sentence
    assert "1 of 3 packed batches are harder than the hardest random one" in sentence
    assert "'other', gives 0.900" in sentence
    assert "masked" not in sentence
    assert "Without the masked documents it averages 0.050." in hardness_sentence(
        {RANDOM: packed, "p": packed, MASKED: np.array([0.05])}, "p"
    )


def test_the_sentence_on_masks() -> None:
    assert "median batch has 10.0% of its negatives masked as false, the most masked one 50.0%" in masked_sentence(
        np.array([0.0, 0.1, 0.5])
    )
    assert masked_sentence(np.zeros(3)) == "No negative of these batches is masked as false."


def test_a_sample_is_seeded_distinct_and_all_where_it_can_be() -> None:
    np.testing.assert_array_equal(sample_of(5, 5, 0), np.arange(5))
    chosen = sample_of(1000, 10, 0)
    assert len(np.unique(chosen)) == 10
    np.testing.assert_array_equal(chosen, sample_of(1000, 10, 0))
    assert not np.array_equal(chosen, sample_of(1000, 10, 1))


def test_data_section_counts_splits_domains_and_what_was_dropped(run: dict[str, str]) -> None:
    collection, pairs = StoredCollection(run["collection"]), Artifact(run["pairs"])
    section = data_section(collection, pairs, [])
    assert section is not None
    counts = {str(row[0]): str(row[1]) for row in tables(section)[0].rows}
    assert counts["documents"] == "54"
    assert counts["judgments of split 'train'"] == "48"
    assert counts["judgments of split 'test'"] == "6"
    assert counts["pairs per domain: median, largest"] == "24, 32"
    assert "48 pairs of split 'train' in 2 domains; the largest, 'plain', holds 66.7% of them." in section.lead
    assert "No stage reports that it dropped anything." in section.lead
    pairs.manifest["dropped"] = {"some_reason": 3, "never": 0}
    section = data_section(None, pairs, [pairs])
    assert section is not None
    assert tables(section)[1].rows == [["pairs", "some reason", "3"]]
    assert "No stage" not in section.lead
    assert data_section(None, None, [pairs]) is None


def test_clusters_section_has_every_cluster(run: dict[str, str]) -> None:
    clusters = Artifact(run["clusters"])
    sizes = []
    for shard in clusters.shards:
        assigned = pq.read_table(clusters.path(shard.files[0].name))["cluster"].to_numpy()
        sizes += [int((assigned == number).sum()) for number in range(shard.counts["clusters"])]
    section = clusters_section(clusters, BATCH_SIZE)
    assert f"{PAIRS} pairs in {len(sizes)} clusters of 2 domains." in section.lead
    assert f"The median size is {np.median(sizes):.0f}, from {min(sizes)} to {max(sizes)}." in section.lead
    assert (
        f"{np.mean([size > BATCH_SIZE for size in sizes]):.0%} of the clusters hold more pairs than a batch"
        in section.lead
    )
    (table,) = tables(section)
    assert [row[0] for row in table.rows] == ["plain", ODD_DOMAIN]
    assert sum(int(str(row[2])) for row in table.rows) == len(sizes)
