"""YOLOv5."""
