"""What the report says of batches, and what is drawn of them in a terminal and on a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines import batch_description
from pipelines.batch_description import show, text_vectors
from pipelines.batches import BatchReader
from pipelines.filtering.false_negatives import RULES, batch_hardness
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.jobs.row_batches import Lists, ListsConfig
from pipelines.packing.pack import PackingSettings
from pipelines.pairs.pairs import read_pairs
from pipelines.reports import batches as drawn
from pipelines.reports.data import sample_of
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.reports.report import Details, Plot, Section
from raytriever.reports.table import Table
from retrieval.vectors import StoredVectors
from tests.unit.pipelines.jobs.batch_inputs import make_candidates, make_vectors
from tests.unit.pipelines.jobs.made_up import collection_of
from tests.unit.pipelines.jobs.test_export import stored
from tests.unit.pipelines.reports.test_data import tables
from tests.unit.small_run import BATCH_SIZE, PAIRS, make

Run = dict[str, str]
SEED = 3


@pytest.fixture(scope="module")
def packing(small_run: Run) -> Artifact:
    return Artifact(small_run["packing"])


def section_of(run: dict[str, str], *names: str) -> Section | None:
    artifacts = {name: Artifact(run[name]) for name in names}
    vectors = StoredVectors(run["vectors"]) if "vectors" in names else None
    batches = BatchReader(run["batches"]) if "batches" in names else None
    return drawn.batches_section(artifacts.get("packing"), artifacts.get("pairs"), vectors, batches, 1000, SEED)


def read_masks(reader: BatchReader) -> Iterator[NDArray[np.bool_]]:
    for number in range(reader.number_of_batches(0)):
        yield drawn.mask_of(reader.read(0, number))[:, :BATCH_SIZE]


def test_packed_pairs_are_those_stored_and_random_ones_of_their_domains(small_run: Run, packing: Artifact) -> None:
    reader = BatchReader(small_run["batches"])
    pairs = read_pairs(Artifact(small_run["pairs"]), ["query_id", "domain"])
    packed = drawn.packed_pairs(packing)
    assert len(packed) == reader.number_of_batches(0)
    for number, batch in enumerate(packed):
        assert reader.read(0, number)["query_id"].to_pylist() == pairs["query_id"].take(batch).to_pylist()
    batches = drawn.random_packing(packed, packing, 0, SEED)
    assert batches.shape == packed.shape
    assert not np.array_equal(batches, packed)
    assert not np.array_equal(batches, drawn.random_packing(packed, packing, 0, SEED + 1))
    np.testing.assert_array_equal(np.sort(batches, axis=None), np.sort(packed, axis=None))
    domain_of = np.array(pairs["domain"].to_pylist(), dtype=object)
    assert (domain_of[batches] == domain_of[packed]).all()


def test_hardness_of_packed_batches_is_equation_2(small_run: Run, packing: Artifact) -> None:
    pairs, vectors = Artifact(small_run["pairs"]), StoredVectors(small_run["vectors"])
    rows = read_pairs(pairs, ["query_row", "document_row"])
    sides = [
        np.load(vectors.path(f"{part}/00000.npy"))[rows[of].to_numpy()]
        for part, of in (("queries", "query_row"), ("documents", "document_row"))
    ]
    of_pairs = drawn.stored_pairs(pairs, vectors)
    masks = list(read_masks(BatchReader(small_run["batches"])))
    for batch, mask in zip(drawn.packed_pairs(packing), masks, strict=True):
        queries, documents = (side[batch].astype(np.float32) for side in sides)
        for left_out in (None, mask):
            expected = batch_hardness(queries=queries, documents=documents, mask=left_out)
            assert drawn.hardness_of(of_pairs, batch, left_out) == pytest.approx(expected, abs=1e-6)
    assert np.any(masks)


def test_the_section_tells_the_means_of_every_packing(small_run: Run, packing: Artifact) -> None:
    section = section_of(small_run, "packing", "pairs", "vectors", "batches")
    rows = {str(row[0]): row for row in tables(section)[1].rows}
    assert list(rows) == [drawn.PACKED, drawn.RANDOM, drawn.MASKED]
    of_pairs = drawn.stored_pairs(Artifact(small_run["pairs"]), StoredVectors(small_run["vectors"]))
    values = np.array([drawn.hardness_of(of_pairs, batch) for batch in drawn.packed_pairs(packing)])
    shown = [f"{len(values)}", f"{values.mean():.4f}", f"{values.std(ddof=1):.4f}"]
    assert rows[drawn.PACKED][1:4] == shown
    few = drawn.hardness(packing, of_pairs, None, 2, SEED)[drawn.PACKED]
    np.testing.assert_array_equal(few, values[sample_of(len(values), 2, SEED)])
    masks = read_masks(BatchReader(small_run["batches"]))
    packed = zip(drawn.packed_pairs(packing), masks, strict=True)
    left = np.mean([drawn.hardness_of(of_pairs, *both) for both in packed])
    assert f"{left:.4f}" != f"{values.mean():.4f}"
    assert rows[drawn.MASKED][2] == f"{left:.4f}"
    random = drawn.random_packing(drawn.packed_pairs(packing), packing, 0, SEED)
    of_random = [drawn.hardness_of(of_pairs, batch) for batch in random]
    assert rows[drawn.RANDOM][2] == f"{np.mean(of_random):.4f}"
    assert rows[drawn.PACKED][-1] == f"{np.count_nonzero(values > max(of_random))}"
    quantities = dict(tables(section)[0].rows)
    assert quantities["epochs packed"] == "2"
    assert quantities["packed batches of an epoch"] == f"{PAIRS // BATCH_SIZE}"
    assert quantities["pairs of a packed batch"] == f"{BATCH_SIZE}"


def test_stored_batches_and_their_masks_are_counted_over_all_epochs(small_run: Run) -> None:
    section = section_of(small_run, "batches")
    assert dict(tables(section)[0].rows) == {
        "epochs of stored batches": "2", "stored batches": "24", "pairs of a stored batch": "4",
    }  # fmt: skip
    reader = BatchReader(small_run["batches"])
    batches = [reader.read(*divmod(number, PAIRS // BATCH_SIZE)) for number in range(len(reader))]
    counted = sum(len(row) for batch in batches for row in batch["masked"].to_pylist())
    negatives = 2 * PAIRS * (BATCH_SIZE - 1)
    *rules, all_rules = tables(section)[-1].rows
    assert all_rules[:3] == ("all rules", f"{counted}", f"{counted / negatives:.3%}")
    assert [row[0] for row in rules] == list(RULES)
    assert sum(int(str(row[1])) for row in rules) == counted
    audit = Artifact(small_run["batches"]).read_json("audit.json")["rules"]
    assert [row[3] for row in rules] == [f"{audit[rule]['batches']}" for rule in RULES]


@pytest.mark.parametrize(("names", "first_cells"), [
    (("packing",), ["quantity"]),
    (("packing", "pairs"), ["quantity"]),
    (("pairs", "vectors"), None),
    (("packing", "pairs", "vectors"), ["quantity", "batches"]),
    (("packing", "pairs", "vectors", "batches"), ["quantity", "batches", "masked by"]),
    (("pairs", "vectors", "batches"), ["quantity", "masked by"]),
    (("batches",), ["quantity", "masked by"]),
])  # fmt: skip
def test_what_is_absent_is_left_out(small_run: Run, names: tuple[str, ...], first_cells: list[str] | None) -> None:
    section = section_of(small_run, *names)
    assert (None if section is None else [table.header[0] for table in tables(section)]) == first_cells


def test_a_sample_is_seeded_distinct_and_all_where_it_can_be() -> None:
    np.testing.assert_array_equal(sample_of(5, 5, 0), np.arange(5))
    chosen = sample_of(1000, 10, 0)
    assert len(np.unique(chosen)) == 10
    np.testing.assert_array_equal(chosen, sample_of(1000, 10, 0))
    assert not np.array_equal(chosen, sample_of(1000, 10, 1))


@pytest.fixture(scope="module")
def polished(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    inputs = {name: small_run[name] for name in ("clusters", "pairs", "vectors")}
    settings = PackingSettings(batch_size=BATCH_SIZE, polish_sweeps=2)
    folder = tmp_path_factory.mktemp("polished") / "packing"
    return Artifact(make(Pack(PackConfig(**inputs, packing=settings, output=str(folder)))))


def test_a_polish_makes_batches_harder(small_run: Run, packing: Artifact, polished: Artifact) -> None:
    of_pairs = drawn.stored_pairs(Artifact(small_run["pairs"]), StoredVectors(small_run["vectors"]))
    # the packing is of the same seed and clusters
    before, after = (
        np.mean([drawn.hardness_of(of_pairs, batch) for batch in drawn.packed_pairs(each)])
        for each in (packing, polished)
    )
    assert after > before


def test_another_packing_has_no_masks(small_run: Run, polished: Artifact) -> None:
    vectors, pairs = StoredVectors(small_run["vectors"]), Artifact(small_run["pairs"])
    section = drawn.batches_section(polished, pairs, vectors, BatchReader(small_run["batches"]), 1000, 0)
    assert drawn.MASKED not in [row[0] for row in tables(section)[1].rows]


def test_batches_of_candidate_lists_are_counted(tmp_path: Path) -> None:
    stored = collection_of(tmp_path, ["one", "two"], [("", f"text {n}") for n in range(4)], [(0, 0), (1, 1)])
    lists: dict[int, list[tuple[int, int | None]]] = {0: [(0, 2), (2, None)], 1: [(1, 1), (3, 0)]}
    candidates = make_candidates(tmp_path / "candidates", stored, lists, form="labelled_lists")
    output = str(tmp_path / "batches")
    batches = make(
        Lists(ListsConfig(candidates=candidates, collection=stored, batch_size=2, order="random", output=output))
    )
    section = drawn.batches_section(None, None, None, BatchReader(batches), 1000, 0)
    assert dict(tables(section)[0].rows)["queries of a stored batch"] == "2"


def vectors_of(run: dict[str, str], part: Any, ids: list[str]) -> np.ndarray:
    """Of texts whose ids end in their rows."""
    return StoredVectors(run["vectors"]).part(part).gather(np.array([int(id_[1:]) for id_ in ids]))


def test_the_section_draws_one_batch_with_its_texts_and_examples_of_each_rule(small_run: Run) -> None:
    section = section_of(small_run, "packing", "pairs", "vectors", "batches")
    assert section is not None
    (plot,) = (block for block in section.blocks if isinstance(block, Plot))
    assert plot.caption.startswith("batch 0 of epoch 0 (")
    folded = {block.summary: block.content for block in section.blocks if isinstance(block, Details)}
    reader = BatchReader(small_run["batches"])
    texts = str(folded["Texts of this batch"])
    assert all(query.split()[0] in texts for query in reader.read(0, 0)["query"].to_pylist())
    examples = folded["Examples of what each rule masked"]
    assert isinstance(examples, Table)
    audit = reader.artifact.read_json("audit.json")["rules"]
    assert {row[0] for row in examples.rows} == {rule for rule, found in audit.items() if found["negatives"]}


def test_the_larger_a_similarity_the_darker_and_masked_cells_are_marked() -> None:
    scores = np.array([[1, -1, 0], [0.5, 1, -0.5]], np.float32)
    mask = np.array([[False, False, True], [False, False, False]])
    head, *lines = batch_description.matrix_lines(scores, mask)
    assert head == "similarities of 2 queries and their documents, from -1.00 to 1.00 (██); xx: masked"
    assert lines == ["    ██  xx", "    ▓▓██░░"]
    assert [len(line) for line in batch_description.matrix_lines(np.ones((90, 180)), np.zeros((90, 180), bool))][
        1:
    ] == [84] * 40


def test_show_draws_a_batch_with_its_own_documents_on_the_diagonal(small_run, tmp_path, capsys, monkeypatch) -> None:
    seen: list[np.ndarray] = []
    monkeypatch.setattr(
        batch_description, "matrix_lines", lambda scores, mask: seen.extend((scores, mask)) or ["drawn"]
    )
    vectors = StoredVectors(small_run["vectors"])
    first = vectors.part("queries").ids()[:1]
    np.testing.assert_array_equal(text_vectors(vectors, "queries", first), vectors_of(small_run, "queries", ["q0"]))
    page = tmp_path / "page.html"
    show(small_run["batches"], 1, 0, small_run["vectors"], page)
    assert capsys.readouterr().out.endswith("\n\ndrawn\n")
    rows = BatchReader(small_run["batches"]).read(0, 1)
    queries = vectors_of(small_run, "queries", rows["query_id"].to_pylist())
    documents = vectors_of(small_run, "documents", rows["document_id"].to_pylist())
    np.testing.assert_allclose(seen[0], queries @ documents.T, atol=1e-6)
    assert [np.flatnonzero(row).tolist() for row in seen[1]] == [sorted(row) for row in rows["masked"].to_pylist()]
    text = page.read_text(encoding="utf-8")
    assert text.count("batch 1 of epoch 0 (12 batches), 4 examples") == 3  # title, heading, plot
    assert text.count("<svg") == 1
    assert "data:image/png;base64" in text


def test_a_matrix_that_cannot_be_drawn_is_refused(small_run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(UserError, match="needs batches of pairs and --vectors"):
        show(small_run["batches"], html=page)
    with pytest.raises(UserError, match="does not hold one vector for each of the batch's documents"):
        show(stored(tmp_path / "other").uri, vectors=small_run["vectors"], html=page)
    several = make_vectors(tmp_path / "several", small_run["collection"], *np.ones((2, 90, 2, 8)))
    with pytest.raises(UserError, match="does not hold one vector for each of the batch's documents"):
        show(small_run["batches"], vectors=several, html=page)
    some = make_vectors(tmp_path / "some", small_run["collection"], np.ones((90, 8)), np.ones((90, 8)), some=True)
    with pytest.raises(UserError, match="holds only vectors of a ranking's texts"):
        show(small_run["batches"], vectors=some, html=page)
    with pytest.raises(UserError, match="needs batches of pairs"):
        show(stored(tmp_path / "chunks", "chunks").uri, vectors=small_run["vectors"])
    assert not page.exists()
