"""Loads gRPC and etcd's messages; the one module that reaches into etcd3's internals.

Of the package etcd3 only the serialized descriptors of etcd's messages are used. Its own classes
were generated in 2020: they load on protobuf's pure-Python runtime alone, and only in a process
that has not imported protobuf before. So each generated module is run up to where it hands its
descriptor to protobuf, with a recorder in protobuf's place; the descriptors go into a pool of our
own, and the runtime that this process has makes the classes.

An upgrade must check:
- etcd3: `etcdrpc` has the modules of MODULES, and each still hands its serialized descriptor to
  `FileDescriptor(serialized_pb=...)` or `AddSerializedFile(...)`. The tests of the store fail if
  not.
- protobuf: `DescriptorPool.AddSerializedFile` and `message_factory.GetMessageClass` exist.
- grpc: it reads GRPC_VERBOSITY when it is imported.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from elasticzero.errors import OperatorError

_VERBOSITY = "GRPC_VERBOSITY"
_before = os.environ.get(_VERBOSITY)
# A failed handshake would print a line at each try; our errors say what is to be done about it.
os.environ.setdefault(_VERBOSITY, "NONE")

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

if _before is None:
    del os.environ[_VERBOSITY]  # processes that are started later must not inherit it

__all__ = ["grpc", "load_messages"]

MODULES = ("kv_pb2", "auth_pb2", "rpc_pb2")
"""Generated modules of etcd3; each needs those before it."""


def load_messages() -> Any:
    """Returns a namespace of all messages, and a stub for each service: `KVStub(channel).Range`."""
    pool = descriptor_pool.DescriptorPool()
    namespace: dict[str, Any] = {}
    for name in MODULES:
        serialized = _serialized_descriptor(name)
        described = descriptor_pb2.FileDescriptorProto.FromString(serialized)
        pool.AddSerializedFile(serialized)
        for message in described.message_type:
            kind = pool.FindMessageTypeByName(f"{described.package}.{message.name}")
            namespace[message.name] = _message_class(pool, kind)
        for service in described.service:
            prefix = f"/{described.package}.{service.name}"
            namespace[f"{service.name}Stub"] = partial(_stub, prefix, service.method, namespace)
    return SimpleNamespace(**namespace)


class _DescriptorFound(Exception):
    """Carries a serialized descriptor out of the generated module that has made it."""

    def __init__(self, serialized: bytes) -> None:
        super().__init__()
        self.serialized = serialized


class _Recorder:
    """Stands in for protobuf and its parts, until a descriptor is handed over."""

    def __getattr__(self, name: str) -> _Recorder:
        return self

    def __call__(self, *positional: Any, **named: Any) -> _Recorder:
        serialized = named.get("serialized_pb", positional[0] if positional else None)
        if isinstance(serialized, bytes) and serialized:
            raise _DescriptorFound(serialized)
        return self


def _serialized_descriptor(name: str) -> bytes:
    """Returns the file that a generated module of etcd3 describes, as protobuf serializes it."""
    package = importlib.util.find_spec("etcd3")
    places = package.submodule_search_locations if package is not None else None
    path = Path(places[0] if places else "etcd3") / "etcdrpc" / f"{name}.py"
    try:
        code = SourceFileLoader(name, str(path)).get_code(name)
        assert code is not None
        exec(code, {"__name__": name, "__builtins__": {**vars(builtins), "__import__": _import}})
    except _DescriptorFound as carrier:
        return carrier.serialized
    except OSError as error:
        why = error.strerror
    except (AttributeError, ImportError, NameError, SyntaxError, TypeError, ValueError) as error:
        why = f"it cannot be run ({error!r})"
    else:
        why = "it describes no messages"
    raise OperatorError(
        f"the package etcd3 cannot be used: {path}: {why}; install the release that this version "
        "expects: pip install etcd3==0.12.0"
    )


def _import(name: str, *how: Any) -> Any:
    """Imports for the generated modules: a recorder in place of protobuf, and of one another."""
    ours = name.partition(".")[0] in ("google", "etcd3") or name.endswith("_pb2")
    return _Recorder() if ours else __import__(name, *how)


def _message_class(pool: Any, kind: Any) -> Any:
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(kind)
    return message_factory.MessageFactory(pool).GetPrototype(kind)  # protobuf before 4.22


def _stub(prefix: str, methods: Any, messages: dict[str, Any], channel: Any) -> Any:
    """Returns an object with a service's methods on a channel.

    Args:
        prefix: Path of the service, before the name of a method.
        methods: Descriptors of the service's methods.
        messages: The class of each message, by name.
        channel: The gRPC channel.
    """
    bound_methods = {}
    for method in methods:
        asked = messages[method.input_type.rpartition(".")[2]]
        answered = messages[method.output_type.rpartition(".")[2]]
        kind = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }[method.client_streaming, method.server_streaming]
        bound_methods[method.name] = kind(
            f"{prefix}/{method.name}",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )
    return SimpleNamespace(**bound_methods)
