"""Tasks: the loss, the metrics, and the metric a best model is chosen by."""
