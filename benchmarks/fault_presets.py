"""The runs that `python -m benchmarks.faults` disturbs: recipes made so small that a core takes minutes for one.

All read the functions of the interpreter's own library and train MiniLM, so nothing is downloaded and no folder of data
is needed. Each of the objectives has a preset that disturbs its training alone: 12 steps with a checkpoint every 3.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from raytriever.errors import UserError

_FUNCTIONS = "{kind: python_functions, limit: 400, held_out: 0.2}"
_ARTICLES = "{kind: python_functions, limit: 60, held_out: 0}"
_SHORT_TRAINING = (
    "model.training.max_steps=12",
    "model.training.checkpoint_every=3",
    "model.resources.cpus_per_worker=1",
)
_QUICKSTART = (
    "functions.source.limit=600",
    "base_vectors.texts_per_shard=60",
    "clusters.cluster_size=16",
    "clusters.smallest_domain=16",
    *_SHORT_TRAINING,
)
_SHORT_TEXTS = ("model.objective.query_max_length=32", "model.objective.document_max_length=32")
_TRIPLETS = (
    f"corpus.source={_FUNCTIONS}",
    "packing.packing.batch_size=16",
    "model.validation=null",
    *_SHORT_TEXTS,
    *_SHORT_TRAINING,
)
# of functions, in small chunks, and with MiniLM as the retriever, all of whose weights are trained
_CHUNKS = (
    f"articles.source={_ARTICLES}",
    "chunks.chunking={kind: code, programming_language: python, max_words: 32, min_words: 8}",
    "batches.grouping.batch_size=8",
    "batches.small_domains=merge",
    "batches.epochs=2",
    f"test.source={_ARTICLES}",  # stands before the training, which then leaves it alone
    "model.encoder={model: sentence-transformers/all-MiniLM-L6-v2}",
    "model.lora=null",
    "model.objective.first_half=false",
    "model.objective.max_length=32",
    "model.objective.similarity_temperature=0.02",
    "model.training.epochs=2",
    "model.training.schedule.warmup_steps=2",
    "model.validation=null",
    *_SHORT_TRAINING,
)


@dataclass(frozen=True)
class Preset:
    """A recipe, what makes it small, and which of its stages are disturbed; none: all.

    ``language_model``: the setting that names one, where the recipe reads one. It has no default: the folder is given.
    """

    recipe: str
    settings: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    language_model: str = ""

    def settings_with(self, language_model: Path | None) -> tuple[str, ...]:
        """All settings, the folder of a language model among them where one is read.

        Raises ``UserError`` where one is read and none given, or the other way round, and where it is no folder.
        """
        if not self.language_model:
            if language_model is not None:
                raise UserError(
                    f"--language-model {language_model}: of the presets only {', '.join(reading_presets())} read one."
                    " Leave it out, or of a recipe that is none of them name the setting with --set."
                )
            return self.settings
        if language_model is None:
            raise UserError(
                f"The recipe {self.recipe} reads a language model: name its folder with --language-model FOLDER."
                " `python -m benchmarks.small_language_model` trains one in a minute."
            )
        if not language_model.is_dir():
            raise UserError(
                f"--language-model {language_model} is no folder. Name the one that holds the language model's"
                " config.json, weights and tokenizer."
            )
        return *self.settings, f"{self.language_model}={json.dumps(str(language_model.absolute()))}"


PRESETS = {
    "quickstart": Preset("quickstart_transformer", _QUICKSTART),
    "contrastive": Preset("quickstart_transformer", _QUICKSTART, ("model",)),
    "adaptive_margins": Preset("adaptive_margins", _TRIPLETS, ("model",)),
    "multi_layer": Preset("multi_layer", _TRIPLETS, ("model",)),
    "coder": Preset(
        "coder",
        (
            f"corpus.source={_FUNCTIONS}",
            "train_run.top_k=50",
            "batches.batch_size=8",
            "model.objective.candidates=50",
            "model.objective.query_max_length=32",
            "model.training.batches_per_step=4",  # else a step were too short to be struck
            # the learning rate goes by evaluations, which a training that goes on must know: one a checkpoint
            "model.training.schedule.warmup_steps=3",
            "model.training.schedule.patience=0",
            "model.validation.split=test",
            "model.validation.queries=32",
            "model.validation.every=3",
            *_SHORT_TRAINING,
        ),
        ("model",),
    ),
    "contextual": Preset(
        "contextual",
        (
            f"corpus.source={_FUNCTIONS}",
            "clusters.cluster_size=8",
            "clusters.smallest_domain=16",
            "packing.packing.batch_size=16",
            "random_packing.packing.batch_size=16",
            "model.objective.context_documents=4",
            "model.objective.context_max_length=32",
            "model.training.schedule.warmup_steps=2",
            "model.validation=null",
            *_SHORT_TEXTS,
            *_SHORT_TRAINING,
        ),
        ("model",),
    ),
    "revela": Preset(
        "revela",
        (*_CHUNKS, "model.objective.language_model={lora: null, max_length: 32}"),
        ("model",),
        "model.objective.language_model.model",
    ),
    "replug": Preset(
        "replug",
        (*_CHUNKS, "scores.language_model.max_length=32"),
        ("model",),
        "scores.language_model.model",
    ),
}


def reading_presets() -> list[str]:
    """The presets that read a language model, by name."""
    return [name for name, preset in PRESETS.items() if preset.language_model]
