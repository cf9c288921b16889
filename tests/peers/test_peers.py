"""Stored and exported batches in the trainers of others: their own code trains on them, batch by batch.

Each test needs an environment with that library, whose Python a variable names, and Raytriever's two dependencies for
those that use the sampler::

    python -m venv pylate && pylate/bin/pip install pylate
    RAYTRIEVER_TEST_DATA=… RAYTRIEVER_PYLATE=pylate/bin/python pytest -m slow tests/peers

RAYTRIEVER_SENTENCE_TRANSFORMERS: ``sentence-transformers[train]==5.1.*``. RAYTRIEVER_PYLATE: ``pylate==1.6.0``.
RAYTRIEVER_FLAG_EMBEDDING: ``FlagEmbedding==1.4.2``. RAYTRIEVER_TEVATRON: Tevatron 2 from its repository, at dd06310.
"""

import json
import os
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from pipelines.batches import BatchReader, epoch_permutation
from pipelines.formats.beir import BeirFolder
from pipelines.jobs.collect import Collect, CollectConfig
from pipelines.jobs.export import Export, ExportConfig
from pipelines.jobs.filter import Filter, FilterConfig
from pipelines.jobs.pack import Pack, PackConfig
from pipelines.jobs.pairs import Pairs, PairsConfig
from raytriever.settings.configuration import validate
from tests.unit.retrieval.encoders.tiny_models import load_tiny
from tests.unit.small_run import make
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import ContrastiveSettings

ROOT = Path(__file__).parents[2]
SIZE = 16
DATA = os.environ.get("RAYTRIEVER_TEST_DATA", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA, reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections"),
]
Published = Callable[[str], Path]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> BatchReader:
    """Claims and sentences that support them, several of one: masks; those that do not are hard negatives."""
    folder = tmp_path_factory.mktemp("stored")
    source = BeirFolder(path=f"{DATA}/climate_fever_sent")
    collection = make(Collect(CollectConfig(source=source, output=str(folder / "collection"))))
    pairs = make(Pairs(PairsConfig(collection=collection, output=str(folder / "pairs"))))
    packing = {"batch_size": SIZE, "order": "random"}
    packed = {"pairs": pairs, "packing": packing, "epochs": 1, "output": str(folder / "packing")}
    made = {
        "packing": make(Pack(validate(PackConfig, packed, "pack"))), "pairs": pairs, "collection": collection,
        "judged_negatives": "train", "too_few_negatives": "random", "false_negatives": {"surrogate_score": False},
        "output": str(folder / "batches"),
    }  # fmt: skip
    batches = BatchReader(make(Filter(validate(FilterConfig, made, "filter"))))
    assert sum(len(masked) for batch in in_order(batches) for masked in batch["masked"].to_pylist()) > 20
    return batches


@pytest.fixture(scope="module")
def published(reader: BatchReader, tmp_path_factory: pytest.TempPathFactory) -> Published:
    def export(form: str) -> Path:
        settings = {"batches": reader.uri, "format": form, "output": str(tmp_path_factory.mktemp(form) / "exported")}
        return Path(make(Export(ExportConfig.model_validate(settings))))

    return export


@pytest.fixture(scope="module")
def model(reader: BatchReader, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT whose tokenizer is a vocabulary alone, which libraries of every age read."""
    folder = tmp_path_factory.mktemp("model")
    texts = [text.lower() for batch in in_order(reader) for text in batch["document"].to_pylist()]
    words = Counter(re.findall(r"\w+", " ".join(texts)))
    letters = sorted({letter for text in texts for letter in text if not letter.isspace()})
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    known += [word for word, _ in words.most_common(400) if len(word) > 1]
    (folder / "vocab.txt").write_text("\n".join(known) + "\n", encoding="utf-8")
    names = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(known), max_position_embeddings=64, **shape)
    BertModel(config).save_pretrained(folder)
    return folder


def in_order(reader: BatchReader) -> list:
    """The epoch's batches as they are exported."""
    return [reader.read(0, int(number)) for number in epoch_permutation(0, 0, reader.number_of_batches(0))]


def texts(reader: BatchReader) -> list[list[list[str]]]:
    """Of each batch and row the query, its document, its hard negative."""
    rows = (batch.select(["query", "document", "hard_negatives"]).to_pylist() for batch in in_order(reader))
    return [[[row["query"], row["document"], *row["hard_negatives"]] for row in batch] for batch in rows]


def run(library: str, cache: Path, script: str, *arguments: object) -> str:
    """What the script prints under the library's Python; ``cache``: of the data sets that it reads."""
    variable = f"RAYTRIEVER_{library}"
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name the Python of an environment with that library")
    local = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), **local}
    command = [os.environ[variable], str(Path(__file__).parent / script), *map(str, arguments)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_trained(folder: Path, before: Path) -> None:
    """The saved weights are others than those that it began with."""
    from safetensors.torch import load_file

    [new] = [*folder.glob("model.safetensors"), *folder.glob("pytorch_model.bin")]
    weights = load_file(new) if new.suffix == ".safetensors" else torch.load(new)
    name = "embeddings.word_embeddings.weight"
    [trained] = [value for key, value in weights.items() if key.endswith(name)]
    old = load_file(before / "model.safetensors")[name]
    assert not torch.allclose(trained[: len(old)], old, atol=1e-7)
    assert trained.isfinite().all()


def test_sentence_transformers_5_has_our_loss_and_gradients(
    reader: BatchReader, published: Published, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "found.pt"
    run(
        "SENTENCE_TRANSFORMERS",
        tmp_path / "cache",
        "sentence_transformers_loss.py",
        model,
        published("hugging_face"),
        output,
    )
    encoder = load_tiny(model, pooling="mean", dtype="float32")
    objective = Contrastive(encoder, ContrastiveSettings(similarity_temperature=0.07))
    ours = objective(objective.collate(in_order(reader)[0])).loss
    ours.backward()
    expected = {name.removeprefix("transformer."): weight.grad for name, weight in encoder.named_parameters()}
    for found in torch.load(output).values():
        assert found.pop("loss").item() == pytest.approx(ours.item(), abs=1e-5)
        assert found.keys() == {name for name, gradient in expected.items() if gradient is not None}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_pylate_trains_on_published_batches_with_their_masks(
    reader: BatchReader, published: Published, model: Path, tmp_path: Path
) -> None:
    lines = run(
        "PYLATE", tmp_path / "cache", "train_pylate.py", model, published("hugging_face"), tmp_path / "trained"
    ).splitlines()
    seen = [tuple(map(int, line.split()[1:])) for line in lines if line.startswith("batch ")]
    order = epoch_permutation(42, 0, reader.number_of_batches(0)).tolist()  # the trainer's own seed
    masked = [sum(map(len, reader.read(0, number)["masked"].to_pylist())) for number in order]
    assert seen == [(0, number, count) for number, count in zip(order, masked, strict=True)]
    assert_trained(tmp_path / "trained", model)


@pytest.mark.parametrize(("form", "library", "module", "settings"), [
    ("flag_embedding", "FLAG_EMBEDDING", "FlagEmbedding.finetune.embedder.encoder_only.base", {}),
    ("tevatron", "TEVATRON", "tevatron.retriever.driver.train", {"attn_implementation": "eager"}),
])  # fmt: skip
def test_exported_batches_are_trained_on_in_their_order(
    form: str,
    library: str,
    module: str,
    settings: dict[str, str],
    reader: BatchReader,
    published: Published,
    model: Path,
    tmp_path: Path,
) -> None:
    folder = published(form)
    command = re.search(r"(?:torchrun|python) -m (\S+) (.*?) …", (folder / "README.md").read_text(), re.DOTALL)
    assert command is not None
    assert command[1] == module
    named = shlex.split(command[2].replace("\\\n", " ").replace("epoch-*/batches-*", "epoch-00000/batches-00000"))
    settings |= {
        "model_name_or_path": str(model), "output_dir": str(tmp_path / "trained"), "query_max_len": "32",
        "passage_max_len": "48", "train_sampling_strategy": "sequential", "save_strategy": "no", "report_to": "none",
        "use_cpu": "true",
    }  # fmt: skip
    given = [part for name, value in settings.items() for part in (f"--{name}", value)]
    named = [part.replace("data/", f"{folder}/data/") for part in named]
    printed = run(library, tmp_path / "cache", f"train_{form}.py", *named, *given)
    seen = [json.loads(line) for line in printed.splitlines() if line.startswith("[[")]
    assert seen == texts(reader)
    assert_trained(tmp_path / "trained", model)
