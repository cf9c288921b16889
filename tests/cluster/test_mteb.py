"""An evaluation by MTEB whose stages run on Ray."""

from pathlib import Path

import pytest

from raytriever.retrieval.jobs.cluster import RaySession
from raytriever.retrieval.jobs.mteb_search import RaytrieverSearch
from raytriever.retrieval.mteb_encoder import RaytrieverEncoder
from tests.unit.retrieval.mteb_tasks import Flight, evaluate

pytest.importorskip("faiss", reason="FAISS is not installed")


def test_mteb_evaluates_our_stages(tiny_encoder: Path, session: RaySession, tmp_path: Path) -> None:
    settings = {"model": str(tiny_encoder), "dtype": "float32"}
    index = {"index": {"kind": "vectors", "shards": 2}}
    search = RaytrieverSearch(str(tmp_path), embed={"encoder": settings}, index=index, session=session)
    scores = evaluate(search, Flight())
    expected = evaluate(RaytrieverEncoder(str(tiny_encoder), dtype="float32"), Flight())
    assert scores["ndcg_at_10"] == pytest.approx(expected["ndcg_at_10"], abs=1e-4)
    assert (tmp_path / "Flight" / "default" / "test" / "run" / "run.trec").exists()
