"""FSDP2 on two gloo ranks against one process: gradients, steps, checkpoints, validation, export."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.encoders.adapter import add_adapter, merged_weights
from retrieval.encoders.multi_vector import MultiVectorEncoder
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings, LoraSettings, VectorForm
from retrieval.encoders.text_encoder import load_encoder
from retrieval.encoders.towers import load_towers
from retrieval.encoders.transformer import checkpoint_activations
from tests.distributed.processes import assert_close, run_each
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
    shard,
    whole,
    whole_weights,
)  # fmt: skip
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


def step_of(rank: int, ranks: int, chunk_size, cached: bool, lora: bool, again: bool, whole_in_step: bool = False):
    """Gradients of a step, its norm before clipping, and the gradients after it."""
    module = Contrast(lora, again)
    shard(module, whole_in_step=whole_in_step)  # alone nothing is shared out
    assert is_sharded(module) == (ranks > 1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 60, (PIECES * 8, 7), generator=generator)
    for piece in ids.split(8):
        mine = piece.chunk(ranks)[rank]
        distinct = 4 if rank else len(mine)  # the second rank has equal texts, so fewer chunks
        features = {"input_ids": mine[:distinct], "attention_mask": torch.ones_like(mine[:distinct])}
        chunks = cut_by_length(features, chunk_size, torch.arange(len(mine)) % distinct)
        loss = module(equal_passes(chunks, torch.device("cpu")), cached)
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


def contrastive(folder: str, lora: bool = False) -> Contrastive:
    settings = EncoderSettings(model=folder, pooling="mean")
    encoder = load_towers(settings, Path(folder), "a" * 64, dropout=0.0).query
    if lora:
        add_adapter(encoder.transformer, LoraSettings(rank=4))
    torch.manual_seed(1)
    return Contrastive(encoder, ContrastiveSettings(chunk_size=2, gradient_cache=True))


def trained(_rank: int, folder: str, checkpoints: str, lora: bool):
    objective = contrastive(folder, lora)
    shard(objective)
    train(objective, TinyBatches(counts=(6,)), SETTINGS, checkpoints=Checkpoints(checkpoints, {}))
    return whole_of(objective)


def whole_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: whole(value.detach()).numpy().copy() for name, value in trainable_parameters(module).items()}


def restored(_rank: int, folder: str, read: str, written: str):
    """What a checkpoint holds once it is restored, after writing it again elsewhere."""
    objective = contrastive(folder)
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


def small_things(rank: int):
    """Numbers of chunks after making passes equal; a transformer without blocks, and torch before 2.11, are refused."""
    texts = {"input_ids": torch.ones(3 + 2 * rank, 2), "attention_mask": torch.ones(3 + 2 * rank, 2)}
    batch = {"a": cut_by_length(texts, 2), "b": [cut_by_length(texts, None)], "rest": (rank, None)}
    padded = equal_passes(batch, torch.device("cpu"))
    assert padded["rest"] == (rank, None)
    assert torch.equal(padded["a"].order, batch["a"].order)
    without_blocks = BertModel(
        BertConfig(num_hidden_layers=0, hidden_size=8, num_attention_heads=1, intermediate_size=8)
    )
    for version, refusal in (("2.10.0", r"needs torch 2\.11 or later"), ("2.11.0+cu130", "ModuleList")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "__version__", TorchVersion(version))
            with pytest.raises(UserError, match=refusal):
                shard(without_blocks)
    return len(padded["a"].chunks), len(padded["b"][0].chunks)


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


TEXTS = ["import the first of the values", "yield", "a file is open"]


def states_and_gradients(rank: int, folder: str, again: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:  # noqa: ARG001
    located = locate_model(folder)
    encoder = load_encoder(EncoderSettings(model=folder, pooling="cls"), located.path, "", dropout=0.0).train()
    several = MultiVectorEncoder(encoder, VectorForm(kind="layers", layers=(1, 2)))
    if again:
        checkpoint_activations(encoder.transformer)
    shard(several)
    states, _ = several.states(several.tokenize(TEXTS, "document"))
    states.square().sum().backward()
    named = several.named_parameters()
    return states.detach().numpy(), {name: whole(p.grad).numpy() for name, p in named if p.grad is not None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder: Path, tiny_encoder: Path):
    """Weights that one process trains, with LoRA and without, and its checkpoints in folder ``one``."""
    return {lora: trained(0, str(tiny_encoder), str(folder / f"lora {lora}/one"), lora) for lora in LORA_OR_NOT}


@pytest.fixture(scope="module")
def of_two(folder: Path, tiny_encoder: Path, alone):  # noqa: ARG001
    """What two ranks answer to each of these calls."""
    encoder = str(tiny_encoder)
    batches = store_pairs(folder / "batches", [[pair(4 * batch + row) for row in range(4)] for batch in range(4)])
    store_pairs(folder / "batches-held-out", [[pair(90), pair(91)]])
    without = folder / "lora False"
    calls = {
        "steps": (all_cases,),
        "under autocast": (under_autocast,),
        "trained False": (trained, encoder, str(without / "two"), False),
        "trained True": (trained, encoder, str(folder / "lora True/two"), True),
        "restored": (restored, encoder, str(without / "one"), str(without / "one restored on two")),
        "exported": (validated_and_exported, encoder, str(folder / "exported")),
        "passes": (small_things,),
        "states": (states_and_gradients, encoder, False),
        "states computed again": (states_and_gradients, encoder, True),
        "runs": (run_and_export, encoder, batches, str(folder)),
    }  # fmt: skip
    return dict(zip(calls, run_each(RANKS, *calls.values()), strict=True))


def test_gradients_equal_those_of_one_process(of_two):
    for lora in LORA_OR_NOT:
        # the same rows: where the second rank repeats texts, so does the one process
        expected, norm, clipped, _ = step_of(0, 1, None, False, lora, False)
        assert norm > 0.01
        assert {"lora_" in name for name in expected} == ({True, False} if lora else {False})  # the head trains too
        for answer in of_two["steps"]:
            for case in (case for case in answer if case[0][2] == lora):
                found, found_norm, found_clipped, kinds = answer[case]
                assert kinds == {name: name.startswith("transformer") for name in kinds}
                assert found_norm == pytest.approx(norm, rel=1e-12)
                assert_close(found, expected, case, rtol=1e-11, atol=1e-12)
                assert_close(found_clipped, clipped, case, rtol=1e-11, atol=1e-13)


def test_under_autocast_blocks_are_gathered_in_bfloat16_and_nothing_else_changes(of_two):
    for answer in of_two["under autocast"]:
        for lora in LORA_OR_NOT:
            losses, gradients, _ = answer[lora, None]
            for how in ("sharded", "zero2"):
                found_losses, found, gathered = answer[lora, how]
                assert found_losses == losses
                assert_close(found, gradients, how, rtol=0)
                in_float32 = answer[lora, "float32"][2]
                for counted, wide in zip(gathered, in_float32, strict=True):
                    assert len(wide) > 1 + LAYERS * CHUNKS  # the root once, a block in each pass, and most again
                    assert len(counted) == (1 + LAYERS if how == "zero2" else len(wide))
                    assert counted[0] == wide[0]
                    assert max(counted[1:]) < 0.5 * max(wide[1:])  # normalisations aren't gathered at all


@pytest.mark.parametrize("lora", LORA_OR_NOT)
def test_steps_equal_those_of_one_process(of_two, alone, tiny_encoder, lora):
    for found in of_two[f"trained {lora}"]:
        assert_close(found, alone[lora], rtol=1e-6, atol=2e-6)
    start = whole_of(contrastive(str(tiny_encoder), lora))
    assert max(np.abs(alone[lora][name] - start[name]).max() for name in start) > 0.01


def test_a_checkpoint_of_two_ranks_restores_on_one_and_one_of_one_on_two(of_two, folder, tiny_encoder):
    def restored_here(name: str):
        return restored(0, str(tiny_encoder), str(places / name), str(places / f"{name} restored"))

    def stored(name: str) -> list[bytes]:
        return [path.read_bytes() for path in sorted((places / name / "step-00000003").glob("*.safetensors"))]

    places = folder / "lora False"
    state, of_one = restored_here("one")
    assert state == State(3)
    for other, on_two in of_two["restored"]:
        assert other == state
        assert_close(on_two, of_one, rtol=0)
    state, found = restored_here("two")
    assert state == State(3)
    weights = of_two["trained False"][0]
    assert found.keys() > weights.keys()
    assert_close({name: found[name] for name in weights}, weights, rtol=0)
    assert stored("one") == stored("one restored on two")
    assert stored("two") == stored("two restored")
    assert len(stored("two")) > 1


def test_whole_weights_let_ranks_encode_what_they_like_and_one_export(of_two, folder, tiny_encoder):
    first, second = of_two["exported"]

    def encoded(model: Path) -> np.ndarray:
        encoder = contrastive(str(model)).query_encoder.eval()
        assert not [name for name in encoder.state_dict() if "lora" in name or "base_layer" in name]
        with torch.no_grad():
            return encoder(encoder.tokenize(["import os"], "query")).numpy()

    untrained, after = encoded(tiny_encoder), encoded(folder / "exported")
    np.testing.assert_allclose(first[0], untrained, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first[1], after, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal([first[0], first[1]], [second[0], second[3]])
    assert np.abs(after - untrained).max() > 1e-3


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("call", ["states", "states computed again"])
def test_a_shared_out_transformer_gives_the_states_of_its_layers(of_two, tiny_encoder, call: str) -> None:
    expected, gradients = states_and_gradients(0, str(tiny_encoder), False)
    doubled = {name: 2 * gradient for name, gradient in gradients.items()}  # the sum over the ranks
    for states, summed in of_two[call]:
        np.testing.assert_allclose(states, expected, atol=1e-6)
        assert_close(summed, doubled, rtol=1e-4, atol=1e-4)


def test_passes_become_equal_and_a_transformer_without_blocks_is_refused(of_two):
    assert of_two["passes"] == [(3, 1), (3, 1)]


@pytest.mark.usefixtures("of_two")
def test_a_sharded_run_exports_all_weights_in_float32(folder, tiny_encoder):
    base = load_file(tiny_encoder / "model.safetensors")
    models = {how: load_file(folder / how / "model/model.safetensors") for how in ("replicated", "zero2", "sharded")}
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
