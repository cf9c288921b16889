"""The numbers of trec_eval, BEIR, MTEB and CoIR, by their own code or by what it does, on runs that tell them apart."""

import copy
import re
from typing import Any

import numpy as np
import pytest

from retrieval.evaluation import measures
from retrieval.evaluation.conventions import CONVENTIONS, Conventions, Like, describe_system, resolve, title_warning
from retrieval.evaluation.measures import evaluate
from tests.unit.retrieval.real_data import real_qrels

pytrec_eval = pytest.importorskip("pytrec_eval")

Grades = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]
OURS = ("nDCG@10", "AP@100", "R@100", "P@5")
THEIRS = ("ndcg_cut_10", "map_cut_100", "recall_100", "P_5")


def awkward(qrels: Grades, seed: int = 0) -> Run:
    """A run with ties, the queries' own ids among the results, a query too few, one too many and one without results.

    The scores are float32, as every encoder's.
    """
    generator = np.random.default_rng(seed)
    queries = sorted(qrels)
    documents = sorted({document for grades in qrels.values() for document in grades})
    run: Run = {}
    for query in queries[:-1]:
        judged = qrels[query]
        found = {*generator.choice(documents, min(60, len(documents)), replace=False).tolist(), *list(judged)[:40]}
        found |= {query} if generator.random() < 0.5 else set()
        levels = generator.integers(0, 12, len(found)) / np.float32(7)
        places = zip(sorted(found), levels, strict=True)
        scores = {name: level + 0.4 * (judged.get(name, 0) > 0) for name, level in places}
        run[query] = {name: float(np.float32(scores[name])) for name in generator.permutation(sorted(scores)).tolist()}
    run[queries[0]] = {queries[0]: 1.0}  # of which nothing is left where own ids are removed
    run["nobody judged this"] = {documents[0]: 1.0}
    return run


def made_up() -> Grades:
    """Grades from -1 to 3; documents and queries share their ids; one query has no positive."""
    generator = np.random.default_rng(5)
    qrels = {
        f"d{query}": {f"d{document}": int(generator.integers(-1, 4)) for document in generator.permutation(80)[:30]}
        for query in range(25)
    }
    qrels["d7"] = dict.fromkeys(qrels["d7"], 0)
    return qrels


@pytest.fixture(params=["made up", "cranfield/qrels/test.tsv", "trec_dl_qrels_only/qrels/dl2020.tsv"])
def qrels(request: pytest.FixtureRequest) -> Grades:
    return made_up() if request.param == "made up" else real_qrels(request.param)


def beir(qrels: Grades, run: Run) -> dict[str, float]:
    """What beir.retrieval.evaluation.EvaluateRetrieval.evaluate does, and coir's copy of it."""
    run = copy.deepcopy(run)
    for query, found in run.items():
        found.pop(query, None)
    scores = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "map_cut.100", "recall.100", "P.5"}).evaluate(run)
    return {name: round(sum(values[name] for values in scores.values()) / len(scores), 5) for name in THEIRS}


@pytest.mark.parametrize("like", ["beir", "coir"])
def test_beir_and_coir(qrels: Grades, like: Like) -> None:
    run = awkward(qrels)
    ours = evaluate(qrels, run, OURS, CONVENTIONS[like])
    assert {theirs: round(ours.mean(name), 5) for name, theirs in zip(OURS, THEIRS, strict=True)} == beir(qrels, run)
    plain = evaluate(qrels, run, OURS, CONVENTIONS["trec"])
    assert plain.mean("nDCG@10") != pytest.approx(ours.mean("nDCG@10"), abs=1e-4)  # so the test can tell


def test_mteb(qrels: Grades) -> None:
    pytest.importorskip("mteb")
    from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores

    run = awkward(qrels)
    run.pop("nobody judged this")  # MTEB searches judged queries only
    theirs = calculate_retrieval_scores(run, qrels, [5, 10, 100])
    ours = evaluate(qrels, run, [*OURS, "RR@10", "Success@5"], CONVENTIONS["mteb"])
    expected = {
        "nDCG@10": theirs.ndcg["NDCG@10"], "AP@100": theirs.map["MAP@100"], "R@100": theirs.recall["Recall@100"],
        "P@5": theirs.precision["P@5"], "Success@5": theirs.hit_rate["HitRate@5"],
    }  # fmt: skip
    assert {name: round(ours.mean(name), 5) for name in expected} == expected
    assert ours.mean("RR@10") == pytest.approx(theirs.mrr["MRR@10"], abs=1e-6)
    place = {query: number for number, query in enumerate(ours.query_ids)}
    assert set(theirs.all_scores) == {query for query in run if query in qrels}
    for query, values in theirs.all_scores.items():
        assert ours.values["nDCG@10"][place[query]] == pytest.approx(values["ndcg_cut_10"], abs=1e-6)
        assert ours.values["AP@100"][place[query]] == pytest.approx(values["map_cut_100"], abs=1e-6)


@pytest.mark.parametrize("level", [1, 2])
def test_trec_eval_over_the_complete_set(qrels: Grades, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """trec_eval -c -l level: sums over the queries of both, divided by the number of queries in the qrels."""
    monkeypatch.setattr(measures, "_QUERIES_AT_ONCE", 17)
    run = awkward(qrels)
    names = {
        "nDCG@10": "ndcg_cut_10", "nDCG": "ndcg", f"AP(rel={level})": "map", f"R(rel={level})@100": "recall_100",
        f"RR(rel={level})": "recip_rank", f"P(rel={level})@5": "P_5", f"Success(rel={level})@5": "success_5",
        f"Rprec(rel={level})": "Rprec", f"AP(rel={level})@5": "map_cut_5",
    }  # fmt: skip
    asked = {"ndcg_cut.10", "ndcg", "map", "recall.100", "recip_rank", "P.5", "success.5", "Rprec", "map_cut.5"}
    scores = pytrec_eval.RelevanceEvaluator(qrels, asked, relevance_level=level).evaluate(run)
    ours = evaluate(qrels, run, list(names), CONVENTIONS["trec"])
    for name, theirs in names.items():
        assert ours.mean(name) == pytest.approx(sum(v[theirs] for v in scores.values()) / len(qrels), abs=1e-6), name
    for index, query in enumerate(ours.query_ids):
        for name, theirs in names.items():
            expected = scores[query][theirs] if query in scores else 0.0
            assert ours.values[name][index] == pytest.approx(expected, abs=1e-6), name


def test_single_switches_are_laid_over_a_tools_and_a_system_is_a_line() -> None:
    changed = resolve("beir", Conventions(self_hits="keep"))
    assert changed == CONVENTIONS["beir"].model_copy(update={"self_hits": "keep"})
    assert resolve("mteb", Conventions()) == CONVENTIONS["mteb"]
    assert {c.ties for c in CONVENTIONS.values()} == {"document_id_descending"}
    system = {"index": "flat", "with_title": False, "query_prompt": "", "pooling": "mean", "max_length": None}
    assert describe_system(system) == "index 'flat', with_title False, query_prompt '', pooling 'mean'"
    assert describe_system({}) == "title and prompts unknown, the ranking does not say"


@pytest.mark.parametrize(("title", "system", "expected"), [
    ("either", {"with_title": True}, None),
    ("used", {"with_title": True}, None),
    ("left_out", {"with_title": False}, None),
    ("left_out", {}, None),
    ("left_out", {"with_title": True}, "with their titles, and 'coir' leaves it out.*with_title=false"),
    ("used", {"with_title": False}, "without their titles, and 'coir' uses it.*with_title=true"),
])  # fmt: skip
def test_a_title_that_should_not_be_there_is_told(title: Any, system: dict[str, Any], expected: str | None) -> None:
    warning = title_warning("mine", system, title, "coir")
    assert (warning is None) == (expected is None)
    if expected is not None:
        assert re.search(f"'mine' read documents {expected}", str(warning))
