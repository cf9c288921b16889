"""How long each command takes on a toy, as its user waits for it: ``python -m benchmarks.commands``.

``--beside TREE``: another checkout, whose commands run in turn with this one's, by the same interpreter; the table then
has both medians and their ratio. Every run is a process of its own; jobs write to a new folder each time.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_RECIPE = [
    *("run", "contextual_batches", "--set", "corpus.source.path=toy", "--set", "packing.packing.batch_size=8"),
    *("--set", f"vectors.encoder.model={_MODEL}", "--set", "clusters.cluster_size=8"),
    *("--set", "clusters.smallest_domain=8"),
]
_INDEX = ["index", "--set", "index.kind=lexical", "--set", "index.collection=corpus"]
_SEARCH = ["search", "--set", "index=index", "--set", "collection=corpus", "--set", "split=test", "--set", "top_k=10"]
_FUSE = ["fuse", "--set", "runs.one=found", "--set", "runs.two=found"]
_EVALUATE = ["evaluate", "--set", "collection=corpus", "--set", "split=test", "--set", "runs.one=found"]
_COLLECT = ["collect", "--set", "source.kind=beir"]

# what is made once for those that read it, and what is timed: a name, the arguments, and whether it writes an output
_MADE = {
    "corpus": [*_COLLECT, "--set", "source.path=toy"],
    "index": _INDEX,
    "found": _SEARCH,
    "evaluation": _EVALUATE,
    "finished": _RECIPE,
}
_TIMED: dict[str, tuple[list[str], bool]] = {
    "--help": (["--help"], False),
    "settings train": (["settings", "train"], False),
    "run quickstart --print-config": (["run", "quickstart", "--print-config"], False),
    "run of a finished recipe": ([*_RECIPE, "--output", "finished"], False),
    "show of a batch": (["show", "finished/batches"], False),
    "verify": (["verify", "finished/batches"], False),
    "run of a recipe, 60 documents": (_RECIPE, True),
    "collect, 6 documents": ([*_COLLECT, "--set", "source.path=six"], True),
    "index, BM25": (_INDEX, True),
    "search": (_SEARCH, True),
    "fuse": (_FUSE, True),
    "evaluate, 20 queries": (_EVALUATE, True),
    "report": (["report", "--set", "evaluation=evaluation", "--set", "collection=corpus"], True),
}


def write_toy(folder: Path, documents: int) -> None:
    """A collection in BEIR form with a query for each document, two thirds of them to train on."""
    (folder / "qrels").mkdir(parents=True)
    texts = [f"Document {number} tells of the number {number} and of {number * number}." for number in range(documents)]
    corpus = [{"_id": f"d{number}", "title": "", "text": text} for number, text in enumerate(texts)]
    queries = [{"_id": f"q{number}", "text": f"what tells of {number}"} for number in range(documents)]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    cut = documents * 2 // 3
    for split, numbers in (("train", range(cut)), ("test", range(cut, documents))):
        rows = "".join(f"q{number}\td{number}\t1\n" for number in numbers)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")


def _run(tree: Path, folder: Path, arguments: list[str], output: str | None) -> float:
    """Seconds of one command in ``folder`` by the code of ``tree``."""
    if output is not None:
        named = ["--output", output] if arguments[0] == "run" else ["--set", f"output={output}"]
        arguments = [*arguments, *named]
    environment = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "raytriever", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"raytriever {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds


def measure(trees: list[Path], runs: int, folder: Path) -> dict[str, list[float]]:
    """The median seconds of each command by each of the trees, which take turns."""
    places = []
    for number, tree in enumerate(trees):
        place = folder / str(number)
        for name, documents in (("toy", 60), ("six", 6)):
            write_toy(place / name, documents)
        for name, arguments in _MADE.items():
            _run(tree, place, arguments, name)
        places.append((tree, place))
    found = {}
    for name, (arguments, writes) in _TIMED.items():
        seconds: list[list[float]] = [[] for _ in trees]
        for _ in range(runs):
            for of_tree, (tree, place) in zip(seconds, places, strict=True):
                of_tree.append(_run(tree, place, arguments, "made" if writes else None))
                shutil.rmtree(place / "made", ignore_errors=True)
        found[name] = [statistics.median(of_tree) for of_tree in seconds]
        print(f"{name:32}" + "".join(f"{median:8.2f} s" for median in found[name]), flush=True)
    return found


def main() -> None:
    """Prints the table as Markdown behind the progress."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    trees = [*([arguments.beside.resolve()] if arguments.beside else []), ROOT]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(trees, arguments.runs, Path(folder))
    print("\n| command | " + ("before, s | after, s | ratio |" if len(trees) > 1 else "s |"))
    print("| --- |" + " --- |" * (3 if len(trees) > 1 else 1))
    for name, medians in found.items():
        cells = [f"{median:.2f}" for median in medians]
        cells += [f"{medians[1] / medians[0]:.2f}"] if len(medians) > 1 else []
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
