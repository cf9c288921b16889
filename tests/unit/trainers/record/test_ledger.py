"""The ledger against what can be counted by hand, and against every batch of an epoch."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.tiny import TinyBatches, tiny_objective, with_columns
from trainers.engine.order import Order
from trainers.engine.reading import Reader
from trainers.engine.settings import OptimizerSettings, TrainingSettings
from trainers.objective import Comparisons
from trainers.record.ledger import (
    Ledger,
    ledger_lines,
    ledger_rows,
    measure_ledger,
    negatives_per_query,
    require_negatives,
    text_lengths,
)
from trainers.record.run_log import measured

TRAINING = TrainingSettings(bf16=False, optimizer=OptimizerSettings(learning_rate=3e-4))


def measure(batches: TinyBatches, per_step: int = 1, ranks: int = 1, joined: bool = False, **settings: Any) -> Ledger:
    objective = tiny_objective(**({"share_negatives": "step"} if joined else {}), **settings)
    next(objective.parameters()).requires_grad_(False)
    order = Order(batches.counts, per_step, 0, ranks, joined=joined)
    return measure_ledger(objective, batches, Reader(batches, objective), order, ranks, TRAINING)


def of_run(counts: tuple[int, ...] = (9, 8), per_step: int = 2, **settings: Any) -> Ledger:
    return measure(TinyBatches(counts), per_step, **settings)


def test_counts_are_those_of_the_batches() -> None:
    ledger = of_run()
    batches, objective = TinyBatches((9, 8)), tiny_objective()
    reader = [batches.read(0, index) for index in range(8)]  # 8 of 9: numbers 0 to 7
    hard = [sum(map(len, rows["hard_negatives"].to_pylist())) for rows in reader]
    masked = [sum(map(len, rows["masked"].to_pylist())) for rows in reader]
    compared = ledger.comparisons
    assert (compared.queries, compared.positives) == (6, 1.0)
    assert compared.hard == pytest.approx(np.mean(hard) / 6)
    assert compared.masked == pytest.approx(np.mean(masked) / 6)
    assert compared.in_batch + compared.hard == pytest.approx(5 + np.mean(hard))
    assert negatives_per_query(ledger.to_json()) == pytest.approx(5 + np.mean(hard) - np.mean(masked) / 6)
    assert ledger.cross_batch == ledger.cross_rank == 0
    assert (ledger.steps, ledger.dropped_batches, ledger.sampled_batches) == (8, (1, 0), 8)
    numbers = [parameter.numel() for parameter in objective.parameters()]
    assert (ledger.parameters, ledger.trainable_parameters) == (sum(numbers), sum(numbers[1:]))
    assert isinstance(compared.documents, int)
    assert (ledger.learning_rate, ledger.precision) == (3e-4, TRAINING.precision)


def test_shared_negatives_are_counted_over_the_step_and_over_ranks() -> None:
    alone, shared = of_run(per_step=2), of_run(per_step=2, joined=True)
    documents = alone.comparisons.documents
    assert shared.cross_batch == documents
    assert negatives_per_query(shared.to_json()) == pytest.approx(negatives_per_query(alone.to_json()) + documents)
    assert of_run(per_step=2, ranks=2, joined=True).cross_rank == documents  # a batch on each
    assert of_run(per_step=2, ranks=2).cross_rank == 0  # each trains on its own
    assert of_run(per_step=1, ranks=2).cross_rank == documents / 2  # half a batch on each


def test_few_batches_are_read_spread_over_the_epoch_and_fewer_large_ones() -> None:
    class Large(TinyBatches):
        def read(self, epoch: int, index: int) -> pa.Table:
            rows = pa.concat_tables([super().read(epoch, index)] * 1500).slice(length=8192)
            return with_columns(rows, masked=[[]] * len(rows))

    batches = TinyBatches((80,))
    assert measure(batches).sampled_batches == 8
    assert batches.reads == [(0, index) for index in range(0, 80, 10)]
    ledger = measure(Large((4,)))
    assert ledger.sampled_batches == 2
    assert ledger.comparisons.queries == 8192


def test_tokens_are_those_that_are_encoded() -> None:
    ledger = of_run((1, 1), per_step=1, query_max_length=4)
    texts = TinyBatches().read(0, 0)["query"].to_pylist()
    lengths = [min(4, 1 + len(text.split())) for text in set(texts)]
    tokens = ledger.tokens["queries"]
    assert (tokens.texts, tokens.longest) == (len(lengths), 4)
    assert tokens.mean == pytest.approx(np.mean(lengths))
    assert tokens.share_of_longest == pytest.approx(np.mean(np.array(lengths) == 4))


def test_lengths_are_found_in_any_nest() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    nested = {"a": [{"attention_mask": mask, "input_ids": mask}], "b": ({"attention_mask": mask[:1]},)}
    assert {name: lengths.tolist() for name, lengths in text_lengths(nested).items()} == {"texts": [2, 1, 2]}
    assert text_lengths({"vectors": mask}) == {}
    assert text_lengths({"attention_mask": torch.ones(2, 3, 4)})["texts"].tolist() == [4] * 6


def test_lines_are_few_and_say_each_number() -> None:
    ledger = Ledger(
        steps=1250, batches_per_step=4, ranks=2, slices_per_batch=2, dropped_batches=(3, *[1] * 8), sampled_batches=8,
        comparisons=Comparisons(queries=128, documents=256, positives=1, in_batch=254, hard=1, masked=0.42),
        cross_batch=768, cross_rank=512.04, tokens={}, trainable_parameters=300, parameters=30_000, learning_rate=2e-5,
        precision="bfloat16 autocast",
    )  # fmt: skip
    lines = ledger_lines(ledger.to_json())
    assert len(lines) <= 15
    assert "1,250 of 4 batches, on 2 ranks, 2 slices a batch" in lines[1]
    text = "\n".join(lines)
    for said in (
        "512 a step, 128 a batch",
        "at most 1,022.6 a query: 254 of its batch, 768 of the step's other batches, 1 hard, 0.4 masked, 512 enc",
        "1,024 a step",
        "300 of 30,000",
        "2e-05 at its peak",
        "bfloat16 autocast",
        "3, 1, 1, 1, 1, 1, 1, 1, … (of each epoch)",
    ):
        assert said in text
    stored = json.loads(json.dumps(ledger.to_json()))
    assert ledger_rows(stored) == ledger_rows(ledger.to_json())


def test_batches_without_a_negative_are_refused() -> None:
    none = Comparisons(queries=1, documents=1, positives=1.0, in_batch=0.0, hard=0.0, masked=0.0)
    ledger = replace(of_run(), comparisons=none)
    with pytest.raises(UserError, match="no query has a negative: a batch has 1 query and no hard negatives"):
        require_negatives(ledger, "there")
    with pytest.raises(UserError, match=r"no document is graded high enough .* Lower objective\.relevance_level"):
        require_negatives(replace(ledger, comparisons=replace(none, positives=0.0)), "there")
    for enough in ({"positives": None}, {"hard": 0.5}):
        require_negatives(replace(ledger, comparisons=replace(none, **enough)), "there")


def test_the_first_step_is_left_out_of_rates() -> None:
    times = [(9.0, 5.0), (0.5, 0.1), (1.5, 0.1)]
    points = [{"examples": 10, "seconds": seconds, "waiting_seconds": waiting} for seconds, waiting in times]
    text = measured(points, torch.device("cpu"))
    assert text.startswith("measured over 2 steps: 10.0 examples/s, 10.0% of the time waiting for data; ")
    assert measured(points[:1], torch.device("cpu")).startswith("measured over 1 step: 1.1 examples/s, 55.6%")


@pytest.mark.parametrize(
    ("kind", "waiting", "advised"), [("cuda", 0.2, True), ("cuda", 0.05, False), ("cpu", 0.2, False)]
)
def test_a_gpu_that_waits_says_what_to_set(monkeypatch, kind: str, waiting: float, advised: bool) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    point = {"examples": 10, "seconds": 1.0, "waiting_seconds": waiting}
    advice = " (more resources.cpus_per_worker tokenize faster)" * advised
    assert f"{waiting:.1%} of the time waiting for data{advice}; " in measured([point], torch.device(kind))


def test_peak_memory_grows_with_what_is_held() -> None:
    """In a process of its own, whose peak is below what is then held."""
    program = (
        "import numpy, torch; from trainers.record.run_log import measured;"
        "point = {'examples': 10, 'seconds': 9.0, 'waiting_seconds': 5.0};"
        "before = measured([point], torch.device('cpu'));"
        "held = numpy.ones(1 << 27);"  # 1 GiB
        "print(before, measured([point], torch.device('cpu')), sep='\\n')"
    )
    # by way of a shell: Linux gives a process the peak of the one that started it
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = (float(line.removesuffix(" GiB").split()[-1]) for line in done.stdout.splitlines())
    assert 0.5 < after - before < 1.1  # less by what its imports held for a moment


def test_lines_are_aligned_exact_and_without_positives_say_what_a_text_is_weighed_against() -> None:
    stored = of_run().to_json()
    lines, rows = ledger_lines(stored), ledger_rows(stored)
    places = {line.index(value) for line, (_, value) in zip(lines[1:], rows, strict=True)}
    assert places == {2 + max(len(name) for name, _ in rows) + 2}  # columns are aligned
    assert len(lines) <= 15
    assert "at most" not in "\n".join(lines)  # of negatives that are not shared
    assert not re.search("other batches|slices", "\n".join(lines))
    stored["comparisons"]["hard"] = 0.0
    assert ", 0 hard" in dict(ledger_rows(stored))["negatives"]
    assert "\n".join(ledger_lines(of_run(joined=True).to_json())).count("at most") == 1
    stored["comparisons"] |= {"positives": 0.0, "in_batch": 15.0, "hard": 0.0, "masked": 0.0}
    rows = dict(ledger_rows(stored))
    assert rows["compared with"] == "15 others of its batch, none marked as its answer"
    assert "negatives" not in rows
