"""Hands what scripts log to TensorBoard, Weights & Biases and MLflow (`--log-to`)."""
