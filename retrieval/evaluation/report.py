"""What is shown of evaluated systems: the same blocks as lines for a terminal and in a section of a report.

Examples are the queries on which a system gained and lost most against another, with what each ranked first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np

from raytriever.reports.plots import Interval, interval_panels
from raytriever.reports.report import Block, Details, Plot, Section
from raytriever.reports.table import Cell, Table, counted, shortened
from retrieval.collections.collection import StoredCollection, passage_text
from retrieval.evaluation.conventions import describe_system, title_warning
from retrieval.evaluation.measures import parse_measure
from retrieval.evaluation.stored import DOMAINS, Domains, StoredEvaluation
from retrieval.rankings import StoredRanking

_COLUMNS = 100  # of a terminal

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MOST_DOMAINS = 12

Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation as plain values: metrics.json, comparisons.json, the level of significance, domains.json if any."""

    metrics: Metrics
    comparisons: Sequence[Mapping[str, Any]]
    level: float
    domains: Domains | None = None

    @property
    def systems(self) -> list[str]:
        """Names in the order of the evaluation."""
        return list(self.metrics["means"])

    @property
    def measures(self) -> list[str]:
        """Names in the order of the evaluation."""
        return list(self.metrics["measures"])

    def letter(self, system: str) -> str:
        """The system's letter in tables. '' once there are no letters left."""
        return dict(zip(self.systems, LETTERS, strict=False)).get(system, "")

    def mean(self, system: str, measure: str) -> float:
        """The mean over queries."""
        return float(self.metrics["means"][system][measure])

    def marks(self, system: str, measure: str) -> str:
        """The letters of the systems that it is significantly better than (paired t-test, Holm-corrected)."""
        compared = [
            (found["a"], found["b"], found["details"]["mean_difference"], found["holm"]["t_test"])
            for found in self.comparisons
            if found["measure"] == measure
        ]
        return "".join(map(self.letter, worse_than(system, compared, self.level)))


def worse_than(system: str, compared: Iterable[tuple[str, str, float, float]], level: float) -> list[str]:
    """The systems than which this one is significantly better, of pairs a, b with the difference a - b and its p."""
    found = [(a, b) if difference > 0 else (b, a) for a, b, difference, p in compared if p < level and difference]
    return [worse for better, worse in found if better == system]


def result_section(evaluated: Evaluated, baseline: str | None = None) -> Section:
    """The evaluation's blocks and, of several systems, a plot of differences from ``baseline`` (None: the first)."""
    metrics, compared = evaluated.metrics, list[Block]()
    if evaluated.comparisons:
        folded = Details("All comparisons", pair_table(evaluated))
        compared = [_difference_plot(evaluated, baseline or evaluated.systems[0]), folded]
    lead = (
        f"How well each system ranks the documents of {metrics['queries']:,} queries of {metrics['judgments']}"
        " (mean over queries; higher is better). nDCG is 1 where the relevant documents come first, RR is 1 over the"
        " rank of the first one, R is the share of them that is found; @10 counts the first ten."
    )
    return Section("Result", lead, evaluation_blocks(evaluated, compared))


def evaluation_blocks(evaluated: Evaluated, compared: Sequence[Block] = ()) -> list[Block]:
    """Means, the verdict, means by domain where there are some, notes, what was ``compared``, and conventions."""
    blocks: list[Block] = [_means_table(evaluated)]
    if "mine" in evaluated.metrics and evaluated.comparisons:
        blocks.append(verdict_table(evaluated))
    if evaluated.domains:
        blocks.append(domain_table(evaluated.domains, evaluated.measures[0]))
    return [*blocks, *notes(evaluated.metrics), *compared, _conventions(evaluated.metrics)]


def block_lines(blocks: Sequence[Block]) -> list[str]:
    """Tables with their captions and paragraphs as lines for a terminal, one empty line between blocks; no plots."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Table):
            caption = ["", *wrap(block.caption, _COLUMNS)] if block.caption else []
            found = [*block.lines(strong=""), *caption]
        elif isinstance(block, Details):
            found = [block.summary, *block_lines([block.content])]
        else:
            found = wrap(block, _COLUMNS) if isinstance(block, str) else []
        lines += [""] * bool(lines and found) + found
    return lines


def _means_table(evaluated: Evaluated) -> Table:
    systems, measures = evaluated.systems, evaluated.measures
    best = {measure: f"{max(evaluated.mean(name, measure) for name in systems):.4f}" for measure in measures}
    rows = []
    for name in systems:
        row: list[str | Cell] = [evaluated.letter(name), name]
        for measure in measures:
            value = f"{evaluated.mean(name, measure):.4f}"
            is_best = len(systems) > 1 and value == best[measure]
            row.append(Cell(value, evaluated.marks(name, measure), is_strong=is_best))
        rows.append(row)
    explained = (
        f"Letters: significantly better than that system (paired t-test, Holm-corrected, p < {evaluated.level:g})."
    )
    if len(systems) > 1 and evaluated.metrics["queries"] < 2:
        explained = "Tests need at least 2 queries, so nothing here is decided."
    elif not evaluated.comparisons:
        explained = ""
    return Table(["", "system", *measures], rows, explained, text_columns=2)


def verdict_table(evaluated: Evaluated) -> Table:
    """Whether the system that the evaluation calls ``mine`` is better than each of the others, by the first measure."""
    mine, rows = str(evaluated.metrics["mine"]), []
    for measure, other, p in _differences(evaluated, mine):
        if measure == evaluated.measures[0]:
            said = "better" if other.value < 0 else "worse"
            decided = said if other.is_significant else "not decided"
            interval = f"{signed(-other.high)} to {signed(-other.low)}"
            rows.append([other.name, decided, signed(-other.value), interval, _p_value(p)])
    header = [f"{mine} against", "", evaluated.measures[0], f"{_confidence(evaluated)} interval", "p"]
    caption = (
        "Not decided: the difference over the queries that both ranked may be chance. This follows p,"
        " which is corrected for all comparisons (Holm). Intervals are not corrected."
    )
    return Table(header, rows, caption if any("not decided" in row for row in rows) else "", text_columns=2)


def pair_table(evaluated: Evaluated) -> Table:
    """A row for each measure and pair of systems: the difference, how regular it is, and what the tests say."""
    rows = []
    for comparison in evaluated.comparisons:
        details, holm = comparison["details"], comparison["holm"]
        a, b = (evaluated.letter(comparison[name]) or comparison[name] for name in "ab")
        rows.append(
            [
                comparison["measure"],
                f"{a} - {b}",
                signed(details["mean_difference"]),
                " to ".join(map(signed, details["interval"])),
                signed(float(details["effect_size"]), 2),
                *(f"{details[count]:,}" for count in ("wins", "ties", "losses")),
                *(_p_value(holm[test]) for test in ("t_test", "permutation", "equivalence")),
            ]
        )
    first = evaluated.comparisons[0]["details"]
    margin = f"±{first['margin']:g}"
    header = ["measure", "pair", "diff.", f"{_confidence(evaluated)} interval", "d_z", "won", "equal", "lost"]
    caption = (
        "Differences of the means, with bootstrap intervals over queries. d_z is the difference in units of the"
        " differences' standard deviation. Queries won, equal and lost. Holm-corrected p-values of the paired t-test,"
        f" the permutation test and the equivalence test (TOST, small where the difference is within {margin})."
    )
    return Table([*header, "t-test", "permut.", f"in {margin}"], rows, caption, text_columns=2)


def _confidence(evaluated: Evaluated) -> str:
    return f"{evaluated.comparisons[0]['details']['confidence']:.0%}"


def _differences(evaluated: Evaluated, system: str) -> Iterator[tuple[str, Interval, float]]:
    """By measure, how far each other system is above this one, whether significantly, and the t-test's p."""
    for comparison in evaluated.comparisons:
        a, b, details = comparison["a"], comparison["b"], comparison["details"]
        if system not in (a, b):
            continue
        sign = -1.0 if a == system else 1.0
        low, high = sorted(sign * end for end in details["interval"])
        p = comparison["holm"]["t_test"]
        other, difference = b if a == system else a, sign * details["mean_difference"]
        yield comparison["measure"], Interval(other, difference, low, high, p < evaluated.level), p


def _difference_plot(evaluated: Evaluated, baseline: str) -> Plot:
    panels: dict[str, list[Interval]] = {measure: [] for measure in evaluated.measures}
    for measure, interval, _ in _differences(evaluated, baseline):
        panels[measure].append(interval)
    svg = interval_panels(panels, f"difference from '{baseline}'", "Differences of the means from the baseline")
    caption = (
        f"Mean difference from '{baseline}' with its {_confidence(evaluated)} bootstrap interval over queries. Filled:"
        f" significant at {evaluated.level:g} (paired t-test, Holm-corrected). Hollow: not significant. Tests and"
        " intervals cover the choice of queries. They don't cover what another training seed would change."
    )
    return Plot(svg, caption)


def domain_table(domains: Domains, measure: str) -> Table:
    """A row for each system, a column for each domain, those of most queries; how many in the first row."""
    shown = list(domains)[:_MOST_DOMAINS]
    rows = [["queries", *(f"{domains[name]['queries']:,}" for name in shown)]]
    for system in next(iter(domains.values()))["runs"]:
        means = [domains[name]["runs"][system][measure] for name in shown]
        rows.append([system, *("-" if mean is None else f"{mean:.4f}" for mean in means)])
    caption = f"{measure} over the queries of each domain (mean; how many queries in the first row)."
    if len(domains) > _MOST_DOMAINS:
        caption += f" The {_MOST_DOMAINS} domains with most queries, of {len(domains):,}; {DOMAINS} has them all."
    return Table(["", *(name or "(none)" for name in shown)], rows, caption)


def _conventions(metrics: Metrics) -> Details:
    """Every switch by its name in the settings and how it was set, then each system's title and prompts."""
    rows = [
        *((name, str(value)) for name, value in metrics["conventions"].items()),
        *((f"'{name}'", describe_system(system)) for name, system in metrics["made_with"].items()),
    ]
    table = Table((), rows, text_columns=2)
    return Details(f"Conventions of {metrics['like']}, where nothing else was set", table)


def notes(metrics: Metrics) -> list[str]:
    """A sentence for everything that may make a number another one than the reader expects; ``metrics.json`` in."""
    conventions, like = metrics["conventions"], metrics["like"]
    found = []
    if count := metrics["queries_without_positive"]:
        what = "counted 0" if conventions["queries_without_positives"] == "count_as_zero" else "left out"
        found.append(f"{counted(count, 'query', 'queries')} without a relevant document: {what}.")
    parsed = [parse_measure(name) for name in metrics["measures"]]
    deepest = max(measure.cutoff or 0 for measure in parsed)
    for name in metrics["means"]:
        if count := metrics["missing_queries"][name]:
            what = "counted 0" if conventions["missing_queries"] == "count_as_zero" else "left out of its means"
            found.append(f"'{name}' lacks {counted(count, 'query', 'queries')}, {what}.")
        if count := metrics["unjudged_queries"][name]:
            what = " where judgments are needed" if any(measure.by_answers for measure in parsed) else ""
            found.append(f"'{name}' has {counted(count, 'query', 'queries')} without judgments, left out{what}.")
        if count := metrics["self_hits"][name]:
            what = "kept" if conventions["self_hits"] == "keep" else "removed"
            what += " (MTEB removes them for single tasks, such as ArguAna and Quora)" if like == "mteb" else ""
            found.append(f"'{name}' has {counted(count, 'result')} with the query's own id: {what}.")
        if 0 < (depth := metrics["depth"][name]) < deepest:
            found.append(
                f"'{name}' found at most {depth:,} documents a query, so measures to rank {deepest:,} see no more."
            )
        if warning := title_warning(name, metrics["made_with"].get(name, {}), conventions["title"], like):
            found.append(warning)
    for measure in metrics["measures"]:
        count = max(of_system[measure] for of_system in metrics["counted_queries"].values())
        if count < metrics["queries"]:  # for another reason than that a ranking lacks them
            found.append(f"{measure} is over {count:,} of the {metrics['queries']:,} queries.")
    return found


def signed(value: float, digits: int = 4) -> str:
    """A difference, its sign always shown."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no negative zero


def _p_value(value: float) -> str:
    return "<.0001" if value < 0.0001 else f"{value:.4f}"


_QUERIES, _DOCUMENTS, _CHARACTERS = 3, 3, 120


def examples_section(
    evaluation: StoredEvaluation,
    rankings: Mapping[str, StoredRanking],
    collection: StoredCollection,
    baseline: str | None = None,
) -> Section:
    """Queries with the largest differences between the evaluation's ``mine``, or its last system, and the baseline.

    ``rankings``: of its systems, over ``collection``. Without one it is the other with the highest first measure.
    """
    metrics, values = evaluation.metrics, evaluation.values()
    measure = metrics["measures"][0]
    mine = metrics.get("mine") or list(metrics["means"])[-1]
    others = [name for name in rankings if name != mine]
    best = max(others, key=lambda name: float(metrics["means"][name][measure]))
    other = baseline if baseline in others else best
    differences = values[mine].values[measure] - values[other].values[measure]
    order = np.argsort(differences, kind="stable")
    order = order[~np.isnan(differences[order])]
    gained = [place for place in order[::-1][:_QUERIES].tolist() if differences[place] > 0]
    lost = [place for place in order[:_QUERIES].tolist() if differences[place] < 0]
    documents = _FirstDocuments(rankings, collection, evaluation.config["split"])
    blocks: list[Block] = []
    for place in [*gained, *lost]:
        query = values[mine].query_ids[place]
        header = [f"{name} {values[name].values[measure][place]:.2f}" for name in rankings]
        columns = [documents.of(name, query) for name in rankings]
        rows = [[str(rank), *texts] for rank, texts in enumerate(zip(*columns, strict=True), 1)]
        blocks += [
            f"{differences[place]:+.2f}  {documents.query(query)}",
            Table(["", *header], rows, text_columns=len(header) + 1),
        ]
    lead = f"Queries where {mine} gained and lost most {measure} against {other}; +: judged relevant."
    return Section("Examples", lead, blocks or ["No query differs."])


class _FirstDocuments:
    """The first results of each ranking, of a collection with judgments of ``split``."""

    def __init__(self, rankings: Mapping[str, StoredRanking], collection: StoredCollection, split: str) -> None:
        self._collection = collection
        judged = collection.judgments(split).select(["query_id", "document_id", "relevance"]).to_pydict().values()
        self._relevant = {(query, document) for query, document, grade in zip(*judged, strict=True) if grade > 0}
        self._lines = {name: {id_: n for n, id_ in enumerate(of.query_ids())} for name, of in rankings.items()}
        self._rows = {name: of.ranking().rows for name, of in rankings.items()}

    def query(self, query: str) -> str:
        """The query's text."""
        row = self._collection.require("queries", [query])
        return shortened(self._collection.rows_of("queries").take(row, ["text"])["text"][0].as_py(), _CHARACTERS)

    def of(self, name: str, query: str) -> list[str]:
        """The first documents of the ranking, '' where it has fewer."""
        line = self._lines[name].get(query)
        rows = np.empty(0, np.int64) if line is None else self._rows[name][line, :_DOCUMENTS]
        table = self._collection.rows_of("documents").take(rows[rows >= 0], ["id", "title", "text"])
        found = [
            ("+ " if (query, document["id"]) in self._relevant else "")
            + shortened(passage_text(document["title"], document["text"]), _CHARACTERS)
            for document in table.to_pylist()
        ]
        return found + [""] * (_DOCUMENTS - len(found))
