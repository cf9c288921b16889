"""Scores of stored batches: each chunk given each, as one pass over one sequence says."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from pipelines.batches import BatchReader
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from tests.unit.retrieval.encoders.tiny_models import DECODERS, edited, save_tiny_model
from tests.unit.small_run import make
from tests.unit.trainers.chunk_batches import store_chunk_batches
from tests.unit.trainers.pair_batches import pair, store_pairs
from trainers.jobs.score import Score, ScoreConfig
from trainers.objectives.replug import ScoreReader


def score(folder: Path, batches: str, model: Path, **settings: Any) -> str:
    values = {
        "batches": batches,
        "output": str(folder),
        "language_model": {"model": str(model), "dtype": "float32"},
        "batches_per_shard": 2,
    }
    return make(Score(validate(ScoreConfig, values | settings, "Settings of score")))


def one_sequence(model: Any, context: list[int], target: list[int]) -> float:
    """Summed -log p of the target's tokens behind the context, without a cache."""
    ids = torch.tensor([context + target])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(context) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum"))


@pytest.mark.parametrize("name", DECODERS)
def test_every_pair_as_one_sequence(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(name, tmp_path / "model", language_model=True)
    batches = BatchReader(store_chunk_batches(tmp_path / "batches", files=(2, 1)))
    reader = ScoreReader(score(tmp_path / "scores", batches.uri, folder))
    reader.require_batches(batches)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    separator = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    for number in range(batches.number_of_batches(0)):
        texts = batches.read(0, number)["document"].to_pylist()
        targets = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        contexts = [tokenizer(text)["input_ids"] + separator for text in texts]
        expected = [[one_sequence(model, context, target) for context in contexts] for target in targets]
        np.testing.assert_allclose(reader.read(0, number, mean=False), expected, rtol=1e-4)
        lengths = np.array([[len(target)] for target in targets])
        np.testing.assert_allclose(reader.read(0, number, mean=True), expected / lengths, rtol=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"), language_model=True)


@pytest.fixture
def batches(tmp_path: Path) -> str:
    return store_chunk_batches(tmp_path / "batches", epochs=2)


def test_every_epoch_and_so_many_tokens_and_no_other_batches(llama: Path, batches: str, tmp_path: Path) -> None:
    settings = {"model": str(llama), "dtype": "float32", "max_length": 3}
    reader = ScoreReader(score(tmp_path / "scores", batches, llama, language_model=settings))
    assert reader.artifact.rows == 2 * 3 * 4
    sums, means = (reader.read(0, 0, mean=mean) for mean in (False, True))
    np.testing.assert_allclose(sums / means, 3.0, rtol=1e-6)
    assert (reader.read(1, 0, mean=False) != sums).any()
    assert [shard.rows for shard in reader.artifact.shards] == [2 * 4, 4] * 2  # two batches a task
    stored = pq.ParquetFile(reader.artifact.path(reader.artifact.names("epoch=")[0])).metadata.row_group(0)
    assert stored.column(0).compression == "ZSTD"
    for name, separator in (("nothing", ""), ("another", " and ")):
        uri = score(tmp_path / name, batches, llama, language_model=settings, separator=separator)
        assert (ScoreReader(uri).read(0, 0, mean=False) != sums).any()
    other = BatchReader(store_chunk_batches(tmp_path / "other", files=(1, 1)))
    with pytest.raises(UserError, match=r"belong to other batches \(\w{12}\) than .*Score these \(raytriever score\)"):
        reader.require_batches(other)


def test_a_chunk_behind_another_must_have_positions(batches: str, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=400, n_embd=32, n_layer=1, n_head=2, n_positions=48)
    folder = save_tiny_model("smollm2", tmp_path / "model", language_model=True)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    settings = {"model": str(folder), "dtype": "float32", "max_length": 21}
    with pytest.raises(UserError, match=r"positions for 48 tokens in all\. Lower max_length to 20"):
        score(tmp_path / "scores", batches, folder, language_model=settings)
    values = {"batches": batches, "output": str(tmp_path / "other"), "language_model": settings}
    stage = Score(validate(ScoreConfig, values, "score"))
    for check in (lambda: stage.check_inputs({"language_model.model"}), stage.load):
        with pytest.raises(UserError, match="Lower max_length to 20"):
            check()
    settings["max_length"] = 20
    score(tmp_path / "scores", batches, folder, language_model=settings)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer"):
        stage.check_inputs({"language_model.model"})
    values["batches"] = store_pairs(tmp_path / "pairs", [[pair(0), pair(1)]])
    with pytest.raises(UserError, match="batches of layout 'pairs', but scores need chunks"):
        Score(validate(ScoreConfig, values, "score")).check_inputs({"batches"})


def test_models_that_are_no_language_models_or_bring_code_are_refused(batches: str, tmp_path: Path) -> None:
    own = save_tiny_model("llama", tmp_path / "own", language_model=True)
    values = {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    edited(own / "config.json", lambda config: config.update(values))
    (own / "own.py").write_text("raise SystemExit('was run')")
    for folder, message in (
        (own, "brings code of its own, which is not run"),
        (
            save_tiny_model("llama", tmp_path / "llama"),
            r"lack 1 tensors of a language model, the first lm_head\.weight",
        ),
        (save_tiny_model("t5", tmp_path / "t5"), "can't be loaded"),
    ):
        with pytest.raises(UserError, match=message):
            score(tmp_path / "scores", batches, folder)


def test_a_chunk_without_a_token_is_named(llama: Path, batches: str, tmp_path: Path) -> None:
    values = {"batches": batches, "output": str(tmp_path), "language_model": {"model": str(llama), "dtype": "float32"}}
    stage = Score(validate(ScoreConfig, values, "score"))
    stage.load()
    with pytest.raises(UserError, match=r"^Batch 3 of epoch 1 in .*batches: chunk 1 has no token to score\."):
        stage._scored(["some", ""], epoch=1, number=3)
