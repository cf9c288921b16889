"""The two-stage gradient cache on two ranks against one process, with and without DistributedDataParallel."""

import numpy as np
import torch
from torch import Tensor, nn

from tests.distributed.processes import assert_close, run_each
from tests.unit.trainers.tiny import TinyEncoder, gradients_of, random_text
from trainers.engine import collectives
from trainers.engine.gradient_cache import cut_by_length, encode_chunks

RANKS = 2
WRAPPERS = {"none": None, "plain": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}


def encoded(encode, features: dict[str, Tensor], chunk_size: int | None) -> Tensor:
    return encode_chunks(encode, cut_by_length(features, chunk_size), cached=chunk_size is not None)


class TwoStageContrast(nn.Module):
    """InfoNCE of one rank's queries against all ranks' documents, both conditioned on a shared, cached context."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = TinyEncoder(), TinyEncoder()
        if unused:
            self.spare = nn.Linear(2, 2)

    def forward(
        self, context: dict, queries: dict, documents: dict, first_chunk: int | None, chunk: int | None
    ) -> Tensor:
        shared = encoded(self.first, context, first_chunk)

        def encode(features) -> Tensor:
            vectors = self.second(features)
            return vectors + torch.softmax(vectors @ shared.T, dim=1) @ shared

        query_vectors = encoded(encode, queries, chunk)
        document_vectors = collectives.gather(encoded(encode, documents, chunk))
        positives = torch.arange(len(query_vectors)) + collectives.rank() * len(query_vectors)
        return nn.functional.cross_entropy(query_vectors @ document_vectors.T, positives)


def features(count: int, seed: int, role: str) -> dict[str, Tensor]:
    generator = np.random.default_rng(seed)
    return TinyEncoder().tokenize([random_text(generator) for _ in range(count)], role)


def of_rank(whole: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    return {name: tensor.chunk(ranks)[rank] for name, tensor in whole.items()}


def gradients(rank: int, ranks: int, wrapper: str, chunks: tuple[int | None, int | None]):
    module = TwoStageContrast(unused=wrapper == "unused").double()
    options = WRAPPERS[wrapper]
    wrapped = module if options is None else nn.parallel.DistributedDataParallel(module, **options)
    inputs = features(7, 1, "document"), of_rank(features(10, 2, "query"), rank, ranks)
    documents = of_rank(features(10, 3, "document"), rank, ranks)
    for _ in range(2):  # the second pass finds what the first one left in the wrapper
        module.zero_grad()
        loss = wrapped(*inputs, documents, *chunks)
        if options is None:
            with collectives.GradientSum(module.parameters()) as total:
                total.start()
                (loss / ranks).backward()
        else:
            loss.backward()  # the wrapper takes the mean over the ranks
    return gradients_of(module)


def test_two_ranks_equal_one_process():
    expected = gradients(0, 1, "none", (None, None))
    cases = [(wrapper, chunks) for wrapper in WRAPPERS for chunks in ((2, 3), (3, 1), (None, None))]
    for case, answers in zip(cases, run_each(RANKS, *((gradients, RANKS, *case) for case in cases)), strict=True):
        for found in answers:
            assert_close({name: found[name] for name in expected}, expected, case, rtol=1e-12, atol=1e-12)
