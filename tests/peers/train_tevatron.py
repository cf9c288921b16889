"""Tevatron 0.1's trainer on exported batches: train_tevatron.py MODEL FOLDER OUTPUT; prints the batches it collates.

``FOLDER``: of an epoch's files. The trainer is made to take examples in their order, as the card says.
"""

import json
import sys

from tevatron.arguments import DataArguments, DenseTrainingArguments, ModelArguments
from tevatron.data import QPCollator, TrainDataset
from tevatron.datasets import HFTrainDataset, TrainPreProcessor
from tevatron.modeling import DenseModel
from tevatron.trainer import DenseTrainer
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer

model, folder, output = sys.argv[1:]
data = DataArguments(train_dir=folder, train_n_passages=2, dataset_proc_num=1, q_max_len=32, p_max_len=48)
args = DenseTrainingArguments(
    output, per_device_train_batch_size=16, num_train_epochs=1, save_strategy="no", report_to="none", use_cpu=True,
    remove_unused_columns=False, warmup_ratio=0,
)  # fmt: skip
tokenizer = AutoTokenizer.from_pretrained(model, use_fast=False)


class InOrder(DenseTrainer):
    def _get_train_sampler(self):
        return SequentialSampler(self.train_dataset)


class Seen(QPCollator):
    def __call__(self, features):
        texts = [[query, *passages] for query, passages in features]
        print(json.dumps([[text["input_ids"] for text in row] for row in texts]), flush=True)
        return super().__call__(features)


examples = HFTrainDataset(tokenizer, data, None)
examples.preprocessor = TrainPreProcessor  # of a data set that it knows by name, it would be this one
dataset = TrainDataset(data, examples.process(), tokenizer)
encoder = DenseModel.build(ModelArguments(model), data, args)
collator = Seen(tokenizer, max_q_len=32, max_p_len=48)
trainer = InOrder(encoder, args, train_dataset=dataset, data_collator=collator)
dataset.trainer = trainer
trainer.train()
trainer.save_model()
