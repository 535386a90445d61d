"""What the pages of docs/reference say beside what the code says."""

GENERATED = "<!-- `make reference` writes this page from the code; do not edit it. -->"

NAMES = ("ddp", "etcd", "etcd's", "gloo", "torchrun", "xxh3_128")
"""Words that begin with a small letter at the front of a sentence too."""

CONFIGURATION = """\
# Configuration

This page lists every option of every command, with its default and its environment variable.
`elasticzero help COMMAND` shows the same with examples.

A flag goes before the environment, the environment before the file of `--config`, and the file
before the default. In the file a key is the option's name without the dashes, as
[the page on the command line](../command-line.md#options-in-a-file) shows. An empty variable counts
as unset. In a path `~`, `$NAME` and `${NAME}` are replaced, wherever the value comes from; a
variable that is not set is an error. The variable of a switch takes `1`, `true` or `yes`, and `0`,
`false` or `no`. The words of a flag may be joined by `_` as well as by `-`, but not in
`elasticzero checkpoint`.

The commands write errors to stderr and end with one of the [exit codes](exit-codes.md)."""

SCRIPT = """\
The options come first, then the training script, then the script's own arguments."""

TORCHRUN = """\
`elasticzero run` takes the options of torchrun as well, also by their first letters, and reads
torchrun's variables `PET_…`. [torchrun](../torchrun.md) says what is different."""

TORCHRUN_IDLE = """\
These options are accepted, so that scripts with them run unchanged. They change nothing."""

CHECKPOINT_COMMANDS = """\
These commands need no job and no etcd. A path may be a directory, or a URL such as
`s3://bucket/run`. [Checkpoints](../checkpoints.md) has examples."""

K8S_COMMANDS = """\
The commands that change a job print
lines for a shell, and run them with `--apply`. [Kubernetes](../kubernetes.md) has examples."""

RENDERED_SCRIPT = """\
The options come first, then the training script, then the script's own arguments. The script is a
file here, which goes into a ConfigMap, or an absolute path in the image."""

VARIABLES = """\
## Variables without an option"""

VARIABLE_ROWS = (
    (
        "`ELASTICZERO_ETCD_PASSWORD`",
        "Password of the user of etcd, where `--etcd-password-file` is not given. No worker "
        "inherits it.",
    ),
    (
        "`ELASTICZERO_TOKEN`",
        "Token of the job, where `--token-file` is not given. No worker inherits it.",
    ),
    (
        "`ELASTICZERO_AWS_METADATA_URL`<br>`ELASTICZERO_GCP_METADATA_URL`<br>"
        "`ELASTICZERO_AZURE_METADATA_URL`",
        "Address of the cloud's metadata server, where it is not the usual one.",
    ),
)

VARIABLES_ALONE = """\
A script that runs without an agent (`python train.py`) reads the variables of the options of
training, of checkpoints and of snapshots in memory. A wrong value ends it with the error that
`elasticzero run` has. One process has no snapshots and no metrics, has nothing to divide, mirror or
verify, and ends at once if its last save fails. So `--shard`, `--redundancy`, `--verify-replicas`,
`--flops-per-sample`, `--peak-flops`, `--save-timeout`, `--snapshot-every` and `--snapshot-dir` have
no effect there."""

SESSION = """\
# The session's API

A training script imports `elasticzero` and hands its training function to `elasticzero.run`. The
function gets a `Session` and calls its methods in this order: `prepare`, `track` for anything else
that has state, `restore`, and then a loop over `batches` with `backward` and `step` for each
micro-batch. [Training](../training.md) shows whole scripts."""

METHODS = """\
Every method that takes part in training is called on all ranks, in the same order. Ranks that call
different methods, or give different arguments, get a `UserError` that names both."""

SESSION_ORDER = (
    "prepare",
    "track",
    "restore",
    "batches",
    "backward",
    "step",
    "log",
    "evaluate",
    "busy",
    "state_dict",
    "stop",
)
"""In the order in which a script calls them."""

SESSION_ATTRIBUTES = (("`device`", "`torch.device`", "Where batches arrive and the model is."),)

STREAM = """\
`elasticzero.Stream` makes a dataset for `session.batches` of samples that have no index.
[Data](../data.md) says what holds for each kind of data."""

BY_HAND = """\
`elasticzero.checkpoint` saves and loads without an agent, in any script.
[Checkpoints](../checkpoints.md) has examples. A tensor's name in the checkpoint is the path to it,
its keys joined by `/`."""

ERRORS = """\
Every error that this project raises on purpose is an `elasticzero.ElasticZeroError`.
[Exit codes](exit-codes.md) lists its kinds."""

METRICS = """\
# Metrics

Each agent serves the metrics of its node for Prometheus at `/metrics`, on the port of
`--http-port`; the agent that leads the job serves those of the whole job at `/metrics/job`.
[Monitoring](../monitoring.md) says how to scrape both, and has alerts and a dashboard.

A counter ends in `_total`. A histogram `NAME` gives the series `NAME_bucket`, `NAME_sum` and
`NAME_count`.

## Metrics of a node

`local_rank` is the place of a worker on its node, from 0; `reason` and `cause` are the kind of the
event that ended a generation, where `cause="start"` is the first generation that this node was in;
`purpose` says what a copy of the state is for; `operation` and `code` are those of a request to
etcd. `phase` is a part of a recovery, in this order: `detect`, `regroup`, `start`, `connect`,
`build`, `restore`, `first_step`. `gpu` is the number of a GPU in NVML; these metrics need the
package `nvidia-ml-py` (`pip install 'elasticzero[gpu]'`)."""

JOB_METRICS = """\
## Metrics of a job

The agent that leads serves them; another one answers `/metrics/job` with nothing. What is not known
has no series. `job_id` is the job's name. Counters begin when the leading agent joined the job.
`time_class` is a class of the job's time, as in [operating](../operating.md#where-the-time-goes);
`source` is `aws`, `gcp`, `azure` or `signal`."""

EVENTS = """\
# Events

Each agent writes what happens to the file `events.jsonl` in its directory of logs,
`LOG_DIR/JOB/NODE`, one JSON object a line. Every object has `event`, its name, and `time`, the
machine's wall clock in seconds since 1970; compare times of one machine only. The fields below come
besides. Later versions may add events and fields, so a reader must pass over those that it does not
know."""

EXIT_CODES = """\
# Exit codes

`elasticzero run` ends with one of these codes; the other commands use those that apply. Only 0 says
that the job is done. What started the command (Kubernetes, systemd, Slurm) may start it again after
69, 71 and 75; after 64 and 70 that is useless, and after 76 it needs the options of the new run."""

ERROR_CLASSES = """\
## Errors

An error that ends a command decides its exit code. A script can catch those that `elasticzero`
exports: `ElasticZeroError`, `UserError`, `OperatorError`, `RetryError`, `StorageError`,
`CheckpointDamaged` and `CheckpointMismatch`.

Where agents run the job, an error in a worker does not decide it. A job that fails ends with 64
where the same script and input would fail in the same way (`UserError` and its kinds, `NotFinite`,
`ImportError`, `SyntaxError`), and with 70 for any other error."""

FORMAT = """\
# Checkpoint format

A checkpoint directory has a directory for each step, and a step has these files:

```text
checkpoints/
  step-000000000100/
    manifest.json                                     what the step holds, and where
    rank-00000-of-00002-g000003-5d41402abc4b2a76.safetensors       rank 0's part of the tensors
    rank-00000-of-00002-g000003-5d41402abc4b2a76.safetensors.sums  its checksums
    rank-00001-of-00002-g000003-5d41402abc4b2a76.safetensors
    rank-00001-of-00002-g000003-5d41402abc4b2a76.safetensors.sums
  tags/
    best.json                                         names a step by a tag
  .owner/
    job.json                                          names the job that writes here
```

- The names of files have the rank, the number of ranks and the save's token, so files of different
  saves never mix.
- A step exists exactly if its `manifest.json` does. The manifest is written last, when every other
  file is whole and durable. It is created exclusively; only the manifest of a damaged step is
  replaced, and only if it has the bytes that were read.
- Files whose names begin with `.` and end in `.partial` belong to a save that runs, or that was
  killed. Files of ranks without a manifest are not a checkpoint; a later save removes them.
- Rank files are [safetensors](https://github.com/huggingface/safetensors) files, so any program
  that reads those can read them. Nothing is pickled.

## Manifest

`manifest.json` is one JSON object on one line. Its last key, `digest`, is the xxh3_128 of all bytes
before the comma in front of that key, in hexadecimal. A reader compares it before it parses
anything."""

FORMAT_CLASSES = {
    "Manifest": "These are its other keys:",
    "Layout": "### `layout`",
    "TensorSpec": "### Values of `tensors`",
    "Group": "### Items of `groups`",
    "ShardFile": "### Items of `files`",
}
"""Dataclasses of the manifest, and what stands above their tables."""

PLURALS = {"str": "strings", "int": "integers", "ShardFile": "objects", "Group": "objects"}

FORMAT_FIELDS: dict[str, dict[str, str]] = {
    "Manifest": {
        "version": "Version of the format, now 1. A reader refuses a later one.",
        "step": "Optimizer step of the state.",
        "generation": "Generation that saved it; 0 for a save by hand.",
        "token": "Identifier of the save; it is part of every file's name.",
        "strategy": "`ddp`, `zero1`, `zero2` or `zero3`; `saved` for a save by hand.",
        "layout": "Which rank holds which part of which tensor.",
        "files": "The files of the ranks, by rank.",
        "state": "What is not a tensor; see below.",
        "run": "Number of the job's run that saved it; left out where it is 1. Each `--restart` "
        "begins another.",
        "tags": "Tags under which the script has asked for the step; left out where there are "
        "none.",
    },
    "Layout": {
        "world_size": "Number of ranks that wrote the step.",
        "tensors": "Type and shape of each tensor, by its name.",
        "groups": "Tensors that are divided together; every tensor is in exactly one group.",
    },
    "TensorSpec": {
        "dtype": 'Type of the elements as safetensors spells it: "F32", "BF16", "I64", "BOOL", …; '
        'an element of "F4" is a pair of values',
        "shape": "Size of each dimension.",
    },
    "Group": {
        "rule": "How the tensors are divided among the ranks; see below.",
        "tensors": "Names of the tensors, in the order in which they are laid out.",
        "ranks": "With the rule `whole`, the rank of each tensor; otherwise empty.",
    },
    "ShardFile": {
        "name": "Name of the safetensors file.",
        "bytes": "Its size.",
        "digest": "xxh3_128 of its checksum file, in hexadecimal.",
    },
}
"""What the page says of the manifest's keys."""

GROUP_RULES = """\
A layout says by rule, and not by a table, which elements each rank holds. Tensors count as
flattened in row-major order."""

AFTER_FORMAT = """\
## Checksum files

A file `….sums` is binary and little-endian. It has a header of 40 bytes: the magic `EZSUMS\\r\\n`
(8 bytes), the version (uint32), the block size (uint32), the size of the safetensors file (uint64)
and the digest of the layout (16 bytes). Then comes one xxh3_64 (8 bytes) for each block of the
safetensors file, its header included; the last block may be shorter. The manifest has the digest of
this file, so every byte of a checkpoint is covered.

## State

The manifest's `state` is what is not a tensor: learning rates, counters, random states, the place
in the data. For a save by hand its key `$tree` has the nesting of what was saved, where that is
more than tensors.

## Tags

`tags/best.json` names the step of the tag `best`. It is one JSON object with the keys `version`
(now 1), `tag`, `step` and `directory`, the name of the step's directory. It is written after the
step's manifest, in one change. The directory `tags` exists once a tag does.

## Owner

`.owner/job.json` names the job that writes into the directory. It is one JSON object with the keys
`version` (now 1), `job`, `run`, `cluster` (the id of the job's etcd cluster), `etcd` (its
endpoints), `network` (the machine and network that those are seen from), `since_s` (the time, by
the storage's clock, since when the job has the directory), `every_s` (the seconds between its last
two commits), `renewals`, `unswept` (true until the files of the former owner's saves that lack a
manifest are removed) and `ended`. Each commit renews it. A checkpoint directory needs none."""

RULES = """\
# Numbered rules

The rules of the protocol stand in the docstrings of the modules that carry them out. Code, tests
and documents refer to them by letter and number. This page is an index: it has the first
sentence of each rule, and the module's docstring has the rest."""

FILES = """\
# Files

This page lists every source file of the product by package, with the first sentence of its
docstring. [The architecture](../architecture.md) says how the packages work together. What is
below `elasticzero/ops` and `elasticzero/integrations` is no part of what recovers a job."""
