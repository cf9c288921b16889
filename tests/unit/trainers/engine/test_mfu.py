"""The share of a GPU's peak that steps use: counted against torch's own count, shown where the GPU is known."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.specification import LoraSettings
from tests.unit.small_run import LEDGER
from tests.unit.trainers.tiny import Reports, TinyBatches, tiny_objective, tiny_settings
from trainers.engine import loop
from trainers.engine.loop import train
from trainers.engine.settings import TrainingSettings
from trainers.estimate import machines
from trainers.estimate.machines import flops_per_token, seconds_at_peak
from trainers.record.report_section import training_section
from trainers.record.run_log import measured
from trainers.record.trackers import tracked_values

GPU, CPU = torch.device("cuda"), torch.device("cpu")
TOKENS = (2, 3)


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=30, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        attn_implementation="eager",
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


@pytest.mark.parametrize("lora", [False, True])
def test_flops_are_those_of_the_linear_layers(lora: bool) -> None:
    model = bert()
    if lora:  # above the first block's input, so that a gradient passes nearly everything frozen
        add_adapter(model, LoraSettings(rank=2, targets=["query", "key", "value"]))
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(TOKENS, dtype=torch.int64)).last_hidden_state.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if "bmm" not in str(op))  # attention is bmm
    counted = flops_per_token(model) * TOKENS[0] * TOKENS[1]
    below = 3 * 2 * 64 * 64 + 2 * 3 * 2 * 2 * 64 // 2 if lora else 0  # of the embeddings, which need no gradient
    assert products <= counted <= products + below * TOKENS[0] * TOKENS[1]
    both = nn.ModuleList([model, bert()])
    assert flops_per_token(both) == (flops_per_token(model) + flops_per_token(bert())) / 2


@pytest.mark.parametrize(("name", "settings", "tera"), [
    ("NVIDIA H100 80GB HBM3", {"bf16": True}, 989),
    ("NVIDIA A100-SXM4-40GB", {"bf16": False, "tf32": True}, 156),
    ("NVIDIA A100-SXM4-40GB", {"bf16": False}, 19.5),
    ("NVIDIA L40S", {"bf16": True}, 362),
    ("NVIDIA GeForce RTX 4090", {"bf16": True}, 165),
    ("Tesla V100-SXM2-32GB", {"bf16": False, "tf32": True}, 15.7),
    ("NVIDIA Z1", {"bf16": True}, None),
])  # fmt: skip
def test_a_peak_is_that_of_the_gpu_in_the_runs_precision(monkeypatch, name: str, settings, tera: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(machines.collectives, "world_size", lambda: 4)
    model = bert()
    assert seconds_at_peak(model, TrainingSettings(**settings)) is None  # on a CPU
    placed = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=GPU)]))
    monkeypatch.setattr(machines, "flops_per_token", lambda _: 1e6)
    found = seconds_at_peak(placed, TrainingSettings(**settings))
    assert found == (None if tera is None else pytest.approx(1e6 / (4e12 * tera)))


@pytest.mark.parametrize("at_peak", [None, 1e-4])
def test_log_report_and_trackers_say_it_where_it_is_known(monkeypatch, at_peak: float | None) -> None:
    monkeypatch.setattr(loop, "seconds_at_peak", lambda *_: at_peak)
    points: list = []
    train(tiny_objective(), TinyBatches(), tiny_settings(), callbacks=[Reports(on_step=points.append)])
    timed = [dict(point, seconds=0.5, waiting_seconds=0.125) for point in points]
    caption = training_section(timed, timed, LEDGER).blocks[1].caption
    if at_peak is None:
        assert "MFU" not in measured(timed, CPU) + caption
        assert "speed/mfu" not in tracked_values(timed[0])
        return
    share = sum(point["tokens"] for point in points) * 1e-4 / (0.5 * len(points))
    assert points[0]["peak_seconds"] == points[0]["tokens"] * 1e-4 > 0
    assert caption.endswith(f"25.0% of the time waiting for data, {share:.1%} of the GPUs' peak (MFU).")
    assert "for data, " in measured(timed, CPU)
    assert tracked_values(timed[0])["speed/mfu"] == points[0]["peak_seconds"] / 0.5
