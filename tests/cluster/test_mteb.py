"""An evaluation by MTEB whose stages run on Ray."""

from pathlib import Path

import pytest

from raytriever.stages.ray_session import RaySession
from retrieval.jobs.mteb_search import RaytrieverSearch
from tests.unit.retrieval.mteb_tasks import Flight, StoredEncoder, evaluate, save_encoder

pytest.importorskip("faiss", reason="FAISS is not installed")


def test_mteb_evaluates_our_stages(session: RaySession, tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "encoder")
    embed = {"encoder": {"model": model, "dtype": "float32"}}
    index = {"index": {"kind": "vectors", "shards": 2}}
    search = RaytrieverSearch(str(tmp_path), embed=embed, index=index, session=session)
    scores = evaluate(search, Flight())
    folder = tmp_path / "Flight" / "default" / "test"
    expected = evaluate(StoredEncoder(model, folder), Flight())
    assert scores["ndcg_at_10"] == pytest.approx(expected["ndcg_at_10"], abs=1e-6)
    assert (folder / "run" / "run.trec").exists()
