"""FSDP2 on two gloo ranks against one process: gradients, steps, checkpoints, validation, export."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.encoders.adapter import add_adapter, merged_weights
from retrieval.encoders.specification import EncoderSettings, LoraSettings
from retrieval.encoders.towers import load_towers
from retrieval.encoders.transformer import checkpoint_activations
from tests.distributed.processes import run_in_processes
from tests.unit.trainers.pair_batches import pair, store_pairs
from tests.unit.trainers.tiny import TinyBatches, tiny_settings
from trainers.engine import collectives
from trainers.engine.checkpoint import Checkpoints, State
from trainers.engine.gradient_cache import Chunks, cut_by_length, encode_chunks
from trainers.engine.loop import train
from trainers.engine.optimization import build_optimizer, trainable_parameters
from trainers.engine.precision import round_frozen
from trainers.engine.settings import OptimizerSettings
from trainers.engine.sharding import (
    clip_gradients,
    end_step,
    equal_passes,
    gather_weights,
    is_sharded,
    like,
    shard,
    whole,
    whole_weights,
)
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.run_settings import RunSettings
from trainers.training_run import run_training

RANKS = 2
PIECES = 2  # forward and backward passes a step
# an epsilon far above rounding: a key's bias has no gradient, and Adam would make a step of its rounding error
SETTINGS = tiny_settings(epochs=1, optimizer=OptimizerSettings(learning_rate=0.01, weight_decay=0.1, epsilon=1e-4))
CASES = [  # chunk size, gradient cache, LoRA, activations computed again
    (None, False, False, False),
    (None, False, True, True),
    (2, False, False, True),
    (2, True, False, False),
    (2, True, True, False),
    (1, True, True, True),
]


class Contrast(nn.Module):
    """Mean-pooled states through a head, each rank's rows against those of all ranks, in float64."""

    def __init__(self, lora: bool, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.transformer = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(16, 5)  # stays whole
        if lora:
            add_adapter(self.transformer, LoraSettings(rank=3, targets=["query", "output.dense"]))
            for name, parameter in self.transformer.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.3)
        if again:
            checkpoint_activations(self.transformer)
        self.double()

    def forward(self, chunks: Chunks, cached: bool) -> Tensor:
        def encode(features) -> Tensor:
            return self.head(self.transformer(**features).last_hidden_state.mean(dim=1))

        vectors = encode_chunks(encode, chunks, cached=cached)
        positives = torch.arange(len(vectors)) + collectives.rank() * len(vectors)
        return nn.functional.cross_entropy(vectors @ collectives.gather(vectors.roll(1, dims=1)).T, positives)


def step_of(
    rank: int, ranks: int, chunk_size: int | None, cached: bool, lora: bool, again: bool, whole_in_step: bool = False
):
    """Gradients of a step, its norm before clipping, and the gradients after it."""
    module = Contrast(lora, again)
    if ranks > 1:
        shard(module, whole_in_step=whole_in_step)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (PIECES * 8, 7), generator=generator)
    for piece in ids.split(8):
        mine = piece.chunk(ranks)[rank]
        distinct = 4 if rank else len(mine)  # the second rank has equal texts, so fewer chunks
        features = {"input_ids": mine[:distinct], "attention_mask": torch.ones_like(mine[:distinct])}
        chunks = cut_by_length(features, chunk_size, torch.arange(len(mine)) % distinct)
        loss = module(equal_passes(chunks, torch.device("cpu")) if ranks > 1 else chunks, cached)
        (loss / ranks / PIECES).backward()
    end_step(module)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with collectives.GradientSum(parameters):
        pass  # all are complete
    gradients = {name: whole(p.grad).numpy().copy() for name, p in module.named_parameters() if p.grad is not None}
    norm = clip_gradients(parameters, 0.01)
    clipped = {name: whole(p.grad).numpy() for name, p in module.named_parameters() if p.grad is not None}
    kinds = {name: isinstance(p, DTensor) for name, p in module.named_parameters()}
    return gradients, norm.item(), clipped, kinds


def all_cases(rank: int):
    return {(case, kept): step_of(rank, RANKS, *case, kept) for case in CASES for kept in (False, True)}


def in_one_process(lora: bool):
    """The same rows: where the second rank repeats texts, so does the one process."""
    return step_of(0, 1, None, False, lora, False)


def test_two_ranks_equal_one_process():
    answers = run_in_processes(all_cases, RANKS)
    for lora in (False, True):
        expected, norm, clipped, _ = in_one_process(lora)
        assert norm > 0.01
        assert {"lora_" in name for name in expected} == ({True, False} if lora else {False})  # the head trains too
        for answer in answers:
            for case in (case for case in answer if case[0][2] == lora):
                found, found_norm, found_clipped, kinds = answer[case]
                assert found.keys() == expected.keys()
                assert kinds == {name: name.startswith("transformer") for name in kinds}
                assert found_norm == pytest.approx(norm, rel=1e-12)
                for name in expected:
                    np.testing.assert_allclose(found[name], expected[name], rtol=1e-11, atol=1e-12, err_msg=name)
                    np.testing.assert_allclose(found_clipped[name], clipped[name], rtol=1e-11, atol=1e-13)


class Gathered(TorchDispatchMode):
    """Bytes of every gathering of weights, which are flat, while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::_allgather_base_" and args[0].dim() == 1:
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


LORA_OR_NOT = (False, True)
LAYERS, CHUNKS = 3, 4


def under_autocast(rank: int):
    """By LoRA and how it is shared out: the losses, gradients and gathered bytes of two steps."""
    answer = {}
    distinct = torch.arange(1, 33).reshape(2, 8, 2)[rank]
    chunks = cut_by_length({"input_ids": distinct, "attention_mask": torch.ones_like(distinct)}, 8 // CHUNKS)
    for lora in LORA_OR_NOT:
        for how in (None, "sharded", "zero2", "float32"):
            module = Contrast(lora, again=False).float()
            if how != "float32":
                round_frozen(module)
            if how:
                shard(module, bf16=how != "float32", whole_in_step=how == "zero2")
            losses, gathered = [], []
            for _ in range(2):
                module.zero_grad()
                with Gathered() as counted:
                    # a cached cast would add up the chunks' gradients in bfloat16
                    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                        loss = module(chunks, cached=True)
                    loss.backward()
                    end_step(module)
                with collectives.GradientSum([p for p in module.parameters() if p.requires_grad]):
                    pass  # all are complete
                losses.append(loss.item())
                gathered.append(counted.bytes)
            gradients = {name: whole(p.grad).numpy() for name, p in module.named_parameters() if p.grad is not None}
            assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}
            answer[lora, how] = losses, gradients, gathered
    return answer


def test_under_autocast_blocks_are_gathered_in_bfloat16_and_nothing_else_changes():
    for answer in run_in_processes(under_autocast, RANKS):
        for lora in LORA_OR_NOT:
            losses, gradients, _ = answer[lora, None]
            for how in ("sharded", "zero2"):
                found_losses, found, gathered = answer[lora, how]
                assert found_losses == losses
                assert found.keys() == gradients.keys()
                for name in gradients:
                    np.testing.assert_array_equal(found[name], gradients[name], err_msg=name)
                in_float32 = answer[lora, "float32"][2]
                for counted, wide in zip(gathered, in_float32, strict=True):
                    assert len(wide) > 1 + LAYERS * CHUNKS  # the root once, a block in each pass, and most again
                    assert len(counted) == (1 + LAYERS if how == "zero2" else len(wide))
                    assert counted[0] == wide[0]
                    assert max(counted[1:]) < 0.5 * max(wide[1:])  # normalisations aren't gathered at all


def contrastive(folder: str, lora: bool = False) -> Contrastive:
    settings = EncoderSettings(model=folder, pooling="mean")
    encoder = load_towers(settings, Path(folder), "a" * 64, dropout=0.0).query
    if lora:
        add_adapter(encoder.transformer, LoraSettings(rank=4))
    torch.manual_seed(1)
    return Contrastive(encoder, ContrastiveSettings(chunk_size=2, gradient_cache=True))


def trained(_rank: int, ranks: int, folder: str, checkpoints: str, lora: bool):
    objective = contrastive(folder, lora)
    if ranks > 1:
        shard(objective)
    train(objective, TinyBatches(counts=(6,)), SETTINGS, checkpoints=Checkpoints(checkpoints, {}))
    return whole_of(objective)


def whole_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: whole(value.detach()).numpy().copy() for name, value in trainable_parameters(module).items()}


@pytest.mark.parametrize("lora", [False, True])
def test_steps_equal_those_of_one_process(tmp_path, tiny_encoder, lora):
    expected = trained(0, 1, str(tiny_encoder), str(tmp_path / "one"), lora)
    start = whole_of(contrastive(str(tiny_encoder), lora))
    answers = run_in_processes(trained, RANKS, RANKS, str(tiny_encoder), str(tmp_path / "two"), lora)
    for found in answers:
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=2e-6, err_msg=name)
    assert max(np.abs(expected[name] - start[name]).max() for name in expected) > 0.01


def restored(_rank: int, ranks: int, folder: str, read: str, written: str):
    """What a checkpoint holds once it is restored, after writing it again elsewhere."""
    objective = contrastive(folder)
    if ranks > 1:
        shard(objective)
    optimizer = build_optimizer(objective, SETTINGS.optimizer)
    run = {"training": SETTINGS.shaping(3), "batches": TinyBatches().fingerprint}
    state = Checkpoints(read, {}).of_run(**run).restore(objective, optimizer)
    with Checkpoints(written, {}).of_run(**run) as checkpoints:
        checkpoints.save(state, objective, optimizer)
    moments = {
        f"{name}/{quantity}": whole(value).numpy().copy()
        for name, parameter in trainable_parameters(objective).items()
        for quantity, value in optimizer.state[parameter].items()
    }
    return state, whole_of(objective) | moments


def test_a_checkpoint_of_two_ranks_restores_on_one_and_back(tmp_path, tiny_encoder):
    places = [str(tmp_path / name) for name in ("trained", "one", "two")]
    weights = run_in_processes(trained, RANKS, RANKS, str(tiny_encoder), places[0], False)[0]
    state, on_one = restored(0, 1, str(tiny_encoder), *places[:2])
    assert state == State(3)
    for other, on_two in run_in_processes(restored, RANKS, RANKS, str(tiny_encoder), *places[1:]):
        assert other == state
        assert on_two.keys() == on_one.keys() > weights.keys()
        for name, value in on_one.items():
            np.testing.assert_array_equal(on_two[name], value)
            if name in weights:
                np.testing.assert_array_equal(weights[name], value)
    stored = [sorted((Path(place) / "step-00000003").glob("*.safetensors")) for place in places]
    for files in zip(*stored, strict=True):
        assert len({file.read_bytes() for file in files}) == 1


def validated_and_exported(rank: int, folder: str, exported: str):
    objective = contrastive(folder, lora=True)
    shard(objective)
    encoder, found = objective.query_encoder, []
    optimizer = build_optimizer(objective, SETTINGS.optimizer)
    for steps in range(2):  # before the first step, and after it
        with whole_weights(objective), torch.no_grad():
            objective.eval()
            for text in ["import os", "def f", "class A"][: 1 + 2 * rank]:  # one rank encodes more than the other
                found.append(encoder(encoder.tokenize([text], "query")).numpy())
            merged = {name: value.clone() for name, value in merged_weights(encoder.transformer).items()}
            assert not any(isinstance(value, DTensor) for value in merged.values())
        objective.train()
        assert all(isinstance(value, DTensor) for value in encoder.transformer.parameters())
        if steps:
            break
        batch = equal_passes(objective.collate(TinyBatches().read(0, rank)), torch.device("cpu"))
        objective(batch).loss.backward()
        optimizer.step()
    gather_weights(objective)
    if rank == 0:
        assert all(torch.equal(value, merged[name]) for name, value in merged_weights(encoder.transformer).items())
        objective.export(Path(exported))
    return [vectors.tolist() for vectors in found]


def test_whole_weights_let_ranks_encode_what_they_like_and_one_export(tmp_path, tiny_encoder):
    before = contrastive(str(tiny_encoder)).query_encoder.eval()
    first, second = run_in_processes(validated_and_exported, RANKS, str(tiny_encoder), str(tmp_path / "model"))
    with torch.no_grad():
        untrained = before(before.tokenize(["import os"], "query")).numpy()
        exported = contrastive(str(tmp_path / "model")).query_encoder.eval()
        after = exported(exported.tokenize(["import os"], "query")).numpy()
    np.testing.assert_allclose(first[0], untrained, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first[1], after, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal([first[0], first[1]], [second[0], second[3]])
    assert np.abs(after - untrained).max() > 1e-3
    assert not [name for name in exported.state_dict() if "lora" in name or "base_layer" in name]


def small_things(rank: int):
    """Numbers of chunks after making passes equal; and a transformer without blocks."""
    texts = {"input_ids": torch.ones(3 + 2 * rank, 2), "attention_mask": torch.ones(3 + 2 * rank, 2)}
    batch = {"a": cut_by_length(texts, 2), "b": [cut_by_length(texts, None)], "rest": (rank, None)}
    padded = equal_passes(batch, torch.device("cpu"))
    assert padded["rest"] == (rank, None)
    assert torch.equal(padded["a"].order, batch["a"].order)
    with pytest.raises(UserError, match="ModuleList"):
        shard(BertModel(BertConfig(num_hidden_layers=0, hidden_size=8, num_attention_heads=1, intermediate_size=8)))
    return len(padded["a"].chunks), len(padded["b"][0].chunks)


def test_passes_become_equal_and_a_transformer_without_blocks_is_refused():
    assert run_in_processes(small_things, 2) == [(3, 1), (3, 1)]


def test_alone_nothing_is_shared_out(tiny_encoder):
    objective = contrastive(str(tiny_encoder))
    shard(objective)
    assert not is_sharded(objective)
    tensor = torch.ones(3)
    assert whole(tensor) is tensor
    assert like(tensor, tensor) is tensor
    with whole_weights(objective):
        pass


def run_and_export(rank: int, encoder: str, batches: str, folder: str) -> None:
    for sharding in ("replicated", "zero2", "sharded"):
        values = {
            "batches": batches,
            "encoder": {"model": encoder, "pooling": "mean"},
            "objective": {"kind": "contrastive", "chunk_size": 2, "gradient_cache": True},
            "lora": {"rank": 2, "targets": "all_linear"},
            "training": {"bf16": True, "batches_per_step": 2, "optimizer": {"learning_rate": 1e-2, "epsilon": 1e-4}},
            "validation": {"kind": "batches", "batches": f"{batches}-held-out"},
            "sharding": sharding,
        }
        settings = validate(RunSettings, values, "run")
        output = f"{folder}/{sharding}"
        objective, _ = run_training(settings, settings.located(), output, torch.device("cpu"))
        if rank == 0:
            objective.export(Path(output) / "model")


def test_a_sharded_run_exports_all_weights_in_float32(tmp_path, tiny_encoder):
    batches = store_pairs(tmp_path / "batches", [[pair(4 * batch + row) for row in range(4)] for batch in range(4)])
    store_pairs(tmp_path / "batches-held-out", [[pair(90), pair(91)]])
    run_in_processes(run_and_export, RANKS, str(tiny_encoder), batches, str(tmp_path))
    base = load_file(tiny_encoder / "model.safetensors")
    models = {how: load_file(tmp_path / how / "model/model.safetensors") for how in ("replicated", "zero2", "sharded")}
    changed = set()
    for name, value in models["replicated"].items():
        kept = torch.equal(value, base[name])
        changed.add(kept)
        for how in ("zero2", "sharded"):
            assert models[how][name].dtype == torch.float32
            assert (models[how][name] - value).norm() <= 0.1 * (value - base[name]).norm(), f"{how}: {name}"
            assert torch.equal(models[how][name], base[name]) is kept
        torch.testing.assert_close(models["zero2"][name], models["sharded"][name], rtol=0, atol=0)
    assert changed == {True, False}
