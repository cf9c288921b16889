"""Text of strangers reaches the terminal, the log and JSON without what these would obey."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytriever.cli import app
from raytriever.reports.log import log
from raytriever.stages.ray_session import RaySession

WORDS = ("alpha", "engine", "river", "stone", "bridge", "cloud", "lamp", "paper", "glass", "train", "forest", "winter")
NAME = "\x1b]0;OWNED\x07\x1b[31m\x9b2J\x7f\u202e\u2066"
BAD = f"{NAME}\rhidden"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PAIRS = 48


def write_collection(folder: Path) -> None:
    """Control characters in every field of a BEIR folder."""
    (folder / "qrels").mkdir(parents=True)
    generator = random.Random(0)
    texts = [f"{BAD} {' '.join(generator.choices(WORDS, k=9))} {number}{BAD}" for number in range(PAIRS)]
    documents = [
        {"_id": f"d{NAME}{number}", "title": BAD, "text": text, "metadata": {"domain": f"{NAME}{number % 2}"}}
        for number, text in enumerate(texts)
    ]
    queries = [{"_id": f"q{NAME}{number}", "text": f"{BAD}{text[-30:]}"} for number, text in enumerate(texts)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, numbers in (("train", range(PAIRS - 8)), ("test", range(PAIRS - 8, PAIRS))):
        lines = "".join(f"q{NAME}{number}\td{NAME}{number}\t1\n" for number in numbers)
        (folder / "qrels" / f"{split}.tsv").write_bytes(f"query-id\tcorpus-id\tscore\n{lines}".encode())


RECIPE = """
output: OUTPUT
stages:
  documents: {job: collect, source: {kind: beir, path: SOURCE}}
  pairs: {job: pairs, collection: documents, split: train}
  vectors: {job: embed, collection: documents, encoder: {model: ENCODER, pooling: mean}}
  clusters: {job: cluster, pairs: pairs, vectors: vectors, cluster_size: 8, smallest_domain: 2}
  packing: {job: pack, clusters: clusters, packing: {batch_size: 4}}
  words: {job: index, index: {kind: lexical, collection: documents}}
  dense: {job: index, index: {kind: vectors, vectors: vectors}}
  train_run: {job: search, collection: documents, index: words, split: train, top_k: 20}
  mined: {job: mine, collection: documents, run: train_run, split: train, number: 8}
  batches: {job: filter, collection: documents, packing: packing, pairs: pairs, vectors: vectors, negatives: mined,
            negatives_per_example: 1, too_few_negatives: random}
  by_words: {job: search, collection: documents, index: words, split: test, top_k: 20}
  by_vectors: {job: search, collection: documents, index: dense, vectors: vectors, split: test, top_k: 20}
  evaluation: {job: evaluate, collection: documents, split: test, runs: {words: by_words, vectors: by_vectors}}
  report: {job: report, collection: documents, pairs: pairs, vectors: vectors, clusters: clusters, packing: packing,
           batches: batches, evaluation: evaluation, candidates: mined,
           runs: {words: by_words, vectors: by_vectors}}
"""  # every job that reads texts, ids, titles or domains and trains nothing


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_command_sends_what_a_terminal_obeys(
    form: str, tmp_path: Path, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "handlers", log.handlers)  # restored afterwards
    monkeypatch.setenv("RAYTRIEVER_LOG", form)
    monkeypatch.setattr("raytriever.stages.recipe_run.RaySession", lambda **_: RaySession(shards_here=True))
    monkeypatch.setattr("raytriever.stages.ray_session.RaySession", lambda **_: RaySession(shards_here=True))
    write_collection(tmp_path / "source")
    written = tmp_path / "recipe.yaml"
    run = str(tmp_path / "run")
    named = RECIPE.replace("OUTPUT", run).replace("SOURCE", str(tmp_path / "source"))
    written.write_text(named.replace("ENCODER", str(tiny_encoder)))
    page = str(tmp_path / "page.html")
    again = ["collect", "--set", "source.kind=beir", "--set", f"source.path={tmp_path}/source"]
    commands = {
        ("run", str(written)): 0,
        ("run", str(written), "--print-config"): 0,
        ("show", f"{run}/batches", "--vectors", f"{run}/vectors", "--html", page): 0,
        ("show", f"{run}/batches", "--html", f"{page}.other"): 2,  # of what there would be nothing to draw
        ("ask", run, "river", "--index", "words"): 0,
        ("compare", f"{run}/evaluation"): 0,
        ("verify", run): 0,
        ("show", f"{run}/batches{NAME}"): 2,
        ("--traceback", "verify", f"{run}{NAME}"): 2,
        ("estimate", str(written)): 0,
    }
    with (tmp_path / "source" / "corpus.jsonl").open() as file:
        first = file.readline()
    for command, code in commands.items():
        done = CliRunner().invoke(app, list(command))
        assert done.exit_code == code, done.output
        said = done.stdout + done.stderr
        assert not OBEYED.search(said), (command, said)
        if code == 0 and command[0] in ("show", "ask"):
            assert "\ufffd]0;OWNED\ufffd" in said
    with (tmp_path / "source" / "corpus.jsonl").open("a") as file:
        file.write(first)
    done = CliRunner().invoke(app, [*again, "--set", f"output={tmp_path}/twice"])
    assert done.exit_code == 2
    assert "OWNED" in done.stderr  # the id that is there twice
    assert not OBEYED.search(done.stderr)


def test_a_defect_quotes_nothing_that_a_terminal_obeys() -> None:
    fails = f"""
import os
from raytriever import cli
def fail(): raise RuntimeError({BAD!r} + os.environ["OMP_WAIT_POLICY"])
cli.app = fail
cli.configure_log()
cli.main()
"""
    others = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", fails], capture_output=True, text=True, timeout=60, env=others)
    assert done.returncode == 1
    assert "RuntimeError: \ufffd]0;OWNED" in done.stderr
    assert "PASSIVE" in done.stderr  # threads that wait don't spin
    assert "Traceback" in done.stderr
    assert not OBEYED.search(done.stderr)
