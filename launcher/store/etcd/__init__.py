"""The coordination store in etcd v3."""
