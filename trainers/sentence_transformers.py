"""Stored batches in the trainer of sentence-transformers: a batch sampler that replays them, losses that mask.

A loss needs some facts of a row's batch: its number, the row's place in it, and the documents that the row leaves out.
They travel with the row, as its label. So masks are always those of the data, and the loss refuses a trainer that
shuffles, cuts or joins batches. Beside sentence-transformers (5.1 to 6) and PyTorch it needs only what the reader of
batches needs. So it works in environments with older libraries than our training has.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from sentence_transformers import DefaultBatchSampler
from torch import Tensor
from torch.nn.functional import normalize

from pipelines.batches import BatchReader, epoch_permutation, masked_cells
from raytriever.errors import UserError
from retrieval.encoders.pooling import at_least_float32
from trainers.objectives.masked_contrastive import all_directions_loss, distillation_loss, masked_contrastive_loss

try:
    from sentence_transformers.sentence_transformer import losses
except ModuleNotFoundError:  # sentence-transformers before 5.4
    from sentence_transformers import losses

LABEL, SCORES = "label", "surrogate_scores"
# a label begins with epoch, batch, row, rows of the batch, columns of documents; then comes the mask
_SIZE, _PLACE = 3, 5
_BITS = 32  # of the mask in each number behind them; then of a score in each, where scores are stored
_WANTED = ("epoch", "batch", "query", "document", "hard_negatives", "masked")
_ROWS_AT_ONCE = 4096


def training_columns(batches: Any) -> Any:
    """The ``datasets.Dataset`` that the trainer reads: ``anchor``, ``positive``, ``negative_1`` …, ``label``.

    ``batches``: a ``BatchReader``, or a dataset as `raytriever export` publishes it (format hugging_face), its rows as
    stored. Surrogate scores, where stored, travel in the label. Raises ``UserError`` for other columns, for rows that
    were shuffled or filtered, and for rows with unequally many hard negatives.
    """
    rows = batches.to_dataset() if isinstance(batches, BatchReader) else batches
    if lacking := [name for name in _WANTED if name not in getattr(rows, "column_names", ())]:
        raise UserError(
            f"The data have no column {', '.join(lacking)}, so they are no stored batches of pairs. Give a BatchReader,"
            " or a dataset that raytriever export wrote with format hugging_face."
        )
    places = np.stack([rows["epoch"][:], rows["batch"][:]], axis=1)
    begins = np.flatnonzero(np.r_[True, (np.diff(places, axis=0) != 0).any(axis=1)][: len(places)])
    sizes = set(np.diff(np.r_[begins, len(places)]).tolist())
    if len(np.unique(places[begins], axis=0)) < len(begins) or len(sizes) != 1:
        raise UserError(
            "The rows of a stored batch are not contiguous, or some are missing, because the data were shuffled,"
            " filtered or cut. Load them as they are stored. The sampler shuffles whole batches."
        )
    columns = rows.with_format("arrow").map(
        _columns,
        with_indices=True,
        batched=True,
        batch_size=_ROWS_AT_ONCE,
        remove_columns=rows.column_names,
        load_from_cache_file=False,  # a cached result has the function's name for its key, not its code
        fn_kwargs={"size": sizes.pop(), "negatives": len(rows[0]["hard_negatives"])},
    )
    return columns.with_format(None)


def _columns(rows: pa.Table, indices: list[int], size: int, negatives: int) -> pa.Table:
    """A stretch of the rows; ``indices`` are their places in all."""
    lists = rows["hard_negatives"]
    if (wrong := np.asarray(pc.list_value_length(lists)) != negatives).any():
        raise UserError(
            f"Row {indices[int(np.argmax(wrong))]} has another number of hard negatives than the first,"
            f" {negatives}. The trainer needs the same number in every row. Filter with another too_few_negatives."
        )
    words = _mask_ends(size, 1 + negatives) - _PLACE
    mask = np.zeros((len(rows), words * _BITS), dtype=bool)
    mask[masked_cells(rows)] = True
    bits = np.packbits(mask, axis=1, bitorder="little").view("<u4").astype(np.int64)
    places = [rows["epoch"], rows["batch"], np.asarray(indices) % size]
    places += [np.full(len(rows), number) for number in (size, 1 + negatives)]
    label = np.concatenate([np.stack(places, axis=1), bits], axis=1)
    if SCORES in rows.column_names:
        scores = np.asarray(pc.list_flatten(rows[SCORES]), dtype=np.float32)
        label = np.concatenate([label, scores.view(np.int32).reshape(len(rows), size)], axis=1)
    texts = {"anchor": rows["query"], "positive": rows["document"]}
    texts |= {f"negative_{place + 1}": pc.list_element(lists, place) for place in range(negatives)}
    return pa.table(texts | {LABEL: pa.FixedSizeListArray.from_arrays(pa.array(label.ravel()), label.shape[1])})


class StoredBatchSampler(DefaultBatchSampler):  # type: ignore[misc]  # of an untyped library
    """Replays stored batches: epoch e of a training takes those of the stored epoch e, in the order of our own trainer.

    That is ``epoch_permutation(seed, e, batches)`` with the trainer's seed. Beyond the stored epochs they come again,
    each time in another order. Several processes take whole batches in turn, and a resumed training goes on with the
    batch that comes next. Raises ``UserError`` for data that are not of ``training_columns`` and for another
    ``batch_size`` than the stored one.
    """

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool = False, **settings: Any) -> None:
        is_table = hasattr(dataset, "features") and hasattr(dataset, "__len__") and len(dataset)
        label = is_table and dataset[0].get(LABEL)
        if not isinstance(label, list) or len(label) <= _PLACE:
            raise UserError("The data have no column 'label' of training_columns. Give training_columns(batches).")
        self._size = label[_SIZE]
        if self._size != batch_size:
            raise UserError(
                f"The batch size is {batch_size}, but stored batches have {self._size} rows, and each is one loss."
                f" Set per_device_train_batch_size to {self._size}, of evaluation per_device_eval_batch_size."
            )
        super().__init__(dataset, batch_size=batch_size, drop_last=drop_last, **settings)
        # the trainer of 5.1 gives its seed to the generator alone, and none where it is 0
        if self.generator is not None and self.generator.initial_seed() != torch.Generator().initial_seed():
            self.seed = self.generator.initial_seed()
        starts = np.arange(0, len(dataset), self._size)
        epochs, batches, rows = np.array(dataset.select(starts)[LABEL][:])[:, :3].T
        if rows.any() or len(dataset) % self._size:
            raise UserError("The rows were shuffled or cut after training_columns. Give its result as it is.")
        order = np.lexsort((batches, epochs))
        self._starts = np.split(starts[order], np.flatnonzero(np.diff(epochs[order])) + 1)
        # a resumed training of several processes wraps this twice, and tells the data alone which epoch begins
        dataset.set_epoch = self.set_epoch

    def __len__(self) -> int:
        return len(self._starts[self.epoch % len(self._starts)])

    def __iter__(self) -> Iterator[list[int]]:
        starts = self._starts[self.epoch % len(self._starts)]
        for start in starts[epoch_permutation(self.seed, self.epoch, len(starts))].tolist():
            yield list(range(start, start + self._size))


def stored_mask(labels: Tensor | None, columns: int) -> Tensor:
    """What each row leaves out, bool (B, M), of a batch with these ``labels``; ``columns``: of documents, 1 or more.

    Raises ``UserError`` unless the rows are one stored batch, whole and in order.
    """
    if labels is None or labels.ndim != 2 or labels.shape[1] <= _PLACE:
        raise UserError("The loss was given other labels than those of training_columns. Train on its result.")
    rows, size, stored = len(labels), *labels[0, _SIZE:_PLACE].tolist()
    if len(of := torch.unique(labels[:, :2], dim=0)) > 1:
        named = " and ".join(f"{batch} of epoch {epoch}" for epoch, batch in of[:2].tolist())
        raise UserError(
            f"The loss got rows of {len(of)} stored batches at once ({named}), because the trainer shuffles. Set"
            " batch_sampler=StoredBatchSampler in its arguments."
        )
    if labels[:, 2].tolist() != list(range(size)):
        raise UserError(
            f"The loss got {rows} rows of stored batch {int(labels[0, 1])}, which has {size}, or in another order. Set"
            f" per_device_train_batch_size to {size} and batch_sampler=StoredBatchSampler, and don't split batches."
        )
    if stored != columns:
        raise UserError(
            f"The labels are for {stored} columns of documents, but the loss got {columns}. Train on all existing"
            " columns."
        )
    bits = labels[:, _PLACE : _mask_ends(size, columns), None] >> torch.arange(_BITS, device=labels.device) & 1
    return bits.flatten(1)[:, : size * columns].bool()


def stored_scores(labels: Tensor, columns: int) -> Tensor:
    """The surrogate's scores of the batch's documents, float32 (B, B), of labels that ``stored_mask`` takes.

    Raises ``UserError`` where none are stored.
    """
    scores = labels[:, _mask_ends(len(labels), columns) :].int()
    if not scores.numel():
        raise UserError(
            "The batches have no surrogate scores to distil. Make them with 'batches.surrogate_scores': true, or set"
            " distillation to 0."
        )
    return scores.view(torch.float32)


def _mask_ends(size: int, columns: int) -> int:
    """Where in a label the mask of a batch of ``size`` ends."""
    return _PLACE + -(-size * columns // _BITS)


Directions = Literal["query_to_document", "all"]


def _loss(
    embeddings: list[Tensor],
    labels: Tensor,
    temperature: float,
    directions: Directions,
    distillation: float,
    teacher_temperature: float,
) -> Tensor:
    """The loss over cosines, of embeddings (B, d) of queries, positives and each negative."""
    mask = stored_mask(labels, len(embeddings) - 1)
    queries, positives, *negatives = (normalize(at_least_float32(vectors), dim=-1) for vectors in embeddings)
    documents = torch.cat([positives, torch.stack(negatives, dim=1).flatten(0, 1)] if negatives else [positives])
    own = torch.arange(len(queries), device=queries.device)
    if directions == "query_to_document":
        loss = masked_contrastive_loss(queries, documents, mask, own, temperature)
    else:
        loss = all_directions_loss(queries, documents, mask, own, temperature, queries, mask[:, : len(queries)])
    if not distillation:
        return loss
    scores = stored_scores(labels, len(embeddings) - 1)
    distilled = distillation_loss(queries, documents[: len(queries)], scores, temperature, teacher_temperature)
    return (1 - distillation) * loss + distillation * distilled


class MaskedContrastiveLoss(losses.MultipleNegativesRankingLoss):  # type: ignore[misc]
    """The loss of our objective ``contrastive`` over stored batches: their masks, hard negatives and surrogate scores.

    ``masked_contrastive_loss``, or ``all_directions_loss`` where ``directions`` is 'all'; ``distillation`` is the share
    of ``distillation_loss``.
    """

    def __init__(
        self,
        model: Any,
        similarity_temperature: float = 0.05,
        directions: Directions = "query_to_document",
        distillation: float = 0.0,
        teacher_temperature: float = 0.05,
    ) -> None:
        super().__init__(model, scale=1 / similarity_temperature)
        self._how = (directions, distillation, teacher_temperature)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor) -> Tensor:
        """A scalar."""
        return _loss(embeddings, labels, 1 / self.scale, *self._how)


class CachedMaskedContrastiveLoss(losses.CachedMultipleNegativesRankingLoss):  # type: ignore[misc]
    """``MaskedContrastiveLoss`` in the memory of ``mini_batch_size`` texts (GradCache).

    Raises ``UserError`` for a static encoder.
    """

    def __init__(
        self,
        model: Any,
        similarity_temperature: float = 0.05,
        mini_batch_size: int = 32,
        directions: Directions = "query_to_document",
        distillation: float = 0.0,
        teacher_temperature: float = 0.05,
    ) -> None:
        if type(model[0]).__name__ == "StaticEmbedding":
            raise UserError("The model is a static encoder, which needs no gradient cache: take MaskedContrastiveLoss.")
        super().__init__(model, scale=1 / similarity_temperature, mini_batch_size=mini_batch_size)
        self._how = (directions, distillation, teacher_temperature)

    def forward(self, sentence_features: Any, labels: Tensor) -> Tensor:
        """A scalar."""
        self._labels = labels  # sentence-transformers 5 gives calculate_loss none
        return super().forward(sentence_features, labels)  # type: ignore[no-any-return]

    def calculate_loss(self, reps: list[list[Tensor]], *_: Tensor, with_backward: bool = False) -> Tensor:
        """A scalar, of embeddings of each column's mini-batches."""
        loss = _loss([torch.cat(parts) for parts in reps], self._labels, 1 / self.scale, *self._how)
        if with_backward:
            torch.autograd.backward(loss)
        return loss.detach() if with_backward else loss
