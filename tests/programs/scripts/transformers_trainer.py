"""The Trainer of transformers with a tiny model that it does not download."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
rows = [{"input_ids": torch.randint(0, 32, (8,)), "labels": torch.tensor(n % 2)} for n in range(16)]
options = TrainingArguments(
    "out", use_cpu=True, max_steps=4, logging_steps=1, save_steps=2, report_to=[], per_device_train_batch_size=4
)
trainer = Trainer(BertForSequenceClassification(config), options, train_dataset=rows)
trainer.train()
print("processes:", options.world_size)
