"""What the report says of batches of pairs, against the artifacts of a small run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.batches import BatchReader
from pipelines.clustering.clusters import read_clusters
from pipelines.filtering.false_negatives import RULES
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.packing.pack import PackingSettings
from pipelines.pairs.pairs import read_pairs
from pipelines.reports.batches import batches_section
from pipelines.reports.examples import sample_of
from pipelines.reports.masks import mask_of, masked_sentence
from pipelines.reports.packings import (
    MASKED,
    RANDOM,
    RANDOM_CLUSTERS,
    RANDOM_IN_DOMAIN,
    UNPOLISHED,
    PairVectors,
    hardness_sentence,
    other_packings,
    packed_name,
    packed_pairs,
)
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.report import Details, Plot, Section
from raytriever.reports.table import Table
from retrieval.vectors import StoredVectors
from tests.unit.small_run import BATCH_SIZE, PAIRS, make, make_run


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


def read_masks(reader: BatchReader) -> Iterator[tuple[NDArray[np.bool_], float]]:
    for number in range(reader.number_of_batches(0)):
        yield mask_of(reader.read(0, number))


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
    assert list(other_packings(packed, None, packing, seed=3)) == [RANDOM, RANDOM_IN_DOMAIN]


def test_hardness_of_packed_batches_is_equation_2(run: dict[str, str], packing: Artifact) -> None:
    pairs, vectors = Artifact(run["pairs"]), StoredVectors(run["vectors"])
    queries, documents = (np.load(vectors.path(f"{part}/00000.npy")).astype(float) for part in ("queries", "documents"))
    rows = read_pairs(pairs, ["query_row", "document_row"]).to_pydict()
    of_pairs = PairVectors(pairs, vectors)
    reader = BatchReader(run["batches"])
    chosen = np.arange(reader.number_of_batches(0))
    masked = 0
    for batch, number, (mask, share) in zip(packed_pairs(packing), chosen, read_masks(reader), strict=True):
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
    masks = (mask for mask, _ in read_masks(BatchReader(run["batches"])))
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
    table = tables(section)[-1]
    assert table.rows[-1][:3] == ["all rules", f"{counted}", f"{counted / negatives:.2%}"]
    assert [row[0] for row in table.rows[:-1]] == list(RULES)
    assert sum(int(str(row[1])) for row in table.rows[:-1]) == counted


@pytest.mark.parametrize(
    ("names", "plots"),
    [
        (("packing",), 0),  # the tours' lengths
        (("packing", "pairs", "clusters"), 0),
        (("pairs", "vectors", "clusters"), None),
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


@pytest.fixture(scope="module")
def polished(run: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    inputs = {name: run[name] for name in ("clusters", "pairs", "vectors")}
    settings = PackingSettings(batch_size=BATCH_SIZE, polish_sweeps=2)
    folder = tmp_path_factory.mktemp("polished") / "packing"
    return Artifact(make(Pack(PackConfig(**inputs, packing=settings, output=str(folder)))))


def test_a_polished_packing_is_shown_beside_the_same_one_without_swaps(
    run: dict[str, str], packing: Artifact, polished: Artifact
) -> None:
    domains = read_clusters(Artifact(run["clusters"]))
    found = other_packings(packed_pairs(polished), domains, polished, seed=0)
    assert list(found) == [RANDOM, RANDOM_IN_DOMAIN, RANDOM_CLUSTERS, UNPOLISHED]
    np.testing.assert_array_equal(found[UNPOLISHED], packed_pairs(packing))  # of the same seed and clusters
    of_pairs = PairVectors(Artifact(run["pairs"]), StoredVectors(run["vectors"]))
    before, after = (
        np.mean([of_pairs.hardness(batch) for batch in batches])
        for batches in (found[UNPOLISHED], packed_pairs(polished))
    )
    assert after > before
    polish = polished.shards[0].facts["polish"]
    assert polish["hardness_before"] == pytest.approx(before, abs=1e-3)
    assert polish["hardness_after"] == pytest.approx(after, abs=1e-3)


def test_batches_of_another_packing_are_not_taken_for_this_ones(run: dict[str, str], polished: Artifact) -> None:
    vectors, pairs = StoredVectors(run["vectors"]), Artifact(run["pairs"])
    section = batches_section(polished, pairs, vectors, None, BatchReader(run["batches"]), 1000, 0)
    assert section is not None
    assert MASKED not in [row[0] for row in tables(section)[0].rows]


def test_a_packing_without_clusters_is_called_what_it_is(run: dict[str, str], tmp_path: Path) -> None:
    def packed(name: str, **settings: bool) -> Artifact:
        packing = PackingSettings(batch_size=BATCH_SIZE, order="random", **settings)
        return Artifact(make(Pack(PackConfig(pairs=run["pairs"], packing=packing, output=str(tmp_path / name)))))

    within, across = packed("within"), packed("across", mix_domains=True)
    assert packed_name(within) == f"as packed: {RANDOM_IN_DOMAIN}"
    assert packed_name(across) == "as packed: random across domains"
    assert list(other_packings(packed_pairs(across), None, across, 0)) == [RANDOM]
    vectors, pairs = StoredVectors(run["vectors"]), Artifact(run["pairs"])
    assert batches_section(across, pairs, vectors, None, None, 1000, 0) is not None


def test_a_sample_of_the_batches_says_so(run: dict[str, str]) -> None:
    section = batches_section(None, None, None, None, BatchReader(run["batches"]), 5, 0)
    assert section is not None
    assert "24 batches of 4 pairs" in section.lead
    assert "Of epoch 0, 5 batches drawn at random are looked at here." in section.lead
    assert "Each of the 5 batches looked at is of one domain" in str(section.blocks[0])


def test_wholly_masked_batches_are_pointed_out() -> None:
    assert "In 1 batch every negative is, which leaves nothing to learn from." in masked_sentence(np.array([0.1, 1.0]))


def test_examples_of_masks_are_those_of_the_audit(run: dict[str, str]) -> None:
    section = section_of(run, "batches")
    assert section is not None
    examples = {block.summary: block.content for block in section.blocks if isinstance(block, Details)}
    audit = Artifact(run["batches"]).read_json("audit.json")["rules"]
    found = {rule: audit[rule]["examples"] for rule in RULES if audit[rule]["examples"]}
    assert found
    assert list(examples) == [f"Examples: masked by {rule}" for rule in found]
    for rule, of_rule in found.items():
        table = examples[f"Examples: masked by {rule}"]
        assert isinstance(table, Table)
        for row, example in zip(table.rows, of_rule, strict=True):
            assert list(row[:3]) == [example[name] for name in ("query", "positive", "document")]
            assert row[4:] == [f"{example[name]:.3f}" for name in ("positive_score", "score")]
    rules = tables(section)[-1]
    assert [row[3] for row in rules.rows[:-1]] == [f"{audit[rule]['batches']}" for rule in RULES]
