"""Trains a tiny language model by transformers' Seq2SeqTrainer, which evaluates by sequences that
it generates: of most prompts they end earlier on one rank than on the other."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import GenerationConfig, Seq2SeqTrainingArguments

from elasticzero.integrations.transformers import Seq2SeqTrainer
from tests.integration.scripts.transformers_trainer import WORDS, Texts, llama

ENDS = list(range(0, WORDS, 4))
"""Words that end a sequence."""


def lengths(prediction: Any) -> dict[str, float]:
    """The number of words of all sequences until their ends."""
    ends = [next((i for i, w in enumerate(row[12:]) if w in ENDS), 20) for row in prediction[0]]
    return {"words": float(sum(ends)), "different": float(len(set(ends)))}


def main() -> None:
    torch.manual_seed(1)
    model = llama().float()
    with torch.no_grad():  # so that sequences end after 1 to 20 words, each after others
        for parameter in model.parameters():
            parameter.mul_(10)
    options = {"eos_token_id": ENDS, "pad_token_id": 0, "max_new_tokens": 20, "do_sample": False}
    model.generation_config = GenerationConfig(**options)
    model.config.pad_token_id = 0
    args = Seq2SeqTrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        max_steps=3,
        learning_rate=1e-6,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=1,
        predict_with_generate=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(
        model,
        args,
        train_dataset=Texts(),
        eval_dataset=torch.utils.data.Subset(Texts(), range(8)),
        compute_metrics=lengths,
        global_batch=8,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_words" in entry]
    print(json.dumps([[e["eval_words"], e["eval_different"]] for e in logged]), flush=True)
    print(json.dumps({"after": trainer.evaluate()["eval_words"]}), flush=True)


if __name__ == "__main__":
    main()
