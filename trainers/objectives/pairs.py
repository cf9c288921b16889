"""Objectives over queries, documents and hard negatives: how a batch is tokenised, encoded, and joined over ranks.

The candidates of a loss are the documents of all its rows, then all their hard negatives, both in row order. A loss may
span several stored batches and several ranks; here is the one place that counts candidates over them.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from pipelines.batches import BatchReader, masked_cells
from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean
from retrieval.encoders.multi_vector import write_towers
from retrieval.encoders.specification import Role, require_prompt
from retrieval.encoders.text_encoder import TextEncoder
from trainers.engine.draws import text_keys
from trainers.engine.gradient_cache import Chunks, encode_chunks
from trainers.objective import Comparisons, Objective, Outcome
from trainers.objectives.settings import DomainPrompts, PairSettings

Gather = Callable[[Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True)
class PairBatch:
    """One rank's n rows with h hard negatives.

    ``documents``: n positives, then the hard negatives. If ``queries`` is None they come first, in the same chunks.
    ``batch``: int64 (n,), the stored batch of each row; rows of one batch stand together. ``pool_sizes``: int64 (n,),
    hard negatives of each. ``masked_rows``, ``masked_columns``: int64 (k,); row r leaves out column c of its own stored
    batch. ``query_keys`` (n,), ``text_keys`` (n + h,): ``text_keys`` of the queries, and of the documents and hard
    negatives. They tell equal texts across batches. ``tokens``: of the distinct texts, which are encoded.
    ``is_joined``: whether the loss may have rows of other stored batches.
    """

    queries: Chunks | None
    documents: Chunks
    batch: Tensor
    pool_sizes: Tensor
    masked_rows: Tensor
    masked_columns: Tensor
    query_keys: Tensor
    text_keys: Tensor
    tokens: int
    is_joined: bool

    def __len__(self) -> int:
        return len(self.batch)


@dataclass(frozen=True)
class Candidates:
    """What the n queries of this rank's ``batch`` are scored over: M candidates.

    ``mask``: bool (n, M), True is left out, never a query's own positive. ``positives``: int64 (n,), each query's
    place. ``order``: int64 (M,), the candidates' places among the gathered rows of all ranks. ``counts``: rows of each
    rank.
    """

    batch: PairBatch
    mask: Tensor
    positives: Tensor
    order: Tensor
    counts: Sequence[int]


SettingsOfPairs = TypeVar("SettingsOfPairs", bound=PairSettings)


class PairObjective(Objective[PairBatch], Generic[SettingsOfPairs]):
    """An objective over ``query``, ``document`` (its positive), ``hard_negatives`` and ``masked``: give it ``loss``.

    ``masked`` are the candidates left out for a row: the documents of its stored batch, then all its hard negatives. A
    batch may be cut over ranks. With ``share_negatives`` 'step' all rows of a step are one loss, told apart by
    ``batch``. ``score_candidates`` says what a row then leaves out of other batches. Texts that occur several times
    among a rank's rows are encoded once, so with dropout their copies share one draw.

    Queries and documents have an encoder each, or one and the same (``document_encoder`` None).
    """

    columns: tuple[str, ...] = ("query", "document", "hard_negatives", "masked", "batch")

    def __init__(
        self, query_encoder: TextEncoder, settings: SettingsOfPairs, document_encoder: TextEncoder | None = None
    ) -> None:
        super().__init__()
        self.query_encoder = query_encoder
        self.document_encoder = document_encoder or query_encoder
        self.settings = settings
        if settings.prompts_by_domain:
            self.columns = (*self.columns, "domain")
            for key, name in settings.prompt_names().items():
                require_prompt(query_encoder.contract.named_prompts, name, key)
        if settings.matryoshka and settings.matryoshka[-1] >= query_encoder.dimension:
            raise UserError(
                f"objective.matryoshka has a prefix of {settings.matryoshka[-1]} numbers, but vectors have"
                f" {query_encoder.dimension}. Whole vectors are trained anyway: give smaller ones."
            )

    @abstractmethod
    def loss(self, queries: Tensor, documents: Any, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over this rank's n queries, a scalar, and detached metrics.

        ``queries`` (n, d) and ``documents`` (M, d): vectors as ``encode`` made them, documents by column.
        """

    @property
    def joins_step(self) -> bool:
        """Whether negatives are shared over the step."""
        return self.settings.share_negatives == "step"

    def collate(self, rows: pa.Table) -> PairBatch:
        """Tokenises each distinct text once."""
        count = len(rows)
        queries, documents = texts_of(rows)
        query_prompts, document_prompts = self.prompts(rows)
        masked_rows, masked_columns = map(torch.from_numpy, masked_cells(rows))
        query_chunks = self._cut(queries, query_prompts, "query")
        document_chunks = self._cut(documents, document_prompts, "document")
        chunks = (*query_chunks.chunks, *document_chunks.chunks)
        return PairBatch(
            queries=query_chunks,
            documents=document_chunks,
            batch=_int64(rows["batch"]) if self.joins_step else torch.zeros(count, dtype=torch.int64),
            pool_sizes=_int64(pc.list_value_length(rows["hard_negatives"])),
            masked_rows=masked_rows,
            masked_columns=masked_columns,
            query_keys=text_keys(queries),
            text_keys=text_keys(documents),
            tokens=sum(int(chunk["attention_mask"].sum()) for chunk in chunks),
            is_joined=self.joins_step,
        )

    def prompts(self, rows: pa.Table) -> tuple[list[str | None], list[str | None]]:
        """The prompt of each text of ``texts_of`` that its domain has; None: the role's own."""
        pools = pc.list_value_length(rows["hard_negatives"]).to_numpy()
        if not (of_domains := self.settings.prompts_by_domain):
            return [None] * len(rows), [None] * (len(rows) + int(pools.sum()))
        own = [of_domains.get(domain, DomainPrompts()) for domain in rows["domain"].to_pylist()]
        named = self.query_encoder.contract.named_prompts
        queries = [named[each.query] if each.query else None for each in own]
        documents = [named[each.document] if each.document else None for each in own]
        return queries, documents + [documents[row] for row in np.repeat(np.arange(len(rows)), pools)]

    def tokenize(self, texts: Sequence[str], prompts: Sequence[str | None], role: Role) -> dict[str, Tensor]:
        """Features of texts behind their prompts, each as long as the settings allow in its role."""
        settings = self.settings
        limit = settings.query_max_length if role == "query" else settings.document_max_length
        return self.encoder(role).tokenize(texts, role, limit, prompts)

    def _cut(self, texts: Sequence[str], prompts: Sequence[str | None], role: Role) -> Chunks:
        first: dict[tuple[str, str | None], int] = {}
        rows = torch.tensor([first.setdefault(pair, len(first)) for pair in zip(texts, prompts, strict=True)])
        distinct, own = zip(*first, strict=True)
        return self.settings.cut(self.tokenize(distinct, own, role), self.encoder(role), rows)

    def forward(self, batch: PairBatch) -> Outcome:
        """The loss over this rank's queries and the documents of all ranks that share it."""
        queries, documents = self.encode(batch)
        one_tower = batch.queries is not None and self.query_encoder is self.document_encoder
        if not self.may_hold or not one_tower or not isinstance(documents, Tensor):
            return self.compare(batch, queries, documents)
        leaf = documents.detach().requires_grad_(documents.requires_grad)
        outcome = self.compare(batch, queries, leaf)
        return replace(outcome, held=(documents, leaf)) if leaf.requires_grad else outcome

    def encode(self, batch: PairBatch) -> tuple[Tensor, Any]:
        """Vectors of this rank's queries, (n, d), and of its documents and hard negatives, (n + h, d)."""
        sides = (batch.documents, batch.queries) if batch.queries else (batch.documents,)
        # of one chunk a side, documents and queries, little is saved
        cached = self.settings.gradient_cache and any(len(side.chunks) > 1 for side in sides)
        if batch.queries is None:
            vectors = encode_chunks(self.document_encoder, batch.documents, cached=cached)
            return vectors[: len(batch)], vectors[len(batch) :]
        queries = encode_chunks(self.query_encoder, batch.queries, cached=cached)
        return queries, encode_chunks(self.document_encoder, batch.documents, cached=cached)

    def compare(self, batch: PairBatch, queries: Tensor, documents: Any) -> Outcome:
        """The ``loss`` of what is encoded already."""
        counts = self.counts_of_slices(len(batch.text_keys))
        candidates = score_candidates(batch, self.gather, self.slice_number, counts)
        documents = self.gather_documents(documents, candidates)
        loss, metrics = self.loss(queries, documents, candidates)
        for size in self.settings.matryoshka:
            prefixes = [vectors[:, :size] for vectors in (queries, documents)]
            if self.query_encoder.contract.normalize:
                prefixes = [unit_vectors(prefix) for prefix in prefixes]
            loss = loss + self.loss(prefixes[0], prefixes[1], candidates)[0]
        return Outcome(loss, metrics, len(queries), batch.tokens)

    def gather_documents(self, documents: Any, candidates: Candidates) -> Any:
        """The documents (rows) of all ranks, by column.

        One gather serves positives and hard negatives. A rank may have no hard negatives, and all must meet in the
        backward pass.
        """
        if self.batch_group is None:
            return documents
        return self.gather(documents, candidates.counts).index_select(0, candidates.order)

    def check_batches(self, batches: BatchReader) -> None:
        """A domain with prompts of its own that no batch has."""
        if not self.settings.prompts_by_domain:
            return
        there = sorted(batches.distinct("domain"))
        for domain in self.settings.prompts_by_domain:
            if domain not in there:
                raise UserError(
                    f"objective.prompts_by_domain names {domain!r}, but no batch in {batches.uri} has a text of that"
                    f" domain.{did_you_mean(domain, there)}"
                )

    def comparisons(self, rows: pa.Table) -> Comparisons:
        """All documents and hard negatives of the batch, for each query. Masked ones are counted among them."""
        pools = pc.list_value_length(rows["hard_negatives"]).to_numpy()
        candidates, own = len(rows) + int(pools.sum()), float(pools.mean())
        return Comparisons(
            queries=len(rows),
            documents=candidates,
            positives=1.0,
            in_batch=candidates - 1 - own,
            hard=own,
            masked=float(pc.list_value_length(rows["masked"]).to_numpy().mean()),
        )

    def encoder(self, role: Role) -> TextEncoder:
        """The tower of that role."""
        return self.query_encoder if role == "query" else self.document_encoder

    def export(self, folder: Path) -> None:
        """Writes the encoder's own folder, or one folder of both."""
        if self.query_encoder is self.document_encoder:
            self.query_encoder.save(folder)
        else:
            write_towers(self.encoder("query"), self.encoder("document"), folder)


class Triplets(NamedTuple):
    """Vectors of n triplets, each (n, d)."""

    queries: Tensor
    positives: Tensor
    negatives: Tensor

    @classmethod
    def own(cls, queries: Tensor, documents: Tensor, candidates: Candidates) -> Self:
        """Vectors of this rank's queries (n, d), of their documents and of their hard negatives.

        ``documents`` (2 N, d) has the documents of all ranks, then their hard negatives.
        """
        negatives = candidates.positives + len(documents) // 2
        return cls(queries, documents.index_select(0, candidates.positives), documents.index_select(0, negatives))


class TripletObjective(PairObjective[SettingsOfPairs]):
    """Pairs with exactly one hard negative a row. One encoder reads all texts, in the same chunks.

    False negatives are not left out. Candidates: N documents, then the N hard negatives in the same order.
    """

    columns: tuple[str, ...] = ("query", "document", "hard_negatives")

    def collate(self, rows: pa.Table) -> PairBatch:
        """Tokenises each distinct text of a role once. Raises ``UserError`` where a row has not one hard negative."""
        _require_one_negative(rows)
        settings, encoder = self.settings, self.query_encoder
        place_of: dict[tuple[Role, str, str | None], int] = {}
        asked, read = texts_of(rows)
        asked_behind, read_behind = self.prompts(rows)
        of_asked = zip(asked, asked_behind, strict=True)
        places = [place_of.setdefault(("query", *pair), len(place_of)) for pair in of_asked]
        queries = len(place_of)
        of_read = zip(read, read_behind, strict=True)
        places += [place_of.setdefault(("document", *pair), len(place_of)) for pair in of_read]
        _, texts, prompts = zip(*place_of, strict=True)
        ids = encoder.tokenize_ids(texts[:queries], "query", settings.query_max_length, prompts[:queries])
        ids += encoder.tokenize_ids(texts[queries:], "document", settings.document_max_length, prompts[queries:])
        none = torch.zeros(0, dtype=torch.int64)
        return PairBatch(
            queries=None,
            documents=settings.cut(encoder.pad(ids), encoder, torch.tensor(places)),
            batch=torch.zeros(len(rows), dtype=torch.int64),
            pool_sizes=torch.ones(len(rows), dtype=torch.int64),
            masked_rows=none,
            masked_columns=none,
            query_keys=text_keys(asked),
            text_keys=text_keys(read),
            tokens=sum(map(len, ids)),
            is_joined=False,
        )


def texts_of(rows: pa.Table) -> tuple[list[str], list[str]]:
    """Queries; documents, then all hard negatives in row order."""
    documents = rows["document"].to_pylist() + pc.list_flatten(rows["hard_negatives"]).to_pylist()
    return rows["query"].to_pylist(), documents


def _require_one_negative(rows: pa.Table) -> None:
    lengths = pc.list_value_length(rows["hard_negatives"]).to_numpy()
    wrong = (lengths != 1).nonzero()[0]
    if not len(wrong):
        return
    row = int(wrong[0])
    what = f"Query {rows['query'][row].as_py()[:60]!r} has {lengths[row]} hard negatives"
    if lengths[row]:
        remedy = "Set training.hard_negatives (of validation: validation.hard_negatives) to 1, which draws one of them"
    else:
        remedy = (
            "If training.hard_negatives is 0, set it to 1; otherwise make batches with hard negatives ('negatives'"
            " or 'judged_negatives' of raytriever filter)"
        )
    raise UserError(f"{what}; a triplet has exactly one. {remedy}, or filter with negatives_per_example: 1.")


def unit_vectors(vectors: Tensor) -> Tensor:
    """Rows of length 1, (n, d), so that inner products are cosines.

    A row of zeros has no direction: it stays zero, its cosine with anything is 0, and it gets no gradient.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    is_zero = lengths == 0
    return torch.where(is_zero, 0.0, vectors / torch.where(is_zero, 1.0, lengths))


def _int64(column: pa.ChunkedArray) -> Tensor:
    return torch.from_numpy(column.to_numpy().astype(np.int64))


def score_candidates(batch: PairBatch, gather: Gather, slice_number: int, counts: Sequence[int]) -> Candidates:
    """The score matrix of a loss over the rows of all ranks: its mask, positives and order.

    ``gather`` joins the ranks' rows. ``slice_number`` is this rank's place. ``counts`` are the documents and hard
    negatives of each. Nothing here waits for a device. Stored masks cover a row's own batch. Across batches a document
    is masked only if its text is that of a positive of the same query in this step (``positives_in_step``). Other false
    negatives stay negatives there.
    """
    count, texts = len(batch), len(batch.text_keys)
    # One table for all that ranks exchange: is it a hard negative; batch; pool's size; keys of text and query
    table = batch.batch.new_zeros(texts, 5)
    table[count:, 0] = 1
    table[:count, 1], table[:count, 2] = batch.batch, batch.pool_sizes
    table[:, 3], table[:count, 4] = batch.text_keys, batch.query_keys
    table = gather(table, counts)
    order = torch.argsort(table[:, 0], stable=True)
    _, stored, pool_sizes, keys, query_keys = table[order].unbind(dim=1)
    rows = count * len(counts)  # ranks have equally many
    stored, pool_sizes = stored[:rows], pool_sizes[:rows]
    # which of the loss's stored batches a row is of, and how many documents and hard negatives each of these has
    batch_of = torch.zeros_like(stored)
    batch_of[1:] = (stored[1:] != stored[:-1]).cumsum(0)
    documents = torch.zeros_like(stored).index_add_(0, batch_of, torch.ones_like(stored))
    hard_negatives = torch.zeros_like(stored).index_add_(0, batch_of, pool_sizes)
    positives = torch.arange(count, device=order.device) + slice_number * count
    mask = torch.zeros(count, len(order), dtype=torch.bool, device=order.device)
    if len(batch.masked_rows):
        own, column = batch_of[positives][batch.masked_rows], batch.masked_columns
        first_document, first_hard_negative = (sizes.cumsum(0) - sizes for sizes in (documents, hard_negatives))
        placed = torch.where(
            column < documents[own],
            first_document[own] + column,
            rows + first_hard_negative[own] + column - documents[own],
        )
        mask.index_put_((batch.masked_rows, placed), mask.new_ones(()))
    if batch.is_joined:
        of_columns = torch.cat([batch_of, batch_of.repeat_interleave(pool_sizes, output_size=len(order) - rows)])
        answers = positives_in_step(query_keys[positives], query_keys[:rows], keys)
        mask |= answers & (batch_of[positives, None] != of_columns)
    return Candidates(batch, mask, positives, order, counts)


def positives_in_step(queries: Tensor, all_queries: Tensor, texts: Tensor) -> Tensor:
    """Which texts answer which query, as far as the rows of a loss say.

    Those equal to its own positive, or to the positive of an equal query. ``queries`` int64 (n,) are keys of some of
    the N rows' queries ``all_queries`` (N,). ``texts`` int64 (M,) are keys of their positives, in the same order, then
    of any other texts. Returns bool (n, M).
    """
    queries, all_queries, texts = (keys.contiguous() for keys in (queries, all_queries, texts))
    number = torch.searchsorted(texts.sort().values, texts)  # equal texts have one
    ordered = queries.sort().values
    place = torch.searchsorted(ordered, all_queries).clamp(max=len(queries) - 1)
    place = torch.where(ordered[place] == all_queries, place, len(queries))  # a further row: what the others ask
    answers = torch.zeros(len(queries) + 1, len(texts), dtype=torch.bool, device=texts.device)
    answers.index_put_((place, number[: len(all_queries)]), answers.new_ones(()))
    return answers[torch.searchsorted(ordered, queries)][:, number]
