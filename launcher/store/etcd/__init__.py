"""Implements the coordination store with etcd v3."""
