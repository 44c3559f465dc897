"""Which metrics are better the smaller they are."""


def smaller_is_better(metric: str) -> bool:
    """Whether a smaller value is better: true for losses and errors, by their names.

    >>> smaller_is_better("loss"), smaller_is_better("calibration_error"), smaller_is_better("accuracy")
    (True, True, False)
    """
    return metric.endswith(("loss", "error"))
