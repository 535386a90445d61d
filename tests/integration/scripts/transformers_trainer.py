"""Trains a tiny language model in float64 by transformers' Trainer, and writes down which samples
each global batch holds."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from elasticzero.integrations.transformers import Trainer
from tests.integration.scripts import adapted

SAMPLES, LENGTH, WORDS = 101, 12, 32


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of words of unequal lengths, whose rest is not learnt."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[3 + index % 9 :] = -100
        return {"input_ids": tokens, "labels": labels, "unused": index}


class Trace(TrainerCallback):
    """Writes down the samples of each step, and slows it."""

    def __init__(self, pause_s: float) -> None:
        self.trainer: Trainer | None = None
        self._pause_s = pause_s

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        adapted.trace(self.trainer.session, self._pause_s)


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """In 64 bits, where transformers' own computes in 32."""
    logits, targets = outputs.logits[:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(
        logits.reshape(-1, WORDS), targets.reshape(-1), ignore_index=-100, reduction="sum"
    )
    assert num_items_in_batch is not None
    return total / num_items_in_batch


def gpt2() -> GPT2LMHeadModel:
    """A model that computes in 64 bits throughout."""
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def right(prediction: Any) -> dict[str, float]:
    """The share of words that were foreseen, of all that count."""
    guessed, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"right": float((guessed == labels)[labels != -100].mean())}


def main() -> None:
    parser = adapted.parser()
    parser.add_argument("--best", action="store_true", help="end with the best model")
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    options = parser.parse_args()
    torch.manual_seed(0)
    model: PreTrainedModel = gpt2() if options.model == "gpt2" else llama()
    args = TrainingArguments(
        output_dir=options.output,
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=options.epochs,
        learning_rate=1e-2,
        warmup_steps=5,
        weight_decay=0.1,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=2,
        load_best_model_at_end=options.best,
        metric_for_best_model="right" if options.best else None,
        report_to=[],
        disable_tqdm=True,
    )
    trace = Trace(options.pause)
    held_out = torch.utils.data.Subset(Texts(), range(21))
    trainer = Trainer(
        model.double(),
        args,
        train_dataset=Texts(),
        eval_dataset=held_out,
        compute_loss_func=loss_of if options.model == "gpt2" else None,
        compute_metrics=right,
        callbacks=[trace],
        global_batch=options.global_batch,
    )
    trace.trainer = trainer
    output = trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        history = {entry["step"]: [entry["loss"], entry["grad_norm"]] for entry in logged}
        assert len(history) == len(logged), "a step is logged twice"
        told = {"steps": output.global_step, "loss": output.training_loss, "logged": history}
        told["flos"] = trainer.state.total_flos
        told |= {"eval": metrics["eval_loss"], "right": metrics["eval_right"]}
        evaluated = [e for e in trainer.state.log_history[:-1] if "eval_right" in e]
        told["each"] = [[entry["eval_right"], entry["eval_loss"]] for entry in evaluated]
        print(json.dumps({"ended": told}), flush=True)


if __name__ == "__main__":
    main()
