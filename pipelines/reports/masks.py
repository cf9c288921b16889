"""What the report says of masks: how much of each batch, by which rule, and examples of what was left out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.batches import BatchReader
from pipelines.filtering.false_negatives import RULES, from_columns
from pipelines.reports.examples import excerpt
from pipelines.reports.packings import Batches, PairVectors
from raytriever.artifacts.artifact import Artifact
from raytriever.reports.plots import histogram
from raytriever.reports.report import Block, Details, Plot, folder_name
from raytriever.reports.table import Table, counted

_MASKED_BY = "masked by "
_AUDIT = "audit.json"
_MADE_UP = {
    "hard negatives repeated": "{:,} hard negatives repeat another of their example, which had too few",
    "hard negatives drawn at random": "{:,} hard negatives are random documents, their query having too few",
}


def mask_of(batch: pa.Table) -> tuple[NDArray[np.bool_], float]:
    """The mask (B, B) over the batch's own documents, and the share of all its negatives that is masked."""
    size = len(batch)
    hard_negatives = sum(map(len, batch["hard_negative_ids"].to_pylist()))
    mask = from_columns(batch["masked"].to_pylist(), size + hard_negatives)
    return mask[:, :size], float(mask.sum()) / max(size * (size - 1 + hard_negatives), 1)


class Masks:
    """Gathers the masks of batches of layout ``pairs``.

    ``packed``: the pair numbers of each batch of the epoch, where they are known; with ``of_pairs`` the batches' own
    hardness without what is masked is measured.
    """

    def __init__(self, packed: Batches | None, of_pairs: PairVectors | None) -> None:
        self._packed, self._of_pairs = packed, of_pairs
        self._shares: list[float] = []
        self._hardness: list[float] = []

    def add(self, number: int, batch: pa.Table) -> None:
        """Counts batch ``number`` of the epoch."""
        mask, share = mask_of(batch)
        self._shares.append(share)
        if self._packed is None or self._of_pairs is None:
            return
        if mask.sum() < len(mask) * (len(mask) - 1):  # of no negatives there is no mean
            self._hardness.append(self._of_pairs.hardness(self._packed[number], mask))

    @property
    def hardness(self) -> NDArray[np.float64] | None:
        """Of each batch, without what is masked; None where its pairs aren't known."""
        return np.array(self._hardness) if self._hardness else None

    def blocks(self, reader: BatchReader) -> list[Block]:
        """Shares of batches, a table of rules, examples."""
        shares = np.array(self._shares)
        blocks: list[Block] = [masked_sentence(shares)]
        if shares.any():
            svg = histogram(
                100 * shares, "masked share of a batch's negatives (%)", "batches", "Histogram of masked shares"
            )
            blocks.append(Plot(svg, f"Share of negatives masked as false in {len(shares):,} batches of epoch 0."))
        audit = _audit(reader)
        blocks += _rule_blocks(reader.artifact.manifest["counts"], audit)
        if audit is not None:
            blocks += _example_blocks(audit, reader.artifact)
        return blocks


def masked_sentence(shares: NDArray[np.float64]) -> str:
    """What the masked shares (n,) of n batches say."""
    if not shares.any():
        return "No negative of these batches is masked as false."
    sentence = (
        f"The median batch has {np.median(shares):.1%} of its negatives masked as false, the most masked one"
        f" {shares.max():.1%}."
    )
    empty = int((shares == 1).sum())
    if empty:
        sentence += f" In {counted(empty, 'batch', 'batches')} every negative is, which leaves nothing to learn from."
    return sentence


def _audit(reader: BatchReader) -> dict[str, Any] | None:
    """What `raytriever filter` wrote beside its batches; mixed batches have none."""
    return dict(reader.artifact.read_json(_AUDIT)) if _AUDIT in reader.artifact.names("") else None


def _rule_blocks(counts: Mapping[str, int], audit: Mapping[str, Any] | None) -> list[Block]:
    by_rule = {name.removeprefix(_MASKED_BY): count for name, count in counts.items() if name.startswith(_MASKED_BY)}
    by_rule = {rule: by_rule[rule] for rule in (*RULES, *by_rule) if rule in by_rule}  # the order they are asked in
    negatives, masked = int(counts["negatives"]), sum(by_rule.values())
    rows = []
    for rule, count in by_rule.items():
        batches = "" if audit is None else f"{audit['rules'][rule]['batches']:,}"
        rows.append([rule, f"{count:,}", f"{count / max(negatives, 1):.2%}", batches])
    rows.append(["all rules", f"{masked:,}", f"{masked / max(negatives, 1):.2%}", ""])
    caption = (
        f"Of {negatives:,} negatives (all batches, all epochs); a negative counts for the first rule that masks it."
        " Batches: those in which the rule masks something."
    )
    blocks: list[Block] = []
    if masked:
        rule = max(by_rule, key=lambda name: by_rule[name])
        blocks.append(f"Most are masked by the rule '{rule}': {by_rule[rule] / masked:.1%} of the {masked:,}.")
    told = [words.format(counts[name]) for name, words in _MADE_UP.items() if counts.get(name)]
    if told:
        blocks.append("; ".join(told) + ".")
    blocks.append(Table(["masked by", "negatives", "share", "batches"], rows, caption))
    return blocks


def _example_blocks(audit: Mapping[str, Any], batches: Artifact) -> list[Block]:
    blocks: list[Block] = []
    for rule in RULES:
        found = audit["rules"][rule]
        if not found["examples"]:
            continue
        rows = [
            [
                excerpt(example["query"]),
                excerpt(example["positive"]),
                excerpt(example["document"]),
                f"{example['epoch']}: {example['batch']:,}",
                _score(example["positive_score"]),
                _score(example["score"]),
            ]
            for example in found["examples"]
        ]
        header = ["query", "its positive", "masked document", "batch", "positive", "masked"]
        caption = (
            "The first such negative of the first batches (epoch: number) in which there is one, and the surrogate's"
            f" scores of the positive and of what is masked. Ids are in {folder_name(batches)}/{_AUDIT}."
        )
        blocks.append(Details(f"Examples: masked by {rule}", Table(header, rows, caption, text_columns=3)))
    return blocks


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.3f}"
