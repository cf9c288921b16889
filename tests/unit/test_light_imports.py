"""What a command imports: what computes is imported where it computes, so that every other command answers at once."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from raytriever.jobs import COMMANDS, JOBS
from raytriever.settings.recipe import load_recipe, recipe_names
from raytriever.stages.recipe_run import check_before_run, recipe_stages, run_recipe
from tests.unit.small_run import make_collection

ROOT = Path(__file__).parents[2]
HEAVY = {
    "bm25s", "duckdb", "faiss", "ir_measures", "matplotlib", "mteb", "pandas", "peft", "ray", "scipy",
    "sentence_transformers", "sklearn", "torch", "transformers",
}  # fmt: skip
_CODE = """
import contextlib, json, sys
from raytriever.cli import app
heavy, commands = map(json.loads, sys.argv[1:])
found = []
for command in commands:
    with contextlib.redirect_stdout(sys.stderr):
        app(command, standalone_mode=False)
    found.append(sorted({name.partition(".")[0] for name in sys.modules} & set(heavy)))
print(json.dumps(found))
"""


def loaded_by(folder: Path, commands: Sequence[Sequence[str]]) -> dict[str, set[str]]:
    """The heavy packages that commands load which a fresh interpreter runs one after another, by command."""
    ended = subprocess.run(
        [sys.executable, "-c", _CODE, json.dumps(sorted(HEAVY)), json.dumps(commands)],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    before, found = set[str](), {}
    for command, loaded in zip(commands, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        found[" ".join(command)] = set(loaded) - before
        before |= set(loaded)
    return found


def write_recipe(folder: Path, stages: dict[str, Any]) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output": str(folder / "run"), "stages": stages}, sort_keys=False))
    return str(path)


def without_torch(folder: Path) -> dict[str, Any]:
    """Stages whose work is done without it."""
    make_collection(folder)
    stages: dict[str, Any] = yaml.safe_load(f"""
    collection: {{job: collect, source: {{kind: beir, path: {folder}/source}}}}
    pairs: {{job: pairs, collection: collection}}
    packing: {{job: pack, pairs: pairs, packing: {{batch_size: 4, order: random}}, small_domains: merge_all}}
    batches: {{job: filter, packing: packing, pairs: pairs, collection: collection,
               false_negatives: {{surrogate_score: false}}}}
    index: {{job: index, index: {{kind: lexical, collection: collection}}}}
    found: {{job: search, index: index, collection: collection}}
    fused: {{job: fuse, runs: {{once: found, twice: found}}}}
    evaluation: {{job: evaluate, collection: collection, runs: {{BM25: found, fused: fused}}}}
    report: {{job: report, pairs: pairs, batches: batches, evaluation: evaluation}}
    """)
    return stages


def test_settings_and_plans_import_nothing_that_computes(tmp_path: Path) -> None:
    helps = [[name, "--help"] for name in COMMANDS if name != "estimate"]  # which counts what torch computes
    settings = [["settings", job] for job in JOBS]
    recipes = [["run", name, "--print-config"] for name in recipe_names()]
    found = loaded_by(tmp_path, [["--help"], *helps, *settings, ["settings", "--schema"], *recipes])
    assert {command: loaded for command, loaded in found.items() if loaded} == {}
    assert not list(tmp_path.iterdir())  # nothing is read or written


def test_stages_import_what_they_compute_with(tmp_path: Path) -> None:
    stages = without_torch(tmp_path)
    recipe = write_recipe(tmp_path, stages)
    found = list(loaded_by(tmp_path, [["run", recipe, "--until", name] for name in stages]).values())
    loaded = {name: sorted(of_stage - {"pandas"}) for name, of_stage in zip(stages, found, strict=True)}
    needed = {"collection": ["duckdb"], "index": ["bm25s", "scipy"], "evaluation": ["ir_measures"]}
    needed |= {"report": ["matplotlib"]}
    assert {name: of_stage for name, of_stage in loaded.items() if of_stage} == needed  # pyarrow loads pandas itself


def test_a_finished_run_is_reused_by_its_manifests_alone(tmp_path: Path, tiny_encoder: Path) -> None:
    encoder, collection = {"model": str(tiny_encoder), "pooling": "mean"}, {"collection": "collection"}
    stages = without_torch(tmp_path)
    del stages["report"]
    stages |= {
        "model": {
            "job": "train", "batches": "batches", "encoder": encoder, "objective": {"kind": "contrastive"},
            "training": {"max_steps": 2}, "validation": {"kind": "retrieval", **collection, "split": "test"},
        },
        "vectors": {"job": "embed", **collection, "encoder": {"model": "model"}},
        "vector_index": {"job": "index", "index": {"kind": "vectors", "vectors": "vectors", "factory": "SQfp16"}},
        "trained": {"job": "search", **collection, "index": "vector_index", "vectors": "vectors"},
        "reranked": {"job": "rerank", **collection, "run": "found", "vectors": "vectors"},
        "report": {"job": "report", "model": "model", "evaluation": "evaluation"},
    }  # fmt: skip
    recipe = write_recipe(tmp_path, stages)
    loaded = load_recipe(recipe, [], None)
    run_recipe(recipe_stages(loaded), list(stages), loaded.name, loaded.output, shards_here=True)
    made = tmp_path / "run"
    alone = ["embed", *(f"--set={key}={value}" for key, value in (
        ("collection", made / "collection"), ("encoder.model", made / "model"), ("output", made / "vectors"),
    ))]  # fmt: skip
    commands = [["run", recipe], alone, ["show", str(made / "batches")], ["verify", str(made)]]
    found = loaded_by(tmp_path, commands)
    assert {command: packages for command, packages in found.items() if packages} == {}


def test_what_is_finished_is_not_checked_again(tmp_path: Path) -> None:
    stages = without_torch(tmp_path)
    recipe = write_recipe(tmp_path, stages)
    loaded = load_recipe(recipe, [], None)
    names = ["collection", "pairs", "packing"]
    assert check_before_run(recipe_stages(loaded), names) == set()
    run_recipe(recipe_stages(loaded), names, loaded.name, loaded.output, shards_here=True)
    assert check_before_run(recipe_stages(loaded), names) == set(names)
    changed = load_recipe(recipe, ["pairs.split=test"], None)  # and so is what is made of them
    assert check_before_run(recipe_stages(changed), names) == {"collection"}
    (tmp_path / "run" / "packing" / "manifest.json").unlink()
    assert check_before_run(recipe_stages(loaded), names) == {"collection", "pairs"}
