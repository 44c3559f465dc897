"""Aggregates whose server sees sums of the replies only: what clients send as words, and how the words are added."""
