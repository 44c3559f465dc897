"""What federation costs: the answer, its sentences and its page."""
