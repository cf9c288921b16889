"""The ledger of a run: what queries are compared with, what a step encodes, what is trained and what is left out.

It is computed before the first step from a few stored batches, printed and stored. So nobody has to guess the number of
negatives with a setting on so many ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raytriever.errors import UserError
from raytriever.reports.table import counted
from trainers.engine.order import Order, Piece
from trainers.engine.settings import TrainingSettings

if TYPE_CHECKING:
    from torch import Tensor

    from trainers.engine.reading import BatchSource, Reader
    from trainers.objective import Comparisons, Objective

_SAMPLED_BATCHES = 8
_COUNTS = ("queries", "documents", "offered")
_TOKENS = "mean {mean:.1f}, longest {longest:,} ({share_of_longest:.1%} are as long)"
_SAMPLED_ROWS = 16_384  # enough for means; batches this large are not read eight times


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of the texts as they are encoded, after cutting: over ``texts`` of the sampled batches.

    ``share_of_longest``: how many are as long as the longest, between 0 and 1; a large share shows that a limit cuts.
    """

    texts: int
    mean: float
    longest: int
    share_of_longest: float


@dataclass(frozen=True)
class Ledger:
    """A run in numbers. ``comparisons``: means over the ``sampled_batches`` of the first epoch.

    ``cross_batch``: documents of the step's other batches that each query is compared with, including those left out
    there because they answer it. ``cross_rank``: how many of all the documents it is compared with another rank
    encodes. ``tokens``: by the name of the texts in the collated batch. ``learning_rate``: at its peak.
    ``dropped_batches``: of each epoch, after its last whole step.
    """

    steps: int
    batches_per_step: int
    ranks: int
    slices_per_batch: int
    dropped_batches: tuple[int, ...]
    sampled_batches: int
    comparisons: "Comparisons"
    cross_batch: float
    cross_rank: float
    tokens: dict[str, TokenLengths]
    trainable_parameters: int
    parameters: int
    learning_rate: float
    precision: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for ``ledger.json``."""
        return asdict(self)


def negatives_per_query(ledger: Mapping[str, Any]) -> float:
    """Number of a query's negatives without the masked ones. An upper bound if a step shares them."""
    compared = ledger["comparisons"]
    return float(compared["in_batch"] + compared["hard"] + ledger["cross_batch"] - compared["masked"])


def ledger_lines(ledger: Mapping[str, Any]) -> list[str]:
    """Lines for the terminal, each a name and its value."""
    rows = ledger_rows(ledger)
    width = max(len(name) for name, _ in rows)
    return ["ledger:", *(f"  {name:<{width}}  {value}" for name, value in rows)]


def ledger_rows(ledger: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A stored ledger as a table: (name, value)."""
    compared, per_step = ledger["comparisons"], ledger["batches_per_step"]
    sliced = f", {ledger['slices_per_batch']} slices a batch" if ledger["slices_per_batch"] > 1 else ""
    steps = f"{ledger['steps']:,} of {_batches(per_step)}, on {counted(ledger['ranks'], 'rank')}{sliced}"
    dropped = ", ".join(f"{count:,}" for count in ledger["dropped_batches"][:8])
    return [
        ("steps", steps),
        ("queries", f"{compared['queries'] * per_step:,} a step, {compared['queries']:,} a batch"),
        *_compared_with(ledger),
        ("documents", f"{compared['documents'] * per_step:,} a step"),
        *((f"tokens of {name}", _TOKENS.format_map(lengths)) for name, lengths in ledger["tokens"].items()),
        ("trained parameters", f"{ledger['trainable_parameters']:,} of {ledger['parameters']:,}"),
        ("learning rate", f"{ledger['learning_rate']:g} at its peak"),
        ("precision", ledger["precision"]),
        ("batches left out", f"{dropped}{', …' if len(ledger['dropped_batches']) > 8 else ''} (of each epoch)"),
        ("measured on", f"{_batches(ledger['sampled_batches'])} of the first epoch"),
    ]


def _compared_with(ledger: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Positives and negatives; where nothing is marked as a positive, what a text is weighed against."""
    compared = ledger["comparisons"]
    if not compared["positives"]:
        return [("compared with", f"{_number(compared['in_batch'])} others of its batch, none marked as its answer")]
    shared = ledger["cross_batch"]  # without those that answer the query too, which are known when the step is made
    counts = {
        "of its batch": compared["in_batch"],
        "of the step's other batches": shared,
        "hard": compared["hard"],
        "masked": compared["masked"],
        "encoded by other ranks": ledger["cross_rank"],
    }
    always = ("of its batch", "hard")  # that there are none is worth knowing
    parts = ", ".join(f"{_number(count)} {what}" for what, count in counts.items() if count or what in always)
    negatives = f"{'at most ' if shared else ''}{_number(negatives_per_query(ledger))} a query: {parts}"
    return [("positives", f"{_number(compared['positives'])} a query"), ("negatives", negatives)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if round(value, 1) == round(value) else f"{value:,.1f}"


def _batches(count: int) -> str:
    return counted(count, "batch", "batches")


def require_negatives(ledger: Ledger, batches: str) -> None:
    """Raises ``UserError`` where queries have no positive, or not one negative: every loss would be 0."""
    compared = ledger.comparisons
    if compared.positives == 0:
        raise UserError(
            f"In {_batches(ledger.sampled_batches)} of {batches} no document is graded high enough to be a positive."
            " There is nothing to learn from. Lower objective.relevance_level."
        )
    if compared.positives is None or negatives_per_query(ledger.to_json()) > 1e-6:  # a difference of means may not be 0
        return
    why = f"a batch has {counted(compared.queries, 'query', 'queries')} and no hard negatives"
    if compared.masked:
        why = "every document that isn't its own positive is left out (masked) as a false negative"
    raise UserError(
        f"In {_batches(ledger.sampled_batches)} of {batches} no query has a negative: {why}. There is nothing to learn"
        " from. Pack larger batches (batch_size), add hard negatives ('negatives' of raytriever filter), or mask fewer"
        " (its false_negatives)."
    )


def measure_ledger(
    objective: "Objective[Any]",
    batches: "BatchSource",
    reader: "Reader",
    order: Order,
    ranks: int,
    training: TrainingSettings,
) -> Ledger:
    """The ledger of a run; ``reader`` reads for ``objective`` from ``batches``, ``ranks`` share the steps of ``order``.

    One rank calls it alone. Reads and collates up to 8 batches spread over the first epoch.
    """
    found: list[Comparisons] = []
    lengths: dict[str, list[NDArray[np.int64]]] = {}
    count = batches.number_of_batches(0)
    sampled = min(count, _SAMPLED_BATCHES)
    for number in range(sampled):  # spread: neighbouring batches may be of one domain
        rows = reader.read_piece(0, Piece((number * count // sampled,)))
        found.append(objective.comparisons(rows))
        for name, of_texts in text_lengths(objective.collate(rows)).items():
            lengths.setdefault(name, []).append(of_texts)
        if sum(compared.queries for compared in found) >= _SAMPLED_ROWS:
            break
    compared = _mean(found)
    offered = compared.documents if compared.offered is None else compared.offered
    joined = order.batches_per_step if objective.joins_step else 1
    parameters = list(objective.parameters())
    return Ledger(
        steps=order.total_steps,
        batches_per_step=order.batches_per_step,
        ranks=ranks,
        slices_per_batch=order.slices_per_batch,
        dropped_batches=order.dropped_batches,
        sampled_batches=len(found),
        comparisons=compared,
        cross_batch=float(offered * (joined - 1)),
        cross_rank=offered * joined * (1 - 1 / order.ranks_per_loss),  # of other slices, or of other ranks' batches
        tokens={name: _token_lengths(np.concatenate(parts)) for name, parts in lengths.items()},
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameters=sum(parameter.numel() for parameter in parameters),
        learning_rate=training.optimizer.learning_rate,
        precision=training.precision,
    )


def _mean(found: "Sequence[Comparisons]") -> "Comparisons":
    from trainers.objective import Comparisons

    known = [field.name for field in fields(Comparisons) if getattr(found[0], field.name) is not None]
    means: dict[str, Any] = {name: float(np.mean([getattr(compared, name) for compared in found])) for name in known}
    return Comparisons(**means | {name: round(means[name]) for name in _COUNTS if name in means})


def text_lengths(collated: Any) -> dict[str, NDArray[np.int64]]:
    """Tokens of every text of a collated batch: int64 (texts,) by the name of the field that holds them.

    Any nest with mappings that have an ``attention_mask`` (texts, length) in it; what is no dataclass has no such name,
    and its texts are "texts".
    """
    named = {"texts": collated}
    if is_dataclass(collated):
        named = {field.name.replace("_", " "): getattr(collated, field.name) for field in fields(collated)}
    found: dict[str, NDArray[np.int64]] = {}
    for name, value in named.items():
        masks = _attention_masks(value)
        if masks:
            lengths = [mask.sum(dim=-1).reshape(-1).numpy() for mask in masks]
            found[name] = np.concatenate(lengths)
    return found


def _attention_masks(value: Any) -> "list[Tensor]":
    from trainers.objective import map_nest

    masks: list[Tensor] = []

    def find(values: dict[str, Any]) -> None:
        if "attention_mask" in values:
            masks.append(values["attention_mask"])
        else:
            map_nest(list(values.values()), dict, find)

    map_nest(value, dict, find)
    return masks


def _token_lengths(lengths: NDArray[np.int64]) -> TokenLengths:
    longest = int(lengths.max(initial=0))
    share = float((lengths == longest).mean()) if len(lengths) else 0.0
    return TokenLengths(len(lengths), float(lengths.mean()) if len(lengths) else 0.0, longest, share)
