"""Several BEIR folders as one, each a domain: what a probe of batches over many domains is run on.

    python -m benchmarks.mixed_collection ../shared/data/squad_dpr ../shared/data/conala --output /tmp/mixed

Ids get the folder's name before them, texts and judgments stay. Of a folder's training judgments at most ``--pairs``
are taken, evenly over the file; of the test split (dev, where there is none) all, at most ``--test-queries`` queries.
Of documents that nothing of this judges at most ``--other-documents`` are taken of a folder, the first ones.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Judgment = tuple[str, str, int]


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=6_000)
    parser.add_argument("--test-queries", type=int, default=500)
    parser.add_argument("--other-documents", type=int, default=sys.maxsize)
    arguments = parser.parse_args()
    (arguments.output / "qrels").mkdir(parents=True)
    splits: dict[str, list[Judgment]] = {"train": [], "test": []}
    for folder in arguments.folders:
        train = [judgment for judgment in judgments(folder / "qrels" / "train.tsv") if judgment[2] > 0]
        held_out = list(judgments(next(folder / "qrels" / f"{split}.tsv" for split in test_splits(folder))))
        asked = set(spread(list(dict.fromkeys(query for query, _, _ in held_out)), arguments.test_queries))
        splits["train"] += prefixed(folder.name, spread(train, arguments.pairs))
        splits["test"] += prefixed(folder.name, (judgment for judgment in held_out if judgment[0] in asked))
    judged = {name for split in splits.values() for query, document, _ in split for name in (query, document)}
    for name, found in splits.items():
        with (arguments.output / "qrels" / f"{name}.tsv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(["query-id", "corpus-id", "score"])
            writer.writerows(found)
    for name in ("corpus", "queries"):
        with (arguments.output / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for folder in arguments.folders:
                others = arguments.other_documents if name == "corpus" else 0
                for record in records(folder / f"{name}.jsonl", folder.name):
                    if record["_id"] in judged or others > 0:
                        others -= record["_id"] not in judged
                        file.write(json.dumps(record, ensure_ascii=False) + "\n")
    print(f"{len(splits['train']):,} training pairs of {len(arguments.folders)} domains in {arguments.output}")


def test_splits(folder: Path) -> Iterator[str]:
    """Those that are there, the best first."""
    return (split for split in ("test", "dev") if (folder / "qrels" / f"{split}.tsv").is_file())


def judgments(path: Path) -> Iterator[Judgment]:
    """Query, document and grade of each line."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            yield row["query-id"], row["corpus-id"], int(float(row["score"]))


def prefixed(domain: str, found: Iterable[Judgment]) -> list[Judgment]:
    """With ids as they are in the folder that is written."""
    return [(f"{domain}-{query}", f"{domain}-{document}", grade) for query, document, grade in found]


def spread(items: list[Item], limit: int) -> list[Item]:
    """At most so many, evenly over the list."""
    count = min(limit, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def records(path: Path, domain: str) -> Iterator[dict[str, Any]]:
    """Those of a file with prefixed ids and their domain."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            yield record | {"_id": f"{domain}-{record['_id']}", "metadata": {"domain": domain}}


if __name__ == "__main__":
    main()
