"""Writes a report on a job, from a directory of logs or from the logs that its agents serve.

Each agent's log has what concerns the whole job; the starts, failures and saves of a node's own
workers are in its own. So all agents are asked, and the page says which did not answer.
"""

from __future__ import annotations

import http.client
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from elasticzero.concurrency import run_parallel
from elasticzero.errors import ExitCode, OperatorError, UserError
from elasticzero.launcher.cli.control import open_job_store, read_job
from elasticzero.launcher.cli.job_access import OperatorCredentials, access_for_operator
from elasticzero.launcher.http.access import AgentAccess
from elasticzero.launcher.http.agent_client import request_agent
from elasticzero.launcher.http.server import LEFT_OUT_HEADER
from elasticzero.launcher.observability.event_log import EVENTS_FILE, KEPT_BYTES
from elasticzero.launcher.protocol.documents import Member
from elasticzero.launcher.store.etcd.access import Access
from elasticzero.launcher.store.job_token import HOW
from elasticzero.ops.report.html.page import report_page
from elasticzero.ops.report.html.sentences import headline
from elasticzero.ops.report.log_files import LogFile, find_logs, read_run
from elasticzero.ops.report.model import RunSummary
from elasticzero.text import list_text, print_foreign, print_result, size_text

FETCHED_BYTES = 256 << 20
"""Bytes of logs that are fetched at most: half of them of the leader, the rest of all others."""
TIMEOUT_S = 10.0
"""Seconds for which an agent may send nothing."""
PIECE_BYTES = 1 << 20
THREADS = 16
NAMES_SHOWN = 8


def report_on_logs(directory: str, name: str | None, output: str) -> ExitCode:
    """Writes the report on the job whose logs are in a directory.

    Args:
        directory: the directory of a node's logs, of a job's, or of several jobs'.
        name: the job to choose of several; None: there is only one.
        output: path of the page; `-` writes it to stdout.

    Raises:
        UserError: there are no such logs, or the file cannot be written.
    """
    _check_output(output)
    job, files = find_logs(Path(directory), name)
    return _write(read_run(job, files), output)


def report_on_job(
    name: str,
    endpoints: Sequence[str],
    access: Access,
    operator: OperatorCredentials,
    output: str,
) -> ExitCode:
    """Writes the report on a running job, from the logs that its agents serve.

    Args:
        name: the job's name.
        endpoints: HOST:PORT or URL of each member of etcd.
        access: certificates, user and password for etcd.
        operator: what the operator has given to read the job with.
        output: path of the page; `-` writes it to stdout.

    Raises:
        UserError: etcd has no such job, or the job is over.
        OperatorError: no agent answers.
    """
    _check_output(output)
    with open_job_store(name, endpoints, access) as store:
        job = read_job(store, name)
        agents = access_for_operator(store, name, operator).agents
    if job.done is not None:
        raise UserError(
            f"job {name!r} is over ({job.done.reason}), and its agents serve no logs any more; "
            "give the directory of its logs: elasticzero report LOG_DIR"
        )
    if agents is None:
        raise UserError(f"the logs of the agents need the job's token: give {HOW}")
    placed = [member.node for member in job.placed]
    order = {node: place for place, node in enumerate(placed)}
    members = sorted(job.members.values(), key=lambda m: order.get(m.node, len(order)))
    with tempfile.TemporaryDirectory(prefix="elasticzero-report-") as folder:
        files, silent = _fetch(members, agents, Path(folder))
        if not files:
            raise OperatorError(
                f"none of the agents of job {name!r} has sent its log: "
                f"{list_text(silent, NAMES_SHOWN)}; check that this machine reaches their HTTP port"
            )
        if silent:
            text = f"note: no log of {list_text(silent, NAMES_SHOWN)}"
            print_foreign(text)
        return _write(read_run(name, files, running=True), output)


def _fetch(
    members: Sequence[Member], agents: AgentAccess, folder: Path
) -> tuple[list[LogFile], list[str]]:
    """Fetches the logs of agents, all at a time.

    Args:
        members: the agents, the leader first.
        agents: how the agents are reached.
        folder: folder below which the logs are written.

    Returns:
        The logs that agents have sent, and a text for each agent that has sent none.
    """

    def fetch(place: tuple[int, Member]) -> LogFile | str:
        index, member = place
        share = FETCHED_BYTES // 2
        most_bytes = share if index == 0 else share // (len(members) - 1)
        path = folder / str(index) / EVENTS_FILE
        path.parent.mkdir()
        try:
            cut_bytes = _fetch_log(member, agents, path, most_bytes)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"{member.node} at {member.address} ({str(error) or type(error).__name__})"
        return LogFile(member.node, path, cut_bytes)

    answers = run_parallel(list(enumerate(members)), fetch, threads=THREADS)
    files = [one for one in answers if isinstance(one, LogFile)]
    return files, [one for one in answers if isinstance(one, str)]


def _fetch_log(member: Member, agents: AgentAccess, path: Path, most_bytes: int) -> int:
    """Writes the newest part of an agent's log to a file.

    Args:
        member: the agent's registration, which has its address.
        agents: how the agents are reached.
        path: the file, which is written anew.
        most_bytes: bytes of the log that the agent is asked for at most.

    Returns:
        The number of older bytes that the agent has left out, as its answer says.

    Raises:
        ValueError: the agent refuses the request.
    """
    connection = agents.connection(member, TIMEOUT_S)
    with closing(connection), path.open("wb") as file:
        answer = request_agent(connection, member, agents.token, f"/events?most={most_bytes}")
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"status {answer.status}")
        left = most_bytes + KEPT_BYTES
        while left > 0 and (piece := answer.read(min(left, PIECE_BYTES))):
            file.write(piece)
            left -= len(piece)
        left_out = answer.getheader(LEFT_OUT_HEADER, "")
        return int(left_out) if left_out.isdecimal() else 0


def _check_output(output: str) -> None:
    """Raises `UserError` if the file cannot be written, before logs are read for minutes."""
    folder = Path(output).absolute().parent
    if output != "-" and (not os.access(folder, os.W_OK) or Path(output).is_dir()):
        raise UserError(f"--output {output}: a file in a directory that can be written is expected")


def _write(summary: RunSummary, output: str) -> ExitCode:
    page = report_page(summary, time.time())
    if output == "-":
        print_result(page, end="")
        return ExitCode.DONE
    data = page.encode("utf-8")
    try:
        Path(output).write_bytes(data)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    print_result(f"{headline(summary)}\nThe report is in {output} ({size_text(len(data))}).")
    return ExitCode.DONE
