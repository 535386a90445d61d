"""Computes the Kubernetes manifests and the kubectl commands of a job from its options.

Pure: manifests are plain dicts, commands are lines of a shell script.
"""
