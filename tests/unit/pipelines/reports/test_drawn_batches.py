"""What is drawn of stored batches: one's matrix of similarities in a terminal and on a page, all in a card's chart."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from pipelines.batch_description import show
from pipelines.batches import BatchReader
from pipelines.jobs.export import Export, ExportConfig
from pipelines.packing.hardness import batch_hardness
from pipelines.reports import batches as drawn
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.vectors import StoredVectors
from tests.unit.pipelines.jobs.test_export import stored
from tests.unit.small_run import BATCH_SIZE, make


def vectors_of(run: dict[str, str], part: Any, ids: list[str]) -> np.ndarray:
    """Of texts whose ids end in their rows."""
    return StoredVectors(run["vectors"]).part(part).gather(np.array([int(id_[1:]) for id_ in ids]))


def test_the_larger_a_similarity_the_darker_and_masked_cells_are_marked() -> None:
    scores = np.array([[1, -1, 0], [0.5, 1, -0.5]], np.float32)
    mask = np.array([[False, False, True], [False, False, False]])
    head, *lines = drawn.matrix_lines(scores, mask)
    assert head == "similarities of 2 queries and their documents, from -1.00 to 1.00 (██); xx: masked"
    assert lines == ["    ██  xx", "    ▓▓██░░"]
    assert [len(line) for line in drawn.matrix_lines(np.ones((90, 180)), np.zeros((90, 180), bool))][1:] == [84] * 40


def test_show_draws_a_batch_with_its_own_documents_on_the_diagonal(small_run, tmp_path, capsys, monkeypatch) -> None:
    seen: list[np.ndarray] = []
    monkeypatch.setattr(drawn, "matrix_lines", lambda scores, mask: seen.extend((scores, mask)) or ["drawn"])
    page = tmp_path / "page.html"
    show(small_run["batches"], 1, 0, small_run["vectors"], page)
    assert capsys.readouterr().out.endswith("\n\ndrawn\n")
    rows = BatchReader(small_run["batches"]).read(0, 1)
    queries = vectors_of(small_run, "queries", rows["query_id"].to_pylist())
    documents = vectors_of(small_run, "documents", rows["document_id"].to_pylist())
    np.testing.assert_allclose(seen[0], queries @ documents.T, atol=1e-6)
    assert [np.flatnonzero(row).tolist() for row in seen[1]] == [sorted(row) for row in rows["masked"].to_pylist()]
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "data:image/png;base64" in text


def test_a_matrix_that_cannot_be_drawn_is_refused(small_run: dict[str, str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with pytest.raises(UserError, match="one of batches of pairs and of --vectors"):
        show(small_run["batches"], html=page)
    with pytest.raises(UserError, match="does not hold one vector for each of the batch's documents"):
        show(stored(tmp_path / "other").uri, vectors=small_run["vectors"], html=page)
    with pytest.raises(UserError, match="one of batches of pairs"):
        show(stored(tmp_path / "chunks", "chunks").uri, vectors=small_run["vectors"])
    assert not page.exists()


@pytest.mark.parametrize("names", [(), ("collection", "pairs", "vectors", "clusters", "packing")])
def test_a_card_shows_masks_and_with_vectors_hardness(small_run, tmp_path, monkeypatch, names) -> None:
    panels: list[Any] = []
    draw = drawn.curve_panels
    monkeypatch.setattr(drawn, "curve_panels", lambda found, text: panels.extend(found) or draw(found, text))
    made_from = {name: small_run[name] for name in names}
    settings = {"batches": small_run["batches"], "format": "hugging_face", "order": "stored", "made_from": made_from}
    made = Artifact(make(Export(ExportConfig.model_validate(settings | {"output": str(tmp_path / "out")}))))
    assert "(batches.svg)" in made.path("README.md").read_text(encoding="utf-8")
    assert ElementTree.parse(made.path("batches.svg")).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    reader = BatchReader(small_run["batches"])
    batches = [reader.read(0, number) for number in range(reader.number_of_batches(0))]
    cells = BATCH_SIZE * (BATCH_SIZE - 1)
    masked = [[set(row) for row in batch["masked"].to_pylist()] for batch in batches]
    assert panels[0].values.tolist() == [sum(map(len, of_batch)) / cells for of_batch in masked]
    assert sum(panels[0].values) > 0
    if not names:
        assert len(panels) == 1
        return
    for hardness, batch in zip(panels[1].values, batches, strict=True):
        queries = vectors_of(small_run, "queries", batch["query_id"].to_pylist())
        documents = vectors_of(small_run, "documents", batch["document_id"].to_pylist())
        mask = drawn.mask_of(batch)[:, :BATCH_SIZE]
        assert hardness == pytest.approx(batch_hardness(queries=queries, documents=documents, mask=mask), abs=1e-6)
