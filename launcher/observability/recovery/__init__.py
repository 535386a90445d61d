"""Measures recoveries, and sends a span of each to an OpenTelemetry collector."""
