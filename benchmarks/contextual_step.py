"""The second stage of a contextual encoder against straightforward formulations of it, MiniLM, tokenised before.

    python -m benchmarks.contextual_step exact ../data/squad_dpr
    python -m benchmarks.contextual_step blocks ../data/squad_dpr
    python -m benchmarks.contextual_step corpus ../data/squad_dpr

``exact``: forward and backward pass of a batch, as many queries as passages of at most 64 tokens, behind 64 context
vectors, in chunks of 32; the straightforward side gives whole sequences, every text padded to 64 tokens, to the model's
own layers. A third side has its texts in the same chunks as ours, so that what is left is the second stage alone.
``blocks``: a forward and backward pass of texts of just 64 tokens behind 512 context vectors that read only each other,
against the model as the paper has it, where they read the text too. ``corpus``: embedding passages of up to 512 tokens
behind 64 vectors that are kept, against the same encoder without context. The sides take turns whose order alternates;
the medians of the rounds' ratios count. ``exact`` also prints how far the sides' vectors and gradients are apart.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.training_pairs import MODEL, read_pairs
from retrieval.encoders.contextual.encoder import ContextualEncoder
from retrieval.encoders.contextual.folder import contextual_from
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import ContextualForm, EncoderSettings, Role
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from trainers.engine.gradient_cache import Chunks, cut_by_length, encode_chunks

CHUNK = 32


def encoder_of(max_length: int, *, in_parts: bool = True, **form: object) -> ContextualEncoder:
    """Around MiniLM without dropout; ``in_parts``: as it is, else by the model's own layers, called as they are."""
    located = locate_model(MODEL)
    settings = EncoderSettings(model=MODEL, max_length=max_length)
    plain = load_encoder(settings, located.path, located.fingerprint, dropout=0.0)
    encoder = contextual_from(plain, ContextualForm.model_validate(form))
    if not in_parts:
        for layer in encoder._backbone.layers:
            layer.forward = layer.forward
    return encoder


def texts_of(encoder: TextEncoder, texts: list[str], role: Role, width: int | None) -> Chunks:
    """In chunks of about one length; ``width``: every text padded to so many tokens, in the order they come."""
    features = encoder.tokenize(texts, role)
    if width is None:
        return cut_by_length(features, CHUNK)
    missing = width - features["input_ids"].shape[1]
    padded = {name: torch.nn.functional.pad(tensor, (0, missing)) for name, tensor in features.items()}
    starts = range(0, len(texts), CHUNK)
    chunks = tuple({name: tensor[start : start + CHUNK] for name, tensor in padded.items()} for start in starts)
    return Chunks(chunks, torch.arange(len(texts)))


def step_of(encoder: ContextualEncoder, sides: list[Chunks], context: Tensor) -> Callable[[], Tensor]:
    """Forward and backward of all texts in one context; gives their vectors."""

    def step() -> Tensor:
        encoder.zero_grad(set_to_none=True)
        prefix = encoder.read_context(context)

        def encode(features: Mapping[str, Tensor]) -> Tensor:
            return encoder.encode(features, prefix)

        vectors = torch.cat([encode_chunks(encode, chunks, cached=False) for chunks in sides])
        (vectors @ torch.linspace(-1, 1, vectors.shape[1])).square().sum().backward()
        return vectors.detach()

    return step


def gradient_of_words(encoder: ContextualEncoder) -> Tensor:
    """A copy, (terms, width), of the last step's."""
    gradient = encoder.transformer.get_parameter("embeddings.word_embeddings.weight").grad
    assert gradient is not None
    return gradient.clone()


def compare(sides: dict[str, Callable[[], Tensor]], rounds: int) -> None:
    """Prints the ratio of every side's time to the first one's."""
    for side in sides.values():
        side()  # the first of each starts threads
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            started = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - started)
        print("  ".join(f"{name} {seconds[name][-1]:.2f} s" for name in names), flush=True)
    for name in names[1:]:
        ratio = np.median(np.array(seconds[name]) / np.array(seconds[names[0]]))
        print(f"{name} / {names[0]}: {ratio:.3f} (median of {rounds}), {torch.get_num_threads()} thread(s)")


def exact(texts: dict[Role, list[str]], batch_size: int, rounds: int) -> None:
    """Length 64, 64 vectors."""
    encoders = {"ours": encoder_of(64), "straightforward": encoder_of(64, in_parts=False)}
    vectors = encoders["ours"].embed_context(texts["document"][-64:])
    chosen: dict[Role, list[str]] = {role: found[:batch_size] for role, found in texts.items()}
    steps = {}
    for name, of, width in (
        ("ours", "ours", None),
        ("straightforward, padded", "straightforward", 64),
        ("straightforward, same chunks", "straightforward", None),
    ):
        encoder = encoders[of]
        sides = [texts_of(encoder, each, role, width) for role, each in chosen.items()]
        if name == "ours":
            tokens = [int(c["attention_mask"].sum()) for s in sides for c in s.chunks]
            print(f"{sum(tokens) / sum(map(len, chosen.values())):.1f} tokens a text")
        steps[name] = step_of(encoder, sides, vectors)
    found = steps["ours"]()
    gradient = gradient_of_words(encoders["ours"])
    for name in list(steps)[1:]:
        apart = (steps[name]() - found).abs().max()
        other = gradient_of_words(encoders["straightforward"])
        print(
            f"{name}: vectors {apart:.1e}, gradients {(other - gradient).abs().max() / gradient.abs().max():.1e} apart"
        )
    compare(steps, rounds)


def blocks(texts: dict[Role, list[str]], batch_size: int, rounds: int) -> None:
    """Length 64, 512 vectors."""
    ours = encoder_of(64, prefix_attends="prefix")
    theirs = encoder_of(64, in_parts=False)
    vectors = ours.embed_context(texts["document"][-512:])
    long = [text for text in texts["document"] if len(ours.tokenize_ids([text], "document")[0]) == 64][:batch_size]
    print(f"{len(long)} texts of 64 tokens, {len(vectors)} vectors")
    steps = {
        "blocks": step_of(ours, [texts_of(ours, long, "document", None)], vectors),
        "all attend": step_of(theirs, [texts_of(theirs, long, "document", None)], vectors),
    }
    compare(steps, rounds)


def corpus(texts: dict[Role, list[str]], batch_size: int, rounds: int) -> None:
    """Length 512, 64 vectors."""
    plain, contextual = encoder_of(512).eval(), encoder_of(512).eval()
    passages = [" ".join(texts["document"][start : start + 5]) for start in range(0, 5 * batch_size, 5)]
    contextual.use_context(contextual.embed_context(texts["document"][-64:]))
    chunks = cut_by_length(contextual.tokenize(passages, "document"), 8)

    def embed(encode: Callable[[Mapping[str, Tensor]], Tensor]) -> Callable[[], Tensor]:
        @torch.inference_mode()
        def run() -> Tensor:
            return encode_chunks(encode, chunks, cached=False)

        return run

    without = embed(lambda features: TextEncoder.forward(plain, features))
    print(f"{sum(int(c['attention_mask'].sum()) for c in chunks.chunks) / len(passages):.0f} tokens a passage")
    compare({"without context": without, "with context": embed(contextual)}, rounds)


def main() -> None:
    """Measures one comparison, in one thread by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=("exact", "blocks", "corpus"))
    parser.add_argument("folder", type=Path, help="a BEIR folder with training judgments")
    parser.add_argument("--batch-size", type=int, default=256, help="queries or passages")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = read_pairs(arguments.folder, 2048)
    texts: dict[Role, list[str]] = {"query": rows["query"].to_pylist(), "document": rows["document"].to_pylist()}
    measure = {"exact": exact, "blocks": blocks, "corpus": corpus}[arguments.comparison]
    measure(texts, arguments.batch_size, arguments.rounds)


if __name__ == "__main__":
    main()
