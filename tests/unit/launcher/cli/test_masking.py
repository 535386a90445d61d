"""Nothing secret is printed."""

from __future__ import annotations

import pytest

from elasticzero.launcher.cli.masking import (
    HIDDEN,
    masked_text,
    masked_variable,
    masked_words,
    names_secret,
)


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD"),
        *("MYSQL_PWD", "GITHUBTOKEN", "SENTRY_DSN", "--api-key", "--password", "hf.token"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)
    assert masked_variable(name.lstrip("-"), "open-sesame") == HIDDEN


@pytest.mark.parametrize(
    "name", ["PATH", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "--max-tokens", "KEYBOARD", "RANK"]
)
def test_names_of_what_may_be_seen(name: str) -> None:
    assert not names_secret(name)
    assert masked_variable(name, "7") == "7"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pass@proxy:3128/x", f"http://{HIDDEN}@proxy:3128/x"),
        ("https://h/x?sig=abc&n=3", f"https://h/x?sig={HIDDEN}&n=3"),
        ("https://h/x?X-Amz-Signature=abc", f"https://h/x?X-Amz-Signature={HIDDEN}"),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("s3://bucket/run@3", "s3://bucket/run@3"),
        ("one known-secret two", f"one {HIDDEN} two"),
    ],
)
def test_secrets_within_a_text(text: str, shown: str) -> None:
    assert masked_text(text, ["known-secret", "two"]) == shown


def test_words_after_an_option_that_names_a_secret() -> None:
    arguments = ["--lr", "3", "--hf-token", "abc", "--password=def", "KEY=x", "--auth"]
    arguments += ["--epochs", "2"]
    assert masked_words(arguments) == [
        *("--lr", "3", "--hf-token", HIDDEN, f"--password={HIDDEN}", f"KEY={HIDDEN}"),
        *("--auth", "--epochs", "2"),
    ]
