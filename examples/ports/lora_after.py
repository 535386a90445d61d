"""Fine-tunes adapters (LoRA) of a language model on nodes that come and go, to classify texts."""

import argparse
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, TrainingArguments

from elasticzero.integrations.transformers import Trainer

LENGTH, WORDS, CLASSES = 16, 64, 4


class Texts(Dataset[dict[str, Any]]):
    """Random words, of which the last ones tell the class."""

    def __init__(self, first: int, samples: int) -> None:
        self.first, self.samples = first, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        label = int(torch.randint(CLASSES, (), generator=generator))
        tokens[-3:] = 1 + label
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": label}


def base_model() -> Any:
    """Returns a model of random weights, where your script has `from_pretrained`."""
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        num_labels=CLASSES,
        pad_token_id=0,
        attn_implementation="eager",
    )
    return AutoModelForSequenceClassification.from_config(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=480)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of a step on each rank")
    parser.add_argument("--float64", action="store_true", help="compute in double precision")
    parser.add_argument("--out", default="adapters")
    options = parser.parse_args()
    torch.manual_seed(0)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=4,
        lora_alpha=16,
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,
    )
    model = get_peft_model(base_model(), lora)
    if options.float64:
        model.double()
    arguments = TrainingArguments(
        output_dir=options.out,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=options.batch,
        num_train_epochs=options.epochs,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        weight_decay=0.01,
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to=[],
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Texts(0, options.samples),
        eval_dataset=Texts(options.samples, 96),
    )
    output = trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"training loss {output.training_loss:.12f}", flush=True)


if __name__ == "__main__":
    main()
