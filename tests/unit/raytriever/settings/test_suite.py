"""A suite as the stages of a recipe."""

import re
from pathlib import Path
from typing import Any

import pytest

from raytriever.errors import UserError
from raytriever.settings.recipe import load_recipe, recipe_names
from raytriever.stages.recipe_run import recipe_stages

SUITE = """
output: out
suite:
  with_title: false
  evaluate: {like: beir, measures: [nDCG@10]}
  collections:
    arguana: {source: {kind: beir, path: data/arguana}, encoder: {query_prompt: "claim: "}}
    android: {source: {kind: beir, path: data/android}, group: cqadupstack, evaluate: {split: dev}}
    msmarco:
      source: {kind: beir, path: data/msmarco}
      columns: {dl19: {split: dl2019}, dl20: {split: dl2020, measures: [R(rel=2)@100]}}
  systems:
    BM25: {bm25: {k1: 0.82}, top_k: 90, published: revela/1/BM25}
    base: {encoder: {model: org/base}, index: {factory: Flat}, top_k: 50, resources: {workers: 2}}
    tuned: {encoder: {model: org/tuned}, documents: base, search_parameters: nprobe=3}
    BM25 + tuned: {fuse: {systems: [BM25, tuned], rank_constant: 9}, top_k: 7}
    reranked: {rerank: {candidates: BM25, by: tuned}}
"""


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return load_recipe(write(tmp_path_factory.mktemp("suite"), SUITE), []).stages


def test_each_collection_is_read_once_and_indexed_once_by_each_system(stages: dict[str, Any]) -> None:
    whole, dense = "arguana/collection", {"query_prompt": "claim: "}
    of_collection = {"collection": whole, "with_title": False}
    expected = {
        whole: {"job": "collect", "source": {"kind": "beir", "path": "data/arguana"}},
        "arguana/BM25/index": {"job": "index", "index": {"kind": "lexical", "bm25": {"k1": 0.82}} | of_collection},
        "arguana/BM25/run": {"job": "search", "index": "arguana/BM25/index", "top_k": 90},
        "arguana/base/vectors": {"job": "embed", "encoder": {"model": "org/base"} | dense, "resources": {"workers": 2}},
        "arguana/base/index": {
            "job": "index", "index": {"kind": "vectors", "vectors": "arguana/base/vectors", "factory": "Flat"},
        },
        "arguana/base/run": {
            "job": "search", "index": "arguana/base/index", "top_k": 50, "vectors": "arguana/base/vectors",
            "search_parameters": "",
        },
        # of queries alone: it searches the documents of base
        "arguana/tuned/vectors": {"job": "embed", "encoder": {"model": "org/tuned"} | dense, "parts": ["queries"]},
        "arguana/tuned/run": {
            "job": "search", "index": "arguana/base/index", "top_k": 200, "vectors": "arguana/tuned/vectors",
            "search_parameters": "nprobe=3",
        },
        "arguana/BM25_tuned/run": {
            "job": "fuse", "runs": {"BM25": "arguana/BM25/run", "tuned": "arguana/tuned/run"}, "rank_constant": 9,
            "depth": 7,
        },
        "arguana/reranked/run": {
            "job": "rerank", "run": "arguana/BM25/run", "vectors": "arguana/base/vectors", "collection": whole,
            "depth": 90, "top_k": 200, "query_vectors": "arguana/tuned/vectors",
        },
        "arguana/evaluation": {"job": "evaluate", "collection": whole, "like": "beir", "measures": ["nDCG@10"]},
    }  # fmt: skip
    runs = {"BM25": "BM25", "base": "base", "tuned": "tuned", "BM25 + tuned": "BM25_tuned", "reranked": "reranked"}
    expected["arguana/evaluation"]["runs"] = {system: f"arguana/{folder}/run" for system, folder in runs.items()}
    for stage in expected.values():
        stage |= {"embed": of_collection | {"splits": ["test"]}}.get(stage["job"], {})  # queries that are searched
        stage |= {"search": {"collection": whole, "split": "test"}}.get(stage["job"], {})
    found = {name: stage for name, stage in stages.items() if name.startswith("arguana/")}
    assert found == expected
    assert list(found) == list(expected)  # in the order they run
    assert stages["msmarco/base/vectors"]["splits"] == ["dl2019", "dl2020"]
    assert stages["android/BM25/run"]["split"] == stages["android/evaluation"]["split"] == "dev"


def test_a_reranker_with_documents_of_its_own_reads_as_many_as_its_candidates_have(tmp_path: Path) -> None:
    by_base = "suite.systems.reranked.rerank={candidates: tuned, by: base}"
    stage = load_recipe(write(tmp_path, SUITE), [by_base]).stages["arguana/reranked/run"]
    assert (stage["vectors"], stage["depth"]) == ("arguana/base/vectors", 200)
    assert "query_vectors" not in stage
    with pytest.raises(UserError, match="would be 'collection', which is taken"):
        load_recipe(write(tmp_path, SUITE), ["suite.systems.collection={bm25: {}}"])


def test_a_context_is_fitted_to_each_collection(tmp_path: Path) -> None:
    encoder = "suite.systems.base.encoder={model: org/contextual}"
    context = "suite.systems.base.context={documents: 5}"
    stages = load_recipe(write(tmp_path, SUITE), [encoder, context]).stages
    assert stages["arguana/base/context"] == {
        "job": "context", "collection": "arguana/collection",
        "encoder": {"model": "org/contextual", "query_prompt": "claim: "},
        "with_title": False, "resources": {"workers": 2}, "documents": 5,
    }  # fmt: skip
    assert stages["android/base/vectors"]["context"] == "android/base/context"


def test_splits_of_one_collection_are_columns(stages: dict[str, Any]) -> None:
    names = [name for name in stages if name.startswith("msmarco/BM25/")]
    assert names == ["msmarco/BM25/index", "msmarco/BM25/dl19/run", "msmarco/BM25/dl20/run"]
    assert stages["msmarco/BM25/dl20/run"]["split"] == "dl2020"
    assert stages["msmarco/dl20/evaluation"]["measures"] == ["R(rel=2)@100"]
    table = stages["table"]
    assert list(table["evaluations"]) == ["arguana", "android", "dl19", "dl20"]
    assert table["groups"] == {"cqadupstack": ["android"]}
    assert table["published"] == {"BM25": "revela/1/BM25"}


def test_a_column_is_of_the_queries_of_a_domain_where_nothing_is_judged(tmp_path: Path) -> None:
    dl19 = "suite.collections.msmarco.columns.dl19={search: {split: null, domain: dl}, answer_match: regex}"
    stages = load_recipe(write(tmp_path, SUITE), [dl19, "suite.collections.msmarco.columns.dl20=null"]).stages
    run, evaluation = stages["msmarco/BM25/dl19/run"], stages["msmarco/dl19/evaluation"]
    assert (run["split"], run["domain"], evaluation["answer_match"]) == (None, "dl", "regex")
    assert "search" not in evaluation
    assert "splits" not in stages["msmarco/base/vectors"]
    assert list(stages["table"]["evaluations"]) == ["arguana", "android", "dl19"]


def test_rankings_of_another_tool_are_measured_and_ranked_anew(tmp_path: Path) -> None:
    columns = ("arguana", "android", "dl19", "dl20")
    files = "{files: {" + ", ".join(f"{name}: runs/{name}.trec" for name in columns) + "}}"
    changes = [f"suite.systems.BM25={files}", "suite.systems.BM25 + tuned=null", "suite.folder=here/"]
    stages = load_recipe(write(tmp_path, SUITE), changes).stages
    assert stages["arguana/collection"]["source"] == {"kind": "beir", "path": "here/arguana"}
    assert "arguana/BM25/index" not in stages
    assert stages["arguana/evaluation"]["runs"]["BM25"] == "runs/arguana.trec"
    assert stages["msmarco/reranked/dl20/run"]["run"] == "runs/dl20.trec"


def test_a_recipe_ends_in_the_suite_of_another_with_systems_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, SUITE, "suite.yaml")
    mine = """
    based_on: quickstart
    until: model
    suite:
      from: suite.yaml
      collections: {msmarco: null, android: null}
      systems: {base: {encoder: {model: model}}, reranked: null}
    """
    recipe = load_recipe(write(tmp_path, mine), ["suite.systems.BM25.bm25.b=0.5", "suite.top_k=7"])
    names = list(recipe.stages)
    assert names[names.index("model") + 1] == "arguana/collection"
    assert "model_vectors" not in names
    assert recipe.stages["arguana/base/vectors"]["encoder"]["model"] == "model"
    assert recipe.stages["arguana/BM25/index"]["index"]["bm25"] == {"k1": 0.82, "b": 0.5}
    assert recipe.stages["arguana/tuned/run"]["top_k"] == 7
    for text, said in (
        ("suite: {from: quickstart}", r"suite\.from is 'quickstart', and Recipe quickstart has no suite"),
        ("stages: {arguana: {job: collect}}" + SUITE, "'arguana' is a stage, and the suite has a folder of this name"),
    ):
        with pytest.raises(UserError, match=said):
            load_recipe(write(tmp_path, text), [])
    stage = recipe_stages(recipe)["arguana/base/vectors"]
    assert stage.config.encoder.model == recipe.folder("model")  # type: ignore[attr-defined]


def test_the_systems_of_a_recipe_are_measured_on_another_suite(tmp_path: Path) -> None:
    write(tmp_path, SUITE, "base.yaml")
    write(tmp_path, "suite: {collections: {c: {source: {kind: beir, path: c}}}, systems: {BM25: {bm25: {}}}}", "c.yaml")
    mine = "based_on: quickstart\nuntil: model\nsuite: {from: base.yaml}"
    write(tmp_path, mine, "first.yaml")
    second = "based_on: first.yaml\nsuite: {from: c.yaml, systems: {tuned: {top_k: 3}, reranked: null}}"
    stages = load_recipe(write(tmp_path, second, "second.yaml"), []).stages
    assert list(stages["table"]["evaluations"]) == ["c"]
    assert list(stages["c/evaluation"]["runs"]) == ["BM25", "base", "tuned", "BM25 + tuned"]
    assert "like" not in stages["c/evaluation"]
    assert stages["c/tuned/run"]["top_k"] == 3


@pytest.mark.parametrize(("override", "said"), [
    ("suite.systems.reranked.rerank.by=tuend", "rerank.by is 'tuend', which is no system above it. Did you mean"),
    ("suite.systems.reranked.rerank.by=BM25", "rerank.by is 'BM25', which has no encoder. Name a system with one"),
    ("suite.systems.BM25={files: {arguana: a, android: b, dl19: c, dl20: d}}", "'BM25', rankings of another tool: th"),
    ("suite.systems.base.bm25={}", "a system has one of bm25, encoder, fuse, rerank, files: name exactly one"),
    ("suite.systems.BM25.context={}", "context belongs to an encoder"),
    ("suite.collections.arguana.source=null", "collection 'arguana' has no source, and the suite no folder"),
    ("suite.collections.a/b={}", "a collection is called 'a/b'; letters, digits, _ and - are allowed"),
    ("suite.systems.BM25+tuned={bm25: {}}", "the folder of system 'BM25 + tuned' would be"),
    ("suite.systems.BM25.published=revela/1/BM52", "no row 'BM52' of revela/1 is kept. Did you mean 'BM25'?"),
    ("suite.systems.BM25.published=coder/1/BM25", "but nothing of it is measured here. Choose another row"),
    ("suite.topk=3", "'topk' is not a setting. Did you mean 'top_k'?"),
    ("suite.collections.android.columns={arguana: {}}", "two columns are called 'arguana'"),
    ("suite.collections.android.columns={../v1: {}}", "a column is called '../v1'; letters, digits, _ and -"),
    ("suite.systems.reranked={files: {arguana: a.trec}}", "no ranking for column 'android'. Name its file"),
    ("suite=3", "'suite' is 3; a mapping with collections and systems was expected"),
])  # fmt: skip
def test_what_is_wrong_is_named_before_anything_is_computed(tmp_path: Path, override: str, said: str) -> None:
    def check() -> None:
        stages = recipe_stages(load_recipe(write(tmp_path, SUITE), [override]))
        stages["table"].check_settings(stages)

    with pytest.raises(UserError) as raised:
        check()
    assert said in str(raised.value)


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("suites/")])
def test_collections_of_a_suite_that_comes_along_are_pinned(name: str) -> None:
    stages = recipe_stages(load_recipe(name, []))
    for stage in stages.values():
        if stage.command == "collect" and "://" in (path := stage.config.source.path):  # type: ignore[attr-defined]
            assert re.fullmatch(r"hf://datasets/[\w-]+/[\w-]+@[0-9a-f]{40}", path)
    if "table" in stages:  # of MTEB there is none
        stages["table"].check_settings(stages)
