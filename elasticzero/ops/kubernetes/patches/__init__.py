"""Applies patches of the user to the manifests of a render, and checks them. Pure."""
