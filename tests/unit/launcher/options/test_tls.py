"""The options on TLS: what they mean, what is refused, and the authority that a command prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509

from elasticzero.cli.main import main, parse
from elasticzero.errors import ExitCode, UserError
from elasticzero.launcher.options.tls_settings import TlsSettings, check_tls
from elasticzero.launcher.secrets import Secret
from elasticzero.launcher.tls.authority import JobAuthority
from elasticzero.launcher.tls.credentials import NodeName
from elasticzero.launcher.tls.files import CredentialFiles
from elasticzero.launcher.tls.setup import node_contexts
from tests.support.certificates import Authority

TOKEN = Secret("a-token-of-the-job")


def checked(*arguments: str, token: Secret | None = TOKEN) -> TlsSettings:
    return check_tls(parse(["run", *arguments, "train.py"]), token)


@pytest.fixture
def files(tmp_path: Path) -> CredentialFiles:
    authority = Authority(tmp_path / "pems", "ours")
    pair = authority.sign("node")
    return CredentialFiles(
        certificate=str(pair.cert), key=str(pair.key), authorities=str(authority.cert)
    )


def test_without_options_the_job_decides() -> None:
    assert checked() == checked(token=None) == TlsSettings()
    assert checked("--tls", "job").mode == "job"
    assert checked("--tls", "off", token=None).mode == "off"


def test_files_stand_in_a_section_of_the_file_too(files: CredentialFiles, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        f"[tls]\ntls = 'files'\ntls-cert = '{files.certificate}'\ntls_key = '{files.key}'\n"
        f"tls-ca = '{files.authorities}'\n"
    )
    settings = checked("--config", str(config), token=None)
    assert settings == TlsSettings(mode="files", files=files)


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (["--tls", "job"], None, "--tls job makes certificates from the job's token: give"),
        (["--tls", "files"], TOKEN, "--tls files needs --tls-cert FILE too"),
        (["--tls", "files", "--tls-cert", "a", "--tls-ca", "b"], TOKEN, "needs --tls-key FILE"),
        (["--tls-ca", "a"], TOKEN, "--tls-ca a is for --tls files"),
        (["--tls", "job", "--tls-key", "a"], TOKEN, "--tls-key a is for --tls files"),
        (
            ["--tls", "files", "--tls-cert", "/no/a", "--tls-key", "b", "--tls-ca", "c"],
            TOKEN,
            "--tls-cert /no/a: No such file",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], token: Secret | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        checked(*arguments, token=token)


def test_a_node_follows_its_jobs_mode(files: CredentialFiles) -> None:
    name = NodeName(job="j", run=1, node="a")
    assert node_contexts("off", name, TOKEN, [], files) is None
    contexts = node_contexts("job", name, TOKEN, ["10.0.0.1"], None)
    assert contexts is not None and TOKEN.reveal not in contexts.credentials.authorities
    contexts = node_contexts("files", name, TOKEN, [], files)
    assert contexts is not None
    assert contexts.credentials.authorities == Path(files.authorities).read_text()
    with pytest.raises(UserError, match="has begun with --tls files: give this node"):
        node_contexts("files", name, TOKEN, [], None)


def test_a_command_prints_the_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN.reveal + "\n")
    assert main(["tls", "ca", "--job", "j", "--token-file", str(file)]) == ExitCode.DONE
    printed = x509.load_pem_x509_certificate(capsys.readouterr().out.encode())
    same = x509.load_pem_x509_certificate(JobAuthority(TOKEN, "j").certificate.encode())
    assert printed.public_key() == same.public_key()
    monkeypatch.delenv("ELASTICZERO_TOKEN", raising=False)
    assert main(["tls", "ca", "--job", "j"]) == ExitCode.USAGE
    assert "the authority of a job is made of its token: give" in capsys.readouterr().err
