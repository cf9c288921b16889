"""Every real collection reads, with the counts that its description gives."""

import os
from collections import Counter
from pathlib import Path

import pytest

from pipelines.formats.beir import BeirFolder
from raytriever.errors import UserError
from retrieval.collections.collection import passage_text
from tests.unit.retrieval.collections.contents import contents, dropped

# documents, queries, judgments of each split
COUNTS = {
    "cranfield": (1398, 225, {"test": 1836}),
    "cystic_fibrosis": (1239, 99, {"test": 4812}),
    "nfcorpus_filtered": (3395, 3210, {"train": 110075, "dev": 11385, "test": 12334}),
    "cisi": (1460, 76, {"test": 3114}),
    "cacm": (3204, 52, {"test": 796}),
    "npl_vaswani": (11429, 93, {"test": 2083}),
    "medquad_liveqa": (15808, 14404, {"train": 15268, "dev": 1089, "test": 382}),
    "squad_dpr": (1474, 7194, {"train": 5417, "dev": 825, "test": 952}),
    "nq_qed": (1343, 1355, {"train": 798, "dev": 145, "test": 412}),
    "stackexchange_qa": (6160, 2628, {"train": 4243, "dev": 636, "test": 1277}),
    "climate_fever_sent": (5240, 1534, {"train": 4645, "dev": 715, "test": 2310}),
    "pubmedqa": (1000, 1000, {"train": 451, "dev": 49, "test": 500}),
    "cosqa": (6267, 1070, {"train": 570, "dev": 500}),
    "conala": (2811, 2760, {"train": 2090, "dev": 277, "test": 494}),
    "mbpp": (972, 971, {"train": 381, "dev": 90, "test": 504}),
}


@pytest.fixture
def data() -> Path:
    folder = os.environ.get("RAYTRIEVER_TEST_DATA")
    if not folder:
        pytest.skip("RAYTRIEVER_TEST_DATA does not name a folder of BEIR collections")
    return Path(folder)


@pytest.mark.parametrize("name", COUNTS)
def test_real_collection(data: Path, name: str) -> None:
    source = BeirFolder(path=str(data / name)).open()
    documents, queries, judgments = contents(source)
    assert (len(documents), len(queries), Counter(split for *_, split in judgments)) == COUNTS[name]
    assert all(passage_text(title, text) for _, title, text, _ in documents)
    assert contents(source, bytes_per_shard=50_000) == (documents, queries, judgments)
    assert dropped(source) == {}


def test_domains_of_a_real_collection(data: Path) -> None:
    source = BeirFolder(path=str(data / "stackexchange_qa"), domain_key="site").open()
    documents, queries, _ = contents(source)
    domains = {row[3] for row in documents}
    assert len(domains) == 7
    assert {row[2] for row in queries} == domains


@pytest.mark.parametrize("name", ["trec_dl_qrels_only", "raw_wikipedia"])
def test_folders_without_a_corpus_are_refused(data: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"lacks corpus\.jsonl"):
        BeirFolder(path=str(data / name)).open()
