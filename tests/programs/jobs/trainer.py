"""Hugging Face Trainer: a causal language model from a configuration, with evaluation."""

import planted
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class Checked(Trainer):
    def training_step(self, *args, **kwargs):
        planted.check(self.state.global_step)
        return super().training_step(*args, **kwargs)


config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
)
arguments = TrainingArguments(
    output_dir="~/trainer",
    use_cpu=True,
    max_steps=4,
    per_device_train_batch_size=2,
    eval_strategy="steps",
    eval_steps=2,
    logging_steps=2,
    save_strategy="no",
    report_to="none",
)
trainer = Checked(LlamaForCausalLM(config), arguments, train_dataset=Texts(), eval_dataset=Texts())
trainer.train()
print(f"trained {trainer.state.global_step} steps on {arguments.world_size} ranks", flush=True)
