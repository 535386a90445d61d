"""Encrypts what agents send each other, and proves that both ends are of one job."""
