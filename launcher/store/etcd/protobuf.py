"""etcd's messages and services, as the etcd3 package describes them.

etcd3's own classes were generated in 2020. They load on protobuf's pure-Python runtime alone, in a
process that has not imported protobuf before; a message costs a tenth of a millisecond there,
which was a third of what an agent does to join. So the descriptions are read out of etcd3's files,
which are not imported, and whatever runtime this process has makes the classes.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from elasticzero.errors import OperatorError

FILES = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")
"""Each needs those before it."""
_DESCRIPTION = re.compile(r"^ *serialized_pb=_b\((.*)\),?$", re.MULTILINE)


def load() -> Any:
    """A namespace of all messages, and of a stub for each service: `KVStub(channel).Range`."""
    pool = descriptor_pool.DescriptorPool()
    found: dict[str, Any] = {}
    for name in FILES:
        serialized = _description(name)
        described = descriptor_pb2.FileDescriptorProto.FromString(serialized)
        pool.AddSerializedFile(serialized)
        for message in described.message_type:
            kind = pool.FindMessageTypeByName(f"{described.package}.{message.name}")
            found[message.name] = _message_class(pool, kind)
        for service in described.service:
            prefix = f"/{described.package}.{service.name}"
            found[f"{service.name}Stub"] = partial(_stub, prefix, service.method, found)
    return SimpleNamespace(**found)


def _description(name: str) -> bytes:
    """What a file of etcd3 describes, as protobuf has it."""
    package = importlib.util.find_spec("etcd3")
    places = package.submodule_search_locations if package is not None else None
    path = Path(places[0] if places else "etcd3") / "etcdrpc" / name
    try:
        text = _DESCRIPTION.search(path.read_text())
    except OSError as error:
        text, why = None, error.strerror
    else:
        why = "it describes no messages"
    if text is None:
        raise OperatorError(
            f"the package etcd3 cannot be used: {path}: {why}; install the one that this was made "
            "for: pip install etcd3==0.12.0"
        )
    return str(ast.literal_eval(text[1])).encode("latin1")


def _message_class(pool: Any, kind: Any) -> Any:
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(kind)
    return message_factory.MessageFactory(pool).GetPrototype(kind)  # protobuf before 4.22


def _stub(prefix: str, methods: Any, messages: dict[str, Any], channel: Any) -> Any:
    """A service's methods on a channel."""
    found = {}
    for method in methods:
        asked = messages[method.input_type.rpartition(".")[2]]
        answered = messages[method.output_type.rpartition(".")[2]]
        kind = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }[method.client_streaming, method.server_streaming]
        found[method.name] = kind(
            f"{prefix}/{method.name}",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )
    return SimpleNamespace(**found)
