"""What ``benchmarks.gpu_check`` measures beside others: sentence-transformers, plain torch, the bare passes.

All sides of a row run in one process on one device, over the same weights and texts, in turns whose order changes; each
has the median of its rounds. "beside": their seconds over ours, so more than 1 is faster than they are. "of bare": the
share of the tokens a second of a bare pass, the transformer alone over the same padded batches, which lie on the device
beforehand. "busy": the share of the time in which kernels ran. "MFU": 2 operations (embedding) or 6 (training) for each
weight of the blocks' linear layers and each token that isn't padding, over the GPU's peak by its maker's sheet. What
the others can choose (batch size, kernel) is tried first, and the fastest is taken.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_checks import Bench, Finding
from benchmarks.random_encoders import Case, random_batches, random_texts, write_encoder
from benchmarks.training_pairs import Pairs
from pipelines.clustering.kmeans import KMeansSettings, cluster_pairs
from pipelines.clustering.pair_vectors import ArrayPairs
from retrieval.embedding import TOKENS_ON_CPU, TOKENS_ON_GPU, EncoderTurns, encode_texts, token_budget_batches
from retrieval.encoders.attention import last_states
from retrieval.encoders.pretrained import LocatedModel
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from trainers.engine.callback import Callback
from trainers.engine.gradient_cache import Chunks
from trainers.engine.loop import train
from trainers.estimate.machines import flops_per_token
from trainers.objective import Objective, map_nest, to_device
from trainers.run_settings import RunSettings
from trainers.training_run import objective_to_train

ROUNDS = 3
_SAMPLE = 4  # a share of the texts is enough to choose a batch size by, and to profile
_LEAST_COSINE = 0.98
_ALIKE = 0.02  # losses and norms of gradients of both sides' first steps, in bfloat16
_SIZES = (64, 256, 1024)  # texts of a batch of theirs
_MINI_BATCHES: tuple[dict[str, Any], ...] = (
    {"mini_batch_size": 32}, {"mini_batch_size": 128}, {"mini_batch_num_tokens": 16_384},
    {"mini_batch_num_tokens": 65_536},
)  # fmt: skip
_SCALE = 20.0  # of cosines: a temperature of 0.05
_KERNELS_NAMED = 3

Run = Callable[[], Any]


def seconds_of_run(bench: Bench, run: Run) -> float:
    """Until the device has done it."""
    wait(bench)
    started = time.perf_counter()
    run()
    wait(bench)
    return time.perf_counter() - started


def wait(bench: Bench) -> None:
    """For all that the device was given to do."""
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)


def in_turns(bench: Bench, sides: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Seconds of each side, the median over rounds, of which there are fewer where the time is up; one at least."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(ROUNDS):
        started = time.monotonic()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(sides[name]())
        if bench.left() < time.monotonic() - started:
            break
    return {name: median(values) for name, values in seconds.items()}


def fastest(bench: Bench, runs: Mapping[str, Run]) -> str:
    """Which run takes least, each warmed up once. One that the memory doesn't hold, or the time, is left out."""
    seconds: dict[str, float] = {}
    for name, run in runs.items():
        try:
            first = seconds_of_run(bench, run)
            if seconds and bench.left() < 3 * first:
                break
            seconds[name] = seconds_of_run(bench, run)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return min(seconds, key=lambda name: seconds[name])


def kernel_seconds(bench: Bench, run: Run) -> tuple[float, str]:
    """Seconds of all kernels of ``run``, and those that took the most of it, for a note; 0 where there is no GPU."""
    if bench.device.type != "cuda":
        return 0.0, ""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        seconds_of_run(bench, run)
    kernels = sorted(profiled.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels) or 1.0
    first = [f"{each.key[:48]} {each.self_device_time_total / total:.0%}" for each in kernels[:_KERNELS_NAMED]]
    return total / 1e6, "Kernels: " + ", ".join(first) + "."


def mfu(bench: Bench, flops: float, seconds: float) -> dict[str, float]:
    """The share of the GPU's peak in bfloat16 that so many operations reach; nothing of an unknown one."""
    if bench.gpu is None or not bench.bf16:
        return {}
    return {"MFU": flops / seconds / (bench.gpu.peak * 1e12)}


def encoder_of(case: Case, bench: Bench) -> TextEncoder:
    """Ours, as it embeds."""
    folder = write_encoder(case, bench.folder / _folder(case))
    encoder = load_encoder(EncoderSettings(model=str(folder), pooling="mean", normalize=True), folder, "0" * 64)
    return encoder.eval().to(bench.device, torch.bfloat16 if bench.bf16 else torch.float32)


def _folder(case: Case) -> str:
    return f"{case.config['model_type']} {case.config.get('hidden_size', '')} {case.cut}"


def padded_batches(encoder: TextEncoder, texts: Sequence[str], budget: int) -> list[dict[str, Tensor]]:
    """What ``encode_texts`` gives to the encoder, on its device."""
    device = next(encoder.parameters()).device
    ids = encoder.tokenize_ids(texts, "document")
    batches = token_budget_batches([len(row) for row in ids], budget)
    padded = [encoder.pad([ids[index] for index in batch]) for batch in batches]
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in padded]


@torch.inference_mode()
def bare_forward(encoder: TextEncoder, batches: Iterable[Mapping[str, Tensor]]) -> None:
    """The transformer alone."""
    for batch in batches:
        last_states(encoder.transformer, batch)


def check_embedding(name: str, bench: Bench) -> Finding:
    """``encode_texts`` beside ``SentenceTransformer.encode`` in the same precision, and the bare forward pass."""
    from sentence_transformers import SentenceTransformer

    case = bench.size.cases[name]
    ours = encoder_of(case, bench)
    texts = random_texts(case, case.texts, case.document_tokens, seed=0)
    budget = TOKENS_ON_CPU if bench.device.type == "cpu" else TOKENS_ON_GPU
    batches = padded_batches(ours, texts, budget)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    kernels = ["sdpa", *(["flash_attention_2"] if find_spec("flash_attn") and bench.bf16 else [])]
    arguments = {"dtype": next(ours.parameters()).dtype}
    models = {
        kernel: SentenceTransformer(
            str(bench.folder / _folder(case)),
            device=str(bench.device),
            model_kwargs=arguments | {"attn_implementation": kernel},
        )
        for kernel in kernels
    }

    def theirs(kernel: str, size: int, part: Sequence[str]) -> Any:
        return models[kernel].encode(part, batch_size=size, show_progress_bar=False, normalize_embeddings=True)

    measured: Counter[str] = Counter()
    sample = texts[::_SAMPLE]
    choices = {f"{size} texts, {kernel}": (kernel, size) for kernel in kernels for size in _SIZES}
    chosen = fastest(bench, {key: lambda each=each: theirs(*each, sample) for key, each in choices.items()})
    found = encode_texts(ours, texts[:64], "document", token_budget=budget)
    expected = theirs(*choices[chosen], texts[:64])
    apart = [each - np.mean(expected, axis=0) for each in (found, expected)]
    cosines = (apart[0] * apart[1]).sum(axis=1) / np.prod([np.linalg.norm(each, axis=1) for each in apart], axis=0)
    runs: dict[str, Run] = {
        "ours": lambda: encode_texts(ours, texts, "document", token_budget=budget, turns=EncoderTurns(measured)),
        "theirs": lambda: theirs(*choices[chosen], texts),
        "bare": lambda: bare_forward(ours, batches),
    }
    seconds = in_turns(bench, {key: lambda run=run: seconds_of_run(bench, run) for key, run in runs.items()})
    waiting = measured["waiting"] / max(1, measured["waiting"] + measured["encoding"])
    kernels_took, named = kernel_seconds(bench, runs["ours"])
    figures = {
        "tokens/s": tokens / seconds["ours"],
        "their tokens/s": tokens / seconds["theirs"],
        "beside": seconds["theirs"] / seconds["ours"],
        "of bare": seconds["bare"] / seconds["ours"],
        "waiting": waiting,
        **mfu(bench, tokens * flops_per_token(ours) / 3, seconds["ours"]),
        **({"busy": kernels_took / seconds["ours"]} if kernels_took else {}),
        "least cosine": float(cosines.min()),
    }
    absent = "" if len(kernels) > 1 else " FlashAttention 2 isn't installed."
    note = f"{len(texts):,} texts, {tokens:,} tokens; theirs in batches of {chosen}.{absent} {named}"
    return Finding(bool(cosines.min() > _LEAST_COSINE), note.strip(), figures)


class _Watching(Callback):
    """What steps report; those behind the first count, which begins with nothing read ahead."""

    def __init__(self) -> None:
        self.points: list[Mapping[str, Any]] = []

    def on_step(self, point: Mapping[str, Any]) -> None:
        """Keeps what the step reported."""
        self.points.append(dict(point))

    def total(self, key: str) -> float:
        """Over the steps that count."""
        return float(sum(point[key] for point in self.points[1:]))


def check_step(name: str, cached: bool, bench: Bench) -> Finding:
    """Contrastive training beside sentence-transformers' loss, and the bare forward and backward pass.

    Ours is the loop as it trains: batches read, tokenized and moved, metrics. Their texts are tokenized beforehand.
    """
    try:
        return _step_beside(name, cached, bench)
    except torch.OutOfMemoryError:
        return Finding(None, "left out: both sides with this batch don't fit in the GPU's memory")


def _step_beside(name: str, cached: bool, bench: Bench) -> Finding:
    case = bench.size.cases[name]
    folder = write_encoder(case, bench.folder / _folder(case))
    tables = random_batches(case, max(3, bench.size.steps // 8))
    settings = RunSettings.model_validate(
        {
            "batches": "none",
            "encoder": {"model": str(folder), "pooling": "mean"},
            "objective": {"kind": "contrastive", "similarity_temperature": 1 / _SCALE, "gradient_cache": cached},
            "training": {"bf16": bench.bf16, "schedule": {"kind": "constant"}},
        }
    )
    located = {"encoder": LocatedModel(folder, str(folder), "0" * 64)}
    objective = objective_to_train(settings, located, bench.device)
    peer = _Peer(folder, tables, bench, cached=cached)
    start = peer.step(next(iter(peer.losses.values())), peer.batches[0])
    chosen = fastest(
        bench, {key: lambda each=each: peer.step(each, peer.batches[0]) for key, each in peer.losses.items()}
    )
    chunks = _chunks_of(objective, tables[1:], bench)
    memory, watched = _Memory(bench), list[_Watching]()

    def ours() -> float:
        watched.append(_Watching())
        with memory.of("GiB"):
            train(objective, Pairs(tables), settings.training, callbacks=[watched[-1]])
        return watched[-1].total("seconds")

    def theirs() -> float:
        with memory.of("their GiB"):
            peer.step(peer.losses[chosen], peer.batches[0])
            return seconds_of_run(bench, lambda: [peer.step(peer.losses[chosen], batch) for batch in peer.batches[1:]])

    seconds = in_turns(
        bench,
        {
            "ours": ours,
            "theirs": theirs,
            "bare": lambda: seconds_of_run(bench, lambda: bare_passes(objective, chunks, bench)),
        },
    )
    tokens, first = watched[-1].total("tokens"), watched[0].points[0]
    kernels_took, named = kernel_seconds(bench, lambda: train(objective, Pairs(tables), settings.training))
    step_took = seconds["ours"] / len(tables[1:])
    apart = {f"{key.replace('_', ' ')} apart": abs(first[key] / value - 1) for key, value in start.items()}
    figures = {
        "tokens/s": tokens / seconds["ours"],
        "their tokens/s": tokens / seconds["theirs"],
        "beside": seconds["theirs"] / seconds["ours"],
        "of bare": seconds["bare"] / seconds["ours"],
        "waiting": watched[-1].total("waiting_seconds") / watched[-1].total("seconds"),
        **mfu(bench, tokens * flops_per_token(objective), seconds["ours"]),
        **({"busy": kernels_took / len(tables) / step_took} if kernels_took else {}),
        **memory.figures,
        **apart,
    }
    of_step = f"{case.pairs} pairs with a negative, {tokens / len(tables[1:]):,.0f} tokens a step"
    return Finding(max(apart.values()) < _ALIKE, f"{of_step}; theirs: {chosen}. {named}".strip(), figures)


class _Memory:
    """GiB that each side takes beyond what both hold all along; on a GPU."""

    def __init__(self, bench: Bench) -> None:
        self.figures: dict[str, float] = {}
        self._is_counted = bench.device.type == "cuda"
        self._name, self._before = "", 0

    def of(self, name: str) -> "_Memory":
        """Whose it is."""
        self._name = name
        return self

    def __enter__(self) -> None:
        if self._is_counted:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def __exit__(self, *_: object) -> None:
        if self._is_counted:
            self.figures[self._name] = (torch.cuda.max_memory_allocated() - self._before) / 2**30


def _chunks_of(objective: Objective[Any], tables: Sequence[pa.Table], bench: Bench) -> list[dict[str, Tensor]]:
    """What our steps encode, on the device."""
    found: list[dict[str, Tensor]] = []
    for table in tables:
        map_nest(to_device(objective.collate(table), bench.device), Chunks, lambda each: found.extend(each.chunks))
    return found


def bare_passes(objective: Objective[Any], chunks: Iterable[Mapping[str, Tensor]], bench: Bench) -> None:
    """Forward and backward through the transformer alone, chunk by chunk; gradients add up in its weights."""
    transformer = objective.encoder("document").transformer
    transformer.zero_grad(set_to_none=True)
    for chunk in chunks:
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.bf16):
            states = last_states(transformer, chunk)
        states.backward(torch.ones_like(states))
    transformer.zero_grad(set_to_none=True)


class _Peer:
    """sentence-transformers' model, losses to choose from, and a step as its trainer takes it."""

    def __init__(self, folder: Path, tables: Sequence[pa.Table], bench: Bench, *, cached: bool) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import losses

        kernel = "flash_attention_2" if find_spec("flash_attn") and bench.bf16 else "sdpa"
        self.model = SentenceTransformer(
            str(folder), device=str(bench.device), model_kwargs={"attn_implementation": kernel}
        )
        self.model.train()
        forward = self.model.forward  # as accelerate wraps it: also where the backward pass encodes again
        autocast = torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.bf16)
        self.model.forward = autocast(forward)  # type: ignore[method-assign]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, weight_decay=0.0, fused=True)
        plain, cache = losses.MultipleNegativesRankingLoss, losses.CachedMultipleNegativesRankingLoss
        self.losses: dict[str, nn.Module] = {f"MultipleNegativesRankingLoss, {kernel}": plain(self.model, scale=_SCALE)}
        if cached:
            named = {", ".join(f"{key} {value:,}" for key, value in each.items()): each for each in _MINI_BATCHES}
            self.losses = {
                f"CachedMultipleNegativesRankingLoss, {name}, {kernel}": cache(self.model, scale=_SCALE, **each)
                for name, each in named.items()
            }
        self._device = bench.device
        self.batches = [self._tokenized(table) for table in tables]

    def _tokenized(self, table: pa.Table) -> list[dict[str, Tensor]]:
        negatives = [texts[0] for texts in table["hard_negatives"].to_pylist()]
        sides = (table["query"].to_pylist(), table["document"].to_pylist(), negatives)
        features = [dict(self.model.tokenize(side)) for side in sides]
        if self._device.type == "cuda":
            features = [
                {name: value.pin_memory() if isinstance(value, Tensor) else value for name, value in each.items()}
                for each in features
            ]
        return features

    def step(self, loss: nn.Module, batch: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Forward, backward, clipping, update; the loss and the norm of its gradient, before."""
        value = loss(to_device(list(batch), self._device), torch.zeros(0, device=self._device))
        value.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": value.item(), "gradient_norm": norm.item()}


def plain_kmeans(points: Tensor, clusters: int, iterations: int) -> Tensor:
    """Assignments int64 (n,) by Lloyd's algorithm from random points, as one writes it in torch; all on one device."""
    centroids = points[torch.randperm(len(points), device=points.device)[:clusters]]
    for _ in range(iterations):
        squares = centroids.square().sum(dim=1) / 2
        nearest = torch.cat([(squares - block @ centroids.T).argmin(dim=1) for block in points.split(1 << 15)])
        sums = torch.zeros_like(centroids).index_add_(0, nearest, points)
        counts = torch.zeros_like(squares).index_add_(0, nearest, torch.ones_like(nearest, dtype=points.dtype))
        centroids = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centroids)
    return nearest


def check_kmeans(bench: Bench) -> Finding:
    """Pairs clustered by ours, from seeding to exact assignments, beside plain torch for as many iterations."""
    size, iterations = bench.size, 10
    generator = torch.Generator().manual_seed(0)
    sides = torch.randn(2, 4 * size.points, size.width, generator=generator).half().numpy()
    clusters = 4 * size.clusters
    settings = KMeansSettings(iterations=iterations, tolerance=0)
    pairs = ArrayPairs(queries=sides[0], documents=sides[1])

    def theirs() -> Tensor:
        on_device = [torch.from_numpy(side).to(bench.device).float() for side in sides]
        return plain_kmeans((on_device[0] + on_device[1]) / 2, clusters, iterations).cpu()

    runs: dict[str, Run] = {
        "ours": lambda: cluster_pairs(pairs, clusters, settings, seed=1, device=str(bench.device)),
        "theirs": theirs,
    }
    for run in runs.values():
        run()
    seconds = in_turns(bench, {key: lambda run=run: seconds_of_run(bench, run) for key, run in runs.items()})
    figures = {"seconds": seconds["ours"], "their seconds": seconds["theirs"]}
    note = f"{len(pairs):,} pairs in {clusters:,} clusters, {iterations} iterations; theirs is plain torch, float32"
    return Finding(True, note, figures | {"beside": seconds["theirs"] / seconds["ours"]})
