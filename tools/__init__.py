"""Writes the generated pages, tables and figures of the documentation; tests/unit/house finds those out of date."""
