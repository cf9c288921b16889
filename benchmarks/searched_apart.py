"""A finished probe's ways, measured where each domain has an index of its own.

    python -m benchmarks.searched_apart runs/probe/probe --collection runs/probe/corpus

A probe searches all documents of its collection for each query. Here its static encoders are trained again, and a query
is searched among the documents of its own domain, which is the id's part before the first "-", as
``benchmarks.mixed_collection`` writes ids. Prints for each way the mean over domains of their nDCG@10, over seeds.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.probe_and_transformers import batches_of
from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact
from retrieval.collections.collection import StoredCollection, TextPart, text_columns, texts_of
from retrieval.encoders.pretrained import locate_named
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.static import TokenTable
from retrieval.encoders.text_encoder import load_encoder
from retrieval.evaluation.judging import collection_judgments
from retrieval.evaluation.measures import evaluate
from retrieval.indexes.exact_search import exact_top_k
from retrieval.indexes.top_k import Ranking
from retrieval.rankings import ranking_by_ids
from trainers.jobs.probe import TRIALS
from trainers.probe.token_lists import TokenLists
from trainers.probe.trial import encode, read_epoch, train

_DEPTH, _MEASURE = 10, "nDCG@10"


def domains_of(ids: Iterable[str]) -> NDArray[np.str_]:
    """The domain of each id."""
    return np.array([name.partition("-")[0] for name in ids])


def measured_apart(
    table: TokenTable,
    collection: StoredCollection,
    tokens: Mapping[TextPart, TokenLists],
    judged: Mapping[str, Any],
    of_documents: NDArray[np.str_],
) -> dict[str, float]:
    """nDCG@10 of each domain's queries among its documents; ``of_documents`` (documents,): their domains."""
    queries, documents, found = sorted(judged), encode(table, tokens["documents"]), dict[str, float]()
    vectors = encode(table, tokens["queries"].take(collection.require("queries", queries)))
    of_queries = domains_of(queries)
    for domain in np.unique(of_queries).tolist():
        own, places = np.flatnonzero(of_documents == domain), np.flatnonzero(of_queries == domain)
        best = exact_top_k(vectors[places], documents[own], min(_DEPTH, len(own)))
        asked = [queries[place] for place in places]
        run = ranking_by_ids(collection.rows_of("documents"), asked, Ranking(own[best.rows], best.scores))
        found[domain] = evaluate({query: judged[query] for query in asked}, run, [_MEASURE]).mean(_MEASURE)
    return found


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe", help="the folder of a finished probe")
    parser.add_argument("--collection", required=True, help="the probe's")
    parser.add_argument("--encoder", default="sentence-transformers/all-MiniLM-L6-v2", help="the probe's")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    probe, collection = Artifact(arguments.probe), StoredCollection(arguments.collection)
    config = probe.config
    settings = EncoderSettings(model=arguments.encoder, static=True)
    located = locate_named(settings)
    reader: Any = load_encoder(settings, located.path, located.fingerprint)
    first = reader.transformer.embedding.weight.detach()
    how = {"add_special_tokens": False, "truncation": True, "max_length": config["max_length"]}
    parts: tuple[TextPart, TextPart] = ("queries", "documents")
    texts = {part: texts_of(collection.rows_of(part).read(["id", *text_columns(part)]), part) for part in parts}
    tokens: dict[TextPart, TokenLists] = {
        part: TokenLists.of(reader.tokenizer(texts[part], **how)["input_ids"]) for part in parts
    }
    judged = collection_judgments(collection.uri, config["split"], [_MEASURE]).qrels
    learning = config["temperature"], config["learning_rate"]
    of_documents, paths = domains_of(collection.rows_of("documents").read(["id"])["id"].to_pylist()), batches_of(probe)
    for name in filter(paths.get, probe.read_json(TRIALS)["ways"]):  # in the probe's order
        batches, of_seeds, of_domains = BatchReader(paths[name]), [], defaultdict[str, list[float]](list)
        stored = range(min(batches.epochs, config["epochs"]))
        epochs = [read_epoch(batches, epoch, collection, judged) for epoch in stored]
        for seed in range(arguments.seeds):
            table = TokenTable(first.clone())
            train(table, epochs, (tokens["queries"], tokens["documents"]), config["epochs"], seed, *learning)
            found = measured_apart(table, collection, tokens, judged, of_documents)
            of_seeds.append(mean(found.values()))
            for domain, value in found.items():
                of_domains[domain].append(value)
        shown = ", ".join(f"{domain} {mean(values):.3f}" for domain, values in of_domains.items())
        print(f"{name:30} {mean(of_seeds):.4f} ± {stdev(of_seeds):.4f}: {shown}", flush=True)


if __name__ == "__main__":
    main()
