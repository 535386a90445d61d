"""`elasticzero checkpoint`: look at checkpoints, change their shape, take them elsewhere."""
