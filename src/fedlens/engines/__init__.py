"""Engines: anything that answers asks. They are siblings and know no algorithm."""
