"""The results that five papers print, to show beside our own.

``published.csv`` holds one line for each figure of their tables: ``paper,table,row,collection,measure,figure``. Figures
are fractions with the printed digits; nDCG@10 of 46.1 % is 0.461. Measures have our names. Binary measures of TREC DL
include the grade that their column counts (``R(rel=2)@1000``). ``main_score`` is what MTEB reports for a kind of task.
A printed mean over the row's other columns has the collection ``mean``, any other ``mean of …``. A cell that can't be
read with certainty in the papers' texts is left out.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean

_FIGURES = Path(__file__).with_suffix(".csv")


PAPERS = {
    "revela": "Cai et al. 2025, Revela, https://arxiv.org/abs/2506.16552",
    "adaptive_margins": "Gienapp et al. 2025, Self-Distillation with Adaptive Relevance Margins,"
    " https://arxiv.org/abs/2407.21515",
    "multi_layer": "Xie & Lukasiewicz 2025, Multi-layer Representations for Dense Passage Retrieval,"
    " https://aclanthology.org/2025.findings-emnlp.1333/",
    "coder": "Zerveas et al. 2022, CODER, https://arxiv.org/abs/2112.08766",
    "contextual": "Morris & Rush 2024, Contextual Document Embeddings, https://arxiv.org/abs/2410.02525",
}
"""By the name that the first column has; the titles are short forms."""


@dataclass(frozen=True)
class PublishedRow:
    """The figures of one row (one system) in a paper's table.

    ``figures``: (collection, measure) to a fraction, in the order of the table's columns.
    """

    paper: str
    table: str
    row: str
    figures: Mapping[tuple[str, str], float]


def published_row(name: str) -> PublishedRow:
    """The row ``paper/table/row``, such as ``revela/1/Revela 135M``.

    Raises ``UserError`` for a name of another form, and for an unknown paper, table or row.
    """
    parts = name.split("/", 2)
    if len(parts) < 3:
        raise UserError(
            f"'{name}' names no published result. Allowed is paper/table/row, such as 'revela/1/Revela 135M'."
        )
    with _FIGURES.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for place, column in enumerate(("paper", "table", "row")):
        known = list(dict.fromkeys(line[column] for line in lines))
        lines = [line for line in lines if line[column] == parts[place]]
        if not lines:
            hint = did_you_mean(parts[place], known)
            of = f" of {'/'.join(parts[:place])}" if place else ""
            raise UserError(f"'{name}': no {column} '{parts[place]}'{of} is kept.{hint}")
    figures = {(line["collection"], line["measure"]): float(line["figure"]) for line in lines}
    return PublishedRow(parts[0], parts[1], parts[2], figures)
