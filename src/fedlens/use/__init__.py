"""What a finished run is used for: its results, predictions, exports."""
