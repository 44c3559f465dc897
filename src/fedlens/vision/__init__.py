"""Geometry of images, masks and boxes, which data, models and tasks share."""
