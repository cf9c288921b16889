"""What `raytriever compare` shows: lines for a terminal, and a section of HTML."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raytriever.artifacts.storage import Folder
from raytriever.reports.report import Block, Details, Section, render
from raytriever.reports.table import Table
from retrieval.evaluation.comparison import Compared, Extremes
from retrieval.evaluation.measures import note_lines
from retrieval.evaluation.report_section import Evaluated, result_section, signed
from retrieval.evaluation.systems import format_table, letters_of

_COLUMNS = 100  # of a terminal
_PAIR = 22
_PAIRED = {"t_test": "t-test", "permutation": "permut.", "equivalence": "TOST"}


def comparison_lines(compared: Compared) -> list[str]:
    """Means, seeds, each measure's differences and tests, and the queries won and lost by the first measure."""
    metrics = compared.metrics
    measures = metrics["measures"]
    lines = [f"{metrics['queries']:,} queries of {metrics['judgments']}", ""]
    lines += format_table(metrics["means"], measures, compared.comparisons, compared.level)
    tested = (
        f"all {len(_pairs(compared))} pairs" if compared.baseline is None else f"the pairs with '{compared.baseline}'"
    )
    lines += [
        "",
        f"Letters: significantly better than that system (paired t-test, p < {compared.level:g} after Holm's correction"
        " over",
        f"{tested}, each measure by itself).",
    ]
    for name, means in compared.seeds.items():
        lines += ["", *_seed_lines(name, means)]
    for measure in measures:
        lines += ["", *_measure_lines(compared, measure)]
    lines += _query_lines(compared)
    return [*lines, "", *note_lines(metrics)]


def _pairs(compared: Compared) -> list[dict[str, Any]]:
    first = compared.metrics["measures"][0]
    return [comparison for comparison in compared.comparisons if comparison["measure"] == first]


def _pair_name(compared: Compared, a: str, b: str, width: int = _PAIR) -> str:
    name = f"{a} - {b}"
    letters = letters_of(list(compared.metrics["means"]))
    return name if len(name) <= width else f"{letters.get(a, a)} - {letters.get(b, b)}"


def _seed_lines(name: str, means: dict[str, list[float]]) -> list[str]:
    seeds = len(next(iter(means.values())))
    lines = [f"{name}: mean and standard deviation over {seeds} seeds, lowest to highest"]
    for measure, values in means.items():
        spread = f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
        lines.append(f"  {measure:<{_PAIR}}{spread}   {min(values):.4f} to {max(values):.4f}")
    return lines


def _measure_lines(compared: Compared, measure: str) -> list[str]:
    found = [comparison for comparison in compared.comparisons if comparison["measure"] == measure]
    details = found[0]["details"]
    margin, confidence = f"±{details['margin']:g}", f"{details['confidence']:.0%}"
    names = [_pair_name(compared, comparison["a"], comparison["b"]) for comparison in found]
    header = f"{measure:<{_PAIR + 2}}{'difference':>10}   {confidence + ' interval':<18}{'d_z':>7}"
    lines = [f"{header}{'won':>7}{'equal':>7}{'lost':>7}  within {margin}?"]
    for name, comparison in zip(names, found, strict=True):
        d = comparison["details"]
        interval = f"{signed(d['interval'][0])} to {signed(d['interval'][1])}"
        queries = "".join(f"{d[count]:>7,}" for count in ("wins", "ties", "losses"))
        is_within = "yes" if comparison["holm"]["equivalence"] < compared.level else "not shown"
        difference = f"{signed(d['mean_difference']):>10}   {interval:<18}{signed(d['effect_size'], 2):>7}"
        lines.append(f"  {name:<{_PAIR}}{difference}{queries}  {is_within}")
    lines.append("  p:".ljust(_PAIR + 2) + "".join(f"{test:>10}{'Holm':>7}{'Bonf.':>7}" for test in _PAIRED.values()))
    for name, comparison in zip(names, found, strict=True):
        cells = "".join(f"{p:>10}{h:>7}{b:>7}" for p, h, b in (_p_values(comparison, test) for test in _PAIRED))
        lines.append(f"  {name:<{_PAIR}}{cells}")
    for name, comparison in zip(names, found, strict=True):
        if test := comparison["details"]["two_proportions"]:
            raw, holm, bonferroni = _p_values(comparison, "two_proportions")
            shown = f"z {test['statistic']:+.2f}, p {raw}, Holm {holm}, Bonf. {bonferroni}"
            lines.append(f"  {name:<{_PAIR}}two proportions (unpaired): {shown}")
    return lines


def _p_values(comparison: dict[str, Any], test: str) -> tuple[str, str, str]:
    raw = comparison["details"][test]["p_value"]
    return _short(raw), _short(comparison["holm"][test]), _short(comparison["bonferroni"][test])


def _short(value: float) -> str:
    return "<.0001" if value < 0.0001 else f"{value:.4f}"


def _shown(compared: Compared) -> list[Extremes]:
    """Those of the first measure that have any."""
    first = compared.metrics["measures"][0]
    return [item for item in compared.extremes if item.measure == first and (item.won or item.lost)]


def _query_lines(compared: Compared) -> list[str]:
    lines = []
    for item in _shown(compared):
        lines += ["", f"Queries by {item.measure}, {_pair_name(compared, item.a, item.b, _COLUMNS // 2)}"]
        for kind, queries in (("won", item.won), ("lost", item.lost)):
            for query, difference in queries:
                line = f"  {kind:<5}{signed(difference)}  {query}  {_one_line(compared.texts.get(query, ''))}".rstrip()
                lines.append(line if len(line) <= _COLUMNS else line[: _COLUMNS - 1] + "…")
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())


def write_comparison(compared: Compared, uri: str) -> list[str]:
    """Writes ``comparison.html`` and ``comparisons.json`` into a folder (made if it isn't there); says where."""
    folder = Folder(uri)
    metrics = compared.metrics
    subtitle = f"Raytriever comparison · {len(metrics['means'])} systems · {metrics['queries']:,} queries"
    page = render("Comparison", subtitle, [_section(compared)])
    folder.write_bytes("comparison.html", page.encode())
    folder.write_bytes("comparisons.json", compared.to_json())
    return [folder.describe(name) for name in ("comparison.html", "comparisons.json")]


def _section(compared: Compared) -> Section:
    """As a report's section on an evaluation, with seeds and queries."""
    metrics = compared.metrics
    evaluated = Evaluated(metrics, compared.comparisons, metrics["measures"], compared.level)
    section = result_section(evaluated, compared.baseline)
    means, *rest = section.blocks
    seeds: list[Block] = [_seed_table(compared.seeds, metrics["measures"])] if compared.seeds else []
    queries: list[Block] = [_query_table(compared)] if _shown(compared) else []
    return replace(section, blocks=[means, *seeds, *rest, *queries])


def _seed_table(seeds: dict[str, dict[str, list[float]]], measures: Sequence[str]) -> Table:
    rows = [
        [name, f"{len(means[measures[0]])}"]
        + [f"{np.mean(means[measure]):.4f} ± {np.std(means[measure], ddof=1):.4f}" for measure in measures]
        for name, means in seeds.items()
    ]
    caption = (
        "Systems of several seeds: mean and standard deviation (n - 1) of the seeds' means. All tests take each query's"
        " mean over the seeds."
    )
    return Table(["system", "seeds", *measures], rows, caption)


def _query_table(compared: Compared) -> Details:
    rows = []
    for item in _shown(compared):
        for query, difference in item.won + item.lost[::-1]:
            text = _one_line(compared.texts.get(query, ""))
            rows.append([f"{item.a} - {item.b}", query, text, signed(difference)])
    measure = compared.metrics["measures"][0]
    table = Table(["systems", "query", "text", "difference"], rows, "", text_columns=3)
    return Details(f"Queries most won and lost by {measure}", table)
