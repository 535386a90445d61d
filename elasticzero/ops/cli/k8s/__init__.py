"""Holds the commands of `elasticzero k8s`: manifests, and operations on jobs by kubectl."""
