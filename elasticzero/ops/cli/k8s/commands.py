"""Renders manifests for Kubernetes, and prints or runs the kubectl commands that change a job
there: `elasticzero k8s`."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elasticzero.errors import ExitCode, OperatorError, UserError
from elasticzero.launcher.options.parser import Parser, add_command, add_options
from elasticzero.launcher.options.validation import parse_nnodes
from elasticzero.ops.cli.k8s.options import (
    CHANGE_OPTIONS,
    RENDER_OPTIONS,
    RENDER_REQUIRED,
    REPLACE_OPTIONS,
)
from elasticzero.ops.cli.k8s.patch_files import read_patches
from elasticzero.ops.kubernetes.extras import parse_resources, parse_volume
from elasticzero.ops.kubernetes.naming import Manifest
from elasticzero.ops.kubernetes.operations import (
    drain_script,
    replace_member_script,
    scale_script,
)
from elasticzero.ops.kubernetes.options import (
    EtcdOptions,
    LocalScript,
    PodOptions,
    RenderOptions,
    check_job_name,
    imported_names,
)
from elasticzero.ops.kubernetes.patches.apply import patched_manifests
from elasticzero.ops.kubernetes.render import render_manifests
from elasticzero.text import print_error, print_result

K8S_COMMANDS = {
    "render": "Prints the manifests of a job.",
    "scale": "Changes the minimum and maximum number of nodes of a job, and its number of pods.",
    "drain": "Has a node leave its job and its machine, which takes no pod until it is uncordoned.",
    "replace-etcd-member": "Puts a new member of etcd in the place of one that lost its volume.",
}


def add_k8s_commands(parser: Parser) -> None:
    """Adds the commands below `k8s`, each with its options and its `run_command`."""
    commands = parser.add_subparsers(
        dest="k8s_command", required=True, metavar="COMMAND", parser_class=Parser
    )
    adders = {
        "render": _add_render,
        "scale": _add_scale,
        "drain": _add_drain,
        "replace-etcd-member": _add_replace_member,
    }
    for name, text in K8S_COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        adders[name](command)


def _add_render(parser: Parser) -> None:
    add_command(parser, RENDER_OPTIONS, required=RENDER_REQUIRED)
    parser.set_defaults(run_command=_render)


def _add_scale(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="The Job has this name.")
    parser.add_argument(
        "nnodes", metavar="MIN:MAX", help="The job is to run on MIN to MAX nodes, one in each pod."
    )
    add_options(parser, CHANGE_OPTIONS)
    parser.set_defaults(run_command=_scale)


def _add_drain(parser: Parser) -> None:
    parser.add_argument("job", metavar="JOB", help="The Job has this name.")
    parser.add_argument(
        "node",
        metavar="NODE",
        help="The node has this name in `elasticzero status`, or its pod this index.",
    )
    add_options(parser, CHANGE_OPTIONS)
    parser.set_defaults(run_command=_drain)


def _add_replace_member(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="The job was rendered with this `--name`.")
    parser.add_argument(
        "index", metavar="INDEX", type=int, help="The pod of the lost member has this index."
    )
    add_options(parser, REPLACE_OPTIONS)
    parser.set_defaults(run_command=_replace_member)


def _render(args: argparse.Namespace) -> int:
    files = rendered_files(args)
    manifests = [manifest for part in files.values() for manifest in part]
    if args.output == "json":
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        print_result(json.dumps(listed, indent=2))
    else:
        print_result(yaml_text(manifests), end="")
    return int(ExitCode.DONE)


def rendered_files(args: argparse.Namespace) -> dict[str, list[Manifest]]:
    """Returns the manifests of `render` by the file of k8s/ that has them.

    Args:
        args: the parsed command line.

    Raises:
        UserError: a value or a patch is invalid, or a file cannot be read.
    """
    patches = read_patches(args.patch or ())
    return patched_manifests(render_manifests(render_options(args)), patches)


def render_options(args: argparse.Namespace) -> RenderOptions:
    """Returns the checked options of `render`.

    Args:
        args: the parsed command line.

    Raises:
        UserError: a value is invalid, or the script cannot be read.
    """
    return RenderOptions(
        name=args.name,
        image=args.image,
        nnodes=parse_nnodes(args.nnodes),
        script=_script(args.script),
        arguments=tuple(args.arguments),
        run=args.run or "",
        restart=args.restart,
        cloud_name=args.cloud,
        spot=args.spot,
        grace_period_s=args.grace_period,
        checkpoints=args.checkpoints,
        checkpoint_size=args.checkpoint_size,
        checkpoint_every=args.checkpoint_every,
        strategy=args.strategy,
        kind=args.kind,
        monitoring=args.monitoring,
        zones=args.zones,
        queue=args.queue or "",
        make_queue=args.make_queue,
        etcd=EtcdOptions(
            endpoints=args.etcd or "",
            members=args.etcd_members,
            storage=args.etcd_storage or "",
            tls=args.etcd_tls,
            backup=args.etcd_backup,
            image=args.etcd_image,
        ),
        pod=PodOptions(
            gpus=args.gpus or 0,
            cpus=args.cpus or "",
            memory=args.memory or "",
            shared_memory=args.shared_memory or "",
            environment=_pairs(args.env or ()),
            secrets=tuple(args.env_from or ()),
            token_secret=args.token_secret or "",
            service_account=args.service_account or "",
            pull_secret=args.pull_secret or "",
            resources=parse_resources(args.resource or ()),
            volumes=tuple(map(parse_volume, args.volume or ())),
            tmp_size=args.tmp_size,
            has_fixed_user=not args.no_fixed_uid,
        ),
        tls=args.tls,
    )


def _pairs(texts: Iterable[str]) -> Mapping[str, str]:
    """Returns the variables of `--env` by name; one without `=` gets an invalid name."""
    return {
        name if equals else f"{name} ": value
        for name, equals, value in (text.partition("=") for text in texts)
    }


def _script(path: str) -> LocalScript | str:
    """Returns the script, or its path in the image."""
    file = Path(path)
    if file.is_absolute():
        return path
    try:
        text = file.read_text()
        names = [name for name in imported_names(text) if _is_module(file.parent, name)]
        if names:
            print_error(
                f"note: {path} imports {', '.join(names)} from beside it, and the manifests have "
                "the script alone: let the image have what it imports"
            )
        return LocalScript(file_name=file.name, text=text)
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text; a Python script is expected") from None
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; a script here, or an absolute path in the image, is "
            "expected"
        ) from None


def _is_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def yaml_text(manifests: Iterable[Manifest]) -> str:
    """Returns manifests as one text in YAML.

    Args:
        manifests: the manifests, in the order in which kubectl applies them.

    Raises:
        UserError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise UserError(
            "YAML needs PyYAML: run pip install 'elasticzero[k8s]', or give --output json, which "
            "kubectl takes too"
        ) from None

    class Dumper(yaml.SafeDumper):
        """Writes a value again where it occurs again, and a text of several lines as lines."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text_node(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, text_node)
    written: str = yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, width=1000)
    return written


def _scale(args: argparse.Namespace) -> int:
    job = check_job_name(args.job, "k8s scale")
    nnodes = parse_nnodes(args.nnodes, "k8s scale")
    return _change(args, scale_script(job, nnodes, args.namespace or ""))


def _drain(args: argparse.Namespace) -> int:
    job = check_job_name(args.job, "k8s drain")
    return _change(args, drain_script(job, args.node, args.namespace or ""))


def _replace_member(args: argparse.Namespace) -> int:
    script = replace_member_script(
        args.name, args.index, args.etcd_members, args.namespace or "", tls=args.etcd_tls
    )
    return _change(args, script)


def _change(args: argparse.Namespace, lines: list[str]) -> int:
    """Prints the commands, and runs them with --apply; the first that fails ends the command."""
    script = "\n".join(lines)
    print_result(script)
    if not args.apply:
        return int(ExitCode.DONE)
    if shutil.which("kubectl") is None:
        raise OperatorError("--apply needs kubectl, which is not on PATH")
    completed = subprocess.run(["sh", "-eu", "-c", script], check=False)
    if completed.returncode != 0:
        raise OperatorError(
            f"kubectl failed with exit code {completed.returncode}: what it printed stands above; "
            "the commands before it have been run"
        )
    return int(ExitCode.DONE)
