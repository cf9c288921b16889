"""FlagEmbedding's trainer on exported batches, by its own arguments; prints the batches that it collates."""

import json

from FlagEmbedding.finetune.embedder.encoder_only.base import (
    EncoderOnlyEmbedderDataArguments,
    EncoderOnlyEmbedderModelArguments,
    EncoderOnlyEmbedderRunner,
    EncoderOnlyEmbedderTrainingArguments,
)
from transformers import HfArgumentParser

kinds = (EncoderOnlyEmbedderModelArguments, EncoderOnlyEmbedderDataArguments, EncoderOnlyEmbedderTrainingArguments)
runner = EncoderOnlyEmbedderRunner(*HfArgumentParser(kinds).parse_args_into_dataclasses())
collate = runner.data_collator


def seen(features):
    print(json.dumps([[query, *passages] for query, passages, _ in features]), flush=True)
    return collate(features)


runner.trainer.data_collator = seen
runner.run()
