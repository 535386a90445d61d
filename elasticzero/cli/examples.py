"""Holds the examples that the help of each command shows; tests run every one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticzero.launcher.options.parser import EXAMPLES as HEADING
from elasticzero.launcher.options.parser import Parser

AFTER = "`elasticzero help COMMAND` shows the options of a command, with examples."

EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "": (
        ("two nodes on this machine, one of which is killed at step 20",
         "elasticzero local --nodes 2 --fault kill-node@20 train.py"),
        ("two to eight machines, the same line on each",
         "elasticzero run --nnodes 2:8 --etcd etcd-host:2379 --job my-run train.py"),
        ("what may stop a job on this machine",
         "elasticzero doctor --etcd etcd-host:2379"),
    ),
    "run": (
        ("one machine, one worker a GPU",
         "elasticzero run train.py --lr 0.001"),
        ("two to eight machines, the same line on each",
         "elasticzero run --nnodes 2:8 --etcd etcd-host:2379 --job my-run \\\n"
         "    --strategy zero2 --checkpoint-dir checkpoints --checkpoint-every 500 train.py"),
        ("what a file of options means here, without starting anything",
         "elasticzero run --config job.toml --dry-run"),
    ),
    "local": (
        ("three nodes; one is killed at step 60, another joins at step 110",
         "elasticzero local --nodes 3 --fault kill-node@60 --fault join@110 train.py"),
        ("two nodes of two workers, with a checkpoint every 50 steps",
         "elasticzero local --nodes 2 --nproc-per-node 2 --checkpoint-dir checkpoints \\\n"
         "    --checkpoint-every 50 train.py"),
    ),
    "rehearse": (
        ("what a killed worker or node, a drain and a join would do to a script",
         "elasticzero rehearse train.py"),
        ("only with state divided among the ranks, on three nodes of which one is killed",
         "elasticzero rehearse --strategies zero2 --worlds 3 --faults kill-node train.py --lr 0.1"),
        ("the verdicts for a program, and the logs kept",
         "elasticzero rehearse --strategies ddp --steps 8 --json --log-dir rehearsals train.py"),
    ),
    "status": (
        ("a job's generation, progress and nodes",
         "elasticzero status --etcd etcd-host:2379 --job my-run"),
        ("the same for a program; the environment says which job",
         "ELASTICZERO_ETCD=etcd-host:2379 ELASTICZERO_JOB=my-run elasticzero status --json"),
        ("the address of the status page, with the token that it asks for",
         "elasticzero status --url --etcd etcd-host:2379 --job my-run"),
    ),
    "top": (
        ("a job on the whole terminal, until q is pressed",
         "elasticzero top --etcd etcd-host:2379 --job my-run"),
        ("the same screen once, as for a file",
         "elasticzero top --once --etcd etcd-host:2379 --job my-run"),
    ),
    "drain": (
        ("node-b hands its state over and leaves",
         "elasticzero drain node-b --etcd etcd-host:2379 --job my-run"),
        ("the same, and return once it has left",
         "elasticzero drain node-b --wait --etcd etcd-host:2379 --job my-run"),
    ),
    "scale": (
        ("go on with two to four nodes",
         "elasticzero scale 2:4 --etcd etcd-host:2379 --job my-run"),
        ("exactly four nodes, and return once they train",
         "elasticzero scale 4 --wait --etcd etcd-host:2379 --job my-run"),
    ),
    "stop": (
        ("end the job at the next step",
         "elasticzero stop --etcd etcd-host:2379 --job my-run"),
        ("the same, and return once it has ended, or fail after a minute",
         "elasticzero stop --wait --wait-timeout 60 --etcd etcd-host:2379 --job my-run"),
    ),
    "tls": (
        ("the certificate for a Prometheus that scrapes the job",
         "elasticzero tls ca --job my-run --token-file token > my-run-ca.pem"),
        ("the same; the environment has the token",
         "ELASTICZERO_TOKEN=$TOKEN elasticzero tls ca --job my-run"),
    ),
    "tls ca": (
        ("the certificate for a Prometheus that scrapes the job",
         "elasticzero tls ca --job my-run --token-file token > my-run-ca.pem"),
        ("the same; the environment has the token",
         "ELASTICZERO_TOKEN=$TOKEN elasticzero tls ca --job my-run"),
    ),
    "doctor": (
        ("this machine alone",
         "elasticzero doctor"),
        ("everything that a job on two machines needs",
         "elasticzero doctor --etcd etcd-host:2379 --checkpoint-dir checkpoints --peer node-b"),
        ("the findings for a program, and the room that snapshots need",
         "elasticzero doctor --json --snapshot-size 40GiB"),
    ),
    "report": (
        ("the page of a job, from the logs of its nodes",
         "elasticzero report logs/my-run --output my-run.html"),
        ("of a job that runs, from its agents",
         "elasticzero report --etcd etcd-host:2379 --job my-run"),
    ),
    "plan": (
        ("a model of 7 billion parameters on two nodes of eight GPUs",
         "elasticzero plan --params 7B --nodes 2 --gpus 8"),
        ("only with state divided within each node, on GPUs of 40 GiB",
         "elasticzero plan --params 7B --nodes 2 --gpus 8 --shard node --gpu-memory 40GiB"),
    ),
    "k8s": (
        ("manifests of a script on eight spot nodes of GKE at most",
         "elasticzero k8s render --name train --image registry.example.com/me/train:1 \\\n"
         "    --nnodes 2:8 --gpus 8 --cloud gke --spot --checkpoints gs://bucket/runs train.py"),
        ("two to six nodes from now on",
         "elasticzero k8s scale train 2:6 --apply"),
    ),
    "k8s render": (
        ("a script in the image, with volumes of a storage class",
         "elasticzero k8s render --name train --image registry.example.com/me/train:1 \\\n"
         "    --nnodes 2:4 --checkpoints nfs-client /app/train.py"),
        ("a script from here, in a ConfigMap, and an etcd that runs",
         "elasticzero k8s render --name train --image registry.example.com/me/train:1 \\\n"
         "    --nnodes 2:4 --checkpoints s3://bucket/runs --etcd etcd:2379 train.py"),
    ),
    "k8s scale": (
        ("the commands that change it",
         "elasticzero k8s scale train 2:6"),
        ("the same, carried out",
         "elasticzero k8s scale train 2:6 --apply"),
    ),
    "k8s drain": (
        ("the commands that empty the machine of the pod with index 3",
         "elasticzero k8s drain train 3"),
        ("the same, carried out",
         "elasticzero k8s drain train 3 --apply"),
    ),
    "k8s replace-etcd-member": (
        ("the commands that replace the third member",
         "elasticzero k8s replace-etcd-member train 2"),
        ("the same, carried out",
         "elasticzero k8s replace-etcd-member train 2 --apply"),
    ),
    "checkpoint": (
        ("the steps in a directory",
         "elasticzero checkpoint list checkpoints"),
        ("every byte of every step, against its checksum",
         "elasticzero checkpoint verify checkpoints"),
    ),
    "checkpoint list": (
        ("the steps in a directory",
         "elasticzero checkpoint list checkpoints"),
        ("the same for a program",
         "elasticzero checkpoint list checkpoints --json"),
    ),
    "checkpoint inspect": (
        ("the newest step",
         "elasticzero checkpoint inspect checkpoints"),
        ("the same for a program",
         "elasticzero checkpoint inspect checkpoints --json"),
    ),
    "checkpoint verify": (
        ("every step in a directory",
         "elasticzero checkpoint verify checkpoints"),
        ("the same for a program",
         "elasticzero checkpoint verify checkpoints --json"),
    ),
    "checkpoint reshard": (
        ("the newest step for four ranks",
         "elasticzero checkpoint reshard checkpoints for-four --world-size 4"),
        ("the same for ddp, with the model in 16 bits",
         "elasticzero checkpoint reshard checkpoints small --world-size 1 --strategy ddp \\\n"
         "    --dtype bf16"),
    ),
    "checkpoint diff": (
        ("what changed between two checkpoints",
         "elasticzero checkpoint diff checkpoints other-checkpoints"),
        ("the same for a program",
         "elasticzero checkpoint diff checkpoints other-checkpoints --json"),
    ),
    "checkpoint export": (
        ("the model as safetensors files, as Hugging Face's libraries load them",
         "elasticzero checkpoint export checkpoints exported --format hf"),
        ("model and optimizer for torch's DCP",
         "elasticzero checkpoint export checkpoints exported-dcp --format dcp --what all"),
    ),
    "checkpoint import": (
        ("a model in safetensors files",
         "elasticzero checkpoint import exported imported --format hf --world-size 2"),
        ("what torch's DCP has saved",
         "elasticzero checkpoint import exported-dcp imported-dcp --format dcp --world-size 2"),
    ),
    "show": (
        ("which files there are",
         "elasticzero show"),
        ("the dashboard for Grafana, into a file",
         "elasticzero show dashboard > dashboard.json"),
        ("a training script to begin with",
         "elasticzero show examples/quickstart.py > train.py"),
    ),
    "completion": (
        ("in this bash, from now on",
         'source <(elasticzero completion bash)'),
        ("in every zsh: add this line to ~/.zshrc, after compinit",
         'source <(elasticzero completion zsh)'),
        ("in every fish",
         "elasticzero completion fish > ~/.config/fish/completions/elasticzero.fish"),
    ),
    "help": (
        ("the help of a command, and of one below it",
         "elasticzero help run\n  elasticzero help checkpoint verify"),
    ),
}  # fmt: skip
"""For each command its examples: what the line does, and the line. The words `train.py`,
`job.toml`, `checkpoints`, `etcd-host:2379` and `my-run` stand for what the user has."""


def add_examples(parser: Parser) -> None:
    """Adds the examples of the command and of those below it to their help."""
    for path, examples in EXAMPLES.items():
        command: Parser | None = parser
        for name in path.split():
            command = command.commands.get(name) if command is not None else None
        if command is not None:
            command.epilog = _text(examples, after=AFTER if not path else "")


def _text(examples: Sequence[tuple[str, str]], *, after: str) -> str:
    shown = "\n\n".join(f"  # {what}\n  {line}" for what, line in examples)
    return f"{HEADING}{shown}\n" + (f"\n{after}\n" if after else "")
